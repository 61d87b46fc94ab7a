"""What the rewards of the groups show: whether there is anything to learn from."""

from collections.abc import Iterator, Sequence
from statistics import correlation, fmean

from insitu.doctor.findings import Evidence, Finding, Severity, will_learn
from insitu.doctor.plan import Plan
from insitu.schemas.episodes import DropReason
from insitu.schemas.finetuning import Trajectory
from insitu.training.metrics import likely_causes, share_of, trained_calls, why_no_pairs, without_variance
from insitu.training.report import counts

_FEW = 0.25
"""Share of the groups with variance below which most of a run's time is wasted."""
_RELATED = 0.95
"""Correlation of reward and length within the groups from which there is hardly anything else to learn."""
_LENGTHS = 5
"""Different lengths and rewards that a correlation needs."""
_AT_THE_END = 0.9
"""Share of the episodes with the highest or lowest reward from which that is why few groups have variance."""


def about_groups(plan: Plan, evidence: Evidence) -> Iterator[Finding]:
    """Groups without variance, and why; what else was dropped from them."""
    if evidence.episodes and all(episode.reason is not None for episode in evidence.episodes):
        return  # their failures say why
    trains, findings = any(evidence.selected.trajectories), []
    if not evidence.makes_pairs:
        findings = [*_rewards(plan, evidence)]
    elif not trains:
        for cause in why_no_pairs(evidence.selected.dropped):
            findings.append(Finding(cause.code, Severity.STOPS_LEARNING, cause.what, plan.builder, cause.change))
    yield from findings
    if any(evidence.groups) and not trains and will_learn(findings):
        what = f"nothing that was played would be trained; dropped: {counts(evidence.selected.dropped)}"
        change = "see what the reasons mean; min_reward and the like may be too strict for this model"
        yield Finding("nothing_selected", Severity.STOPS_LEARNING, what, plan.trainer, change)


def _rewards(plan: Plan, evidence: Evidence) -> Iterator[Finding]:
    groups = [group for group in evidence.groups if len(group) > 1]
    alike = without_variance(evidence.collection, evidence.selected.drop_reasons)
    if groups and len(alike) == len(groups):
        temperature, scores = plan.llm("temperature"), f"{plan.evaluator}, {plan.dataset}"
        places = {"greedy_sampling": temperature, "same_answers": temperature, "cut_off": plan.llm("max_tokens")}
        places |= {"constant_reward": plan.evaluator, "same_reward_in_groups": scores}
        causes = likely_causes(alike)
        for cause in causes:
            follows = cause.code == "constant_reward" and causes[0].code in ("greedy_sampling", "same_answers")
            severity = Severity.NOTE if follows else Severity.STOPS_LEARNING
            yield Finding(cause.code, severity, cause.what, places[cause.code], cause.change)
    elif groups and evidence.compares_groups:
        if len(groups) - len(alike) < _FEW * len(groups):
            yield _few_with_variance(plan, groups, len(groups) - len(alike))
        else:
            yield from _small_differences(plan, groups)
            yield from _length_alone(plan, groups)
    if missing := evidence.selected.dropped.get(DropReason.NO_STEP_REWARDS):
        total = sum(map(len, evidence.groups))
        severity = Severity.STOPS_LEARNING if missing == total else Severity.HARMS
        what = f"{share_of(missing, total, 'episodes')} have no step reward for each trained call"
        change = "report step rewards with Context.get().reward(...), or set credit: episode"
        yield Finding("no_step_rewards", severity, what, f"{plan.trainer}.credit", change)


def _few_with_variance(plan: Plan, groups: Sequence[Sequence[Trajectory]], varied: int) -> Finding:
    rewards = [t.reward for group in groups for t in group]
    what = f"{varied} of {len(groups)} groups have variance; the others teach nothing"
    for code, end, kind in (("reward_ceiling", max(rewards), "highest"), ("reward_floor", min(rewards), "lowest")):
        if (count := rewards.count(end)) >= _AT_THE_END * len(rewards):
            easy = "harder" if code == "reward_ceiling" else "easier"
            what += f", as {share_of(count, len(rewards), 'episodes')} have the {kind} reward, {end:g}"
            change = f"use {easy} rows, or a finer score"
            return Finding(code, Severity.HARMS, what, f"{plan.dataset}, {plan.evaluator}", change)
    change = "use rows of medium difficulty, a finer score, a higher temperature, or more generations"
    return Finding("little_variance", Severity.HARMS, what, f"{plan.dataset}, {plan.evaluator}", change)


def _length_alone(plan: Plan, groups: Sequence[Sequence[Trajectory]]) -> Iterator[Finding]:
    """A reward that follows the length of the answers."""
    rewards, lengths = [], []
    for group in groups:
        tokens = [sum(len(call.token_ids or ()) for call in trained_calls([t])) for t in group]
        lengths += [each - fmean(tokens) for each in tokens]
        rewards += [t.reward - fmean(other.reward for other in group) for t in group]
    if len({*lengths}) < _LENGTHS or len({*rewards}) < _LENGTHS:
        return
    related = correlation(lengths, rewards)
    if abs(related) >= _RELATED:
        way = "longer" if related > 0 else "shorter"
        what = f"in the groups {way} answers score higher (correlation {related:.2f}): training teaches length first"
        change = "see whether the score means to; if not, judge the content, or subtract a term for the length"
        yield Finding("reward_follows_length", Severity.NOTE, what, plan.evaluator, change)


def _small_differences(plan: Plan, groups: Sequence[Sequence[Trajectory]]) -> Iterator[Finding]:
    """Groups that the curriculum leaves out although their rewards differ."""
    if not plan.curriculum.enabled:
        return
    ranges = [max(rewards) - min(rewards) for group in groups if (rewards := [t.reward for t in group])]
    small = [each for each in ranges if 0 < round(each, 9) < plan.curriculum.min_reward_diff]
    if 2 * len(small) >= len(groups):
        share, limit = share_of(len(small), len(groups), "groups"), plan.curriculum.min_reward_diff
        what = f"the rewards of {share} differ by at most {max(small):g}, and the curriculum leaves out groups below"
        severity = Severity.STOPS_LEARNING if len(small) == len(groups) else Severity.HARMS
        where, change = "finetuning.curriculum_learning.min_reward_diff", f"lower it below {min(small):.2g}"
        yield Finding("small_reward_differences", severity, f"{what} {limit:g}", where, change)

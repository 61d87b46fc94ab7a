"""What was played shows: failures, unrecorded calls, lengths, scores, variance, and conversations cut into rows."""

import re
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from insitu.advantages.estimator import rows_of
from insitu.collect.conversations import same_message
from insitu.doctor.findings import Evidence, Finding, Severity, is_random, severity_of, will_learn
from insitu.doctor.plan import Plan, about_rows, about_settings
from insitu.formats.registry import format_of
from insitu.schemas.episodes import DropReason, Episode, ModelCall
from insitu.schemas.finetuning import Trajectory
from insitu.training.jobs import AGAINST_STALE_GAP, STALE_GAP
from insitu.training.metrics import cut_off, likely_causes, missing_step_rewards, one_answer, share_of, without_variance
from insitu.training.report import counts
from insitu.wire.addresses import is_same_server

Decoder = Callable[[Sequence[int]], str]
_SHOWN = 5
"""Tokens that are shown from the first one that differs."""
_FEW = 0.25
"""Share of the groups with variance below which most of a run's time is wasted."""
_AT_THE_END = 0.9
"""Share of the episodes with the highest or lowest reward from which that is why few groups have variance."""
_FAR = 1.0
"""KL divergence in nats per token from which one job has made another model of it; ten times that wrecks it."""
_TOO_LONG = re.compile(r"context_length_exceeded|together may have \d+|maximum context length")
_NEARLY = 0.9
_CHANGES: dict[str, tuple[str, str]] = {
    DropReason.WORKFLOW_ERROR: ("workflow", "correct the agent; `insitu run FILE --input ...` runs it once"),
    DropReason.TIMEOUT: ("eval.general.episode_timeout", "raise it, or make the agent faster"),
    DropReason.BACKEND_ERROR: (
        "{llm}",
        "see why the model's server fails; raise eval.general.retries if it is temporary",
    ),
    DropReason.CAPTURE_ERROR: ("{llm}", "use an llm of _type: policy, whose server returns token ids and logprobs"),
    DropReason.EVALUATOR_ERROR: ("{plan.evaluator}", "correct the evaluator: it must score every answer of the agent"),
    "no_output": ("workflow", "the agent returned None: is a `return` missing?"),
    DropReason.NO_SCORE: ("{plan.evaluator}", "return a number for every answer, 0 for a useless one"),
    DropReason.NAN_SCORE: ("{plan.evaluator}", "return a finite number for every answer"),
    DropReason.TEACHER_ERROR: ("{plan.trainer}.teacher", "see why it does not score every sampled token"),
    DropReason.NO_TEACHER_CONTEXT: ("{plan.trainer}.teacher.context", "leave out what rows or the evaluator lack"),
    DropReason.NO_CALLS: (
        "workflow",
        "let the agent call the model of its llm: builder.get_llm, or the parameter model",
    ),
    DropReason.NO_TARGET_CALLS: (
        "finetuning.target_functions ({functions})",
        "name functions that call the trained llm, or <workflow> for all calls",
    ),
    "prompt_too_long": ("{plan.adapter}.model", "shorten the prompts, or train a model with a longer context"),
    "no_token_ids": ("{llm}", "use _type: policy, or a server that returns token ids and logprobs"),
}
"""Where to look, and what to change, by the reason of a failed episode."""


def judge(plan: Plan, evidence: Evidence, decode: Decoder | None = None) -> Iterator[Finding]:
    """All findings about a run but those about its disk."""
    calls = [*about_calls(plan, evidence)]
    yield from about_settings(plan)
    yield from about_rows(plan, random_environment=is_random(evidence.groups))
    yield from calls
    yield from about_failures(plan, evidence, calls)
    groups = [*about_groups(plan, evidence)]
    yield from groups
    codes = {finding.code for finding in groups}
    yield from (finding for finding in about_lengths(plan, evidence) if finding.code not in codes)
    yield from about_scores(plan, evidence)
    yield from about_tool_calls(plan, evidence)
    yield from about_prefixes(plan, evidence, decode)
    yield from about_job(plan, evidence)
    if evidence.ended_early:
        ended = len(evidence.episodes) or sum(map(len, evidence.groups))
        what = f"the time was over before all episodes had ended: {ended} did"
        severity = Severity.NOTE if ended else Severity.STOPS_LEARNING
        if not ended and evidence.first is not None:
            severity = Severity.HARMS  # nothing is known of the rewards
            what += f", but a row alone, before them, in {evidence.first:.3g} s: nothing hangs, and nothing is judged"
        where, change = "eval.general.episode_timeout", "raise --seconds"
        if not plan.is_limited:
            where = plan.llm("max_tokens")
            change = "set it, as answers have no limit but the context; or raise --seconds"
        elif not ended and evidence.first is None:
            change += ", or set an episode_timeout if the agent hangs"
        yield Finding("time_over", severity, what, where, change)


def about_job(plan: Plan, evidence: Evidence) -> Iterator[Finding]:
    """A training job that fails, or after which the model is another one."""
    if evidence.job_problem is not None:
        change = "see the message; if the loss or a gradient is not finite, lower learning_rate"
        where = f"{plan.adapter}.training"
        yield Finding("job_failed", Severity.STOPS_LEARNING, evidence.job_problem, where, change)
    if evidence.job_kl is not None and evidence.job_kl > _FAR:
        severity = Severity.STOPS_LEARNING if evidence.job_kl > 10 * _FAR else Severity.HARMS
        what = f"the first training job moved the model far from what it was: KL {evidence.job_kl:.3g} nats per token"
        where = f"{plan.adapter}.training.learning_rate"
        yield Finding("moved_far", severity, what, where, "lower it to a tenth; below 0.1 nats per token is usual")
    if plan.staleness and evidence.job_gap is not None and evidence.job_gap > STALE_GAP:
        what = (
            f"the first training job moved log-probabilities by {evidence.job_gap:.2g} nats per token, above "
            f"{STALE_GAP:g}, but staleness is {plan.staleness}: runs learn less from episodes of the weights before it"
        )
        yield Finding("stale_gap", Severity.HARMS, what, f"{plan.trainer}.staleness", AGAINST_STALE_GAP)


def about_calls(plan: Plan, evidence: Evidence) -> Iterator[Finding]:
    """Calls that go to another model than the trained one, or that are not recorded."""
    served, episodes = evidence.served, evidence.episodes
    calling = [episode for episode in episodes if episode.calls]
    if served is not None and calling:
        requested = {url for episode in calling for url in episode.requested}
        if requested and not any(is_same_server(url, served.base_url) for url in requested):
            versions = {call.policy_version for episode in calling for call in episode.calls}
            is_other = served.version is not None and versions == {None}  # else it may have two names
            severity = Severity.STOPS_LEARNING if is_other else Severity.HARMS
            who, others = share_of(len(calling), len(episodes), "episodes"), ", ".join(sorted(requested))
            what = f"the model that is trained is served at {served.base_url}, but {who} called {others}"
            change = "use _type: policy, which is the model under training wherever it is served"
            yield Finding("other_server", severity, what, plan.llm("base_url"), change)
            return
    if evidence.sampled_problem is not None:
        what, change = evidence.sampled_problem, "use an llm of _type: policy, and let nothing else train the backend"
        yield Finding("other_weights", Severity.STOPS_LEARNING, what, plan.llm("model_name"), change)
    severity = Severity.HARMS if calling else Severity.STOPS_LEARNING
    if stray := evidence.stray_completions:
        what = f"{stray} completions were requested outside every episode: they are not recorded and not trained"
        change = "let each thread or task of the agent enter the episode that it works for with Context.activate()"
        yield Finding("stray_calls", severity, what, "workflow", change)


def about_failures(plan: Plan, evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Finding]:
    """Episodes that cannot be trained, by reason, unless the `findings` about their calls explain them."""
    episodes, explained = evidence.episodes, {finding.code for finding in findings}
    by_reason: dict[str, list[Episode]] = {}
    for episode in episodes:
        if episode.reason not in (None, DropReason.NO_PAIR):  # with which nothing is wrong
            by_reason.setdefault(_code(episode), []).append(episode)
    for code, failed in by_reason.items():
        if code == DropReason.NO_CALLS and "stray_calls" in explained:
            continue
        if "other_server" in explained and code in ("no_token_ids", DropReason.CAPTURE_ERROR):
            continue
        where, change = _CHANGES.get(code, ("workflow", "see the first error"))
        functions = ", ".join(plan.target_functions)
        where = where.format(plan=plan, llm=plan.llm("_type"), functions=functions)
        error = next((episode.error for episode in failed if episode.error), None)
        what = f"{share_of(len(failed), len(episodes), 'episodes')} failed as {code}" + (f": {error}" if error else "")
        severity = severity_of(len(failed), len(episodes)) if evidence.has_groups else Severity.STOPS_LEARNING
        yield Finding(code, severity, what, where, change)


def _code(episode: Episode) -> str:
    """The reason of a failed episode, or a more exact one."""
    if _TOO_LONG.search(episode.error or ""):
        return "prompt_too_long"
    if episode.reason is DropReason.EVALUATOR_ERROR and episode.output is None:
        return "no_output"
    without_ids = [call for call in episode.calls if call.token_ids is None and call.error is None]
    if episode.reason is DropReason.NO_TARGET_CALLS and len(without_ids) == len(episode.calls):
        return "no_token_ids"
    return str(episode.reason)


def about_lengths(plan: Plan, evidence: Evidence) -> Iterator[Finding]:
    """Answers that are cut off, and prompts that are nearly as long as the context."""
    answers, limit = evidence.answers, evidence.served.max_length if evidence.served is not None else None
    if not answers:
        return
    longest = max(len(call.all_token_ids) for call in answers)
    ended = [call for call in answers if call.finish_reason == "length"]
    full = [call for call in ended if limit is not None and len(call.all_token_ids) >= limit]
    cut = cut_off(answers)
    if full and 2 * len(full) >= len(ended):
        severity = Severity.HARMS if cut is not None else Severity.NOTE
        what = f"{share_of(len(full), len(answers), 'answers')} were cut off at the model's context of {limit} tokens"
        change = "shorten the prompts, or train a model with a longer context"
        yield Finding("context_full", severity, what, f"{plan.adapter}.model", change)
    elif cut is not None:
        yield Finding(cut.code, Severity.HARMS, cut.what, plan.llm("max_tokens"), cut.change)
    if limit is not None and not full and longest >= _NEARLY * limit:
        what = f"a prompt and its answer have up to {longest} tokens, the model's context {limit}"
        change = "shorten the prompts, or train a model with a longer context, before they are longer"
        yield Finding("context_nearly_full", Severity.NOTE, what, f"{plan.adapter}.model", change)


def _harm_of(count: int, total: int) -> Severity:
    """The severity of a problem that leaves something to learn from: at most HARMS."""
    return min(severity_of(count, total), Severity.HARMS, key=[*Severity][::-1].index)


def about_tool_calls(plan: Plan, evidence: Evidence) -> Iterator[Finding]:
    """Tool calls that the agent did not get: the server could not parse them, or took them as text."""
    answers = [call for call in evidence.answers if call.tools]
    where = f"{plan.adapter}.tool_format"
    malformed = [call for call in answers if call.tool_call_malformed and call.finish_reason != "length"]
    if malformed:
        severity = _harm_of(len(malformed), len(answers))
        share = share_of(len(malformed), len(answers), "answers")
        text = str((malformed[0].message or {}).get("content"))
        what = f"{share} have tool calls that cannot be parsed, such as {text!r:.200}"
        change = "see whether they are in the model's format; if the model writes them badly, its rewards must say so"
        yield Finding("malformed_tool_calls", severity, what, where, change)
    texts = [(call, str((call.message or {}).get("content") or "")) for call in answers if call not in malformed]
    found = [format_of(text, call.tools or ()) for call, text in texts if not (call.message or {}).get("tool_calls")]
    if formats := [name for name in found if name is not None]:
        severity = _harm_of(len(formats), len(answers))
        what = f"{share_of(len(formats), len(answers), 'answers')} have tool calls in the text, as of {formats[0]}"
        change = f"set tool_format: {formats[0]}, or, where vLLM serves the model, --tool-call-parser {formats[0]}"
        yield Finding("unparsed_tool_calls", severity, what, where, change)


def about_scores(plan: Plan, evidence: Evidence) -> Iterator[Finding]:
    """An evaluator that gives the same output another score."""
    changed = [each for each in evidence.rescored if each.first != each.second]
    if not changed:
        return
    example = changed[0]
    differences = [abs(e.first - e.second) for e in changed if e.first is not None and e.second is not None]
    by = f", by up to {max(differences):g}" if differences else ""
    first, second = ("none" if score is None else f"{score:g}" for score in (example.first, example.second))
    share = share_of(len(changed), len(evidence.rescored), "outputs")
    what = f"{share} got another score the second time{by}, such as {first} and {second} for {example.episode}"
    change = "make the score depend on the answer and the row only: no randomness, temperature 0 for a judge"
    yield Finding("changing_scores", Severity.HARMS, what, plan.evaluator, change)


def about_groups(plan: Plan, evidence: Evidence) -> Iterator[Finding]:
    """Groups without variance, and why; what else was dropped from them."""
    if evidence.episodes and all(episode.reason is not None for episode in evidence.episodes):
        return  # their failures say why
    trains = any(evidence.selected.trajectories)
    findings = [] if evidence.makes_pairs else [*_rewards(plan, evidence)]
    yield from findings
    played = any(evidence.groups) or (evidence.makes_pairs and evidence.selected.dropped)
    if played and not trains and will_learn(findings):
        what = f"nothing that was played would be trained; dropped: {counts(evidence.selected.dropped)}"
        change = "see what the reasons mean; min_reward and the like may be too strict for this model"
        yield Finding("nothing_selected", Severity.STOPS_LEARNING, what, plan.trainer, change)


def _rewards(plan: Plan, evidence: Evidence) -> Iterator[Finding]:
    groups = [group for group in evidence.groups if len(group) > 1]
    alike = without_variance(evidence.collection, evidence.selected.drop_reasons)
    if groups and len(alike) == len(groups):
        temperature, scores = plan.llm("temperature"), f"{plan.evaluator}, {plan.dataset}"
        places = {"greedy_sampling": temperature, "same_answers": temperature, "cut_off": plan.llm("max_tokens")}
        places |= {"one_answer": temperature, "constant_reward": plan.evaluator, "same_reward_in_groups": scores}
        places["same_returns"] = plan.evaluator
        causes = likely_causes(alike)
        for cause in causes:
            follows = cause.code == "constant_reward" and causes[0].code in ("greedy_sampling", "same_answers")
            severity = Severity.NOTE if follows else Severity.STOPS_LEARNING
            yield Finding(cause.code, severity, cause.what, places[cause.code], cause.change)
    elif groups and evidence.compares_groups:
        if (same := one_answer(groups)) is not None:
            yield Finding(same.code, Severity.HARMS, same.what, plan.llm("temperature"), same.change)
        if len(groups) - len(alike) < _FEW * len(groups):
            yield _few_with_variance(plan, groups, len(groups) - len(alike))
        else:
            yield from _small_differences(plan, groups)
    for cause in missing_step_rewards(evidence.collection.trajectories, evidence.selected.drop_reasons):
        every = evidence.selected.dropped[DropReason.NO_STEP_REWARDS] == sum(map(len, evidence.groups))
        severity = Severity.STOPS_LEARNING if every else Severity.HARMS
        yield Finding(cause.code, severity, cause.what, f"{plan.trainer}.credit", cause.change)


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


class BrokenPrefix(NamedTuple):
    """A call whose prompt continues the conversation of an `earlier` one, but not its tokens.

    `position` is the first token that differs; the completion of the earlier call begins at `completion`. `rewritten`:
    the agent has changed the answer that it sends back.
    """

    call: int
    earlier: int
    position: int
    completion: int
    expected: Sequence[int]
    sent: Sequence[int]
    rewritten: bool


def broken_prefixes(calls: Sequence[ModelCall]) -> list[BrokenPrefix]:
    """The calls of an episode that begin a new training row although they continue a conversation."""
    candidates = [call for call in calls if call.prompt_token_ids is not None and call.token_ids and call.message]
    with_logprobs = {index: 1.0 for index, call in enumerate(candidates) if call.logprobs is not None}
    begins = {row.calls[0] for row in rows_of(candidates, with_logprobs)}
    starts = [index for index, call in enumerate(candidates) if index and call.index in begins]
    breaks = [_broken(candidates[index], candidates[:index]) for index in starts]
    return [each for each in breaks if each is not None]


def _broken(call: ModelCall, before: Sequence[ModelCall]) -> BrokenPrefix | None:
    """None if it continues no earlier call, or the tokens of one."""
    continued = [each for each in before if _continues(call, each)]
    longest = max((len(each.messages) for each in continued), default=0)
    candidates = [each for each in continued if len(each.messages) == longest]  # several of one prompt, maybe
    sent = call.prompt_token_ids or []
    if not candidates or any(sent[: len(ids)] == ids for ids in (each.all_token_ids for each in candidates)):
        return None
    answer = call.messages[longest]
    earlier = next((each for each in candidates if same_message(answer, each.message)), candidates[-1])
    expected = earlier.all_token_ids
    pairs = zip(expected, sent, strict=False)
    position = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(expected), len(sent)))
    rewritten = not same_message(answer, earlier.message)
    completion = len(earlier.prompt_token_ids or ())
    return BrokenPrefix(call.index, earlier.index, position, completion, expected, sent, rewritten)


def _continues(call: ModelCall, earlier: ModelCall) -> bool:
    """Whether its messages are those of an earlier call, an answer, and others."""
    length = len(earlier.messages)
    answer = call.messages[length : length + 1]
    return call.messages[:length] == earlier.messages and bool(answer) and answer[0].get("role") == "assistant"


def rows_per_episode(groups: Sequence[Sequence[Trajectory]]) -> float | None:
    """The mean number of training rows that an episode would need; None if it is unknown."""
    counts = []
    for trajectory in (t for group in groups for t in group):
        calls = [trajectory.calls[position] for position in trajectory.trained_calls]
        if any(call.prompt_token_ids is None or not call.logprobs for call in calls):
            return None
        counts.append(len(rows_of(trajectory.calls, dict.fromkeys(trajectory.trained_calls, 1.0))))
    return fmean(counts) if counts else None


def about_prefixes(plan: Plan, evidence: Evidence, decode: Decoder | None = None) -> Iterator[Finding]:
    """Rows per episode beyond those of its conversations, and at which turn and token the first one begins."""
    episodes = [episode for episode in evidence.episodes if episode.calls]
    broken = [(episode, breaks[0]) for episode in episodes if (breaks := broken_prefixes(episode.calls))]
    for rewritten in (False, True):
        affected = [(episode, first) for episode, first in broken if first.rewritten is rewritten]
        if not affected:
            continue
        episode, first = affected[0]
        severity = _harm_of(len(affected), len(episodes))
        share = share_of(len(affected), len(episodes), "episodes")
        example = f"{_difference(first, decode)} (episode {episode.key.text()})"
        what = f"{share} need more than one training row, as {example}"
        if rewritten:
            change = "append the model's message as it was returned; rewriting it costs time and context"
            yield Finding("answers_rewritten", severity, what, "workflow", change)
        else:
            change = "set token_bridge: true of the llm, or use a chat template that keeps earlier answers as they were"
            change += " sampled, reasoning included"
            yield Finding("prefix_broken", severity, what, f"{plan.adapter}.model (chat template)", change)


def _difference(broken: BrokenPrefix, decode: Decoder | None) -> str:
    part = "the answer" if broken.position >= broken.completion else "the prompt"
    expected, sent = (ids[broken.position : broken.position + _SHOWN] for ids in (broken.expected, broken.sent))
    texts = [repr(decode(ids)) if decode is not None else str([*ids]) for ids in (expected, sent)]
    changed = f"the agent changed the answer of call {broken.earlier}" if broken.rewritten else "its tokens differ"
    return (
        f"call {broken.call} continues call {broken.earlier}, but {changed}: from token {broken.position}, in {part}, "
        f"{texts[1]} instead of {texts[0]}"
    )

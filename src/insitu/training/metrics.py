"""The numbers of one epoch: a line of `training_metrics.jsonl`, and the likely causes if it trains nothing."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from statistics import fmean, stdev
from typing import Any, NamedTuple

from insitu.schemas.episodes import DropReason, ModelCall
from insitu.schemas.finetuning import TrainingJobStatus, TrainingStatusEnum, Trajectory, TrajectoryCollection

Group = Sequence[Trajectory]

STATED = frozenset(("policy_version", "checkpoint", "seconds"))
"""What a job reports and the line of its epoch states in its own way."""

_MOSTLY = 0.5
"""Share of the answers from which their length counts as a cause."""


class Cause(NamedTuple):
    """Why nothing can be trained: what was seen, and what to change."""

    code: str
    what: str
    change: str

    def __str__(self) -> str:
        return f"{self.what}: {self.change}"


_NO_PAIRS = {
    cause.code: cause
    for cause in (
        Cause(
            DropReason.UNSCORED_CANDIDATE,
            "the candidates have no score, or one that is NaN or infinite",
            "check what the workflow reports",
        ),
        Cause(
            DropReason.UNTARGETED_CANDIDATE,
            "no trained call has sampled the candidates",
            "a candidate's output must be what a trained model answered in finetuning.target_functions, or a part of "
            "it",
        ),
        Cause(
            DropReason.SINGLE_CANDIDATE,
            "turns have one candidate with a score",
            "report several with the same turn_id, or collect more episodes of a row",
        ),
        Cause(
            DropReason.EQUAL_SCORES,
            "the scores of each turn or row are equal",
            "use a finer score, or more varied candidates",
        ),
        Cause(
            DropReason.IDENTICAL_RESPONSES,
            "the candidates of each turn or row have the same text",
            "raise the temperature",
        ),
        Cause(
            DropReason.SMALL_DIFFERENCE,
            "the scores differ by less than the smallest difference of the trajectory builder",
            "lower that, or use a finer score",
        ),
        Cause(
            DropReason.DIFFERENT_PROMPTS,
            "the candidates of each turn answer different prompts",
            "give them the same turn_id only if the model was shown the same messages",
        ),
    )
}
"""What each reason means if it is the most frequent one of an epoch without preference pairs."""


@dataclass(frozen=True)
class EpochResult:
    """Results of one epoch; `metrics()` returns its line of `training_metrics.jsonl`.

    `collected` holds the statistics of all collected trajectories, `trained` those of what was submitted.
    `policy_version` is the version sampled from and, once the job has completed, the version it produced. `job` is its
    final status; None until it ends, or if nothing was submitted. `seconds` has the keys collect, train and validate.
    `reported` holds what others report: the selection, then the job.
    """

    collected: Mapping[str, Any]
    trained: Mapping[str, Any]
    dropped: Mapping[str, int]
    policy_version: int | None
    seconds: Mapping[str, float]
    job: TrainingStatusEnum | None = None
    reported: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def with_seconds(self, phase: str, seconds: float) -> "EpochResult":
        return replace(self, seconds={**self.seconds, phase: seconds})

    def with_job(self, status: TrainingJobStatus) -> "EpochResult":
        reported = {name: number for name, number in (status.metadata or {}).items() if name not in STATED}
        return replace(self, job=status.status, reported={**self.reported, "job": reported})

    def metrics(self) -> dict[str, Any]:
        """Reported numbers keep their names; a name that is taken gets who reported it in front."""
        line: dict[str, Any] = {
            **self.collected,
            **self.trained,
            "dropped": dict(sorted(self.dropped.items())),
            "policy_version": self.policy_version,
            "job": self.job and self.job.value,
            "seconds": dict(self.seconds),
        }
        for source, values in self.reported.items():
            for name, number in reported_numbers(values).items():
                line[f"{source}/{name}" if name in line else name] = number
        if not_finite := self.not_finite:
            line["non_finite_metrics"] = len(not_finite)
        return line

    @property
    def not_finite(self) -> list[str]:
        """The names of reported numbers that are NaN or infinite, and therefore left out."""
        return [
            name
            for values in self.reported.values()
            for name, number in _flat_numbers(values)
            if number is not None and not math.isfinite(number)
        ]


def reported_numbers(values: Mapping[str, Any]) -> dict[str, float | None]:
    """The finite numbers, those in nested mappings with their path as name; None stays, as "not measured"."""
    return {name: n for name, n in _flat_numbers(values) if n is None or math.isfinite(n)}


def _flat_numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float | None]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | None) and not isinstance(value, bool):
            yield f"{prefix}{name}", value
        elif isinstance(value, Real) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)


def collected_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    """Statistics of the scored episodes of an epoch; None where they say nothing (groups of one, no captured call)."""
    rewards = [t.reward for group in groups for t in group]
    deviations = [stdev(t.reward for t in group) for group in groups if len(group) > 1]
    answers = [call for group in groups for call in trained_calls(group)]
    lengths = [len(call.token_ids) for call in answers if call.token_ids is not None]
    return {
        "avg_reward": sum(rewards) / len(rewards) if rewards else None,
        "min_reward": min(rewards, default=None),
        "max_reward": max(rewards, default=None),
        "reward_std": fmean(deviations) if deviations else None,
        "frac_reward_zero_std": fmean(d == 0 for d in deviations) if deviations else None,
        "scores": _scores(groups),
        "num_trajectories": len(rewards),
        "num_groups": len(groups),
        "completions_mean_length": fmean(lengths) if lengths else None,
        "completions_clipped_ratio": fmean(map(_is_clipped, answers)) if answers else None,
        "greedy_groups": sum(map(_is_greedy, groups)),
    }


def _scores(groups: Sequence[Group]) -> dict[str, float | None]:
    """The mean score of each evaluator, None if it scored no episode."""
    given = [(t.metadata or {}).get("scores") or {} for group in groups for t in group]
    means: dict[str, float | None] = {}
    for name in dict.fromkeys(name for scores in given for name in scores):
        known = [scores[name] for scores in given if scores.get(name) is not None]
        means[name] = fmean(known) if known else None
    return means


def trained_calls(group: Group) -> list[ModelCall]:
    return [trajectory.calls[position] for trajectory in group for position in trajectory.trained_calls]


def _is_clipped(call: ModelCall) -> bool:
    return call.finish_reason == "length"


def _is_greedy(group: Group) -> bool:
    """Whether all of its answers were sampled at temperature 0."""
    answers = trained_calls(group)
    return bool(answers) and all(call.sampling.get("temperature") == 0 for call in answers)


def without_variance(collected: TrajectoryCollection, drop_reasons: Mapping[str, str]) -> list[Group]:
    """The groups that were dropped because their episodes do not differ."""
    reason = DropReason.NO_VARIANCE
    return [group for group in collected.trajectories if any(drop_reasons.get(str(t.id)) == reason for t in group)]


def likely_causes(groups: Sequence[Group]) -> list[Cause]:
    """Why the episodes of each of these groups scored the same, as far as their calls and scores show it."""
    if not groups:
        return []
    causes = []
    answers = [call for group in groups for call in trained_calls(group)]
    if greedy := sum(map(_is_greedy, groups)):
        causes.append(
            Cause(
                "greedy_sampling",
                f"{share_of(greedy, len(groups), 'groups')} sampled at temperature 0, so that all episodes of a row "
                "are the same",
                "raise it under llms, or set override_sampling there if the agent sends its own",
            )
        )
    elif answers and all(_same_answers(group) for group in groups):
        what, change = (
            "the answers of each row are the same",
            "raise the temperature, or start from a less certain model",
        )
        causes.append(Cause("same_answers", what, change))
    if (cut := cut_off(answers)) is not None:
        causes.append(cut)
    rewards = {t.reward for group in groups for t in group}
    if len(rewards) == 1:
        what = f"every episode has the reward {rewards.pop():g}"
        change = "check that the evaluator distinguishes good answers from bad ones, and that some answers are good"
        causes.append(Cause("constant_reward", what, change))
    elif not causes:
        causes.append(
            Cause(
                "same_reward_in_groups",
                f"the episodes of a row score the same, from {min(rewards):g} to {max(rewards):g} by row",
                "use rows that are neither too easy nor too hard, or a finer score",
            )
        )
    return causes


def cut_off(answers: Sequence[ModelCall]) -> Cause | None:
    """A sentence if most answers were cut off."""
    clipped = sum(map(_is_clipped, answers))
    if not answers or clipped < _MOSTLY * len(answers):
        return None
    what = f"{share_of(clipped, len(answers), 'answers')} were cut off at max_tokens"
    return Cause("cut_off", what, "raise it under llms")


def why_no_pairs(dropped: Mapping[str, int]) -> list[Cause]:
    """What is most often the reason that candidates are no preference pair; empty if it is none of theirs."""
    known = [reason for reason in dropped if reason in _NO_PAIRS]
    return [_NO_PAIRS[max(known, key=dropped.__getitem__)]] if known else []


def share_of(count: int, total: int, what: str) -> str:
    return f"all {total} {what}" if count == total else f"{count} of {total} {what}"


def _same_answers(group: Group) -> bool:
    answers = [[call.message for call in trained_calls([trajectory])] for trajectory in group]
    return all(answer == answers[0] for answer in answers)

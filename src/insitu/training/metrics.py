"""The numbers of one epoch: a line of `training_metrics.jsonl`, and the likely causes if it trains nothing."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from numbers import Real
from statistics import fmean, stdev
from typing import Any, NamedTuple

from insitu.advantages.credit import credit_by_function, credited_calls
from insitu.advantages.estimator import EstimatedEpoch
from insitu.runs.records import sides_of
from insitu.schemas.episodes import DropReason, ModelCall
from insitu.schemas.finetuning import TrainingJobStatus, Trajectory, TrajectoryCollection
from insitu.training.interfaces import GroupTrainer, PairTrainer, Trainer
from insitu.training.observers import Collected, Scored

Group = Sequence[Trajectory]

_STATED = frozenset(("policy_version", "seconds_ahead", "checkpoint", "seconds"))
"""What a job reports and the line of its epoch states in its own way."""

_ALIKE = DropReason.NO_VARIANCE
_SHOWN = 100
"""Characters of an answer."""
_ROWS, _SAME = 4, 0.9
"""Rows, and the share of their episodes with the same answer, from which it is reported."""
_MOSTLY = 0.5
"""Share of the answers from which their length counts as a cause."""


class Cause(NamedTuple):
    """Why nothing can be trained: what was seen, and what to change."""

    code: str
    what: str
    change: str

    def __str__(self) -> str:
        return f"{self.what}: {self.change}"


_UNTRAINED = {
    "greedy": ("were sampled at temperature 0", "set a temperature above 0"),
    "raw_logprobs": (
        "were sampled at a temperature that their logprobs do not include: those of a server that sends no "
        "logprobs_temperature are raw",
        "collect the episodes again, or sample at temperature 1",
    ),
    "teacher_temperature": (
        "were sampled at another temperature than 1, that of the teacher's log-probabilities",
        "leave out the temperature of the agent's requests, or set override_sampling under llms",
    ),
}
"""By `sampling_problem`: what it means, and what to change."""


@dataclass
class EpochResult:
    """What an epoch has yielded so far; `metrics` is its line of `training_metrics.jsonl`."""

    metrics: dict[str, Any]
    not_finite: list[str] = field(default_factory=list)
    """The names of reported numbers that are NaN or infinite, and therefore left out."""

    def add_reported(self, source: str, values: Mapping[str, Any]) -> None:
        """Adds numbers under the names that `source` gives them; a name that is taken gets the source in front.

        Those in nested mappings have their path as name; None stays, as "not measured".
        """
        for name, number in _flat_numbers(values).items():
            if number is not None and not math.isfinite(number):
                self.not_finite.append(name)
            else:
                self.metrics[f"{source}/{name}" if name in self.metrics else name] = number
        if self.not_finite:
            self.metrics["non_finite_metrics"] = len(self.not_finite)

    def add_job(self, status: TrainingJobStatus, seconds: float) -> None:
        """Adds the final status of the epoch's job, the seconds waited for it, and the numbers that it reports."""
        metadata = status.metadata or {}
        self.metrics["job"] = status.status.value
        self.metrics["seconds"]["train"] = seconds
        if "seconds_ahead" in metadata:
            self.metrics["seconds"]["ahead"] = metadata["seconds_ahead"]
        self.add_reported("job", {k: v for k, v in metadata.items() if k not in _STATED})


def _flat_numbers(values: Mapping[str, Any]) -> dict[str, float | None]:
    numbers: dict[str, float | None] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            numbers |= {f"{name}/{inner}": number for inner, number in _flat_numbers(value).items()}
        elif isinstance(value, int | None) and not isinstance(value, bool):
            numbers[name] = value
        elif isinstance(value, Real) and not isinstance(value, bool):
            numbers[name] = float(value)
    return numbers


def epoch_metrics(trainer: Trainer, collected: Collected, estimated: EstimatedEpoch) -> dict[str, Any]:
    """Statistics of what an epoch has collected, and of what the trainer has selected of it."""
    collection, advantages, _ = estimated
    metrics = {**collected.metrics}
    if isinstance(trainer, GroupTrainer):
        trained = {str(t.id) for t, _ in advantages}
        metrics["frac_reward_zero_std"] = teaches_nothing(collected.collection, trained, collection.drop_reasons)
    elif not isinstance(trainer, PairTrainer):  # what it trains does not depend on what else the row's episodes scored
        metrics["frac_reward_zero_std"] = None
    credit = credit_by_function(credited_calls(advantages, trainer.run_config.target_functions))
    curriculum = trainer.get_curriculum_state() if trainer.curriculum_config.enabled else None
    return {
        **metrics,
        **(trainer.own_metrics(advantages) if trainer.own_metrics is not None else {}),
        "curriculum_percentile": curriculum and curriculum["current_percentile"],
        "curriculum_state": curriculum and {k: v for k, v in curriculum.items() if k != "reward_sums"},
        "filtered_trajectories": sum(map(len, collection.trajectories)),
        "filtered_groups": len(collection.trajectories),
        "credit_by_function": credit,
        "dropped": dict(sorted(collection.dropped.items())),
    }


def collected_metrics(groups: Sequence[Group], episodes: Sequence[Sequence[Scored]] | None = None) -> dict[str, Any]:
    """Statistics of the scored episodes of an epoch; None where they say nothing (groups of one, no captured call).

    `episodes` are those with a reward, by row; if they need none, the trajectories of `groups` are described, or, if
    these are pairs of candidates, the pairs.
    """
    paired = {name for group in groups for t in group for _, name, _ in sides_of(t)} if episodes is None else set()
    if episodes is None:
        episodes = [[Scored(t.reward, (t.metadata or {}).get("scores") or {}) for t in group] for group in groups]
    scored = [episode for group in episodes for episode in group]
    rewards = [episode.reward for episode in scored]
    of_several = [] if paired else [group for group in episodes if len(group) > 1]
    deviations = [stdev([episode.reward for episode in group]) for group in of_several]
    alone = sum(len(group) == 1 for group in episodes)
    answers = [call for group in groups for call in trained_calls(group)]
    lengths = [len(call.token_ids) for call in answers if call.token_ids is not None]
    malformed = [call.tool_call_malformed for call in answers].count(True)
    return {
        "avg_reward": fmean(rewards) if rewards else None,  # in any order
        "min_reward": min(rewards, default=None),
        "max_reward": max(rewards, default=None),
        "reward_std": fmean(deviations) if deviations else None,
        "frac_reward_zero_std": (deviations.count(0) + alone) / len([*filter(None, episodes)]) if deviations else None,
        "scores": _mean_scores(scored),
        "num_trajectories": sum(map(len, groups)),
        "num_episodes": len(paired) or len(scored),
        "num_groups": len(groups),
        "completions_mean_length": fmean(lengths) if lengths else None,
        "completions_clipped_ratio": _clipped(answers) / len(answers) if answers else None,
        "greedy_groups": sum(map(_is_greedy, groups)),
        **({"malformed_tool_calls": malformed} if malformed else {}),
    }


def _mean_scores(episodes: Sequence[Scored]) -> dict[str, float | None]:
    """By evaluator, None if it scored no episode."""
    by_name: dict[str, list[float]] = {}
    for episode in episodes:
        for name, score in episode.scores.items():
            by_name.setdefault(name, []).extend([] if score is None else [score])
    return {name: fmean(scores) if scores else None for name, scores in by_name.items()}


def version_metrics(groups: Sequence[Group], newest: int) -> dict[str, Any]:
    """Episodes by their age, the training jobs between the oldest version that they were sampled from and `newest`.

    Versions that no call reports are left out.
    """
    calls = (trained_calls([trajectory]) for group in groups for trajectory in group)
    versions = ([call.policy_version for call in each if call.policy_version is not None] for each in calls)
    ages = Counter(newest - min(of_episode) for of_episode in versions if of_episode)
    age = {str(age): count for age, count in sorted(ages.items())}
    return {"sampled_version": newest - max(ages) if ages else None, "age": age}


def trained_calls(group: Group) -> list[ModelCall]:
    return [trajectory.calls[position] for trajectory in group for position in trajectory.trained_calls]


def _clipped(answers: Sequence[ModelCall]) -> int:
    """How many were cut off."""
    return [call.finish_reason for call in answers].count("length")


def _is_greedy(group: Group) -> bool:
    """Whether all of its answers were sampled at temperature 0."""
    temperatures = [call.sampling.get("temperature") for call in trained_calls(group)]
    return temperatures.count(0) == len(temperatures) > 0


def teaches_nothing(
    collected: TrajectoryCollection, trained: Set[str], drop_reasons: Mapping[str, str]
) -> float | None:
    """The share of the groups whose advantages are all 0; those that were not estimated count by their rewards.

    None if no group has several episodes.
    """
    groups = [group for group in collected.trajectories if group]
    silent = [_is_silent(group, drop_reasons) for group in groups if trained.isdisjoint(str(t.id) for t in group)]
    return sum(silent) / len(groups) if max(map(len, groups), default=0) > 1 else None


def _is_silent(group: Group, drop_reasons: Mapping[str, str]) -> bool:
    return len({t.reward for t in group}) == 1 or any(drop_reasons.get(str(t.id)) == _ALIKE for t in group)


def without_variance(collected: TrajectoryCollection, drop_reasons: Mapping[str, str]) -> list[Group]:
    """The groups that were dropped because their episodes do not differ."""
    return [group for group in collected.trajectories if any(drop_reasons.get(str(t.id)) == _ALIKE for t in group)]


def likely_causes(groups: Sequence[Group], earlier: Sequence[Mapping[str, Any]] = ()) -> list[Cause]:
    """Why the episodes of each of these groups scored the same, as far as their calls and scores show it.

    `earlier` are the lines of `reward_history.json` of the run's epochs before.
    """
    if not groups:
        return []
    causes = []
    answers = [call for group in groups for call in trained_calls(group)]
    if greedy := sum(map(_is_greedy, groups)):
        what = f"{share_of(greedy, len(groups), 'groups')} sampled at temperature 0, so that all episodes of a row are"
        change = "raise it under llms, or set override_sampling there if the agent sends its own"
        causes.append(Cause("greedy_sampling", f"{what} the same", change))
    elif answers and all(_same_answers(group) for group in groups):
        change = "raise the temperature, or start from a less certain model"
        causes.append(Cause("same_answers", "the answers of each row are the same", change))
    if (cut := cut_off(answers)) is not None:
        causes.append(cut)
    if (same := one_answer(groups, earlier)) is not None and not causes:
        causes.append(same)
    rewards = {t.reward for group in groups for t in group}
    if len(rewards) == 1:
        change = "check that the evaluator distinguishes good answers from bad ones (5 is not equal to '5'), and that "
        frequent = most_frequent_answers(groups, 1)
        said = "".join(f"; most often the model ends with {text!r:.{_SHOWN}}" for text, _ in frequent)
        change += f"some answers are good{said}"
        reward = rewards.pop()
        what = f"every episode has the reward {reward:g}"
        if better := [line for line in earlier if _is_above(line, reward)]:
            best = max(better, key=lambda line: float(line["avg_reward"]))
            what += f", after {best['avg_reward']:.3g} on average in epoch {best['epoch']}: "
            what += "the model has probably moved too far"
            change = "lower learning_rate, and begin again, or from an epoch before (`insitu runs fork`); kl and "
            change += "reference_gap of earlier epochs show where it left"
        elif _is_best(reward, earlier):
            what += ", and none had more before"
            change = "if these rows are learned, end the run here or use harder ones; otherwise use a finer score"
        causes.append(Cause("constant_reward", what, change))
    elif not causes and (other := sum(len({t.reward for t in group}) > 1 for group in groups)):
        what = f"rewards differ in {share_of(other, len(groups), 'groups')}, but not what is compared in their place"
        change = "with credit: step check the step scores, which are equal in a group, or use credit: episode; with a "
        causes.append(Cause("same_returns", what, change + "function of advantages, what it returns"))
    elif not causes:
        what = f"the episodes of a row score the same, from {min(rewards):g} to {max(rewards):g} by row"
        change = "use rows that are neither too easy nor too hard, or a finer score"
        causes.append(Cause("same_reward_in_groups", what, change))
    return causes


def one_answer(groups: Sequence[Group], earlier: Sequence[Mapping[str, Any]] = ()) -> Cause | None:
    """A cause if nearly all episodes of several rows end with the same text, which is mostly not the best answer."""
    episodes = [trajectory for group in groups for trajectory in group]
    frequent = most_frequent_answers(groups, 1)
    if len(groups) < _ROWS or not frequent or frequent[0][1] < _SAME * len(episodes):
        return None
    if any(len(trajectory.trained_calls) > 1 for trajectory in episodes):  # agents with tools may end alike
        return None
    text, count = frequent[0]
    rewards = [trajectory.reward for trajectory in episodes]
    if fmean(t.reward for t in episodes if _last_text(t) == text) > fmean((min(rewards), max(rewards))):
        return None
    what = f"{share_of(count, len(episodes), 'episodes')} end with {text!r:.{_SHOWN}}, whatever the row"
    if earlier:
        change = "the model has collapsed: begin again, or from an epoch before (`insitu runs fork`), with a lower "
        return Cause("one_answer", what, change + "learning_rate, kl: {beta: 0.01}, or more rows an epoch")
    change = "raise the temperature, or show the model other answers in the prompt"
    return Cause("one_answer", what, change)


def most_frequent_answers(groups: Sequence[Group], count: int) -> list[tuple[str, int]]:
    """The texts that most episodes end with, and how many do."""
    texts = (_last_text(trajectory) for group in groups for trajectory in group)
    return Counter(text for text in texts if text is not None).most_common(count)


def _last_text(trajectory: Trajectory) -> str | None:
    """The text of the last trained call; None of a call of tools only."""
    message = trajectory.calls[trajectory.trained_calls[-1]].message if trajectory.trained_calls else None
    return text if isinstance(text := (message or {}).get("content"), str) and text else None


def _is_above(line: Mapping[str, Any], reward: float) -> bool:
    """Whether an epoch's mean is above a reward by more than a tenth of what its best episode is."""
    average, best = line["avg_reward"], line["max_reward"]
    return average is not None and best is not None and average - reward > 0.1 * (best - reward)


def _is_best(reward: float, earlier: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no earlier episode had more, and some had less."""
    scored = [line for line in earlier if line["max_reward"] is not None]
    return all(line["max_reward"] <= reward for line in scored) and any(line["min_reward"] < reward for line in scored)


def missing_step_rewards(groups: Iterable[Group], drop_reasons: Mapping[str, str]) -> Iterator[Cause]:
    """A cause if episodes were dropped as their step rewards are not those of their trained calls."""
    episodes = [trajectory for group in groups for trajectory in group]
    if dropped := [t for t in episodes if drop_reasons.get(str(t.id)) == DropReason.NO_STEP_REWARDS]:
        found, calls = (len(each or ()) for each in (dropped[0].shaped_rewards, dropped[0].trained_calls))
        what = f"{share_of(len(dropped), len(episodes), 'episodes')} have no step reward for each trained call"
        change = "report one for each answer of the model (steps of insitu.Score, Context.get().reward(...)), or set "
        yield Cause("no_step_rewards", f"{what}: the first has {found} for {calls}", f"{change}credit: episode")


def untrained_causes(reported: Mapping[str, Any]) -> list[Cause]:
    """Why calls were left out of training, by the `untrained_calls` of an epoch's estimate."""
    causes = []
    for problem, count in reported.get("untrained_calls", {}).items():
        cut = (f"were sampled with {problem}, which the loss does not model", "leave it at its default for training")
        what, change = _UNTRAINED.get(problem, cut)
        causes.append(Cause(problem, f"{count} model calls are not trained, as they {what}", change))
    return causes


def cut_off(answers: Sequence[ModelCall]) -> Cause | None:
    """A sentence if most answers were cut off."""
    clipped = _clipped(answers)
    if not answers or clipped < _MOSTLY * len(answers):
        return None
    what = f"{share_of(clipped, len(answers), 'answers')} were cut off at max_tokens"
    return Cause("cut_off", what, "raise it under llms")


def share_of(count: int, total: int, what: str) -> str:
    return f"all {total} {what}" if count == total else f"{count} of {total} {what}"


def _same_answers(group: Group) -> bool:
    answers = [[call.message for call in trained_calls([trajectory])] for trajectory in group]
    return all(answer == answers[0] for answer in answers)


def metrics_of_run(
    run_id: str, results: Mapping[int, EpochResult], rewards: Sequence[Any], validations: Sequence[Any]
) -> dict[str, Any]:
    """What `Trainer.get_metrics` returns: `jobs` are the statuses of the epochs' jobs, `last` the newest metrics."""
    jobs = [job for _, each in sorted(results.items()) if (job := each.metrics["job"]) is not None]
    last = results[max(results)].metrics if results else {}
    totals = {"run_id": run_id, "total_epochs": len(rewards), "jobs": jobs}
    return totals | {"rewards": rewards, "validations": validations, "last": last}

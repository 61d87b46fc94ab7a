"""The advantages and training rows of an epoch: sampled tokens are the trained tokens."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Real
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from insitu.advantages.credit import (
    AdvantageConfig,
    CallAdvantages,
    Credit,
    call_advantages,
    group_relative,
    has_step_rewards,
)
from insitu.errors import InsituError, TrajectoryError, describe_error
from insitu.schemas.episodes import GREEDY_TEMPERATURE, GROUP_KEY, DropReason, ModelCall, TrainingRow
from insitu.schemas.finetuning import Trajectory, TrajectoryCollection

NEUTRAL_SAMPLING: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "tool_choice": ("auto", "none"),
    # vLLM's; guided_* and use_beam_search are of earlier releases
    "allowed_token_ids": ([],),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), (None,)),
    "use_beam_search": (False,),
}
"""Parameters that change the distribution sampled from, unless they have one of these values."""
SHAPING = ("presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "response_format", "structured_outputs")
"""Those that `insitu backend` applies again when it trains. A call whose log-probabilities they are part of says so by
`logprobs_processed`."""


_TOKENS = attrgetter("prompt_token_ids", "token_ids", "logprobs")
"""What a row of tokens is made of."""


class EstimatedEpoch(NamedTuple):
    """What an epoch trains on, the advantages of each of its trajectories' calls, and metrics of the selection."""

    collection: TrajectoryCollection
    advantages: list[tuple[Trajectory, CallAdvantages]]
    metrics: Mapping[str, Any] = MappingProxyType({})


def sampling_problem(call: ModelCall) -> str | None:
    """Why a call cannot be trained by its policy gradient, if so: it was not sampled from the softmax of the logits
    divided by its temperature, or its log-probabilities are those of another temperature (`raw_logprobs`).
    """
    if (problem := truncation(call.sampling)) is not None:
        return problem
    if call.token_ids is None or call.logprobs is None:  # no token of it is trained on
        return None
    divisor = 1.0 if call.logprobs_temperature is None else call.logprobs_temperature
    return "raw_logprobs" if call.sampling.get("temperature") not in (None, divisor) else None


def truncation(sampling: Mapping[str, Any]) -> str | None:
    """`greedy`, or the parameter by which the tokens are not sampled from the softmax of logits / temperature."""
    temperature = sampling.get("temperature")
    if isinstance(temperature, int | float) and temperature < GREEDY_TEMPERATURE:
        return "greedy"
    changed = [key for key, neutral in NEUTRAL_SAMPLING.items() if sampling.get(key) not in (None, *neutral)]
    if changed and sampling.get("logprobs_processed"):
        changed = [key for key in changed if key not in (*SHAPING, "tool_choice")]  # whose grammar is one of these
    return changed[0] if changed else None


def _shaping(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that log-probabilities are processed by."""
    return {key: sampling[key] for key in SHAPING if sampling.get(key) not in (None, *NEUTRAL_SAMPLING[key])}


class AdvantageEstimator(Protocol):
    """How a trainer turns rewards into advantages."""

    compares: bool = True
    """Whether advantages depend on the other episodes of a group, so that a single one has none."""

    def problem(self, call: ModelCall) -> str | None:
        """Why a call of a trained episode is not trained, if so."""
        return sampling_problem(call)

    def settings(self) -> dict[str, Any]:
        """The conventions in use, for the header of the run."""

    def drop_reason(self, trajectory: Trajectory) -> DropReason | None:
        """Why a trajectory cannot be trained, if so."""
        return None

    def estimate(self, group: Sequence[Trajectory]) -> list[CallAdvantages] | None:
        """The advantages of each trajectory's calls; None for a group without variance."""


AdvantageFunction = Callable[[Sequence[float], Sequence[Trajectory]], Iterable[Any]]
"""Takes the rewards and episodes of a group. Returns for each episode the advantage of all its trained calls, or a
sequence with one entry per trained call: a number, or one number per sampled token."""


class FunctionEstimator(AdvantageEstimator):
    """Calls a function for each group; `described` is what the run records of it."""

    def __init__(self, function: AdvantageFunction, described: dict[str, Any]) -> None:
        self._function = function
        self._described = described

    def settings(self) -> dict[str, Any]:
        return self._described

    def estimate(self, group: Sequence[Trajectory]) -> list[CallAdvantages] | None:
        if not any(t.trained_calls for t in group):  # a plugin's text-only trajectories
            return estimated_by_backend(group)
        where = f"advantages of row {(group[0].metadata or {}).get('row_id', group[0].id)!r}"
        try:
            returned = _values(self._function([t.reward for t in group], group), where)
            _check_count(where, len(returned), len(group), "episodes")
            estimated = [_of_calls(a, t, f"{where}, episode {t.id}") for a, t in zip(returned, group, strict=True)]
        except InsituError:
            raise
        except Exception as error:  # code of the user may raise anything
            raise TrajectoryError(f"{where}: {describe_error(error)}") from error
        values = (v for of_calls in estimated for a in of_calls.values() for v in (a if isinstance(a, list) else [a]))
        return [*estimated] if any(values) else None


class GroupRelativeEstimator(FunctionEstimator):
    """Compares the episodes of a group with one another, as the trainer's configuration says."""

    def __init__(self, advantages: AdvantageConfig, credit: Credit) -> None:
        described = {"advantages": advantages.model_dump(), "credit": credit.unit, "discount": credit.discount}
        super().__init__(partial(group_relative, config=advantages, credit=credit), described)
        self._unit = credit.unit

    def drop_reason(self, trajectory: Trajectory) -> DropReason | None:
        """Trajectories judged by step rewards need one for each trained call."""
        required = {"episode": False, "step": True, "function": trajectory.shaped_rewards is not None}
        missing = required[self._unit] and not has_step_rewards(trajectory)
        return DropReason.NO_STEP_REWARDS if missing else None


def _of_calls(value: Any, trajectory: Trajectory, where: str) -> dict[int, float | list[float]]:
    """The advantages of an episode's trained calls. Raises TrajectoryError unless all are finite numbers."""
    trained = trajectory.trained_calls
    if isinstance(value, Real):
        return dict.fromkeys(trained, _number(value, where))
    of_calls = _values(value, where)
    _check_count(where, len(of_calls), len(trained), "trained calls")
    result: dict[int, float | list[float]] = {}
    for index, of_call in zip(trained, of_calls, strict=True):
        if isinstance(of_call, Real):
            result[index] = _number(of_call, where)
        else:
            result[index] = tokens = [_number(each, where) for each in _values(of_call, where)]
            _check_count(f"{where}, call {index}", len(tokens), len(trajectory.calls[index].token_ids or ()), "tokens")
    return result


def _number(value: Any, where: str) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise TrajectoryError(f"{where}: an advantage is {value!r:.80}; allowed: finite numbers")
    return float(value)


def _values(returned: Any, where: str) -> list[Any]:
    if not isinstance(returned, Iterable) or isinstance(returned, str | bytes):
        raise TrajectoryError(f"{where}: {returned!r:.80} was returned; allowed: advantages, as a list")
    return [*returned]


def _check_count(where: str, count: int, expected: int, what: str) -> None:
    if count != expected:
        raise TrajectoryError(f"{where}: the function returned {count} values for {expected} {what}")


def estimated_by_backend(group: Sequence[Trajectory]) -> list[CallAdvantages] | None:
    """For backends that compute advantages themselves, from the rewards of the episodes."""
    if len({t.reward for t in group}) < 2:
        return None
    return [dict.fromkeys(t.trained_calls) for t in group]


def estimate_epoch(collection: TrajectoryCollection, estimator: AdvantageEstimator) -> EstimatedEpoch:
    """The trajectories that are trained, with their rows and advantages. Every drop is counted with its reason."""
    every = [t for group in collection.trajectories for t in group]
    collection = collection.without({id(t): r for t in every if (r := estimator.drop_reason(t)) is not None})
    groups: list[list[Trajectory]] = []
    advantages: list[tuple[Trajectory, CallAdvantages]] = []
    reasons: dict[int, str] = {}
    untrained: Counter[str] = Counter()
    for group in collection.trajectories:
        estimated = estimator.estimate(group) if len(group) > 1 or not estimator.compares else None
        if estimated is None:
            reason = DropReason.NO_VARIANCE if len(group) > 1 else DropReason.SINGLE_MEMBER
            reasons |= dict.fromkeys(map(id, group), reason)
            continue
        trained = []
        for t, of_calls in zip(group, estimated, strict=True):
            problems = {k: problem for k in of_calls if (problem := estimator.problem(t.calls[k])) is not None}
            untrained.update(problems.values())
            if problems and len(problems) == len(of_calls):
                reasons[id(t)] = DropReason.UNMODELED_SAMPLING
                continue
            kept = {k: a for k, a in of_calls.items() if k not in problems}
            trained.append((_with_rows(t.model_copy(update={"trained_calls": [*kept]}) if problems else t, kept), kept))
        groups += [[t for t, _ in trained]] if trained else []
        advantages += trained
    collection = collection.without(reasons).model_copy(update={"trajectories": groups})
    return EstimatedEpoch(collection, advantages, {"untrained_calls": dict(untrained)} if untrained else {})


def _with_rows(trajectory: Trajectory, advantages: CallAdvantages) -> Trajectory:
    """A copy with training rows; the trajectory itself if the backend computes its advantages, or trains no tokens."""
    numbers = {index: advantage for index, advantage in advantages.items() if advantage is not None}
    if not numbers:
        return trajectory
    for index in numbers:
        if None in _TOKENS(trajectory.calls[index]):
            return trajectory
    return trajectory.model_copy(update={"rows": rows_of(trajectory.calls, numbers, trajectory.id or "")})


def training_rows(collection: TrajectoryCollection) -> list[TrainingRow]:
    """The rows of all trajectories. Groups whose trainer estimated no advantages get the default ones."""
    rows: list[TrainingRow] = []
    for group in collection.trajectories:
        if not any(t.rows for t in group):
            estimated = call_advantages(group, AdvantageConfig())
            group = [_with_rows(t, of_calls) for t, of_calls in zip(group, estimated, strict=True)]
        for trajectory in group:
            lacking = [c for k in trajectory.trained_calls if None in _TOKENS(c := trajectory.calls[k])]
            if lacking and not trajectory.rows:
                what = "token ids" if lacking[0].token_ids is None else "prompt or no logprobs"
                raise TrajectoryError(f"episode {trajectory.id}: call {lacking[0].index} is trained but has no {what}")
            rows += trajectory.rows
    return rows


def rows_by_part(collection: TrajectoryCollection) -> list[list[TrainingRow]]:
    """The rows of each part of the epoch's job: a single one, unless the parts of all groups are planned."""
    planned = collection.parts or {}
    abouts = [group[0].metadata or {} for group in collection.trajectories]
    part_of = [planned.get(str(about.get(GROUP_KEY, about.get("row_id")))) for about in abouts]
    numbers = [number for number in part_of if number is not None]
    if not planned or len(numbers) < len(part_of) or sorted(numbers) != numbers:
        return [training_rows(collection)]
    parts: list[list[TrainingRow]] = [[] for _ in range(max(planned.values()) + 1)]
    for number, group in zip(numbers, collection.trajectories, strict=True):
        parts[number] += training_rows(collection.model_copy(update={"trajectories": [group]}))
    return parts


def rows_of(
    calls: Sequence[ModelCall],
    advantages: Mapping[int, float | list[float]],
    episode: str = "",
    *,
    tempered: bool = True,
) -> list[TrainingRow]:
    """The training rows of one episode; `advantages` has those of each trained call, or of each of its tokens.

    A call extends the longest row that is an exact token prefix of its prompt, or else starts a new row. So every
    sampled token is trained in exactly one row and is context elsewhere. Calls without an advantage are context; rows
    without a trained token are left out. If rows are `tempered`, the trained calls of each have the same temperature
    and parameters that shape the logits.
    """
    rows: list[TrainingRow] = []
    for index, call in enumerate(calls):
        if call.prompt_token_ids is None or call.token_ids is None:
            if index in advantages:
                raise TrajectoryError(f"episode {episode}: call {call.index} is trained but has no token ids")
            continue
        prompt, sampled = call.prompt_token_ids, call.token_ids
        is_tempered = tempered and index in advantages
        temperature = (call.logprobs_temperature if is_tempered else None) or 1.0
        shaping = _shaping(call.sampling) if is_tempered and call.sampling.get("logprobs_processed") else {}
        row, start = None, -1
        for other in rows:
            length = len(other.token_ids)
            is_prompt = length == len(prompt)
            same = (other.temperature, other.shaping) == (temperature, shaping) and not (shaping and is_prompt)
            alike = index not in advantages or same or not any(other.loss_mask)
            if alike and start < length <= len(prompt) and prompt[:length] == other.token_ids:
                row, start = other, length
        if row is None:
            start = 0
            row = TrainingRow.model_construct(
                token_ids=[], loss_mask=[], logprobs=[], advantages=[], episode=episode, calls=[]
            )
            rows.append(row)
        context, count = [0.0] * (len(prompt) - start), len(sampled)
        logprobs, advantage = [0.0] * count, advantages.get(index, 0.0)
        if index in advantages:
            if call.logprobs is None or len(call.logprobs) != count:
                present = "none" if call.logprobs is None else str(len(call.logprobs))
                raise TrajectoryError(
                    f"episode {episode}: call {call.index} has {count} sampled tokens and {present} logprobs"
                )
            logprobs = call.logprobs
        if index in advantages and temperature != 1:
            row.temperature = temperature
        if shaping:
            row.shaping = shaping
        row.token_ids += prompt[start:] + sampled
        row.loss_mask += [0] * len(context) + [int(index in advantages)] * count
        row.logprobs += context + logprobs
        assert isinstance(row.advantages, list)
        row.advantages += context + (advantage if isinstance(advantage, list) else [advantage] * count)
        row.calls.append(call.index)
    return [row for row in rows if any(row.loss_mask)]

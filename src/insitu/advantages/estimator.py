"""The advantages and training rows of an epoch: sampled tokens are the trained tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from insitu.advantages.credit import AdvantageConfig, CallAdvantages, Credit, call_advantages, has_step_rewards
from insitu.algorithms.dropping import drop_groups, drop_trajectories
from insitu.errors import TrajectoryError
from insitu.schemas.episodes import DropReason, ModelCall, TrainingRow
from insitu.schemas.finetuning import Trajectory, TrajectoryCollection


class EstimatedEpoch(NamedTuple):
    """What an epoch trains on, and the advantages of each of its trajectories' calls."""

    collection: TrajectoryCollection
    advantages: list[tuple[Trajectory, CallAdvantages]]


class AdvantageEstimator(Protocol):
    """How a trainer turns rewards into advantages."""

    def settings(self) -> dict[str, Any]:
        """The conventions in use, for the header of the run."""

    def drop_reason(self, trajectory: Trajectory) -> DropReason | None:
        """Why a trajectory cannot be trained, if so."""

    def estimate(self, group: Sequence[Trajectory]) -> list[CallAdvantages] | None:
        """The advantages of each trajectory's calls; None for a group without variance."""


@dataclass(frozen=True)
class GroupRelativeEstimator:
    """Compares the episodes of a group with one another, as the trainer's configuration says."""

    advantages: AdvantageConfig
    credit: Credit

    def settings(self) -> dict[str, Any]:
        credit = self.credit
        return {"advantages": self.advantages.model_dump(), "credit": credit.unit, "discount": credit.discount}

    def drop_reason(self, trajectory: Trajectory) -> DropReason | None:
        """Trajectories judged by step rewards need one for each trained call."""
        required = {"episode": False, "step": True, "function": trajectory.shaped_rewards is not None}
        missing = required[self.credit.unit] and not has_step_rewards(trajectory)
        return DropReason.NO_STEP_REWARDS if missing else None

    def estimate(self, group: Sequence[Trajectory]) -> list[CallAdvantages] | None:
        if not any(t.trained_calls for t in group):  # a plugin's text-only trajectories
            return estimated_by_backend(group)
        estimated = call_advantages(group, self.advantages, self.credit)
        if not any(advantage for of_episode in estimated for advantage in of_episode.values()):
            return None
        return [*estimated]


def estimated_by_backend(group: Sequence[Trajectory]) -> list[CallAdvantages] | None:
    """For backends that compute advantages themselves, from the rewards of the episodes."""
    if len({t.reward for t in group}) < 2:
        return None
    return [dict.fromkeys(t.trained_calls) for t in group]


def estimate_epoch(collection: TrajectoryCollection, estimator: AdvantageEstimator) -> EstimatedEpoch:
    """The trajectories that are trained, with their rows and advantages. Every drop is counted with its reason."""
    collection = drop_trajectories(collection, estimator.drop_reason)
    groups: list[list[Trajectory]] = []
    advantages: list[tuple[Trajectory, CallAdvantages]] = []
    reasons: dict[int, str] = {}
    for index, group in enumerate(collection.trajectories):
        estimated = estimator.estimate(group) if len(group) > 1 else None
        if estimated is None:
            reasons[index] = str(DropReason.NO_VARIANCE if len(group) > 1 else DropReason.SINGLE_MEMBER)
            continue
        groups.append([_with_rows(t, of_calls) for t, of_calls in zip(group, estimated, strict=True)])
        advantages += zip(groups[-1], estimated, strict=True)
    kept = drop_groups(collection, reasons).model_copy(update={"trajectories": groups})
    return EstimatedEpoch(kept, advantages)


def _with_rows(trajectory: Trajectory, advantages: CallAdvantages) -> Trajectory:
    """A copy with training rows; the trajectory itself if the backend computes its advantages."""
    known = {index: advantage for index, advantage in advantages.items() if advantage is not None}
    if not known:
        return trajectory
    return trajectory.model_copy(update={"rows": rows_of(trajectory.calls, known, trajectory.id or "")})


def training_rows(collection: TrajectoryCollection) -> list[TrainingRow]:
    """The rows of all trajectories. Groups whose trainer estimated no advantages get the default ones."""
    rows: list[TrainingRow] = []
    for group in collection.trajectories:
        if not any(t.rows for t in group):
            estimated = call_advantages(group, AdvantageConfig())
            group = [_with_rows(t, of_calls) for t, of_calls in zip(group, estimated, strict=True)]
        rows += [row for t in group for row in t.rows]
    return rows


def rows_of(calls: Sequence[ModelCall], advantages: Mapping[int, float], episode: str = "") -> list[TrainingRow]:
    """The training rows of one episode; `advantages` maps the index of each trained call to its advantage.

    A call extends the longest row that is an exact token prefix of its prompt, or else starts a new row. So every
    sampled token is trained in exactly one row and is context elsewhere. Calls without an advantage are context; rows
    without a trained token are left out.
    """
    rows: list[TrainingRow] = []
    for index, call in enumerate(calls):
        if call.prompt_token_ids is None or call.token_ids is None:
            if index in advantages:
                raise TrajectoryError(f"episode {episode}: call {call.index} is trained but has no token ids")
            continue
        prompt, sampled = call.prompt_token_ids, call.token_ids
        row = _longest_prefix(rows, prompt)
        if row is None:
            row = TrainingRow.model_construct(
                token_ids=[], loss_mask=[], logprobs=[], advantages=[], episode=episode, calls=[]
            )
            rows.append(row)
        trained = index in advantages
        if trained and (call.logprobs is None or len(call.logprobs) != len(sampled)):
            count = "none" if call.logprobs is None else str(len(call.logprobs))
            raise TrajectoryError(
                f"episode {episode}: call {call.index} has {len(sampled)} sampled tokens and {count} logprobs"
            )
        _append(row, prompt[len(row.token_ids) :], trained=False)
        _append(row, sampled, trained, call.logprobs, advantages.get(index, 0.0))
        row.calls.append(call.index)
    return [row for row in rows if any(row.loss_mask)]


def _longest_prefix(rows: Sequence[TrainingRow], prompt: list[int]) -> TrainingRow | None:
    prefixes = [r for r in rows if len(r.token_ids) <= len(prompt) and prompt[: len(r.token_ids)] == r.token_ids]
    return max(prefixes, key=lambda r: len(r.token_ids), default=None)


def _append(
    row: TrainingRow,
    tokens: Sequence[int],
    trained: bool,
    logprobs: Sequence[float] | None = None,
    advantage: float = 0.0,
) -> None:
    n = len(tokens)
    row.token_ids.extend(tokens)
    row.loss_mask.extend([int(trained)] * n)
    row.logprobs.extend(logprobs if trained and logprobs is not None else [0.0] * n)
    assert isinstance(row.advantages, list)
    row.advantages.extend([advantage if trained else 0.0] * n)

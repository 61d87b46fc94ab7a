"""Chooses what a preference job trains on: distinct pairs, desirable and undesirable episodes, the best; and its rows.

The rows have the tokens that were sampled, or messages where no call was recorded.
"""

import random
from collections.abc import Mapping, Sequence

from insitu.advantages.estimator import rows_of
from insitu.errors import TrajectoryError
from insitu.preferences.pairs import Duplicates, are_equal
from insitu.schemas.episodes import CandidateStep, DropReason, ModelCall, PreferencePair, TrainingRow
from insitu.schemas.finetuning import DPOItem, Trajectory, TrajectoryCollection

_CONTENT = {"token_ids", "loss_mask", "preferred", "messages", "tools", "trained_messages"}
"""What a row says to train, but for numbers that differ from sample to sample."""


def distinct_pairs(collection: TrajectoryCollection, *, as_text: bool = False) -> TrajectoryCollection:
    """Drops pairs of which the same is trained as of an earlier one: tokens and messages of their rows, or texts."""
    seen, repeated = Duplicates(), list[int]()
    for pair in (pair for group in collection.trajectories for pair in group):
        rows = [row.model_dump(mode="json", include=_CONTENT) for row in pair.rows if not as_text]
        repeated += [id(pair)] if seen.repeats(rows or pair_item(pair).model_dump(mode="json")) else []
    return collection.without(dict.fromkeys(repeated, DropReason.DUPLICATE_PAIR))


def sampled_pairs(collection: TrajectoryCollection, count: int, seed: int) -> TrajectoryCollection:
    """At most `count` pairs, a random sample in their order."""
    pairs = [id(pair) for group in collection.trajectories for pair in group]
    kept = random.Random(f"{seed}|pairs|{collection.epoch}").sample(pairs, min(count, len(pairs)))
    return collection.without(dict.fromkeys({*pairs}.difference(kept), DropReason.MAX_PAIRS))


def chosen_pairs(
    collection: TrajectoryCollection, *, distinct: bool, count: int | None, seed: int, as_text: bool = False
) -> TrajectoryCollection:
    """At most `count` pairs, without repetitions if they have to be `distinct`; `as_text`: their texts are trained."""
    collection = distinct_pairs(collection, as_text=as_text) if distinct else collection
    return collection if count is None else sampled_pairs(collection, count, seed)


def pair_item(pair: Trajectory) -> DPOItem:
    """The documented form of a pair. Raises TrajectoryError if a trajectory is not a pair."""
    if len(pair.episode) != 1 or not isinstance(pair.episode[0], DPOItem):
        raise TrajectoryError(f"trajectory {pair.id} is not a preference pair: its episode must be one DPOItem")
    return pair.episode[0]


def desirable(group: Sequence[Trajectory], threshold: float | None) -> list[bool | None]:
    """Whether each episode is desirable for KTO: above the threshold, or without one above the group's mean reward.

    None: at it.
    """
    limit = sum(t.reward for t in group) / len(group) if threshold is None else threshold
    return [None if are_equal(t.reward, limit) else t.reward > limit for t in group]


def labeled_episodes(collection: TrajectoryCollection, threshold: float | None) -> TrajectoryCollection:
    """Episodes with rows for KTO: desirable above the threshold, undesirable below, dropped at it.

    Without a threshold an episode is compared with the mean reward of its group.
    """
    labels: dict[int, bool | None] = {}
    for group in collection.trajectories:
        labels |= zip(map(id, group), desirable(group, threshold), strict=True)
    reasons = {key: DropReason.NO_VARIANCE for key, label in labels.items() if label is None}
    return _with_rows(collection.without(reasons), labels)


def best_of_group(group: Sequence[Trajectory], count: int, min_reward: float | None) -> list[Trajectory]:
    """The `count` best episodes, if their reward is at least `min_reward`; of equal ones the first."""
    ranked = sorted(group, key=lambda t: -t.reward)
    return [t for t in ranked[:count] if min_reward is None or t.reward >= min_reward]


def best_episodes(collection: TrajectoryCollection, count: int, min_reward: float | None) -> TrajectoryCollection:
    """The `count` best episodes of each row, if their reward is at least `min_reward`: rejection sampling."""
    every = {id(t) for group in collection.trajectories for t in group}
    best = {id(t) for group in collection.trajectories for t in best_of_group(group, count, min_reward)}
    return _with_rows(collection.without(dict.fromkeys(every - best, DropReason.NOT_BEST)), {})


def _with_rows(collection: TrajectoryCollection, preferred: Mapping[int, bool | None]) -> TrajectoryCollection:
    groups = [
        [t.model_copy(update={"rows": episode_rows(t, preferred.get(id(t)))}) for t in group]
        for group in collection.trajectories
    ]
    return collection.model_copy(update={"trajectories": groups})


def pair_rows(pair: PreferencePair, calls: Sequence[ModelCall], name: str) -> list[TrainingRow]:
    """The rows of both sides of a pair called `name`: candidates of an episode with these calls.

    If the tokens of one side are unknown, both are sent as messages, so that they share their prompt.
    """
    sides = (pair.chosen, pair.rejected)
    sampled = [calls[side.call] for side in sides if side.call is not None and _tokens_known(calls[side.call])]
    if len(sampled) == len(sides):
        rows = [row for call in sampled for row in rows_of([call], {0: 1.0}, tempered=False)]
    else:
        rows = [_text_row(side) for side in sides]
    marks = ({"pair": name, "preferred": preferred} for preferred in (True, False))
    return [row.model_copy(update=mark) for row, mark in zip(rows, marks, strict=True)]


def episode_rows(episode: Trajectory, preferred: bool | None = None) -> list[TrainingRow]:
    """The rows of an episode."""
    rows = rows_of(episode.calls, dict.fromkeys(episode.trained_calls, 1.0), episode.id or "", tempered=False)
    return [row.model_copy(update={"preferred": preferred}) for row in rows]


def _tokens_known(call: ModelCall) -> bool:
    return bool(call.token_ids and call.logprobs) and call.prompt_token_ids is not None


def _text_row(candidate: CandidateStep) -> TrainingRow:
    prompt = candidate.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    messages = [*messages, {"role": "assistant", "content": candidate.response}]
    return TrainingRow(messages=messages, trained_messages=[len(messages) - 1])

"""Which examples an epoch trains on: the easiest share first, grown step by step; then groups without variance go."""

import hashlib
import math
import random
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from insitu.schemas.episodes import DropReason
from insitu.schemas.finetuning import CurriculumLearningConfig


class CurriculumState(BaseModel):
    """What the curriculum remembers: examples let in so far, and the groups' mean rewards behind each example's rank.

    `epoch` is the last one selected for (0 before the first); `reward_sums` holds (sum of group means, groups).
    """

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    current_percentile: float = Field(gt=0, le=1)
    last_expansion_epoch: int = -1
    total_groups: int = 0
    included_groups: set[str] = Field(default_factory=set)
    epoch: int = Field(default=0, ge=0)
    reward_sums: dict[str, tuple[float, Annotated[int, Field(ge=1)]]] = Field(default_factory=dict)


def percentile(config: CurriculumLearningConfig, epoch: int) -> float:
    """The share of examples in training at `epoch` (1 first)."""
    expansions = (epoch - 1) // config.expansion_interval
    # rounded: 0.3 + 0.2 * 2 must include 70 of 100 examples, not 71
    return min(1.0, round(config.initial_percentile + config.increment_percentile * expansions, 9))


def select(
    config: CurriculumLearningConfig,
    state: CurriculumState,
    epoch: int,
    rewards: Mapping[str, Sequence[float]],
    seed: int,
) -> dict[str, DropReason]:
    """The examples left out at `epoch`, each with its reason; `rewards` holds every group's rewards by example id.

    Updates `state`. The included set only ever grows: at the first epoch and at each expansion, to
    ceil(percentile x number of examples), by the easiest (or hardest) examples not yet in it.
    """
    for example, group in rewards.items():
        total, count = state.reward_sums.get(example, (0.0, 0))
        state.reward_sums[example] = (total + sum(group) / len(group), count + 1)
    state.total_groups = len(state.reward_sums)
    state.epoch = epoch
    _expand(config, state)
    dropped = {e: DropReason.CURRICULUM for e in rewards if e not in state.included_groups}
    spread = {e: round(max(g) - min(g), 9) for e, g in rewards.items()}  # 0.3 - 0.2 is not below 0.1
    flat = [e for e in rewards if e not in dropped and spread[e] < config.min_reward_diff]
    dropped |= dict.fromkeys(flat, DropReason.NO_VARIANCE)
    if config.random_subsample is not None:
        rest = [e for e in rewards if e not in dropped]
        kept = set(subsample(rest, config.random_subsample, epoch, seed))
        dropped |= {e: DropReason.SUBSAMPLE for e in rest if e not in kept}
    return dropped


def _expand(config: CurriculumLearningConfig, state: CurriculumState) -> None:
    share = percentile(config, state.epoch)
    starts = not state.included_groups
    if not starts and share == state.current_percentile and (state.epoch - 1) % config.expansion_interval:
        return
    state.current_percentile = share
    state.last_expansion_epoch = state.epoch
    size = max(1, math.ceil(round(share * len(state.reward_sums), 9)))
    sign = 1 if config.sort_ascending else -1

    def rank(example: str) -> tuple[float, str]:
        total, count = state.reward_sums[example]
        return (sign * total / count, example)

    waiting = sorted((e for e in state.reward_sums if e not in state.included_groups), key=rank)
    state.included_groups |= set(waiting[: max(0, size - len(state.included_groups))])


def subsample(examples: Sequence[str], share: float, epoch: int, seed: int) -> list[str]:
    """`share` of the examples (at least one, if there is any), the same for the same seed and epoch."""
    if not examples:
        return []
    digest = hashlib.blake2b(f"{seed}|subsample|{epoch}".encode(), digest_size=8).digest()
    size = max(1, round(share * len(examples)))
    return random.Random(int.from_bytes(digest, "big")).sample(sorted(examples), size)

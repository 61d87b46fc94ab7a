"""The curriculum against its documented schedule, written out a second time in the plainest way."""

import json
import math
import random
from typing import Any

import pytest

from insitu.algorithms.curriculum import CurriculumState, percentile, select, subsample
from insitu.schemas.finetuning import CurriculumLearningConfig

Rewards = dict[str, list[float]]


def curriculum(**settings: Any) -> CurriculumLearningConfig:
    return CurriculumLearningConfig(enabled=True, **settings)


def epochs_of(seed: int, examples: int, epochs: int = 25) -> list[Rewards]:
    """Groups of four rewards an epoch; now and then a row is missing or has no variance."""
    chance = random.Random(seed)
    skill = {f"row{i}": chance.random() for i in range(examples)}
    found = []
    for epoch in range(epochs):
        present = [e for e in skill if epoch == 0 or chance.random() > 0.1]
        rewards = {e: [chance.gauss(skill[e], 0.3) for _ in range(4)] for e in present}
        for e in rewards:
            if chance.random() < 0.15:
                rewards[e] = [rewards[e][0]] * 4
        found.append(rewards)
    return found


def fresh(config: CurriculumLearningConfig) -> CurriculumState:
    return CurriculumState(config.initial_percentile)


def included_by_the_book(config: CurriculumLearningConfig, history: list[Rewards]) -> set[str]:
    """Who is in after the last epoch of `history`, from the documented sentences alone."""
    included: set[str] = set()
    for e in range(len(history)):
        if e % config.expansion_interval:
            continue
        share = config.initial_percentile + config.increment_percentile * math.floor(e / config.expansion_interval)
        means: dict[str, list[float]] = {}
        for rewards in history[: e + 1]:
            for example, group in rewards.items():
                means.setdefault(example, []).append(sum(group) / len(group))
        difficulty = {example: sum(m) / len(m) for example, m in means.items()}
        size = max(1, math.ceil(min(1.0, share) * len(difficulty) - 1e-9))
        for example in sorted(difficulty, key=lambda x: difficulty[x], reverse=not config.sort_ascending):
            if len(included) < size and example not in included:
                included.add(example)
    return included


def test_percentiles_of_the_defaults() -> None:
    config = curriculum()
    shares = [percentile(config, epoch) for epoch in range(1, 26)]
    assert shares == [0.3] * 5 + [0.5] * 5 + [0.7] * 5 + [0.9] * 5 + [1.0] * 5
    odd = curriculum(initial_percentile=0.1, increment_percentile=1, expansion_interval=1)
    assert [percentile(odd, e) for e in (1, 2, 3)] == [0.1, 1.0, 1.0]


@pytest.mark.parametrize("examples", [1, 2, 7, 10, 33, 100])
@pytest.mark.parametrize(
    "settings", [{}, {"sort_ascending": True}, {"expansion_interval": 3, "initial_percentile": 0.05}], ids=str
)
def test_the_schedule_over_25_epochs(examples: int, settings: dict[str, Any]) -> None:
    config = curriculum(**settings)
    state = fresh(config)
    history = epochs_of(examples, examples)
    before: set[str] = set()
    for epoch, rewards in enumerate(history, 1):
        dropped = select(config, state, epoch, rewards, seed=0)
        assert state.included_groups == included_by_the_book(config, history[:epoch])
        assert before <= state.included_groups
        if (epoch - 1) % config.expansion_interval and before:
            assert before == state.included_groups
        before = set(state.included_groups)
        flat = {e for e, group in rewards.items() if max(group) - min(group) < 0.1}
        assert dropped == {
            e: "curriculum" if e not in before else "no_variance" for e in rewards if e not in before or e in flat
        }
        assert state.current_percentile == percentile(config, epoch)
        assert state.total_groups == len({e for past in history[:epoch] for e in past})


@pytest.mark.parametrize(("examples", "sizes"), [(100, (30, 50, 70, 90, 100)), (10, (3, 5, 7, 9, 10)), (1, (1,) * 5)])
def test_sizes(examples: int, sizes: tuple[int, ...]) -> None:
    config = curriculum(min_reward_diff=0)
    state = fresh(config)
    rewards = {f"{i}": [float(i), i + 1.0] for i in range(examples)}
    kept = [len(rewards) - len(select(config, state, epoch, rewards, 0)) for epoch in range(1, 26)]
    assert kept == [n for n in sizes for _ in range(5)]
    assert select(config, fresh(config), 1, rewards, 0).keys() == {f"{i}" for i in range(examples - sizes[0])}


def test_difficulty_is_the_mean_over_all_epochs_so_far() -> None:
    config = curriculum(initial_percentile=0.5, increment_percentile=0.25, expansion_interval=2, min_reward_diff=0)
    state = fresh(config)
    select(config, state, 1, {"a": [4, 4], "b": [3, 3], "c": [0, 0], "d": [2, 2]}, 0)
    assert state.included_groups == {"a", "b"}
    select(config, state, 2, {"a": [0, 0], "b": [0, 0], "c": [3, 3]}, 0)
    assert state.included_groups == {"a", "b"}
    select(config, state, 3, {"c": [3, 3], "d": [1, 1]}, 0)  # c: (0 + 3 + 3) / 3 = 2, d: (2 + 1) / 2 = 1.5
    assert state.included_groups == {"a", "b", "c"}


def test_groups_below_the_least_difference_are_left_out() -> None:
    config = curriculum(initial_percentile=1, min_reward_diff=0.1)
    rewards = {"at": [0.2, 0.3], "below": [0.2, 0.29], "none": [0.5, 0.5], "above": [0.0, 1.0]}
    assert select(config, fresh(config), 1, rewards, 0) == {"below": "no_variance", "none": "no_variance"}


def test_everything_may_be_left_out() -> None:
    config = curriculum(random_subsample=0.5)
    assert select(config, fresh(config), 1, {"a": [1, 1], "b": [1, 1]}, 0) == {"a": "no_variance", "b": "curriculum"}


def test_the_subsample_is_seeded_and_never_empty() -> None:
    names = [f"{i}" for i in range(40)]
    assert len(subsample(names, 0.25, 1, 0)) == 10
    assert subsample(names, 0.25, 1, 0) == subsample(names[::-1], 0.25, 1, 0)
    assert len({tuple(subsample(names, 0.25, epoch, seed)) for epoch in range(1, 6) for seed in range(5)}) == 25
    assert len(subsample(["only"], 0.01, 1, 0)) == 1
    assert subsample([], 0.5, 1, 0) == []
    config = curriculum(initial_percentile=1, random_subsample=0.25, min_reward_diff=0.1)
    rewards: Rewards = {f"{i}": [0.0, 1.0] if i < 8 else [1.0, 1.0] for i in range(12)}
    dropped = select(config, fresh(config), 3, rewards, 5)
    assert sorted(dropped.values()).count("subsample") == 6
    assert all(str(dropped[f"{i}"]) == "no_variance" for i in range(8, 12))
    assert dropped == select(config, fresh(config), 3, rewards, 5)


def test_without_a_curriculum_nothing_is_left_out() -> None:
    config = CurriculumLearningConfig(random_subsample=0.1)
    assert select(config, fresh(config), 1, {"a": [1, 1], "b": [0, 1]}, 0) == {}


@pytest.mark.parametrize("pause", [1, 4, 5, 12, 24])
def test_a_state_read_back_from_json_continues_the_same(pause: int) -> None:
    config = curriculum(random_subsample=0.5)
    history = epochs_of(3, 30)
    straight, resumed = fresh(config), fresh(config)
    for epoch, rewards in enumerate(history, 1):
        if epoch == pause + 1:
            resumed = CurriculumState.from_json(json.loads(json.dumps(resumed.to_json())))
        assert select(config, straight, epoch, rewards, 7) == select(config, resumed, epoch, rewards, 7)
    assert straight == resumed

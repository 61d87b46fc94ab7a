"""The curriculum against its documented schedule, written out a second time in the plainest way."""

import math
import random
import re
from typing import Any

import pytest
from marks import slow_after

from insitu.algorithms.selection import (
    CurriculumState,
    apply_curriculum,
    apply_selection,
    drop_reasons,
    included_fraction,
    subsample,
)
from insitu.errors import TrajectoryError
from insitu.schemas.finetuning import CurriculumLearningConfig, Trajectory, TrajectoryCollection

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
    return CurriculumState(current_percentile=config.initial_percentile)


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
    shares = [included_fraction(config, epoch) for epoch in range(1, 26)]
    assert shares == [0.3] * 5 + [0.5] * 5 + [0.7] * 5 + [0.9] * 5 + [1.0] * 5
    odd = curriculum(initial_percentile=0.1, increment_percentile=1, expansion_interval=1)
    assert [included_fraction(odd, e) for e in (1, 2, 3)] == [0.1, 1.0, 1.0]


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
        dropped = drop_reasons(config, state, epoch, rewards, seed=0)
        assert state.included_groups == included_by_the_book(config, history[:epoch])
        assert before <= state.included_groups
        if (epoch - 1) % config.expansion_interval and before:
            assert before == state.included_groups
        before = set(state.included_groups)
        flat = {e for e, group in rewards.items() if max(group) - min(group) < 0.1}
        assert dropped == {
            e: "curriculum" if e not in before else "no_variance" for e in rewards if e not in before or e in flat
        }
        assert state.current_percentile == included_fraction(config, epoch)
        assert state.total_groups == len({e for past in history[:epoch] for e in past})


@pytest.mark.parametrize(("examples", "sizes"), [(100, (30, 50, 70, 90, 100)), (10, (3, 5, 7, 9, 10)), (1, (1,) * 5)])
def test_sizes(examples: int, sizes: tuple[int, ...]) -> None:
    config = curriculum(min_reward_diff=0)
    state = fresh(config)
    rewards = {f"{i}": [float(i), i + 1.0] for i in range(examples)}
    kept = [len(rewards) - len(drop_reasons(config, state, epoch, rewards, 0)) for epoch in range(1, 26)]
    assert kept == [n for n in sizes for _ in range(5)]
    assert drop_reasons(config, fresh(config), 1, rewards, 0).keys() == {f"{i}" for i in range(examples - sizes[0])}


def test_difficulty_is_the_mean_over_all_epochs_so_far() -> None:
    config = curriculum(initial_percentile=0.5, increment_percentile=0.25, expansion_interval=2, min_reward_diff=0)
    state = fresh(config)
    drop_reasons(config, state, 1, {"a": [4, 4], "b": [3, 3], "c": [0, 0], "d": [2, 2]}, 0)
    assert state.included_groups == {"a", "b"}
    drop_reasons(config, state, 2, {"a": [0, 0], "b": [0, 0], "c": [3, 3]}, 0)
    assert state.included_groups == {"a", "b"}
    drop_reasons(config, state, 3, {"c": [3, 3], "d": [1, 1]}, 0)  # c: (0 + 3 + 3) / 3 = 2, d: (2 + 1) / 2 = 1.5
    assert state.included_groups == {"a", "b", "c"}


def test_groups_below_the_least_difference_are_left_out() -> None:
    config = curriculum(initial_percentile=1, min_reward_diff=0.1)
    rewards = {"at": [0.2, 0.3], "below": [0.2, 0.29], "none": [0.5, 0.5], "above": [0.0, 1.0]}
    assert drop_reasons(config, fresh(config), 1, rewards, 0) == {"below": "no_variance", "none": "no_variance"}


def test_everything_may_be_left_out() -> None:
    config = curriculum(random_subsample=0.5)
    assert drop_reasons(config, fresh(config), 1, {"a": [1, 1], "b": [1, 1]}, 0) == {
        "a": "no_variance",
        "b": "curriculum",
    }


def test_the_subsample_is_seeded_and_never_empty() -> None:
    names = [f"{i}" for i in range(40)]
    assert len(subsample(names, 0.25, 1, 0)) == 10
    assert subsample(names, 0.25, 1, 0) == subsample(names[::-1], 0.25, 1, 0)
    assert len({tuple(subsample(names, 0.25, epoch, seed)) for epoch in range(1, 6) for seed in range(5)}) == 25
    assert len(subsample(["only"], 0.01, 1, 0)) == 1
    assert subsample([], 0.5, 1, 0) == []
    config = curriculum(initial_percentile=1, random_subsample=0.25, min_reward_diff=0.1)
    rewards: Rewards = {f"{i}": [0.0, 1.0] if i < 8 else [1.0, 1.0] for i in range(12)}
    dropped = drop_reasons(config, fresh(config), 3, rewards, 5)
    assert sorted(dropped.values()).count("subsample") == 6
    assert all(str(dropped[f"{i}"]) == "no_variance" for i in range(8, 12))
    assert dropped == drop_reasons(config, fresh(config), 3, rewards, 5)


# on a collection of groups, for every trainer

DOCUMENTED_STATE = {"current_percentile": 0.3, "last_expansion_epoch": -1, "total_groups": 0}


def documented() -> dict[str, Any]:
    """As the base class `Trainer` begins with it."""
    return {**DOCUMENTED_STATE, "included_groups": set()}


def collection(rewards: Rewards, key: str = "row_id") -> TrajectoryCollection:
    groups = [[Trajectory(reward=r, metadata={key: example}) for r in group] for example, group in rewards.items()]
    return TrajectoryCollection(trajectories=groups, run_id="r", dropped={"timeout": 1})


def trained_on(result: TrajectoryCollection) -> set[str]:
    return {str(group[0].metadata["row_id"]) for group in result.trajectories if group[0].metadata}


@pytest.mark.parametrize("pause", slow_after(1, [1, 4, 5, 12, 24]))
@pytest.mark.parametrize("settings", [{}, {"random_subsample": 0.5}, {"sort_ascending": True}], ids=str)
def test_every_epoch_trains_on_the_documented_set_also_after_a_resume(settings: dict[str, Any], pause: int) -> None:
    config = curriculum(**settings)
    history = epochs_of(pause, 30)
    state = documented()
    for epoch, rewards in enumerate(history, 1):
        if epoch == pause + 1:
            state = dict(CurriculumState.model_validate_json(CurriculumState(**state).model_dump_json()))
        left = apply_curriculum(collection(rewards), config, state, epoch, seed=7)
        included = included_by_the_book(config, history[:epoch])
        expected = {e for e in rewards if e in included and max(rewards[e]) - min(rewards[e]) >= 0.1}
        absent = len(rewards) - len(included & rewards.keys())
        assert state["included_groups"] == included
        assert left.dropped["timeout"] == 1
        assert left.dropped.get("curriculum", 0) == 4 * absent
        assert sum(left.dropped.values()) == 1 + 4 * (len(rewards) - len(left.trajectories))
        if config.random_subsample is None:
            assert trained_on(left) == expected
        else:
            assert trained_on(left) <= expected
            assert len(left.trajectories) == (max(1, round(len(expected) / 2)) if expected else 0)


def test_the_order_of_groups_is_kept_and_changes_nothing_else() -> None:
    config = curriculum(initial_percentile=0.5, random_subsample=0.5)
    rewards = epochs_of(1, 40, epochs=1)[0]
    backwards = dict(reversed(rewards.items()))
    one, other = (apply_curriculum(collection(r), config, documented(), 1, 3) for r in (rewards, backwards))
    ids = [[group[0].metadata["row_id"] for group in c.trajectories] for c in (one, other)]  # type: ignore[index]
    assert ids[0] == ids[1][::-1]
    another = apply_curriculum(collection(rewards), config, documented(), 1, seed=4)
    assert trained_on(another) != set(ids[0])


@pytest.mark.parametrize(
    ("rewards", "kept", "dropped"),
    [
        ({"only": [0.0, 1.0]}, {"only"}, {}),
        ({"only": [1.0, 1.0]}, set(), {"no_variance": 2}),
        ({"a": [1.0, 1.0], "b": [0.5, 0.5], "c": [0.0, 0.0, 0.0]}, set(), {"no_variance": 2, "curriculum": 5}),
        ({"a": [0.9], "b": [0.0, 1.0]}, set(), {"no_variance": 1, "curriculum": 2}),
    ],
    ids=["one group", "one without variance", "none with variance", "one member"],
)
def test_few_groups_or_none(
    rewards: Rewards, kept: set[str], dropped: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    left = apply_curriculum(collection(rewards), curriculum(), documented(), 1)
    assert (trained_on(left), left.dropped) == (kept, {"timeout": 1, **dropped})
    (said,) = caplog.records
    assert said.levelname == ("INFO" if kept else "WARNING")
    assert said.getMessage().startswith(
        f"epoch 1: training on {len(kept)} of {len(rewards)} groups; the curriculum includes 30% of the examples (1 of "
    )
    assert all(reason in said.getMessage() for reason in dropped)


@pytest.mark.parametrize("key", ["row_id", "example_id", "id"])
def test_a_group_tells_its_example_by_its_metadata(key: str) -> None:
    state = documented()
    apply_curriculum(collection({"a": [0.0, 1.0]}, key), curriculum(), state, 1)
    assert state["included_groups"] == {"a"}


def test_groups_of_no_known_example_are_refused() -> None:
    nameless = TrajectoryCollection(trajectories=[[Trajectory(reward=1)]], run_id="r")
    with pytest.raises(TrajectoryError, match=r"group 0 has no example id.* row_id, example_id, id"):
        apply_curriculum(nameless, curriculum(), documented(), 1)
    twice = collection({"a": [0.0, 1.0]})
    twice.trajectories *= 2
    with pytest.raises(TrajectoryError, match="groups 0 and 1 both belong to example 'a'"):
        apply_curriculum(twice, curriculum(), documented(), 1)
    with pytest.raises(TrajectoryError, match="epochs are numbered from 1, got 0"):
        apply_curriculum(collection({"a": [0.0, 1.0]}), curriculum(), documented(), 0)


def test_without_a_curriculum_nothing_is_left_out_or_remembered() -> None:
    nameless = TrajectoryCollection(trajectories=[[Trajectory(reward=1)]] * 2, run_id="r")
    state = documented()
    assert apply_curriculum(nameless, CurriculumLearningConfig(random_subsample=0.1), state, 1) is nameless
    assert state == documented()


# the state's file


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (None, "selection.0: a NoneType was returned; allowed: a list of 2 verdicts"),
        ("small", "selection.0: a str was returned; allowed: a list of 2 verdicts"),
        ([None], "selection.0: 1 verdicts were returned for 2"),
        (
            [True, True],
            "selection.0, group 0: a verdict is a bool; allowed: None to keep, or a text, the reason to drop",
        ),
        ([None, [True]], "selection.0, group 1: a verdict is a bool; allowed: None to keep, or a text"),
        ([None, [None, None]], "selection.0, group 1: 2 verdicts were returned for 1"),
    ],
)
def test_what_a_selection_returns_is_checked(returned: Any, problem: str) -> None:
    groups = [[Trajectory(id=name, reward=1.0)] for name in "ab"]
    with pytest.raises(TrajectoryError, match=re.escape(problem)):
        apply_selection(TrajectoryCollection(trajectories=groups, run_id="r"), lambda groups: returned, "selection.0")


def test_a_selection_that_returns_the_groups_to_keep_is_told_what_a_verdict_is() -> None:
    groups = [[Trajectory(id=name, reward=1.0)] for name in "ab"]
    with pytest.raises(TrajectoryError, match="group 0: a verdict is a Trajectory; allowed: None to keep"):
        apply_selection(TrajectoryCollection(trajectories=groups, run_id="r"), lambda groups: groups, "selection.0")

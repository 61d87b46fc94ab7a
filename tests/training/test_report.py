"""The console of a run and the numbers of an epoch."""

import io
import re
from collections import Counter
from contextlib import closing
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from rich.console import Console
from waiting import turns, until

from insitu.collect.collector import Plan
from insitu.collect.episodes import EpisodeOptions
from insitu.runs.files import VALIDATION_SCORES
from insitu.runs.forms import RowScores
from insitu.runs.records import side_metadata
from insitu.runs.store import RunStore
from insitu.schemas.episodes import Episode, EpisodeKey, EpisodeStatus, ModelCall
from insitu.schemas.finetuning import Trajectory, TrajectoryCollection
from insitu.schemas.groups import GroupRecord
from insitu.training.metrics import collected_metrics, likely_causes, missing_step_rewards, one_answer, without_variance
from insitu.training.observers import FirstRewards, Progress
from insitu.training.report import Report


def answer(text: str = "yes", tokens: int = 3, **other: Any) -> ModelCall:
    values = {"token_ids": [1] * tokens, "finish_reason": "stop", "sampling": {"temperature": 1.0}, **other}
    return ModelCall(0, "policy", [], message={"role": "assistant", "content": text}, **values)


def episode(reward: float, *calls: ModelCall, scores: dict[str, float | None] | None = None) -> Trajectory:
    trained = list(range(len(calls)))
    return Trajectory(reward=reward, calls=list(calls), trained_calls=trained, metadata={"scores": scores or {}})


def test_episodes_with_a_reward_and_nothing_to_train_count() -> None:
    """As one that fails before its first call, with a reward `on_failure`, or one that answers without the model."""
    played = [
        Episode(EpisodeKey("r", 1, "row", n), EpisodeStatus.OK, reward=r) for n, r in enumerate((1.0, -0.5, None))
    ]
    progress = Progress(Plan("r", 1, [], EpisodeOptions(), 1, rewarded=True))
    progress.on_group(GroupRecord("row", played, [episode(1.0, answer())], Counter({"no_calls": 1, "no_score": 1})))
    metrics = collected_metrics([[episode(1.0, answer())]], progress.scored)
    assert (metrics["avg_reward"], metrics["min_reward"], metrics["reward_std"]) == (0.25, -0.5, stdev([1.0, -0.5]))
    assert (metrics["num_episodes"], metrics["num_trajectories"]) == (2, 1)


def test_pairs_of_candidates_are_not_taken_for_episodes() -> None:
    """Two pairs of the same two episodes, and one of another."""
    sides = [("a", "b"), ("a", "b"), ("a", "c")]
    pairs = [episode(0.5) for _ in sides]
    for pair, (chosen, rejected) in zip(pairs, sides, strict=True):
        pair.metadata = side_metadata("chosen", chosen, []) | side_metadata("rejected", rejected, [])
    metrics = collected_metrics([pairs])
    assert (metrics["num_episodes"], metrics["num_trajectories"], metrics["avg_reward"]) == (3, 3, 0.5)
    assert (metrics["reward_std"], metrics["frac_reward_zero_std"]) == (None, None)


def test_the_statistics_of_an_epoch() -> None:
    groups = [
        [
            episode(1.0, answer(tokens=2), answer(tokens=4), scores={"right": 1.0, "short": 0.5, "dead": None}),
            episode(0.0, answer(tokens=6, finish_reason="length"), scores={"right": 0.0, "short": None, "dead": None}),
        ],
        [episode(0.5, answer(tokens=4, sampling={"temperature": 0})) for _ in range(2)],
        [episode(1.0)],
    ]
    metrics = collected_metrics(groups)
    assert metrics == {
        "avg_reward": 0.6,
        "min_reward": 0.0,
        "max_reward": 1.0,
        "reward_std": pytest.approx(fmean([stdev([1.0, 0.0]), 0.0])),
        "frac_reward_zero_std": pytest.approx(2 / 3),  # an equal group, and one of a single episode
        "scores": {"right": 0.5, "short": 0.5, "dead": None},
        "num_trajectories": 5,
        "num_episodes": 5,
        "num_groups": 3,
        "completions_mean_length": 4.0,
        "completions_clipped_ratio": 0.2,
        "greedy_groups": 1,
    }
    alone = collected_metrics([[episode(1.0)]])
    unknown = ("reward_std", "frac_reward_zero_std", "completions_mean_length", "completions_clipped_ratio")
    assert [alone[name] for name in unknown] == [None] * 4


@pytest.mark.parametrize(
    ("groups", "causes"),
    [
        ([], []),
        (
            [[episode(0.0, answer(sampling={"temperature": 0}))] * 2, [episode(1.0, answer("a"))] * 2],
            ["1 of 2 groups sampled at temperature 0"],
        ),
        ([[episode(0.0, answer())] * 2, [episode(1.0, answer())] * 2], ["the answers of each row are the same"]),
        (
            [[episode(0.0, answer(text, finish_reason="length")) for text in "abc"]],
            ["all 3 answers were cut off at max_tokens", "every episode has the reward 0: check that the evaluator"],
        ),
        (
            [[episode(0.25, answer(text)) for text in "ab"], [episode(1.0, answer(text)) for text in "ab"]],
            ["the episodes of a row score the same, from 0.25 to 1 by row"],
        ),
        (
            [[episode(reward, answer(str(reward))) for reward in (0.0, 1.0)], [episode(0.5, answer(t)) for t in "ab"]],
            ["rewards differ in 1 of 2 groups, but not what is compared in their place: with credit: step"],
        ),
    ],
    ids=["none", "greedy", "same answers", "cut off", "coarse", "equal steps"],
)
def test_the_likely_causes_of_no_variance(groups: list[list[Trajectory]], causes: list[str]) -> None:
    found = likely_causes(groups)
    assert len(found) == len(causes), found
    for cause, start in zip(found, causes, strict=True):
        assert str(cause).startswith(start)


@pytest.mark.parametrize(
    ("right", "earlier", "says"),
    [
        (1, [], "31 of 32 episodes end with 'yes', whatever the row: raise the temperature, or show the model other"),
        (1, [{"epoch": 1, "avg_reward": 0.5, "max_reward": 1.0}], "whatever the row: the model has collapsed: begin"),
        (3, [], None),
    ],
    ids=["from the start", "later", "mostly right"],
)
def test_one_answer_to_all_rows_is_told(right: int, earlier: list[dict[str, Any]], says: str | None) -> None:
    """Here "yes" is the right answer to so many of four rows."""
    groups = [[episode(float(row < right), answer("yes")) for _ in range(8)] for row in range(4)]
    groups[3][0] = episode(0.0, answer("no"))
    cause = one_answer(groups, earlier)
    assert (cause is None) is (says is None)
    assert says is None or says in str(cause)
    assert says is None or likely_causes(groups, earlier)[0] == cause
    assert one_answer(groups[:3]) is None, "too few rows"
    with_tools = [[episode(0.0, answer("calls"), answer("done")) for _ in range(8)] for _ in range(4)]
    assert one_answer(with_tools) is None, "an agent with tools may end alike"


@pytest.mark.parametrize(
    ("mean", "says"),
    [
        (0.45, "every episode has the reward 0, after 0.45 on average in epoch 2: the model has probably moved too"),
        (0.05, "every episode has the reward 0: check"),
    ],
)
def test_rewards_that_are_lost_are_not_the_evaluators_fault(mean: float, says: str) -> None:
    earlier = [{"epoch": epoch, "avg_reward": value, "max_reward": 1.0} for epoch, value in ((1, 0.0), (2, mean))]
    (cause,) = likely_causes([[episode(0.0, answer(text)) for text in "ab"]], earlier)
    assert str(cause).startswith(says)


def test_rows_that_have_been_learned_are_no_fault() -> None:
    of_all = ("avg_reward", "min_reward", "max_reward")
    earlier = [dict(zip(of_all, values, strict=True)) for values in ((0.4, 0.0, 1.0), (None, None, None))]
    constant = {"avg_reward": 0.6999999999999998, "min_reward": 0.7, "max_reward": 0.7}
    (cause,) = likely_causes([[episode(0.7, answer(text)) for text in "ab"]], [constant])
    assert str(cause).startswith("every episode has the reward 0.7: check")
    (cause,) = likely_causes([[episode(1.0, answer(text)) for text in "ab"]], earlier)
    expected = "every episode has the reward 1, and none had more before: if these rows are learned, end the run"
    assert str(cause).startswith(expected)


def test_only_groups_without_variance_are_explained() -> None:
    groups = [[episode(1.0).model_copy(update={"id": name})] for name in ("a", "b", "c")]
    collected = TrajectoryCollection(trajectories=groups, run_id="r")
    assert without_variance(collected, {"a": "no_variance", "b": "curriculum"}) == [groups[0]]


def metrics(**values: Any) -> dict[str, Any]:
    return {"num_trajectories": 8, "num_groups": 4, "dropped": {}, "credit_by_function": {}, **values}


def printed() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=400, highlight=False), file


def test_the_line_of_an_epoch() -> None:
    console, file = printed()
    report = Report(console)
    report.begin_run(2)
    values = {
        "avg_reward": 0.5,
        "reward_std": 0.25,
        "frac_reward_zero_std": 0.25,
        "completions_mean_length": 7.5,
        "completions_clipped_ratio": 0.125,
        "greedy_groups": 1,
        "scores": {"right": 0.5, "short": None},
        "seconds": {"collect": 1.0, "train": 2.0, "validate": 0.0},
    }
    cut_off = {"completions_mean_length": 8, "completions_clipped_ratio": 1.0}
    report.epoch(1, 2, metrics(**values), "episodes")
    report.epoch(2, 2, metrics(avg_reward=1.0, **cut_off, scores={"right": 1.0}), "preference pairs")
    report.end_run()
    first, scores, second = file.getvalue().splitlines()
    assert first.startswith(
        "epoch 1/2  reward 0.5 std 0.25  8 episodes  variance in 75 % of groups  length 7.5 (12 % cut off)  "
        "GREEDY: 1 of 4 groups at temperature 0  collect 1.0 s, train 2.0 s  "
    )
    assert first.endswith(" s left")
    assert scores == "  scores: right 0.5, short -"
    assert second == "epoch 2/2  reward 1  8 preference pairs  length 8 (100 % cut off)"


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ([0.0] * 8, "changed by +0.000 (95 % CI +0.000 to +0.000, paired by 8 rows)"),
        ([1.0] * 7 + [0.0], "changed by +0.875 (95 % CI +0.500 to +1.000, paired by 8 rows)"),
        ([1.0] + [0.0] * 7, "changed by +0.125 (95 % CI +0.000 to +0.500, paired by 8 rows); this may be chance"),
    ],
)
def test_the_change_of_a_held_out_score(tmp_path: Path, after: list[float], said: str) -> None:
    console, file = printed()
    with closing(RunStore(tmp_path)) as store:
        for epoch, scores in enumerate(([0.0] * 8, after)):
            rows = RowScores(epoch, epoch, "right", "digest", {str(row): [score] for row, score in enumerate(scores)})
            store.append(VALIDATION_SCORES, [rows._asdict()])
        validation = {"policy_version": 0, "avg_reward": 0.0, "ci95": [0.0, 0.0], "num_examples": 8, "dropped": {}}
        Report(console).summary([{"epoch": 0, **validation}, {"epoch": 1, **validation}], None, store)
    assert f"\n{said}\n" in file.getvalue()


async def test_without_a_terminal_a_line_now_and_then_says_how_far_a_phase_is() -> None:
    console, file = printed()
    report = Report(console, interval=0)
    for what, total in (("epoch 1: collecting", 4), ("epoch 1: training", None)):
        with report.phase(what, total):
            report.advance(0.25)
            await turns()
        before = file.getvalue()
        await turns()
        assert file.getvalue() == before, "a phase that has ended says nothing"
    lines = file.getvalue().splitlines()
    assert re.fullmatch(r"epoch 1: collecting: 1 of 4 episodes, mean reward 0\.25, 0 s, about \S+ s left", lines[0])
    assert "epoch 1: training: 0 s" in lines


async def test_what_was_played_before_says_nothing_of_how_long_the_rest_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a run continues: half of its epoch is there at once."""
    console, file = printed()
    now = [100.0]
    monkeypatch.setattr(console, "get_time", lambda: now[0])
    report = Report(console, interval=0)
    with report.phase("epoch 1: collecting", 100):
        report.expect_given(50)
        for _ in range(50):
            report.advance()
        await turns()
        now[0] += 30
        report.advance()
        await turns()
    first, *others = file.getvalue().splitlines()
    assert first == "epoch 1: collecting: 50 of 100 episodes, 0 s"
    assert others[-1] == "epoch 1: collecting: 51 of 100 episodes, 30 s, about 24 min left"


async def test_a_long_phase_says_once_how_to_make_it_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    console, file = printed()
    now = [100.0]
    monkeypatch.setattr(console, "get_time", lambda: now[0])
    report = Report(console, interval=0)
    with report.phase("epoch 1: collecting", 100, "shorter with fewer rows"):
        for _ in range(2):
            now[0] += 30
            report.advance()
            await turns()
    first, *others = [line for line in file.getvalue().splitlines() if " left" in line]
    assert first == "epoch 1: collecting: 1 of 100 episodes, 30 s, about 50 min left (shorter with fewer rows)"
    assert others
    assert not any("shorter" in line for line in others)


async def test_a_terminal_shows_the_run_and_the_phase_with_their_counts() -> None:
    file = io.StringIO()
    console = Console(file=file, width=100, force_terminal=True, highlight=False)
    report = Report(console)
    report.begin_run(3)
    with report.phase("epoch 0: validating", 24):
        report.advance()
        await until(lambda: "1/24" in file.getvalue())
        report.advance(0.5)
        await until(lambda: "epoch 0: validating, mean reward 0.5" in file.getvalue())
    report.end_run()
    assert "0/3" in file.getvalue()


@pytest.mark.parametrize(
    ("rewards", "seconds", "says"),
    [
        ([0.0] * 40, 21, ["the first 16 episodes all have the reward 0, from which nothing can be learned. The last"]),
        ([0.0] * 15, 21, []),
        ([0.0] * 40, 19, []),
        ([0.0] * 15 + [1.0] + [0.0] * 40, 21, []),
    ],
    ids=["equal", "few", "soon", "one differs"],
)
def test_a_long_first_epoch_says_early_that_its_rewards_are_equal(
    rewards: list[float], seconds: float, says: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    console, file = printed()
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    first = FirstRewards(Report(console))
    now[0] += seconds
    for number, reward in enumerate(rewards):
        key = EpisodeKey("run", 1, str(number), 0)
        first.on_episode(Episode(key, EpisodeStatus.OK, output="I do not know", calls=[answer()], reward=reward))
    lines = file.getvalue().splitlines()
    assert len(lines) == len(says)
    for line, start in zip(lines, says, strict=True):
        assert line.startswith(start)
        assert "sampled 3 tokens; its answer: 'I do not know'. If the others go on like this, stop (Ctrl-C)" in line


def test_step_rewards_that_are_not_those_of_the_trained_calls_are_counted() -> None:
    group = [Trajectory(id=name, reward=0.0, trained_calls=[0, 1], shaped_rewards=[1.0] * 4) for name in "ab"]
    (cause,) = missing_step_rewards([group], {"a": "no_step_rewards"})
    assert str(cause).startswith(
        "1 of 2 episodes have no step reward for each trained call: the first has 4 for 2: report one for each answer"
    )
    assert [*missing_step_rewards([group], {"a": "curriculum"})] == []

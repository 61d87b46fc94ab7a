"""What a run records of episodes that fail, go unscored, or are sampled in other ways: two runs of which many ask."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from factories import digits_project, read_lines, write_rows
from processes import run_project

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}, "required": ["n"]}
ODD = {
    "plain": {"say": "a"},  # the first row is rehearsed
    "fails": {"say": "b", "raise": "the board fell over"},
    "nan": {"say": "c", "score": "nan"},
    "none": {"say": "d", "score": "none"},
    "hangs": {"say": "e", "hang": True},
    "cut": {"say": "cut", "sampling": {"temperature": 2, "top_p": 0.99}},
    "greedy": {"say": "greedy", "sampling": {"temperature": 0}},
    "cooler": {"say": "f", "sampling": {"temperature": 0.7}},
}
CHANGED_LOGITS: list[dict[str, Any]] = [
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"regex": "[a-z]{3,9}( [a-z]+)*"}, "temperature": 1.7},
    {"structured_outputs": {"choice": ["left", "right"]}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    {"logit_bias": {"70": 3, "80": -2}, "temperature": 0.6},
    {"bad_words": ["e", "th"], "frequency_penalty": 0.7},
    {},
]
PENALIZED = [{"say": "b", "raise": "lost"}, {"say": "c", "earn": 0.25, "raise": "lost"}, {"say": "d", "score": "x"}]
"""The evaluator fails on "x"."""
OTHER = ("-o", "eval.evaluators.other", "{_type: digits}")


class Recorded(NamedTuple):
    """An epoch, what the command printed, and its episodes and calls by the number of their row."""

    metrics: dict[str, Any]
    printed: str
    episodes: dict[int, list[dict[str, Any]]]
    calls: dict[int, list[dict[str, Any]]]

    def of(self, name: str) -> list[dict[str, Any]]:
        return self.episodes[[*ODD].index(name)]


def record(folder: Path, rows: list[dict[str, Any]], *options: str) -> Recorded:
    digits_project(folder)
    write_rows(folder, rows)
    code, out, err = run_project(folder, "-o", "finetuning.num_epochs", "1", *options)
    assert code == 0, err
    (metrics,) = read_lines(folder / "run/training_metrics.jsonl")
    lines = read_lines(folder / "run/episodes.jsonl.gz")[1:]
    row_of = {line["episode"]: int(line["row_id"]) for line in lines}
    calls = read_lines(folder / "run/calls.jsonl.gz")[1:]
    return Recorded(
        metrics,
        out,
        {row: [line for line in lines if row_of[line["episode"]] == row] for row in range(len(rows))},
        {row: [call for call in calls if row_of[call["episode"]] == row] for row in range(len(rows))},
    )


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    options = ("-o", "llms.player.temperature", "1.5", "-o", "eval.general.episode_timeout", "5", *OTHER)
    return record(tmp_path_factory.mktemp("odd"), [*ODD.values()], *options)


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Each row has other parameters; the block has those of the last ones."""
    rows = [{"say": f"Row {i}", "sampling": {"max_tokens": 24, **each}} for i, each in enumerate(CHANGED_LOGITS)]
    penalty = ("-o", "finetuning.reward_function.on_failure", "-0.5")
    options = ("-o", "llms.player.presence_penalty", "0.5", "-o", "finetuning.training_evaluators", "[]")
    return record(tmp_path_factory.mktemp("changed"), [*rows, *PENALIZED], *options, *penalty, *OTHER)


def test_what_is_dropped_is_counted_by_its_reason_and_the_rest_trains(odd: Recorded) -> None:
    four = ("nan_score", "no_score", "no_variance", "timeout", "unmodeled_sampling", "workflow_error")
    assert odd.metrics["dropped"] == dict.fromkeys(four, 4)
    assert odd.metrics["num_groups"] == 4  # plain, cut, greedy, cooler
    assert odd.metrics["num_trajectories"] == 16
    assert (odd.metrics["episodes"], odd.metrics["policy_version"]) == (8, 1)


def test_a_workflow_exception_is_told(odd: Recorded) -> None:
    assert "the board fell over" in odd.printed
    assert [(e["outcome"], e["reason"], e["reward"]) for e in odd.of("fails")] == [
        ("failed", "workflow_error", None)
    ] * 4


@pytest.mark.parametrize(("row", "reason"), [("nan", "nan_score"), ("none", "no_score"), ("hangs", "timeout")])
def test_an_episode_without_a_score_has_no_reward_and_never_zero(odd: Recorded, row: str, reason: str) -> None:
    assert [(e["reason"], e["reward"]) for e in odd.of(row)] == [(reason, None)] * 4


def test_all_evaluators_score_the_episodes_of_training(odd: Recorded, changed: Recorded) -> None:
    """The others are recorded and change nothing, unless the file wants none of them."""
    reward = odd.metrics["avg_reward"]
    assert odd.metrics["scores"] == pytest.approx({"score": reward, "other": reward})
    for episode in [*odd.of("plain"), *odd.of("cooler")]:
        assert episode["scores"] == {"score": episode["reward"], "other": episode["reward"]}
    assert "\n  scores: score " in odd.printed
    assert changed.metrics["scores"].keys() == {"score"}


def test_completions_are_measured(odd: Recorded) -> None:
    """Those of the groups that the epoch has."""
    calls = [call for name in ("plain", "cut", "greedy", "cooler") for call in odd.calls[[*ODD].index(name)]]
    lengths = [len(call["token_ids"]) for call in calls]
    clipped = [call["finish_reason"] == "length" for call in calls]
    assert len(calls) == 16
    assert odd.metrics["completions_mean_length"] == sum(lengths) / 16
    assert odd.metrics["completions_clipped_ratio"] == sum(clipped) / 16


def test_what_is_sampled_at_a_temperature_is_trained_at_it(odd: Recorded) -> None:
    """The agent sends one of its own for a row; calls are stored with it and with the logprobs at it."""
    assert odd.metrics["logprob_gap"] < 1e-6
    calls = [call for name in ("plain", "cooler") for call in odd.calls[[*ODD].index(name)]]
    assert {(c["sampling"]["temperature"], c["logprobs_temperature"]) for c in calls} == {(1.5, 1.5), (0.7, 0.7)}


def test_calls_that_no_loss_models_are_counted_and_not_trained(odd: Recorded) -> None:
    assert odd.metrics["untrained_calls/top_p"] == 4
    told = "epoch 1: 4 model calls are not trained, as they were sampled with top_p, which the loss does not mod"
    assert told in odd.printed
    assert "GREEDY: 1 of 4 groups at temperature 0" in odd.printed


def test_what_is_sampled_with_changed_logits_is_trained_so(changed: Recorded) -> None:
    calls = [call for of_row in changed.calls.values() for call in of_row]
    assert len(calls) >= 2 * len(CHANGED_LOGITS)
    assert all(call["sampling"]["logprobs_processed"] for call in calls)
    assert changed.metrics["logprob_gap"] < 1e-5
    assert changed.metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert not {key for key in changed.metrics if key.startswith("untrained_calls")}


def test_failed_episodes_get_the_configured_penalty(changed: Recorded) -> None:
    assert changed.metrics["min_reward"] == -0.5
    assert changed.metrics["num_trajectories"] == 4 * (len(CHANGED_LOGITS) + len(PENALIZED))
    alike = [row for row, episodes in changed.episodes.items() if len({e["reward"] for e in episodes}) == 1]
    assert {*range(len(CHANGED_LOGITS), len(changed.episodes))} <= {*alike}
    assert changed.metrics["dropped"] == {"no_variance": 4 * len(alike)}
    raised, earned, unscored = (changed.episodes[row] for row in range(len(CHANGED_LOGITS), len(changed.episodes)))
    assert [(e["reward"], e["step_rewards"]) for e in raised] == [(-0.5, [-0.5])] * 4
    assert [e["step_rewards"] for e in earned] == [[-0.25]] * 4
    assert [e["step_rewards"] for e in unscored] == [[-0.5]] * 4

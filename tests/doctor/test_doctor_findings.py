"""The judgements of `insitu doctor` on made-up evidence, and its estimate on made-up measures."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from insitu.disk.files import readable_bytes, readable_seconds
from insitu.doctor.diagnosis import Budget
from insitu.doctor.estimate import Measures, about_disk, estimate
from insitu.doctor.findings import Evidence, Severity, is_random, severity_of
from insitu.doctor.judgements import (
    about_calls,
    about_failures,
    about_groups,
    about_job,
    about_lengths,
    about_prefixes,
    about_tool_calls,
    broken_prefixes,
    judge,
)
from insitu.doctor.plan import Plan, about_rows, about_settings
from insitu.schemas.episodes import DropReason, Episode, EpisodeKey, EpisodeStatus, ModelCall
from insitu.schemas.evaluation import EvalInputItem
from insitu.schemas.finetuning import CurriculumLearningConfig, PolicyEndpoint, Trajectory, TrajectoryCollection
from insitu.schemas.training_jobs import KeepConfig

STOPS, HARMS, NOTE = Severity.STOPS_LEARNING, Severity.HARMS, Severity.NOTE
SERVED = PolicyEndpoint("http://127.0.0.1:8700/v1", "policy", max_length=100)
PLAN = Plan(
    rows=[EvalInputItem(id=n, input_obj=f"row {n}") for n in range(64)],
    held_out=[EvalInputItem(id=n, input_obj=f"held out {n}") for n in range(100)],
    rows_per_epoch=64,
    generations=8,
    epochs=10,
    validations=3,
    validation_reps=2,
    concurrency=64,
    curriculum=CurriculumLearningConfig(),
    trainer="trainers.grpo",
    builder="trajectory_builders.episodes",
    adapter="trainer_adapters.backend",
    reward="score",
    llms=("player",),
    target_functions=("<workflow>",),
    dataset="rows.jsonl",
    held_out_name="held_out.jsonl",
)


def call(index: int = 0, prompt: str = "a", answer: str = "b", **values: Any) -> ModelCall:
    """A call whose tokens are the characters of its texts."""
    fields = {
        "messages": [{"role": "user", "content": prompt}],
        "message": {"role": "assistant", "content": answer},
        "prompt_token_ids": [*prompt.encode()],
        "token_ids": [*answer.encode()],
        "logprobs": [0.0] * len(answer),
        "finish_reason": "stop",
        **values,
    }
    return ModelCall(index, "policy", llm="player", **fields)


def evidence(*groups: list[float], episodes: list[Episode] | None = None, **values: Any) -> Evidence:
    """Groups with these rewards, whose episodes made a call each."""
    made = [
        [
            Trajectory(reward=reward, id=f"{row}/{n}", calls=[call(answer=f"{n}")], trained_calls=[0])
            for n, reward in enumerate(rewards)
        ]
        for row, rewards in enumerate(groups)
    ]
    alike = {str(t.id): DropReason.NO_VARIANCE for group in made for t in group if len({t.reward for t in group}) == 1}
    collection = TrajectoryCollection(trajectories=made, run_id="r")
    selected = collection.model_copy(update={"drop_reasons": alike})
    return Evidence(collection, selected, episodes=episodes or [], **{"served": SERVED, **values})


def answered(*calls: ModelCall) -> Evidence:
    """Episodes of one call each."""
    made = TrajectoryCollection(
        trajectories=[[Trajectory(reward=0, calls=[each], trained_calls=[0]) for each in calls]], run_id="r"
    )
    return Evidence(made, made)


def played(*calls: ModelCall, reason: DropReason | None = None, **values: Any) -> Episode:
    outcome = EpisodeStatus.OK if reason is None else EpisodeStatus.FAILED
    return Episode(EpisodeKey("r", 1, "0", 0), outcome, calls=[*calls], reason=reason, **values)


@pytest.mark.parametrize(
    ("groups", "code"),
    [
        ([[0, 1], [1, 0], [1, 1], [0, 0]], None),
        ([[0, 1], *[[1, 1]] * 7], "reward_ceiling"),
        ([[0, 1], *[[0, 0]] * 7], "reward_floor"),
        ([[0, 1], *[[0, 0]] * 3, *[[1, 1]] * 3], "little_variance"),
    ],
    ids=["healthy", "ceiling", "floor", "few"],
)
def test_few_groups_with_variance(groups: list[list[float]], code: str | None) -> None:
    found = [*about_groups(PLAN, evidence(*groups))]
    assert [finding.code for finding in found] == ([code] if code else [])
    for finding in found:
        assert finding.severity is HARMS
        assert finding.what.startswith(f"1 of {len(groups)} groups have variance")


def test_pairs_that_were_not_made() -> None:
    nothing = evidence(makes_pairs=True)
    nothing.selected.dropped = {"equal_scores": 7, "single_candidate": 1}
    [finding] = about_groups(PLAN, nothing)
    assert (finding.code, finding.severity, finding.where) == ("nothing_selected", STOPS, "trainers.grpo")
    assert "7 equal_scores" in finding.what


def test_episodes_of_which_none_is_selected() -> None:
    strict = evidence([0.25, 0.5], compares_groups=False)
    strict.selected = TrajectoryCollection(trajectories=[], run_id="r", dropped={"not_best": 2})
    [finding] = about_groups(PLAN, strict)
    assert (finding.code, finding.severity, finding.where) == ("nothing_selected", STOPS, "trainers.grpo")
    assert finding.what.endswith("dropped: 2 not_best")


def test_how_severe_failures_are() -> None:
    """Failures of some episodes stop everything if no group remains."""
    assert [severity_of(count, 40) for count in (40, 4, 3)] == [STOPS, HARMS, NOTE]
    failed = [played(reason=DropReason.TIMEOUT), played(reason=DropReason.WORKFLOW_ERROR, error="ValueError: no")]
    for groups, severity in (((), STOPS), (([0, 1],), HARMS)):
        found = [*about_failures(PLAN, evidence(*groups, episodes=[*failed, played(call())]), [])]
        assert [(f.code, f.severity) for f in found] == [("timeout", severity), ("workflow_error", severity)]
        assert found[1].what == "1 of 3 episodes failed as workflow_error: ValueError: no"


def test_calls_that_cannot_be_trained() -> None:
    without_ids = played(call(token_ids=None), reason=DropReason.NO_TARGET_CALLS)
    [finding] = about_failures(PLAN, evidence(episodes=[without_ids]), [])
    assert (finding.code, finding.severity, finding.where) == ("no_token_ids", STOPS, "llms.player._type")
    problem = "episode r/1/0/0/0: a call to train on was sampled at policy version 1"
    asked = played(call(), requested={SERVED.base_url: 1})
    stray = evidence([0, 1], episodes=[asked], stray_completions=3, sampled_problem=problem)
    found = [*about_calls(PLAN, stray)]
    assert [(f.code, f.severity) for f in found] == [("other_weights", STOPS), ("stray_calls", HARMS)]
    assert "3 completions" in found[1].what


@pytest.mark.parametrize(("version", "severity"), [(None, STOPS), (0, HARMS)])
def test_calls_of_another_server(version: int | None, severity: Severity) -> None:
    """One that reports a version may be the trained one by another name."""
    asked = played(replace(call(), policy_version=version), requested={"http://elsewhere/v1": 1})
    [finding] = about_calls(PLAN, evidence(episodes=[asked], served=replace(SERVED, version=0)))
    assert (finding.code, finding.severity) == ("other_server", severity)


def test_answers_that_fill_the_context() -> None:
    full = evidence([0, 1])
    for trajectory in full.groups[0]:
        trajectory.calls = [call(prompt="a" * 98, answer="bb", finish_reason="length")]
    [finding] = about_lengths(PLAN, full)
    assert (finding.code, finding.severity) == ("context_full", HARMS)
    for trajectory in full.groups[0]:
        trajectory.calls = [call(prompt="a" * 93, answer="b")]
    [finding] = about_lengths(PLAN, full)
    assert (finding.code, finding.severity) == ("context_nearly_full", NOTE)


def continued(first: ModelCall, answer: str, prompt: str, index: int = 1) -> ModelCall:
    """A call that sends an earlier one's messages and an answer; `prompt` is what its template makes of them."""
    messages = [*first.messages, {"role": "assistant", "content": answer}, {"role": "user", "content": "c"}]
    return call(index, prompt=prompt, messages=messages)


def test_prefixes_that_break() -> None:
    first = call()
    assert broken_prefixes([first, continued(first, "b", "abc")]) == []
    [broken] = broken_prefixes([first, continued(first, "b", "aBc")])
    assert (broken.call, broken.earlier, broken.position, broken.completion) == (1, 0, 1, 1)
    assert not broken.rewritten
    [broken] = broken_prefixes([first, continued(first, "Bb", "aBbc")])
    assert broken.rewritten
    assert broken_prefixes([first, call(1, prompt="other")]) == []  # another conversation


def test_candidates_of_one_prompt_break_no_prefix() -> None:
    """Only one of them can be extended in its row; another that is continued begins one."""
    one, other = call(), call(1, answer="x")
    assert broken_prefixes([one, other, continued(one, "b", "abc", 2), continued(one, "b", "abc", 3)]) == []
    assert broken_prefixes([one, other, continued(other, "x", "axc", 2)]) == []


def test_the_text_of_a_broken_prefix() -> None:
    first = call()
    seen = evidence(episodes=[played(first, continued(first, "b", "aBc")), *[played(call())] * 39])
    [finding] = about_prefixes(PLAN, seen, lambda ids: bytes(ids).decode())
    assert (finding.code, finding.severity) == ("prefix_broken", NOTE)
    assert "from token 1, in the answer, 'Bc' instead of 'b'" in finding.what


def test_tool_calls_that_the_agent_did_not_get() -> None:
    """Malformed ones, and those of another format; not those that were cut off or that the agent got."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    text = '[TOOL_CALLS][{"name": "look", "arguments": {"at": "sky"}}]'
    got = {"role": "assistant", "content": text, "tool_calls": [{"id": "a"}]}
    fine = [
        call(tools=tools),
        call(tools=tools, message=got),
        call(answer=text),
        call(answer=text.replace("look", "go"), tools=tools),
        call(answer="[TOOL_CALLS][{", tools=tools, tool_call_malformed=True, finish_reason="length"),
    ]
    assert [*about_tool_calls(PLAN, answered(*fine))] == []
    broken = call(answer="<tool_call>{", tools=tools, tool_call_malformed=True)
    malformed, unparsed = about_tool_calls(PLAN, answered(broken, call(answer=text, tools=tools)))
    assert (malformed.code, malformed.severity) == ("malformed_tool_calls", HARMS)
    assert "1 of 2 answers have tool calls that cannot be parsed, such as '<tool_call>{'" in malformed.what
    assert (unparsed.code, unparsed.severity) == ("unparsed_tool_calls", HARMS)
    assert "tool_format: mistral" in unparsed.change
    assert unparsed.where == "trainer_adapters.backend.tool_format"


def test_a_random_environment() -> None:
    """After the same history another prompt: chance, not the model."""
    opening, reply = call(), call(1, prompt="b1")
    other = [Trajectory(reward=0, calls=[opening, each]) for each in (reply, call(1, prompt="b2"))]
    assert is_random([other])
    model_differs = [Trajectory(reward=0, calls=[call(answer=a), call(1, prompt=a)]) for a in ("b1", "b2")]
    assert not is_random([model_differs])


def test_rows_whose_question_is_an_object() -> None:
    """It may only set the scene of a random environment, which a few episodes need not show."""
    for question, severity in (("Where?", HARMS), ({"mark": "X"}, NOTE)):
        rows = [EvalInputItem(id=n, input_obj=question) for n in range(4)]
        plan = replace(PLAN, rows=rows, held_out=rows)
        found = [*about_rows(plan, random_environment=False)]
        assert [(f.code, f.severity) for f in found] == [
            ("repeated_rows", severity),
            ("held_out_rows_trained", severity),
        ]
        assert not [*about_rows(plan, random_environment=True)]


@pytest.mark.parametrize(("kl", "severity"), [(None, None), (0.9, None), (1.5, HARMS), (16.6, STOPS)])
def test_a_job_that_moves_the_model_far(kl: float | None, severity: Severity | None) -> None:
    found = [*about_job(PLAN, evidence([0.0, 1.0], job_kl=kl))]
    assert [(f.code, f.severity) for f in found] == ([("moved_far", severity)] if severity is not None else [])
    assert all(f.where == "trainer_adapters.backend.training.learning_rate" for f in found)


@pytest.mark.parametrize(
    ("staleness", "gap", "found"), [(0, 0.5, []), (1, 0.1, []), (1, 0.5, ["stale_gap"]), (1, None, [])]
)
def test_a_job_that_moves_the_learner_from_earlier_weights(staleness: int, gap: float | None, found: list[str]) -> None:
    findings = [*about_job(replace(PLAN, staleness=staleness), evidence([0.0, 1.0], job_gap=gap))]
    assert [f.code for f in findings] == found
    assert all((f.severity, f.where) == (HARMS, "trainers.grpo.staleness") for f in findings)


def test_rates_and_warm_ups() -> None:
    found = [*about_settings(replace(PLAN, training={"learning_rate": 0.02}))]
    assert [(f.code, f.severity) for f in found] == [("learning_rate_high", HARMS)]
    assert not [*about_settings(replace(PLAN, training={"learning_rate": 0.02, "lora": {"rank": 8}}))]
    [slow] = about_settings(replace(PLAN, training={"learning_rate": 1e-9}))
    assert slow.code == "learning_rate_low"
    [warm_up] = about_settings(replace(PLAN, warms_up=True))
    assert (warm_up.code, warm_up.where) == ("before_warm_up", "trainers.grpo.sft")


def test_what_a_budget_plays() -> None:
    assert [Budget().rows_and_generations(n) for n in (2, 8, 16, 100)] == [(8, 2), (8, 8), (4, 16), (1, 64)]
    assert Budget(episodes=20).rows_and_generations(8) == (2, 8)
    assert Budget(episodes=4).rows_and_generations(8) == (1, 4)
    assert [Budget().limit(first) for first in (0, 11, 30)] == [120, 120, 300], "a slow model plays for longer"
    assert Budget(seconds=60).limit(30) == 60


def test_a_slow_model_is_no_agent_that_hangs() -> None:
    empty = TrajectoryCollection(trajectories=[], run_id="r")
    slow, hanging = (Evidence(empty, empty, ended_early=True, first=first) for first in (42.5, None))
    (over,) = (finding for finding in judge(PLAN, slow) if finding.code == "time_over")
    assert (over.severity, over.change) == (Severity.HARMS, "raise --seconds")
    assert "0 did, but a row alone, before them, in 42.5 s" in over.what
    (over,) = (finding for finding in judge(PLAN, hanging) if finding.code == "time_over")
    assert (over.severity, "if the agent hangs" in over.change) == (Severity.STOPS_LEARNING, True)


MEASURES = Measures(
    start=5.0,
    playing=4.0,
    episodes=64,
    collected=64,
    job=3.0,
    job_training=2.0,
    trained_episodes=48,
    stored=6400,
    weights=1000,
    optimizer=2000,
)


def test_the_estimate_of_a_run(tmp_path: Path) -> None:
    of = estimate(PLAN, MEASURES, KeepConfig(), tmp_path / "not yet there")
    assert of.collect_seconds_per_epoch == 8 * 4.0  # 512 episodes
    assert of.train_seconds_per_epoch == 1.0 + 8 * 2.0  # three quarters of them are trained, as of those played
    assert of.validation_seconds == 200 / 64 * 4.0
    assert of.total_seconds == 5 + 10 * (32 + 17) + 3 * 12.5
    assert of.episodes_bytes == 512 * 10 * 100
    assert of.checkpoint_bytes == (3 + 1 + 1) * 1000 + (2 + 1) * 2000  # the last three, the best, and the next one
    assert of.disk_bytes == of.episodes_bytes + of.checkpoint_bytes
    assert not [*about_disk(PLAN, of, tmp_path)]
    [finding] = about_disk(PLAN, replace(of, disk_bytes=of.disk_free_bytes + 1), tmp_path)
    assert (finding.code, finding.severity) == ("disk_space", STOPS)
    growing = estimate(replace(PLAN, curriculum=CurriculumLearningConfig(enabled=True)), MEASURES, None, tmp_path)
    assert growing.train_seconds_per_epoch == pytest.approx(1.0 + 16 * 0.4)  # 30 % of the rows, and then 50 %


def test_more_episodes_in_flight_than_were_played() -> None:
    """A server that is busy with 64 is busy with 256; one that is idle plays 256 in the time of 64."""
    plan = replace(PLAN, concurrency=256)
    busy = replace(MEASURES, alone=0.0625, together=4.0)
    assert estimate(plan, busy, None, Path()).collect_seconds_per_epoch == pytest.approx(32.0, rel=0.05)
    idle = replace(MEASURES, alone=4.0, together=4.0)
    assert estimate(plan, idle, None, Path()).collect_seconds_per_epoch == 2 * 4.0


def test_one_episode_says_nothing_of_those_in_flight() -> None:
    one = replace(MEASURES, playing=2.0, episodes=1, alone=1.0, together=2.0)
    assert estimate(PLAN, one, None, Path()).collect_seconds_per_epoch == 2.0 * PLAN.episodes_per_epoch


def test_without_episodes_nothing_is_estimated() -> None:
    nothing = estimate(PLAN, Measures(start=1.0, playing=2.0, episodes=0), None, Path())
    assert (nothing.collect_seconds_per_epoch, nothing.total_seconds, nothing.disk_bytes) == (None, None, None)


def test_readable_numbers() -> None:
    assert [*map(readable_bytes, (12, 1234, 5.6e9))] == ["12 B", "1.23 kB", "5.6 GB"]
    assert [*map(readable_seconds, (0.123, 42.4, 600, 7200))] == ["0.12 s", "42 s", "10 min", "2.0 h"]

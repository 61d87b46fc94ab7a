"""Evaluation runs on a real workflow: failures stay in their row, limits hold, scores are scores, files are whole."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import plain_parts
import pytest
from waiting import hang, turns

from insitu.collect import episodes
from insitu.collect.collector import run_limited
from insitu.collect.evaluation import EvaluationRun, validation_record
from insitu.collect.evaluators import BaseEvaluator, average, parse_score
from insitu.config import Config, load_config
from insitu.errors import ConfigError, WorkflowError
from insitu.schemas.evaluation import EvalInput, EvalInputItem, EvalOutputItem, EvaluationRunConfig, EvaluationRunOutput
from insitu.schemas.finetuning import FinetuneConfig, RewardFunctionConfig
from insitu.training.report import evaluation_table


class Bench:
    """Writes a project whose rows tell the workflow what to do, and evaluates it."""

    def __init__(self, write: Any, folder: Path) -> None:
        self.write, self.folder = write, folder
        self.output = folder / "out"

    def config(
        self, inputs: list[str], says: str = "", workflow: dict[str, Any] | None = None, **general: Any
    ) -> Config:
        rows = [{"id": f"row {i}", "question": text, "answer": text.upper()} for i, text in enumerate(inputs)]
        self.write(rows, "rows.jsonl")
        general = {"dataset": {"_type": "jsonl", "file_path": "rows.jsonl"}, "output_dir": str(self.output), **general}
        evaluation = {"general": general, "evaluators": {"exact": {"_type": "judge", "says": says}}}
        return load_config(self.write({"workflow": {"_type": "parts", **(workflow or {})}, "eval": evaluation}))

    async def run(
        self, inputs: list[str], reps: int = 1, write_output: bool = False, **other: Any
    ) -> EvaluationRunOutput:
        asked = EvaluationRunConfig(config_file=self.config(inputs, **other), reps=reps, write_output=write_output)
        return await EvaluationRun(asked).run_and_evaluate()


@pytest.fixture
def bench(write: Any, tmp_path: Path) -> Bench:
    return Bench(write, tmp_path)


def scores(output: EvaluationRunOutput) -> list[Any]:
    return [item.score for item in output.evaluation_results[0][1].eval_output_items]


# rows that fail


async def test_a_failing_row_never_stops_the_others(bench: Bench) -> None:
    bad = ["raise no number", "cancelled", "exit", "interrupt", "generator", "group", "hang", "stubborn"]
    output = await bench.run(["a", *bad, "b"], max_concurrency=1, episode_timeout=1.5)
    items = output.eval_input.eval_input_items
    assert [i.output_obj for i in items] == ["A", *[None] * 8, "B"]
    assert [i.error and i.error.partition(":")[0] for i in items] == [
        None,
        "ValueError",
        "CancelledError",
        "SystemExit",
        "KeyboardInterrupt",
        "GeneratorExit",
        "BaseExceptionGroup",
        "EpisodeTimeout",
        "EpisodeTimeout",
        None,
    ]
    assert [i.reason for i in items[1:9]] == ["workflow_error"] * 6 + ["timeout"] * 2
    assert "no number" in str(items[1].error)
    assert "plain_parts.py, line " in str(items[1].error)
    assert "episode_timeout: 1.5 s" in str(items[7].error)
    assert scores(output) == [1.0, 1.0]
    row = evaluation_table(output, "rows.jsonl").columns
    assert [next(iter(c.cells)) for c in row[3:]] == ["2", "10", "8", "0"]


async def test_a_cancel_scope_of_one_episode_that_another_cancels_takes_no_episode_away(bench: Bench) -> None:
    plain_parts.scopes.clear()
    try:
        output = await bench.run(["enter", "a", "leave", *"bcdefgh"], max_concurrency=1)
    finally:
        for scope in plain_parts.scopes:
            scope._tasks.clear()  # anyio goes on cancelling a task that has ended
    items = output.eval_input.eval_input_items
    assert [i.output_obj for i in items] == ["ENTER", "A", "LEAVE", *"BCDEFGH"]
    assert len(plain_parts.made[-1].begun) == 10


async def test_an_episode_cancelled_by_another_has_an_outcome(bench: Bench) -> None:
    output = await bench.run(["wait", "a", "cancel waiting", "b"], max_concurrency=2)
    waited, *others = output.eval_input.eval_input_items
    assert (waited.reason, str(waited.error).partition(":")[0]) == ("workflow_error", "CancelledError")
    assert [i.output_obj for i in others] == ["A", "CANCEL WAITING", "B"]


async def test_an_episode_that_ignores_its_cancellation_is_left_behind(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(episodes, "CANCEL_GRACE_SECONDS", 0.05)
    output = await bench.run(["swallow", "a"], max_concurrency=1, episode_timeout=0.05)
    swallowing, following = output.eval_input.eval_input_items
    assert (swallowing.reason, following.output_obj) == ("timeout", "A")
    assert "it ignores its cancellation and still runs" in str(swallowing.error)
    assert "it is left behind" in caplog.text
    left = [task for task in asyncio.all_tasks() if task.get_name() == "isolated"]
    assert len(left) == 1
    plain_parts.released.pop().set()
    await asyncio.wait(left)


async def test_a_single_row_has_no_interval(bench: Bench) -> None:
    row = evaluation_table(await bench.run(["a"]), "rows.jsonl").columns
    assert [next(iter(c.cells)) for c in row[1:4]] == ["1.0000", "none of one row", "1"]


@pytest.mark.parametrize(
    ("text", "retries", "attempts", "succeeds"),
    [
        ("unavailable 1", 1, 2, True),
        ("unavailable 2", 1, 2, False),
        ("unavailable 2", 5, 3, True),
        ("unavailable 1", 0, 1, False),
        ("raise x", 3, 1, False),
        ("hang", 2, 3, False),
    ],
)
async def test_only_passing_failures_are_tried_again(
    bench: Bench, text: str, retries: int, attempts: int, succeeds: bool
) -> None:
    output = await bench.run([text], retries=retries, episode_timeout=0.05 if text == "hang" else None)
    assert plain_parts.made[-1].attempts[text] == attempts
    (item,) = output.eval_input.eval_input_items
    assert (item.error is None) is succeeds
    reasons = {"unavailable": "backend_error", "raise": "workflow_error", "hang": "timeout"}
    assert item.reason == (None if succeeds else reasons[text.split()[0]])


# the schedule


@pytest.mark.parametrize("limit", [1, 3, 16])
async def test_the_limit_is_kept_and_reached(bench: Bench, limit: int) -> None:
    await bench.run([f"t{i}" for i in range(6)], reps=3, max_concurrency=limit, workflow={"seconds": 0.005})
    parts = plain_parts.made[-1]
    assert len(parts.begun) == 18
    assert parts.most == limit


async def test_repetitions_have_numbers_and_seeds_of_their_own(bench: Bench) -> None:
    output = await bench.run(["seed 1", "seed 2"], reps=3)
    items = output.eval_input.eval_input_items
    assert [(i.id, i.rep) for i in items] == [(f"row {r}", rep) for r in (0, 1) for rep in (0, 1, 2)]
    assert len({i.output_obj for i in items}) == 6
    assert [i.rep for i in output.evaluation_results[0][1].eval_output_items] == [0, 1, 2] * 2
    again = await bench.run(["seed 1", "seed 2"], reps=3, max_concurrency=1)
    assert [i.output_obj for i in again.eval_input.eval_input_items] == [i.output_obj for i in items]


# evaluators


@pytest.mark.parametrize(
    ("says", "first", "message", "reason"),
    [
        ("nan", "nan", "the score is nan", "nan_score"),
        ("huge", "-1e+308", "the score is -1e+308; allowed: from -1e+30 to 1e+30", "nan_score"),
        ("none", "None", "returned no score", "no_score"),
        ("words", "good", "'good' is not a number", "no_score"),
        ("fewer", "None", "exact returned no score for this item", "evaluator_error"),
    ],
)
async def test_a_missing_score_is_never_zero(bench: Bench, says: str, first: str, message: str, reason: str) -> None:
    output = await bench.run(["a", "b", "c"], says=says)
    given = output.evaluation_results[0][1].eval_output_items
    assert str(given[0].score) == first
    value, why, text = parse_score(given[0])
    assert (value, str(why)) == (None, reason)
    assert message in str(text)
    assert [parse_score(g)[0] for g in given[1:]] == [1.0, 1.0]
    run_config = FinetuneConfig(reward_function=RewardFunctionConfig(name="exact"))
    metrics = validation_record(output, run_config, 4)
    assert (metrics["avg_reward"], metrics["num_examples"], metrics["dropped"]) == (1.0, 2, {reason: 1})


@pytest.mark.parametrize(
    ("says", "message"),
    [
        ("raise", f"evaluator exact raised RuntimeError: no judge today ({plain_parts.__file__}, line "),
        ("cancelled", "evaluator exact raised CancelledError"),
        ("exit", "evaluator exact raised SystemExit"),
        ("interrupt", "evaluator exact raised KeyboardInterrupt"),
        ("generator", "evaluator exact raised GeneratorExit"),
        ("hang", "evaluator exact took longer than eval.general.evaluator_timeout allows: 0.2 s"),
        ("nothing", "evaluator exact returned a NoneType, not an EvalOutput"),
    ],
)
async def test_an_evaluator_that_fails_gives_errors_and_no_scores(bench: Bench, says: str, message: str) -> None:
    output = await bench.run(["a", "b"], says=says, write_output=True, evaluator_timeout=0.2)
    assert scores(output) == [None, None]
    assert all(message in str(i.error) for i in output.evaluation_results[0][1].eval_output_items)
    run_config = FinetuneConfig(reward_function=RewardFunctionConfig(name="exact"))
    metrics = validation_record(output, run_config, 4)
    assert "avg_reward" not in metrics
    assert metrics["dropped"] == {"evaluator_error": 2}
    assert "no example could be scored" in metrics["error"]


async def test_scores_in_another_order_find_their_items(bench: Bench) -> None:
    output = await bench.run(["a", "b", "raise c", "d"], reps=2, says="reordered")
    given = output.evaluation_results[0][1].eval_output_items
    assert [(g.id, g.rep, g.reasoning) for g in given] == [
        (f"row {row}", rep, text) for row, text in ((0, "A"), (1, "B"), (3, "D")) for rep in (0, 1)
    ]


class Halves(BaseEvaluator):
    """Scores 0.5, and shows how many it was scoring at once."""

    running = most = 0

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        self.running += 1
        self.most = max(self.most, self.running)
        await turns()
        self.running -= 1
        if item.id == 3:
            raise LookupError("3")
        if item.id == 4:
            await asyncio.ensure_future(_cancelled())
        return EvalOutputItem(id=item.id, score=0.5)


async def _cancelled() -> None:
    raise asyncio.CancelledError


async def test_the_base_evaluator_limits_itself_and_keeps_errors_with_their_items() -> None:
    halves = Halves(max_concurrency=3)
    output = await halves.evaluate(EvalInput(eval_input_items=[EvalInputItem(id=i) for i in range(8)]))
    assert halves.most == 3
    assert [i.id for i in output.eval_output_items] == list(range(8))
    assert [i.error.partition(":")[0] for i in output.eval_output_items if i.error] == ["LookupError", "CancelledError"]
    assert output.average_score == 0.5
    assert average([]) is None


async def test_a_file_without_evaluators_is_refused(write: Any) -> None:
    write([{"question": "a"}], "rows.jsonl")
    data = {
        "workflow": {"_type": "parts"},
        "eval": {"general": {"dataset": {"_type": "jsonl", "file_path": "rows.jsonl"}}},
    }
    with pytest.raises(ConfigError, match="has no evaluators"):
        await EvaluationRun(EvaluationRunConfig(config_file=write(data))).run_and_evaluate()


# answers that stand in the dataset, and the part of an answer that counts


async def test_a_finished_evaluation_is_a_dataset(bench: Bench) -> None:
    first = await bench.run(["a", "raise b", "c"], reps=2, write_output=True)
    file = first.workflow_output_file
    config, ran = bench.config(["a"]), len(plain_parts.made)
    asked = EvaluationRunConfig(config_file=config, dataset=file, skip_workflow=True)
    output = await EvaluationRun(asked).run_and_evaluate()
    assert len(plain_parts.made) == ran
    assert scores(output) == [1.0] * 4
    items, before = output.eval_input.eval_input_items, first.eval_input.eval_input_items
    assert [(i.id, i.rep, i.output_obj) for i in items] == [(i.id, i.rep, i.output_obj) for i in before]
    assert [i.trajectory for i in items] == [i.trajectory for i in before]
    assert [i.reason for i in items] == [None, None, "no_answer", "no_answer", None, None]
    assert str(items[2].error).startswith("row 'row 1' has no generated_answer: ValueError: b (")
    assert items[0].full_dataset_entry["question"] == "a"


async def test_a_row_keeps_columns_that_are_called_like_those_of_the_file(bench: Bench) -> None:
    row = {"id": "x", "task": "a", "label": "A", "answer": "why", "note": 1}
    rows, names = bench.write([row], "tasks.jsonl"), {"question_key": "task", "answer_key": "label"}
    config = bench.config(["a"], dataset={"_type": "jsonl", "file_path": str(rows), "structure": names})
    output = await EvaluationRun(EvaluationRunConfig(config_file=config)).run_and_evaluate()
    assert scores(output) == [1.0]
    assert output.workflow_output_file is not None
    (record,) = json.loads(output.workflow_output_file.read_text())
    assert {name: record[name] for name in ("question", *row)} == {"question": "a", **row}


async def test_completing_runs_what_has_no_answer_as_it_would_have_been_run(bench: Bench) -> None:
    whole = await bench.run(["seed 0", "seed 1"], reps=2, write_output=True)
    assert whole.workflow_output_file is not None
    records = json.loads(whole.workflow_output_file.read_text())
    answers = [r["generated_answer"] for r in records]
    del records[1]["generated_answer"]
    records[2]["generated_answer"] = None
    partly = bench.folder / "partly.json"
    partly.write_text(json.dumps(records))
    asked = EvaluationRunConfig(config_file=bench.config(["a"]), dataset=partly, skip_completed_entries=True)
    seen: list[Any] = []
    output = await EvaluationRun(asked, on_episode=seen.append).run_and_evaluate()
    assert len(seen) == 2
    assert [i.output_obj for i in output.eval_input.eval_input_items] == answers
    assert all(len(i.trajectory) == 4 for i in output.eval_input.eval_input_items)


async def test_answers_and_steps_under_other_names_and_in_a_table(bench: Bench) -> None:
    step = {
        "payload": {
            "event_type": "CUSTOM_END",
            "event_timestamp": 5,
            "metadata": {"k": 1},
            "data": {"output": 2},
            "UUID": "7",
        }
    }
    rows = [
        {"id": "x", "question": "q", "answer": "A", "said": "A", "did": [step], "should": [step]},
        {"id": "y", "question": "q", "answer": "A", "said": "", "did": [], "should": []},
    ]
    names = {"generated_answer_key": "said", "trajectory_key": "did", "expected_trajectory_key": "should"}
    lines = ["id,question,answer,said,did,should"]
    lines += [
        ",".join('"' + str(v if isinstance(v, str) else json.dumps(v)).replace('"', '""') + '"' for v in row.values())
        for row in rows
    ]
    for name, text, second in (("r.json", json.dumps(rows), [0.0]), ("r.csv", "\n".join(lines), [])):
        file = bench.folder / name
        file.write_text(text)
        dataset = {"_type": name.split(".")[1], "file_path": str(file), "structure": names}
        config = bench.config(["a"], dataset=dataset)
        output = await EvaluationRun(EvaluationRunConfig(config_file=config, skip_workflow=True)).run_and_evaluate()
        item = output.eval_input.eval_input_items[0]
        assert item.trajectory == item.expected_trajectory
        assert (item.trajectory[0].metadata, item.trajectory[0].data.output) == ({"k": 1}, 2)  # type: ignore[union-attr]
        assert scores(output) == [1.0, *second]  # an empty text is an answer, an empty cell is none
        assert output.workflow_output_file is not None
        assert json.loads(output.workflow_output_file.read_text())[0]["said"] == "A"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"result_json_path": "$.a["}, r"result_json_path '\$.a\[' is not a JSONPath"),
        ({"result_json_path": ""}, "result_json_path '' is not a JSONPath"),
        ({"skip_workflow": True, "reps": 2}, "reps is 2"),
        ({"skip_workflow": True, "endpoint": "http://127.0.0.1:1"}, "have no effect with skip_workflow"),
        ({"endpoint": "127.0.0.1:1"}, "it must begin with http://"),
    ],
)
async def test_options_that_cannot_be_used_are_refused_by_name(
    bench: Bench, option: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await EvaluationRun(EvaluationRunConfig(config_file=bench.config(["a"]), **option)).run_and_evaluate()
    assert not (bench.output / "workflow_output.json").exists()


@pytest.mark.parametrize(
    ("path", "text", "output", "error"),
    [
        ("$.a.b", "say {'a': {'b': [1]}}", [1], None),
        ("$.a", 'say \'{"a": "X"}\'', "X", None),
        ("$[1].k", "say [0, {'k': None}]", None, None),
        ("$.inner.depth", "say parts.Inner", 1, None),
        ("$.b", "say {'a': 1}", None, "matches 0 values of {'a': 1}, not one"),
        ("$[*]", "say [1, 2]", None, "matches 2 values"),
        ("$.a", "words", None, "the result 'WORDS' is not JSON"),
    ],
)
async def test_the_output_is_the_part_of_the_answer_that_the_path_names(
    bench: Bench, path: str, text: str, output: Any, error: str | None
) -> None:
    asked = EvaluationRunConfig(config_file=bench.config([text]), result_json_path=path, write_output=False)
    (item,) = (await EvaluationRun(asked).run_and_evaluate()).eval_input.eval_input_items
    assert item.output_obj == output
    assert (item.error is None) is (error is None)
    assert error is None or (item.reason == "workflow_error" and error in str(item.error))


async def test_validation_means_are_over_rows() -> None:
    output = EvaluationRunOutput(
        eval_input=EvalInput(eval_input_items=[EvalInputItem(id="x", error="E", reason="timeout")]),
        evaluation_results=[
            (
                "exact",
                plain_parts.EvalOutput(
                    eval_output_items=[
                        EvalOutputItem(id="a", score=1),
                        EvalOutputItem(id="a", score=0),
                        EvalOutputItem(id="b", score=1.0),
                    ]
                ),
            )
        ],
    )
    metrics = validation_record(output, FinetuneConfig(reward_function=RewardFunctionConfig(name="exact")), 0)
    assert metrics["avg_reward"] == 0.75
    assert (metrics["min_reward"], metrics["max_reward"], metrics["num_examples"]) == (0, 1, 3)
    assert metrics["dropped"] == {"timeout": 1}
    low, high = metrics["ci95"]
    assert 0 <= low < 0.75 < high <= 1


# files


async def test_the_documented_files(bench: Bench) -> None:
    output = await bench.run(["a", "raise b"], reps=2, write_output=True)
    assert output.workflow_output_file == bench.output / "workflow_output.json"
    assert output.evaluator_output_files == [bench.output / "exact_output.json"]
    records = json.loads(output.workflow_output_file.read_text())
    assert [(r["id"], r["rep"], r["generated_answer"]) for r in records] == [
        ("row 0", 0, "A"),
        ("row 0", 1, "A"),
        ("row 1", 0, None),
        ("row 1", 1, None),
    ]
    assert set(records[0]) >= {"question", "answer", "intermediate_steps", "expected_intermediate_steps", "error"}
    assert records[0]["question"] == "a"
    kinds = ["WORKFLOW_START", "FUNCTION_START", "FUNCTION_END", "WORKFLOW_END"]
    assert [s["payload"]["event_type"] for s in records[0]["intermediate_steps"]] == kinds
    assert records[2]["error"].startswith("ValueError: b (")
    written = json.loads(output.evaluator_output_files[0].read_text())
    assert [(i["id"], i["rep"], i["score"]) for i in written["eval_output_items"]] == [("row 0", 0, 1), ("row 0", 1, 1)]
    assert sorted(p.name for p in bench.output.iterdir()) == ["exact_output.json", "workflow_output.json"]


async def test_whatever_a_workflow_answers_can_be_written(bench: Bench) -> None:
    output = await bench.run(["odd", "big"], says="objects", write_output=True)
    assert output.workflow_output_file is not None
    odd, big = json.loads(output.workflow_output_file.read_text())
    assert big["generated_answer"] == 2**100
    assert odd["generated_answer"]["1,2"].startswith("<object object")
    assert odd["generated_answer"]["text"] == "\ud800"
    assert odd["generated_answer"]["nan"] is None
    (written,) = output.evaluator_output_files
    assert "object" in json.loads(written.read_text())["eval_output_items"][0]["reasoning"]["seen"]


async def test_an_answer_that_has_no_form_in_json_costs_no_other_answer(bench: Bench) -> None:
    output = await bench.run(["circle", r"say b'\xff'", "a"], write_output=True)
    assert output.workflow_output_file is not None
    circle, octets, plain = json.loads(output.workflow_output_file.read_text())
    assert circle["generated_answer"]["text"] == "a"
    assert "itself" in str(circle["generated_answer"]["circle"])
    assert (octets["generated_answer"], plain["generated_answer"]) == ("_w==", "A")
    (written,) = output.evaluator_output_files
    reasons = [item["reasoning"] for item in json.loads(written.read_text())["eval_output_items"]]
    assert (reasons[0]["text"], *reasons[1:]) == ("a", "_w==", "A")


# run_limited


def names_of_tasks() -> set[str]:
    return {t.get_name() for t in asyncio.all_tasks()} - {asyncio.current_task().get_name()}  # type: ignore[union-attr]


async def double(n: int) -> int:
    await turns(1)
    return 2 * n


async def test_all_results_come_the_empty_ones_too() -> None:
    async def nothing(n: int) -> int | None:
        return None if n % 2 else n

    assert sorted([r async for r in run_limited(range(100), double, 7)]) == list(range(0, 200, 2))
    assert [r async for r in run_limited([], double, 7)] == []
    assert len([r async for r in run_limited(range(10), nothing, 3)]) == 10


async def test_tasks_are_taken_as_they_are_needed() -> None:
    taken: list[int] = []

    def source() -> Iterator[int]:
        for n in range(1_000_000):
            taken.append(n)
            yield n

    async with aclosing(run_limited(source(), double, 4)) as results:
        received = 0
        async for _ in results:
            received += 1
            await turns()
            assert len(taken) <= received + 2 * 4
            if received == 20:
                break
    assert len(taken) <= 20 + 2 * 4
    assert names_of_tasks() == set()


async def test_closing_early_leaves_no_task() -> None:
    cancelled = []

    async def wait(n: int) -> int:
        if n == 0:
            return n
        try:
            await hang()
        except asyncio.CancelledError:
            cancelled.append(n)
            raise
        return n

    async with aclosing(run_limited(range(10), wait, 4)) as results:
        async for result in results:
            assert result == 0
            await turns(1)
            break
    assert sorted(cancelled) == [1, 2, 3, 4]
    assert names_of_tasks() == set()


async def test_an_exception_ends_it_and_leaves_no_task() -> None:
    async def fail(n: int) -> int:
        await (turns() if n == 3 else hang())
        raise KeyError(n)

    with pytest.raises(KeyError):
        _ = [r async for r in run_limited(range(10), fail, 5)]
    assert names_of_tasks() == set()


async def test_cancelling_the_consumer_cancels_everything() -> None:
    async def consume() -> None:
        async with aclosing(run_limited(range(10), asyncio.sleep, 5)) as results:
            async for _ in results:
                await hang()

    task = asyncio.create_task(consume())
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert names_of_tasks() == set()


async def test_a_task_cancelled_from_inside_does_not_vanish() -> None:
    async def odd_ones_out(n: int) -> int:
        if n == 2:
            await _cancelled()
        return n

    with pytest.raises(WorkflowError, match="2 was cancelled from inside"):
        _ = [r async for r in run_limited(range(10), odd_ones_out, 2)]


async def test_a_failing_listener_stops_the_episodes(bench: Bench) -> None:
    def listen(_: Any) -> None:
        raise OSError("disk full")

    asked = EvaluationRunConfig(config_file=bench.config(["a", "hang", "hang 2"]), write_output=False)
    with pytest.raises(OSError, match="disk full"):
        await EvaluationRun(asked, on_episode=listen).run_and_evaluate()
    assert names_of_tasks() == set()


async def test_a_source_that_fails_is_told() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise LookupError("no more")

    async def collect() -> AsyncIterator[int]:
        async for result in run_limited(source(), double, 3):
            yield result

    with pytest.raises(LookupError, match="no more"):
        _ = [r async for r in collect()]

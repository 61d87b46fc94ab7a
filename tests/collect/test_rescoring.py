"""`insitu trajectories rescore`: a new score on recorded episodes, by an evaluator of any file."""

import json
import os
from pathlib import Path
from typing import Any

import plain_parts  # noqa: F401  # registers the evaluator `judge`
import pytest
from factories import read_lines
from test_inspection import Run, episode, failed, show

from insitu.api.results import Run as Recorded
from insitu.collect.datasets import find_dataset
from insitu.config import Config, load_config
from insitu.config.resolved import block_digest
from insitu.disk.folder_lock import FolderLock

FILE: dict[str, Any] = {
    "eval": {
        "general": {"dataset": {"_type": "jsonl", "file_path": "rows.jsonl"}, "max_concurrency": 2},
        "evaluators": {"match": {"_type": "judge"}, "broken": {"_type": "judge", "says": "raise"}},
    }
}
ROWS = [{"id": f"r{k}", "question": "?", "answer": "won"} for k in (1, 2)]


@pytest.fixture
def run(write: Any, tmp_path: Path) -> Path:
    """Two groups of a run with the file `config.yml`, the second with a failed episode and an answer that differs."""
    made = Run(tmp_path / "run")
    dataset = find_dataset(Config(), write(ROWS, "rows.jsonl")).record()
    made.store.write("run.json", {"run_id": "run_1", "source": str(write(FILE)), "dataset": dataset})
    made.add("r1", episode(0, "r1"), episode(1, "r1", output="lost"))
    made.add("r2", episode(0, "r2"), failed(1, "r2"))
    made.store.close()
    return made.folder


def rescore(run: Path, *options: Any) -> Any:
    return show(run, *options, command="rescore")


def recorded(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.iterdir() if path.name != "rescores.jsonl"}


def test_scores_are_appended_and_nothing_else_changes(run: Path, write: Any) -> None:
    """With the expected answers of the dataset; a later score of the same name wins, one of another name is kept."""
    before = recorded(run)
    done = rescore(run, "--evaluator", "match")
    assert (done.code, done.err) == (0, "")
    assert done.out == "match: 3 of 4 episodes scored, mean 0.6667; failed episodes without an output: 1\n"
    assert recorded(run) == before
    header, *lines = read_lines(run / "rescores.jsonl")
    assert header == {"format": 2}
    assert {line["episode"]: line["score"] for line in lines} == {
        "run_1/1/r1/0/0": 1.0,
        "run_1/1/r1/1/0": 0.0,
        "run_1/1/r2/0/0": 1.0,
    }
    assert {(line["evaluator"], line["reasoning"], line["error"]) for line in lines} == {
        ("match", "won", None),
        ("match", "lost", None),
    }
    other = {"eval": {"general": FILE["eval"]["general"], "evaluators": {"match": {"_type": "judge", "says": "nan"}}}}
    done = rescore(run, "--evaluator", "match", "--config_file", write(other, "other.yml"))
    assert done.code == 1
    later = read_lines(run / "rescores.jsonl")[4:]
    assert {(line["score"], line["reason"]) for line in later} == {(None, "nan_score")}
    hashes = [{line["config_hash"] for line in of} for of in (lines, later)]
    assert len(hashes[0]) == len(hashes[1]) == 1
    assert hashes[0] != hashes[1]
    assert [line["config_file"].rpartition("/")[2] for line in (lines[0], later[0])] == ["config.yml", "other.yml"]
    assert rescore(run, "--evaluator", "match", "-o", "eval.evaluators.match.says", "anything").code == 0
    shown = show(run, "--row", "r1", "--generation", 1).out
    assert [line.partition(": ")[2] for line in shown.splitlines() if "scored later" in line] == ["match 0 (lost)"]


def test_the_evaluator_is_that_of_the_file_with_the_options_of_the_run(run: Path) -> None:
    settings = json.loads((run / "run.json").read_text())
    settings["override"] = {"eval.evaluators.match.says": "nan", "llms.judge.api_key": "***"}
    (run / "run.json").write_text(json.dumps(settings))
    assert rescore(run, "--evaluator", "match").code == 1
    assert {line["reason"] for line in read_lines(run / "rescores.jsonl")[1:]} == {"nan_score"}
    assert rescore(run, "--evaluator", "match", "-o", "eval.evaluators.match.says", "anything").code == 0
    assert rescore(run, "--evaluator", "match", "--config_file", run.parent / "config.yml").code == 0


def test_a_new_score_is_the_reward_of_an_export(run: Path) -> None:
    rescore(run, "--evaluator", "match")
    target = run.parent / "out.jsonl"
    made = show(run, "--format", "kto", "--output", target, "--reward", "match", command="export")
    assert made.out.splitlines()[0] == f"{target}: 4 records; dropped: 1 no_variance, 1 timeout"
    lines = read_lines(target)
    assert {(e["episode"], e["reward"], e["label"]) for e in lines} == {
        ("run_1/1/r1/0/0", 1.0, True),
        ("run_1/1/r1/1/0", 0.0, False),
    }
    assert {e["reward_from"] for e in lines} == {"match"}


def test_old_and_new_scores_are_never_mixed(run: Path) -> None:
    """As after a rescoring that was interrupted."""

    def refused() -> str:
        done = show(run, "--format", "sft", "--output", run.parent / "out.jsonl", "--reward", "match", command="export")
        assert done.code == (2 if done.err else 0)
        return done.err

    rescore(run, "--evaluator", "match")
    path = run / "rescores.jsonl"
    header, *lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([header, *lines[:2]]))
    assert "2 of 3 episodes were scored again by 'match', others were not: `insitu trajectories rescore" in refused()
    path.write_text("".join([header, *lines, json.dumps(json.loads(lines[0]) | {"dataset": "other"}) + "\n"]))
    assert "by 'match' with other settings, code or rows than others" in refused()
    assert rescore(run, "--evaluator", "match").code == 0
    assert refused() == ""


@pytest.mark.parametrize("function", ["mine.py:score", "mine_scores:score"])
def test_a_digest_of_scoring_changes_with_code_and_settings(write: Any, tmp_path: Path, function: str) -> None:
    def digest(weight: float) -> str:
        parts = {"_type": "weighted_sum", "weights": {"mine": weight}}
        block = {"evaluators": {"mine": {"_type": "python", "function": function}, "sum": parts}}
        return block_digest(load_config(write({"eval": block})), "eval.evaluators", "sum")

    file = function.partition(":")[0].removesuffix(".py") + ".py"
    write("def score(answer): return 1.0", file)
    first = digest(1.0)
    assert (first == digest(1.0), first == digest(2.0)) == (True, False)
    write("# a comment\nimport os\ndef score(answer):\n    return 1.0\ndef agent(): return 2", file)
    assert digest(1.0) == first
    write("HALF = 0.5\ndef score(answer): return HALF", file)
    half = digest(1.0)
    write("HALF = 0.25\ndef score(answer): return HALF", file)
    assert len({first, half, digest(1.0)}) == 3


def test_a_digest_of_scoring_has_the_judge_and_the_code_of_a_plugin(write: Any) -> None:
    def digest(model: str, key: str = "a", weight: float = 1.0) -> str:
        judge = {"_type": "openai", "model_name": model, "base_url": "http://127.0.0.1:9/v1", "api_key": key}
        parts = {"judge": {"_type": "llm_judge", "llm": "judge", "rubric": "good?"}}
        parts["sum"] = {"_type": "weighted_sum", "weights": {"judge": weight}}
        file = write({"llms": {"judge": judge}, "eval": {"evaluators": parts}})
        return block_digest(load_config(file), "eval.evaluators", "sum")

    assert digest("large") == digest("large", key="b")
    assert len({digest("large"), digest("small"), digest("large", weight=2.0)}) == 3


def test_failures_of_the_evaluator_are_counted(run: Path) -> None:
    done = rescore(run, "--evaluator", "broken")
    assert done.code == 1
    assert "without a score: 3 evaluator_error; the first, run_1/1/r" in done.out
    assert "no judge today" in done.out
    assert done.err == "failed: nothing could be scored\n"
    records = read_lines(run / "rescores.jsonl")[1:]
    assert {(r["score"], r["reason"]) for r in records} == {(None, "evaluator_error")}


def test_a_run_that_is_in_progress_is_left_alone(run: Path) -> None:
    lock = FolderLock(run, "a test")
    refused = rescore(run, "--evaluator", "match")
    lock.release()
    assert refused.code == 2
    assert f"RUN_DIR: {run} is in use by process {os.getpid()}" in refused.err
    assert not (run / "rescores.jsonl").exists()


def test_rows_in_groups_of_others_are_found(run: Path, write: Any) -> None:
    """Groups of ART's clients may have episodes of several rows."""
    made = Run(run.parent / "art")
    made.store.write("run.json", json.loads((run / "run.json").read_text()))
    made.add("r1", episode(0, "r1"), episode(0, "r2", output="lost"), episode(1, "r1"))
    made.store.close()
    found = Recorded(made.folder).episodes(row="r2")
    assert ([e.key.row_id for e in found], len(found), found[-1].output) == (["r2"], 1, "lost")
    assert len(Recorded(made.folder).episodes(row="r1")) == 2
    rows = write(ROWS[:1], "rows.jsonl")
    refused = rescore(made.folder, "--evaluator", "match", "--dataset", rows)
    assert "1 of the rows of" in refused.err
    assert "such as 'r2'" in refused.err


def test_what_is_missing_or_has_changed_is_one_sentence(run: Path, write: Any) -> None:
    refused = rescore(run, "--evaluator", "taste")
    assert (refused.code, refused.err.count("'taste'"), refused.err.count("match, broken")) == (2, 1, 1), refused.err
    rows = write([*ROWS, {"id": "r3", "question": "?"}], "rows.jsonl")
    refused = rescore(run, "--evaluator", "match")
    assert refused.code == 2
    assert refused.err.startswith(f"error: the dataset {rows} has changed since {run} was collected, so its row ids ")
    assert rescore(run, "--evaluator", "match", "--dataset", rows).code == 0
    rows = write(ROWS[:1], "rows.jsonl")
    refused = rescore(run, "--evaluator", "match", "--dataset", rows)
    assert refused.err == (
        f"error: 1 of the rows of {run} are not in the dataset, such as 'r2': give their file with --dataset\n"
    )
    write(ROWS, "rows.jsonl")
    (run.parent / "config.yml").rename(run.parent / "moved.yml")
    refused = rescore(run, "--evaluator", "match")
    assert refused.err == (
        f"error: {run / 'run.json'}: the file of the run, {str(run.parent / 'config.yml')!r}, does not exist here; "
        "give one with --config_file\n"
    )
    assert rescore(run, "--evaluator", "match", "--config_file", run.parent / "moved.yml").code == 0
    (run / "run.json").write_text(json.dumps({"source": str(run.parent / "moved.yml")}))
    assert rescore(run, "--evaluator", "match").code == 0, "a run of a plugin's builder may name no dataset"

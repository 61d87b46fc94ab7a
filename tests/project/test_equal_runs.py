"""`equal_runs` finds each kind of difference between two runs, and none that time and place make."""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from equal_runs import differences
from safetensors.numpy import save_file

FORMAT = {"format": 2}


def made_run(folder: Path, run_id: str, seconds: float, *, reverse: bool = False) -> Path:
    """A run of two episodes of one group; `reverse`: in the order of the other's lines."""
    folder.mkdir(parents=True)
    names = [f"{run_id}/1/row/{generation}/0" for generation in range(2)]
    job = f"job-{int(seconds):032x}"
    episodes = [{"episode": name, "epoch": 1, "outcome": "ok", "reward": 0.5, "seconds": seconds} for name in names]
    calls = [
        {
            "episode": name,
            "index": index,
            "message": {"role": "assistant", "tool_calls": [{"id": f"call_{seconds:024.0f}"}]},
            "token_ids": [5, 7],
            "logprobs": [-0.5, -0.25],
            "started": 100 + seconds,
            "ended": 101 + seconds,
        }
        for name in names
        for index in range(2)
    ]
    lines = {"episodes.jsonl.gz": episodes, "calls.jsonl.gz": calls}
    blocks = {name: write_group(folder / name, records[:: -1 if reverse else 1]) for name, records in lines.items()}
    group = {"epoch": 1, "row_id": "row", "episodes": names, "rewards": [0.5, 0.5], "blocks": blocks}
    write_lines(folder / "groups.jsonl", [FORMAT, group])
    advantages = [{"epoch": 1, "episode": name, "dropped": None, "advantages": {"0": 1.5, "1": -1.5}} for name in names]
    write_lines(folder / "advantages.jsonl", [FORMAT, *advantages[:: -1 if reverse else 1]])
    metrics = {"epoch": 1, "timestamp": f"{seconds}", "run_id": run_id, "loss": 0.25, "seconds": {"train": seconds}}
    write_lines(folder / "training_metrics.jsonl", [metrics])
    events = [{"time": f"{seconds}", "event": event, "error": None} for event in ("started", "completed")]
    write_lines(folder / "events.jsonl", [FORMAT, *events])
    checkpoint = folder / "backend/checkpoints/step_000001"
    checkpoint.mkdir(parents=True)
    save_weights(checkpoint, [1.0, 2.0])
    of_job = {"key": f"{run_id}/1", "id": job, "metrics": {"loss": 0.25, "seconds": seconds}}
    write_json(checkpoint / "training.json", {"step": 1, "started_from": f"{folder.parent}/model", "job": of_job})
    write_json(folder / f"backend/jobs/{job}.json", of_job)
    write_json(folder / "progress.json", {"sizes": {"episodes.jsonl.gz": int(seconds)}, "jobs": [str(checkpoint)]})
    write_json(folder / "validation_history.json", [{"epoch": 1, "avg_reward": 0.75, "seconds": seconds}])
    source, output_dir = f"{folder.parent}/agent.yml", str(folder)
    write_json(
        folder / "run.json", {"run_id": run_id, "source": source, "config": {"finetuning": {"output_dir": output_dir}}}
    )
    (folder / "backend/backend.log").write_text(f"{seconds} seconds")
    return folder


def write_json(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))


def write_lines(path: Path, records: list[Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_group(path: Path, records: list[Any]) -> tuple[int, int]:
    """Writes the format version and the lines of a group as gzip members; returns the place of the group's."""
    version, group = (
        gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()) for lines in ([FORMAT], records)
    )
    path.write_bytes(version + group)
    return len(version), len(group)


def save_weights(checkpoint: Path, values: list[float]) -> None:
    save_file({"layer": np.array(values, np.float32)}, checkpoint / "model.safetensors")


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return made_run(tmp_path / "here/run", "insitu_run_00000001", 1.0)


@pytest.fixture
def other(one: Path, tmp_path: Path) -> Path:
    """A copy with the same name, in another folder."""
    return Path(shutil.copytree(one, tmp_path / "there/run"))


def test_ids_times_places_and_the_order_of_lines_do_not_count(one: Path, tmp_path: Path) -> None:
    other = made_run(tmp_path / "elsewhere/another", "insitu_run_0000000f", 33.25, reverse=True)
    (other / ".lock").touch()
    (other / ".index.sqlite").touch()
    assert differences(one, other) == []


def test_a_run_that_was_moved_is_equal(one: Path, other: Path) -> None:
    assert differences(one, other) == []


def first_call(record: dict[str, Any], **values: Any) -> None:
    if record.get("index") == 0 and record["episode"].endswith("/0/0"):
        record.update(values)


CHANGES: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "token id": ("calls.jsonl.gz", lambda r: first_call(r, token_ids=[5, 8]), "token_ids: [1]: 7 in one, 8 in other"),
    "further token": ("calls.jsonl.gz", lambda r: first_call(r, token_ids=[5, 7, 9]), "token_ids: 2 items [5, 7]"),
    "logprob": ("calls.jsonl.gz", lambda r: first_call(r, logprobs=[-0.5, -0.3]), "-0.25 in one, -0.3 in other"),
    "type": ("calls.jsonl.gz", lambda r: first_call(r, token_ids=[5.0, 7]), "token_ids: [0]: 5 in one, 5.0 in other"),
    "new key": ("calls.jsonl.gz", lambda r: first_call(r, cached=3), "cached: missing in one, 3 in other"),
    "reward": ("episodes.jsonl.gz", lambda r: r.update(reward=0.6), "reward: 0.5 in one, 0.6 in other"),
    "missing key": ("episodes.jsonl.gz", lambda r: r.pop("outcome", None), "outcome: 'ok' in one, missing in other"),
    "missing time": ("episodes.jsonl.gz", lambda r: r.pop("seconds", None), "seconds: '<time>' in one, missing"),
    "advantage": (
        "advantages.jsonl",
        lambda r: r.get("advantages", {}).update({"1": -1.25}),
        "advantages: 1: -1.5 in one, -1.25 in other",
    ),
    "metric": ("training_metrics.jsonl", lambda r: r.update(loss=0.5), "epoch 1: loss: 0.25 in one, 0.5 in other"),
    "event": ("events.jsonl", lambda r: r.update(error="full disk"), "error: None in one, 'full disk' in other"),
    "score": ("validation_history.json", lambda r: r[0].update(avg_reward=0.5), "avg_reward: 0.75 in one, 0.5 in"),
    "foreign run id": ("groups.jsonl", lambda r: r.update(row_id="insitu_run_0000000a"), "<other run>"),
    "index": ("groups.jsonl", lambda r: r.get("blocks", {}).pop("calls.jsonl.gz", None), "blocks: calls.jsonl.gz: "),
}


@pytest.mark.parametrize(("name", "change", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_value_is_named(
    one: Path, other: Path, name: str, change: Callable[[Any], Any], message: str
) -> None:
    path = other / name
    if path.suffix == ".json":
        records = json.loads(path.read_text())
        change(records)
        write_json(path, records)
    else:
        records = read_lines(path)
        for record in records:
            change(record)
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress("".join(json.dumps(record) + "\n" for record in records).encode()))
            write_index_without(other, name)
            write_index_without(one, name)
        else:
            write_lines(path, records)
    report = differences(one, other)
    assert report
    assert all(line.startswith(f"{name}: ") for line in report)
    assert any(message in line for line in report), report


def read_lines(path: Path) -> list[Any]:
    data = path.read_bytes()
    return [json.loads(line) for line in (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()]


def write_index_without(folder: Path, name: str) -> None:
    """Leaves the positions in a file out of the index."""
    records = read_lines(folder / "groups.jsonl")
    for record in records:
        record.get("blocks", {}).pop(name, None)
    write_lines(folder / "groups.jsonl", records)


def test_a_wrong_index_is_found(one: Path, other: Path) -> None:
    records = read_lines(other / "groups.jsonl")
    offset, _ = records[1]["blocks"]["calls.jsonl.gz"]
    for place in ([0, offset], [offset + 1, 10]):
        records[1]["blocks"]["calls.jsonl.gz"] = place
        write_lines(other / "groups.jsonl", records)
        (report,) = differences(one, other)
        assert report.startswith("groups.jsonl: epoch 1, row_id row: blocks: calls.jsonl.gz: 2 items")


def test_a_missing_and_a_further_line_are_found(one: Path, other: Path) -> None:
    path = other / "advantages.jsonl"
    lines = read_lines(path)
    write_lines(path, lines[:-1])
    (missing,) = differences(one, other)
    assert missing.startswith("advantages.jsonl: <run>/1/row/1/0, epoch 1: ")
    assert missing.endswith("missing in other")
    write_lines(path, [*lines, lines[-1]])
    (further,) = differences(one, other)
    assert further.startswith("advantages.jsonl: <run>/1/row/1/0, epoch 1 (2): missing in one")


def test_a_missing_and_a_further_file_are_found(one: Path, other: Path) -> None:
    (other / "advantages.jsonl").unlink()
    (other / "index.sqlite").touch()
    assert differences(one, other) == ["advantages.jsonl: only in one", "index.sqlite: only in other"]


def test_a_changed_weight_is_found(one: Path, other: Path) -> None:
    save_weights(other / "backend/checkpoints/step_000001", [1.0, 2.5])
    (report,) = differences(one, other)
    assert report == "backend/checkpoints/step_000001/model.safetensors: layer: data: 1 of 8 bytes differ"


def test_new_keys_and_files_are_left_out(one: Path, other: Path) -> None:
    metrics = read_lines(other / "training_metrics.jsonl")
    write_lines(other / "training_metrics.jsonl", [{**line, "mine": {"loss": 3}} for line in metrics])
    (other / "index.sqlite").touch()
    assert len(differences(one, other)) == 2
    assert differences(one, other, {"mine", "index.sqlite"}) == []

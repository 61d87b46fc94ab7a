"""A run, and its continuation, in each tracker as its own package reads it back.

Their packages are in `.environments/trackers`, in which no run could be made: the run is made up of files.
"""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from insitu.integrations.trackers.stream import TrackedFiles
from insitu.runs.files import CALLS, EPISODES, GROUPS
from insitu.runs.store import RunStore

EPOCHS = 3
SCORES = {0: 0.25, 2: 0.5, 3: 0.75}


def write_lines(path: Path, *lines: Any, header: bool = True) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in ([{"format": 2}] if header else []) + [*lines]))


def run_until(folder: Path, epoch: int, status: str) -> None:
    """The files of a run after some epochs."""
    folder.mkdir(exist_ok=True)
    config = {
        "finetuning": {"num_epochs": EPOCHS, "output_dir": "runs/x"},
        "llms": {
            "player": {"_type": "policy", "temperature": 1.0, "api_key": "***", "stop": None, "names": ["a", "b"]}
        },
        **{f"more{number}": number for number in range(120)},
    }
    (folder / "run.json").write_text(json.dumps({"run_id": "insitu_run_1", "config": config}))
    write_lines(
        folder / "training_metrics.jsonl",
        *(
            {
                "epoch": each,
                "avg_reward": each / 10,
                "kl": 0.01,
                "rewards/chosen": -1.5,
                "num_trajectories": 8,
                "dropped": {"timeout": each},
            }
            for each in range(1, epoch + 1)
        ),
        header=False,
    )
    validated = {"policy_version": 1, "num_examples": 2, "ci95": [0, 1]}
    validations = [{"epoch": e, "avg_reward": s, **validated} for e, s in SCORES.items() if e <= epoch]
    (folder / "validation_history.json").write_text(json.dumps(validations))
    scored = {"policy_version": 1, "evaluator": "e", "dataset": "d"}
    rows = ((e, {"row | <b>1</b>": [s, s], "2": [s]}) for e, s in SCORES.items() if e <= epoch)
    scores = ({"epoch": e, "scores": scores, **scored} for e, scores in rows)
    write_lines(folder / "validation_scores.jsonl", *scores)
    write_episodes(folder, epoch)
    (folder / "progress.json").write_text(json.dumps({"epoch": epoch, "status": status}))


def write_episodes(folder: Path, epochs: int) -> None:
    """An episode of each epoch."""
    for name in (EPISODES, CALLS, GROUPS):
        (folder / name).unlink(missing_ok=True)
    with closing(RunStore(folder)) as store:
        for epoch in range(1, epochs + 1):
            about = {"episode": f"r/{epoch}/1/0/0", "row_id": "1", "generation": 0, "outcome": "ok", "reward": 0.5}
            blocks = {CALLS: store.append(CALLS, []), EPISODES: store.append(EPISODES, [{**about, "output": "X"}])}
            store.append(GROUPS, [{"epoch": epoch, "row_id": "1", "num_episodes": 1, "blocks": blocks}])


def follow(name: str, folder: Path, **variables: str) -> None:
    """The process of a tracker, until the run ends."""
    command = [sys.executable, "-m", "insitu.integrations.trackers.processes", name, str(folder)]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, input="", capture_output=True, text=True, env=environment, cwd=folder.parent)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def tracked(tmp_path: Path) -> Callable[..., Path]:
    """`tracked(name)` is the folder of a run of three epochs, after the second of which it was interrupted."""

    def track(name: str, **variables: str) -> Path:
        folder = tmp_path / "run"
        for epoch, status in ((2, "interrupted"), (EPOCHS, "completed"), (EPOCHS, "completed")):
            run_until(folder, epoch, status)
            follow(name, folder, **variables)
        return folder

    return track


def expected() -> dict[str, dict[int, float]]:
    """The values of each metric by epoch."""
    return {
        "train/reward": {epoch: epoch / 10 for epoch in (1, 2, 3)},
        "train/kl": dict.fromkeys((1, 2, 3), 0.01),
        "train/episodes": dict.fromkeys((1, 2, 3), 8.0),
        "train/rewards/chosen": dict.fromkeys((1, 2, 3), -1.5),
        "dropped/timeout": {epoch: float(epoch) for epoch in (1, 2, 3)},
        "validation/score": SCORES,
        "validation/score_low": dict.fromkeys(SCORES, 0.0),
        "validation/score_high": dict.fromkeys(SCORES, 1.0),
    }


def by_epoch(values: list[tuple[int, float]]) -> dict[int, float]:
    assert len({epoch for epoch, _ in values}) == len(values), f"an epoch was logged twice: {values}"
    return {epoch: pytest.approx(value, rel=1e-6) for epoch, value in values}


def test_tensorboard(tracked: Callable[..., Path]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tracked("tensorboard") / "trackers/tensorboard"))
    read.Reload()
    for name, values in expected().items():
        assert by_epoch([(event.step, event.value) for event in read.Scalars(name)]) == values
    assert sorted(read.Tags()["tensors"]) == [
        *("settings/text_summary", "train/transcripts/text_summary", "validation/scores/text_summary")
    ]
    (settings,) = read.Tensors("settings/text_summary")
    assert b"| `llms.player.temperature` | 1.0 |" in settings.tensor_proto.string_val[0]
    tables = read.Tensors("validation/scores/text_summary")
    assert [event.step for event in tables] == [0, 2, 3]
    assert b"| row &#124; &lt;b>1&lt;/b> | 0.25 |" in tables[0].tensor_proto.string_val[0]


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: a header of 7 bytes, then LevelDB's log format, in blocks of 32 KiB."""
    position, record = 7, b""
    while position < len(data):
        if (left := 2**15 - position % 2**15) < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_wandb(tracked: Callable[..., Path]) -> None:
    """In offline mode each process writes a file, which `wandb sync` merges by the id of the run."""
    from wandb.proto import wandb_internal_pb2 as proto

    folder = tracked("wandb", WANDB_MODE="offline")
    values: dict[str, list[tuple[int, float]]] = {}
    ids, tables, exits, settings = set(), [], [], {}
    for path in sorted(folder.glob("trackers/wandb/offline-run-*/run-*.wandb")):
        for data in wandb_records(path.read_bytes()):
            record = proto.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
                settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.WhichOneof("record_type") == "exit":
                exits.append(record.exit.exit_code)
            for item in record.history.item:
                name, value = item.key or "/".join(item.nested_key), json.loads(item.value_json)
                if name == "validation/scores/nrows":
                    tables.append((record.history.step.num, value))
                elif name in expected():
                    values.setdefault(name, []).append((record.history.step.num, value))
    assert len(ids) == 1
    assert sorted(exits) == [0, 0, 1]  # an interrupted run is not shown as finished
    assert settings["llms.player.api_key"] == "***"
    assert {name: by_epoch(given) for name, given in values.items()} == expected()
    assert tables == [(epoch, 2) for epoch in (0, 2, 3)]


@pytest.mark.filterwarnings("ignore")  # of its own libraries
def test_mlflow(tracked: Callable[..., Path], tmp_path: Path) -> None:
    from mlflow import MlflowClient

    address = f"sqlite:///{tmp_path}/mlflow.db"
    tracked("mlflow", MLFLOW_TRACKING_URI=address, MLFLOW_EXPERIMENT_NAME="tests")
    client = MlflowClient(address)
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["llms.player.temperature"] == "1.0"
    assert len(run.data.params) > 120
    for name, values in expected().items():
        assert by_epoch([(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]) == values
    tables = [each.path for each in client.list_artifacts(run.info.run_id, "validation/scores")]
    assert tables == [f"validation/scores/{epoch:06d}.json" for epoch in (0, 2, 3)]


def test_trackio(tracked: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"TRACKIO_DIR": str(tmp_path / "trackio"), "TRACKIO_PROJECT": "tests"}
    tracked("trackio", **variables)
    code = (
        "import json, trackio\n"
        "(run,) = trackio.Api().runs('tests')\n"
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "print(json.dumps([run.name, SQLiteStorage.get_logs('tests', run.name), run.config], default=str))\n"
    )
    environment = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    name, logs, config = json.loads(done.stdout.splitlines()[-1])
    assert name == "run-insitu_run_1"
    assert config["llms.player.temperature"] == 1.0
    for metric, values in expected().items():
        assert by_epoch([(log["step"], log[metric]) for log in logs if metric in log]) == values
    assert [log["step"] for log in logs if "validation/scores" in log] == [0, 2, 3]


def test_a_made_up_run_is_read_as_a_real_one(tmp_path: Path) -> None:
    run_until(tmp_path / "run", EPOCHS, "completed")
    steps = [*TrackedFiles(tmp_path / "run").steps(-1)]
    assert [step.epoch for step in steps] == [0, 1, 2, 3]
    for name, values in expected().items():
        assert {step.epoch: step.metrics[name] for step in steps if name in step.metrics} == values

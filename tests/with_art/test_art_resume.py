"""Runs on an ART server that are killed and continue: each epoch is trained once, also if nobody knows of its job."""

import hashlib
import json
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from art_runs import RELEASES, backend, finetune, starting
from factories import digits_project, read_lines, write_rows
from processes import wait_until
from test_resume import VALIDATION, Outcome, outcome
from tiny_models import save_tiny_model
from wiretap import Wiretap

EPOCHS, ROWS, GENERATIONS = 3, 4, 4
TRAIN = "/_train_model"
OWN = r"art_run_[0-9a-f]{8}|whole|killed-\d+"
"""The run's id and the model's name."""


class Death(NamedTuple):
    """Where the second epoch is when the run is killed, what happens to the server meanwhile, and what that knows."""

    trains: str | None = None
    """What has not arrived of the job: its request, its response, or nothing."""
    collects: bool = False
    restarts: bool = False
    lists_jobs: bool = True
    submissions: int = EPOCHS
    """How often jobs are submitted at the first address, by both processes together."""
    loses_metrics: bool = False


DEATHS = {
    "while it collects": Death(collects=True),
    "before the job arrives": Death("request", submissions=EPOCHS + 1),
    "while it trains": Death("nothing", submissions=EPOCHS + 1),
    "after the job": Death("response", submissions=EPOCHS + 1),
    "after the job, and the server restarts": Death("response", restarts=True, submissions=2, loses_metrics=True),
    "before the job arrives at a server without a list": Death("request", lists_jobs=False, submissions=EPOCHS + 1),
    "after the job of a server without a list": Death("response", lists_jobs=False, loses_metrics=True),
}


class Server:
    """An `insitu backend` that can be restarted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "server"
        self._model = save_tiny_model(folder / "model")
        self._running = ExitStack()
        self.start()

    def start(self) -> None:
        self._running.close()
        self.address = self._running.enter_context(backend(self._model, self.folder))

    def stop(self) -> None:
        self._running.close()

    def weights(self, name: str) -> dict[str, str]:
        """The digests of the model's checkpoints, by step."""
        files = sorted(self.folder.glob(f"art/*/*/{name}/checkpoints/step_*/model.safetensors"))
        return {file.parent.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    def completed(self, name: str) -> list[str]:
        """The keys of the jobs that this process of it has trained."""
        with urllib.request.urlopen(f"{self.address}/art/jobs") as answer:
            jobs = json.load(answer)["jobs"]
        return [job["key"] for job in jobs if job["status"] == "completed" and f"/{name}/" in job["key"]]


def project(folder: Path, tap: Wiretap, name: str) -> list[str]:
    """Writes the file of a run that trains the model of this name; returns its options."""
    server = {"ip": "127.0.0.1", "port": int(tap.address.rpartition(":")[2])}
    patience = {"read_timeout": 5, "retry_timeout": 60, "lost_reply_timeout": 1}
    digits_project(
        folder,
        _type="openpipe_art_trainer_adapter",
        backend={**server, "name": name, "base_model": "model", **patience},
        training={"learning_rate": 1e-3},
    )
    write_rows(folder, [{"say": f"Row {i}"} for i in range(ROWS)])
    write_rows(folder, [{"say": f"Held out {i}"} for i in range(3)], "validation.jsonl")
    types = {"trajectory_builders.episodes": "traj_builder", "trainers.grpo": "trainer"}
    keys: dict[str, Any] = {f"{part}._type": f"openpipe_art_{kind}" for part, kind in types.items()}
    keys |= {"trajectory_builders.episodes.num_generations": GENERATIONS, "finetuning.num_epochs": EPOCHS}
    keys |= {"eval.general.max_concurrency": 2}
    return [*VALIDATION, *(text for key, value in keys.items() for text in ("-o", key, str(value)))]


@pytest.fixture(scope="module", params=RELEASES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, ...]]:
    """A release, a server, and how a run on it has ended that was not killed."""
    folder = tmp_path_factory.mktemp("whole")
    server = Server(folder)
    try:
        with Wiretap(server.address) as tap:
            options = project(folder, tap, "whole")
            done = finetune(request.param, folder / "config.yml", *options, folder=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        yield request.param, server, outcome(folder / "run", OWN), server.weights("whole")
    finally:
        server.stop()


@pytest.mark.parametrize("number", range(len(DEATHS)), ids=DEATHS)
def test_a_killed_run_ends_as_if_it_had_not_been_killed(whole: tuple[Any, ...], tmp_path: Path, number: int) -> None:
    release, server, expected, weights = whole
    death, name = [*DEATHS.values()][number], f"killed-{number}"
    with Wiretap(server.address) as tap:
        tap.lists_jobs = death.lists_jobs
        options = project(tmp_path, tap, name)
        if death.trains in ("request", "response"):
            tap.hold = (TRAIN, 2, death.trains)
        journal = tmp_path / "run/journal.jsonl"
        with starting(release, tmp_path / "config.yml", *options, folder=tmp_path) as process:
            if death.collects:
                wait_until(lambda: '"epoch":2' in (journal.read_text() if journal.exists() else ""))
            elif death.trains == "nothing":
                wait_until(lambda: len(tap.of(TRAIN)) == 2)
            else:
                wait_until(lambda: tap.held)
            process.kill()
        if death.restarts:  # on another port
            server.start()
            options += ["-o", "trainer_adapters.backend.backend.port", server.address.rpartition(":")[2]]
        done = finetune(release, tmp_path / "config.yml", *options, "--resume", folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(tap.of(TRAIN)) == death.submissions
        keys = [headers["Idempotency-Key"] for headers in tap.headers_of(TRAIN)]
    assert "continues after epoch 1" in done.stdout
    assert [key.split("/", 1)[1] for key in dict.fromkeys(keys)] == ["1/0", "2/1", "3/2"][
        : death.submissions
    ]  # epoch and step
    assert len(server.completed(name)) == (1 if death.restarts else EPOCHS)
    assert server.weights(name) == weights
    ended, known = outcome(tmp_path / "run", OWN), expected
    if death.loses_metrics:
        ended, known = without_metrics_of_job(ended), without_metrics_of_job(expected)
        assert "its metrics are unknown" in done.stderr
    for what, value in known._asdict().items():
        assert getattr(ended, what) == value, what


def without_metrics_of_job(ended: Outcome) -> Outcome:
    """Without what the server says of the second epoch's."""
    kept = [record if record["epoch"] != 2 else {k: record[k] for k in COLLECTED} for record in ended.metrics]
    return ended._replace(metrics=kept)


COLLECTED = ("avg_reward", "num_trajectories", "filtered_trajectories", "policy_version", "job", "tokens", "dropped")


def test_a_server_that_another_run_has_trained_is_refused(whole: tuple[Any, ...], tmp_path: Path) -> None:
    release, server, *_ = whole
    with Wiretap(server.address) as tap:
        options = project(tmp_path, tap, "shared")
        for folder in ("run", "other"):
            output = ("-o", "finetuning.output_dir", folder, "-o", "finetuning.num_epochs", "1")
            done = finetune(release, tmp_path / "config.yml", *options, *output, folder=tmp_path)
            assert done.returncode == 0, done.stderr
        done = finetune(release, tmp_path / "config.yml", *options, "--resume", folder=tmp_path)
    assert done.returncode == 1
    problem = "was at policy version 1, but the backend serves version 2: it has lost weights of this run, or another"
    assert problem in done.stderr
    assert len(read_lines(tmp_path / "run/training_metrics.jsonl")) == 1

"""Runs that continue: killed at random moments they end as if they had not been; changed settings are noticed."""

import contextlib
import gzip
import hashlib
import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from factories import MODEL, digits_project, read_lines, write_rows
from marks import slow_but
from processes import HANGS, Process, forked_python, run, run_project, start_project, wait_until

SEEDS = range(int(os.environ.get("KILL_SEEDS", "1")))
KILLS = int(os.environ.get("KILLS", "1"))
"""Of each run."""
VALIDATION = ("--validation_dataset", "validation.jsonl", "--validation_interval", "2")
EPOCHS = ("-o", "finetuning.num_epochs", "3", "-o", "trainer_adapters.backend.keep.optimizer", "3")
CURRICULUM = (
    *("-o", "finetuning.curriculum_learning.enabled", "true"),
    *("-o", "finetuning.curriculum_learning.initial_percentile", "0.5"),
    *("-o", "finetuning.curriculum_learning.expansion_interval", "1"),
)
DPO = (
    *("-o", "trajectory_builders.episodes", "{_type: dpo_from_groups, num_generations: 4}"),
    *("-o", "trainers.grpo", "{_type: insitu_dpo_trainer}"),
    *("-o", "trainer_adapters.backend.training", "{method: dpo, learning_rate: 1e-3, lora: {rank: 4}}"),
)
CREDIT_BY_STEP = (
    *("-o", "workflow", "{_type: converse, llm: player}"),
    *("-o", "trainers.grpo.credit", "step", "-o", "trainers.grpo.discount", "0.5"),
)
STALENESS = (
    *("-o", "trainers.grpo.staleness", "1"),
    *("-o", "trainer_adapters.backend.training.old_logprobs", "rollout"),
)
SNAPSHOTS = (*STALENESS, "-o", "trainer_adapters.backend.keep.snapshots", "3")
METHODS = {
    "grpo": (),
    "curriculum": CURRICULUM,
    "credit by step": CREDIT_BY_STEP,
    "dpo": DPO,
    "staleness": STALENESS,
    "snapshots": SNAPSHOTS,
}
"""Checked by `is_exercised`."""


class Outcome(NamedTuple):
    """What must not depend on when a run was killed."""

    metrics: list[dict[str, Any]]
    validations: list[dict[str, Any]]
    rewards: list[dict[str, Any]]
    trained: list[dict[str, Any]]
    """The lines of advantages.jsonl: every episode, in the order of training."""
    calls: set[str]
    weights: dict[str, str]
    curriculum: dict[str, Any]
    history: list[dict[str, Any]]
    """The state after each epoch."""


def outcome(folder: Path, own: str = "insitu_run_[0-9a-f]{8}") -> Outcome:
    """`own` matches the names that differ between runs."""

    def lines(name: str, *changing: str) -> list[dict[str, Any]]:
        data = (folder / name).read_bytes()
        text = (gzip.decompress(data) if name.endswith(".gz") else data).decode()
        # an outage of the backend costs an attempt; a fork names the episodes before it as the original did
        text = re.sub(rf"(?:{own})(/\d+/\w+/\d+)/\d+", r"RUN\1", text)
        text = re.sub(own, "RUN", text).replace(str(folder.parent), "FOLDER")  # in warnings
        records = json.loads(text) if name.endswith(".json") else [json.loads(line) for line in text.splitlines()]
        for record in records:
            for key in changing:
                record.pop(key, None)
        return records

    def served(job: dict[str, Any] | None) -> Any:
        made = job and job["metadata"]
        place = made and made.get("checkpoint") and made["checkpoint"].removeprefix(f"FOLDER/{folder.name}/")
        return made and (made.get("policy_version"), place)  # jobs of other adapters have neither

    metrics = lines("training_metrics.jsonl", "timestamp", "seconds")
    files = sorted((folder / "backend/checkpoints").glob("step_*/*.safetensors"))
    return Outcome(
        metrics=metrics,
        validations=lines("validation_history.json", "timestamp", "seconds"),
        rewards=lines("reward_history.json"),
        trained=lines("advantages.jsonl"),
        calls={json.dumps({**record, "seconds": 0}) for record in lines("calls.jsonl.gz", "started", "ended")},
        weights={f"{f.parent.name}/{f.name}": hashlib.sha256(f.read_bytes()).hexdigest() for f in files},
        curriculum=json.loads((folder / "curriculum_state.json").read_text()),
        history=[state | {"job": served(state.get("job"))} for state in lines("progress_history.jsonl", "sizes")],
    )


def is_exercised(method: str, ended: Outcome) -> bool:
    """Whether the run has done what its method is about."""
    by_episode = [{*record["advantages"].values()} for record in ended.trained[1:]]
    ages = [metrics.get("sampled_version") for metrics in ended.metrics] == [0, 0, 1]
    snapshots = [name.partition("/")[0] for name in ended.weights if name.endswith("/optimizer.safetensors")]
    return {
        "grpo": any(by_episode) and not any(len(each) > 1 for each in by_episode),
        "curriculum": (ended.metrics[0]["curriculum_percentile"] or 1) < 1,
        "credit by step": any(len(each) > 1 for each in by_episode),
        "dpo": ended.metrics[0].get("pairs", 0) > 0,
        "staleness": ages,
        "snapshots": ages and snapshots == ["step_000003"] and "step_000001/model.safetensors" not in ended.weights,
    }[method]


PARAMETERS = [pytest.param(name, marks=[pytest.mark.slow] * (name != "grpo")) for name in METHODS]


@pytest.fixture(scope="module", params=PARAMETERS)
def uninterrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """A project, the options of its run, how it ended without being killed, and how long it took."""
    folder = digits_project(tmp_path_factory.mktemp("uninterrupted"), rows=6, held_out=5)
    (folder / "rows.jsonl").rename(folder / "others.jsonl")
    (folder / "rows.jsonl").write_text('{"question": "those of the file"}\n')
    options = (*VALIDATION, *EPOCHS, "--dataset", "others.jsonl", *METHODS[request.param])
    started = time.monotonic()
    code, _, err = run_project(folder, *options)
    seconds = time.monotonic() - started
    assert code == 0, err
    ended = outcome(folder / "run")
    assert is_exercised(request.param, ended)
    return folder, options, ended, seconds


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_run_ends_as_if_it_had_not_been_killed(
    uninterrupted: tuple[Any, ...], tmp_path: Path, seed: int
) -> None:
    project, options, expected, seconds = uninterrupted
    copy_project(project, tmp_path)
    dice, kills = random.Random(seed), list[str]()
    while len(kills) < KILLS:
        with start_project(tmp_path, *options, "--resume") as process:
            moment = dice.uniform(0, seconds / 2 if kills else seconds)  # a resumed run is shorter
            time.sleep(moment)
            if killed := kill(process, dice.choice(["run", "backend", "both"])):
                kills.append(f"{killed} after {moment:.2f} s")
                lose_unsynced(tmp_path / "run", dice)
            else:  # it was faster: the whole run is left to be killed, or nothing of it
                seconds *= 0.8
                if "resumed" in events_of(tmp_path):
                    break
                kills.clear()
                shutil.rmtree(tmp_path / "run")
    code, _, err = run_project(tmp_path, *options, "--resume")
    assert code == 0, (seed, kills, err)
    ended = outcome(tmp_path / "run")
    for name, value in expected._asdict().items():
        assert getattr(ended, name) == value, (seed, kills, name)
    jobs = [json.loads(path.read_text()) for path in (tmp_path / "run/backend/jobs").glob("*.json")]
    keys = [job["key"] for job in jobs if job["status"] == "completed"]
    assert len(set(keys)) == len(keys) > 0, (seed, kills, "a job was trained twice")
    print(f"seed {seed}: killed {', '.join(kills)}; events: {', '.join(events_of(tmp_path))}")


def events_of(project: Path) -> list[str]:
    return [record["event"] for record in read_lines(project / "run/events.jsonl")[1:]]


def copy_project(project: Path, folder: Path) -> None:
    for file in [*project.glob("*.yml"), *project.glob("*.py"), *project.glob("*.jsonl")]:
        shutil.copy(file, folder)


only_grpo = pytest.mark.parametrize("uninterrupted", ["grpo"], indirect=True)


def check_resumed(project: Path, options: Any, expected: Outcome) -> None:
    """Continues the run, which must end as if nothing had happened."""
    (project / "run/.best.json.123.draft").touch()  # of a process that was killed
    code, out, err = run_project(project, *options, "--resume")
    assert code == 0, out + err
    assert not [*(project / "run").glob(".*.draft")]
    ended = outcome(project / "run")
    for name, value in expected._asdict().items():
        assert getattr(ended, name) == value, name


@pytest.mark.slow
@only_grpo
@pytest.mark.parametrize(
    ("number", "patient"),
    [
        pytest.param(signal.SIGINT, True, marks=pytest.mark.slow),
        (signal.SIGTERM, True),
        pytest.param(signal.SIGINT, False, marks=pytest.mark.slow),
    ],
    ids=["Ctrl-C", "SIGTERM", "Ctrl-C twice"],
)
def test_a_run_that_was_interrupted_ends_as_if_it_had_not_been(
    uninterrupted: tuple[Any, ...], tmp_path: Path, number: signal.Signals, patient: bool
) -> None:
    project, options, expected, _ = uninterrupted
    copy_project(project, tmp_path)
    metrics = tmp_path / "run/training_metrics.jsonl"
    with start_project(tmp_path, *options) as process:
        process.wait_until(metrics.exists)
        process.send_signal(number)
        while not patient and process.poll() is None:
            process.send_signal(number)
            time.sleep(0.01)
        _, err = process.communicate(HANGS)
        assert (process.wait(), err.strip()) == (130, "interrupted")
    progress = json.loads((tmp_path / "run/progress.json").read_text())
    assert progress["status"] == "interrupted" if patient else progress["status"] in ("running", "interrupted")
    check_resumed(tmp_path, options, expected)


FOLDERS = {"run": "run", "backend": "run/backend"}


@pytest.mark.slow
@only_grpo
@pytest.mark.parametrize("full", slow_but(["backend"], FOLDERS))
def test_a_run_whose_disk_was_full_continues_when_there_is_room(
    uninterrupted: tuple[Any, ...], tmp_path: Path, full: str
) -> None:
    project, options, expected, _ = uninterrupted
    copy_project(project, tmp_path)
    metrics = tmp_path / "run/training_metrics.jsonl"
    with start_project(tmp_path, *options) as process:
        process.wait_until(metrics.exists)
        owner = json.loads((tmp_path / FOLDERS[full] / ".lock").read_text())
        resource.prlimit(owner["pid"], resource.RLIMIT_FSIZE, (1, 1))  # no file can grow any more
        _, err = process.communicate(HANGS)
        assert process.wait() == 1
    assert re.search(r"^failed: .* cannot be written: .*File too large", err, re.MULTILINE), err
    assert "Traceback" not in err
    assert (tmp_path / "run/journal.jsonl").read_bytes()[-1:] in (b"", b"\n")
    read_lines(tmp_path / "run/calls.jsonl.gz")
    check_resumed(tmp_path, options, expected)


JUMPING_CLOCK = """if True:
    import itertools, sys, time
    from insitu.cli import main
    jumps, real = itertools.cycle((0, 1e9, -1e9)), time.time
    time.time = lambda: real() + next(jumps)
    sys.executable = sys.argv.pop(1)
    main()"""


@pytest.mark.slow
@only_grpo
def test_a_clock_that_jumps_changes_nothing(uninterrupted: tuple[Any, ...], tmp_path: Path) -> None:
    project, options, expected, _ = uninterrupted
    copy_project(project, tmp_path)
    code, python = tmp_path / "clock.py", tmp_path / "python"
    code.write_text(JUMPING_CLOCK)
    python.write_text(f'#!/bin/sh\nshift 2\nexec {forked_python()} -c "$(cat {code})" {python} "$@"\n')
    python.chmod(0o755)  # the backend gets the same clock
    limit = ("-o", "llms.player.timeout", "300")
    arguments = [python, "-m", "insitu", "finetune", "--config_file", "config.yml", *options, *limit]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert outcome(tmp_path / "run") == expected
    calls = read_lines(tmp_path / "run/calls.jsonl.gz")[1:]
    assert all(0 <= call["ended"] - call["started"] < HANGS for call in calls)


def kill(process: Process, which: str) -> str | None:
    """Returns what was killed; None if the run had ended."""
    if process.poll() is not None:
        return None
    try:
        backends = psutil.Process(process.pid).children()
    except psutil.NoSuchProcess:  # it has just ended
        process.communicate(HANGS)
        return None
    victims = [process.pid] * (which != "backend") + [backend.pid for backend in backends] * (which != "run")
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):  # a backend ends when its run does
            os.kill(pid, signal.SIGKILL)
    process.communicate(HANGS)
    process.wait(HANGS)
    for backend in backends:
        wait_until(lambda backend=backend: not backend.is_running() or backend.status() == psutil.STATUS_ZOMBIE)
    return which if victims else "nothing yet"


def lose_unsynced(run: Path, dice: random.Random) -> None:
    """What a power failure may leave: appended lines survive only up to the last sync, or some of them."""
    if not (run / "progress.json").exists():
        return
    progress = json.loads((run / "progress.json").read_text())
    synced = dict(progress["sizes"])
    trained = {path.name for path in (run / "backend").glob("*/step_*")}
    if len(trained) > (progress["policy_version"] or 0):
        return  # the next epoch was submitted, which is after its sync
    for name in (*synced, "journal.jsonl"):
        path = run / name
        if path.exists():
            os.truncate(path, dice.randint(synced.get(name, 0), path.stat().st_size))


@pytest.mark.parametrize("uninterrupted", [each for each in PARAMETERS if each.values != ("snapshots",)], indirect=True)
def test_a_fork_ends_as_the_original_run(uninterrupted: tuple[Any, ...], tmp_path: Path) -> None:
    """By the command that it prints."""
    project, _, expected, _ = uninterrupted
    done = run("runs", "fork", project / "run", tmp_path / "forked", "--epoch", 1)
    assert done.returncode == 0, done.stderr
    at_first = read_lines(tmp_path / "forked/training_metrics.jsonl")
    assert [metrics["epoch"] for metrics in at_first] == [1]
    (printed,) = (line.partition(": ")[2] for line in done.stdout.splitlines() if line.startswith("continue it: "))
    continued = run(*shlex.split(printed)[1:], folder=project)
    assert continued.returncode == 0, continued.stderr
    assert "continues after epoch 1" in continued.stdout
    for folder in (tmp_path / "forked", project / "run"):
        ended = outcome(folder)
        for name, value in expected._asdict().items():
            assert getattr(ended, name) == value, (folder, name)
    run_ids = [metrics["run_id"] for metrics in read_lines(tmp_path / "forked/training_metrics.jsonl")]
    assert len({*run_ids}) == 2
    assert run_ids[1] == run_ids[2] == json.loads((tmp_path / "forked/run.json").read_text())["run_id"]


@pytest.fixture
def other_file_system() -> Iterator[Path]:
    """A folder to which files of the tests cannot be linked."""
    if not os.access("/dev/shm", os.W_OK) or os.stat("/dev/shm").st_dev == os.stat(tempfile.gettempdir()).st_dev:
        pytest.skip("/dev/shm is not a file system of its own; `make test` runs it on Linux, where it is")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.slow
def test_a_fork_on_another_file_system_of_a_run_that_was_warmed_up(tmp_path: Path, other_file_system: Path) -> None:
    digits_project(tmp_path, rows=4, held_out=3)
    shown = {"messages": [{"role": "user", "content": "Row 1"}, {"role": "assistant", "content": "99"}]}
    (tmp_path / "shown.jsonl").write_text(json.dumps(shown))
    options = (*VALIDATION, *EPOCHS, "-o", "trainers.grpo.sft", "{rows: shown.jsonl, epochs: 2}")
    code, _, err = run_project(tmp_path, *options, "-o", "finetuning.num_epochs", "2")
    assert code == 0, err
    fork = other_file_system / "fork"
    done = run("runs", "fork", "run", fork, "--epoch", 0, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((fork / "progress.json").read_text())["warmed_up"]
    assert [path.name for path in (fork / "backend/checkpoints").iterdir()] == ["step_000001"]
    code, out, err = run_project(tmp_path, *options, "-o", "finetuning.num_epochs", "2", "--resume", fork)
    assert code == 0, err
    assert "continues after epoch 0" in out
    assert "warm-up" not in out
    ended, expected = outcome(fork), outcome(tmp_path / "run")
    del expected.history[1]  # the state before the warm-up, which cannot be forked
    assert ended == expected


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = digits_project(tmp_path_factory.mktemp("trained"), rows=4)
    code, _, err = run_project(folder, "-o", "finetuning.num_epochs", "1")
    assert code == 0, err
    return folder


@pytest.fixture
def project(trained: Path, tmp_path: Path) -> Path:
    """One that has trained one epoch."""
    return shutil.copytree(trained, tmp_path, dirs_exist_ok=True)


@pytest.mark.slow
def test_a_finished_run_continues_with_more_epochs(project: Path) -> None:
    run_id = json.loads((project / "run/run.json").read_text())["run_id"]
    (project / "elsewhere").mkdir()
    (project / "run").rename(project / "elsewhere/run")
    changes = ("-o", "eval.general.max_concurrency", "3", "-o", "finetuning.output_dir", "unused")
    code, out, err = run_project(project, *changes, "--resume", "elsewhere/run")
    assert code == 0, err
    assert f"run {run_id} continues after epoch 1" in out
    assert "changed since the run was started: finetuning.num_epochs was 1 and is 2" in out
    assert "changed since the run was started: eval.general.max_concurrency was 16 and is 3" in out
    assert "2 training jobs completed" in out
    folder = project / "elsewhere/run"
    assert [m["policy_version"] for m in read_lines(folder / "training_metrics.jsonl")] == [1, 2]
    progress = json.loads((folder / "progress.json").read_text())
    assert (progress["status"], progress["epoch"], progress["policy_version"]) == ("completed", 2, 2)
    assert not (project / "unused").exists()


def test_a_finished_run_is_not_continued(project: Path) -> None:
    before = {path: path.read_bytes() for path in (project / "run").rglob("*") if path.is_file()}
    run_id = json.loads((project / "run/run.json").read_text())["run_id"]
    done = run_project(project, "-o", "finetuning.num_epochs", "1", "--resume")
    assert done == (0, f"run {run_id} in run is complete after epoch 1\n", "")
    assert {path: path.read_bytes() for path in (project / "run").rglob("*") if path.is_file()} == before


def test_a_run_that_was_interrupted_continues_with_its_episodes(project: Path) -> None:
    write_rows(project, [{"say": f"Row {i}", "mark": "played"} for i in range(8)])
    played = project / "played"
    with start_project(project, "-o", "eval.general.max_concurrency", "1") as process:
        process.wait_until(lambda: played.exists() and played.stat().st_size > 20)
        process.send_signal(signal.SIGINT)
        process.communicate(HANGS)
        assert process.wait() == 130
    progress = json.loads((project / "run/progress.json").read_text())
    assert (progress["status"], progress["error"], progress["epoch"]) == ("interrupted", None, 0)
    finished = len(read_lines(project / "run/journal.jsonl")) - 1
    before = played.stat().st_size
    code, out, err = run_project(project, "-o", "finetuning.num_epochs", "1", "--resume")
    assert code == 0, err
    assert f"continues after epoch 0 and {finished} episodes of epoch 1" in out
    assert played.stat().st_size == before + 32 - finished
    assert len(read_lines(project / "run/episodes.jsonl.gz")) == 1 + 32


@pytest.mark.slow
def test_without_a_run_to_resume_one_is_started(tmp_path: Path) -> None:
    digits_project(tmp_path)
    write_rows(tmp_path, [{"say": "a"}])
    code, out, err = run_project(tmp_path, "-o", "finetuning.num_epochs", "1", "--resume")
    assert code == 0, err
    assert "1 training job completed" in out


def lose_weights(project: Path) -> None:
    shutil.rmtree(project / "run/backend/checkpoints")


def change_rows(project: Path) -> None:
    write_rows(project, [{"say": "another row"}])


def lose_progress(project: Path) -> None:
    (project / "run/progress.json").unlink()


def damage(project: Path) -> None:
    os.truncate(project / "run/episodes.jsonl.gz", 13)


def tear_groups(project: Path) -> None:
    path = project / "run/groups.jsonl"
    os.truncate(path, path.stat().st_size - 10)


RATE = ("-o", "trainer_adapters.backend.training.learning_rate", "0.5")


@pytest.mark.parametrize(
    ("prepare", "options", "problem"),
    [
        (None, RATE, "other settings: trainer_adapters.backend.training.learning_rate was 0.001 and is 0.5. Set them"),
        (change_rows, (), "the dataset .*rows.jsonl has changed. Set them as they were, or give --force"),
        (lose_progress, (), "the run in run has no progress.json: a trainer without epochs recorded it"),
        (damage, (), "episodes.jsonl.gz has 13 bytes, but [0-9]+ were written: the file is damaged"),
        (tear_groups, (), "groups.jsonl has [0-9]+ bytes, but [0-9]+ were written: the file is damaged"),
        (lose_weights, (), "the run in run was at policy version 1, but the backend serves version 0"),
    ],
    ids=["settings", "dataset", "release", "damage", "torn", "backend"],
)
def test_a_run_that_cannot_continue_says_why(project: Path, prepare: Any, options: Any, problem: str) -> None:
    if prepare is not None:
        prepare(project)
    lines = {path for path in (project / "run").glob("*.jsonl*") if path.name != "events.jsonl"}
    before = {path: path.read_bytes() for path in lines}
    code, _, err = run_project(project, *options, "--resume")
    assert code != 0
    assert re.search(problem, err), err
    assert len(err.strip().splitlines()) == 1
    assert {path: path.read_bytes() for path in lines} == before
    assert not (project / "run.1").exists()


@pytest.mark.slow
def test_serious_changes_are_forced(project: Path) -> None:
    code, out, err = run_project(project, *RATE, "--resume", "--force")
    assert code == 0, err
    assert "changed since the run was started: trainer_adapters.backend.training.learning_rate" in out
    changes = [e["changes"] for e in read_lines(project / "run/events.jsonl")[1:] if e["event"] == "resumed"]
    assert any("learning_rate was 0.001 and is 0.5" in change for change in changes[0])


def test_changed_inputs_are_noticed_when_a_run_continues(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    project = digits_project(tmp_path, rows=4, held_out=2, model="model")
    code, _, err = run_project(project, *VALIDATION, "-o", "finetuning.num_epochs", "1")
    assert code == 0, err
    started = json.loads((project / "run/run.json").read_text())
    assert started["starting_model"]["file"] == str(project / "model")

    weights = project / "run/backend/checkpoints/step_000001/model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    code, _, err = run_project(project, *VALIDATION, "--resume")
    assert code == 1, err
    progress = json.loads((project / "run/progress.json").read_text())
    assert (progress["status"], progress["epoch"]) == ("failed", 1)
    assert "model.safetensors is damaged" in progress["error"]
    assert events_of(project)[-2:] == ["completed", "failed"]
    weights.write_bytes(content)

    config = project / "model/tokenizer.json"
    config.write_text(config.read_text() + "\n")
    write_rows(project, [{"say": "another row"}], "validation.jsonl")
    code, _, err = run_project(project, *VALIDATION, "--resume")
    assert code == 2
    assert re.search("the held-out dataset .*validation.jsonl has changed", err)
    assert f"the starting model {project / 'model'} has changed" in err
    assert "resumed" not in events_of(project)

    shutil.copytree(MODEL, tmp_path / "other")
    other = ("-o", "trainer_adapters.backend.model", "other")
    code, _, err = run_project(project, *VALIDATION, *other, "--resume", "--force")
    assert code == 2
    assert "error: --force: trainer_adapters.backend.model was 'model' and is 'other', but the run in run" in err
    code, out, err = run_project(project, *VALIDATION, "--resume", "--force")
    assert code == 0, err
    scored = read_lines(project / "run/validation_scores.jsonl")[-1]["dataset"]
    assert scored == hashlib.sha256((project / "validation.jsonl").read_bytes()).hexdigest()
    assert "these scores are of other rows, or by other settings or code: they cannot be compared" in out
    assert json.loads((project / "run/run.json").read_text())["held_out"]["sha256"] == scored, "as it is now"
    assert run_project(project, *VALIDATION, "--resume")[0] == 0


@pytest.mark.slow
def test_validation_that_is_added_to_a_copied_run_names_the_epoch_and_weights_that_it_scores(project: Path) -> None:
    write_rows(project, [{"say": f"Held out {i}"} for i in range(3)], "validation.jsonl")
    rate = ("-o", "trainer_adapters.backend.training.learning_rate", "0")
    code, out, err = run_project(project, *VALIDATION, *rate, "--resume", "--force")
    assert code == 0, err
    validations = json.loads((project / "run/validation_history.json").read_text())
    assert [(record["epoch"], record["policy_version"]) for record in validations] == [(1, 1), (2, 2)]
    assert "before" not in out
    best = json.loads((project / "run/best.json").read_text())
    assert (best["epoch"], best["checkpoint"]) == (1, "backend/checkpoints/step_000001")


@pytest.mark.slow
def test_the_best_version_may_be_that_of_the_warm_up(tmp_path: Path) -> None:
    digits_project(tmp_path, held_out=3)
    write_rows(tmp_path, [{"say": f"Row {i}", "score": 0.5} for i in range(3)])  # an epoch that teaches nothing
    shown = {"messages": [{"role": "user", "content": "Row 1"}, {"role": "assistant", "content": "999999"}]}
    (tmp_path / "shown.jsonl").write_text(json.dumps(shown))
    sft = ("-o", "trainers.grpo.sft", "{rows: shown.jsonl, epochs: 20, learning_rate: 1e-2}")
    _, _, err = run_project(tmp_path, *VALIDATION, *EPOCHS, *sft)
    assert "no epoch trained" in err, err
    best, warm_up = (json.loads((tmp_path / "run" / name).read_text()) for name in ("best.json", "warm_up.json"))
    assert (best["policy_version"], best["checkpoint"]) == (1, "backend/checkpoints/step_000001")
    assert warm_up["checkpoint"] == best["checkpoint"]
    done = run("export", "run", "exported", folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_options_that_make_no_sense(project: Path) -> None:
    code, _, err = run_project(project, "--resume", "missing")
    assert (code, err.splitlines()[-1]) == (2, "error: --resume: missing holds no run that can continue")
    code, _, err = run_project(project, "--force")
    assert code == 2
    assert "--force is for --resume" in err

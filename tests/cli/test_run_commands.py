"""`insitu runs`: what it says of runs in every state, and the runs that it forks from others."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from factories import digits_project, read_lines
from marks import slow_after
from processes import run, run_project

from insitu.disk.files import readable_bytes
from insitu.disk.folder_lock import FolderLock

VALIDATION = ("--validation_dataset", "validation.jsonl", "--validation_interval", "2")
EPOCHS = ("-o", "finetuning.num_epochs", "3")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = digits_project(tmp_path_factory.mktemp("trained"), rows=4, held_out=3)
    code, _, err = run_project(folder, *VALIDATION, *EPOCHS)
    assert code == 0, err
    return folder


@pytest.fixture
def project(trained: Path, tmp_path: Path) -> Path:
    """One whose run has trained three epochs."""
    return shutil.copytree(trained, tmp_path / "project")


def listed(folder: Path, *arguments: Any) -> dict[str, dict[str, Any]]:
    """The runs by directory."""
    done = run("runs", "list", *arguments, "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    return {found["run_dir"]: found for found in map(json.loads, done.stdout.splitlines())}


def shown(run_dir: Path) -> dict[str, Any]:
    done = run("runs", "show", run_dir, "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_runs_are_listed_with_their_state(project: Path) -> None:
    (project / "runs").mkdir()
    recorded = {"done": "completed", "done.1": "interrupted", "killed": "running", "busy": "completed"}
    for name, status in recorded.items():
        shutil.copytree(project / "run", project / "runs" / name)
        change(project / "runs" / name / "progress.json", status=status, error=None)
    (project / "runs/killed/.lock").write_text(json.dumps({"pid": 2**22 + 1, "host": os.uname().nodename, "since": ""}))
    with FolderLock(project / "runs/busy", "test"):
        found = listed(project)
    states = {"done": "completed", "done.1": "interrupted", "killed": "killed", "busy": "running"}
    assert {name: found[f"runs/{name}"]["status"] for name in states} == states
    assert len(found) == len(states)
    one = found["runs/done"]
    settings = json.loads((project / "run/run.json").read_text())
    assert (one["run_id"], one["epoch"], one["epochs"], one["method"]) == (settings["run_id"], 3, 3, "grpo")
    assert one["model"] == settings["config"]["trainer_adapters"]["backend"]["model"]
    scores = [record["avg_reward"] for record in json.loads((project / "run/validation_history.json").read_text())]
    assert (one["first_score"], one["best_score"]) == (scores[0], max(scores))
    assert one["problems"] == []
    table = run("runs", "list", "runs", folder=project).stdout
    assert re.search(rf"^runs/done +{one['run_id']} +completed +3 of 3 +grpo +tic_tac_toe/model +0\.\d", table, re.M)


def test_a_run_is_found_by_its_depth(project: Path) -> None:
    for place in ("a/b/c", "a/b/c2/d", "a/.hidden"):
        (project / place).mkdir(parents=True)
        shutil.copytree(project / "run", project / place, dirs_exist_ok=True)
    (project / "link").symlink_to(project / "run")
    assert listed(project, ".").keys() == {"run", "a/b/c"}
    assert listed(project, "a/b", "run", "./run").keys() == {"a/b/c", "a/b/c2/d", "run"}
    assert run("runs", "list", folder=project).stdout == "no run in runs or .tmp\n"
    done = run("runs", "list", "missing", folder=project)
    assert (done.returncode, done.stderr) == (2, "error: FOLDER: missing is not a folder\n")


def cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, size)


def garble(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(content) and None


@pytest.mark.parametrize(
    ("damage", "problem"),
    slow_after(
        9,
        [
            (
                cut("episodes.jsonl.gz", 13),
                "episodes.jsonl.gz has 13 bytes, but [0-9]+ were written: the file is damaged",
            ),
            (cut("run.json", 40), "run.json is not JSON"),
            (cut("progress.json", 40), "progress.json is not the progress of a run"),
            (garble("progress.json", "[]"), "progress.json is not the progress of a run"),
            (
                garble("run.json", '{"run_id": "x", "config": {"finetuning": 3}}'),
                "is damaged: .* is 3: Input should be",
            ),
            (garble("validation_history.json", "[3]"), "is damaged: .* is 3: Input should be"),
            (garble("validation_history.json", "{"), "validation_history.json is not JSON"),
            (garble("events.jsonl", "no\n"), "events.jsonl, line 1 is not JSON"),
            (lambda folder: (folder / "progress.json").unlink(), "progress.json is missing: the run cannot continue"),
        ],
    ),
)
def test_a_damaged_run_is_listed_with_what_is_wrong(project: Path, damage: Any, problem: str) -> None:
    damage(project / "run")
    assert re.search(problem, " ".join(listed(project, "run")["run"]["problems"]))
    done = run("runs", "list", "run", folder=project)
    assert (done.returncode, len(re.findall(problem, done.stdout))) == (0, 1)
    assert re.search(problem, run("runs", "show", "run", folder=project).stdout)


def test_control_characters_do_not_reach_the_terminal(project: Path) -> None:
    for name in ("run.json", "progress.json"):
        change(project / "run" / name, run_id="x\x1b[2J\u3000\u00a0", status="failed", error="\x1b[31m")
    (project / "run/validation_history.json").write_text('[{"\\u001b[0m": 1}]')
    for command in ("list", "show"):
        printed = run("runs", command, "run", folder=project).stdout
        assert "\x1b" not in printed
        assert "x\\x1b[2J\u3000\u00a0" in printed.replace(r"\e", r"\x1b")


def test_the_interval_of_a_single_row_is_not_shown(project: Path) -> None:
    file = project / "run/validation_history.json"
    file.write_text(json.dumps([{**each, "ci95": [None, None]} for each in json.loads(file.read_text())]))
    table = run("runs", "show", "run", folder=project).stdout.partition("validations:\n")[2]
    assert re.search(r"^3 +3 +0\.\d+ +- +3 ", table, re.M), table


def test_scores_of_other_rows_are_not_comparable(project: Path) -> None:
    file = project / "run/validation_history.json"
    history = [{**each, "scored_by": f"rows {each['epoch'] > 0}"} for each in json.loads(file.read_text())]
    file.write_text(json.dumps(history))
    notes = [each.get("note") for each in shown(project / "run")["validations"]]
    assert notes == ["not comparable: other rows or evaluator than the latest", *[None] * (len(history) - 1)]
    table = run("runs", "show", "run", folder=project).stdout.partition("validations:\n")[2]
    assert [line.endswith("than the latest") for line in table.rstrip().splitlines()] == [
        False,
        True,
        *[False] * (len(history) - 1),
    ]


def test_a_damaged_line_hides_only_itself(project: Path) -> None:
    path = project / "run/training_metrics.jsonl"
    first, _, third = path.read_text().splitlines()
    path.write_text(f"{first}\nnoise\n{third}\nmore noise\n")
    found = shown(project / "run")
    assert [line["epoch"] for line in found["epochs"]] == [1, 3]
    [problem] = found["summary"]["problems"][1:]  # the first is that the file is shorter
    assert "training_metrics.jsonl, line 2 is not JSON" in problem
    assert problem.endswith("(and 1 more damaged lines)")


def test_a_run_is_shown(project: Path) -> None:
    folder = project / "run"
    os.truncate(folder / "episodes.jsonl.gz", 1 << 36)  # sparse: reading it all would take minutes
    change(folder / "progress.json", status="failed", error="JobFailed: the disk was full")
    found = shown(folder)
    assert found["summary"]["status"] == "failed"
    assert found["summary"]["error"] == "JobFailed: the disk was full"
    assert found["settings"]["trainer_adapters.backend.training.mini_batch_size"] == 16
    assert found["settings"]["finetuning.output_dir"] == "run"
    assert not [key for key in found["settings"] if key.endswith(("max_restarts", "kl.beta", "dataset.id_key"))]
    assert [event["event"] for event in found["events"]] == ["started", "completed"]
    assert [line["epoch"] for line in found["epochs"]] == [1, 2, 3]
    change(folder / "run.json", epochs=5)
    page = run("runs", "show", "run", folder=project).stdout
    assert "\n  finetuning.output_dir: run\n" in page
    assert "null" not in page
    assert "\nresume: continues after epoch 3\n" in page
    assert re.search(r"^3 +3 +\d\.\d+ +-?\S+ +.*completed$", page, re.M)
    os.truncate(folder / "episodes.jsonl.gz", 13)
    assert shown(folder)["resume"] == "cannot continue"


def test_only_runs_are_shown(project: Path) -> None:
    done = run("runs", "show", ".", folder=project)
    assert (done.returncode, done.stderr) == (2, "error: RUN_DIR: . holds no run of insitu finetune\n")


def lose(name: str) -> Callable[[Path], None]:
    def delete(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return delete


@pytest.mark.parametrize(
    ("prepare", "epoch", "code", "problem"),
    [
        (None, 7, 2, "--epoch: run has no complete epoch 7; epochs that can be forked: 0, 2, 3\n"),
        (None, 1, 2, "(see `keep` of the trainer adapter); epochs that can be forked: 0, 2, 3\n"),
        (lose("backend/checkpoints/step_000002"), 2, 2, "epochs that can be forked: 0, 3\n"),
        (lose("progress_history.jsonl"), 2, 2, "epochs that can be forked: 3\n"),
        (lose("progress.json"), 2, 2, "RUN_DIR: the run in run has no progress.json"),
        (lose("backend/started_from.json"), 2, 2, "RUN_DIR: the backend of run was not started by the run"),
        (cut("calls.jsonl.gz", 13), 2, 1, "failed: run/calls.jsonl.gz has 13 bytes, but "),
        (lose("groups.jsonl"), 2, 1, "failed: run/groups.jsonl is missing: the run cannot be copied\n"),
        (cut("progress_history.jsonl", 100), 3, 0, ""),
        (garble("progress_history.jsonl", '{"epoch": 1}\n'), 3, 1, "line 1 is not the state of an epoch: "),
        (cut("backend/checkpoints/step_000002/model.safetensors", 99), 2, 1, "model.safetensors is damaged"),
        (lambda folder: (folder.parent / "new").mkdir(), 2, 2, "NEW_DIR: new exists already; choose another name"),
        (lambda folder: (folder.parent / "new").write_text(""), 2, 2, "NEW_DIR: new exists already"),
    ],
)
def test_an_epoch_that_cannot_be_forked(project: Path, prepare: Any, epoch: int, code: int, problem: str) -> None:
    if prepare is not None:
        prepare(project / "run")
    before = {path.name for path in project.iterdir()}
    done = run("runs", "fork", "run", "new", "--epoch", epoch, folder=project)
    assert (done.returncode, len(done.stderr.splitlines())) == (code, code > 0), done.stderr
    assert problem in done.stderr
    assert {path.name for path in project.iterdir()} == before | ({"new"} if code == 0 else set())


def test_a_fork_with_other_settings_leaves_the_original_as_it_is(project: Path) -> None:
    original = project / "run"
    files = {path: path.read_bytes() for path in original.rglob("*") if path.is_file()}
    with FolderLock(original, "test"):  # it may be in progress
        done = run("runs", "fork", "run", "forks/slow", "--epoch", 2, folder=project)
    assert done.returncode == 0, done.stderr
    slow = project / "forks/slow"
    assert listed(project, "forks")["forks/slow"]["status"] == "forked"
    assert shown(slow)["resume"] == "continues after epoch 2"
    weights = "backend/checkpoints/step_000002/model.safetensors"
    assert (slow / weights).samefile(original / weights)
    forked = read_lines(slow / "events.jsonl")[1]
    run_id = json.loads((original / "run.json").read_text())["run_id"]
    assert (forked["event"], forked["epoch"], forked["run"], forked["run_id"]) == ("forked", 2, str(original), run_id)
    assert json.loads((slow / "run.json").read_text())["run_id"] not in (run_id, None)

    rate = ("-o", "trainer_adapters.backend.training.learning_rate", "1e-4")
    resume = (*VALIDATION, *EPOCHS, *rate, "--resume", "forks/slow")
    code, _, err = run_project(project, *resume)
    assert code == 2
    assert "learning_rate was 0.001 and is 0.0001" in err
    code, _, err = run_project(project, *resume, "--force")
    assert code == 0, err
    assert [line["learning_rate"] for line in read_lines(slow / "training_metrics.jsonl")] == [1e-3, 1e-3, 1e-4]
    last = "backend/checkpoints/step_000003/model.safetensors"
    assert (slow / last).read_bytes() != (original / last).read_bytes()
    best = json.loads((slow / "best.json").read_text())
    assert best["checkpoint"] is None or (slow / best["checkpoint"]).is_dir()
    assert {path: path.read_bytes() for path in original.rglob("*") if path.is_file()} == files
    assert not list(project.rglob(".*.draft"))


def test_a_fork_has_what_was_known_after_its_epoch(project: Path) -> None:
    original, fork = project / "run", project / "new"
    rescores = [{"format": 2}, *({"episode": f"r/{epoch}/0/0/0", "evaluator": "e"} for epoch in (1, 2, 3))]
    (original / "rescores.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rescores))
    done = run("runs", "fork", original, fork, "--epoch", 2)
    assert done.returncode == 0, done.stderr
    options = "-o finetuning.validation.dataset validation.jsonl"  # as the original had
    assert f"{options} " in done.stdout
    for name in ("episodes.jsonl.gz", "calls.jsonl.gz", "groups.jsonl", "advantages.jsonl", "training_metrics.jsonl"):
        assert (original / name).read_bytes().startswith((fork / name).read_bytes())
        assert {record["epoch"] for record in read_lines(fork / name) if "epoch" in record} <= {1, 2}
    assert [line["epoch"] for line in read_lines(fork / "progress_history.jsonl")[1:]] == [0, 1, 2]
    assert [line["episode"] for line in read_lines(fork / "rescores.jsonl")[1:]] == ["r/1/0/0/0", "r/2/0/0/0"]
    for name in ("reward_history.json", "validation_history.json"):
        assert [record["epoch"] for record in json.loads((fork / name).read_text())] == [
            record["epoch"] for record in json.loads((original / name).read_text()) if record["epoch"] <= 2
        ]
    assert max(line["epoch"] for line in read_lines(fork / "validation_scores.jsonl")[1:]) == 2
    jobs = [json.loads(path.read_text())["policy_version"] for path in (fork / "backend/jobs").iterdir()]
    assert sorted(jobs) == [1, 2]
    assert sorted(path.name for path in (fork / "backend/checkpoints").iterdir()) == ["step_000001", "step_000002"]
    assert not (fork / ".lock").exists()
    assert not (fork / "journal.jsonl").exists()
    done = run("runs", "fork", fork, project / "again", "--epoch", 2)
    assert done.returncode == 0, done.stderr
    checkpoint = read_lines(project / "again/progress_history.jsonl")[-1]["job"]["metadata"]["checkpoint"]
    assert checkpoint == str(project / "again/backend/checkpoints/step_000002")


def saved(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "backend/checkpoints").iterdir())


def pruned(folder: Path, *arguments: Any) -> str:
    done = run("runs", "prune", *arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_pruning_keeps_what_later_commands_need(tmp_path: Path) -> None:
    """Of five checkpoints: the best, the last two, which have an optimizer state, and one that another run uses."""
    project = digits_project(tmp_path, rows=3, held_out=3)
    keep = ("-o", "trainer_adapters.backend.keep.every", "1")
    code, _, err = run_project(project, *keep, *VALIDATION, "-o", "finetuning.num_epochs", "6")
    assert code == 0, err
    folder, names = project / "run", [f"step_{number:06d}" for number in range(1, 7)]
    assert saved(folder) == names
    change(folder / "best.json", checkpoint=f"backend/checkpoints/{names[1]}")
    (project / "next/backend").mkdir(parents=True)
    (project / "next/run.json").write_text("{}")
    started_from = {"model": str(folder / "backend/checkpoints" / names[2])}
    (project / "next/backend/started_from.json").write_text(json.dumps(started_from))
    shared = project / "shared"
    shared.hardlink_to(folder / "backend/checkpoints" / names[0] / "model.safetensors")

    files = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    surplus = [folder / "backend/checkpoints" / name for name in (names[0], names[3])]
    jobs = [
        path for path in (folder / "backend/jobs").iterdir() if json.loads(path.read_text())["policy_version"] in (1, 4)
    ]
    sizes = [path.stat().st_size for each in surplus for path in each.iterdir()] + [
        path.stat().st_size for path in jobs
    ]
    freed = readable_bytes(sum(sizes) - shared.stat().st_size)
    said = pruned(project, "run", "--dry_run")
    assert said == f"run: would delete {names[0]}, {names[3]}; job records: 2\nwould free {freed}\n"
    assert {path: path.read_bytes() for path in project.rglob("*") if path.is_file()} == files
    (project / "links").mkdir()
    (project / "links/run").symlink_to(folder)
    assert pruned(project, "links/run", "--dry_run") == f"links/{said}"
    copied = shutil.copytree(project, tmp_path.parent / "copied", symlinks=True)
    assert pruned(copied, "run", "--dry_run").splitlines()[0] == said.splitlines()[0]

    assert pruned(project, "run") == f"run: deleted {names[0]}, {names[3]}; job records: 2\nfreed {freed}\n"
    assert saved(folder) == [names[1], names[2], names[4], names[5]]
    assert not [path for path in jobs if path.exists()]
    assert pruned(project, "run") == "freed 0 B\n"
    for epoch, target in ((5, "fifth"), (6, "sixth")):
        done = run("runs", "fork", "run", target, "--epoch", epoch, folder=project)
        assert done.returncode == 0, done.stderr
    for target in ("run", "fifth"):
        seven = ("-o", "finetuning.num_epochs", "7", "--resume", target)
        code, _, err = run_project(project, *keep, *VALIDATION, *seven)
        assert code == 0, err
    last = "backend/checkpoints/step_000007/model.safetensors"
    assert (folder / last).read_bytes() == (project / "fifth" / last).read_bytes()


def test_runs_that_have_not_ended_are_not_pruned(project: Path) -> None:
    shutil.copytree(project / "run", project / "runs/killed")
    shutil.copytree(project / "run", project / "runs/busy")
    shutil.copytree(project / "run", project / "runs/damaged")
    shutil.copytree(project / "run", project / "runs/lost")
    lose("best.json")(project / "runs/lost")
    change(project / "runs/killed/progress.json", status="running")
    cut("calls.jsonl.gz", 13)(project / "runs/damaged")
    before = saved(project / "run")
    with FolderLock(project / "runs/busy", "test"):
        said = pruned(project).splitlines()
    assert said[0] == "runs/busy: nothing is deleted: it is running"
    assert said[1].startswith("runs/damaged: nothing is deleted: runs/damaged/calls.jsonl.gz has 13 bytes, but ")
    missing = "runs/lost has no best.json, although it was validated; runs/lost/latest exists"
    assert said[2:] == [
        "runs/killed: nothing is deleted: it is killed",
        f"runs/lost: nothing is deleted: {missing}",
        "freed 0 B",
    ]
    assert [saved(project / "runs" / name) for name in ("busy", "damaged", "killed", "lost")] == [before] * 4
    assert run("export", "runs/lost", "out", folder=project).stderr == f"error: --checkpoint: {missing}\n"
    done = run("runs", "prune", "missing", folder=project)
    assert (done.returncode, done.stderr) == (2, "error: FOLDER: missing is not a folder\n")

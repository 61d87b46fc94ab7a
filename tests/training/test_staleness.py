"""Batches that are collected ahead of training: the same files and weights each time, however long episodes take."""

import json
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from equal_runs import differences
from factories import digits_project, read_lines, write_rows
from marks import slow_after
from processes import HANGS, run, run_project, start_project, wait_until
from test_resume import SEEDS

from insitu.runs.files import METRICS
from insitu.runs.reader import RunReader

EPOCHS = 3
RECOMPUTED = ("-o", "trainer_adapters.backend.training.old_logprobs", "recomputed")
LATER = 5
"""The epochs of a run in which epochs are ahead of an interruption."""


def stale(staleness: int, *more: str, epochs: int = EPOCHS) -> tuple[str, ...]:
    key = ("-o", "trainers.grpo.staleness", str(staleness), "-o", "trainer_adapters.backend.keep.last", "4")
    return (*key, "-o", "finetuning.num_epochs", str(epochs), *more)


def project(folder: Path, pause: float = 0.05) -> Path:
    """Six rows whose episodes take very different times."""
    folder.mkdir()
    digits_project(folder)
    write_rows(folder, [{"say": f"Row {number}", "pause": pause} for number in range(6)])
    return folder


def whole_run(folder: Path, *options: str) -> Path:
    code, _, err = run_project(folder, *options)
    assert code == 0, err
    return folder / "run"


@pytest.mark.parametrize("staleness", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_batches_are_sampled_from_planned_versions(tmp_path: Path, staleness: int) -> None:
    first = whole_run(project(tmp_path / "a"), *stale(staleness))
    sampled = {
        (call["episode"].split("/")[1], call["policy_version"]) for call in read_lines(first / "calls.jsonl.gz")[1:]
    }
    assert sampled == {(str(epoch), max(epoch - 1 - staleness, 0)) for epoch in range(1, EPOCHS + 1)}
    metrics = [*RunReader(first).records(METRICS)]  # which are all of the form that is read
    assert "idle" in metrics[-1]["seconds"]
    assert [line["policy_version"] for line in metrics] == [*range(1, EPOCHS + 1)]
    assert [line["sampled_version"] for line in metrics] == [max(epoch - staleness, 0) for epoch in range(EPOCHS)]
    training = json.loads((first / "run.json").read_text())["training"]
    assert (training["old_logprobs"], training["clip_low"], training["clip_high"]) == ("rollout", 0.5, 0.5), (
        "by default"
    )
    assert [group["epoch"] for group in read_lines(first / "groups.jsonl") if "epoch" in group] == [
        epoch for epoch in range(1, EPOCHS + 1) for _ in range(6)
    ]
    slow = whole_run(project(tmp_path / "b"), *stale(staleness), "-o", "eval.general.max_concurrency", "3")
    assert [line for line in differences(first, slow, {"digest"}) if "max_concurrency" not in line] == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_that_is_killed_at_random_moments_is_resumed_to_the_bit(tmp_path: Path, seed: int) -> None:
    options = stale(staleness := 1 + seed % 2, epochs=8)
    whole = whole_run(project(tmp_path / "whole"), *options)
    killed, rng, at = project(tmp_path / "killed"), random.Random(seed), []
    journal = killed / "run/journal.jsonl"
    for number in range(7):
        seen, many = {changed(journal)}, rng.randint(2, 12)
        with start_project(killed, *options, *(["--resume"] if number else [])) as process:

            def is_time(first: bool = not number, seen: set[int] = seen, many: int = many) -> bool:
                seen.add(changed(journal))
                return len(epochs_in(journal)) > staleness if first else len(seen) > many

            wait_until(lambda is_time=is_time, process=process: is_time() or process.poll() is not None)
            process.send_signal(signal.SIGKILL)
            process.wait()
        at.append(epochs_in(journal))
    assert len(at[0]) > staleness, "episodes of several batches were in the journal"
    assert len({*map(str, at)}) > 2
    whole_run(killed, *options, "--resume")
    told = ("events.jsonl: event resumed", "backend/jobs/")  # a job that was canceled has a record
    resumed = [line for line in differences(whole, killed / "run", {"digest"}) if not line.startswith(told)]
    assert resumed == []


def epochs_in(journal: Path) -> list[int]:
    return sorted({line["episode"]["epoch"] for line in whole_lines(journal) if "episode" in line})


def changed(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Without a last line that was cut."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


@pytest.mark.slow
def test_a_fork_samples_from_the_same_versions(tmp_path: Path) -> None:
    folder = project(tmp_path / "project")
    first = whole_run(folder, *stale(1, epochs=LATER))
    forked = run("runs", "fork", "run", "forked", "--epoch", "4", folder=folder)
    assert forked.returncode == 0, forked.stderr
    second = whole_run(folder, *stale(1, epochs=LATER), "-o", "finetuning.output_dir", "forked", "--resume").with_name(
        "forked"
    )
    keys = ("epoch", "sampled_version", "policy_version", "avg_reward", "loss", "effective_sample_size")
    metrics = [
        [[line[key] for key in keys] for line in read_lines(each / "training_metrics.jsonl")]
        for each in (first, second)
    ]
    assert metrics[0] == metrics[1]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            stale(1, *RECOMPUTED),
            "staleness is 1, so episodes are of earlier weights: set training.old_logprobs to rollout",
        ),
        (stale(3), "staleness is 3, but trainer_adapters keep.last is 4; allowed: from 5"),
        (stale(-1), "trainers.grpo.staleness"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, options: tuple[str, ...], problem: str) -> None:
    code, _, err = run_project(folder := project(tmp_path / "project"), *options)
    assert code == 2
    assert problem in err
    assert not (folder / "run").exists()


@pytest.mark.slow
def test_a_correction_takes_the_place_of_the_samplers_log_probabilities(tmp_path: Path) -> None:
    masks = ("-o", "trainer_adapters.backend.training.token_mask", "[0.5, 2]")
    run = whole_run(project(tmp_path / "project"), *stale(2, epochs=LATER), *masks)
    metrics = read_lines(run / "training_metrics.jsonl")
    assert [line["sampled_version"] for line in metrics] == [0, 0, 0, 1, 2]
    assert all("masked_share" in line for line in metrics)
    assert metrics[0]["effective_sample_size"] == pytest.approx(1, abs=1e-4)
    assert metrics[-1]["effective_sample_size"] < 1 - 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("trainer", slow_after(1, ["insitu_dpo_trainer", "insitu_kto_trainer", "insitu_sft_trainer"]))
def test_other_methods_collect_ahead_too(tmp_path: Path, trainer: str) -> None:
    folder = project(tmp_path / "project")
    method = trainer.split("_")[1]
    config = yaml.safe_load((folder / "config.yml").read_text())
    config["trainers"]["grpo"] = {"_type": trainer, "staleness": 1}
    config["trainer_adapters"]["backend"]["training"] = {"method": method, "learning_rate": 1e-3}
    if method == "dpo":
        config["trajectory_builders"]["episodes"] = {"_type": "dpo_from_groups", "num_generations": 4}
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    run = whole_run(folder, "-o", "finetuning.num_epochs", "3")
    assert [line["sampled_version"] for line in read_lines(run / "training_metrics.jsonl")] == [0, 0, 1]


@pytest.mark.slow
def test_a_run_that_continues_with_another_staleness_is_refused_or_right(tmp_path: Path) -> None:
    """Episodes that were sampled ahead from other versions than are planned now are run again."""
    folder = interrupted(project(tmp_path / "project", pause=0.2), 1)
    code, _, err = run_project(folder, *stale(0, epochs=LATER), "--resume")
    assert code == 2
    assert "trainers.grpo.staleness was 1 and is 0" in err
    assert any(line["episode"]["epoch"] == 5 for line in read_lines(folder / "run/journal.jsonl")[1:])
    progress = json.loads((folder / "run/progress.json").read_text())
    following = progress["epoch"] + 1
    for staleness in (0, 2):
        shutil.copytree(folder, other := tmp_path / str(staleness))
        if progress["submitted_epoch"] == following:
            code, _, err = run_project(other, *stale(staleness, epochs=LATER), "--resume", "--force")
            assert code == 2
            assert f"staleness is {staleness}, but the job of epoch {following} was submitted with" in err
            continue
        continued = whole_run(other, *stale(staleness, epochs=LATER), "--resume", "--force")
        sampled = [line.get("sampled_version") for line in read_lines(continued / "training_metrics.jsonl")][-2:]
        assert sampled == ([None] * 2 if staleness == 0 else [LATER - 2 - staleness, LATER - 1 - staleness])


def interrupted(folder: Path, staleness: int, *options: str) -> Path:
    """A run that is interrupted as soon as episodes of the fifth epoch have ended, ahead of those that are trained."""
    journal, metrics = folder / "run/journal.jsonl", folder / "run/training_metrics.jsonl"
    with start_project(folder, *stale(staleness, *options, epochs=LATER)) as process:

        def is_ahead() -> bool:
            if not metrics.exists() or len(whole_lines(metrics)) < 4 - staleness:
                return False
            return any(line["episode"]["epoch"] == 5 for line in whole_lines(journal)[1:])

        process.wait_until(is_ahead)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(HANGS)
        assert (process.wait(), err.strip()) == (130, "interrupted")
    return folder


@pytest.mark.slow
def test_weights_that_the_next_epochs_are_sampled_from_are_kept_by_prune_and_needed_by_fork(tmp_path: Path) -> None:
    whole = whole_run(project(tmp_path / "whole", pause=0.2), *stale(2, epochs=LATER))
    folder = interrupted(project(tmp_path / "project", pause=0.2), 2)
    pruned = run("runs", "prune", "run", folder=folder)
    assert pruned.returncode == 0, pruned.stderr
    epoch = json.loads((folder / "run/progress.json").read_text())["epoch"]
    shutil.copytree(folder, other := tmp_path / "other")
    assert whole_run(folder, *stale(2, epochs=LATER), "--resume")
    resumed = differences(whole, folder / "run", {"digest", "events.jsonl", "step_000001", "optimizer.safetensors"})
    assert [line for line in resumed if "backend/" not in line] == []
    shutil.rmtree(other / f"run/backend/checkpoints/step_{epoch - 1:06}")
    code, _, err = run_project(other, *stale(2, epochs=LATER), "--resume")
    assert code == 2
    assert (
        f"staleness is 2, so the epochs after {epoch} of run are sampled from earlier weights, of which version " in err
    )
    forked = run("runs", "fork", "run", "forked", "--epoch", str(epoch), folder=other)
    assert forked.returncode == 2
    assert "epochs that can be forked: " in forked.stderr

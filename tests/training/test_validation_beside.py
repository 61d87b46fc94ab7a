"""Validation beside training, and patience: the scores, checkpoints and ends of runs that validate between epochs."""

import json
import random
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from equal_runs import differences
from factories import digits_project, read_lines, write_rows
from processes import Process, run, run_project, start_project, wait_until

from insitu.integrations.trackers.stream import TrackedFiles
from insitu.runs.records import EarlyStop, RunProgress, best_validation
from insitu.training.validation import validations_since_best

BESIDE = ("-o", "finetuning.validation.beside", "true")
STALE = ("-o", "trainers.grpo.staleness", "1", "-o", "trainer_adapters.backend.training.old_logprobs", "rollout")
NEVER_IMPROVES = ("-o", "trainer_adapters.backend.training.learning_rate", "1e-12")
RESUMED = ("events.jsonl: event resumed", "backend/jobs/")
"""Of a run that was killed: a job that was canceled has a record."""


def project(folder: Path, *, pause: float = 0.05, held_out: dict[str, Any] | None = None, **validation: Any) -> Path:
    """Six rows whose episodes take very different times, and five held-out rows, validated after every epoch."""
    folder.mkdir()
    digits_project(folder)
    write_rows(folder, [{"say": f"Row {number}", "pause": pause} for number in range(6)])
    rows = [{"say": f"Held out {number}", "pause": pause} | (held_out or {}) for number in range(5)]
    write_rows(folder, rows, "validation.jsonl")
    config = yaml.safe_load((folder / "config.yml").read_text())
    config["finetuning"] |= {
        "num_epochs": 5,
        "validation": {"dataset": "validation.jsonl", "interval": 1, "reps": 2} | validation,
    }
    config["eval"]["general"]["episode_timeout"] = 300
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    return folder


def whole_run(folder: Path, *options: str) -> Path:
    code, _, err = run_project(folder, *options)
    assert code == 0, err
    return folder / "run"


def progress_of(folder: Path) -> RunProgress:
    return RunProgress.model_validate_json((folder / "run/progress.json").read_bytes())


def history_of(run: Path) -> list[dict[str, Any]]:
    records = json.loads((run / "validation_history.json").read_text())
    return [record | {"seconds": 0, "beside": None, "scored_by": None} for record in records]  # rows may pause


@pytest.mark.parametrize("options", [(), pytest.param(STALE, marks=pytest.mark.slow)], ids=["on-policy", "stale"])
@pytest.mark.parametrize(("interval", "last"), [(1, 3), pytest.param(2, 5, marks=pytest.mark.slow)])
def test_scores_and_weights_are_those_of_a_run_that_waits(
    tmp_path: Path, options: tuple[str, ...], interval: int, last: int
) -> None:
    every = ("-o", "trainer_adapters.backend.keep.every", "1", "-o", "finetuning.num_epochs", str(last), *options)
    waits = whole_run(project(tmp_path / "a", interval=interval), *every)
    overlaps = whole_run(project(tmp_path / "b", interval=interval), *every, *BESIDE)
    epochs = [*range(0, last, interval), last]
    assert [(each["epoch"], each["policy_version"]) for each in history_of(overlaps)] == [(e, e) for e in epochs]
    assert len({each["avg_reward"] for each in history_of(overlaps)}) > 2
    new_keys = {"beside", "digest", "override"}
    assert differences(waits, overlaps, new_keys) == []


@pytest.mark.slow
def test_a_version_is_validated_while_the_next_is_trained_and_served(tmp_path: Path) -> None:
    waits = whole_run(project(tmp_path / "a"), "-o", "finetuning.num_epochs", "2")
    folder = project(tmp_path / "b", held_out={"pause": 1e6})
    with start_project(folder, "-o", "finetuning.num_epochs", "2", *BESIDE) as process:
        process.wait_until(lambda: (folder / "run/backend/checkpoints/step_000001/training.json").exists())
        assert not (folder / "run/validation_history.json").exists()
        assert progress_of(folder).epoch == 0
        (folder / "released").touch()
        out, err = process.communicate()
        assert process.wait() == 0, err
    assert history_of(folder / "run") == history_of(waits)
    assert history_of(waits)[0]["avg_reward"] != history_of(waits)[1]["avg_reward"]
    assert "validation at epoch 0: " in out
    records = json.loads((folder / "run/validation_history.json").read_text())
    assert [each.get("beside", False) for each in records] == [True, True, False]
    lines = read_lines(folder / "run/training_metrics.jsonl")
    own = [records[0]["seconds"], records[1]["seconds"] + records[2]["seconds"]]
    assert all(line["seconds"]["validate"] <= most for line, most in zip(lines, own, strict=True)), (
        "what was waited for"
    )


@pytest.mark.slow
def test_neither_training_nor_validation_starves(tmp_path: Path) -> None:
    """With two slots, and more held-out episodes than those of an epoch."""
    folder = project(tmp_path / "project", held_out={"mark": "validated"}, pause=0.02, reps=12)
    write_rows(folder, [{"say": f"Row {number}", "mark": "trained", "pause": 0.02} for number in range(6)])
    slots = ("-o", "eval.general.max_concurrency", "2", "-o", "finetuning.num_epochs", "1")
    with start_project(folder, *slots, *BESIDE) as process:

        def played(name: str) -> int:
            return (folder / name).stat().st_size if (folder / name).exists() else 0

        process.wait_until(lambda: played("trained") >= 1 + 24)  # a row is played before
        assert 10 < played("validated") < 50  # of 60
        assert process.wait() == 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), pytest.param(STALE, marks=pytest.mark.slow)], ids=["on-policy", "stale"])
def test_a_run_that_is_killed_at_random_moments_is_resumed_to_the_bit(tmp_path: Path, options: tuple[str, ...]) -> None:
    settings = ("-o", "finetuning.num_epochs", "6", *BESIDE, *options)
    whole = whole_run(project(tmp_path / "whole"), *settings)
    killed, rng, due = project(tmp_path / "killed"), random.Random(1), []
    watched = [killed / "run" / name for name in ("journal.jsonl", "validation_history.json")]
    for number in range(6):
        seen, many = {changed(watched)}, rng.randint(2, 12)
        with start_project(killed, *settings, *(["--resume"] if number else [])) as process:

            def has_changed_often(seen: set[Any] = seen, many: int = many, process: Process = process) -> bool:
                seen.add(changed(watched))
                return len(seen) > many or process.poll() is not None

            wait_until(has_changed_often)
            process.send_signal(signal.SIGKILL)
            process.wait()
        due.append(progress_of(killed).due_validation)
    assert any(epoch is not None for epoch in due)
    whole_run(killed, *settings, "--resume")
    resumed = [line for line in differences(whole, killed / "run", {"digest"}) if not line.startswith(RESUMED)]
    assert resumed == []


def changed(paths: list[Path]) -> tuple[int, ...]:
    return tuple(path.stat().st_mtime_ns if path.exists() else 0 for path in paths)


@pytest.mark.slow
def test_a_validation_that_was_due_is_repeated_from_the_checkpoint_of_its_version(tmp_path: Path) -> None:
    settings = ("-o", "finetuning.num_epochs", "3")
    whole = whole_run(project(tmp_path / "whole"), *settings, *BESIDE)
    folder = project(tmp_path / "killed")
    waiting = [{"say": f"Held out {number}", "pause": 1e6} for number in range(5)]
    write_rows(folder, waiting, "validation.jsonl")  # the seeds are those of the whole run's
    (folder / "released").touch()
    with start_project(folder, *settings, *BESIDE) as process:
        process.wait_until(lambda: (folder / "run/validation_history.json").exists())
        (folder / "released").unlink()  # the validation of epoch 1 does not end
        process.wait_until(lambda: (folder / "run/backend/checkpoints/step_000002/training.json").exists())
        assert [record["epoch"] for record in history_of(folder / "run")] == [0]
        assert (progress_of(folder).epoch, progress_of(folder).due_validation) == (1, 1)
        process.send_signal(signal.SIGKILL)
        process.wait()
    (folder / "released").touch()
    copied = shutil.copytree(folder, tmp_path / "copied")
    whole_run(folder, *settings, *BESIDE, "--resume")
    assert history_of(folder / "run") == history_of(whole)
    whole_run(copied, *settings, "--resume")  # it is also made by a run that now waits for its validations
    assert history_of(copied / "run") == history_of(whole)


@pytest.mark.parametrize(
    ("options", "last"),
    [
        ((), 2),
        pytest.param(BESIDE, 3, marks=pytest.mark.slow),
        pytest.param((*BESIDE, *STALE), 3, marks=pytest.mark.slow),
    ],
    ids=["waits", "beside", "stale"],
)
def test_a_run_whose_score_does_not_improve_ends_early(tmp_path: Path, options: tuple[str, ...], last: int) -> None:
    settings = (*NEVER_IMPROVES, *options)
    runs = []
    for name, limit in (("a", "16"), ("b", "3"))[: 2 if options else 1]:  # the second one has another load
        folder = project(tmp_path / name, patience=2)
        code, out, err = run_project(folder, *settings, "-o", "eval.general.max_concurrency", limit)
        assert (code, err) == (0, "")
        told = "the held-out score has not improved on 0.[0-9]+ of epoch 0 in 2 validations"
        assert re.search(f"{told}: the run ends after epoch {last} of 5", out), out
        lefts = re.findall(r"^epoch (\d)/5 .* run: about .* left$", out, re.M)
        assert lefts == [str(epoch) for epoch in range(1, last)], "none by an epoch that is the last"
        runs.append(folder / "run")
    assert [record["epoch"] for record in history_of(runs[0])] == [*range(last + 1)]
    assert progress_of(folder).stop == EarlyStop(epochs=5, patience=2)
    [event] = [event for event in read_lines(runs[0] / "events.jsonl") if event.get("event") == "ended early"]
    assert (event["epoch"], event["patience"], event["best_epoch"]) == (last, 2, 0)
    assert (event["untrained_episodes"] > 0) == ("trainers.grpo.staleness" in options)
    lines = [line for line in differences(runs[0], runs[-1], {"digest"}) if "max_concurrency" not in line]
    assert [line for line in lines if not line.startswith("events.jsonl: event ended early")] == []


@pytest.mark.slow
def test_a_run_that_ended_early_continues_with_more_patience_or_epochs_only(tmp_path: Path) -> None:
    folder = project(tmp_path / "project", patience=2)
    whole_run(folder, *NEVER_IMPROVES)
    code, out, _ = run_project(folder, *NEVER_IMPROVES, "--resume")
    assert code == 0
    assert "is complete after epoch 2 of 5: its held-out score had not improved any more" in out
    progress = progress_of(folder).model_copy(update={"status": "running"})  # as if it was killed at its end
    (folder / "run/progress.json").write_text(progress.model_dump_json())
    whole_run(folder, *NEVER_IMPROVES, "--resume", "-o", "finetuning.num_epochs", "4")
    assert (progress_of(folder).epoch, progress_of(folder).status) == (2, "completed")
    whole_run(folder, *NEVER_IMPROVES, "--resume", "-o", "finetuning.num_epochs", "6")
    assert progress_of(folder).epoch == 3
    whole_run(folder, *NEVER_IMPROVES, "--resume", *("-o", "finetuning.validation.patience", "4"))
    assert (progress_of(folder).epoch, progress_of(folder).stop) == (4, EarlyStop(epochs=5, patience=4))
    forked = run("runs", "fork", "run", "forked", "--epoch", "4", folder=folder)
    assert forked.returncode == 0, forked.stderr
    whole_run(folder, *NEVER_IMPROVES, "-o", "finetuning.output_dir", "forked", "--resume")
    assert json.loads((folder / "forked/progress.json").read_text())["epoch"] == 5


@pytest.mark.slow
def test_a_failed_validation_fails_the_run_with_the_same_message(tmp_path: Path) -> None:
    messages = []
    for name, options in (("a", ()), ("b", BESIDE)):
        folder = project(tmp_path / name, held_out={"score": "nan"})
        code, _, err = run_project(folder, "-o", "finetuning.num_epochs", "2", *options)
        assert code == 1
        assert progress_of(folder).epoch == 2
        messages.append(err)
    assert "3 validation(s) failed; the first, at epoch 0: no example could be scored: 10 nan_score" in messages[1]
    assert messages[0] == messages[1]


@pytest.mark.slow
def test_a_validation_that_failed_is_repeated_while_its_weights_are_there(tmp_path: Path) -> None:
    """The last one: what scores it was away. No epoch is played again."""
    folder, away = project(tmp_path / "project", interval=2, reps=1), tmp_path / "project/away"
    (folder / "judge.py").write_text(
        "import os\nfrom digits_plugin import mean_digit\n\ndef judge(answer, question):\n"
        "    if question['say'].startswith('Held out') and os.path.exists('run/training_metrics.jsonl') and "
        "os.path.exists('away'):\n        raise ConnectionError('it is away')\n    return mean_digit(answer)\n"
    )
    config = yaml.safe_load((folder / "config.yml").read_text())
    config["eval"]["evaluators"]["score"] = {"_type": "python", "function": "judge.py:judge"}
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    options = ("-o", "finetuning.num_epochs", "2", "--resume")
    away.touch()
    code, _, err = run_project(folder, *options)
    assert (code, "1 validation(s) failed; the first, at epoch 2" in err) == (1, True), err
    metrics = (folder / "run/training_metrics.jsonl").read_bytes()
    away.unlink()
    run = whole_run(folder, *options)
    assert [(line["epoch"], "error" in line) for line in history_of(run)] == [(0, False), (2, False)]
    assert (run / "training_metrics.jsonl").read_bytes() == metrics


def test_an_interrupted_run_cancels_the_validation_beside_it(tmp_path: Path) -> None:
    folder = project(tmp_path / "project", held_out={"pause": 1e6})
    with start_project(folder, *BESIDE) as process:
        process.wait_until(lambda: (folder / "run/backend/checkpoints/step_000001/training.json").exists())
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
        assert process.wait() == 130
    assert "Traceback" not in err
    assert not (folder / "run/validation_history.json").exists()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [({"patience": 0}, "finetuning.validation.patience"), ({"beside": "sometimes"}, "finetuning.validation.beside")],
)
def test_settings_that_mean_nothing_are_refused(tmp_path: Path, settings: dict[str, Any], problem: str) -> None:
    code, _, err = run_project(project(tmp_path / "project", **settings))
    assert code == 2
    assert problem in err


PLUGIN = """
import dataclasses

from insitu.plugin_api import Trainer, TrainerConfig, register_trainer, register_trainer_adapter
from insitu.training.native.config import InsituAdapterConfig
from insitu.training.native.trainer_adapter import InsituTrainerAdapter


class NewestConfig(InsituAdapterConfig, name="newest_only"):
    pass


@register_trainer_adapter(config_type=NewestConfig)
class NewestOnly(InsituTrainerAdapter):
    async def policy_endpoint(self):
        return dataclasses.replace(await super().policy_endpoint(), names_versions=False)


class OwnConfig(TrainerConfig, name="own_loop"):
    pass


class OwnLoop(Trainer):
    async def run_epoch(self, epoch, run_id): ...
    async def run(self, num_epochs): ...
    async def get_metrics(self, run_id): ...
    async def cleanup(self): ...
    def log_progress(self, epoch, metrics, output_dir=None): ...


@register_trainer(config_type=OwnConfig)
async def own_loop(config, builder):
    yield OwnLoop(config)
"""


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            (*BESIDE, "-o", "trainer_adapters.backend._type", "newest_only"),
            "finetuning.validation.beside is true, but newest_only serves the newest weights only; allowed: false",
        ),
        (
            (*BESIDE, "-o", "trainers.grpo", "{_type: own_loop}"),
            "finetuning.validation.beside is true, but own_loop does not support it; allowed: false",
        ),
        (
            ("-o", "finetuning.validation.patience", "3", "-o", "trainers.grpo", "{_type: own_loop}"),
            "finetuning.validation.patience is 3, but own_loop does not support it; allowed: none",
        ),
    ],
)
def test_components_that_do_not_fit_are_refused(tmp_path: Path, options: tuple[str, ...], problem: str) -> None:
    folder = project(tmp_path / "project")
    (folder / "own_parts.py").write_text(PLUGIN)
    code, _, err = run_project(folder, "-o", "general.plugins", "[digits_plugin, own_parts]", *options)
    assert code == 2
    assert problem in err


def test_ties_and_failures_are_no_improvement() -> None:
    history = [{"epoch": epoch, "avg_reward": score} for epoch, score in enumerate([0.25, 0.5, 0.5, 0.25])]
    assert best_validation(history) == {"epoch": 1, "avg_reward": 0.5}
    assert validations_since_best(history) == 2
    assert validations_since_best([*history, {"epoch": 4, "error": "nothing could be scored"}]) == 2
    assert validations_since_best([]) == 0


def test_scores_by_other_evaluators_or_of_other_rows_are_not_compared() -> None:
    history = [{"epoch": epoch, "avg_reward": score} for epoch, score in enumerate([0.9, 0.8, 0.1, 0.2, 0.1])]
    for record in history[1:]:
        record["scored_by"] = "new" if record["epoch"] > 1 else "old"
    assert best_validation(history[:2]) == history[0], "of which it is unknown"
    history[0]["scored_by"] = "old"
    assert best_validation(history) == history[3]
    assert validations_since_best(history) == 1


def test_trackers_wait_for_the_validation_of_an_epoch(tmp_path: Path) -> None:
    files = TrackedFiles(tmp_path)
    (tmp_path / "training_metrics.jsonl").write_text('{"epoch": 1, "avg_reward": 0.5}\n')
    (tmp_path / "progress.json").write_text('{"epoch": 1, "due_validation": 1}')
    record = {"policy_version": 1, "num_examples": 1, "ci95": [None, None]}
    (tmp_path / "validation_history.json").write_text(json.dumps([record | {"epoch": 0, "avg_reward": 0.5}]))
    assert [step.epoch for step in files.steps(-1)] == [0]
    (tmp_path / "validation_history.json").write_text(json.dumps([record | {"epoch": 1, "avg_reward": 0.75}]))
    assert [(step.epoch, step.metrics["validation/score"]) for step in files.steps(0)] == [(1, 0.75)]

"""Whole runs by the command line: real processes, the real backend, a real model; and what goes wrong in them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from socket import gethostname
from statistics import fmean
from typing import Any

import psutil
import pytest
from factories import MODEL, digits_project, read_lines, write_rows
from marks import slow_after, slow_but
from processes import HANGS, Command, Process, forked_python, run_project, serving, start_project
from refusals import refusal

from insitu.runs.episodes import Selection
from insitu.runs.index_database import TrainingStatus
from insitu.runs.reader import RunReader
from insitu.runs.records import restore_calls
from insitu.runs.summary import read_summary


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a configuration, a plugin and six rows."""
    return digits_project(tmp_path, rows=6)


def without(record: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in record.items() if k not in names}


def test_a_run_trains_validates_records_and_can_be_repeated(project: Path) -> None:
    write_rows(project, [{"say": f"Held out {i}"} for i in range(5)], "validation.jsonl")
    options = ("--validation_dataset", "validation.jsonl", "--validation_interval", "1")
    code, out, err = run_project(project, *options)
    assert code == 0, err
    folder = project / "run"

    metrics = read_lines(folder / "training_metrics.jsonl")
    assert [m["epoch"] for m in metrics] == [1, 2]
    assert [(m["policy_version"], m["job"]) for m in metrics] == [(1, "completed"), (2, "completed")]
    for m in metrics:
        assert m["num_groups"] == 6
        assert m["num_trajectories"] == 24
        assert m["logprob_gap"] < 1e-3
        assert abs(m["ratio_mean"] - 1) < 1e-3
        assert m["tokens"] > 0
        assert m["min_reward"] <= m["avg_reward"] <= m["max_reward"]
        assert {"loss", "kl", "entropy", "grad_norm", "clip_fraction", "learning_rate"} <= m.keys()
        assert m["seconds"].keys() == {"collect", "train", "validate"}

    validations = json.loads((folder / "validation_history.json").read_text())
    assert [(v["epoch"], v["policy_version"]) for v in validations] == [(0, 0), (1, 1), (2, 2)]
    assert all(v["num_examples"] == 5 and v["dropped"] == {} for v in validations)
    _, *scores = read_lines(folder / "validation_scores.jsonl")
    assert [len(line["scoring"]) for line in scores] == [16] * 3
    assert len({line["scoring"] for line in scores}) == 1
    assert json.loads((folder / "best.json").read_text())["avg_reward"] == max(v["avg_reward"] for v in validations)
    assert [r["epoch"] for r in json.loads((folder / "reward_history.json").read_text())] == [1, 2]
    assert (folder / "reward_plot.png").read_bytes().startswith(b"\x89PNG")
    assert "before" in out
    assert "after" in out

    episodes = read_lines(folder / "episodes.jsonl.gz")
    assert episodes[0] == {"format": 2}
    assert len(episodes) == 1 + 2 * 24
    calls = read_lines(folder / "calls.jsonl.gz")[1:]
    assert len(calls) == 48
    assert all(len(c["token_ids"]) == len(c["logprobs"]) > 0 and c["functions"] for c in calls)
    assert {c["policy_version"] for c in calls} == {0, 1}
    assert len({(c["policy_version"], c["weights"]) for c in calls}) == len({c["weights"] for c in calls}) == 2

    code, out, err = run_project(project, *options)
    assert code == 0, err
    assert "run.1" in out  # the earlier run is moved, never overwritten
    again = read_lines(project / "run/training_metrics.jsonl")
    changing = ("run_id", "timestamp", "seconds")
    first = read_lines(project / "run.1/training_metrics.jsonl")
    assert [without(m, *changing) for m in first] == [without(m, *changing) for m in again]
    assert first[0]["run_id"] != again[0]["run_id"]


@pytest.mark.slow
def test_an_agent_may_change_the_working_directory(tmp_path: Path) -> None:
    """The paths are those of the directory in which the command began, some beside the file and some not."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "elsewhere").mkdir()
    digits_project(tmp_path / "configs")
    rows = [{"say": f"Row {i}", "chdir": str(tmp_path / "elsewhere")} for i in range(4)]
    for name in ("rows.jsonl", "validation.jsonl"):
        write_rows(tmp_path, rows, name)
    held_out = ("--validation_dataset", "validation.jsonl", "--validation_config_file", "configs/config.yml")
    options = (*held_out, "--validation_interval", "1", "-o", "eval.general.output_dir", "out")
    code, out, err = run_project(tmp_path, *options, file="configs/config.yml")
    assert code == 0, err
    assert (
        "files: run/  (validation_history.json, training_metrics.jsonl, reward_plot.png, episodes.jsonl.gz ...)" in out
    )
    code, _, err = run_project(
        tmp_path, *options, "--resume", "-o", "finetuning.num_epochs", "3", file="configs/config.yml"
    )
    assert code == 0, err
    assert [m["policy_version"] for m in read_lines(tmp_path / "run/training_metrics.jsonl")] == [1, 2, 3]
    code, out, err = run_project(tmp_path, *options[-3:], command="eval", file="configs/config.yml")
    assert code == 0, err
    assert "out/workflow_output.json" in out
    assert len(json.loads((tmp_path / "out/workflow_output.json").read_text())) == 4
    assert not [*(tmp_path / "elsewhere").iterdir()]


@pytest.mark.slow
def test_a_run_of_an_earlier_release_continues_and_is_shown(project: Path) -> None:
    """Which has fewer settings, and fewer fields of calls."""
    code, _, err = run_project(project, "-o", "finetuning.num_epochs", "1")
    assert code == 0, err
    settings = json.loads((project / "run/run.json").read_text())
    del settings["config"]["finetuning"]["redact"]
    del settings["config"]["trainer_adapters"]["backend"]["training"]["kl"]["in_reward"]
    (project / "run/run.json").write_text(json.dumps(settings))
    code, out, err = run_project(project, "--resume")
    assert code == 0, err
    assert out.count("changed since") == 1  # num_epochs
    lines = read_lines(project / "run/calls.jsonl.gz")[1:]
    fewer = [{key: line[key] for key in line.keys() - {"logprobs_temperature", "weights"}} for line in lines[:1]]
    [call] = restore_calls(fewer)
    assert (call.logprobs_temperature, call.weights, call.logprobs) == (None, None, lines[0]["logprobs"])


@pytest.mark.slow
def test_code_may_change_the_working_directory_when_it_is_imported(tmp_path: Path) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    project.mkdir()
    elsewhere.mkdir()
    digits_project(project, rows=4)
    plugin = project / "digits_plugin.py"
    plugin.write_text(f"{plugin.read_text()}\nimport os\n\nos.chdir({str(elsewhere)!r})\n")
    for epochs, resume in ((1, []), (2, ["--resume"])):
        code, _, err = run_project(project, "-o", "finetuning.num_epochs", epochs, *resume)
        assert code == 0, err
        metrics = read_lines(project / "run/training_metrics.jsonl")
        assert [m["policy_version"] for m in metrics] == [*range(1, epochs + 1)]
    assert not [*elsewhere.iterdir()]


def test_a_second_run_in_the_directory_of_a_living_one_is_refused(project: Path) -> None:
    """And the directory of one that was killed can be used again, once its backend has ended."""
    one_epoch = ("-o", "finetuning.num_epochs", "1")
    write_rows(project, [{"say": "a", "hang": True, "mark": "playing"}])
    with start_project(project) as first:
        first.wait_until((project / "playing").exists)
        code, out, err = run_project(project, *one_epoch)
        assert (code, out) == (2, "")
        used = f"error: finetuning.output_dir: {project / 'run'} is in use by process {first.pid} on {gethostname()} "
        assert err.startswith(used)
        assert first.poll() is None
        first.kill()
        first.wait()
        write_rows(project, [{"say": "a"}, {"say": "b"}])
        code, out, err = run_project(project, *one_epoch)
        assert code == 0, err
    assert [p.name for p in (project / "run/backend/checkpoints").iterdir()] == ["step_000001"]
    assert [p.name for p in (project / "run").rglob(".*")] == []


@pytest.mark.slow
def test_training_continues_from_a_run_in_its_own_directory(project: Path) -> None:
    """The file names a checkpoint of the run that is moved aside for it; and a moved run keeps its own best weights."""
    write_rows(project, [{"say": f"Held out {i}"} for i in range(3)], "validation.jsonl")
    validation = ("--validation_dataset", "validation.jsonl")
    code, _, err = run_project(project, *validation)
    assert code == 0, err
    first = (project / "run/backend/checkpoints/step_000002/model.safetensors").read_bytes()
    newest = ("-o", "trainer_adapters.backend.model", "run/backend/checkpoints/step_000002")
    code, out, err = run_project(project, *validation, *newest, "-o", "finetuning.num_epochs", "1")
    assert code == 0, err
    assert "moved the earlier run in run to run.1\n" in out
    before, after = project / "run.1/backend/checkpoints", project / "run/backend/checkpoints"
    assert (before / "step_000002/model.safetensors").read_bytes() == first
    assert [p.name for p in after.iterdir()] == ["step_000003"]
    assert json.loads((after / "step_000003/training.json").read_text())["step"] == 3
    for run in (project / "run", project / "run.1"):
        best = json.loads((run / "best.json").read_text())["checkpoint"]
        assert best is None or (run / best / "model.safetensors").exists()
        assert best is None or best.startswith("backend/checkpoints/step_")
    options = ("--checkpoint", "latest", "-o", "eval.general.output_dir", "results")
    code, _, err = run_project(project, *options, command="eval")
    assert code == 0, err
    assert err == "checkpoint: run/backend/checkpoints/step_000003 (the latest of run)\n"


@pytest.mark.slow
def test_groups_that_teach_nothing_are_those_without_advantages(tmp_path: Path) -> None:
    """All episodes have the same reward, and those with several steps other returns."""
    digits_project(tmp_path, workflow={"_type": "converse"})
    write_rows(tmp_path, [{"say": f"Row {i}", "score": "0.5"} for i in range(4)])
    code, out, err = run_project(tmp_path, *ONE_EPOCH, "-o", "trainers.grpo.credit", "step")
    assert code == 0, err
    (metrics,) = read_lines(tmp_path / "run/training_metrics.jsonl")
    assert (metrics["reward_std"], metrics["filtered_groups"], metrics["frac_reward_zero_std"]) == (0, 4, 0)
    assert "variance in 100 % of groups" in out


ONE_EPOCH = ("-o", "finetuning.num_epochs", "1")


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [("temperature", 0, "above 0"), ("top_p", 0.9, "1"), ("repetition_penalty", 1.5, "1"), ("min_p", 0.5, "0")],
)
def test_sampling_that_no_loss_models_is_refused_before_the_first_epoch(
    project: Path, key: str, value: Any, allowed: str
) -> None:
    refused = refusal(project, "-o", f"llms.player.{key}", value)
    assert f"llms.player.{key} is {value}, but player is trained on what it samples" in refused
    assert f"allowed: {allowed} (" in refused


@pytest.mark.slow
def test_an_agent_that_is_greedy_is_told_why_nothing_differs(project: Path) -> None:
    write_rows(project, [{"say": f"Row {i}", "sampling": {"temperature": 0}} for i in range(6)])
    code, out, err = run_project(project, *ONE_EPOCH)
    assert code == 1
    assert "GREEDY: 6 of 6 groups at temperature 0" in out
    for text in (out, err):
        assert "all 6 groups sampled at temperature 0, so that all episodes of a row are the same" in text


@pytest.mark.slow
def test_nothing_to_train_on_fails_the_run_and_says_why(project: Path) -> None:
    write_rows(project, [{"say": "a", "score": "nan"}])
    code, out, err = run_project(project)
    assert code == 1
    assert "failed: epoch 1: no episode can be trained on; dropped: 4 nan_score; most often nan_score: " in err
    assert "epoch 1/2 did not complete; results so far are in run/" in out
    write_rows(project, [{"say": "a", "score": "0.5"}])
    code, out, err = run_project(project)
    assert code == 1
    assert out.count("nothing to train on; every group was dropped") == 2
    assert "no epoch trained anything: every group was dropped: 8 no_variance" in err
    assert "run/training_metrics.jsonl" in err
    assert [m["dropped"] for m in read_lines(project / "run/training_metrics.jsonl")] == [{"no_variance": 4}] * 2


@pytest.mark.slow
def test_an_evaluator_that_hangs_costs_its_episodes(project: Path) -> None:
    write_rows(project, [{"say": "a", "score": "hang"}, {"say": "b"}])  # row 1 is rehearsed
    code, _, err = run_project(project, "-o", "finetuning.num_epochs", "1", "-o", "eval.general.evaluator_timeout", "5")
    assert code == 0, err
    assert read_lines(project / "run/training_metrics.jsonl")[0]["dropped"]["evaluator_error"] == 4
    message = "evaluator score took longer than eval.general.evaluator_timeout allows: 5 s"
    assert [e["error"] for e in read_lines(project / "run/episodes.jsonl.gz")[1:] if e["row_id"] == "0"] == [
        message
    ] * 4


def test_a_dead_backend_is_named(project: Path) -> None:
    digits_project(project, url="http://127.0.0.1:9")
    code, _, err = run_project(project)
    assert code == 1
    assert "http://127.0.0.1:9" in err


def test_what_can_be_no_backend_is_refused_before_the_earlier_run_is_moved(project: Path) -> None:
    (project / "run").mkdir()
    (project / "run/run.json").write_text("{}")
    for backend, message in (
        ({"url": "127.0.0.1:9"}, "url is '127.0.0.1:9'; it must begin with http://"),
        ({"model": "./no/such/model"}, "the trainer adapter's model: 'no/such/model' does not exist"),
        ({"model": str(MODEL), "dtype": "float99"}, "dtype"),
    ):
        digits_project(project, **backend)
        assert message in refusal(project)
    code, _, err = run_project(project)
    assert code == 2
    assert "dtype" in err
    assert (project / "run/run.json").exists()


def test_what_cannot_be_trained_is_refused_before_the_earlier_run_is_moved(project: Path) -> None:
    (project / "run").mkdir()
    (project / "run/run.json").write_text("{}")
    held_out = (project / "config.yml").read_text().replace("score:", "other:").replace("name: score", "name: other")
    (project / "held_out.yml").write_text(held_out)
    for arguments, message in (
        (["-o", "llms.player.seed", "3"], "llms.player.seed: with a fixed seed"),
        (["-o", "finetuning.reward_function", "null"], "finetuning.reward_function is missing"),
        (
            ["-o", "trajectory_builders.episodes.num_generations", "1"],
            "trajectory_builders.episodes.num_generations is 1, but insitu_trainer compares the episodes of a row with "
            "one another; allowed: 2 or more",
        ),
    ):
        assert message in refusal(project, *arguments)
    code, out, err = run_project(
        project, "--validation_dataset", "rows.jsonl", "--validation_config_file", "held_out.yml"
    )
    assert (code, out) == (2, "")
    assert "held_out.yml: the evaluator that gives the reward, 'score' does not exist; available: other" in err
    assert (project / "run/run.json").exists()


def test_settings_of_two_components_are_refused_together(project: Path) -> None:
    digits_project(project, model="./no/such/model")
    refused = refusal(project, "-o", "trajectory_builders.episodes.num_generations", "1")
    assert "trajectory_builders.episodes.num_generations is 1, but insitu_trainer compares" in refused
    assert "the trainer adapter's model: 'no/such/model' does not exist" in refused


def test_a_job_that_fails_ends_the_run_and_is_told_with_its_epoch_and_reason(project: Path) -> None:
    code, out, err = run_project(project, "-o", "trainer_adapters.backend.training.learning_rate", "1e30")
    assert code == 1
    assert re.search(
        r"^failed: epoch 1: training job job-\w+ ended as failed: .*the weights from before the job were restored",
        err,
        re.MULTILINE,
    ), err
    assert "epoch 1/2 did not complete; results so far are in run/" in out
    (metrics,) = read_lines(project / "run/training_metrics.jsonl")  # what was gathered is recorded all the same
    assert (metrics["num_groups"], metrics["policy_version"], metrics["job"]) == (6, 0, "failed")
    assert (project / "run/reward_plot.png").read_bytes().startswith(b"\x89PNG")
    assert {row["status"] for row in Selection(project / "run").find()} <= {
        TrainingStatus.JOB_FAILED,
        TrainingStatus.DROPPED,
    }


def test_a_model_that_cannot_be_loaded_is_named_in_one_sentence(project: Path) -> None:
    empty = project / "empty"
    empty.mkdir()
    digits_project(project, model="empty")
    code, _, err = run_project(project)
    assert (code, err) == (
        1,
        f"failed: insitu backend ended with exit code 1 before it was ready: {empty} holds neither config.json nor "
        f"adapter_config.json, but nothing (log: {project}/run/backend/backend.log)\n",
    )


@pytest.mark.slow
def test_an_evaluation_names_its_rows(project: Path) -> None:
    write_rows(project, [{"say": f"Held out {i}"} for i in range(3)], "validation.jsonl")
    for options, title in (
        (["--reps", 2], "rows.jsonl, 6 rows "),
        (["--dataset", "validation.jsonl"], "validation.jsonl, 3 rows "),
    ):
        code, out, err = run_project(project, *options, command="eval")
        assert code == 0, err
        assert out.startswith(title)


def test_a_reward_of_which_less_is_better_is_the_negated_score_everywhere(project: Path) -> None:
    write_rows(project, [{"say": f"Held out {i}"} for i in range(4)], "validation.jsonl")
    less = ("-o", "finetuning.reward_function.name", "-score")
    code, _, err = run_project(project, "--validation_dataset", "validation.jsonl", "--validation_interval", 1, *less)
    assert code == 0, err
    run = RunReader(project / "run")
    episodes = read_lines(project / "run/episodes.jsonl.gz")[1:]
    assert any(e["reward"] for e in episodes)
    assert all(e["reward"] == -e["scores"]["score"] for e in episodes)
    validations, scores = run.validations(), run.scores()
    assert all(record["max_reward"] <= 0 for record in validations)
    assert min(record["min_reward"] for record in validations) < 0
    assert all(-1 <= record["ci95"][0] < record["ci95"][1] <= 0 for record in validations)  # Wilson's, mirrored
    means = [fmean(each.means().values()) for each in scores]
    assert [record["avg_reward"] for record in validations] == pytest.approx(means)
    assert {each.evaluator for each in scores} == {"-score"}  # what `promote` compares has one direction
    best = run.object("best.json")
    assert best is not None
    assert best["avg_reward"] == max(means)
    assert read_summary(project / "run").best_score == max(means)
    refused = refusal(project, *less, "-o", "eval.evaluators.-score._type", "digits")
    assert "eval.evaluators: '-score' begins with -" in refused


def test_a_failed_validation_fails_the_run_and_is_no_reward(project: Path) -> None:
    write_rows(project, [{"say": "a", "score": "nan"}], "validation.jsonl")
    code, _, err = run_project(project, "--validation_dataset", "validation.jsonl", "-o", "finetuning.num_epochs", "1")
    assert code == 1
    assert "validation" in err
    records = json.loads((project / "run/validation_history.json").read_text())
    assert all("error" in r and "avg_reward" not in r for r in records)
    assert [r["epoch"] for r in records] == [0, 1]  # before the first step and after the last, whatever the interval
    assert "failed: 2 validation(s) failed; the first, at epoch 0: no example could be scored: 1 nan_score; row 0: the "
    assert "score is nan; allowed: from -1e+30 to 1e+30\n" in err


def backend_of(process: Process) -> psutil.Process:
    """The backend process a run has started, once it is there."""
    process.wait_until(psutil.Process(process.pid).children)
    return psutil.Process(process.pid).children()[0]


@pytest.mark.parametrize(
    ("number", "code"),
    slow_but(
        [(signal.SIGKILL, -signal.SIGKILL)],
        [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)],
    ),
)
def test_the_backend_never_outlives_its_run(project: Path, number: signal.Signals, code: int) -> None:
    metrics = project / "run/training_metrics.jsonl"
    with start_project(project, "-o", "finetuning.num_epochs", "500") as process:
        backend = backend_of(process)
        process.wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 1)
        process.send_signal(number)
        process.communicate(HANGS)
        assert process.wait() == code
    backend.wait(HANGS)
    selection = Selection(project / "run")  # what has been cut off anywhere is read
    statuses = Counter(selection.read(row).status for row in selection.find())
    assert statuses.keys() <= {TrainingStatus.TRAINED, TrainingStatus.DROPPED, TrainingStatus.PENDING}
    assert statuses[TrainingStatus.TRAINED] >= 4


def test_a_run_that_was_killed_as_its_backend_began_is_started_with_another_model(project: Path) -> None:
    """At once, while the backend of the first one, which writes to the same log, is still starting."""
    other = shutil.copytree(MODEL, project / "other")
    with start_project(project) as process:
        process.wait_until((project / "run/backend/backend.log").exists)
        process.send_signal(signal.SIGKILL)
        process.communicate(HANGS)
    options = ("-o", "trainer_adapters.backend.model", str(other), "-o", "finetuning.num_epochs", "1", "--resume")
    code, _, err = run_project(project, *options)
    assert code == 0, err
    assert json.loads((project / "run/run.json").read_text())["starting_model"]["file"] == str(other)


def test_a_run_goes_on_when_nobody_reads_its_output(project: Path) -> None:
    write_rows(project, [{"say": f"Row {i}", "mark": "asked"} for i in range(6)])
    with start_project(project) as process:
        process.wait_until((project / "asked").exists)
        process.stdout.close()
        process.stdout = open(os.devnull)  # noqa: SIM115 (closed with the process)
        _, err = process.communicate(HANGS)
        assert (process.wait(), err) == (0, "")
    assert len(read_lines(project / "run/training_metrics.jsonl")) == 2


@pytest.mark.slow
def test_a_run_goes_on_without_standard_output(project: Path) -> None:
    code = f"import sys; sys.executable = {forked_python()!r}; from insitu.cli import main; main()"  # a forked backend
    options = "finetune --config_file config.yml -o finetuning.num_epochs 1"
    command = f'{sys.executable} -c "$0" {options} >&-'
    done = subprocess.run(["sh", "-c", command, code], cwd=project, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(read_lines(project / "run/training_metrics.jsonl")) == 1


@pytest.mark.parametrize(
    "file", slow_after(1, ["rows.jsonl", "validation.jsonl"]), ids=["first row", "first validation"]
)
def test_a_run_that_is_ended_before_its_first_epoch_was_interrupted(project: Path, file: str) -> None:
    write_rows(project, [{"say": "a"}], "validation.jsonl")
    write_rows(project, [{"say": "a", "hang": True, "mark": "asked"}], file)
    with start_project(project, "--validation_dataset", "validation.jsonl") as process:
        process.wait_until((project / "asked").exists)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(HANGS)
        assert (process.wait(), err.strip()) == (130, "interrupted")
    assert json.loads((project / "run/progress.json").read_text())["status"] == "interrupted"


@pytest.mark.parametrize("nohup", slow_after(1, [False, True]), ids=["", "under nohup"])
def test_a_run_whose_terminal_is_closed_ends_unless_it_is_under_nohup(project: Path, nohup: bool) -> None:
    write_rows(project, [{"say": "a", "mark": "asked"}] * 2)
    nothing = [os.open(os.devnull, os.O_RDWR)]
    code = f"import signal; signal.signal(signal.SIGHUP, signal.{'SIG_IGN' if nohup else 'SIG_DFL'}); "
    code += "import sys; sys.argv = ['insitu', *sys.argv[1:]]; "
    code += f"sys.executable = {forked_python()!r}; from insitu.cli import main; main()"
    epochs = ("-o", "finetuning.num_epochs", "2" if nohup else "500")
    arguments = ["-c", code, "finetune", "--config_file", "config.yml", *epochs]
    command = Command(arguments, str(project), dict(os.environ), nothing * 3)
    os.close(*nothing)
    command.wait_until((project / "asked").exists)
    command.send_signal(signal.SIGHUP)
    assert command.wait(HANGS) == (0 if nohup else 130)
    command.close()
    status = json.loads((project / "run/progress.json").read_text())["status"]
    assert status == ("completed" if nohup else "interrupted")


def test_a_second_interrupt_ends_a_run_whose_workflow_blocks_the_event_loop(project: Path) -> None:
    write_rows(project, [{"say": "a", "block": True, "mark": "blocked"}])
    with start_project(project) as process:
        backend = backend_of(process)
        process.wait_until((project / "blocked").exists)
        for _ in range(2):
            time.sleep(1)  # it blocks, and two signals sent together would be one
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(HANGS)
        assert (process.wait(), err) == (130, "interrupted\n")
    backend.wait(HANGS)


@pytest.mark.slow
def test_an_epoch_that_trained_is_recorded_even_if_its_validation_is_interrupted(project: Path) -> None:
    write_rows(project, [{"say": "a", "mark": "validated"}], "validation.jsonl")
    validation = "{dataset: validation.jsonl, reps: 150}"
    validated = project / "validated"
    overrides = ("-o", "finetuning.num_epochs", "1", "-o", "finetuning.validation", validation)
    with start_project(project, *overrides) as process:
        process.wait_until(lambda: validated.exists() and validated.stat().st_size > 150)  # 150 before training
        process.send_signal(signal.SIGINT)
        process.communicate(HANGS)
        assert process.wait() == 130
    assert [m["policy_version"] for m in read_lines(project / "run/training_metrics.jsonl")] == [1]
    assert [v["epoch"] for v in json.loads((project / "run/validation_history.json").read_text())] == [0]


NO_RESTART = ("-o", "trainer_adapters.backend.max_restarts", "0")


def test_a_backend_that_is_killed_is_started_again(project: Path) -> None:
    """The results are those of a backend that was never killed."""
    write_rows(project, [{"say": f"Row {i}", "mark": "asked"} for i in range(4)])
    asked, metrics = project / "asked", project / "run/training_metrics.jsonl"
    code, _, err = run_project(project)
    assert code == 0, err
    asked.unlink()
    with start_project(project, "-o", "eval.general.max_concurrency", "2") as process:
        process.wait_until(lambda: asked.exists() and asked.stat().st_size > 3)
        backend_of(process).kill()
        process.wait_until(lambda: process.errors.count("starting it again") == 1)
        process.wait_until(metrics.exists)
        backend_of(process).kill()
        out, err = process.communicate(HANGS)
        assert process.wait() == 0, out + err
    log = project / "run/backend/backend.log"
    assert f"the backend process was ended by SIGKILL; the end of its log ({log})" in err
    assert "starting it again (2 of 3)" in err
    changing = ("run_id", "timestamp", "seconds")
    first, again = (read_lines(project / f"{run}/training_metrics.jsonl") for run in ("run.1", "run"))
    assert [without(m, *changing) for m in again] == [without(m, *changing) for m in first]


@pytest.mark.slow
def test_a_backend_killed_in_a_run_ends_it_with_its_name(project: Path) -> None:
    write_rows(project, [{"say": f"Row {i}", "mark": "asked"} for i in range(6)])
    asked = project / "asked"
    with start_project(project, "-o", "finetuning.num_epochs", "500", *NO_RESTART) as process:
        backend = backend_of(process)
        process.wait_until(lambda: asked.exists() and asked.stat().st_size > 26)  # in the second epoch
        backend.kill()
        out, err = process.communicate(HANGS)
        assert process.wait() == 1
    assert "backend" in err
    assert "/500 did not complete; results so far are in run/" in out


@pytest.mark.parametrize("command", slow_after(1, ["finetune", "eval"]))
def test_a_backend_killed_while_episodes_run_ends_the_command_with_its_exit_code_and_log(
    project: Path, command: str
) -> None:
    write_rows(project, [{"say": "a", "hang": True, "mark": "asked"}, {"say": "b"}])  # row 1 is rehearsed
    options = ("-o", "eval.general.episode_timeout", "null", *NO_RESTART)
    with start_project(project, *options, command=command) as process:
        backend = backend_of(process)
        process.wait_until((project / "asked").exists)
        backend.kill()
        out, err = process.communicate(HANGS)
        assert process.wait() == 1
    lost = "the backend process was ended by SIGKILL; the end of its log ("
    assert f"failed: {lost}" in err
    if command == "finetune":
        progress = json.loads((project / "run/progress.json").read_text())
        event = read_lines(project / "run/events.jsonl")[-1]
        assert (progress["status"], event["event"]) == ("failed", "failed")
        assert progress["error"] == event["error"]
        assert progress["error"].startswith(f"BackendUnavailable: {lost}")
    assert ("run/backend/" in err) is (command == "finetune")
    assert ("epoch 1/2 did not complete; results so far are in run/" in out) is (command == "finetune")


@pytest.mark.slow
def test_an_outage_of_the_backend_costs_no_episode(project: Path) -> None:
    """The agents' clients do not retry; the run waits for the backend and runs the failed episodes again."""
    write_rows(project, [{"say": f"Row {i}", "mark": "asked"} for i in range(6)])
    asked, backend = project / "asked", ("backend", "--model", MODEL, "--port")
    with serving(*backend, 0) as (first, address):
        digits_project(project, url=address)
        options = ("-o", "eval.general.max_concurrency", "2", "-o", "finetuning.num_epochs", "1")
        with start_project(project, *options) as process:
            process.wait_until(lambda: asked.exists() and asked.stat().st_size > 2)  # one is the rehearsed row
            first.kill()
            first.wait()
            process.wait_until(lambda: "; retrying for up to 600 s" in process.errors)
            with serving(*backend, address.rpartition(":")[2]):
                out, err = process.communicate(HANGS)
                assert process.wait() == 0, out + err
    episodes = read_lines(project / "run/episodes.jsonl.gz")[1:]
    assert [(e["outcome"], e["error"]) for e in episodes] == [("ok", None)] * 24
    again = [e for e in episodes if e["attempt"] > 0]
    assert again
    assert all(e["failed_requests"] for e in again), "what the attempt during the outage counted is not lost"


def test_a_backend_that_is_stopped_is_reported_waited_for_and_given_up(project: Path) -> None:
    write_rows(project, [{"say": "a", "hang": True, "mark": "asked"}])
    with serving("backend", "--model", MODEL, "--port", 0) as (backend, address):
        digits_project(project, url=address, read_timeout=0.5, retry_timeout=2)
        with start_project(project, "-o", "eval.general.episode_timeout", "null") as process:
            process.wait_until((project / "asked").exists)
            backend.send_signal(signal.SIGSTOP)
            _, err = process.communicate(HANGS)
            backend.send_signal(signal.SIGCONT)
            assert process.wait() == 1
    waiting, failed = err.splitlines()
    silent = r"no answer from the backend at http://127.0.0.1:\d+: no data for 0.5 s \(read_timeout\)"
    assert re.fullmatch(rf"GET /health: {silent}; retrying for up to 2 s", waiting)
    assert re.fullmatch(rf"failed: GET /health: {silent}; gave up after \d+ s \(retry_timeout\)", failed)


LIMITED = """if True:
    import resource, sys
    from insitu.cli import main
    resource.setrlimit(resource.RLIMIT_NOFILE, tuple(map(int, sys.argv[1:3])))
    sys.executable = sys.argv[3]  # the backend is forked, too
    sys.argv[1:4] = []
    main()"""


@pytest.mark.slow
def test_a_low_limit_of_open_files_is_raised(project: Path) -> None:
    arguments = ("finetune", "--config_file", "config.yml", "-o", "eval.general.max_concurrency", "30")
    program = (forked_python(), "-c", LIMITED, "64", "4096", forked_python(), *arguments)
    done = subprocess.run(program, cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_eval_and_run_serve_the_starting_model(project: Path) -> None:
    code, out, err = run_project(project, "--reps", "2", "-o", "eval.general.output_dir", "results", command="eval")
    assert code == 0, err
    assert "95 % CI" in out
    items = json.loads((project / "results/workflow_output.json").read_text())
    assert [(i["id"], i["rep"]) for i in items] == [(i, rep) for i in range(6) for rep in range(2)]
    code, out, err = run_project(project, "--input", '{"say": "hello"}', command="run")
    assert code == 0, err
    assert "|" in out

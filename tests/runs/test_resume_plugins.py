"""Runs with the components of plugins that continue, or say why they cannot."""

import json
import os
import shutil
from pathlib import Path

import pytest
from factories import MODEL, digits_project, read_lines
from marks import slow_but_at
from processes import HANGS, run, run_project, serving, start_project
from tiny_backend import Served

PLUGIN = '''
import asyncio
from pathlib import Path

from insitu.plugin_api import Trainer, TrainerConfig, TrajectoryBuilderConfig
from insitu.plugin_api import register_trainer, register_trajectory_builder
from insitu.training.trainers import InsituTrainer, InsituTrainerConfig
from insitu.training.episodes_builder import EpisodesBuilder, EpisodesBuilderConfig


class QuietConfig(EpisodesBuilderConfig, name="quiet"):
    pass


class Quiet(EpisodesBuilder):
    """Reports no episodes; collects the second epoch when the file `go` is there."""

    async def start_run(self, run_id, meta=None):
        self.epoch = meta["epoch"]
        await super().start_run(run_id, {"epoch": self.epoch})

    async def finalize(self, run_id, meta=None):
        while self.epoch == 2 and not Path("go").exists():
            await asyncio.sleep(0.02)
        return await super().finalize(run_id, meta)


@register_trajectory_builder(config_type=QuietConfig)
async def quiet(config, builder):
    async with Quiet(config, builder) as made:
        yield made


class PassingConfig(EpisodesBuilderConfig, name="passing"):
    pass


class Passing(EpisodesBuilder):
    """Adds nothing to the documented methods."""

    async def start_run(self, run_id, meta=None):
        await super().start_run(run_id, meta)

    async def finalize(self, run_id, meta=None):
        return await super().finalize(run_id, meta)


@register_trajectory_builder(config_type=PassingConfig)
async def passing(config, builder):
    async with Passing(config, builder) as made:
        yield made


class Scratch(Trainer):
    """Made without the built-in trainer."""

    async def initialize(self, run_config):
        Path("initializing").touch()
        await super().initialize(run_config)

    async def run_epoch(self, epoch, run_id):
        return None

    async def run(self, num_epochs):
        return []

    async def get_metrics(self, run_id):
        return {}

    async def cleanup(self):
        pass

    def log_progress(self, epoch, metrics, output_dir=None):
        pass


class OwnRun(InsituTrainer):
    async def run(self, num_epochs):
        return [await super().run(num_epochs)]


class OwnResume(InsituTrainer):
    async def run(self, num_epochs):
        return await super().run(num_epochs)

    async def resume(self, num_epochs):
        return await super().resume(num_epochs)


class OwnEpoch(InsituTrainer):
    async def run_epoch(self, epoch, run_id):
        return await super().run_epoch(epoch, run_id)


def register(made):
    class Config(InsituTrainerConfig, name=made.__name__.lower()):
        pass

    @register_trainer(config_type=Config)
    async def build(config, builder):
        yield made(config)


for each in (Scratch, OwnRun, OwnResume, OwnEpoch):
    register(each)
'''
OPTIONS = ("-o", "general.plugins", "[digits_plugin, quiet_plugin]")
QUIET = (*OPTIONS, "-o", "trajectory_builders.episodes._type", "quiet")


def new_project(folder: Path, **adapter: str) -> None:
    digits_project(folder, **adapter, rows=4)
    (folder / "quiet_plugin.py").write_text(PLUGIN)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a run of one epoch; its episodes were not reported."""
    folder = tmp_path_factory.mktemp("trained")
    new_project(folder)
    code, _, err = run_project(folder, *QUIET, "-o", "finetuning.num_epochs", "1")
    assert code == 0, err
    return folder


@pytest.fixture
def project(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path, dirs_exist_ok=True)


def killed_after_its_job(run_dir: Path) -> None:
    """Leaves the files of the run as they are when its job has trained and its epoch is not recorded yet."""
    progress = json.loads((run_dir / "progress.json").read_text())
    assert progress["submitted_epoch"] == progress["epoch"] == 1
    before = next(state for state in read_lines(run_dir / "progress_history.jsonl")[1:] if state["epoch"] == 0)
    earlier = {key: before[key] for key in ("epoch", "policy_version", "curriculum", "sizes")}
    (run_dir / "progress.json").write_text(json.dumps(progress | earlier | {"status": "running"}))


@pytest.mark.slow
def test_a_run_whose_episodes_are_not_reported_continues_while_it_collects(project: Path) -> None:
    with start_project(project, *QUIET, "--resume") as process:
        process.wait_until(lambda: "resumed" in (project / "run/events.jsonl").read_text())
        process.kill()
        process.wait()
    (project / "go").touch()
    code, out, err = run_project(project, *QUIET, "--resume")
    assert code == 0, err
    assert "continues after epoch 1" in out
    assert [m["policy_version"] for m in read_lines(project / "run/training_metrics.jsonl")] == [1, 2]


def test_after_its_job_it_is_refused_and_can_be_forked(project: Path) -> None:
    killed_after_its_job(project / "run")
    code, _, err = run_project(project, *QUIET, "--resume")
    assert code == 1
    assert err == (
        "failed: --resume: the job of epoch 1 of run was submitted, but its episodes were not recorded, as the "
        "trajectory builder does not report them: the run cannot continue with them; `insitu runs fork --epoch 0` "
        "makes a run that repeats the epoch\n"
    )
    assert run("runs", "fork", "run", "again", "--epoch", 0, folder=project).returncode == 0
    code, _, err = run_project(project, *QUIET, "-o", "finetuning.num_epochs", "1", "--resume", "again")
    assert code == 0, err
    assert [m["policy_version"] for m in read_lines(project / "again/training_metrics.jsonl")] == [1]


def test_a_job_that_ended_with_the_process_is_submitted_again(project: Path) -> None:
    killed_after_its_job(project / "run")
    shutil.rmtree(project / "run/backend/checkpoints")
    shutil.rmtree(project / "run/backend/jobs")
    code, _, err = run_project(project, *QUIET, "-o", "finetuning.num_epochs", "1", "--resume")
    assert code == 0, err
    assert [m["policy_version"] for m in read_lines(project / "run/training_metrics.jsonl")] == [1]


@pytest.mark.slow
def test_on_a_remote_backend_the_job_may_still_be_running(served: Served, tmp_path: Path) -> None:
    new_project(tmp_path, url=served.address, api_key=served.token)
    options = (*QUIET, "-o", "finetuning.num_epochs", "1")
    code, _, err = run_project(tmp_path, *options)
    assert code == 0, err
    killed_after_its_job(tmp_path / "run")
    done = run("runs", "fork", "run", "again", "--epoch", 0, folder=tmp_path)
    problem = "the backend of run was not started by the run and keeps the checkpoints elsewhere: such a run"
    assert (done.returncode, done.stderr) == (2, f"error: RUN_DIR: {problem} cannot be forked\n")
    code, _, err = run_project(tmp_path, *options, "--resume")
    assert code == 1
    assert err.endswith("does not report them: the run cannot continue with them\n")


@pytest.mark.parametrize(
    ("trainer", "continues"),
    slow_but_at({1, 2}, [("Scratch", False), ("OwnRun", False), ("OwnResume", True), ("OwnEpoch", True)]),
)
def test_a_trainer_with_its_own_run_has_to_say_that_it_continues(project: Path, trainer: str, continues: bool) -> None:
    (project / "go").touch()
    before = os.listdir(project)
    options = (*QUIET, "-o", "finetuning.num_epochs", "2", "-o", "trainers.grpo._type", trainer.lower(), "--force")
    code, out, err = run_project(project, *options, "--resume")
    if continues:
        assert code == 0, err
        assert "continues after epoch 1" in out
    else:
        assert (code, err) == (2, f"error: --resume: trainers.grpo ({trainer}) cannot continue a run\n")
        assert os.listdir(project) == before


@pytest.mark.slow
def test_a_builder_that_passes_meta_on_records_its_episodes(tmp_path: Path) -> None:
    new_project(tmp_path)
    passing = (*OPTIONS, "-o", "trajectory_builders.episodes._type", "passing", "-o", "finetuning.num_epochs", "1")
    code, _, err = run_project(tmp_path, *passing)
    assert code == 0, err
    (epoch,) = read_lines(tmp_path / "run/training_metrics.jsonl")
    groups = read_lines(tmp_path / "run/groups.jsonl")[1:]
    assert sum(group["num_episodes"] for group in groups) == epoch["num_trajectories"]
    advantages = {line["episode"] for line in read_lines(tmp_path / "run/advantages.jsonl")[1:]}
    assert advantages == {name for group in groups for name in group["episodes"]}


@pytest.mark.slow
def test_a_trainer_that_is_run_again_waits_for_the_backend_of_a_killed_run(project: Path) -> None:
    folder = project / "run/backend"
    with serving("backend", "--model", MODEL, "--port", 0, "--output_dir", folder) as (orphan, _):
        with start_project(project, *OPTIONS, "-o", "trainers.grpo", "{_type: scratch}") as process:
            process.wait_until((project / "initializing").exists)
            orphan.terminate()
            _, err = process.communicate(HANGS)
    assert "is in use by" not in err
    assert "failed: no epoch trained anything" in err

"""What a plugin's evaluations share inside a finetuning run, and how the end of a plugin trainer's run is judged."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import plain_parts
import pytest
from rich.console import Console

from insitu.collect.evaluation import EvaluationRun
from insitu.config import Config, load_config
from insitu.config.resolved import resolved_config
from insitu.doctor.diagnosis import Budget, examine
from insitu.errors import ConfigError, InsituError, JobFailed, PluginError, TrajectoryError
from insitu.plugin_api import Builder, register_trainer, register_trainer_adapter, register_trajectory_builder
from insitu.schemas.evaluation import EvaluationRunConfig, EvaluationRunOutput
from insitu.schemas.finetuning import (
    FinetuneConfig,
    FinetuneRunConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    TrajectoryBuilderConfig,
    TrajectoryCollection,
)
from insitu.training.interfaces import Trainer, TrainerAdapter, TrajectoryBuilder
from insitu.training.runtime import evaluation_main, finetuning_main

Script = Callable[["ScriptedTrainer"], Awaitable[Any]]


class ScriptedBuilderConfig(TrajectoryBuilderConfig, name="scripted_builder"):
    pass


class ScriptedBuilder(TrajectoryBuilder):
    """Has what a plugin has: its configuration, and nothing else."""

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None: ...

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        return TrajectoryCollection(trajectories=[], run_id=run_id)

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None: ...


class ScriptedAdapterConfig(TrainerAdapterConfig, name="scripted_adapter"):
    learning_rate: float = 0.1


class ScriptedAdapter(TrainerAdapter):
    async def is_healthy(self) -> bool:
        return True

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        return TrainingJobRef(run_id=trajectories.run_id, backend="scripted")

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        return status("completed")

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        return await self.status(ref)

    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None: ...


class ScriptedTrainerConfig(TrainerConfig, name="scripted_trainer"):
    pass


class ScriptedTrainer(Trainer):
    """A trainer whose `run` the test supplies; `cleaned_up` counts the calls of cleanup."""

    script: Script
    at_start: Script | None = None
    at_end: Script | None = None
    cleaned_up = 0

    async def initialize(self, run_config: FinetuneConfig) -> None:
        await super().initialize(run_config)
        if ScriptedTrainer.at_start is not None:
            await ScriptedTrainer.at_start(self)

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        return None

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        given: list[TrainingJobStatus] = await ScriptedTrainer.script(self)
        return given

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        return {}

    async def cleanup(self) -> None:
        ScriptedTrainer.cleaned_up += 1
        if ScriptedTrainer.at_end is not None:
            await ScriptedTrainer.at_end(self)

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None: ...


@register_trajectory_builder(config_type=ScriptedBuilderConfig)
async def scripted_builder(config: ScriptedBuilderConfig, builder: Builder) -> AsyncIterator[ScriptedBuilder]:
    yield ScriptedBuilder(trajectory_builder_config=config)


@register_trainer_adapter(config_type=ScriptedAdapterConfig)
async def scripted_adapter(config: ScriptedAdapterConfig, builder: Builder) -> AsyncIterator[ScriptedAdapter]:
    yield ScriptedAdapter(adapter_config=config)


@register_trainer(config_type=ScriptedTrainerConfig)
async def scripted_trainer(config: ScriptedTrainerConfig, builder: Builder) -> AsyncIterator[ScriptedTrainer]:
    yield ScriptedTrainer(trainer_config=config)


def status(value: str, message: str | None = None) -> TrainingJobStatus:
    return TrainingJobStatus(run_id="r1", backend="scripted", status=TrainingStatusEnum(value), message=message)


async def gives_one(trainer: ScriptedTrainer) -> list[TrainingJobStatus]:
    return [status("completed")]


class Bench:
    """A project whose rows ask for the episode's seed; `finetune(script)` runs it as the command does."""

    def __init__(self, write: Any, folder: Path) -> None:
        self.write, self.folder = write, folder
        write([{"id": f"row {i}", "question": "seed"} for i in range(4)], "rows.jsonl")
        write([{"id": f"held out {i}", "question": "seed"} for i in range(3)], "held_out.jsonl")
        self.file = write(self.data())

    def data(self) -> dict[str, Any]:
        general = {
            "max_concurrency": 3,
            "dataset": {"_type": "jsonl", "file_path": "rows.jsonl"},
            "output_dir": str(self.folder / "eval"),
        }
        return {
            "general": {"seed": 5},
            "workflow": {"_type": "parts", "seconds": 0.01},
            "eval": {"general": general, "evaluators": {"exact": {"_type": "judge"}}},
            "trajectory_builders": {"b": {"_type": "scripted_builder"}},
            "trainer_adapters": {"a": {"_type": "scripted_adapter"}},
            "trainers": {"t": {"_type": "scripted_trainer"}},
            "finetuning": {
                "enabled": True,
                "trajectory_builder": "b",
                "trainer_adapter": "a",
                "trainer": "t",
                "reward_function": {"name": "exact"},
            },
        }

    async def finetune(
        self, script: Script, at_start: Script | None = None, at_end: Script | None = None, **asked: Any
    ) -> list[TrainingJobStatus]:
        ScriptedTrainer.script, ScriptedTrainer.cleaned_up = script, 0  # type: ignore[method-assign]
        ScriptedTrainer.at_start, ScriptedTrainer.at_end = at_start, at_end
        plain_parts.made.clear()
        return await finetuning_main(FinetuneRunConfig(config_file=self.file, **asked))


@pytest.fixture
def bench(write: Any, tmp_path: Path) -> Bench:
    return Bench(write, tmp_path)


def seeds(output: EvaluationRunOutput) -> list[Any]:
    return [item.output_obj for item in output.eval_input.eval_input_items]


# what evaluations share


async def test_evaluations_at_once_share_the_components_and_one_limit(bench: Bench) -> None:
    outputs: list[EvaluationRunOutput] = []

    async def script(trainer: ScriptedTrainer) -> Any:
        own = EvaluationRunConfig(config_file=bench.file, reps=2)
        tasks = [asyncio.create_task(trainer.trajectory_builder.run_eval()) for _ in range(4)]
        tasks.append(asyncio.create_task(EvaluationRun(own).run_and_evaluate()))
        outputs.extend(await asyncio.gather(*tasks))
        return await gives_one(trainer)

    await bench.finetune(script)
    (parts,) = plain_parts.made
    assert parts.most == 3
    assert len(parts.begun) == 4 * 4 + 4 * 2
    every = [seed for output in outputs for seed in seeds(output)]
    assert len(set(every)) == len(every)
    folders = {output.workflow_output_file.parent for output in outputs}  # type: ignore[union-attr]
    assert folders == {bench.folder / "eval" / f"generation_{n}" for n in range(5)}
    for output in outputs:
        records = json.loads(output.workflow_output_file.read_text())  # type: ignore[union-attr]
        assert [r["generated_answer"] for r in records] == seeds(output)

    first, outputs[:] = every, []
    await bench.finetune(script)
    assert [seed for output in outputs for seed in seeds(output)] == first


async def test_a_builder_that_the_plugin_made_is_part_of_the_run(bench: Bench) -> None:
    outputs: list[EvaluationRunOutput] = []

    async def script(trainer: ScriptedTrainer) -> Any:
        config = load_config(bench.file)
        async with Builder(config) as own:
            runs = [EvaluationRun(EvaluationRunConfig(config_file=config), own) for _ in range(3)]
            outputs.extend(await asyncio.gather(*(run.run_and_evaluate() for run in runs)))
        return await gives_one(trainer)

    await bench.finetune(script)
    (parts,) = plain_parts.made
    assert parts.most == 3
    every = [seed for output in outputs for seed in seeds(output)]
    assert len(set(every)) == len(every) == 12
    folders = {output.workflow_output_file.parent for output in outputs}  # type: ignore[union-attr]
    assert folders == {bench.folder / "eval" / f"generation_{n}" for n in range(3)}


async def test_the_runs_builder_in_another_event_loop_is_no_part_of_the_run(bench: Bench) -> None:
    async def script(trainer: ScriptedTrainer) -> Any:
        def elsewhere() -> list[Any]:
            async def evaluate() -> list[Any]:
                config = load_config(bench.file)
                async with Builder(config) as own:
                    return seeds(await EvaluationRun(EvaluationRunConfig(config_file=config), own).run_and_evaluate())

            return asyncio.run(evaluate())

        there, here = await asyncio.gather(asyncio.to_thread(elsewhere), trainer.trajectory_builder.run_eval())
        assert len(there) == len(seeds(here)) == 4
        assert set(there).isdisjoint(seeds(here))  # held-out seeds: it does not collect for training
        return await gives_one(trainer)

    await bench.finetune(script)


async def test_asking_for_a_validation_without_a_dataset_is_not_a_failed_validation(bench: Bench) -> None:
    async def script(trainer: ScriptedTrainer) -> Any:
        with pytest.raises(ConfigError, match="validation needs a dataset"):
            await trainer.run_validation_evaluation(1, "r1")
        return await gives_one(trainer)

    assert [status.status for status in await bench.finetune(script)] == [TrainingStatusEnum.COMPLETED]


async def test_validation_samples_the_same_each_time_and_gathering_does_not(bench: Bench) -> None:
    seen: list[list[Any]] = []

    async def script(trainer: ScriptedTrainer) -> Any:
        for epoch in (1, 2):
            metrics = await trainer.run_validation_evaluation(epoch, "r1")
            assert (metrics["epoch"], metrics["num_examples"]) == (epoch, 3)
            held_out = EvaluationRunConfig(config_file=bench.file, dataset=bench.folder / "held_out.jsonl")
            seen.append(seeds(await EvaluationRun(held_out).run_and_evaluate()))
            seen.append(seeds(await trainer.trajectory_builder.run_eval()))
        return await gives_one(trainer)

    await bench.finetune(script, validation_dataset=bench.folder / "held_out.jsonl")
    assert len(plain_parts.made) == 1
    assert seen[0] == seen[2]
    assert set(seen[1]).isdisjoint(seen[3])


async def test_the_overrides_reach_every_evaluation_and_every_part(bench: Bench) -> None:
    async def script(trainer: ScriptedTrainer) -> Any:
        assert trainer.run_config.num_epochs == 2
        assert trainer.trainer_adapter.adapter_config.learning_rate == 0.5  # type: ignore[attr-defined]
        for part in (trainer.trajectory_builder.trajectory_builder_config, trainer.trainer_adapter.adapter_config):
            assert part.reward is not None
            assert part.reward.name == "exact"
        asked = trainer.run_config.run_configuration
        assert asked is not None
        assert asked.validation_interval == 4
        await trainer.trajectory_builder.run_eval()
        await EvaluationRun(EvaluationRunConfig(config_file=bench.file)).run_and_evaluate()
        return await gives_one(trainer)

    overrides = {
        "finetuning.num_epochs": "2",
        "trainer_adapters.a.learning_rate": "0.5",
        "workflow.seconds": "0",
        "finetuning.validation": "{dataset: held_out.jsonl, interval: 4}",
    }
    await bench.finetune(script, override=tuple(overrides.items()))
    (parts,) = plain_parts.made
    assert parts.config.seconds == 0
    assert len(parts.begun) == 8


async def test_another_file_gets_components_of_its_own_and_the_live_adapter(bench: Bench) -> None:
    data = bench.data()
    data["workflow"]["seconds"] = 0
    del data["finetuning"], data["trainers"], data["trajectory_builders"], data["trainer_adapters"]
    other = bench.write(data, "other.yml")

    async def script(trainer: ScriptedTrainer) -> Any:
        await trainer.trajectory_builder.run_eval()
        metrics = await trainer.run_validation_evaluation(1, "r1")
        assert metrics["num_examples"] == 3
        return await gives_one(trainer)

    await bench.finetune(script, validation_dataset=bench.folder / "held_out.jsonl", validation_config_file=other)
    assert [parts.config.seconds for parts in plain_parts.made] == [0.01, 0]


async def test_a_validation_file_alone_is_validated_on_its_own_dataset(bench: Bench) -> None:
    data = bench.data()
    data["eval"]["general"]["dataset"]["file_path"] = "held_out.jsonl"
    other = bench.write(data, "other.yml")

    async def script(trainer: ScriptedTrainer) -> Any:
        assert (await trainer.run_validation_evaluation(1, "r1"))["num_examples"] == 3
        asked = trainer.run_config.run_configuration
        assert asked is not None
        assert asked.validation_dataset == bench.folder / "held_out.jsonl"  # for a plugin's trainer that looks for it
        own = EvaluationRunConfig(config_file=other, dataset=asked.validation_dataset)
        held_out = await EvaluationRun(own).run_and_evaluate()
        assert held_out.workflow_output_file == bench.folder / "eval/workflow_output.json"  # not one for training
        return await gives_one(trainer)

    await bench.finetune(script, validation_config_file=other)


async def test_an_evaluation_run_patched_at_its_documented_path_is_used(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nat.eval.evaluate

    seen: list[bool | None] = []

    class Patched(EvaluationRun):
        def __init__(self, config: EvaluationRunConfig) -> None:
            super().__init__(config)
            seen.append(config.training)

    monkeypatch.setattr(nat.eval.evaluate, "EvaluationRun", Patched)

    async def script(trainer: ScriptedTrainer) -> Any:
        await trainer.trajectory_builder.run_eval()
        await trainer.run_validation_evaluation(1, "r1")
        return await gives_one(trainer)

    await bench.finetune(script, validation_dataset=bench.folder / "held_out.jsonl")
    assert seen == [True, False]


async def test_a_thread_with_an_event_loop_of_its_own_has_no_part_in_the_run(bench: Bench) -> None:
    def evaluate() -> EvaluationRunOutput:
        return asyncio.run(EvaluationRun(EvaluationRunConfig(config_file=bench.file)).run_and_evaluate())

    async def script(trainer: ScriptedTrainer) -> Any:
        await trainer.trajectory_builder.run_eval()
        assert len(seeds(await asyncio.to_thread(evaluate))) == 4
        return await gives_one(trainer)

    await bench.finetune(script)
    assert len(plain_parts.made) == 2


async def test_outside_a_run_the_same_methods_build_for_themselves(bench: Bench) -> None:
    config = load_config(bench.file)
    asked = FinetuneRunConfig(config_file=bench.file, validation_dataset=bench.folder / "held_out.jsonl")
    finetuning = config.finetuning.model_copy(update={"run_configuration": asked})
    plain_parts.made.clear()
    builder = ScriptedBuilder(ScriptedBuilderConfig())
    await builder.initialize(finetuning)
    first, second = await asyncio.gather(builder.run_eval(), builder.run_eval())
    assert set(seeds(first)).isdisjoint(seeds(second))
    assert len(plain_parts.made) == 2
    trainer = ScriptedTrainer(ScriptedTrainerConfig())
    trainer.run_config = finetuning
    assert (await trainer.run_validation_evaluation(1, "r1"))["num_examples"] == 3


def test_target_model_names_llms_by_key_model_or_step(bench: Bench) -> None:
    def llm(model: str) -> dict[str, Any]:
        return {"_type": "openai", "model_name": model, "base_url": "http://localhost:1/v1"}

    llms = {"player": llm("small"), "frozen": llm("small@0"), "judge": llm("big")}

    def trained(target: str | None) -> set[str]:
        data = bench.data() | {"llms": llms}
        data["finetuning"]["target_model"] = target
        config: Config = load_config(bench.write(data, "models.yml"))
        return set(config.trained_llms())

    assert trained(None) == {"player", "frozen", "judge"}
    assert trained("judge") == trained("big") == trained("big@7") == {"judge"}
    assert trained("small") == {"player"}
    assert trained("small@0") == {"frozen"}
    assert trained("small@5") == {"player", "frozen"}
    with pytest.raises(ConfigError, match="target_model: 'smal' does not exist"):
        trained("smal")


async def test_a_run_an_evaluation_and_an_examination_leave_the_checked_file_as_it_is(bench: Bench) -> None:
    """Whatever a plugin does to its block, of which it has a copy."""
    data = bench.data()
    data["finetuning"]["validation"] = {"dataset": "held_out.jsonl"}
    config = load_config(bench.write(data))
    before, contents = resolved_config(config), repr(config)

    async def script(trainer: ScriptedTrainer) -> Any:
        adapter: Any = trainer.trainer_adapter.adapter_config
        adapter.learning_rate = 7.0
        trainer.trajectory_builder.trajectory_builder_config.reward = None
        await trainer.trajectory_builder.run_eval()
        await trainer.run_validation_evaluation(1, "r1")
        return await gives_one(trainer)

    ScriptedTrainer.script = script  # type: ignore[method-assign,assignment]
    ScriptedTrainer.at_start = ScriptedTrainer.at_end = None
    await finetuning_main(FinetuneRunConfig(config_file=config))
    quiet = Console(quiet=True)
    await evaluation_main(EvaluationRunConfig(config_file=config), None, quiet, quiet)
    await examine(FinetuneRunConfig(config_file=config), Budget(4, 30.0))
    assert (resolved_config(config), repr(config)) == (before, contents)


# how a run ends


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([status("completed"), status("failed", "out of memory")], JobFailed, "job 2 of 2 .*failed: out of memory"),
        ([status("canceled")], JobFailed, "job 1 of 1 .run r1, backend scripted. is canceled: no reason given"),
        ([status("running")], JobFailed, "is running"),
        ([], TrajectoryError, "no epoch trained anything"),
        ([None, None], TrajectoryError, "no epoch trained anything"),
        (None, PluginError, "ScriptedTrainer.run returned None"),
        ([{"status": "completed"}], PluginError, "not a list of TrainingJobStatus"),
    ],
)
async def test_a_run_that_did_not_do_what_was_asked_fails(
    bench: Bench, given: Any, error: type[InsituError], message: str
) -> None:
    async def script(trainer: ScriptedTrainer) -> Any:
        return given

    with pytest.raises(error, match=message):
        await bench.finetune(script)
    assert ScriptedTrainer.cleaned_up == 1


async def test_an_epoch_that_trained_nothing_is_said(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    async def script(trainer: ScriptedTrainer) -> Any:
        return [None, status("completed")]

    assert await bench.finetune(script, override=(("finetuning.num_epochs", "2"),)) == [status("completed")]
    assert "1 of 2 epochs trained nothing" in caplog.text


async def fails(trainer: ScriptedTrainer) -> Any:
    raise RuntimeError("the cable is out")


@pytest.mark.parametrize("where", ["run", "initialize", "cleanup"])
async def test_what_a_plugin_raises_is_told_with_its_place(bench: Bench, where: str) -> None:
    scripts: dict[str, Any] = {"run": {}, "initialize": {"at_start": fails}, "cleanup": {"at_end": fails}}
    with pytest.raises(PluginError, match=r"trainers\.t.*RuntimeError: the cable is out .*test_shared_runs\.py"):
        await bench.finetune(fails if where == "run" else gives_one, **scripts[where])
    assert ScriptedTrainer.cleaned_up == 1


async def test_an_error_of_the_system_stays_what_it_is(bench: Bench) -> None:
    async def script(trainer: ScriptedTrainer) -> Any:
        (bench.folder / "no" / "such" / "folder").write_text("")

    with pytest.raises(FileNotFoundError):
        await bench.finetune(script)


async def test_failed_episodes_of_run_eval_are_said(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.write([{"id": 0, "question": "seed"}, {"id": 1, "question": "raise no legs"}], "rows.jsonl")

    async def script(trainer: ScriptedTrainer) -> Any:
        await trainer.trajectory_builder.run_eval()
        return await gives_one(trainer)

    await bench.finetune(script)
    assert "1 of 2 episodes failed; first failure (row 1): ValueError: no legs" in caplog.text


async def test_a_failing_cleanup_does_not_hide_what_came_before(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    async def script(trainer: ScriptedTrainer) -> Any:
        return [status("failed", "out of memory")]

    with pytest.raises(JobFailed, match="out of memory"):
        await bench.finetune(script, at_end=fails)
    assert "cleanup also failed: RuntimeError: the cable is out" in caplog.text


@pytest.mark.parametrize("says", ["nan", "raise"])
async def test_a_validation_without_a_reward_fails_the_run(bench: Bench, says: str) -> None:
    bench.write([{"id": 0, "question": "seed"}], "held_out.jsonl")

    async def script(trainer: ScriptedTrainer) -> Any:
        metrics = await trainer.run_validation_evaluation(3, "r1")
        assert "avg_reward" not in metrics
        return await gives_one(trainer)

    with pytest.raises(InsituError, match=r"1 validation.* failed; the first, at epoch 3: no example could be scored"):
        await bench.finetune(
            script, validation_dataset=bench.folder / "held_out.jsonl", override=(("eval.evaluators.exact.says", says),)
        )


async def test_a_validation_error_that_a_trainer_swallows_fails_the_run(bench: Bench) -> None:
    async def script(trainer: ScriptedTrainer) -> Any:
        (bench.folder / "held_out.jsonl").unlink()
        with pytest.raises(ConfigError):
            await trainer.run_validation_evaluation(1, "r1")
        return await gives_one(trainer)

    with pytest.raises(InsituError, match=r"at epoch 1: .*held_out\.jsonl' does not exist"):
        await bench.finetune(script, validation_dataset=bench.folder / "held_out.jsonl")


async def test_a_validation_that_was_never_run_is_said(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    await bench.finetune(gives_one, validation_dataset=bench.folder / "held_out.jsonl")
    assert "trainers.t never ran it" in caplog.text


async def test_our_builder_counts_the_epochs_of_a_trainer_that_does_not(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    async def collects_twice(trainer: ScriptedTrainer) -> list[TrainingJobStatus]:
        for epoch in (1, 2):
            await trainer.trajectory_builder.start_run("r1")
            collection = await trainer.trajectory_builder.finalize("r1")
            assert (collection.epoch, collection.trajectories, collection.dropped) == (epoch, [], {"no_calls": 8})
            assert collection.mean_reward is None
        return [status("completed")]

    ours = ("trajectory_builders.b", "{_type: insitu_traj_builder, num_generations: 2}")
    await bench.finetune(collects_twice, override=(ours,))
    assert len(plain_parts.made[0].begun) == 16
    assert "no episode can be trained on; the first error: the model calls of" in caplog.text

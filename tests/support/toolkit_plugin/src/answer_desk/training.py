"""The desk's own training: conversations are written to a file, which a service picks up."""

import asyncio
import json
import logging
from collections import defaultdict
from pathlib import Path

from nat.builder.builder import Builder
from nat.cli.register_workflow import register_trainer, register_trainer_adapter, register_trajectory_builder
from nat.data_models.finetuning import (
    EpisodeItem,
    EpisodeItemRole,
    FinetuneConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryBuilderConfig,
    TrajectoryCollection,
)
from nat.finetuning.interfaces.finetuning_runner import Trainer
from nat.finetuning.interfaces.trainer_adapter import TrainerAdapter
from nat.finetuning.interfaces.trajectory_builder import TrajectoryBuilder
from nat.finetuning.utils.parsers.base_parser import parse_to_openai_messages
from pydantic import Field

logger = logging.getLogger(__name__)


class DeskBuilderConfig(TrajectoryBuilderConfig, name="desk_traj_builder"):
    """Asks every question several times."""

    num_generations: int = Field(default=2, ge=1, description="How often.")


class DeskBuilder(TrajectoryBuilder):
    def __init__(self, trajectory_builder_config: DeskBuilderConfig) -> None:
        super().__init__(trajectory_builder_config)
        self.running: dict[str, list[asyncio.Task]] = {}

    async def initialize(self, run_config: FinetuneConfig) -> None:
        self.run_config = run_config
        self.run_config.num_epochs += 40  # nobody else shall see this
        self.run_config.target_functions.append("nobody")
        self.trajectory_builder_config.reward = self.run_config.reward_function

    async def start_run(self, run_id: str, meta: dict | None = None) -> None:
        times = range(self.trajectory_builder_config.num_generations)
        self.running[run_id] = [asyncio.create_task(self.run_eval()) for _ in times]

    async def finalize(self, run_id: str, meta: dict | None = None) -> TrajectoryCollection:
        groups = defaultdict(list)
        for output in await asyncio.gather(*self.running.pop(run_id)):
            scores = {item.id: item for item in dict(output.evaluation_results)[self._reward].eval_output_items}
            for item in output.eval_input.eval_input_items:
                episode = [self._item(message) for message in parse_to_openai_messages(item.trajectory)]
                reward = await self.compute_reward(scores[item.id])
                about = {"id": item.id, "topic": item.full_dataset_entry["topic"]}
                groups[item.id].append(Trajectory(episode=episode, reward=reward, metadata=about))
        return TrajectoryCollection(trajectories=list(groups.values()), run_id=run_id)

    @property
    def _reward(self) -> str:
        return self.trajectory_builder_config.reward.name

    @staticmethod
    def _item(message: dict) -> EpisodeItem:
        is_said = message["role"] == "assistant"
        return EpisodeItem(
            role=EpisodeItemRole(message["role"]),
            content=message.get("content") or "",
            logprobs=message.get("logprobs", {}) if is_said else None,
            metadata={"tool_calls": message["tool_calls"]} if message.get("tool_calls") else None,
        )

    def log_progress(self, run_id: str, metrics: dict, output_dir: str | None = None) -> None:
        logger.info("run %s: %s", run_id, metrics)


class DeskAdapterConfig(TrainerAdapterConfig, name="desk_trainer_adapter"):
    """Writes conversations to a folder."""

    folder: Path = Field(description="Where a service looks for them.")
    closed: bool = Field(default=False, description="Whether the service takes nothing now.")
    fails: bool = Field(default=False, description="Whether its jobs fail.")
    file_name: str | None = Field(default=None, description="That of the run, unless it is given.")


class DeskAdapter(TrainerAdapter):
    """Needs texts only; what else is known of a message is written beside it."""

    async def initialize(self, run_config: FinetuneConfig) -> None:
        await super().initialize(run_config)
        self.adapter_config.folder.mkdir(exist_ok=True)
        self.adapter_config.file_name = self.adapter_config.file_name or f"{run_config.reward_function.name}.jsonl"
        run_config.reward_function.name = "unheard of"

    async def is_healthy(self) -> bool:
        return not self.adapter_config.closed

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        with (self.adapter_config.folder / self.adapter_config.file_name).open("a") as file:
            for group in trajectories.trajectories:
                for trajectory in group:
                    items = [item.model_dump(mode="json") for item in trajectory.episode]
                    about = {"reward": trajectory.reward, "about": trajectory.metadata, "rows": len(trajectory.rows)}
                    file.write(json.dumps({"episode": items, **about}) + "\n")
        return TrainingJobRef(run_id=trajectories.run_id, backend="desk")

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        status, message = TrainingStatusEnum.COMPLETED, None
        if self.adapter_config.fails:
            status, message = TrainingStatusEnum.FAILED, "the service is full"
        return TrainingJobStatus(run_id=ref.run_id, backend=ref.backend, status=status, message=message)

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        return await self.status(ref)

    def log_progress(self, ref: TrainingJobRef, metrics: dict, output_dir: str | None = None) -> None:
        logger.info("job %s: %s", ref.run_id, metrics)


class DeskTrainerConfig(TrainerConfig, name="desk_trainer"):
    """Collects and submits, epoch by epoch."""

    patience: int = Field(default=0, description="Counted down while it runs.")


class DeskTrainer(Trainer):
    async def initialize(self, run_config: FinetuneConfig) -> None:
        run_config.curriculum_learning.enabled = True
        await super().initialize(run_config)
        self.run_config.num_epochs = 9
        self.trainer_config.patience += 3
        self.run_id, self.notes = "desk-run", []

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef:
        await self.trajectory_builder.start_run(run_id, {"epoch": epoch})
        collection = await self.trajectory_builder.finalize(run_id, {"epoch": epoch})
        self.log_progress(epoch, {"episodes": sum(map(len, collection.trajectories))})
        return await self.trainer_adapter.submit(collection)

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        statuses = []
        for epoch in range(1, num_epochs + 1):
            self.trainer_config.patience -= 1
            ref = await self.run_epoch(epoch, f"{self.run_id}-{epoch}")
            statuses.append(await self.trainer_adapter.wait_until_complete(ref))
        return statuses

    async def get_metrics(self, run_id: str) -> dict:
        return {"epochs": self.notes}

    def log_progress(self, epoch: int, metrics: dict, output_dir: str | None = None) -> None:
        seen = {"epoch": epoch, "patience": self.trainer_config.patience, "num_epochs": self.run_config.num_epochs}
        seen |= {"curriculum": self.curriculum_config.enabled, "targets": self.run_config.target_functions}
        self.notes.append({**seen, "reward": self.run_config.reward_function.name, **metrics})

    async def cleanup(self) -> None:
        folder = self.run_config.output_dir
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "desk.json").write_text(json.dumps(self.notes))


@register_trajectory_builder(config_type=DeskBuilderConfig)
async def desk_traj_builder(config: DeskBuilderConfig, builder: Builder):
    yield DeskBuilder(trajectory_builder_config=config)


@register_trainer_adapter(config_type=DeskAdapterConfig)
async def desk_trainer_adapter(config: DeskAdapterConfig, builder: Builder):
    yield DeskAdapter(adapter_config=config)


@register_trainer(config_type=DeskTrainerConfig)
async def desk_trainer(config: DeskTrainerConfig, builder: Builder):
    yield DeskTrainer(trainer_config=config)

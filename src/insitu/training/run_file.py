"""The header of a run, its origin and the content of `run.json`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from insitu import __version__
from insitu.builder import Builder
from insitu.config import Config
from insitu.config.resolved import resolved_config, without_secrets
from insitu.registry import LLM
from insitu.runs.replay import provenance
from insitu.training.interfaces import Trainer, TrajectoryBuilder


def settings_of(trainer: Trainer, config: Config, num_epochs: int, selection: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide what an epoch trains on, and how; `selection` are those of the trainer itself."""
    builder, reward = trainer.trajectory_builder, trainer.run_config.reward_function
    settings = {
        "epochs": num_epochs,
        "seed": config.general.seed,
        **selection,
        "on_failure": reward.on_failure if reward else None,
    }
    settings |= builder.settings() | trainer.trainer_adapter.serving_settings()
    if bridged := [
        name for name in sorted(config.trained_llms()) if getattr(config.block(LLM, name), "token_bridge", False)
    ]:
        settings["token_bridge"] = bridged
    if training := trainer.trainer_adapter.training_settings():
        settings["training"] = without_secrets(training)
    return settings


def origin_of(builder: Builder, trajectory_builder: TrajectoryBuilder, folder: Path) -> dict[str, Any]:
    """The inputs of the run in `folder`, with their digests."""
    return provenance(builder, trajectory_builder.stored, folder)


def run_record(
    run_id: str, config: Config, planned: int | None, origin: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of `run.json`; `planned` is the number of episodes of an epoch, if known."""
    source = Path(config.source)  # absolute, for commands that read the run in another directory
    return {
        "run_id": run_id,
        "insitu": __version__,
        "source": str(source.absolute()) if source.is_file() else str(source),
        "episodes_per_epoch": planned,
        "given": resolved_config(config, given=True),
        **origin,
        **settings,
        "config": resolved_config(config),
    }

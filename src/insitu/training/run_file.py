"""The header of a run, its origin and the content of `run.json`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from insitu import __version__
from insitu.builder import Builder
from insitu.collect.datasets import find_dataset
from insitu.collect.evaluation import held_out_record
from insitu.config import Config
from insitu.config.resolved import resolved_config, without_secrets
from insitu.disk.json_files import read_object
from insitu.disk.model_files import downloaded, model_digest
from insitu.runs.files import BACKEND_FOLDER, STARTED_FILE
from insitu.schemas.components import FunctionBaseConfig
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
    llms = {name: config.llm(name).request_settings() for name in sorted(config.trained_llms())}
    if bridged := [name for name, llm in llms.items() if llm.get("token_bridge")]:
        settings["token_bridge"] = bridged
    for block in config.blocks.values():
        settings |= block.run_settings() if isinstance(block, FunctionBaseConfig) else {}
    if training := trainer.trainer_adapter.training_settings():
        settings["training"] = without_secrets(training)
    return settings


def origin_of(builder: Builder, trajectory_builder: TrajectoryBuilder, folder: Path) -> dict[str, Any]:
    """What later uses of the run in `folder` need to know: rows and model, which calls it trains, and where from."""
    stored, config, finetuning = trajectory_builder.stored, builder.config, builder.config.finetuning
    if stored is not None:
        dataset = stored.files.settings().get("dataset")
    else:
        path = builder.request.dataset if builder.request is not None else None
        has_rows = path is not None or config.eval.dataset is not None  # a plugin's builder may need none
        dataset = find_dataset(config, path, builder.moved).record() if has_rows else None
    llms, model = sorted(config.trained_llms()), finetuning.target_model
    return {
        "dataset": dataset,
        "held_out": held_out_record(config, builder.moved),
        "starting_model": _starting_model(folder),
        "targets": {"functions": finetuning.target_functions, "model": model, "llms": llms},
        "episodes_from": stored and {"run": str(stored.folder), "epochs": [*stored.epochs], "reward": stored.reward},
    }


def _starting_model(folder: Path) -> dict[str, str | None] | None:
    """The model that the run's own backend started from, if it has one: with a digest, or its commit on the Hub."""
    if not (record := folder / BACKEND_FOLDER / STARTED_FILE).is_file():
        return None
    model = Path(read_object(record)["model"])
    if model.exists():
        return {"file": str(model), "sha256": model_digest(model)}
    snapshot = downloaded(str(model))
    return {"file": str(model), "sha256": None, "commit": None if snapshot is None else snapshot.name}


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

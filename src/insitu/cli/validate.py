"""The command `validate`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from insitu.cli import options

if TYPE_CHECKING:
    from insitu.config import Config
    from insitu.schemas.finetuning import FinetuneRunConfig


@click.command("validate")
@options.request("FinetuneRunConfig", options.dataset, *options.validation)
def command(request: "FinetuneRunConfig") -> None:
    """Check a file, its plugins and its datasets, as `finetune` does before it starts anything."""
    from insitu.collect.event_loop import run_async
    from insitu.training.runtime import check_run

    config = run_async(check_run(request))
    click.echo(f"{request.config_file} is valid")
    for line in _summary(config, request.dataset):
        click.echo(f"  {line}")


def _summary(config: "Config", dataset: str | Path | None) -> list[str]:
    """What the file runs, and what it trains."""
    from insitu.collect.datasets import load_dataset
    from insitu.collect.evaluation import held_out_config
    from insitu.registry import EVALUATOR, FUNCTION, TRAJECTORY_BUILDER
    from insitu.schemas.components import WORKFLOW

    lines = [f"evaluators: {', '.join(config.names(EVALUATOR)) or 'none'}"]
    if WORKFLOW in config.names(FUNCTION):
        lines.insert(0, f"workflow: {config.workflow.type}")
    finetuning = config.finetuning
    builder = config.blocks.get((TRAJECTORY_BUILDER.section, str(finetuning.trajectory_builder)))
    if (stored := getattr(builder, "episodes_from", None)) is not None:
        lines.append(f"episodes: those of {stored.run}")
    elif dataset is not None or config.eval.dataset is not None:
        lines.append(f"rows: {len(load_dataset(config, dataset))}")
    if not finetuning.enabled:
        return [*lines, "training: finetuning.enabled is false"]
    if finetuning.validation is not None:
        held_out = load_dataset(held_out_config(config), finetuning.validation.dataset)
        lines.append(f"held-out rows: {len(held_out)}")
    trained = ", ".join(sorted(config.trained_llms())) or "the model of the trainer adapter"
    reward = finetuning.reward_function
    score = f", by the score of {reward.name}" if reward is not None else ""  # pairs may be made without an evaluator
    epochs = f"{finetuning.num_epochs} epoch{'s' * (finetuning.num_epochs != 1)}"
    return [*lines, f"training: {trained}{score}, {epochs}"]

"""Checks that components fit together, that the weights sampled are those trained, and that training moves them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from insitu.errors import BackendError, ConfigError, InsituError, PluginError, TrajectoryError
from insitu.preferences.pairs import ALIKE
from insitu.runs import files
from insitu.schemas.finetuning import PolicyEndpoint, TrainingJobStatus, TrajectoryCollection
from insitu.training.episodes_builder import EpisodesBuilder
from insitu.training.interfaces import (
    GroupTrainer,
    PairTrainer,
    RewardAdapter,
    SingleJobTrainer,
    Trainer,
    TrainerAdapter,
    TrajectoryBuilder,
)
from insitu.training.metrics import trained_calls, why_no_pairs
from insitu.training.report import counts

EPISODES, PAIRS = "episodes", "preference pairs"


def check_components(trainer: Trainer, method: str) -> None:
    """Raises ConfigError or PluginError unless the trainer's builder and adapter give it what it needs.

    `method` is the `training.method` of adapters that have several.
    """
    builder, adapter = trainer.trajectory_builder, trainer.trainer_adapter
    for component, interface in ((builder, TrajectoryBuilder), (adapter, TrainerAdapter)):
        if not isinstance(component, interface):
            raise PluginError(f"{type(component).__name__} must be a subclass of {interface.__name__}")
    name = trainer.trainer_config.type
    if isinstance(builder, EpisodesBuilder):
        if builder.makes_pairs != isinstance(trainer, PairTrainer):
            made, trained = (PAIRS, EPISODES) if builder.makes_pairs else (EPISODES, PAIRS)
            raise ConfigError(f"trajectory_builders: {builder.config.type} makes {made}, but {name} trains {trained}")
        if isinstance(trainer, GroupTrainer) and builder.stored is None and builder.config.num_generations < 2:
            raise ConfigError(
                f"{builder.block}.num_generations is 1, but {name} compares the episodes of a row with one another; "
                "allowed: 2 or more"
            )
    configured = adapter.training_settings().get("method", method)
    if configured != method:
        raise ConfigError(
            f"trainer_adapters: training.method is {configured}, but the trainer {name} trains with {method}"
        )


def check_takes_advantages(trainer: Trainer) -> None:
    """Raises ConfigError if the backend would ignore the advantages that the trainer computes."""
    if isinstance(trainer.trainer_adapter, RewardAdapter):
        name, adapter_name = trainer.trainer_config.type, trainer.trainer_adapter.adapter_config.type
        raise ConfigError(
            f"trainers: {name} computes advantages, but the backend of {adapter_name} computes its own; use the "
            f"trainer made for {adapter_name}"
        )


def check_sampled(trainer: Trainer, trained: TrajectoryCollection, served: PolicyEndpoint | None) -> None:
    """Raises BackendError if a call to train on was not sampled from the served policy version.

    If a call reports no version, its requested model name must match. Recorded episodes may be of any version, except
    for a GroupTrainer, for which TrajectoryError is raised.
    """
    stored = getattr(trainer.trajectory_builder, "stored", None)
    if served is None or served.version is None or (stored is not None and not isinstance(trainer, GroupTrainer)):
        return
    name = served.model.removesuffix(f"@{served.version}")
    for trajectory in [t for group in trained.trajectories for t in group]:
        for call in trained_calls([trajectory]):
            version = call.policy_version
            unreported = version is None and call.model in (name, f"{name}@{served.version}")
            if version == served.version or unreported:
                continue
            if stored is not None:
                raise TrajectoryError(
                    f"the episodes of {stored.folder} cannot be trained by {trainer.trainer_config.type}, which needs "
                    f"those of the served weights: episode {trajectory.id} was sampled at policy version {version}, "
                    f"the backend serves version {served.version}; insitu_dpo_trainer, insitu_kto_trainer and "
                    "insitu_sft_trainer train episodes of any version"
                )
            raise BackendError(
                f"episode {trajectory.id}: a call to train on requested model {call.model!r} and was sampled at "
                f"policy version {version}, but the adapter trains {name!r}, which is at version "
                f"{served.version}; use an llm of _type: policy"
            )


def new_version(epoch: int, before: int | None, served: PolicyEndpoint | None) -> int | None:
    """The version served after a job, None if unknown. Raises BackendError if it is still the one `before` it."""
    version = served.version if served is not None else None
    if before is not None and version == before:
        raise BackendError(
            f"epoch {epoch}: the job completed, but the backend still serves policy version {version}, so the next "
            "epoch would sample from the old weights"
        )
    return version


def check_collected(
    trainer: Trainer, epoch: int, collection: TrajectoryCollection, errors: Counter[str], folder: Path
) -> None:
    """Raises TrajectoryError if nothing that was collected can be trained; `errors` are those of its episodes.

    For trainers with a job per epoch, pairs without a difference are no failure.
    """
    pairs = isinstance(trainer, PairTrainer)
    may_be_alike = pairs and not isinstance(trainer, SingleJobTrainer)
    if any(collection.trajectories) or (may_be_alike and not ALIKE.isdisjoint(collection.dropped)):
        return
    first = [f"most often {error}" for error, _ in errors.most_common(1)]
    causes = first or [str(cause) for cause in why_no_pairs(collection.dropped) if pairs]
    raise TrajectoryError(
        f"epoch {epoch}: no {'preference pair' if pairs else 'episode'} can be trained on; dropped: "
        + "; ".join([counts(collection.dropped), *causes])
        + f" (all of them: {folder / files.EPISODES})"
    )


def check_results(
    statuses: Sequence[TrainingJobStatus],
    validations: Sequence[Mapping[str, Any]],
    dropped: Mapping[str, int],
    causes: Sequence[str],
    folder: Path,
) -> None:
    """Raises TrajectoryError if no epoch trained, InsituError if a validation failed."""
    if not statuses:
        raise TrajectoryError(
            f"no epoch trained anything: every group was dropped: {counts(dropped)} "
            f"(per epoch: {folder / files.METRICS})" + "".join(f"; {cause}" for cause in causes)
        )
    if failed := [v for v in validations if "error" in v]:
        raise InsituError(
            f"{len(failed)} validation(s) failed; the first, at epoch {failed[0]['epoch']}: {failed[0]['error']}"
        )

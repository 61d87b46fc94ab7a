"""Checks of a run: components fit together, the weights sampled are those trained, and training moves them."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from insitu.advantages.estimator import NEUTRAL_SAMPLING, truncation
from insitu.config import Config
from insitu.disk.files import readable_bytes
from insitu.errors import BackendError, ConfigError, InsituError, PluginError, TrajectoryError
from insitu.preferences.pairs import ALIKE
from insitu.runs import files
from insitu.schemas.finetuning import PolicyEndpoint, TrainingJobStatus, TrajectoryCollection
from insitu.training.interfaces import (
    GroupTrainer,
    PairTrainer,
    RewardAdapter,
    SingleJobTrainer,
    Trainer,
    TrainerAdapter,
    TrajectoryBuilder,
)
from insitu.training.metrics import trained_calls
from insitu.training.observers import Collected
from insitu.training.report import counts


def check_components(trainer: Trainer, method: str, *, computes_advantages: bool = False) -> None:
    """Raises ConfigError or PluginError unless the trainer's builder and adapter give it what it needs.

    `method` is the `training.method` of adapters that have several. Some backends ignore the advantages that a trainer
    computes.
    """
    builder, adapter = trainer.trajectory_builder, trainer.trainer_adapter
    for component, interface in ((builder, TrajectoryBuilder), (adapter, TrainerAdapter)):
        if not isinstance(component, interface):
            raise PluginError(f"{type(component).__name__} must be a subclass of {interface.__name__}")
    builder.check_trainer(trainer)
    name = trainer.trainer_config.type
    configured = adapter.training_settings().get("method", method)
    if configured != method:
        raise ConfigError(
            f"trainer_adapters: training.method is {configured}, but the trainer {name} trains with {method}"
        )
    if computes_advantages and isinstance(adapter, RewardAdapter):
        service = adapter.adapter_config.type
        raise ConfigError(
            f"trainers: {name} computes advantages, but the backend of {service} computes its own; use the trainer "
            f"made for {service}"
        )


def check_sampling(trainer: Trainer, config: Config) -> None:
    """Raises ConfigError if an llm that is trained on what it samples is greedy or truncates its distribution."""
    if not isinstance(trainer, GroupTrainer) or trainer.trajectory_builder.stored is not None:
        return
    for name in sorted(config.trained_llms()):
        values = config.llm(name).request_settings()
        values["logprobs_processed"] = trainer.trainer_adapter.adapter_config.trains_shaped_logits
        if (problem := truncation(values)) is not None:
            key = "temperature" if problem == "greedy" else problem
            allowed = "above 0" if problem == "greedy" else str(NEUTRAL_SAMPLING[key][0])
            shown = f"{values[key]:g}" if isinstance(values[key], float) else str(values[key])
            raise ConfigError(
                f"llms.{name}.{key} is {shown:.80}, but {name} is trained on what it samples, which must be "
                f"from the softmax of all logits; allowed: {allowed} (a validation with its own config_file may differ)"
            )


def check_token_bridge(trainer: Trainer, config: Config) -> None:
    """Raises ConfigError if an llm has a token bridge that the backend does not know."""
    adapter = trainer.trainer_adapter.adapter_config
    for name in sorted(config.trained_llms()):
        if config.llm(name).request_settings().get("token_bridge") and not adapter.bridges_tokens:
            raise ConfigError(
                f"llms.{name}.token_bridge is true, but the backend of {adapter.type} does not continue from tokens; "
                "allowed: false, or an adapter of _type: insitu_trainer_adapter"
            )


def check_sampled(
    trainer: Trainer, trained: TrajectoryCollection, served: PolicyEndpoint | None, oldest: int | None = None
) -> None:
    """Raises BackendError if a call to train on was not sampled from the served policy version, and its weights.

    Versions from the `oldest` on are allowed, if it is given. If a call reports no version, its requested model name
    must match; without digests, weights are not compared.
    Recorded episodes may be of any version, except for a GroupTrainer, for which TrajectoryError is raised.
    """
    stored = trainer.trajectory_builder.stored
    if served is None or served.version is None or (stored is not None and not isinstance(trainer, GroupTrainer)):
        return
    name, first = served.model.removesuffix(f"@{served.version}"), served.version if oldest is None else oldest
    names = {name, *(f"{name}@{version}" for version in range(first, served.version + 1))}
    for trajectory in [t for group in trained.trajectories for t in group]:
        for call in trained_calls([trajectory]):
            version = call.policy_version
            is_allowed = call.model in names if version is None else first <= version <= served.version
            weights = {call.weights, served.weights} - {None} if version == served.version else set()
            if is_allowed and len(weights) < 2:
                continue
            sampled, serves = f"policy version {version}", f"version {served.version}"
            if len(weights) > 1:
                sampled, serves = f"weights {call.weights}", f"weights {served.weights} as the same version, {version}"
            if stored is not None:
                raise TrajectoryError(
                    f"the episodes of {stored.folder} cannot be trained by {trainer.trainer_config.type}, which needs "
                    f"those of the served weights: episode {trajectory.id} was sampled at {sampled}, "
                    f"the backend serves {serves}; insitu_dpo_trainer, insitu_kto_trainer and "
                    "insitu_sft_trainer train episodes of any version"
                )
            if len(weights) > 1:
                raise BackendError(
                    f"episode {trajectory.id} was sampled at {sampled}, but the backend serves {serves}: was it "
                    "started with another model or output_dir?"
                )
            raise BackendError(
                f"episode {trajectory.id}: a call to train on requested model {call.model!r} and was sampled at "
                f"policy version {version}, but the adapter trains {name!r}, which is at version "
                f"{served.version}{f' (allowed: from {first})' if first < served.version else ''}; use an llm of "
                "_type: policy"
            )


def gap_warning(gap: float | None, served: PolicyEndpoint | None) -> str | None:
    """A sentence if sampler and learner differ by more than rounding."""
    limit = served.logprob_tolerance if served is not None else None
    if gap is None or limit is None or gap <= limit:
        return None
    return (
        f"WARNING: logprob_gap is {gap:.2g}, above {limit:g}: the log-probabilities of the sampler differ from the "
        "learner's, so other weights or another distribution were sampled than are trained"
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


def check_collected(trainer: Trainer, epoch: int, collected: Collected, folder: Path) -> None:
    """Raises TrajectoryError if nothing that was collected can be trained.

    For trainers with a job per epoch, pairs without a difference are no failure.
    """
    pairs, collection = isinstance(trainer, PairTrainer), collected.collection
    may_be_alike = pairs and not isinstance(trainer, SingleJobTrainer)
    if any(collection.trajectories) or (may_be_alike and not ALIKE.isdisjoint(collection.dropped)):
        return
    first = [f"most often {error}" for error, _ in collected.progress.errors.most_common(1)]
    raise TrajectoryError(
        f"epoch {epoch}: no {'preference pair' if pairs else 'episode'} can be trained on; dropped: "
        + "; ".join([counts(collection.dropped), *first])
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


def job_warnings(status: TrainingJobStatus, gap: float | None, served: PolicyEndpoint | None) -> list[str]:
    """What is wrong after a job that has completed, a sentence each."""
    space = _space_warning((status.metadata or {}).get("checkpoint"))
    return [*filter(None, (gap_warning(gap, served), space))]


def _space_warning(checkpoint: str | None) -> str | None:
    """A sentence if the disk has less space left than two checkpoints like this one, which is on this machine."""
    if checkpoint is None or not (folder := Path(checkpoint)).is_dir():
        return None
    size, free = sum(path.stat().st_size for path in folder.iterdir()), shutil.disk_usage(folder).free
    if free >= 2 * size:
        return None
    left = f"the disk of {folder} has {readable_bytes(free)} left, and a checkpoint takes {readable_bytes(size)}"
    return f"{left}: free space (`insitu runs prune`), or keep fewer checkpoints (`keep` of the trainer adapter)"

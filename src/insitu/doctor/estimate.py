"""Time, memory and disk of a run, from those of a few episodes and one training job."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from insitu.algorithms.selection import included_fraction
from insitu.disk.files import nearest_folder, readable_bytes
from insitu.disk.model_files import OPTIMIZER_FILE
from insitu.doctor.findings import Finding, Severity
from insitu.doctor.plan import Plan
from insitu.schemas.training_jobs import KeepConfig
from insitu.training.memory_plan import MemoryPlan, kept_versions


@dataclass
class Measures:
    """What a few episodes and one job took; seconds, and bytes. None: not measured.

    `alone` is the time of an episode with no other in flight, `together` the mean time of those that were played.
    `job` is the whole job, `job_training` the part of it that grows with its episodes, of which it had
    `trained_episodes`. `stored` are the bytes of the recorded episodes, `weights` and `optimizer` those of a
    checkpoint.
    """

    start: float
    playing: float = 0.0
    episodes: int = 0
    collected: int = 0
    alone: float | None = None
    together: float | None = None
    job: float | None = None
    job_training: float = 0.0
    trained_episodes: int = 0
    memory: int | None = None
    backend_memory: int | None = None
    stored: int | None = None
    weights: int | None = None
    optimizer: int = 0


@dataclass(frozen=True)
class Estimate:
    """Time, memory and disk of a whole run; `None`: unknown. Memory is at least that of the measured processes."""

    start_seconds: float
    collect_seconds_per_epoch: float | None
    train_seconds_per_epoch: float | None
    validation_seconds: float | None
    validations: int
    epochs: int
    total_seconds: float | None
    memory_bytes: int | None
    backend_memory_bytes: int | None
    episodes_bytes: int | None
    checkpoint_bytes: int | None
    disk_bytes: int | None
    disk_free_bytes: int


def estimate(
    plan: Plan, measures: Measures, keep: KeepConfig | None, output_dir: Path, memory: MemoryPlan | None = None
) -> Estimate:
    """A job takes as long as the measured one for each of its episodes. What was not measured is that of `memory`."""
    collect = _playing_seconds(plan, measures, plan.episodes_per_epoch)
    validation = None
    if not plan.replays or not plan.validations:  # reading an episode says nothing about playing one
        validation = _playing_seconds(plan, measures, len(plan.held_out) * plan.validation_reps)
    train = _job_seconds(plan, measures)
    total = None
    if collect is not None and train is not None and validation is not None:
        total = measures.start + plan.epochs * (collect + train) + plan.validations * validation
    episodes = None
    if measures.stored is not None and measures.episodes:
        episodes = int(measures.stored / measures.episodes * plan.episodes_per_epoch * plan.epochs)
    checkpoints = _checkpoint_bytes(plan, measures, keep)
    if checkpoints is None and memory is not None:
        checkpoints = memory.checkpoint_bytes
    estimates = [each for each in (episodes, checkpoints) if each is not None]
    return Estimate(
        start_seconds=measures.start,
        collect_seconds_per_epoch=collect,
        train_seconds_per_epoch=train,
        validation_seconds=validation if plan.validations else None,
        validations=plan.validations,
        epochs=plan.epochs,
        total_seconds=total,
        memory_bytes=measures.memory,
        backend_memory_bytes=measures.backend_memory,
        episodes_bytes=episodes,
        checkpoint_bytes=checkpoints,
        disk_bytes=sum(estimates) if estimates else None,
        disk_free_bytes=shutil.disk_usage(nearest_folder(output_dir)).free,
    )


def _playing_seconds(plan: Plan, measures: Measures, episodes: int) -> float | None:
    """Seconds to play this many episodes.

    If more are in flight than were played, each takes a + b x (number in flight): the latency of an episode, and what
    it costs the server, so that neither a busy nor an idle server is taken for the other.
    """
    played, in_flight = measures.episodes, min(plan.concurrency, episodes)
    if not played:
        return None
    if in_flight <= played or played == 1 or measures.alone is None or measures.together is None:
        return measures.playing / played * episodes
    cost = max(0.0, (measures.together - measures.alone) / (played - 1))
    latency = max(0.0, measures.alone - cost)
    return episodes * (latency / in_flight + cost)


def _job_seconds(plan: Plan, measures: Measures) -> float | None:
    """Average seconds of a training job, if the share of trained episodes stays that of the played ones."""
    if measures.job is None or not measures.trained_episodes or not measures.collected:
        return None
    share = measures.trained_episodes / measures.collected
    if plan.curriculum.enabled:
        share *= sum(included_fraction(plan.curriculum, epoch) for epoch in range(1, plan.epochs + 1)) / plan.epochs
    trained = share * plan.episodes_per_epoch
    return measures.job - measures.job_training + measures.job_training / measures.trained_episodes * trained


def _checkpoint_bytes(plan: Plan, measures: Measures, keep: KeepConfig | None) -> int | None:
    """Bytes of the checkpoints kept at the end, and of the one that is being written."""
    if measures.weights is None:
        return None
    keeps_best = plan.validations > 0
    versions, optimizers = kept_versions(keep or KeepConfig(), plan.epochs, plan.staleness, keeps_best=keeps_best)
    return versions * measures.weights + optimizers * measures.optimizer


def checkpoint_sizes(folder: Path) -> tuple[int | None, int]:
    """The bytes of the newest checkpoint's weights, None if there is no checkpoint, and of its optimizer state."""
    checkpoints = sorted(folder.glob("step_*"))
    if not checkpoints:
        return None, 0
    files = {path.name: path.stat().st_size for path in checkpoints[-1].iterdir() if path.is_file()}
    optimizer = files.pop(OPTIMIZER_FILE, 0)
    return sum(files.values()), optimizer


def about_disk(plan: Plan, estimated: Estimate, output_dir: Path) -> Iterator[Finding]:
    needed, free = estimated.disk_bytes, estimated.disk_free_bytes
    if needed is not None and needed > free:
        folder = nearest_folder(output_dir)
        what = f"the run needs {readable_bytes(needed)}, and {readable_bytes(free)} are free in {folder}"
        where, change = f"finetuning.output_dir, {plan.adapter}.keep", "free space, use another disk, or keep fewer"
        yield Finding("disk_space", Severity.STOPS_LEARNING, what, where, f"{change} checkpoints")

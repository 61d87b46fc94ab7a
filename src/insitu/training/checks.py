"""Checks of a run: components fit together, the weights sampled are those trained, and training moves them.

`PolicyTraffic` counts what an epoch's episodes left behind: completions that belong to none of them, and code that
still runs.
"""

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from insitu.advantages.estimator import NEUTRAL_SAMPLING, truncation
from insitu.builder import Builder
from insitu.collect.collector import outside_completions, stray_completions
from insitu.config import Config
from insitu.disk.files import readable_bytes
from insitu.errors import BackendError, ConfigError, InsituError, PluginError, TrajectoryError
from insitu.preferences.pairs import ALIKE
from insitu.runs import files
from insitu.schemas.episodes import Episode
from insitu.schemas.finetuning import PolicyEndpoint, TrainingJobStatus, TrajectoryCollection
from insitu.schemas.kinds import EXECUTOR, LLM
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
from insitu.training.metrics import trained_calls
from insitu.training.report import counts

EPISODES, PAIRS = "episodes", "preference pairs"
_COMPLETED, _STARTED = "vllm:request_success_total", "process_start_time_seconds"
_TIMEOUT = aiohttp.ClientTimeout(total=10)


def check_components(trainer: Trainer, method: str, *, computes_advantages: bool) -> None:
    """Raises ConfigError or PluginError unless the trainer's builder and adapter give it what it needs.

    `method` is the `training.method` of adapters that have several. Some backends ignore the advantages that a trainer
    computes.
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
        check_group_size(trainer, builder)
        check_budget(trainer, builder)
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
    if not isinstance(trainer, GroupTrainer) or getattr(trainer.trajectory_builder, "stored", None) is not None:
        return
    for name in sorted(config.trained_llms()):
        block = config.block(LLM, name)
        values = {key: getattr(block, key, None) for key in ("temperature", *NEUTRAL_SAMPLING)}
        values["logprobs_processed"] = getattr(trainer.trainer_adapter.adapter_config, "trains_shaped_logits", False)
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
        if getattr(config.block(LLM, name), "token_bridge", False) and not getattr(adapter, "bridges_tokens", False):
            raise ConfigError(
                f"llms.{name}.token_bridge is true, but the backend of {adapter.type} does not continue from tokens; "
                "allowed: false, or an adapter of _type: insitu_trainer_adapter"
            )


def check_group_size(trainer: Trainer, builder: TrajectoryBuilder) -> None:
    """Raises ConfigError if a trainer that compares the episodes of a row gets one of each."""
    if not isinstance(trainer, GroupTrainer) or not isinstance(builder, EpisodesBuilder) or builder.stored is not None:
        return
    if getattr(trainer.trainer_config, "teacher", None) is not None:
        return
    builder.check_group_size(trainer.trainer_config.type)


def check_budget(trainer: Trainer, builder: EpisodesBuilder) -> None:
    """Raises ConfigError if a rollout budget would leave out episodes from which the trainer learns."""
    if builder.budget is None:
        return
    key, name = f"{builder.block}.budget", trainer.trainer_config.type
    if not isinstance(trainer, GroupTrainer):
        raise ConfigError(f"{key}: {name} also trains rows whose episodes have equal rewards; leave it out")
    if (credit := getattr(trainer.trainer_config, "credit", "episode")) != "episode":
        raise ConfigError(
            f"{key} compares the rewards of episodes, but {name} has credit: {credit}, which compares those of steps; "
            "leave it out, or set credit: episode"
        )


async def check_versions(trainer: Trainer, config: Config, staleness: int, *, pinned: bool) -> None:
    """Raises ConfigError unless earlier weights are kept, and served if they are `pinned`."""
    if not staleness:
        return
    name = config.finetuning.trainer
    key, adapter = f"trainers.{name}.staleness is {staleness}", trainer.trainer_adapter
    endpoint = await adapter.policy_endpoint()
    if endpoint is None or endpoint.version is None:
        raise ConfigError(f"{key}, but {adapter.adapter_config.type} does not say which version it serves; allowed: 0")
    if pinned and not endpoint.names_versions:
        raise ConfigError(
            f"{key} and versions is pinned, but {adapter.adapter_config.type} serves the newest weights only here: set "
            f"trainers.{name}.versions to latest (such a run does not repeat), or staleness to 0"
        )
    try:
        await adapter.prepare_staleness(staleness, pinned=pinned)
    except ConfigError as error:
        raise ConfigError(f"{key}, but {error}") from None


def check_staleness(trainer: Trainer, config: Config, staleness: int) -> None:
    """Raises ConfigError unless episodes are planned, earlier weights are kept, and the loss takes them into account.

    Called before an earlier run is moved aside.
    """
    if not staleness:
        return
    key, adapter = f"trainers.{config.finetuning.trainer}.staleness is {staleness}", trainer.trainer_adapter
    builder = trainer.trajectory_builder
    if not isinstance(builder, EpisodesBuilder) or builder.stored is not None or builder.episodes_per_epoch is None:
        raise ConfigError(f"{key}, but {builder.trajectory_builder_config.type} does not plan its episodes; allowed: 0")
    keep = getattr(adapter.adapter_config, "keep", None)
    if keep is not None and "last" in keep.model_fields_set and keep.last < staleness + 2:
        problem = f"trainer_adapters keep.last is {keep.last}; allowed: from {staleness + 2}, or leave it out"
        raise ConfigError(f"{key}, but {problem}")
    settings = adapter.training_settings()
    if settings.get("method", "grpo") == "grpo" and settings.get("old_logprobs", "recomputed") == "recomputed":
        corrections = ("truncated_importance", "token_mask", "sequence_mask")
        if all(settings.get(name) is None for name in corrections):
            raise ConfigError(
                f"{key}, so episodes are of earlier weights: set training.old_logprobs to rollout, or one of "
                f"{', '.join(corrections)}"
            )


async def check_beside(adapter: TrainerAdapter) -> None:
    """Raises ConfigError unless a version can be sampled from while the next one is trained and served."""
    endpoint = await adapter.policy_endpoint()
    if endpoint is None or not endpoint.names_versions:
        served = f"{adapter.adapter_config.type} serves the newest weights only"
        raise ConfigError(f"finetuning.validation.beside is true, but {served}; allowed: false")


def check_sampled(
    trainer: Trainer, trained: TrajectoryCollection, served: PolicyEndpoint | None, oldest: int | None = None
) -> None:
    """Raises BackendError if a call to train on was not sampled from the served policy version, and its weights.

    Versions from the `oldest` on are allowed, if it is given. If a call reports no version, its requested model name
    must match; without digests, weights are not compared.
    Recorded episodes may be of any version, except for a GroupTrainer, for which TrajectoryError is raised.
    """
    stored = getattr(trainer.trajectory_builder, "stored", None)
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


class Leftovers(NamedTuple):
    """What an epoch left over; the field names are keys of `training_metrics.jsonl`."""

    stray_completions: int
    """Requested through the run's own clients, but outside every episode and evaluator."""
    unknown_completions: int | None
    """Sampled by the policy's server, but not requested by the run; None if it does not count them or was restarted, if
    a process that runs episodes has ended, or if a plugin's builder runs episodes without reporting them."""
    abandoned_attempts: int
    """Attempts at episodes whose code ignored its cancellation."""


class _Totals(NamedTuple):
    """What a run has counted so far."""

    stray: int
    outside: int
    """Completions that were requested from the policy's server outside every episode, by evaluators too."""
    lost_workers: int


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


class PolicyTraffic:
    """Finds completions of the policy that belong to no episode: `start`, `add` each episode, `finish`.

    The server counts what it has completed in a metric of vLLM, which `insitu backend` has too. The run knows what its
    episodes and evaluators have requested. The rest was requested by an agent's own client, or by another program.
    """

    def __init__(self, builder: Builder, served: PolicyEndpoint | None) -> None:
        self._builder = builder
        self._served = served
        self._server = _normal(served.base_url) if served is not None else ""
        self._episodes: Counter[str] = Counter()
        self._abandoned = 0
        self._has_episodes = False
        self._before = _Totals(0, 0, 0)
        self._completed_before: tuple[int, float | None] | None = None

    async def start(self) -> None:
        self._before, self._completed_before = self._totals(), await self._completed()

    def add(self, episode: Episode) -> None:
        self._has_episodes = True
        for url, count in episode.requested.items():
            self._episodes[_normal(url)] += count
        self._abandoned += episode.abandoned_attempts

    async def finish(self) -> tuple[Leftovers, str | None]:
        """The counts, and a warning if the server has completed more than was requested."""
        completed, before, after = await self._completed(), self._before, self._totals()
        leftovers = Leftovers(after.stray - before.stray, None, self._abandoned)
        is_complete = self._has_episodes and after.lost_workers == before.lost_workers
        if not is_complete or completed is None or self._completed_before is None:
            return leftovers, None
        (count, started), (count_before, started_before) = completed, self._completed_before
        if started != started_before:  # another process
            return leftovers, None
        requested = self._episodes[self._server] + after.outside - before.outside
        unknown = max(0, count - count_before - requested)  # less than 0: a failed request may not have been completed
        warning = (
            f"{unknown} of the {count - count_before} completions of {self._server} were not requested by an episode: "
            "they are not recorded and not trained. Does the agent use its own client, or does another program use the "
            "server?"
        )
        return leftovers._replace(unknown_completions=unknown), warning if unknown else None

    def _totals(self) -> _Totals:
        outside = outside_completions(self._builder, self._server) if self._served is not None else 0
        lost = [executor.lost_workers for executor in self._builder.built(EXECUTOR)]
        return _Totals(stray_completions(self._builder).total(), outside, sum(lost))

    async def _completed(self) -> tuple[int, float | None] | None:
        """The completions of the server, and when its process was started, in seconds of its clock, if it says so.

        None if it has no metrics, or no server responds.
        """
        if self._served is None:
            return None
        headers = {"Authorization": f"Bearer {self._served.api_key}"}
        try:
            async with aiohttp.ClientSession(timeout=_TIMEOUT, headers=headers) as session:
                async with session.get(self._server.removesuffix("/v1") + "/metrics") as response:
                    text = await response.text() if response.status == 200 else ""
            samples = [line.rpartition(" ") for line in text.splitlines()]
            completed = [float(value) for name, _, value in samples if name.startswith(_COMPLETED)]
            started = [float(value) for name, _, value in samples if name == _STARTED]
            return (int(sum(completed)), started[0] if started else None) if completed else None
        except (TimeoutError, aiohttp.ClientError, ValueError):
            return None


def _normal(url: str) -> str:
    return url.rstrip("/")

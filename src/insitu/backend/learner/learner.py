"""Trains a policy: a job's rows to the next version's weights, ready to serve, and their checkpoint."""

import functools
import logging
import math
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from insitu.backend.compute import Parked, in_another_thread
from insitu.backend.inference.sampler import WeightVersion
from insitu.backend.learner.batches import ALONE, Ranks, Row, TrainsJobs
from insitu.backend.learner.checkpoints import TrainState, Workers, check_optimizer, open_optimizer, write_checkpoint
from insitu.backend.learner.code import NO_CODE, CodeFolder
from insitu.backend.learner.logprobs import LogprobComputer, PolicyForward
from insitu.backend.learner.optimizer_loop import Progress, reference_module
from insitu.backend.learner.parts import PartedRows, train_parts, wait_until_closed
from insitu.backend.learner.policy import ReferenceWeights, build_policy, check_finite, loaded_adapter, same_adapters
from insitu.backend.model import LoadedModel, load_model
from insitu.disk.files import delete_drafts, delete_folder
from insitu.disk.model_files import (
    OPTIMIZER_FILE,
    JobRecord,
    TrainingRecord,
    check_model,
    expired,
    read_record,
    saved_checkpoints,
)
from insitu.errors import BackendError, RequestRefused
from insitu.schemas.parts import load_named
from insitu.schemas.training_jobs import LoRASettings, Retention, TrainingSettings

logger = logging.getLogger(__name__)

Training = Generator[Progress | Parked | None, None, "TrainedVersion"]


class TrainedVersion(NamedTuple):
    """The result of a job; `module` is a frozen copy in the served dtype, None if it is in the checkpoint only."""

    module: nn.Module | None
    version: int
    checkpoint: Path
    job: JobRecord

    @property
    def metrics(self) -> dict[str, Any]:
        return self.job.metrics


@dataclass(eq=False)
class Learner:
    """Owns the weights of one policy; `version` counts the finished jobs, 0 is the loaded model.

    The latest checkpoint (before the first: the loaded model) is the authoritative state. A failed or canceled job
    drops the state in memory, and the next job restores it from there. The loaded module is never modified.
    `default_lora` applies to jobs without a `lora` block. With a `group`, other processes train; `ranks` are set in
    those. This process samples if `served_here`. `code` holds the functions that jobs may choose.
    """

    loaded: LoadedModel
    output_dir: Path
    policy_name: str = ""
    default_lora: LoRASettings | None = None
    ranks: Ranks = ALONE
    group: TrainsJobs | None = None
    served_here: bool = True
    code: CodeFolder = NO_CODE

    def __post_init__(self) -> None:
        self.version = 0
        self.kept_optimizer_states = Retention().optimizer
        self._folder = self.output_dir / "checkpoints"
        self._checkpoints: dict[int, Path] = {}
        self.earlier_jobs: list[TrainedVersion] = []
        """The jobs of earlier processes, without their weights."""
        self._state: TrainState | None = None
        self._compute_logprobs = LogprobComputer(self.loaded)
        self._workers = Workers(self.loaded, self.ranks)
        source = str(path.resolve()) if (path := Path(self.loaded.source)).exists() else self.loaded.source
        self._origin = read_record(source) or TrainingRecord(step=0, version=0, started_from=source)
        self._origin_folder = Path(source)
        self._lora = self._origin.lora or loaded_adapter(self.loaded.module)
        self._lora_fixed = self._lora is not None or self._origin.step > 0

    @property
    def lora(self) -> LoRASettings | None:
        """Adapters being trained, or those of the first job if it has no `lora` block."""
        return self.adapters(None)

    @property
    def versions(self) -> list[int]:
        """Versions that can be served, oldest first; 0 is always one of them."""
        return [0, *self._checkpoints]

    def deleted_folder(self, version: int | None) -> Path | None:
        """Where the checkpoint of a version was before it was deleted; None if it was not."""
        deleted = version is not None and 0 < version <= self.version and version not in self._checkpoints
        return self._folder_of(version) if deleted and version is not None else None

    def _folder_of(self, version: int) -> Path:
        return self._folder / f"step_{self._origin.step + version:06d}"

    def resume(self) -> None:
        """Continues from the checkpoints that earlier processes made of the loaded model, if there are any.

        Raises RequestRefused if they are of another training: its numbers would continue with other weights. The loaded
        model may be one of them; then it must be the latest that does not continue it.
        """
        self.ranks.on_first(lambda: delete_drafts(self._folder))
        origin, among_them = self._origin, self._origin_folder.parent == self._folder.resolve()
        for folder, record in saved_checkpoints(self._folder):
            started_at = record.step - record.version
            if among_them and record.started_from == origin.started_from and record.step <= origin.step:
                continue
            if (record.started_from, started_at) != (origin.started_from, origin.step):
                problem = (
                    f"{folder} continues step {started_at} of the training of {record.started_from}, but the loaded "
                    f"model is step {origin.step} of {origin.started_from}"
                )
                advice = "load that model, or use another output_dir or name"
                raise RequestRefused(f"{problem}: {advice}", status=409, code="other_model")
            self.version = record.version
            self._checkpoints[record.version] = folder
            self._lora, self._lora_fixed = record.lora, True
            if record.job is not None:
                self.earlier_jobs.append(TrainedVersion(None, record.version, folder, record.job))
        if self.version:
            step = origin.step + self.version
            logger.warning("%s holds a training of this model: continuing from its step %d", self._folder, step)

    def delete_checkpoint(self, version: int) -> None:
        """Raises RequestRefused for the latest version, which training continues from, and OSError."""
        if version == self.version:
            problem = f"{version} is the latest step, which training continues from; it cannot be deleted"
            raise RequestRefused(problem, status=409, code="latest_step")
        folder = self._checkpoints[version]
        try:
            delete_folder(folder)
        finally:
            if not folder.exists():
                del self._checkpoints[version]
                logger.info("deleted %s", folder)

    def expired(self, keep: Retention) -> list[int]:
        """The versions that a retention policy deletes, oldest first."""
        return expired(self._checkpoints.keys(), keep)

    def check(self, settings: TrainingSettings) -> None:
        """Raises RequestRefused if the job's adapters differ from those being trained, or its code is not allowed."""
        if settings.code:
            self.code.check(settings)
        if self._lora_fixed and not same_adapters(settings.lora or self.default_lora, self._lora):
            allowed = self._lora.model_dump_json() if self._lora else "none (all weights)"
            problem = f"settings.lora differs from the adapters this backend trains; allowed: {allowed}"
            raise RequestRefused(problem, status=409, param="settings.lora", code="lora_fixed")

    def adapters(self, settings: TrainingSettings | None) -> LoRASettings | None:
        """The adapters that a job with these settings trains; None: all weights."""
        return self._lora if self._lora_fixed else (settings and settings.lora) or self.default_lora

    def verify(self, settings: TrainingSettings) -> None:
        """In the compute thread. Raises RequestRefused if no job with these settings can be trained."""
        self.check(settings)
        lora = self.adapters(settings)
        try:
            is_new = (lora is not None and not self._lora_fixed) or self.loaded.quantization is not None
            if settings.compile and self.group is not None:
                raise BackendError("compile is true, but several processes train; allowed: compile: false")
            if is_new or settings.gradient_checkpointing or settings.compile:
                build_policy(self.loaded, lora, settings.seed).prepare_layers(settings)
            reference_module(self.code, settings, self._references)
            load_named("methods", settings.method)(settings, [], [], self.loaded.max_length, self.code)
            self.code.function("schedule", settings.schedule)
            self.code.function("optimizer", settings.optimizer or "adamw")
            if self._state is None:  # else the next job continues from memory
                self._check_files(weights=False)
        except BackendError as error:
            raise RequestRefused(str(error), status=409, code="not_trainable") from error

    def run(
        self,
        settings: TrainingSettings,
        rows: Sequence[Row] | PartedRows,
        job_id: str = "",
        key: str | None = None,
        digest: str | None = None,
    ) -> Training:
        """Yields after every micro-batch, None while another thread writes the checkpoint, PARKED without new rows.

        Closing it early leaves weights and optimizer unchanged. Without rows the next version has the same weights. The
        checkpoint records the job's id, key and digest.
        """
        parts = rows if isinstance(rows, PartedRows) else PartedRows.whole([rows])
        steps = self._train(settings, parts, JobRecord(id=job_id, key=key, digest=digest))
        try:
            while True:
                with self._workers.threads():
                    try:
                        progress = next(steps)
                    except StopIteration as end:
                        return end.value
                yield progress
        except BaseException:  # an interrupted job leaves invalid state, except while it is open; re-raised
            self._state = self._state if not parts.closed else None
            raise

    def load_version(self, version: int) -> nn.Module:
        """The weights of a version, from its checkpoint, frozen and in the served dtype."""
        if version == 0:
            return self.loaded.module
        folder = self.folder(version)
        check_model(folder)
        return self._read_weights(folder, self._lora)

    def _read_weights(self, folder: Path, lora: LoRASettings | None) -> nn.Module:
        policy = build_policy(self.loaded, lora, seed=0)
        policy.load(folder)
        module = policy.served()
        assert module is not None  # this is no rank
        return module

    def folder(self, version: int) -> Path:
        """The files of a version above 0. Raises RequestRefused if there are none."""
        if version not in self._checkpoints:
            available = ", ".join(map(str, self.versions))
            reason = "was deleted" if 0 < version < self.version else "does not exist"
            problem = f"version {version} {reason}; available: {available}"
            raise RequestRefused(problem, status=404, param="model", code="model_not_found")
        return self._checkpoints[version]

    def _train(self, settings: TrainingSettings, rows: PartedRows, job: JobRecord) -> Training:
        self.check(settings)
        settings = settings.model_copy(update={"lora": self.adapters(settings)})
        trained = yield from (self._train_here if self.group is None else self._train_in_group)(settings, rows, job)
        # Nothing below can fail: version, checkpoint and weights change together.
        self.version += 1
        self._checkpoints[self.version] = trained.checkpoint
        self._lora, self._lora_fixed = settings.lora, True
        if self.ranks is ALONE:  # otherwise the backend deletes them
            for version in self._checkpoints:
                if version <= self.version - self.kept_optimizer_states:
                    (self._checkpoints[version] / OPTIMIZER_FILE).unlink(missing_ok=True)
        loss, seconds = trained.metrics.get("loss", math.nan), trained.metrics["seconds"]
        logger.info("version %d: loss %.4g, %d rows, %.1f s", self.version, loss, len(rows), seconds)
        return trained

    def _train_in_group(self, settings: TrainingSettings, rows: PartedRows, job: JobRecord) -> Training:
        """The ranks hold the weights being trained; those to serve in this process are read from their checkpoint."""
        assert self.group is not None
        every = yield from wait_until_closed(rows)
        job = job.model_copy(update={"digest": job.digest or rows.hexdigest})
        done = yield from self.group.train(self._folder.parent, self.policy_name, settings, every, job)
        checkpoint = self._folder_of(self.version + 1)
        module = self._read_weights(checkpoint, settings.lora) if self.served_here else None
        return TrainedVersion(module, self.version + 1, checkpoint, job.model_copy(update={"metrics": done["metrics"]}))

    def _train_here(self, settings: TrainingSettings, parts: PartedRows, job: JobRecord) -> Training:
        start = time.monotonic()
        if self._state is not None and self._state.optimizer_part != settings.optimizer:
            self._state = None
        if self._state is None:
            yield from in_another_thread(self._check_files, lambda _: None)
            self._state = self._restore(settings)
        state = self._state
        state.policy.prepare_layers(settings)
        for group in state.optimizer.param_groups:
            if "decays" in group:  # AdamW
                decay = settings.weight_decay if group["decays"] else 0.0
                group.update(betas=settings.betas, weight_decay=decay)
        metrics = yield from train_parts(state, settings, parts)
        rows = parts.rows
        served = state.policy.served(self.ranks)
        self.ranks.on_first(lambda: check_finite(served, settings, rows))
        metrics |= {
            "tokens": sum(len(row.positions) for row in rows),
            "rows": len(rows),
            "episodes": len({row.episode or index for index, row in enumerate(rows)}),
            "seconds": time.monotonic() - max(start, parts.closed_at or start),
        }
        if pairs := {row.pair for row in rows} - {""}:
            metrics["pairs"] = len(pairs)
        job = job.model_copy(update={"metrics": metrics, "digest": job.digest or parts.hexdigest})
        save = functools.partial(self._save_checkpoint, state, served, job)
        checkpoint = (yield from in_another_thread(save, delete_folder)) if self.ranks is ALONE else save()
        return TrainedVersion(served, self.version + 1, checkpoint, job)

    def _restore(self, settings: TrainingSettings) -> TrainState:
        """The state of the latest checkpoint, or of the loaded model."""
        policy = build_policy(self.loaded, settings.lora, settings.seed)
        folder = self._checkpoints.get(self.version)
        if folder is not None:
            policy.load(folder)
        with open_optimizer(folder or self._origin_folder) as saved:
            if not saved.names and self._origin.step + self.version:
                logger.warning("%s has no optimizer state: the optimizer starts anew", folder or self._origin_folder)
            masters = {name: f"weights.{name}" for name in policy.trainable}
            policy.overwrite((name, saved.read(key)) for name, key in masters.items() if key in saved.names)
            forward = PolicyForward(policy.module, self._compute_logprobs)
            self.ranks.shard(policy.module, forward)
            make = self.code.function("optimizer", settings.optimizer or "adamw")
            state = TrainState(
                *(policy, forward, make(policy.trainable, settings), self._compute_logprobs, self._workers),
                reference=lambda: self._references,
                ranks=self.ranks,
                code=self.code,
                optimizer_part=settings.optimizer,
            )
            prefix, trainable = state.optimizer_prefix, policy.trainable
            for name, keys in saved.states(prefix.removesuffix("/")).items():
                if (parameter := trainable.get(name)) is not None:
                    entries = {key: saved.read_part(f"{prefix}{key}.{name}", parameter) for key in keys}
                    state.optimizer.state[parameter] = entries
        return state

    def _check_files(self, *, weights: bool = True) -> None:
        """Raises BackendError if the next job cannot continue from the files; hashing weights takes seconds per GB.

        The optimizer state of the loaded model may have been deleted; the latest checkpoint always has one.
        """
        latest = self._checkpoints.get(self.version)
        if weights and latest is not None:
            check_model(latest)
        check_optimizer(latest or self._origin_folder, required=latest is not None)

    @property
    def _references(self) -> ReferenceWeights:
        return ReferenceWeights(lambda: self._initial, self.version, self.load_version)

    @functools.cached_property
    def _initial(self) -> nn.Module:
        """The weights that training started from, possibly in an earlier process."""
        if self._origin.step == 0:
            return self.loaded.module
        dtype = str(self.loaded.dtype).removeprefix("torch.")
        return load_model(self._origin.started_from, str(self.loaded.device), dtype, self.loaded.quantization).module

    def _save_checkpoint(self, state: TrainState, served: nn.Module | None, job: JobRecord) -> Path:
        version, lora = self.version + 1, state.policy.lora
        target, step, source = self._folder_of(version), self._origin.step + version, self._origin.started_from
        record = TrainingRecord(step=step, version=version, started_from=source, lora=lora, job=job)
        write_checkpoint(target, state, served, record, self._tokenizer_files)
        return target

    @functools.cached_property
    def _tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer's files, which are the same in every checkpoint."""
        with tempfile.TemporaryDirectory() as folder:
            self.loaded.tokenizer.save_pretrained(folder)
            return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


class Learners:
    """One learner per policy; all start from the loaded model. `default` is the backend's own policy, named ""."""

    def __init__(self, default: Learner) -> None:
        """Resumes the learner. Raises BackendError if it has trained all weights and adapters are to be trained."""
        default.resume()
        if default.default_lora is not None and default.lora is None:
            rank, source = default.default_lora.rank, default.loaded.source
            raise BackendError(f"lora_rank is {rank}, but all weights of {source} were trained so far")
        self.default = default
        self._learners = {"": default}

    def open(self, policy_name: str, folder: Path) -> Learner:
        """The policy's learner, resumed from the checkpoints in `folder`. Runs in the compute thread."""
        if policy_name not in self._learners:
            learner = replace(self.default, output_dir=folder, policy_name=policy_name)
            learner.resume()
            self._learners[policy_name] = learner
        return self._learners[policy_name]

    def close(self, policy_name: str) -> None:
        del self._learners[policy_name]

    def load_version(self, weights: WeightVersion) -> nn.Module:
        """Raises RequestRefused if the policy or the version does not exist."""
        learner, version = self._find(weights)
        return learner.load_version(version)

    def folder(self, weights: WeightVersion) -> Path:
        """The files of weights; those of version 0 are the loaded model's. Raises like `load_version`."""
        learner, version = self._find(weights)
        return learner.folder(version) if version else Path(learner.loaded.source)

    def _find(self, weights: WeightVersion) -> tuple[Learner, int]:
        learner = self._learners.get(weights.policy)
        if learner is None:
            problem = f"the model {weights.policy} was deleted"
            raise RequestRefused(problem, status=404, param="model", code="model_not_found")
        return learner, learner.version if weights.version is None else weights.version

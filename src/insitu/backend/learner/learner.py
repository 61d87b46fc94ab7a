"""Trains a policy: a job's rows to the next version's weights, ready to serve, and their checkpoint or logged job."""

import functools
import logging
import math
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import nn

from insitu.backend.compute import Parked, in_another_thread
from insitu.backend.inference.sampler import WeightVersion
from insitu.backend.learner.batches import ALONE, Ranks, Row, TrainsJobs
from insitu.backend.learner.checkpoints import TrainState, make_optimizer
from insitu.backend.learner.code import NO_CODE, CodeFolder, scheduled
from insitu.backend.learner.optimizer_loop import Progress, reference_module
from insitu.backend.learner.parts import PartedRows, train_parts, wait_until_closed
from insitu.backend.learner.policy import build_policy, check_finite, fingerprint, loaded_adapter, same_adapters
from insitu.backend.learner.snapshots import Snapshots
from insitu.backend.learner.states import States
from insitu.backend.learner.versions import Versions
from insitu.backend.model import LoadedModel
from insitu.disk.files import delete_folder
from insitu.disk.model_files import OPTIMIZER_FILE, JobRecord, TrainingRecord, check_model, read_record, weights_digest
from insitu.errors import BackendError, RequestRefused
from insitu.schemas.lora import LoRASettings
from insitu.schemas.parts import Part, load_named
from insitu.schemas.training_jobs import Retention, TrainingSettings

logger = logging.getLogger(__name__)

Training = Generator[Progress | Parked | None, None, "TrainedVersion"]


class TrainedVersion(NamedTuple):
    """The result of a job; `module` is a frozen copy in the served dtype, None if it is in the checkpoint only.

    If the job is `logged`, the checkpoint may not be there.
    """

    module: nn.Module | None
    version: int
    checkpoint: Path
    job: JobRecord
    logged: bool = False

    @property
    def metrics(self) -> dict[str, Any]:
        return self.job.metrics


@dataclass(eq=False)
class Learner:
    """Owns the weights of one policy; `version` counts the finished jobs, 0 is the loaded model.

    The latest version on disk (before the first: the loaded model) is the authoritative state. A failed or canceled job
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
        self.keep = Retention(snapshots=1)
        self.earlier_jobs: list[TrainedVersion] = []
        """The jobs of earlier processes, without their weights."""
        self._state: TrainState | None = None
        self._is_training = False
        self._served = WeakValueDictionary[int, nn.Module]()
        """The versions of logged jobs that are still in memory."""
        source = str(path.resolve()) if (path := Path(self.loaded.source)).exists() else self.loaded.source
        self._origin = read_record(source) or TrainingRecord(step=0, version=0, started_from=source)
        self._origin_folder = folder = Path(source)
        self._tokens = self._origin.tokens
        self.saved = Versions(self.output_dir, self._origin.step)
        self.snapshots = Snapshots(self.loaded, self.saved)
        parts = self.loaded, self.saved, self._origin, folder, self.load_version, self.ranks, self.code
        self._states = States(*parts)
        self._lora = self._origin.lora or loaded_adapter(self.loaded.module)
        self._lora_fixed = self._lora is not None or self._origin.step > 0

    @property
    def version(self) -> int:
        return self.saved.latest

    @property
    def lora(self) -> LoRASettings | None:
        """Adapters being trained, or those of the first job if it has no `lora` block."""
        return self.adapters(None)

    @property
    def versions(self) -> list[int]:
        """Versions that can be served, oldest first; 0 is always one of them."""
        return self.saved.numbers

    def resume(self) -> None:
        """Continues from what earlier processes have trained of the loaded model, if they have.

        Raises RequestRefused if they are of another training: its numbers would continue with other weights. The loaded
        model may be one of them; then it must be the latest that does not continue it.
        """
        self.ranks.on_first(self.saved.delete_drafts)
        origin, among_them = self._origin, self._origin_folder.parent == self.saved.folder.resolve()
        for folder, record in self.saved.saved():
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
            checkpoint = folder if folder.parent == self.saved.folder else None
            is_snapshot = checkpoint is not None and (record.sha256 is None or OPTIMIZER_FILE in record.sha256)
            self.saved.add(record.version, checkpoint=checkpoint, is_snapshot=is_snapshot)
            self._lora, self._lora_fixed, self._tokens = record.lora, True, record.tokens
            if record.job is not None and not self.saved.was_deleted(record.version):
                folder = self.saved.folder_of(record.version)
                self.earlier_jobs.append(TrainedVersion(None, record.version, folder, record.job))
        if self.version:
            step = origin.step + self.version
            logger.warning("%s holds a training of this model: continuing from its step %d", self.saved.folder, step)

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
            own_optimizer = isinstance(settings.optimizer, Part)
            if is_new or settings.gradient_checkpointing or settings.compile or own_optimizer:
                policy = build_policy(self.loaded, lora, settings.seed)
                policy.prepare_layers(settings)
                if own_optimizer:
                    make_optimizer(self.code, policy.trainable, settings)
            reference_module(self.code, settings, self._states.references)
            load_named("methods", settings.method)(settings, [], [], self.loaded.max_length, self.code)
            schedule = self.code.function("schedule", settings.schedule)
            for part in (0.0, 0.5, 1.0):
                scheduled(schedule, part)
            if self._state is None:  # else the next job continues from memory
                self._states.check_files(weights=False)
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
        checkpoint, or the logged job, has the job's id, key and digest.
        """
        self._is_training = True
        parts = rows if isinstance(rows, PartedRows) else PartedRows.whole([rows])
        steps = self._train(settings, parts, JobRecord(id=job_id, key=key, digest=digest))
        try:
            while True:
                with self._states.workers.threads():
                    try:
                        progress = next(steps)
                    except StopIteration as end:
                        return end.value
                yield progress
        except BaseException as error:  # re-raised; its state is invalid, or of the job's settings
            self._state = None
            if isinstance(error, torch.OutOfMemoryError):
                problem = f"the GPU has too little memory for this job; {_takes_less(settings)} take less"
                raise BackendError(f"{problem}: {error}") from error
            raise
        finally:
            self._is_training = False

    def load_version(self, version: int) -> nn.Module:
        """The weights of a version, frozen and in the served dtype: from its checkpoint, or trained again."""
        if version == 0:
            return self.loaded.module
        folder = self.folder(version)
        if not folder.is_dir() and self.saved.job_of(version).is_dir():
            return self._served.get(version) or self._rebuild(version)
        check_model(folder)
        return self._read_weights(folder, self._lora)

    def _rebuild(self, version: int) -> nn.Module:
        steps = self._states.after(version)
        with self._states.workers.threads():
            try:
                while True:
                    next(steps)
            except StopIteration as end:
                state: TrainState = end.value
        if version == self.version and self._state is None:
            self._state = state  # the next job continues from it
        module = state.policy.served()
        assert module is not None  # this is no rank
        self._served[version] = module
        return module

    def write(self, version: int, *, complete: bool = False) -> "Future[None] | None":
        """Begins to write the checkpoint of a version in another thread; None if it is on disk.

        `complete`: with optimizer state, if it is the latest and no job is in progress. Raises RequestRefused if there
        is no such version, and BackendError if it must be trained again and cannot be.
        """
        folder = self.folder(version)
        if (writing := self.saved.writing(version)) is not None:
            return writing
        state = self._state if complete and version == self.version and not self._is_training else None
        if folder.is_dir():
            if state is None or self.saved.is_snapshot(version):
                return None
            module = self._served.get(version) or state.policy.served()
            assert module is not None  # this is no rank
            delete_folder(folder)  # the weights alone; the job is still logged
        else:
            module = self.load_version(version)
        return self.snapshots.begin(version, module, self._lora, state)

    def digest(self, version: int) -> str | None:
        """A digest of the weights of a version above 0; None if it is unknown. Raises RequestRefused like `folder`."""
        folder = self.folder(version)
        return weights_digest(folder if folder.is_dir() else self.saved.job_of(version))

    def _read_weights(self, folder: Path, lora: LoRASettings | None) -> nn.Module:
        policy = build_policy(self.loaded, lora, seed=0)
        policy.load(folder)
        module = policy.served()
        assert module is not None  # this is no rank
        return module

    def folder(self, version: int) -> Path:
        """Where the checkpoint of a version above 0 is, if it has one. Raises RequestRefused if it cannot be served."""
        if version not in self.versions[1:]:
            reason = "was deleted" if self.saved.was_deleted(version) else "does not exist"
            problem = f"version {version} {reason}; available: {', '.join(map(str, self.versions))}"
            raise RequestRefused(problem, status=404, param="model", code="model_not_found")
        return self.saved.folder_of(version)

    def _train(self, settings: TrainingSettings, rows: PartedRows, job: JobRecord) -> Training:
        self.check(settings)
        settings = settings.model_copy(update={"lora": self.adapters(settings)})
        trained = yield from (self._train_here if self.group is None else self._train_in_group)(settings, rows, job)
        # Nothing below can fail: version, checkpoint and weights change together.
        checkpoint = trained.checkpoint if not trained.logged else None
        self.saved.add(trained.version, checkpoint=checkpoint, is_snapshot=checkpoint is not None)
        self._lora, self._lora_fixed = settings.lora, True
        before, self._tokens = self._tokens, self._tokens + trained.metrics.get("computed_tokens", 0)
        if trained.logged and trained.module is not None:
            self._served[self.version] = trained.module
            if self.snapshots.is_due(self.version, self.keep, before, self._tokens):
                self.snapshots.begin(self.version, trained.module, self._lora, self._state)
        if self.ranks is ALONE:  # otherwise the backend deletes them
            self.saved.prune(self.keep.optimizer)
        loss, seconds = trained.metrics.get("loss", math.nan), trained.metrics["seconds"]
        logger.info("version %d: loss %.4g, %d rows, %.1f s", self.version, loss, len(rows), seconds)
        return trained

    def _train_in_group(self, settings: TrainingSettings, rows: PartedRows, job: JobRecord) -> Training:
        """The ranks hold the weights being trained; those to serve in this process are read from their checkpoint."""
        assert self.group is not None
        every = yield from wait_until_closed(rows)
        job = job.model_copy(update={"digest": job.digest or rows.hexdigest})
        done = yield from self.group.train(self.output_dir, self.policy_name, self.version, settings, every, job)
        checkpoint = self.saved.folder_of(self.version + 1)
        try:
            module = self._read_weights(checkpoint, settings.lora) if self.served_here else None
        except BaseException:  # re-raised; the ranks continue from the versions that are there
            if checkpoint.exists():
                delete_folder(checkpoint)
            raise
        return TrainedVersion(module, self.version + 1, checkpoint, job.model_copy(update={"metrics": done["metrics"]}))

    def _train_here(self, settings: TrainingSettings, parts: PartedRows, job: JobRecord) -> Training:
        start = time.monotonic()
        if self._state is None:
            yield from in_another_thread(self._states.check_files, lambda _: None)
            self._state = yield from self._states.after(self.version, settings)
        state = self._state
        state.prepare(settings)
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
        logged = served is not None and self.served_here and self.snapshots.log_jobs(settings, self.keep)
        if served is not None and logged:
            job = job.model_copy(update={"weights": fingerprint(served)})
            save = functools.partial(self.saved.log, self._record(job, settings.lora), settings, parts)
        else:
            save = functools.partial(self.snapshots.write, state, served, self._record(job, settings.lora))
        (yield from in_another_thread(save, delete_folder)) if self.ranks is ALONE else save()
        return TrainedVersion(served, self.version + 1, self.saved.folder_of(self.version + 1), job, logged)

    def _record(self, job: JobRecord, lora: LoRASettings | None) -> TrainingRecord:
        """Training record of the next version."""
        version, source = self.version + 1, self._origin.started_from
        tokens = self._tokens + job.metrics.get("computed_tokens", 0)
        step = self._origin.step + version
        return TrainingRecord(step=step, version=version, started_from=source, lora=lora, job=job, tokens=tokens)


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

    def digest(self, weights: WeightVersion) -> str | None:
        """A digest of weights; of version 0, only if it is a checkpoint. Raises like `load_version`."""
        learner, version = self._find(weights)
        return learner.digest(version) if version else weights_digest(Path(learner.loaded.source))

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


def _takes_less(settings: TrainingSettings) -> str:
    """The keys of a file that lower the memory of a job."""
    keys = [f"training.micro_batch_tokens below {settings.micro_batch_tokens}", "a lower kv_memory"]
    if not settings.gradient_checkpointing:
        keys.append("training.gradient_checkpointing")
    if settings.lora is None:
        keys.append("training.lora")
    return ", ".join(keys[:-1]) + " and " + keys[-1]

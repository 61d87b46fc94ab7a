"""Turns a job's rows into the next policy version: its weights, ready to serve, and a checkpoint of them."""

import logging
import math
import shutil
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from insitu.backend.model import LoadedModel, load_model
from insitu.backend.training.batches import Row
from insitu.backend.training.checkpoints import (
    TrainingRecord,
    atomically,
    forget_optimizer,
    read_optimizer,
    read_record,
    saved_checkpoints,
    write_training,
)
from insitu.backend.training.policy import held_adapter, make_policy
from insitu.backend.training.scoring import Scorer
from insitu.backend.training.updates import Progress, Trainer, Updates
from insitu.backend.training.workers import Workers
from insitu.errors import JobFailed, RequestRefused
from insitu.schemas.training_jobs import LoRASettings, TrainingSettings

logger = logging.getLogger(__name__)

KEPT_OPTIMIZERS = 2
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class Trained(NamedTuple):
    """What a job has led to; `module` is frozen, of the served type, and not the learner's own."""

    module: nn.Module
    version: int
    checkpoint: Path
    metrics: dict[str, Any]


class Learner:
    """Owns the weights under training; `version` counts the jobs it has finished, 0 being the model as loaded.

    Its truth is the newest checkpoint (or, before the first, the loaded model): a job that fails or is cancelled just
    drops what is in memory, and the next one starts from there again. The loaded module is never changed.
    `lineage` is the name of these weights where there are several lines of them; `lora` the adapters of jobs that ask
    for none.
    """

    def __init__(
        self, loaded: LoadedModel, output_dir: Path, lineage: str = "", lora: LoRASettings | None = None
    ) -> None:
        self.version = 0
        self.loaded = loaded
        self.lineage = lineage
        self._folder = output_dir / "checkpoints"
        self._checkpoints: dict[int, Path] = {}
        self._trainer: Trainer | None = None
        self._scorer = Scorer(loaded)
        self._workers = Workers(loaded)
        self._reference: nn.Module | None = None
        source = str(Path(loaded.source).resolve()) if Path(loaded.source).exists() else loaded.source
        self._origin = read_record(source) or TrainingRecord(step=0, version=0, started_from=source)
        self._origin_folder = Path(source)
        self._usual_lora = lora
        self._lora = self._origin.lora or held_adapter(loaded.module)
        self._lora_fixed = self._lora is not None or self._origin.step > 0
        self._tokenizer_files: dict[str, bytes] = {}

    @property
    def lora(self) -> LoRASettings | None:
        """The adapters under training, or to be trained by a job that asks for none."""
        return self._lora if self._lora_fixed else self._usual_lora

    @property
    def versions(self) -> list[int]:
        """Those that can be served, oldest first; the loaded model is always one of them."""
        return [0, *self._checkpoints]

    def resume(self) -> None:
        """Go on from the checkpoints of an earlier process. Raises RequestRefused where other weights began them."""
        for folder, record in saved_checkpoints(self._folder).items():
            if (record.started_from, record.step - record.version) != (self._origin.started_from, self._origin.step):
                raise RequestRefused(
                    f"{folder} began with {record.started_from} (step {record.step - record.version}), but this "
                    f"backend has {self._origin.started_from} (step {self._origin.step}); give the model another name",
                    status=409,
                    code="other_model",
                )
            self.version = record.version
            self._checkpoints[record.version] = folder
            self._lora, self._lora_fixed = record.lora, True

    def forget(self, version: int) -> None:
        """Delete a version's checkpoint. Raises RequestRefused for the newest, which training goes on from."""
        if version == self.version:
            raise RequestRefused(
                f"{version} is the latest step, which training goes on from; it cannot be deleted",
                status=409,
                code="latest_step",
            )
        shutil.rmtree(self._checkpoints.pop(version))

    def check(self, settings: TrainingSettings) -> None:
        """Raises RequestRefused where the job asks for other adapters than those under training."""
        if self._lora_fixed and not _same(settings.lora or self._usual_lora, self._lora):
            held = self._lora.model_dump_json() if self._lora else "none (all weights)"
            raise RequestRefused(
                f"settings.lora differs from what this backend trains; allowed here: {held}",
                status=409,
                param="settings.lora",
                code="lora_fixed",
            )

    def run(self, settings: TrainingSettings, rows: Sequence[Row]) -> Generator[Progress, None, Trained]:
        """Yields after every micro-batch; closing it early leaves weights and optimiser as they were before.

        Without rows the next version is the same weights again.
        """
        steps = self._job(settings, rows)
        try:
            while True:
                with self._workers.threads():
                    try:
                        progress = next(steps)
                    except StopIteration as end:
                        return end.value
                yield progress
        except BaseException:  # what a broken-off job left in memory is not gone on with; raised again
            self._trainer = None
            raise

    def module_at(self, version: int) -> nn.Module:
        """The weights of an earlier version, from its checkpoint, frozen and of the served type."""
        if version == 0:
            return self.loaded.module
        if version not in self._checkpoints:
            raise RequestRefused(
                f"there is no version {version}; there are {', '.join(map(str, (0, *self._checkpoints)))}",
                status=404,
                param="model",
                code="model_not_found",
            )
        policy = make_policy(self.loaded, self._lora, seed=0)
        policy.load(self._checkpoints[version])
        return policy.served()

    def _job(self, settings: TrainingSettings, rows: Sequence[Row]) -> Generator[Progress, None, Trained]:
        began = time.monotonic()
        self.check(settings)
        if self._trainer is None:
            self._trainer = self._restore(settings)
        trainer = self._trainer
        for group in trainer.optimizer.param_groups:
            group["betas"] = settings.betas
            group["weight_decay"] = settings.weight_decay if group["decays"] else 0.0
        metrics = (yield from Updates(trainer, settings, rows).run()) if rows else {}
        served = trainer.policy.served()
        _refuse_broken(served, settings)
        checkpoint = self._write(trainer, served)
        # From here on nothing can fail: version, checkpoint and weights change together.
        self.version += 1
        self._checkpoints[self.version] = checkpoint
        self._lora, self._lora_fixed = trainer.policy.lora, True
        for version in self._checkpoints:
            if version <= self.version - KEPT_OPTIMIZERS:
                forget_optimizer(self._checkpoints[version])
        metrics |= {
            "tokens": sum(len(row.positions) for row in rows),
            "rows": len(rows),
            "episodes": len({row.episode or index for index, row in enumerate(rows)}),
            "seconds": time.monotonic() - began,
        }
        loss = metrics.get("loss", math.nan)
        logger.info("version %d: loss %.4g, %d rows, %.1f s", self.version, loss, len(rows), metrics["seconds"])
        return Trained(served, self.version, checkpoint, metrics)

    def _restore(self, settings: TrainingSettings) -> Trainer:
        """The trainer as the newest checkpoint holds it, or as the loaded model begins."""
        lora = self._lora if self._lora_fixed else settings.lora or self._usual_lora
        policy = make_policy(self.loaded, lora, settings.seed)
        folder = self._checkpoints.get(self.version)
        if folder is not None:
            policy.load(folder)
        saved = read_optimizer(folder or self._origin_folder)
        policy.overwrite((name, saved[f"weights.{name}"]) for name in policy.trained if f"weights.{name}" in saved)
        optimizer = _adamw(policy.trained, self.loaded.device)
        for name, parameter in policy.trained.items():
            if f"exp_avg.{name}" in saved:
                optimizer.state[parameter] = {key: saved[f"{key}.{name}"].to(parameter.device) for key in MOMENTS}
        return Trainer(policy, optimizer, self._scorer, self._workers, self._starting_weights)

    def _starting_weights(self) -> nn.Module:
        """Those that training began with, in whichever process that was."""
        if self._reference is None:
            began = self._origin.started_from
            same = self._origin.step == 0
            dtype = str(self.loaded.dtype).removeprefix("torch.")
            self._reference = self.loaded.module if same else load_model(began, str(self.loaded.device), dtype).module
        return self._reference

    def _write(self, trainer: Trainer, served: nn.Module) -> Path:
        step = self._origin.step + self.version + 1
        target = self._folder / f"step_{step:06d}"
        record = TrainingRecord(
            step=step, version=self.version + 1, started_from=self._origin.started_from, lora=trainer.policy.lora
        )
        state: dict[str, Tensor] = {}
        for name, parameter in trainer.policy.trained.items():
            state |= {f"{key}.{name}": value for key, value in trainer.optimizer.state[parameter].items()}
            if self.loaded.dtype != torch.float32:
                state[f"weights.{name}"] = parameter.detach()
        with atomically(target) as draft:
            trainer.policy.save(draft, served)
            for name, content in self._tokenizer().items():
                (draft / name).write_bytes(content)
            write_training(draft, record, state)
        return target

    def _tokenizer(self) -> dict[str, bytes]:
        """Its files, which are the same in every checkpoint."""
        if not self._tokenizer_files:
            with tempfile.TemporaryDirectory() as folder:
                self.loaded.tokenizer.save_pretrained(folder)
                self._tokenizer_files = {
                    path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()
                }
        return self._tokenizer_files


def _adamw(parameters: dict[str, nn.Parameter], device: torch.device) -> torch.optim.AdamW:
    """Weight decay is for matrices; norms and biases go without."""
    matrices = [p for p in parameters.values() if p.ndim > 1]
    vectors = [p for p in parameters.values() if p.ndim <= 1]
    groups = [{"params": matrices, "decays": True}, {"params": vectors, "decays": False}]
    return torch.optim.AdamW([group for group in groups if group["params"]], fused=device.type in ("cpu", "cuda"))


def _refuse_broken(module: nn.Module, settings: TrainingSettings) -> None:
    """The last step's weights have computed no loss yet; raises JobFailed where they could not."""
    for name, parameter in module.named_parameters():
        if not parameter.isfinite().all():
            raise JobFailed(
                f"{name} is not finite after the last optimiser step (learning_rate {settings.learning_rate:g}); the "
                "job is undone, and the weights are those before it"
            )


def _same(asked: LoRASettings | None, held: LoRASettings | None) -> bool:
    if asked is None or held is None:
        return asked is held
    if isinstance(asked.target_modules, str) and not isinstance(held.target_modules, str):
        # The adapter's file lists by name what `all-linear` stood for.
        asked = asked.model_copy(update={"target_modules": held.target_modules})
    return _in_order(asked) == _in_order(held)


def _in_order(lora: LoRASettings) -> LoRASettings:
    targets = lora.target_modules
    return lora if isinstance(targets, str) else lora.model_copy(update={"target_modules": sorted(targets)})

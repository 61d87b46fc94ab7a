"""Validations of a run: history, report and best version."""

import asyncio
import math
import time
from contextlib import nullcontext
from typing import Any

from insitu.builder import Builder
from insitu.collect.datasets import find_dataset, load_dataset
from insitu.collect.evaluation import held_out_config, validate
from insitu.config.resolved import block_digest
from insitu.errors import ConfigError, InsituError, Stalled
from insitu.runs.files import BEST, VALIDATION_SCORES, VALIDATIONS
from insitu.runs.forms import RowScores
from insitu.runs.reader import RunReader
from insitu.runs.records import EarlyStop, RunProgress, best_validation, checkpoints_of
from insitu.schemas.finetuning import FinetuneConfig, ValidationConfig
from insitu.schemas.kinds import EVALUATOR
from insitu.training.interfaces import RowAdapter, TrainerAdapter
from insitu.training.run import Run
from insitu.training.schedule import pinned
from insitu.wire.endings import end_tasks


class Validation:
    """Validates with the run's components; writes `validation_history.json`, `best.json`, `validation_scores.jsonl`.

    `checkpoints` maps policy versions to checkpoint folders. With `beside`, the validation after an epoch runs while
    the next epoch is collected and trained, whose end waits for it: what follows from a score, as that the run ends
    early, or which checkpoint is kept, does not depend on which of them takes longer.
    """

    def __init__(self, run_config: FinetuneConfig, builder: Builder, adapter: TrainerAdapter, run: Run) -> None:
        assert run_config.validation is not None
        self.config: ValidationConfig = run_config.validation
        self.history = run.validations
        self.due: int | None = None
        """The epoch whose weights are to be validated beside the next one."""
        self.unbeaten: dict[str, Any] | None = None
        """The best record, if the patience with those after it is exhausted: the run ends."""
        self.checkpoints = checkpoints_of(run.jobs)
        self._run_config = run_config
        self._builder = builder
        self._adapter = adapter
        self._report, self._store = run.report, run.store
        self._digest: str | None = None  # of the rows of the latest validation
        self._beside: asyncio.Task[dict[str, Any]] | None = None
        self._has_failed = False  # the validation of the weights that the run continues with

    @classmethod
    async def opened(
        cls, run_config: FinetuneConfig, builder: Builder, adapter: TrainerAdapter, run: Run
    ) -> "Validation":
        """The validations of a run, with those of an earlier process. Raises ConfigError."""
        validation = cls(run_config, builder, adapter, run)
        if validation.config.beside:
            endpoint = await adapter.policy_endpoint()
            if endpoint is None or not endpoint.names_versions:
                served = f"{adapter.adapter_config.type} serves the newest weights only"
                raise ConfigError(f"finetuning.validation.beside is true, but {served}; allowed: false")
        if run.continues:
            await asyncio.to_thread(validation.restore, run.progress)
        return validation

    @property
    def best(self) -> dict[str, Any] | None:
        """The record of the highest score so far."""
        return best_validation(self.history)

    def _read_rows(self) -> tuple[int, str, str]:
        """The number of episodes of a validation, and the digests of their dataset and of what scores them."""
        moved = self._builder.moved
        held_out = held_out_config(self._builder.config, moved)
        rows = load_dataset(held_out, self.config.dataset, moved=moved)
        dataset = find_dataset(held_out, self.config.dataset, moved)
        digest = dataset.record()["sha256"]
        if self._digest not in (None, digest):
            self._report.note(f"the held-out dataset {dataset} has changed: its scores before are of other rows")
        self._digest = digest
        reward = self._run_config.reward_function
        scoring = block_digest(held_out, EVALUATOR.section, reward.evaluator) if reward is not None else ""
        return len(rows) * self.config.reps, self._digest, scoring

    def restore(self, progress: RunProgress) -> None:
        """Reads what an earlier process has recorded."""
        for record in RunReader(self._store.path).validations():
            is_failed = "error" in record
            self._has_failed |= is_failed and record["epoch"] == progress.epoch
            last = progress.epoch - 1 if is_failed else progress.epoch + 1  # a failure is repeated with these weights
            if record["epoch"] > last:
                continue
            if not is_failed:
                record["ci95"] = [math.nan if bound is None else bound for bound in record["ci95"]]
            self.history.append(record)
        self._keep_best(progress.epoch - 1 if progress.due_validation == progress.epoch else math.inf)

    async def begin(self, progress: RunProgress, *, can_overlap: bool) -> None:
        """Validates the weights that the run starts from, or those it has if it is validated only now.

        So are those whose validation beside the next epoch an earlier process has not completed. `can_overlap`: they
        are the latest of an epoch, and another one follows.
        """
        is_first = not self.history and (progress.epoch or not progress.warmed_up)  # after a warm-up they are not
        is_due = progress.due_validation == progress.epoch
        if not is_first and not is_due and not self._has_failed:
            return
        if self.config.beside and can_overlap:
            self.due = progress.epoch
            self.start(progress.policy_version)
        else:
            version = progress.policy_version  # a later one may be served, which is not recorded yet
            endpoint = await self._adapter.policy_endpoint()
            is_other = endpoint is not None and endpoint.names_versions and endpoint.version != version
            await self.run(progress.epoch, version if is_due or is_other else None)
            self._keep_best()

    async def after(self, epoch: int, *, is_last: bool) -> float:
        """Validates after an epoch if that is due, unless the next epoch is to run beside it.

        Waits for the validation beside this epoch before. Returns the seconds that the epoch has waited for both.
        """
        started, waited = time.perf_counter(), self._beside is not None
        if self._beside is not None:
            with nullcontext() if self._beside.done() else self._report.phase(f"epoch {epoch}: waiting for validation"):
                await self._beside
            self._beside = None
            self._keep_best(epoch - 1)
            self.unbeaten = None if is_last else self._unbeaten(epoch - 1)
        is_last = is_last or self.unbeaten is not None
        is_due = is_last or epoch % self.config.interval == 0
        self.due = epoch if is_due and self.config.beside and not is_last else None
        if is_due and self.due is None:
            waited = True
            await self.run(epoch)
            self._keep_best()
            if not is_last:
                self.unbeaten = self._unbeaten(epoch)
        return time.perf_counter() - started if waited else 0.0

    def end_early(self, epoch: int, epochs: int, untrained: int) -> EarlyStop:
        """Reports and records that the run ends after an epoch; `untrained` episodes were collected ahead."""
        best, patience = self.unbeaten or {}, self.config.patience or 0
        text = f"the held-out score has not improved on {best['avg_reward']:.3f} of epoch {best['epoch']}"
        text += f" in {patience} validation{'s' * (patience > 1)}: the run ends after epoch {epoch} of {epochs}"
        if untrained:
            text += f"; {untrained} episodes that were collected ahead are not trained"
        self._report.note(text)
        details = {"patience": patience, "best_epoch": best["epoch"], "untrained_episodes": untrained}
        self._store.record_event("ended early", epoch=epoch, **details)
        return EarlyStop(epochs=epochs, patience=patience)

    def start(self, version: int | None) -> None:
        """Validates the epoch that is `due`, which served this version, beside what follows."""
        if self.due is not None:
            self._beside = asyncio.create_task(self.run(self.due, version), name=f"validate epoch {self.due}")

    async def cancel(self) -> None:
        """Ends the validation in progress, which `begin` of another process repeats."""
        if self._beside is not None:
            await end_tasks(self._beside)

    async def run(self, epoch: int, beside: int | None = None) -> dict[str, Any]:
        """Validates (epoch 0: before the first step). The record of a failure has `error` and no reward.

        `beside` is the version to validate while newer ones may be trained and served; None: the newest. An epoch is
        validated once, also if the run was continued in between.
        """
        for record in self.history:
            if record["epoch"] == epoch:
                return record
        started = time.perf_counter()
        endpoint = await self._adapter.policy_endpoint()
        if endpoint is not None and beside is not None:
            endpoint = pinned(endpoint, beside)
        version = endpoint.version if endpoint is not None else None
        sampled = (endpoint.base_url, endpoint.model) if endpoint is not None and beside is not None else None
        episodes, digest, scoring = await asyncio.to_thread(self._read_rows)
        scores: dict[str, list[float]] = {}
        advance = (lambda _: self._report.advance()) if sampled is None else None
        with self._report.phase(f"epoch {epoch}: validating", episodes) if sampled is None else nullcontext():
            try:
                request, builder = self._builder.request, self._builder
                record = await validate(self._run_config, request, epoch, builder, advance, scores.update, sampled)
            except (ConfigError, Stalled):
                raise
            except InsituError as error:
                record = {"epoch": epoch, "error": f"{type(error).__name__}: {error}", "dropped": {}}
        reward = self._run_config.reward_function
        evaluator = reward.name if reward is not None else ""
        record = {"epoch": epoch, "policy_version": version, **record, "seconds": time.perf_counter() - started}
        record |= {"scored_by": f"{evaluator} {scoring}, rows {digest[:16]}"} if "error" not in record else {}
        record |= {"beside": True} if sampled is not None else {}
        self.history.append(record)
        self._report.validation(record)
        recorded = scores and {(line.epoch, line.policy_version) for line in RunReader(self._store.path).scores()}
        if scores and (epoch, version) not in recorded:  # else the process was killed before it wrote the history
            line = RowScores(epoch, version, evaluator, digest, scores, scoring)
            self._store.append(VALIDATION_SCORES, [line._asdict()])  # for tests that pair the rows of two versions
            self._store.sync()
        if self.best is record:
            checkpoint = self.checkpoints.get(version) or RunReader(self._store.path).warmed_up(version)
            self._store.write(BEST, {**record, "checkpoint": self._store.relative(checkpoint)})
        self._store.write(VALIDATIONS, self.history)  # NaN as null: one example has no interval
        return record

    def _until(self, epoch: float) -> list[dict[str, Any]]:
        return [record for record in self.history if record["epoch"] <= epoch]

    def _keep_best(self, epoch: float = math.inf) -> None:
        """Has the adapter keep the checkpoint of the best version up to an epoch."""
        best = best_validation(self._until(epoch))
        if best is not None and isinstance(self._adapter, RowAdapter):
            self._adapter.note_best(best["policy_version"])

    def _unbeaten(self, epoch: int) -> dict[str, Any] | None:
        """The best record up to an epoch, if as many as the patience have come after it."""
        patience, history = self.config.patience, self._until(epoch)
        exhausted = patience is not None and validations_since_best(history) >= patience
        return best_validation(history) if exhausted else None


def validations_since_best(history: list[dict[str, Any]]) -> int:
    """How many validations with a score came after the best."""
    best = best_validation(history)
    return 0 if best is None else sum("error" not in r and r["epoch"] > best["epoch"] for r in history)

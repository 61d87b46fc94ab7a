"""Validations of a run: history, report and best version."""

import asyncio
import math
import time
from typing import Any

from insitu.builder import Builder
from insitu.collect.datasets import load_dataset
from insitu.collect.evaluation import held_out_config, validate
from insitu.errors import ConfigError, InsituError, Stalled
from insitu.runs.files import BEST, VALIDATION_SCORES, VALIDATIONS
from insitu.runs.reader import RowScores, RunReader
from insitu.runs.records import RunProgress
from insitu.runs.replay import held_out_record
from insitu.runs.store import RunStore
from insitu.schemas.finetuning import FinetuneConfig, ValidationConfig
from insitu.training.interfaces import RowAdapter, TrainerAdapter
from insitu.training.report import Report


class Validation:
    """Validates with the run's components; writes `validation_history.json`, `best.json`, `validation_scores.jsonl`.

    `checkpoints` maps policy versions to checkpoint folders.
    """

    def __init__(
        self, run_config: FinetuneConfig, builder: Builder, adapter: TrainerAdapter, report: Report, store: RunStore
    ) -> None:
        assert run_config.validation is not None
        self.config: ValidationConfig = run_config.validation
        self.history: list[dict[str, Any]] = []
        self.best: dict[str, Any] | None = None
        """The record of the highest score so far."""
        self.checkpoints: dict[int | None, str | None] = {}
        self._run_config = run_config
        self._builder = builder
        self._adapter = adapter
        self._report = report
        self._store = store
        self._digest: str | None = None  # of the rows of the latest validation

    def _read_rows(self) -> tuple[int, str]:
        """The number of episodes of a validation, and the digest of the file with its rows."""
        moved = self._builder.moved
        held_out = held_out_config(self._builder.config, moved)
        rows = load_dataset(held_out, self.config.dataset, moved=moved)
        file = held_out_record(self._builder.config, moved) or {}
        if self._digest not in (None, file["sha256"]):
            self._report.note(f"the held-out dataset {file['file']} has changed: its scores before are of other rows")
        self._digest = file["sha256"]
        return len(rows) * self.config.reps, self._digest

    def restore(self, progress: RunProgress) -> None:
        """Reads what an earlier process has recorded."""
        for metadata in (job.metadata or {} for job in progress.jobs):
            self.checkpoints[metadata.get("policy_version")] = metadata.get("checkpoint")
        for record in RunReader(self._store.path).validations():
            if record["epoch"] > progress.epoch + ("error" not in record):  # a failure is repeated
                continue
            if "error" not in record:
                record["ci95"] = [math.nan if bound is None else bound for bound in record["ci95"]]
            self.history.append(record)
            self._note_best(record)

    async def begin(self, progress: RunProgress) -> None:
        """Validates the weights that the run starts from, or those it has if it is validated only now."""
        if not self.history and (progress.epoch or not progress.warmed_up):  # after a warm-up these are not the first
            await self.run(progress.epoch)

    async def run(self, epoch: int) -> dict[str, Any]:
        """Validates (epoch 0: before the first step). The record of a failure has `error` and no reward.

        An epoch is validated once, also if the run was continued in between.
        """
        for record in self.history:
            if record["epoch"] == epoch:
                return record
        started = time.perf_counter()
        endpoint = await self._adapter.policy_endpoint()
        version = endpoint.version if endpoint is not None else None
        episodes, digest = await asyncio.to_thread(self._read_rows)
        scores: dict[str, list[float]] = {}
        with self._report.phase(f"epoch {epoch}: validating", episodes):
            try:
                advance, request = lambda _: self._report.advance(), self._builder.request
                record = await validate(self._run_config, request, epoch, self._builder, advance, scores.update)
            except (ConfigError, Stalled):
                raise
            except InsituError as error:
                record = {"epoch": epoch, "error": f"{type(error).__name__}: {error}", "dropped": {}}
        record = {"epoch": epoch, "policy_version": version, **record, "seconds": time.perf_counter() - started}
        self.history.append(record)
        self._report.validation(record)
        if scores:
            reward = self._run_config.reward_function
            line = RowScores(epoch, version, reward.name if reward is not None else "", digest, scores)
            self._store.append(VALIDATION_SCORES, [line._asdict()])  # for tests that pair the rows of two versions
            self._store.sync()
        if self._note_best(record):
            checkpoint = self.checkpoints.get(version) or RunReader(self._store.path).warmed_up(version)
            checkpoint = self._store.relative(checkpoint)
            self._store.write(BEST, {**record, "checkpoint": checkpoint})
        self._store.write(VALIDATIONS, [{k: _json(v) for k, v in r.items()} for r in self.history])
        return record

    def _note_best(self, record: dict[str, Any]) -> bool:
        """Whether it is the best so far; the adapter then keeps its checkpoint."""
        if "error" in record or (self.best is not None and record["avg_reward"] <= self.best["avg_reward"]):
            return False
        self.best = record
        if isinstance(self._adapter, RowAdapter):
            self._adapter.note_best(record["policy_version"])
        return True


def _json(value: Any) -> Any:
    """NaN as null: the interval of a single example has no bounds."""
    if isinstance(value, list):
        return [_json(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

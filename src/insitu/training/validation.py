"""Validations of a run: history, report and best version."""

import asyncio
import math
import time
from typing import Any

from insitu.builder import Builder
from insitu.errors import ConfigError, InsituError
from insitu.evaluation.datasets import load_dataset
from insitu.evaluation.validation import held_out_config, validate
from insitu.files import load_json
from insitu.interfaces import TrainerAdapter
from insitu.schemas.finetuning import FinetuneConfig, ValidationConfig
from insitu.training.progress import RunProgress
from insitu.training.report import Report
from insitu.training.store import RunStore


class Validation:
    """Validates with the run's components and writes `validation_history.json` and `best.json`.

    `checkpoints` maps policy versions to checkpoint folders.
    """

    def __init__(
        self, run_config: FinetuneConfig, builder: Builder, adapter: TrainerAdapter, report: Report, store: RunStore
    ) -> None:
        assert run_config.validation is not None
        self.config: ValidationConfig = run_config.validation
        self.history: list[dict[str, Any]] = []
        self.best: dict[str, Any] | None = None
        self.checkpoints: dict[int | None, str | None] = {}
        self._run_config = run_config
        self._builder = builder
        self._adapter = adapter
        self._report = report
        self._store = store
        self._episodes: int | None = None
        """The number of episodes of each validation, once it is known."""

    def _count_episodes(self) -> int:
        held_out = held_out_config(self._builder.config)
        return len(load_dataset(held_out, self.config.dataset)) * self.config.reps

    def restore(self, progress: RunProgress) -> None:
        """Reads what an earlier process has recorded."""
        for metadata in (job.metadata or {} for job in progress.jobs):
            self.checkpoints[metadata.get("policy_version")] = metadata.get("checkpoint")
        path = self._store.folder / "validation_history.json"
        recorded = load_json(path.read_bytes()) if path.is_file() else []
        for record in recorded:
            if record["epoch"] > progress.epoch + ("error" not in record):  # a failure is repeated
                continue
            if "error" not in record:
                record["ci95"] = [math.nan if bound is None else bound for bound in record["ci95"]]
            self.history.append(record)
            self._note_best(record)

    async def run(self, epoch: int) -> dict[str, Any]:
        """Validates (epoch 0: before the first step). The record of a failure has `error` and no reward.

        An epoch is validated once, also if the run was continued in between.
        """
        known = next((record for record in self.history if record["epoch"] == epoch), None)
        if known is not None:
            return known
        started = time.perf_counter()
        endpoint = await self._adapter.policy_endpoint()
        version = endpoint.version if endpoint is not None else None
        if self._episodes is None:
            self._episodes = await asyncio.to_thread(self._count_episodes)
        self._report.begin(f"epoch {epoch}: validating", self._episodes)
        try:
            record = await validate(self._run_config, epoch, self._builder, lambda _: self._report.advance())
        except ConfigError:
            raise
        except InsituError as error:
            record = {"epoch": epoch, "error": f"{type(error).__name__}: {error}", "dropped": {}}
        finally:
            self._report.end()
        record = {"epoch": epoch, "policy_version": version, **record, "seconds": time.perf_counter() - started}
        self.history.append(record)
        self._report.validation(record)
        if self._note_best(record):
            checkpoint = self._store.relative(self.checkpoints.get(version))
            self._store.write("best.json", {**record, "checkpoint": checkpoint})
        self._store.write("validation_history.json", [{k: _json(v) for k, v in r.items()} for r in self.history])
        return record

    def _note_best(self, record: dict[str, Any]) -> bool:
        """Whether it is the best so far."""
        if "error" in record or (self.best is not None and record["avg_reward"] <= self.best["avg_reward"]):
            return False
        self.best = record
        return True


def _json(value: Any) -> Any:
    """NaN as null: the interval of a single example has no bounds."""
    if isinstance(value, list):
        return [_json(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""Validations of a run: history, report and best version."""

import asyncio
import math
import time
from typing import Any

from insitu.builder import Builder
from insitu.errors import ConfigError, InsituError
from insitu.evaluation.datasets import load_dataset
from insitu.evaluation.validation import held_out_config, validate
from insitu.interfaces import TrainerAdapter
from insitu.schemas.finetuning import FinetuneConfig, ValidationConfig
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

    async def run(self, epoch: int) -> dict[str, Any]:
        """Validates (epoch 0: before the first step). The record of a failure has `error` and no reward."""
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
        if "error" not in record and (self.best is None or record["avg_reward"] > self.best["avg_reward"]):
            self.best = record
            checkpoint = self._store.relative(self.checkpoints.get(version))
            self._store.write("best.json", {**record, "checkpoint": checkpoint})
        self._store.write("validation_history.json", [{k: _json(v) for k, v in r.items()} for r in self.history])
        return record


def _json(value: Any) -> Any:
    """NaN as null: the interval of a single example has no bounds."""
    if isinstance(value, list):
        return [_json(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""Held-out evaluation inside a run: the same episodes each time, the model as it is now, and which version was best."""

import logging
import math
import time
from typing import Any

from insitu.builder import Builder
from insitu.config import Config, load_config
from insitu.errors import ConfigError, InsituError
from insitu.evaluation.run import EvaluationRun
from insitu.evaluation.shared import share
from insitu.interfaces import TrainerAdapter, validation_metrics
from insitu.schemas.evaluation import EvaluationRunConfig
from insitu.schemas.finetuning import FinetuneConfig, ValidationConfig
from insitu.training.report import Report
from insitu.training.store import RunStore

logger = logging.getLogger(__name__)


def held_out_config(config: Config) -> Config:
    """What validation runs: the file itself, or the one that `finetuning.validation.config_file` names."""
    validation = config.finetuning.validation
    if validation is None or validation.config_file is None:
        return config
    return load_config(config.find_path(validation.config_file, "finetuning.validation.config_file"))


class Validation:
    """Runs the held-out dataset on the run's own components and keeps `validation_history.json` and `best.json`.

    `checkpoints` says which folder holds the weights of which policy version.
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
        self._loaded = builder.config
        self._adapter = adapter
        self._report = report
        self._store = store

    async def run(self, epoch: int) -> dict[str, Any]:
        """One validation, recorded; one that fails has `error` and no reward. 0 is before the first step."""
        started = time.perf_counter()
        endpoint = await self._adapter.policy_endpoint()
        version = endpoint.version if endpoint is not None else None
        try:
            record = await self._evaluate(epoch)
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
            self._store.write("best.json", {**record, "checkpoint": self.checkpoints.get(version)})
        self._store.write("validation_history.json", [{k: _json(v) for k, v in r.items()} for r in self.history])
        return record

    async def _evaluate(self, epoch: int) -> dict[str, Any]:
        given = self._run_config.run_configuration
        options = given.model_dump(include={"result_json_path", "endpoint", "endpoint_timeout"}) if given else {}
        asked = EvaluationRunConfig(
            config_file=held_out_config(self._loaded),
            dataset=self.config.dataset,
            reps=self.config.reps,
            write_output=False,
            **options,
        )
        run = EvaluationRun(asked, on_episode=lambda _: self._report.advance(), training=False)
        self._report.begin(f"epoch {epoch}: validating", None)
        with share(self._loaded, self._builder):
            output = await run.run_and_evaluate()
        return validation_metrics(output, self._run_config, epoch)


def _json(value: Any) -> Any:
    """JSON has no NaN: the interval of a single example has no ends."""
    if isinstance(value, list):
        return [_json(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""Supervised finetuning on demonstrations before the first epoch."""

import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from insitu.errors import ConfigError, InsituError, JobFailed
from insitu.files import read_line, whole_lines
from insitu.interfaces import TrainerAdapter
from insitu.schemas.episodes import TrainingRow
from insitu.schemas.finetuning import TrainingStatusEnum
from insitu.training.checks import new_version
from insitu.training.config import WarmUpConfig


def read_demonstrations(path: Path, key: str) -> list[TrainingRow]:
    """The dialogues of a file of JSON lines. Raises ConfigError naming `key`, the file and the line."""
    rows = []
    for number, line in whole_lines(path):
        try:
            record = read_line(path, number, line)
            rows.append(_Demonstration.model_validate(record).row())
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{key}: {path}, line {number}: {where + ': ' if where else ''}{first['msg']}") from None
        except InsituError as error:
            raise ConfigError(f"{key}: {error}") from error
    if not rows:
        raise ConfigError(f"{key}: {path} has no dialogues")
    return rows


class _Demonstration(BaseModel):
    model_config = ConfigDict(extra="ignore")

    messages: list[dict[str, Any]] = Field(min_length=2)
    tools: list[dict[str, Any]] | None = None

    def row(self) -> TrainingRow:
        return TrainingRow(**self.model_dump(exclude_none=True))


async def warm_up(
    adapter: TrainerAdapter, rows: list[TrainingRow], config: WarmUpConfig, run_id: str
) -> dict[str, Any]:
    """Trains on the dialogues and returns the job's metrics, version and checkpoint. Raises JobFailed."""
    started = time.perf_counter()
    before = await adapter.policy_endpoint()
    ref = await adapter.submit_rows(rows, run_id, "sft", config.overrides())
    status = await adapter.wait_until_complete(ref)
    if status.status is not TrainingStatusEnum.COMPLETED:
        raise JobFailed(f"the warm-up ended as {status.status.value}: {status.message or 'no reason given'}")
    version = new_version(0, before.version if before is not None else None, await adapter.policy_endpoint())
    metadata = status.metadata or {}
    kept = {key: metadata.get(key) for key in ("loss", "entropy", "tokens", "rows", "steps", "checkpoint")}
    return {**kept, "policy_version": version, "seconds": time.perf_counter() - started}

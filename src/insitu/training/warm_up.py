"""Supervised finetuning on demonstrations before the first epoch."""

import time
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, Json, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from insitu.builder import name_being_built
from insitu.config import Config
from insitu.disk.json_files import read_line
from insitu.errors import ConfigError, InsituError, RequestRefused, TrajectoryError, first_problem
from insitu.runs import files
from insitu.runs.records import RunProgress
from insitu.schemas.episodes import TrainingRow
from insitu.training.interfaces import RowAdapter, TrainerAdapter
from insitu.training.jobs import check_completed, new_version, wait_for_job
from insitu.training.run import Run


class WarmUpConfig(BaseModel):
    """Demonstrations to imitate before the first epoch."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)

    rows: Path
    """A file of JSON lines, each a dialogue: `{"messages": [...]}` as in OpenAI's API, with `tools` if it has some. The
    assistant's messages are trained, without those that have `weight: 0`."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the dialogues."""
    learning_rate: float | None = Field(default=None, ge=0)
    """Peak learning rate, which falls linearly to 0; none: that of the trainer adapter."""
    mini_batch_size: int | None = Field(default=None, ge=1)
    """Dialogues per optimizer step; none: that of the trainer adapter."""

    def overrides(self) -> dict[str, Any]:
        """The settings of the job that differ from the trainer adapter's."""
        own = self.model_dump(include={"learning_rate", "mini_batch_size"}, exclude_none=True)
        return {"method": "sft", "num_iterations": self.epochs, "schedule": "linear", "warmup": 0.0, **own}


def read_demonstrations(path: Path, key: str) -> list[TrainingRow]:
    """The dialogues of a file of JSON lines. Raises ConfigError naming `key`, the file and the line.

    The last line may end without a newline, unlike in the files of a run: editors and scripts often leave it out.
    """
    rows = []
    try:
        lines = [(number, line) for number, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip()]
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}") from error
    for number, line in lines:
        try:
            record = read_line(path, number, line)
            shown = _Demonstration.model_validate(record)
        except ValidationError as error:
            raise ConfigError(f"{key}: {path}, line {number}: {first_problem(error)}") from None
        except InsituError as error:
            raise ConfigError(f"{key}: {error}") from error
        rows.append(TrainingRow(messages=record["messages"], tools=shown.tools, trained_messages=shown.trained()))
    if not rows:
        raise ConfigError(f"{key}: {path} has no dialogues")
    return rows


class _Message(BaseModel):
    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    weight: float | None = None

    @model_validator(mode="after")
    def _check_answer(self) -> "_Message":
        if self.role == "assistant" and self.content is None and not self.tool_calls:
            raise PydanticCustomError("empty", "the assistant's message has neither content nor tool_calls")
        return self


class _Demonstration(BaseModel):
    messages: list[_Message] = Field(min_length=2)
    tools: list[dict[str, Any]] | Json[list[dict[str, Any]]] | None = None
    """Also as the JSON text that `insitu trajectories export` writes for TRL."""

    @field_validator("messages")
    @classmethod
    def _check_roles(cls, messages: list[_Message]) -> list[_Message]:
        if not any(message.role == "assistant" and message.weight != 0 for message in messages):
            roles = ", ".join(dict.fromkeys(message.role for message in messages))
            problem = "no message of the role assistant to train; roles: {roles}"
            raise PydanticCustomError("roles", problem, {"roles": roles})
        return messages

    def trained(self) -> list[int] | None:
        """Assistant messages without `weight: 0`, by which OpenAI's API marks those that are not trained."""
        if not any(message.weight == 0 for message in self.messages):
            return None
        return [k for k, message in enumerate(self.messages) if message.role == "assistant" and message.weight != 0]


class WarmUp(NamedTuple):
    """The job on demonstrations that a trainer's `sft` asks for."""

    config: WarmUpConfig
    rows: list[TrainingRow]

    def is_pending(self, progress: RunProgress) -> bool:
        return not progress.warmed_up

    async def run(self, run: Run, adapter: TrainerAdapter) -> None:
        """Trains the job and records its metrics. Raises JobFailed, or TrajectoryError if dialogues are refused."""
        if not isinstance(adapter, RowAdapter):
            raise ConfigError(f"trainer_adapters: {adapter.adapter_config.type} cannot train on given rows")
        started = time.perf_counter()
        with run.report.phase(f"warm-up on {len(self.rows)} dialogues"):
            try:
                ref = await adapter.submit_rows(self.rows, run.id, "sft", self.config.overrides())
            except RequestRefused as error:  # names the row: a dialogue that is too long, or that the template refuses
                raise TrajectoryError(f"the warm-up on {self.config.rows} was refused: {error}") from error
            status = await wait_for_job(adapter, ref, run.state.watchdog)
            check_completed("the warm-up", status)
            version = new_version(0, run.progress.policy_version, await adapter.policy_endpoint())
        keys, metadata = ("loss", "entropy", "tokens", "rows", "steps", "checkpoint"), status.metadata or {}
        result = {key: metadata.get(key) for key in keys}
        result |= {"policy_version": version, "seconds": time.perf_counter() - started}
        loss, seconds = f"{result['loss']:.4g}", f"{result['seconds']:.1f}"
        run.report.note(f"warm-up: {result['rows']} dialogues  loss {loss}  {seconds} s")
        run.store.write(files.WARM_UP, result | {"checkpoint": run.store.relative(result["checkpoint"])})
        await run.commit(warmed_up=True, policy_version=version)


def read_warm_up(config: Config, sft: WarmUpConfig) -> WarmUp:
    """The warm-up of the trainer that is being built. Raises ConfigError."""
    key = f"trainers.{name_being_built()}.sft.rows"
    return WarmUp(sft, read_demonstrations(config.find_path(sft.rows, key), key))

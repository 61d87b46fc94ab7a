"""The plain-data form of an attempt at an episode, for workflows that run in another process.

    {"input": "2 + 2", "row": {"id": 17, ...}, "key": ["r1", 3, "17", 2, 0],
     "options": {"seed": 7, "timeout": null, "training": ["player"], ...},
     "policy": {"base_url": "http://127.0.0.1:8700/v1", "model": "policy", "api_key": "none"}}

is answered with lines of JSON:

    {"step": {"parent_id": "root", "function_ancestry": {...}, "payload": {"event_type": "FUNCTION_START", ...}}}
    {"call": {"index": 0, "token_ids": [7, 2], "logprobs": [-0.1, -0.7], ...}}
    {"end": {"outcome": "ok", "output": "4", "seconds": 0.3, ...}}
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from insitu.collect.episodes import EpisodeOptions
from insitu.schemas.episodes import DropReason, Episode, EpisodeKey, ModelCall, Outcome
from insitu.schemas.evaluation import EvalInputItem
from insitu.schemas.finetuning import PolicyEndpoint
from insitu.schemas.steps import read_step
from insitu.wire.json_values import encode, has_lone_surrogate
from insitu.wire.redaction import redact_bytes

_NOT_SENT = ("retries", "result")  # applied by the sender, between and after attempts


class ServedPolicy(BaseModel):
    """Where the trainer's model is served, for the llms of `_type: policy` in this episode.

    `renamed`: the model's name changes with every version of the weights. The workers of an executor, but not workflow
    services, get `trained` (it is the model under training) and `base_model`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str
    model: str
    api_key: str = Field(default="none", repr=False)
    renamed: bool = False
    trained: bool = Field(default=False, exclude=True)
    base_model: str | None = Field(default=None, exclude=True)

    @classmethod
    def of(cls, endpoint: PolicyEndpoint) -> "ServedPolicy":
        now = endpoint.current_model
        name = endpoint.model if now is None else now()
        return cls(base_url=endpoint.base_url, model=name, api_key=endpoint.api_key, renamed=now is not None)


class EpisodeRequest(BaseModel):
    """One attempt at an episode; without `policy` the service serves its own model."""

    model_config = ConfigDict(extra="forbid")

    input: Any = None
    row: Any = None
    key: EpisodeKey
    options: EpisodeOptions = EpisodeOptions()
    policy: ServedPolicy | None = None

    @field_validator("key")
    @classmethod
    def _check_key(cls, key: EpisodeKey) -> EpisodeKey:
        if has_lone_surrogate(key.text()):
            raise ValueError("it has a lone surrogate, which no file can hold")
        return key


class EpisodeEnd(BaseModel):
    """The outcome of an attempt; its steps and calls have their own lines."""

    outcome: Outcome
    output: Any = None
    reason: DropReason | None = None
    error: str | None = None
    transient: bool = False
    seconds: float = 0.0
    step_rewards: list[float] | None = None
    rewarded_functions: list[str] = []
    failed_requests: dict[str, int] = {}
    requested: dict[str, int] = {}
    abandoned_attempts: int = 0


def read_call(record: dict[str, Any]) -> ModelCall:
    return ModelCall(**{**record, "functions": tuple(record["functions"])})


def request_fields(item: EvalInputItem, key: EpisodeKey, options: EpisodeOptions) -> dict[str, Any]:
    """The fields of an `EpisodeRequest`, without the policy."""
    sent = {field.name: getattr(options, field.name) for field in fields(options) if field.name not in _NOT_SENT}
    return {"input": item.input_obj, "row": item.full_dataset_entry, "key": key, "options": sent}


def line(**content: Any) -> bytes:
    """A line without the secrets of this process; raises ValueError if the content cannot be serialized."""
    return redact_bytes(encode(content)) + b"\n"


def end_lines(episode: Episode, transient: bool, unserializable: ValueError | None = None) -> Iterator[bytes]:
    """The calls and the end of an attempt; it fails if its result, or a step before, cannot be serialized."""
    for call in episode.calls:
        yield line(call=call)
    end = {name: getattr(episode, name) for name in EpisodeEnd.model_fields if name != "transient"}
    try:
        if unserializable is not None:
            raise unserializable
        last = line(end={**end, "transient": transient})
    except ValueError as error:
        message = f"WorkflowError: the result or a step cannot be serialized as JSON: {error}"
        failed = {"outcome": Outcome.FAILED, "output": None, "reason": DropReason.WORKFLOW_ERROR, "error": message}
        last = line(end=end | failed)
    yield last


def take_line(episode: Episode, line: dict[str, Any]) -> EpisodeEnd | None:
    """Adds a line to the episode; returns the end if the line is one."""
    if "step" in line:
        episode.steps.append(read_step(line["step"]))
    elif "call" in line:
        episode.calls.append(read_call(line["call"]))
    elif "end" in line:
        end = EpisodeEnd.model_validate(line["end"])
        for name in EpisodeEnd.model_fields:
            if name != "transient":
                setattr(episode, name, getattr(end, name))
        return end
    else:
        raise ValueError(f"a line is not a step, call or end: {line!r:.200}")
    return None

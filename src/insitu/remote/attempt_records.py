"""The plain-data form of an attempt at an episode, for workflows that run in another process.

A client sends lines of JSON for as long as its connection lasts, and so does the service:

    {"attempt": 7, "input": "2 + 2", "row": {"id": 17, ...}, "key": ["r1", 3, "17", 2, 0],
     "options": {"seed": 7, "timeout": null, "training": ["player"], ...},
     "policy": {"base_url": "http://127.0.0.1:8700/v1", "model": "policy", "api_key": "none"}}
    {"cancel": 8}

    {"report": {"activities": {"7": "waits for ..."}, "blocked": null}}
    {"attempt": 7, "transient": false, "counts": {"player": 1},
     "episode": {"key": ["r1", 3, "17", 2, 0], "outcome": "ok", "output": "4", "seconds": 0.3,
                 "steps": [{"parent_id": "root", "function_ancestry": {...}, "payload": {...}}],
                 "calls": [{"index": 0, "token_ids": [7, 2], "logprobs": [-0.1, -0.7], ...}], ...}}
    {"attempt": 9, "status": 400, "error": {"message": "options.sed: Unexpected keyword argument", ...}}

`counts` are completions that were requested outside every episode since the line before that has them, by key of
`llms`. The service sends a report every second.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import fields
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, field_validator

from insitu.collect.episodes import AttemptResult, EpisodeOptions, fail
from insitu.errors import WorkflowError
from insitu.schemas.episodes import DropReason, Episode, EpisodeKey, StepLog
from insitu.schemas.evaluation import EvalInputItem
from insitu.schemas.finetuning import PolicyEndpoint
from insitu.schemas.steps import IntermediateStep, IntermediateStepType, read_step
from insitu.wire.json_values import encode, has_lone_surrogate
from insitu.wire.redaction import redact_bytes

_NOT_SENT = ("retries", "result")  # applied by the sender, between and after attempts


class ServedPolicy(BaseModel):
    """Where the trainer's model is served, for the llms of `_type: policy` in this episode.

    `renamed`: the model's name changes with every version of the weights. `trained`: it is the model under training,
    also for those of `llms` that name it or its `base_model` (see `workflow.llms`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str
    model: str
    api_key: str = Field(default="none", repr=False)
    renamed: bool = False
    trained: bool = False
    llms: tuple[str, ...] = ()
    base_model: str | None = None

    @classmethod
    def of(cls, endpoint: PolicyEndpoint, trained: Collection[str] | None = None) -> "ServedPolicy":
        """`trained` are the llms of the trainer's file that are trained; None: the model is not under training."""
        now = endpoint.current_model
        return cls(
            base_url=endpoint.base_url,
            model=endpoint.model if now is None else now(),
            api_key=endpoint.api_key,
            renamed=now is not None,
            trained=trained is not None,
            llms=tuple(sorted(trained or ())),
            base_model=endpoint.base_model if trained is not None else None,
        )

    @property
    def unversioned(self) -> "ServedPolicy":
        """The policy without its model name if the name changes with every version."""
        return self.model_copy(update={"model": ""}) if self.renamed else self


class EpisodeRequest(BaseModel):
    """One attempt at an episode, with a number of the client's; without `policy` the service serves its own model."""

    model_config = ConfigDict(extra="forbid")

    attempt: int = 0
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


_EPISODE = TypeAdapter(Episode)


Counts = Counter[str]
"""Completions requested outside every episode, by key of `llms`."""


class LineCutter:
    """Cuts chunks into lines; an incomplete one is left in `rest`."""

    def __init__(self) -> None:
        self.rest = bytearray()

    def cut(self, chunk: bytes) -> list[bytes]:
        *lines, rest = chunk.split(b"\n")
        if lines:
            lines[0] = bytes(self.rest) + lines[0]
            self.rest.clear()
        self.rest += rest
        return lines


def request_fields(item: EvalInputItem, key: EpisodeKey, options: EpisodeOptions) -> dict[str, Any]:
    """The fields of an `EpisodeRequest`, without its number and the policy."""
    sent = {field.name: getattr(options, field.name) for field in fields(options) if field.name not in _NOT_SENT}
    return {"input": item.input_obj, "row": item.full_dataset_entry, "key": key, "options": sent}


def line(**content: Any) -> bytes:
    """A line without the secrets of this process; raises ValueError if the content cannot be serialized."""
    return redact_bytes(encode(content)) + b"\n"


def result_line(number: int, result: AttemptResult, **more: Any) -> bytes:
    """The line of an attempt that has ended; it has failed if its result or a step cannot be serialized."""
    episode, transient = result
    try:
        return line(attempt=number, episode=episode, transient=transient, **more)
    except ValueError as error:
        episode.output, episode.steps = None, StepLog()
        problem = WorkflowError(f"the result or a step cannot be serialized as JSON: {error}")
        fail(episode, DropReason.WORKFLOW_ERROR, problem)
        return line(attempt=number, episode=episode, transient=False, **more)


def read_result(key: EpisodeKey, message: dict[str, Any]) -> AttemptResult:
    """The attempt of a line that `result_line` has made; raises ValueError if it is none."""
    steps = StepLog(_entries(message["episode"]["steps"]))
    episode = _EPISODE.validate_python({**message["episode"], "key": key, "steps": steps})
    return AttemptResult(episode, message["transient"])


def _entries(records: list[Any]) -> Iterator[IntermediateStep | Callable[[], list[IntermediateStep]]]:
    """The steps that report candidates, which a run records; the others are made when somebody looks at them."""
    for record in records:
        if isinstance(record, dict) and (record.get("payload") or {}).get("event_type") == IntermediateStepType.TTC_END:
            yield read_step(record)
        else:
            yield partial(lambda record: [read_step(record)], record)

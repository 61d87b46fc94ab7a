"""Episodes as JSON: between a trainer and a service that runs the workflow, and in `workflow_output.json`.

A trainer asks `POST /v1/episodes` for one attempt, and is answered in JSON lines while it goes on:

    {"input": "2 + 2", "row": {"id": 17, ...}, "key": ["r1", 3, "17", 2, 0],
     "rules": {"seed": 7, "timeout": null, "training": ["player"], ...},
     "policy": {"base_url": "http://127.0.0.1:8700/v1", "model": "policy", "api_key": "none"}}

    {"step": {"parent_id": "root", "function_ancestry": {...}, "payload": {"event_type": "FUNCTION_START", ...}}}
                                                an empty line: the service is alive
    {"call": {"index": 0, "token_ids": [7, 2], "logprobs": [-0.1, -0.7], ...}}
    {"end": {"outcome": "ok", "output": "4", "seconds": 0.3, ...}}

Without `end` the attempt was lost.
"""

import json
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticSerializationError, from_json, to_json, to_jsonable_python

from insitu.evaluation.episodes import EpisodeRules
from insitu.schemas.episodes import DropReason, EpisodeKey, ModelCall, Outcome
from insitu.schemas.finetuning import PolicyEndpoint
from insitu.schemas.steps import IntermediateStep, StreamEventData, TraceMetadata, TTCEventData
from insitu.workflow.conversion import json_form

PROTOCOL = 2
EPISODES = "/v1/episodes"
HEARTBEAT_SECONDS = 5.0
"""A service that has nothing to say sends an empty line this often."""
TOKEN_VARIABLE = "INSITU_SERVE_TOKEN"
"""The environment variable from which both sides take the bearer token."""


class ServedPolicy(BaseModel):
    """Where the trainer's model is served: what llms of _type policy are, for this episode.

    `renamed`: `model` is another one with each version of the weights.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str
    model: str
    api_key: str = "none"
    renamed: bool = False

    @classmethod
    def of(cls, endpoint: PolicyEndpoint) -> "ServedPolicy":
        now = endpoint.current_model
        name = endpoint.model if now is None else now()
        return cls(base_url=endpoint.base_url, model=name, api_key=endpoint.api_key, renamed=now is not None)


class EpisodeRequest(BaseModel):
    """One attempt at an episode; `policy` none: the service's own."""

    model_config = ConfigDict(extra="forbid")

    input: Any = None
    row: Any = None
    key: EpisodeKey
    rules: EpisodeRules = EpisodeRules()
    policy: ServedPolicy | None = None


class EpisodeEnd(BaseModel):
    """What there is to tell when an attempt has ended, beside its steps and calls."""

    outcome: Outcome
    output: Any = None
    reason: DropReason | None = None
    error: str | None = None
    passing: bool = False
    seconds: float = 0.0
    step_rewards: list[float] | None = None
    rewarded_functions: list[str] = []
    failed_requests: dict[str, int] = {}


class Description(BaseModel):
    """What `GET /v1/episodes` answers."""

    protocol: int
    source: str
    llms: list[str]


_WHOLE: dict[str, Any] = {"fallback": json_form, "bytes_mode": "base64", "serialize_as_any": True}
"""The last one: also what a subclass adds to the model that is declared, such as the tool calls of LangChain."""


def encode(value: Any) -> bytes:
    """JSON of whatever a workflow may have put there; ValueError if it cannot be told (nested too deeply)."""
    try:
        return to_json(value, inf_nan_mode="constants", **_WHOLE)
    except PydanticSerializationError:  # lone surrogates are escaped
        return json.dumps(plain(value)).encode()


def plain(value: Any) -> Any:
    """What `value` would be after it was written as JSON and read again."""
    return to_jsonable_python(value, **_WHOLE)


def decode(text: bytes) -> Any:
    try:
        return from_json(text)
    except ValueError:  # lone surrogates again, or no JSON
        return json.loads(text)


def read_call(record: dict[str, Any]) -> ModelCall:
    return ModelCall(**{**record, "functions": tuple(record["functions"])})


def read_step(record: Any) -> IntermediateStep:
    """A step from its JSON. What has all fields of TraceMetadata, or of TTCEventData, was one."""
    if isinstance(record, dict) and isinstance(payload := record.get("payload"), dict):
        metadata, data = payload.get("metadata"), payload.get("data")
        if isinstance(metadata, dict) and metadata.keys() >= TraceMetadata.model_fields.keys():
            metadata = TraceMetadata(**metadata)
        if isinstance(data, dict):
            is_candidate = data.keys() >= TTCEventData.model_fields.keys()
            data = (TTCEventData if is_candidate else StreamEventData)(**data)
        record = {**record, "payload": {**payload, "metadata": metadata, "data": data}}
    return IntermediateStep.model_validate(record)

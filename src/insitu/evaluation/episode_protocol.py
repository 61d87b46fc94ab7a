"""Episodes as JSON: between a trainer and a workflow service, and in `workflow_output.json`.

A trainer requests one attempt with `POST /v1/episodes`; the response is JSON lines, streamed as things happen:

    {"input": "2 + 2", "row": {"id": 17, ...}, "key": ["r1", 3, "17", 2, 0],
     "options": {"seed": 7, "timeout": null, "training": ["player"], ...},
     "policy": {"base_url": "http://127.0.0.1:8700/v1", "model": "policy", "api_key": "none"}}

    {"step": {"parent_id": "root", "function_ancestry": {...}, "payload": {"event_type": "FUNCTION_START", ...}}}
                                                an empty line: a heartbeat
    {"call": {"index": 0, "token_ids": [7, 2], "logprobs": [-0.1, -0.7], ...}}
    {"end": {"outcome": "ok", "output": "4", "seconds": 0.3, ...}}

A stream without `end` is a lost attempt.
"""

import json
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticSerializationError, from_json, to_json, to_jsonable_python

from insitu.evaluation.episodes import EpisodeOptions
from insitu.schemas.episodes import DropReason, EpisodeKey, ModelCall, Outcome
from insitu.schemas.finetuning import PolicyEndpoint
from insitu.schemas.steps import IntermediateStep, StreamEventData, TraceMetadata, TTCEventData
from insitu.workflow.conversion import json_form

PROTOCOL = 3
EPISODES = "/v1/episodes"
HEARTBEAT_SECONDS = 5.0
"""An idle stream carries an empty line this often."""
TOKEN_VARIABLE = "INSITU_SERVE_TOKEN"
"""The environment variable with the bearer token, on both sides."""


class ServedPolicy(BaseModel):
    """Where the trainer's model is served, for the llms of `_type: policy` in this episode.

    `renamed`: the model's name changes with every version of the weights.
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
    """One attempt at an episode; without `policy` the service serves its own model."""

    model_config = ConfigDict(extra="forbid")

    input: Any = None
    row: Any = None
    key: EpisodeKey
    options: EpisodeOptions = EpisodeOptions()
    policy: ServedPolicy | None = None


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


class Description(BaseModel):
    """The response to `GET /v1/episodes`."""

    protocol: int
    source: str
    llms: list[str]


_WHOLE: dict[str, Any] = {"fallback": json_form, "bytes_mode": "base64", "serialize_as_any": True}
"""serialize_as_any keeps fields that a subclass adds to the declared model, such as LangChain's tool calls."""


def encode(value: Any) -> bytes:
    """JSON of any value a workflow may return; raises ValueError if it is nested too deeply."""
    try:
        return to_json(value, inf_nan_mode="constants", **_WHOLE)
    except PydanticSerializationError:  # lone surrogates are escaped
        return json.dumps(plain(value)).encode()


def plain(value: Any) -> Any:
    """The value after a round trip through JSON."""
    return to_jsonable_python(value, **_WHOLE)


def decode(text: bytes) -> Any:
    try:
        return from_json(text)
    except ValueError:  # lone surrogates again, or not JSON
        return json.loads(text)


def read_call(record: dict[str, Any]) -> ModelCall:
    return ModelCall(**{**record, "functions": tuple(record["functions"])})


def read_step(record: Any) -> IntermediateStep:
    """A step from its JSON; the fields tell TraceMetadata and TTCEventData from plain dictionaries."""
    if isinstance(record, dict) and isinstance(payload := record.get("payload"), dict):
        metadata, data = payload.get("metadata"), payload.get("data")
        if isinstance(metadata, dict) and metadata.keys() >= TraceMetadata.model_fields.keys():
            metadata = TraceMetadata(**metadata)
        if isinstance(data, dict):
            is_candidate = data.keys() >= TTCEventData.model_fields.keys()
            data = (TTCEventData if is_candidate else StreamEventData)(**data)
        record = {**record, "payload": {**payload, "metadata": metadata, "data": data}}
    return IntermediateStep.model_validate(record)

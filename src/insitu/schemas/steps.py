"""Intermediate steps: the events of a workflow, as reported by its framework.

A tool call, as two steps that share one UUID:

    IntermediateStepPayload(event_type=TOOL_START, name="search", UUID="7f", data=StreamEventData(input="rain"))
    IntermediateStepPayload(event_type=TOOL_END,   name="search", UUID="7f", data=StreamEventData(output="wet"))
"""

import time
import uuid
from enum import StrEnum
from operator import attrgetter
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _OpenModel(BaseModel):
    """Keeps unknown keys."""

    model_config = ConfigDict(extra="allow", ser_json_bytes="base64")


class InvocationNode(_OpenModel):
    """One function invocation and the one that called it; the root is `root`."""

    function_id: str
    function_name: str
    parent_id: str | None = None
    parent_name: str | None = None


ROOT_INVOCATION = InvocationNode(function_id="root", function_name="root")


class IntermediateStepCategory(StrEnum):
    LLM = "LLM"
    TOOL = "TOOL"
    WORKFLOW = "WORKFLOW"
    TASK = "TASK"
    TTC = "TTC"
    FUNCTION = "FUNCTION"
    CUSTOM = "CUSTOM"
    SPAN = "SPAN"


class IntermediateStepState(StrEnum):
    START = "START"
    CHUNK = "CHUNK"
    END = "END"


class IntermediateStepType(StrEnum):
    LLM_START = "LLM_START"
    LLM_NEW_TOKEN = "LLM_NEW_TOKEN"
    LLM_END = "LLM_END"
    TOOL_START = "TOOL_START"
    TOOL_END = "TOOL_END"
    WORKFLOW_START = "WORKFLOW_START"
    WORKFLOW_END = "WORKFLOW_END"
    TASK_START = "TASK_START"
    TASK_END = "TASK_END"
    TTC_START = "TTC_START"
    TTC_END = "TTC_END"
    FUNCTION_START = "FUNCTION_START"
    FUNCTION_END = "FUNCTION_END"
    CUSTOM_START = "CUSTOM_START"
    CUSTOM_END = "CUSTOM_END"
    SPAN_START = "SPAN_START"
    SPAN_CHUNK = "SPAN_CHUNK"
    SPAN_END = "SPAN_END"


class StreamEventData(_OpenModel):
    """Input and output of a step; unknown keys are kept."""

    input: Any = None
    output: Any = None
    chunk: Any = None
    payload: Any = None


class TTCEventData(StreamEventData):
    """A candidate in a turn of a test-time-compute search."""

    turn_id: str | None = None
    turn_index: int | None = None
    candidate_index: int | None = None
    score: float | None = None


class ToolDetails(_OpenModel):
    """A tool's name, description and parameters, a JSON Schema."""

    name: str
    description: str | None = None
    parameters: Any = None


class ToolSchema(_OpenModel):
    """A tool as chat completions offer it to a model."""

    type: Literal["function"] = "function"
    function: ToolDetails


class TokenUsageBaseModel(_OpenModel):
    """Tokens of a model call."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    total_tokens: int = 0


class TraceMetadata(_OpenModel):
    """What a framework reports beyond input and output."""

    chat_responses: Any = None
    chat_inputs: Any = None
    tool_inputs: Any = None
    tool_outputs: Any = None
    tool_info: Any = None
    span_inputs: Any = None
    span_outputs: Any = None
    provided_metadata: Any = None
    tools_schema: Any = None


class UsageInfo(_OpenModel):
    """Tokens and model calls of a step."""

    token_usage: Any = None
    num_llm_calls: int = 0
    seconds_between_calls: float = 0


class IntermediateStepPayload(BaseModel):
    """One event. START and END of one operation share a `UUID`; times are seconds since 1970."""

    model_config = ConfigDict(extra="ignore", arbitrary_types_allowed=True, ser_json_bytes="base64")

    event_type: IntermediateStepType
    event_timestamp: float = Field(default_factory=time.time)
    span_event_timestamp: float | None = None
    framework: str | None = None
    name: str | None = None
    tags: list[str] | None = None
    metadata: dict[str, Any] | TraceMetadata | None = Field(default=None, union_mode="left_to_right")
    data: StreamEventData | TTCEventData | None = None
    usage_info: UsageInfo | None = None
    UUID: str = Field(default_factory=lambda: str(uuid.uuid4()))

    @property
    def event_category(self) -> IntermediateStepCategory:
        return IntermediateStepCategory(self.event_type.value.split("_", 1)[0])

    @property
    def event_state(self) -> IntermediateStepState:
        suffix = self.event_type.value.split("_", 1)[1]
        return IntermediateStepState.CHUNK if suffix in ("NEW_TOKEN", "CHUNK") else IntermediateStepState(suffix)


class IntermediateStep(BaseModel):
    """A payload with the id of its parent step and its function."""

    parent_id: str = "root"
    function_ancestry: InvocationNode = ROOT_INVOCATION
    payload: IntermediateStepPayload

    event_type = property(attrgetter("payload.event_type"))
    event_category = property(attrgetter("payload.event_category"))
    event_state = property(attrgetter("payload.event_state"))
    event_timestamp = property(attrgetter("payload.event_timestamp"))
    span_event_timestamp = property(attrgetter("payload.span_event_timestamp"))
    framework = property(attrgetter("payload.framework"))
    name = property(attrgetter("payload.name"))
    tags = property(attrgetter("payload.tags"))
    metadata = property(attrgetter("payload.metadata"))
    data = property(attrgetter("payload.data"))
    usage_info = property(attrgetter("payload.usage_info"))
    UUID = property(attrgetter("payload.UUID"))


def read_step(record: Any) -> IntermediateStep:
    """A step from its JSON; TraceMetadata and TTCEventData are recognised by their fields."""
    if isinstance(record, dict) and isinstance(payload := record.get("payload"), dict):
        metadata, data = payload.get("metadata"), payload.get("data")
        if isinstance(metadata, dict) and metadata.keys() >= TraceMetadata.model_fields.keys():
            metadata = TraceMetadata(**metadata)
        if isinstance(data, dict):
            is_candidate = data.keys() >= TTCEventData.model_fields.keys()
            data = (TTCEventData if is_candidate else StreamEventData)(**data)
        record = {**record, "payload": {**payload, "metadata": metadata, "data": data}}
    return IntermediateStep.model_validate(record)

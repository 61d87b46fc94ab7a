"""How the model calls and functions of an episode look as intermediate steps."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from insitu.schemas.episodes import ModelCall
from insitu.schemas.steps import (
    IntermediateStep,
    IntermediateStepCategory,
    IntermediateStepPayload,
    IntermediateStepType,
    InvocationNode,
    StreamEventData,
    TraceMetadata,
    UsageInfo,
)

_CALL_FIELDS = (
    *("model", "llm", "sampling", "finish_reason", "policy_version"),
    *("prompt_token_ids", "token_ids", "logprobs", "logprobs_temperature", "sent_logprobs"),
)


class FunctionStep(NamedTuple):
    """A step of a function, its parent step, and the function it belongs to: the caller, for that of the workflow."""

    uuid: str
    category: IntermediateStepCategory
    name: str
    input: Any
    parent: str
    node: InvocationNode


def function_steps(
    steps: Sequence[FunctionStep], state: str, timestamp: float, result: Any = None, error: object = None
) -> list[IntermediateStep]:
    """The START or END (`state`) of each step."""
    made = []
    for step in steps:
        payload = IntermediateStepPayload(
            event_type=IntermediateStepType(f"{step.category}_{state}"),
            event_timestamp=timestamp,
            name=step.name,
            UUID=step.uuid,
            data=StreamEventData(input=step.input, output=result),
            metadata=None if error is None else {"error": repr(error)},
        )
        made.append(IntermediateStep(parent_id=step.parent, function_ancestry=step.node, payload=payload))
    return made


def call_steps(parent: str, node: InvocationNode, call: ModelCall) -> list[IntermediateStep]:
    """LLM_START and LLM_END of a call, inside the step `parent`."""
    request: dict[str, Any] = {"chat_inputs": call.messages, "tools_schema": call.tools}
    message = call.message or {}
    responses = [] if call.message is None else [call.message]
    start = IntermediateStepPayload(
        event_type=IntermediateStepType.LLM_START,
        event_timestamp=call.started,
        name=call.model,
        data=StreamEventData.model_construct(input=call.messages),
        metadata=TraceMetadata.model_construct(**request),
    )
    end = IntermediateStepPayload(
        event_type=IntermediateStepType.LLM_END,
        event_timestamp=call.ended,
        span_event_timestamp=call.started,
        data=StreamEventData.model_construct(input=call.messages, output=message.get("content"), payload=call.message),
        metadata=TraceMetadata.model_construct(chat_responses=responses, **request, **call_metadata(call)),
        usage_info=UsageInfo.model_construct(token_usage=call.usage, num_llm_calls=1),
        name=call.model,
        UUID=start.UUID,
    )
    return [IntermediateStep(parent_id=parent, function_ancestry=node, payload=event) for event in (start, end)]


def call_metadata(call: ModelCall) -> dict[str, Any]:
    """The step metadata of a recorded call, added to what frameworks report."""
    return {"call": call.index} | {name: getattr(call, name) for name in _CALL_FIELDS}


def calls_of_steps(steps: Iterable[IntermediateStep]) -> list[ModelCall]:
    """The recorded calls that the steps LLM_END of an episode hold."""
    calls: list[ModelCall] = []
    for step in steps:
        data, metadata = step.data, step.metadata
        if step.event_type is not IntermediateStepType.LLM_END or not isinstance(metadata, TraceMetadata):
            continue
        extra, prompt = metadata.model_extra or {}, metadata.chat_inputs
        message, node = getattr(data, "payload", None), step.function_ancestry
        messages = [*prompt, message] if isinstance(prompt, list) else [None]
        if not all(isinstance(each, dict) for each in messages):
            continue
        fields = {name: extra.get(name) for name in _CALL_FIELDS} | {"model": extra.get("model") or ""}
        functions = tuple(name for name in (node.parent_name, node.function_name) if name)
        started = step.span_event_timestamp or step.event_timestamp
        fields |= {"messages": prompt, "message": message, "functions": functions, "started": started}
        calls.append(ModelCall(len(calls), **fields))
    return calls


def add_call_metadata(payload: IntermediateStepPayload, calls: Sequence[ModelCall]) -> None:
    """Adds to a framework's LLM_END the message and metadata of the recorded call: of the first choice of its request.

    If there are several choices (`calls`), `choices` holds the metadata of each.
    """
    payload.data = payload.data or StreamEventData()
    if payload.data.payload is None:
        payload.data.payload = calls[0].message
    metadata = call_metadata(calls[0])
    if len(calls) > 1:
        metadata["choices"] = [call_metadata(call) for call in calls]
    if isinstance(payload.metadata, TraceMetadata):
        for name, value in metadata.items():
            setattr(payload.metadata, name, value)
    else:
        payload.metadata = {**(payload.metadata or {}), **metadata}

"""A recorded model call as intermediate steps: a pair of its own, or what it adds to the pair of a framework."""

import uuid
from collections.abc import Sequence
from typing import Any

from insitu.schemas.episodes import ModelCall
from insitu.schemas.steps import (
    IntermediateStepPayload,
    IntermediateStepType,
    StreamEventData,
    TraceMetadata,
    UsageInfo,
)


def known_of(call: ModelCall) -> dict[str, Any]:
    """What only the wire knows of a call; in a step's metadata beside what frameworks tell."""
    return {
        "call": call.index,
        "model": call.model,
        "llm": call.llm,
        "finish_reason": call.finish_reason,
        "token_ids": call.token_ids,
        "logprobs": call.logprobs,
    }


def payloads_of(call: ModelCall) -> tuple[IntermediateStepPayload, IntermediateStepPayload]:
    """LLM_START and LLM_END of a call that no framework reports."""
    shared: dict[str, Any] = {"name": call.model, "UUID": str(uuid.uuid4())}
    answers = [] if call.message is None else [call.message]
    seen: dict[str, Any] = {"chat_inputs": call.messages, "tools_schema": call.tools}
    start = IntermediateStepPayload(
        event_type=IntermediateStepType.LLM_START,
        event_timestamp=call.started,
        data=StreamEventData.model_construct(input=call.messages),
        metadata=TraceMetadata.model_construct(**seen),
        **shared,
    )
    end = IntermediateStepPayload(
        event_type=IntermediateStepType.LLM_END,
        event_timestamp=call.ended,
        span_event_timestamp=call.started,
        data=StreamEventData.model_construct(input=call.messages, output=(call.message or {}).get("content")),
        metadata=TraceMetadata.model_construct(chat_responses=answers, **seen, **known_of(call)),
        usage_info=UsageInfo.model_construct(token_usage=call.usage, num_llm_calls=1),
        **shared,
    )
    return start, end


def enrich(payload: IntermediateStepPayload, calls: Sequence[ModelCall]) -> None:
    """Add to a framework's LLM_END what the wire knows of the call it is about.

    Of a request for several choices (`calls`) it is the first, and `choices` has it for each.
    """
    known = known_of(calls[0])
    if len(calls) > 1:
        known["choices"] = [known_of(call) for call in calls]
    if isinstance(payload.metadata, TraceMetadata):
        for name, value in known.items():
            setattr(payload.metadata, name, value)
    else:
        payload.metadata = {**(payload.metadata or {}), **known}

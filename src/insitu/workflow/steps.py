"""The intermediate steps of one episode: their parents, their subscribers, and the steps of recorded model calls."""

import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from insitu.capture.ledger import CallSite, OpenStep, current_call_site
from insitu.schemas.episodes import ModelCall
from insitu.schemas.steps import (
    IntermediateStep,
    IntermediateStepPayload,
    IntermediateStepState,
    IntermediateStepType,
    StreamEventData,
    TraceMetadata,
    UsageInfo,
)

logger = logging.getLogger(__name__)

OnStep = Callable[[IntermediateStep], None]


@dataclass(eq=False)
class Subscription:
    """Ends with `unsubscribe()`, which may be called more than once."""

    manager: "IntermediateStepManager"
    on_next: OnStep
    on_error: Callable[[Exception], None] | None
    on_complete: Callable[[], None] | None

    def unsubscribe(self) -> None:
        if self in self.manager.subscriptions:
            self.manager.subscriptions.remove(self)


class IntermediateStepManager:
    """Turns payloads into steps, with their parent and function, and hands them to `keep` and to all subscribers."""

    def __init__(self, keep: OnStep | None = None) -> None:
        self._keep = keep
        self._parents: dict[str, str] = {}  # UUID of each open START -> its parent
        self.subscriptions: list[Subscription] = []

    def push_intermediate_step(self, payload: IntermediateStepPayload) -> None:
        """Records one event. An END or CHUNK without START is accepted; its parent is the innermost open step."""
        site = current_call_site.get()
        state = payload.event_state
        if state is IntermediateStepState.START:
            parent = self._parent(site)
            self._parents[payload.UUID] = parent
            step = OpenStep(payload.UUID, payload.event_category, site.step)
            current_call_site.set(site._replace(step=step))
        elif state is IntermediateStepState.END:
            parent = self._parents.pop(payload.UUID, "") or self._parent(site)
            if site.step is not None and site.step.uuid == payload.UUID:
                current_call_site.set(site._replace(step=site.step.outer))
        else:
            parent = self._parents.get(payload.UUID) or self._parent(site)
        self._publish(site, parent, payload)

    def push_at(self, site: CallSite, *payloads: IntermediateStepPayload) -> None:
        """Records the START and END of a step at `site` that is already over."""
        for payload in payloads:
            self._publish(site, self._parent(site), payload)

    def innermost(self, site: CallSite) -> OpenStep | None:
        """The innermost step around `site` that is still open; another task may have pushed an END."""
        step = site.step
        while step is not None and step.uuid not in self._parents:
            step = step.outer
        return step

    def _parent(self, site: CallSite) -> str:
        step = self.innermost(site)
        return "root" if step is None else step.uuid

    def _publish(self, site: CallSite, parent: str, payload: IntermediateStepPayload) -> None:
        step = IntermediateStep(parent_id=parent, function_ancestry=site.invocation.node, payload=payload)
        if self._keep is not None:
            self._keep(step)
        for subscription in tuple(self.subscriptions):
            try:
                subscription.on_next(step)
            except Exception as error:  # a faulty subscriber must not fail the workflow
                if subscription.on_error is None:
                    logger.exception("a subscriber to intermediate steps failed")
                else:
                    subscription.on_error(error)

    def subscribe(
        self,
        on_next: OnStep,
        on_error: Callable[[Exception], None] | None = None,
        on_complete: Callable[[], None] | None = None,
    ) -> Subscription:
        """Calls `on_next` with every later step, and `on_complete` when the episode has ended."""
        subscription = Subscription(self, on_next, on_error, on_complete)
        self.subscriptions.append(subscription)
        return subscription

    def complete(self) -> None:
        """Called at the end of the episode: notifies the subscribers and removes them."""
        subscriptions, self.subscriptions = self.subscriptions, []
        for subscription in subscriptions:
            if subscription.on_complete is not None:
                subscription.on_complete()


def call_metadata(call: ModelCall) -> dict[str, Any]:
    """The step metadata of a recorded call, added to what frameworks report."""
    return {
        "call": call.index,
        "model": call.model,
        "llm": call.llm,
        "finish_reason": call.finish_reason,
        "policy_version": call.policy_version,
        "prompt_token_ids": call.prompt_token_ids,
        "token_ids": call.token_ids,
        "logprobs": call.logprobs,
    }


def llm_step_payloads(call: ModelCall) -> tuple[IntermediateStepPayload, IntermediateStepPayload]:
    """LLM_START and LLM_END of a call that no framework reports."""
    shared: dict[str, Any] = {"name": call.model, "UUID": str(uuid.uuid4())}
    request: dict[str, Any] = {"chat_inputs": call.messages, "tools_schema": call.tools}
    start = IntermediateStepPayload(
        event_type=IntermediateStepType.LLM_START,
        event_timestamp=call.started,
        data=StreamEventData.model_construct(input=call.messages),
        metadata=TraceMetadata.model_construct(**request),
        **shared,
    )
    end = IntermediateStepPayload(
        event_type=IntermediateStepType.LLM_END,
        event_timestamp=call.ended,
        span_event_timestamp=call.started,
        data=StreamEventData.model_construct(
            input=call.messages, output=(call.message or {}).get("content"), payload=call.message
        ),
        metadata=TraceMetadata.model_construct(
            chat_responses=[] if call.message is None else [call.message], **request, **call_metadata(call)
        ),
        usage_info=UsageInfo.model_construct(token_usage=call.usage, num_llm_calls=1),
        **shared,
    )
    return start, end


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

"""The intermediate steps of one episode: their parents, their subscribers, and the steps of calls and functions.

Most runs read none of them: the steps of model calls and functions are made when somebody reads or follows the steps.
"""

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from insitu.capture.ledger import CallSite, OpenStep, current_call_site
from insitu.schemas.episodes import ModelCall, StepLog
from insitu.schemas.steps import (
    IntermediateStep,
    IntermediateStepCategory,
    IntermediateStepPayload,
    IntermediateStepState,
    IntermediateStepType,
    InvocationNode,
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
    """Turns payloads into steps, with their parent and function, and hands them to `keep` and to all subscribers.

    `log` gets the steps of model calls and functions, unmade, unless somebody has subscribed.
    """

    def __init__(self, keep: OnStep | None = None, log: StepLog | None = None) -> None:
        self._keep = keep
        self._log = log
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

    def add_call(self, site: CallSite, around: OpenStep | None, call: ModelCall) -> None:
        """Records LLM_START and LLM_END of a call that no framework reports, at `site` inside the step `around`."""
        parent, step = "root" if around is None else around.uuid, str(uuid.uuid4())
        self._add(site, parent, partial(_call_start, call, step))
        self._add(site, parent, partial(_call_end, call, step))

    def enter_function(self, step: str, category: IntermediateStepCategory, name: str, value: Any) -> None:
        """Records the START of a function's step, which is then the innermost one."""
        site = current_call_site.get()
        parent = self._parents[step] = self._parent(site)
        current_call_site.set(site._replace(step=OpenStep(step, category, site.step)))
        event = f"{category}_START"
        self._add(site, parent, partial(_function_event, event, time.time(), step, name, value, None, None))

    def leave_function(
        self, step: str, category: IntermediateStepCategory, name: str, value: Any, result: Any, error: object
    ) -> None:
        """Records the END of a function's step."""
        site = current_call_site.get()
        parent = self._parents.pop(step, "") or self._parent(site)
        if site.step is not None and site.step.uuid == step:
            current_call_site.set(site._replace(step=site.step.outer))
        event = f"{category}_END"
        self._add(site, parent, partial(_function_event, event, time.time(), step, name, value, result, error))

    def _add(self, site: CallSite, parent: str, make: Callable[[], IntermediateStepPayload]) -> None:
        if self.subscriptions:
            self._publish(site, parent, make())
        elif self._log is not None:
            self._log.entries.append(partial(_step, parent, site.invocation.node, make))

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
        subscriptions, self.subscriptions, self._log = self.subscriptions, [], None
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


def _step(parent: str, node: InvocationNode, make: Callable[[], IntermediateStepPayload]) -> IntermediateStep:
    return IntermediateStep(parent_id=parent, function_ancestry=node, payload=make())


def _function_event(
    event: str, timestamp: float, step: str, name: str, value: Any, result: Any, error: object
) -> IntermediateStepPayload:
    return IntermediateStepPayload(
        event_type=IntermediateStepType(event),
        event_timestamp=timestamp,
        name=name,
        UUID=step,
        data=StreamEventData(input=value, output=result),
        metadata=None if error is None else {"error": repr(error)},
    )


def _call_start(call: ModelCall, step: str) -> IntermediateStepPayload:
    return IntermediateStepPayload(
        event_type=IntermediateStepType.LLM_START,
        event_timestamp=call.started,
        name=call.model,
        UUID=step,
        data=StreamEventData.model_construct(input=call.messages),
        metadata=TraceMetadata.model_construct(chat_inputs=call.messages, tools_schema=call.tools),
    )


def _call_end(call: ModelCall, step: str) -> IntermediateStepPayload:
    request: dict[str, Any] = {"chat_inputs": call.messages, "tools_schema": call.tools}
    return IntermediateStepPayload(
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
        name=call.model,
        UUID=step,
    )


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

"""The stream of intermediate steps of one episode: who caused which, and who listens.

Where in the workflow the running code stands is a `Place` in one context variable, so that concurrent tasks each have
their own, and a task started inside a function stands inside that function.
"""

import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

from insitu.schemas.steps import (
    ROOT_INVOCATION,
    IntermediateStep,
    IntermediateStepCategory,
    IntermediateStepPayload,
    IntermediateStepState,
    InvocationNode,
)

logger = logging.getLogger(__name__)

OnStep = Callable[[IntermediateStep], None]


@dataclass(slots=True)
class Invocation:
    """A function being run: its node, the names from the outermost function to it, and its latest model call."""

    node: InvocationNode
    names: tuple[str, ...] = ()
    caller: "Invocation | None" = None
    latest_call: int | None = None


class OpenStep(NamedTuple):
    """A START without its END yet, and the one it was opened in."""

    uuid: str
    category: IntermediateStepCategory
    outer: "OpenStep | None"


class Place(NamedTuple):
    """Where the running code stands."""

    invocation: Invocation
    step: OpenStep | None = None


ROOT = Place(Invocation(ROOT_INVOCATION))
place: ContextVar[Place] = ContextVar("insitu_place", default=ROOT)


class Subscription:
    """Ends with `unsubscribe()`, which may be called more than once."""

    def __init__(self, manager: "IntermediateStepManager", on_next: OnStep, others: tuple[Any, Any]) -> None:
        self._manager = manager
        self.on_next = on_next
        self.on_error, self.on_complete = others

    def unsubscribe(self) -> None:
        if self in self._manager.subscriptions:
            self._manager.subscriptions.remove(self)


class IntermediateStepManager:
    """Gives each payload its place and hands the step to `keep` and to all subscribers."""

    def __init__(self, keep: OnStep | None = None) -> None:
        self._keep = keep
        self._parents: dict[str, str] = {}  # UUID of each open START -> its parent
        self.subscriptions: list[Subscription] = []

    def push_intermediate_step(self, payload: IntermediateStepPayload) -> None:
        """Record one event. An END or CHUNK without START is accepted and belongs to whatever is open here."""
        here = place.get()
        state = payload.event_state
        if state is IntermediateStepState.START:
            parent = self._innermost(here)
            self._parents[payload.UUID] = parent
            place.set(Place(here.invocation, OpenStep(payload.UUID, payload.event_category, here.step)))
        elif state is IntermediateStepState.END:
            parent = self._parents.pop(payload.UUID, "") or self._innermost(here)
            if here.step is not None and here.step.uuid == payload.UUID:
                place.set(Place(here.invocation, here.step.outer))
        else:
            parent = self._parents.get(payload.UUID) or self._innermost(here)
        self._publish(IntermediateStep(parent_id=parent, function_ancestry=here.invocation.node, payload=payload))

    def push_past(self, here: Place, *payloads: IntermediateStepPayload) -> None:
        """Record what has happened at `here` and is over: START and END together, nothing stays open."""
        for payload in payloads:
            parent = self._innermost(here)
            self._publish(IntermediateStep(parent_id=parent, function_ancestry=here.invocation.node, payload=payload))

    def innermost(self, here: Place) -> OpenStep | None:
        """The innermost step around `here` that is still open: an END may have come from another task."""
        step = here.step
        while step is not None and step.uuid not in self._parents:
            step = step.outer
        return step

    def _innermost(self, here: Place) -> str:
        step = self.innermost(here)
        return "root" if step is None else step.uuid

    def _publish(self, step: IntermediateStep) -> None:
        if self._keep is not None:
            self._keep(step)
        for subscription in tuple(self.subscriptions):
            try:
                subscription.on_next(step)
            except Exception as error:  # a listener's mistake must not fail the workflow it listens to
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
        """Call `on_next` with every step from now on, `on_complete` when the episode has ended."""
        subscription = Subscription(self, on_next, (on_error, on_complete))
        self.subscriptions.append(subscription)
        return subscription

    def complete(self) -> None:
        """The episode has ended: tell the subscribers, and let go of them."""
        subscriptions, self.subscriptions = self.subscriptions, []
        for subscription in subscriptions:
            if subscription.on_complete is not None:
                subscription.on_complete()

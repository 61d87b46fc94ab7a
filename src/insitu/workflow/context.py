"""The current episode, and the API through which workflow code uses it.

    scope = EpisodeScope(key=key, seed=7, training=True)
    with scope:
        answer = await workflow.ainvoke(row["question"])
    scope.calls, scope.steps, scope.rewards.by_call

It is held in a context variable: concurrent episodes are isolated, and tasks inherit the one they were started in. A
task or thread that works for several episodes enters each of them with `Context.activate`.
"""

import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from insitu.advantages.credit import is_targeted
from insitu.capture.ledger import OUTSIDE, Activity, CallLedger, CallSite, Invocation, OpenStep, current_call_site
from insitu.errors import WorkflowError
from insitu.schemas.components import WORKFLOW
from insitu.schemas.episodes import EpisodeKey, ModelCall, Needs, StepLog
from insitu.schemas.finetuning import ALLOWED_REWARDS, MAX_REWARD
from insitu.schemas.steps import IntermediateStep, IntermediateStepPayload, IntermediateStepState, InvocationNode
from insitu.schemas.steps import IntermediateStepCategory as Category
from insitu.schemas.steps import IntermediateStepType as StepType
from insitu.workflow.steps import FunctionStep, add_call_metadata, call_steps, function_steps

logger = logging.getLogger(__name__)

OnStep = Callable[[IntermediateStep], None]


class StepRewards:
    """Step rewards, summed per model call (by call index).

    A reward is credited to the latest call of the running function, or else of the episode. Once a function (or the
    episode) has made a trained call, untrained calls no longer become the target: crediting them would train nothing.
    """

    def __init__(self) -> None:
        self.by_call: dict[int, float] = {}
        self.latest_call: int | None = None
        self._latest_call_by_function: dict[str, int] = {}
        self._trained_calls: set[int] = set()

    def add_call(self, call: ModelCall, invocation: Invocation, is_trained: bool) -> None:
        """Makes this call the target of further rewards, in every function it was made in."""
        if is_trained:
            self._trained_calls.add(call.index)
        if is_trained or self.latest_call not in self._trained_calls:
            self.latest_call = call.index
        for name in call.functions:
            if is_trained or self._latest_call_by_function.get(name) not in self._trained_calls:
                self._latest_call_by_function[name] = call.index
        ancestor: Invocation | None = invocation
        while ancestor is not None:
            if is_trained or ancestor.latest_call not in self._trained_calls:
                ancestor.latest_call = call.index
            ancestor = ancestor.caller

    def add_reward(self, value: float, invocation: Invocation, function: str | None = None) -> None:
        """Adds to the reward of the latest call made in `invocation`, or in the function named `function`."""
        value = float(value)  # an array or tensor too, which no file of the run could hold
        if not abs(value) <= MAX_REWARD:
            raise WorkflowError(f"a step reward is {value}; allowed: {ALLOWED_REWARDS}")
        if function is not None and function not in self._latest_call_by_function:
            names = ", ".join(sorted(self._latest_call_by_function)) or "none"
            raise WorkflowError(
                f"cannot reward {function!r}: it has made no model call yet (functions that have: {names})"
            )
        index = invocation.latest_call if function is None else self._latest_call_by_function[function]
        if index is None:
            index = self.latest_call
        if index is None:
            raise WorkflowError("a step reward was given before the episode made any model call that can be credited")
        self.by_call[index] = self.by_call.get(index, 0.0) + value


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

    Most runs read no steps: `log` gets functions that make those of model calls and functions, unless somebody has
    subscribed.
    """

    def __init__(self, keep: OnStep, log: StepLog) -> None:
        self._keep = keep
        self._log: StepLog | None = log
        self._parents: dict[str, str] = {}  # UUID of each open START -> its parent
        self.subscriptions: list[Subscription] = []

    def push_intermediate_step(self, payload: IntermediateStepPayload) -> None:
        """Records one event. An END or CHUNK without START is accepted; its parent is the innermost open step."""
        site = current_call_site.get()
        parent = self._parents.get(payload.UUID) or self._parent(site)
        if payload.event_state is IntermediateStepState.START:
            parent = self._parents[payload.UUID] = self._parent(site)
            step = OpenStep(payload.UUID, payload.event_category, site.step)
            current_call_site.set(site._replace(step=step))
        elif payload.event_state is IntermediateStepState.END:
            self._parents.pop(payload.UUID, None)
            if site.step is not None and site.step.uuid == payload.UUID:
                current_call_site.set(site._replace(step=site.step.outer))
        self._publish(IntermediateStep(parent_id=parent, function_ancestry=site.invocation.node, payload=payload))

    def add_call(self, site: CallSite, around: OpenStep | None, call: ModelCall) -> None:
        """Records LLM_START and LLM_END of a call that no framework reports, at `site` inside the step `around`."""
        parent = "root" if around is None else around.uuid
        self._add(partial(call_steps, parent, site.invocation.node, call))

    def enter_function(self, name: str, value: Any) -> list[FunctionStep]:
        """Enters a function and records the STARTs of its steps; returns those, for `leave_function`."""
        site = current_call_site.get()
        caller = site.invocation
        node = InvocationNode.model_construct(
            function_id=uuid.uuid4().hex,
            function_name=name,
            parent_id=caller.node.function_id,
            parent_name=caller.node.function_name,
        )
        steps = []
        for category in (Category.WORKFLOW, Category.FUNCTION) if name == WORKFLOW else (Category.FUNCTION,):
            if category is Category.FUNCTION:
                site = site._replace(invocation=Invocation(node, (*caller.names, name), caller))
            step = FunctionStep(str(uuid.uuid4()), category, name, value, self._parent(site), site.invocation.node)
            self._parents[step.uuid] = step.parent
            site = site._replace(step=OpenStep(step.uuid, category, site.step))
            steps.append(step)
        current_call_site.set(site)
        self._add(partial(function_steps, steps, "START", time.time()))
        return steps

    def leave_function(self, steps: Sequence[FunctionStep], result: Any, error: object) -> None:
        """Records the ENDs of a function's steps."""
        for step in steps:
            self._parents.pop(step.uuid, None)
        self._add(partial(function_steps, steps[::-1], "END", time.time(), result, error))

    def _add(self, make: Callable[[], list[IntermediateStep]]) -> None:
        if self.subscriptions:
            for step in make():
                self._publish(step)
        elif self._log is not None:
            self._log.entries.append(make)

    def innermost(self, site: CallSite) -> OpenStep | None:
        """The innermost step around `site` that is still open; another task may have pushed an END."""
        step = site.step
        while step is not None and step.uuid not in self._parents:
            step = step.outer
        return step

    def _parent(self, site: CallSite) -> str:
        step = self.innermost(site)
        return "root" if step is None else step.uuid

    def _publish(self, step: IntermediateStep) -> None:
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


@dataclass(eq=False, repr=False, kw_only=True)
class EpisodeScope:
    """State of one episode, or of a plain run: its identity, model calls (`ledger`), steps and step rewards.

    `training` selects the calls to train: all, none, or those made to these keys of `llms`; calls outside
    `target_functions` are never trained. `in_flight` measures when model calls are. `temperature` replaces that of all
    model calls.
    """

    key: EpisodeKey | None = None
    seed: int = 0
    input_message: Any = None
    row: Any = None
    is_evaluating: bool = False
    training: bool | Collection[str] = False
    needs: Needs = Needs.TOKEN_IDS
    target_functions: Collection[str] = (WORKFLOW,)
    sampled_from: tuple[str, str] | None = None
    in_flight: Activity | None = None
    temperature: float | None = None

    def __post_init__(self) -> None:
        self.ledger = CallLedger(
            name="the current run" if self.key is None else self.key.text(),
            seed=self.seed,
            training=self.training,
            needs=self.needs,
            on_call=self._on_call,
            sampled_from=self.sampled_from,
            in_flight=self.in_flight,
            temperature=self.temperature,
        )
        self.rewards = StepRewards()
        self.steps = StepLog()
        self.step_manager = IntermediateStepManager(self._keep_step, self.steps)
        self._open_llm_steps: dict[str, list[ModelCall]] = {}  # UUID of a framework's open step -> its calls
        self._rewarded_steps: set[str] = set()  # UUIDs
        self._tokens: tuple[Token[Any], Token[Any]] | None = None

    @property
    def calls(self) -> list[ModelCall]:
        return self.ledger.calls

    def __enter__(self) -> Self:
        site = CallSite(Invocation(OUTSIDE.invocation.node), ledger=self.ledger)
        self._tokens = (current_episode.set(self), current_call_site.set(site))
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._tokens is not None:
            current_episode.reset(self._tokens[0])
            current_call_site.reset(self._tokens[1])
            self._tokens = None
        self.close()

    def close(self) -> None:
        """Ends the episode: later calls and steps are not recorded."""
        if not self.ledger.closed:
            self.ledger.close()
            self.step_manager.complete()

    def add_reward(self, value: float, function: str | None = None) -> None:
        """See `Context.reward`. Does nothing once the episode has ended."""
        if not self.ledger.closed:
            self.rewards.add_reward(value, current_call_site.get().invocation, function)

    def _on_call(self, call: ModelCall, site: CallSite) -> None:
        """Pushes LLM_START and LLM_END, unless the calling framework pushes its own."""
        enclosing_step = self.step_manager.innermost(site)
        if enclosing_step is not None and enclosing_step.category is Category.LLM:
            reported = self._open_llm_steps.setdefault(enclosing_step.uuid, [call])
            # n > 1: another choice of the same request
            if call is not reported[0] and call.messages is reported[0].messages:
                reported.append(call)
        else:
            self.step_manager.add_call(site, enclosing_step, call)
        if not self.ledger.training or self.ledger.is_credited(call.llm):
            self.rewards.add_call(call, site.invocation, is_targeted(call.functions, self.target_functions))

    def _keep_step(self, step: IntermediateStep) -> None:
        if self.ledger.closed:
            return
        if step.event_type is StepType.LLM_END and (calls := self._open_llm_steps.pop(step.UUID, None)):
            add_call_metadata(step.payload, calls)
        self.steps.entries.append(step)
        if step.event_category is Category.CUSTOM:
            self._add_reward_from_step(step)

    def _add_reward_from_step(self, step: IntermediateStep) -> None:
        """Treats a numeric `reward` in a custom step's metadata as a step reward.

        It is counted once per step even if START and END both carry it. `function` may name the function to credit.
        """
        metadata = step.payload.metadata
        fields = metadata if isinstance(metadata, dict) else getattr(metadata, "model_extra", None) or {}
        value: Any = fields.get("reward")
        function = fields.get("function")
        if not hasattr(value, "__float__") or isinstance(value, bool):
            return
        # a reward before the first model call is ignored here; Context.reward raises
        if self.rewards.latest_call is not None and step.UUID not in self._rewarded_steps:
            self._rewarded_steps.add(step.UUID)
            self.add_reward(value, function if isinstance(function, str) else None)


_null_scope = EpisodeScope()
"""The scope outside any episode: steps reach subscribers but are not recorded."""
_null_scope.close()
current_episode: ContextVar[EpisodeScope] = ContextVar("insitu_episode", default=_null_scope)


def current_scope() -> EpisodeScope | None:
    """The episode that the running code belongs to, if any."""
    scope = current_episode.get()
    return None if scope is _null_scope else scope


class Context:
    """The current episode as workflow code sees it: `Context.get()`."""

    def __init__(self, scope: EpisodeScope, site: CallSite = OUTSIDE) -> None:
        self._scope = scope
        self._site = site

    @classmethod
    def get(cls) -> "Context":
        return cls(current_episode.get(), current_call_site.get())

    @contextmanager
    def activate(self) -> Iterator["Context"]:
        """Makes this the current episode in the body, for workers that serve several episodes and for plain threads.

        Model calls, steps and rewards in the body belong to the episode and function in which `get()` was called:

            jobs.put((Context.get(), question))          # in the episode

            context, question = jobs.get()               # in the worker
            with context.activate():
                answer = client.chat.completions.create(...)
        """
        tokens = current_episode.set(self._scope), current_call_site.set(self._site._replace(is_explicit=True))
        try:
            yield self
        finally:
            current_call_site.reset(tokens[1])
            current_episode.reset(tokens[0])

    @property
    def input_message(self) -> Any:
        """The input the workflow was called with."""
        return self._scope.input_message

    @property
    def row(self) -> Any:
        """The dataset row as loaded, including the expected answer; None without a dataset row."""
        return self._scope.row

    @property
    def row_id(self) -> str | None:
        return self._scope.key.row_id if self._scope.key is not None else None

    @property
    def active_function(self) -> InvocationNode:
        """The function currently executing, or `root` outside any."""
        return current_call_site.get().invocation.node

    @property
    def is_evaluating(self) -> bool:
        return self._scope.is_evaluating

    @property
    def is_training(self) -> bool:
        """Whether model calls of this episode are collected for training; false in validation and evaluation."""
        return bool(self._scope.ledger.training)

    @property
    def intermediate_step_manager(self) -> IntermediateStepManager:
        return self._scope.step_manager

    @property
    def seed(self) -> int:
        """Seed for environment randomness, derived from the configured seed and the episode key."""
        return self._scope.seed

    def reward(self, value: float, function: str | None = None) -> None:
        """Adds `value` to the step reward of the running function's latest model call, or of the episode's if none.

        In training, this is the latest trained call, once there is one. `function` credits another function by name;
        raises WorkflowError if it has made no model call. Does nothing outside an episode.
        """
        self._scope.add_reward(value, function)

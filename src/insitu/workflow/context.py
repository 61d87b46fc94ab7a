"""The current episode, and the API through which workflow code uses it.

    scope = EpisodeScope(key=key, seed=7, training=True)
    with scope:
        answer = await workflow.ainvoke(row["question"])
    scope.calls, scope.steps, scope.rewards.by_call

It is held in a context variable: concurrent episodes are isolated, and tasks inherit the one they were started in. A
task or thread that works for several episodes enters each of them with `Context.activate`.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any, Self

from insitu.advantages.credit import is_targeted
from insitu.capture.ledger import OUTSIDE, CallLedger, CallSite, Invocation, current_call_site
from insitu.errors import WorkflowError
from insitu.schemas.components import WORKFLOW
from insitu.schemas.episodes import EpisodeKey, ModelCall, StepLog
from insitu.schemas.finetuning import MAX_REWARD
from insitu.schemas.steps import IntermediateStep, IntermediateStepCategory, IntermediateStepType, InvocationNode
from insitu.workflow.steps import IntermediateStepManager, add_call_metadata


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
        if not abs(value) <= MAX_REWARD:
            raise WorkflowError(f"a step reward is {value}; allowed: from {-MAX_REWARD:g} to {MAX_REWARD:g}")
        if function is not None and function not in self._latest_call_by_function:
            known = ", ".join(sorted(self._latest_call_by_function)) or "none"
            raise WorkflowError(
                f"cannot reward {function!r}: it has made no model call yet (functions that have: {known})"
            )
        index = invocation.latest_call if function is None else self._latest_call_by_function[function]
        if index is None:
            index = self.latest_call
        if index is None:
            raise WorkflowError("a step reward was given before the episode made any model call that can be credited")
        self.by_call[index] = self.by_call.get(index, 0.0) + value


class EpisodeScope:
    """State of one episode, or of a plain run: its identity, model calls (`ledger`), steps and step rewards.

    `training` selects the calls to train: all, none, or those made to these keys of `llms`; calls outside
    `target_functions` are never trained.
    """

    def __init__(
        self,
        *,
        key: EpisodeKey | None = None,
        seed: int = 0,
        input_message: Any = None,
        row: Any = None,
        is_evaluating: bool = False,
        training: bool | Collection[str] = False,
        needs_token_ids: bool = True,
        target_functions: Collection[str] = (WORKFLOW,),
    ) -> None:
        self.key = key
        self.seed = seed
        self.input_message = input_message
        self.row = row
        self.is_evaluating = is_evaluating
        self.ledger = CallLedger(
            name="the current run" if key is None else key.text(),
            seed=seed,
            training=training,
            needs_token_ids=needs_token_ids,
            on_call=self._on_call,
        )
        self.rewards = StepRewards()
        self.steps = StepLog()
        self.step_manager = IntermediateStepManager(self._keep_step, self.steps)
        self._target_functions = target_functions
        self._open_llm_steps: dict[str, list[ModelCall]] = {}  # UUID of a framework's open step -> its calls
        self._rewarded_steps: set[str] = set()  # UUIDs
        self._tokens: tuple[Token[Any], Token[Any]] | None = None

    @property
    def calls(self) -> list[ModelCall]:
        return self.ledger.calls

    def __enter__(self) -> Self:
        site = CallSite(Invocation(OUTSIDE.invocation.node), ledger=self.ledger)
        self._tokens = (_scope.set(self), current_call_site.set(site))
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._tokens is not None:
            _scope.reset(self._tokens[0])
            current_call_site.reset(self._tokens[1])
            self._tokens = None
        self.close()

    def activate(self) -> Self:
        """Returns the scope, to be entered with `with`."""
        return self

    def close(self) -> None:
        """Ends the episode: later calls and steps are not recorded."""
        if not self.ledger.closed:
            self.ledger.close()
            self.step_manager.complete()

    def add_reward(self, value: float, function: str | None = None) -> None:
        """See `Context.reward`."""
        self.rewards.add_reward(value, current_call_site.get().invocation, function)

    def _on_call(self, call: ModelCall, site: CallSite) -> None:
        """Pushes LLM_START and LLM_END, unless the calling framework pushes its own."""
        enclosing_step = self.step_manager.innermost(site)
        if enclosing_step is not None and enclosing_step.category is IntermediateStepCategory.LLM:
            reported = self._open_llm_steps.setdefault(enclosing_step.uuid, [call])
            # n > 1: another choice of the same request
            if call is not reported[0] and call.messages is reported[0].messages:
                reported.append(call)
        else:
            self.step_manager.add_call(site, enclosing_step, call)
        # in training, skip calls to models that are not trained (a judge, say)
        if not self.ledger.training or self.ledger.is_trained(call.llm):
            self.rewards.add_call(call, site.invocation, is_targeted(call.functions, self._target_functions))

    def _keep_step(self, step: IntermediateStep) -> None:
        if self.ledger.closed:
            return
        if step.event_type is IntermediateStepType.LLM_END and (calls := self._open_llm_steps.pop(step.UUID, None)):
            add_call_metadata(step.payload, calls)
        self.steps.entries.append(step)
        if step.event_category is IntermediateStepCategory.CUSTOM:
            self._add_reward_from_step(step)

    def _add_reward_from_step(self, step: IntermediateStep) -> None:
        """Treats a numeric `reward` in a custom step's metadata as a step reward.

        It is counted once per step even if START and END both carry it. `function` may name the function to credit.
        """
        metadata = step.payload.metadata
        fields = metadata if isinstance(metadata, dict) else getattr(metadata, "model_extra", None) or {}
        value, function = fields.get("reward"), fields.get("function")
        if not isinstance(value, int | float) or isinstance(value, bool):
            return
        # a reward before the first model call is ignored here; Context.reward raises
        if self.rewards.latest_call is not None and step.UUID not in self._rewarded_steps:
            self._rewarded_steps.add(step.UUID)
            self.add_reward(value, function if isinstance(function, str) else None)


class _NullScope(EpisodeScope):
    """The scope used outside any episode: steps reach subscribers but are not recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.step_manager = IntermediateStepManager()

    def add_reward(self, value: float, function: str | None = None) -> None:
        pass


_null_scope = _NullScope()
_scope: ContextVar[EpisodeScope] = ContextVar("insitu_episode", default=_null_scope)


def current_scope() -> EpisodeScope | None:
    """The episode that the running code belongs to, if any."""
    scope = _scope.get()
    return None if scope is _null_scope else scope


class Context:
    """The current episode as workflow code sees it: `Context.get()`."""

    def __init__(self, scope: EpisodeScope, site: CallSite = OUTSIDE) -> None:
        self._scope = scope
        self._site = site

    @classmethod
    def get(cls) -> "Context":
        return cls(_scope.get(), current_call_site.get())

    @contextmanager
    def activate(self) -> Iterator["Context"]:
        """Makes this the current episode in the body, for workers that serve several episodes and for plain threads.

        Model calls, steps and rewards in the body belong to the episode and function in which `get()` was called:

            jobs.put((Context.get(), question))          # in the episode

            context, question = jobs.get()               # in the worker
            with context.activate():
                answer = client.chat.completions.create(...)
        """
        tokens = _scope.set(self._scope), current_call_site.set(self._site._replace(is_explicit=True))
        try:
            yield self
        finally:
            current_call_site.reset(tokens[1])
            _scope.reset(tokens[0])

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

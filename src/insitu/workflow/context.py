"""The running episode, and its interface for workflow code.

    scope = EpisodeScope(key=key, seed=7, training=True)
    with scope:
        answer = await workflow.ainvoke(row["question"])
    scope.calls, scope.steps, scope.rewards.by_call

The episode is found through context variables: concurrent episodes are isolated, and tasks started inside an episode
belong to it.
"""

import math
from collections.abc import Collection
from contextvars import ContextVar, Token
from typing import Any, Self

from insitu.advantages.targeting import is_targeted
from insitu.capture.ledger import OUTSIDE, CallLedger, CallSite, Invocation, current_call_site
from insitu.errors import WorkflowError
from insitu.schemas.components import WORKFLOW
from insitu.schemas.episodes import EpisodeKey, ModelCall
from insitu.schemas.steps import IntermediateStep, IntermediateStepCategory, IntermediateStepType, InvocationNode
from insitu.workflow.steps import IntermediateStepManager, OnStep, add_call_metadata, llm_step_payloads


class StepRewards:
    """Sums of step rewards by call index.

    A reward is credited to the latest call of the running function, or else of the episode. Once the function has made
    a trained call, its other calls get no rewards: a reward of a call that is not trained has no effect.
    """

    def __init__(self) -> None:
        self.by_call: dict[int, float] = {}
        self.latest_call: int | None = None
        self._latest_in: dict[str, int] = {}  # by the name of a function
        self._trained: set[int] = set()

    def add_call(self, call: ModelCall, invocation: Invocation, is_trained: bool) -> None:
        """Credits further rewards to this call, in all functions it was made in."""
        if is_trained:
            self._trained.add(call.index)
        if is_trained or self.latest_call not in self._trained:
            self.latest_call = call.index
        for name in call.functions:
            if is_trained or self._latest_in.get(name) not in self._trained:
                self._latest_in[name] = call.index
        running: Invocation | None = invocation
        while running is not None:
            if is_trained or running.latest_call not in self._trained:
                running.latest_call = call.index
            running = running.caller

    def add(self, value: float, invocation: Invocation, function: str | None = None) -> None:
        """Adds to the reward of the latest call made in `invocation`, or in the function named `function`."""
        if not math.isfinite(value):
            raise WorkflowError(f"a step reward is {value}; allowed: a finite number")
        if function is not None and function not in self._latest_in:
            known = ", ".join(sorted(self._latest_in)) or "none"
            raise WorkflowError(
                f"a step reward was given to {function!r}, which has made no model call yet; those that have: {known}"
            )
        index = invocation.latest_call if function is None else self._latest_in[function]
        if index is None:
            index = self.latest_call
        if index is None:
            raise WorkflowError("a step reward was given before the episode's first model call: it belongs to none")
        self.by_call[index] = self.by_call.get(index, 0.0) + value


class EpisodeScope:
    """One episode, or a plain run: what it is, its model calls (`ledger`), steps and step rewards.

    `training` says which calls are trained: all, none, or those to some keys of `llms`; only calls inside
    `target_functions` are. `on_step` is called with each step as it happens.
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
        on_step: OnStep | None = None,
    ) -> None:
        self.key = key
        self.seed = seed
        self.input_message = input_message
        self.row = row
        self.is_evaluating = is_evaluating
        self.ledger = CallLedger(
            name="a run" if key is None else key.text(),
            seed=seed,
            training=training,
            needs_token_ids=needs_token_ids,
            on_call=self._on_call,
        )
        self.rewards = StepRewards()
        self.steps: list[IntermediateStep] = []
        self.step_manager = IntermediateStepManager(keep=self._keep_step)
        self._target_functions = target_functions
        self._on_step = on_step
        self._reported: dict[str, list[ModelCall]] = {}  # by the UUID of a framework's step that is open
        self._rewarded: set[str] = set()  # UUIDs of steps
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
        """For `with scope.activate():`, the same as `with scope:`."""
        return self

    def close(self) -> None:
        """Ends the episode: later calls and steps are not recorded."""
        if not self.ledger.closed:
            self.ledger.close()
            self.step_manager.complete()

    def reward(self, value: float, function: str | None = None) -> None:
        """See `Context.reward`."""
        self.rewards.add(value, current_call_site.get().invocation, function)

    def _on_call(self, call: ModelCall, site: CallSite) -> None:
        """Pushes LLM_START and LLM_END, unless the framework that makes the call pushes its own."""
        around = self.step_manager.innermost(site)
        if around is not None and around.category is IntermediateStepCategory.LLM:
            reported = self._reported.setdefault(around.uuid, [call])
            if call is not reported[0] and call.messages is reported[0].messages:  # another choice of the same request
                reported.append(call)
        else:
            self.step_manager.push_past(site, *llm_step_payloads(call))
        if not self.ledger.training or self.ledger.trains(call.llm):  # in training, a judge's call gets no reward
            self.rewards.add_call(call, site.invocation, is_targeted(call.functions, self._target_functions))

    def _keep_step(self, step: IntermediateStep) -> None:
        if self.ledger.closed:
            return
        if step.event_type is IntermediateStepType.LLM_END and (calls := self._reported.pop(step.UUID, None)):
            add_call_metadata(step.payload, calls)
        self.steps.append(step)
        if self._on_step is not None:
            self._on_step(step)
        if step.event_category is IntermediateStepCategory.CUSTOM:
            self._take_reward(step)

    def _take_reward(self, step: IntermediateStep) -> None:
        """A number under `reward` in a custom step's metadata is a step reward, once for its START and END.

        `function` may name the function it is for.
        """
        metadata = step.payload.metadata
        fields = metadata if isinstance(metadata, dict) else getattr(metadata, "model_extra", None) or {}
        value, function = fields.get("reward"), fields.get("function")
        if not isinstance(value, int | float) or isinstance(value, bool):
            return
        if self.rewards.latest_call is not None and step.UUID not in self._rewarded:
            self._rewarded.add(step.UUID)
            self.reward(value, function if isinstance(function, str) else None)


class _NullScope(EpisodeScope):
    """The scope outside any episode: steps reach subscribers, nothing is kept."""

    def _keep_step(self, step: IntermediateStep) -> None:
        pass

    def reward(self, value: float, function: str | None = None) -> None:
        pass


_null_scope = _NullScope()
_scope: ContextVar[EpisodeScope] = ContextVar("insitu_episode", default=_null_scope)


def current_scope() -> EpisodeScope | None:
    """The episode that the running code belongs to, if any."""
    scope = _scope.get()
    return None if scope is _null_scope else scope


class Context:
    """The running episode as workflow code sees it: `Context.get()`."""

    def __init__(self, scope: EpisodeScope) -> None:
        self._scope = scope

    @classmethod
    def get(cls) -> "Context":
        return cls(_scope.get())

    @property
    def input_message(self) -> Any:
        """The input the workflow was called with."""
        return self._scope.input_message

    @property
    def row(self) -> Any:
        """The dataset row as it is in the file, including the expected answer; None outside a dataset."""
        return self._scope.row

    @property
    def row_id(self) -> str | None:
        return self._scope.key.row_id if self._scope.key is not None else None

    @property
    def active_function(self) -> InvocationNode:
        """The running function; `root` outside all functions."""
        return current_call_site.get().invocation.node

    @property
    def is_evaluating(self) -> bool:
        return self._scope.is_evaluating

    @property
    def intermediate_step_manager(self) -> IntermediateStepManager:
        return self._scope.step_manager

    @property
    def seed(self) -> int:
        """Derived from the configured seed and the episode's identity, for the randomness of an environment."""
        return self._scope.seed

    def reward(self, value: float, function: str | None = None) -> None:
        """Adds to the step reward of the latest model call of the running function, or else of the episode.

        `function` names another function, at any depth; raises WorkflowError if that has made no call. In training,
        calls that are not trained (a judge's, for example) are skipped.
        """
        self._scope.reward(value, function)

"""The episode that is going on, and what a workflow's code may ask of it.

    scope = EpisodeScope(key=key, seed=7, training=True)
    with scope:
        answer = await workflow.ainvoke(row["question"])
    scope.calls, scope.steps, scope.rewards

Everything stands in context variables: concurrent episodes never see one another, and tasks started inside an episode
belong to it.
"""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Collection
from contextvars import ContextVar, Token
from typing import Any, Self

from insitu.advantages.targeting import is_targeted
from insitu.errors import CaptureError, WorkflowError
from insitu.schemas.components import WORKFLOW
from insitu.schemas.episodes import EpisodeKey, ModelCall
from insitu.schemas.steps import IntermediateStep, IntermediateStepCategory, IntermediateStepType, InvocationNode
from insitu.workflow.llm_steps import enrich, payloads_of
from insitu.workflow.steps import ROOT, IntermediateStepManager, Invocation, OnStep, Place, place


class Numbers:
    """0, 1, 2, ...; a number given back is the next one taken."""

    def __init__(self) -> None:
        self._next = 0
        self._returned: list[int] = []

    def take(self) -> int:
        if self._returned:
            return heapq.heappop(self._returned)
        self._next += 1
        return self._next - 1

    def give_back(self, number: int) -> None:
        heapq.heappush(self._returned, number)


class EpisodeScope:
    """All that is recorded while one episode, or a plain run, is going on.

    `training` says which calls are to be trained on: all, none, or those to some keys of `llms`. `calls` in order of
    their end, from `close` on in order of their start; `rewards` step rewards by call index; `failed_attempts` requests
    that brought no answer, by reason (a client that tries again makes one call all the same); `late_calls` requests
    that were not recorded because the episode had ended; `capture_error` what a model call lacked, even if the workflow
    has swallowed the exception.
    """

    def __init__(
        self,
        *,
        key: EpisodeKey | None = None,
        seed: int = 0,
        input_message: Any = None,
        is_evaluating: bool = False,
        training: bool | Collection[str] = False,
        on_step: OnStep | None = None,
    ) -> None:
        self.key = key
        self.seed = seed
        self.input_message = input_message
        self.is_evaluating = is_evaluating
        self._training = training
        self.row: Any = None
        self.needs_token_ids = True
        self.target_functions: Collection[str] = (WORKFLOW,)
        self.calls: list[ModelCall] = []
        self.steps: list[IntermediateStep] = []
        self.rewards: dict[int, float] = {}
        self.failed_attempts: Counter[str] = Counter()
        self.late_calls = 0
        self.capture_error: CaptureError | None = None
        self.closed = False
        self.step_manager = IntermediateStepManager(keep=self._keep_step)
        self.calls_begun = 0
        self.turns: defaultdict[bytes, Numbers] = defaultdict(Numbers)
        self._reported: dict[str, list[ModelCall]] = {}  # by the UUID of a framework's step that is open
        self._on_step = on_step
        self._latest_call: int | None = None
        self._latest_in: dict[str, int] = {}  # by the name of a function
        self._targeted: set[int] = set()
        self._rewarded: set[str] = set()
        self._tokens: tuple[Token[Any], Token[Any]] | None = None

    def __enter__(self) -> Self:
        self._tokens = (_scope.set(self), place.set(Place(Invocation(ROOT.invocation.node))))
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._tokens is not None:
            _scope.reset(self._tokens[0])
            place.reset(self._tokens[1])
            self._tokens = None
        self.close()

    def activate(self) -> Self:
        """For `with scope.activate():`, the same as `with scope:`."""
        return self

    def trains(self, llm: str | None) -> bool:
        """Whether calls to this key of `llms` are to be trained on: logprobs, and as a rule token ids, are needed."""
        return self._training if isinstance(self._training, bool) else llm in self._training

    def close(self) -> None:
        """Nothing that comes later is recorded."""
        if not self.closed:
            self.closed = True
            self.calls.sort(key=lambda call: call.index)
            self.step_manager.complete()

    def record(self, call: ModelCall, made_at: Place) -> None:
        """Keep a call that has ended; step rewards now fall to it, in all functions it was made in.

        It is an LLM_START and an LLM_END step, pushed here unless the framework that makes the call pushes its own.
        """
        self.calls.append(call)
        around = self.step_manager.innermost(made_at)
        if around is not None and around.category is IntermediateStepCategory.LLM:
            reported = self._reported.setdefault(around.uuid, [call])
            if call is not reported[0] and call.messages is reported[0].messages:  # another choice of the same request
                reported.append(call)
        else:
            self.step_manager.push_past(made_at, *payloads_of(call))
        if self._training and not self.trains(call.llm):
            return  # a judge's answer earns nothing: the reward it gives is for the call it judges
        trained = is_targeted(call.functions, self.target_functions)
        if trained:
            self._targeted.add(call.index)
        if trained or self._latest_call not in self._targeted:
            self._latest_call = call.index
        for name in call.functions:
            if trained or self._latest_in.get(name) not in self._targeted:
                self._latest_in[name] = call.index
        invocation: Invocation | None = made_at.invocation
        while invocation is not None:
            if trained or invocation.latest_call not in self._targeted:
                invocation.latest_call = call.index
            invocation = invocation.caller

    def reward(self, value: float, function: str | None = None) -> None:
        """Add to the step reward of the latest call of the running function, or else of the episode.

        `function` names another one: then it is the latest call made in that, however deep.

        In training calls of other models are passed over, and calls outside the target functions once the running
        function has made a call that is trained: a reward that falls to one of these trains nothing.
        """
        if not math.isfinite(value):
            raise WorkflowError(f"a step reward is {value}; allowed: a finite number")
        if function is not None and function not in self._latest_in:
            made = ", ".join(sorted(self._latest_in)) or "none"
            raise WorkflowError(
                f"a step reward was given to {function!r}, which has made no model call so far; those that have: {made}"
            )
        index = place.get().invocation.latest_call if function is None else self._latest_in[function]
        if index is None:
            index = self._latest_call
        if index is None:
            raise WorkflowError("a step reward was given before the episode's first model call: it belongs to none")
        self.rewards[index] = self.rewards.get(index, 0.0) + value

    def _keep_step(self, step: IntermediateStep) -> None:
        if self.closed:
            return
        if step.event_type is IntermediateStepType.LLM_END and (calls := self._reported.pop(step.UUID, None)):
            enrich(step.payload, calls)
        self.steps.append(step)
        if self._on_step is not None:
            self._on_step(step)
        if step.event_category is IntermediateStepCategory.CUSTOM:
            self._take_reward(step)

    def _take_reward(self, step: IntermediateStep) -> None:
        """A number under `reward` in a custom step's metadata is a step reward, once for its START and END.

        A name under `function` says whose.
        """
        metadata = step.payload.metadata
        given = metadata if isinstance(metadata, dict) else getattr(metadata, "model_extra", None) or {}
        value, function = given.get("reward"), given.get("function")
        if not isinstance(value, int | float) or isinstance(value, bool):
            return
        if self._latest_call is not None and step.UUID not in self._rewarded:
            self._rewarded.add(step.UUID)
            self.reward(value, function if isinstance(function, str) else None)


class _Outside(EpisodeScope):
    """Stands in where no episode is going on: steps reach subscribers, nothing is kept."""

    def _keep_step(self, step: IntermediateStep) -> None:
        pass

    def reward(self, value: float, function: str | None = None) -> None:
        pass


_outside = _Outside()
_scope: ContextVar[EpisodeScope] = ContextVar("insitu_episode", default=_outside)


def current_scope() -> EpisodeScope | None:
    """The episode that is going on here, if any."""
    scope = _scope.get()
    return None if scope is _outside else scope


class Context:
    """What a workflow's code may know of the run it is part of: `Context.get()`."""

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
        """The dataset's row as it stands in the file, the expected answer included; None outside a dataset."""
        return self._scope.row

    @property
    def row_id(self) -> str | None:
        return self._scope.key.row_id if self._scope.key is not None else None

    @property
    def active_function(self) -> InvocationNode:
        """The function that is running; `root` outside all functions."""
        return place.get().invocation.node

    @property
    def is_evaluating(self) -> bool:
        return self._scope.is_evaluating

    @property
    def intermediate_step_manager(self) -> IntermediateStepManager:
        return self._scope.step_manager

    @property
    def seed(self) -> int:
        """Fixed by the configured seed and the episode's identity: for the randomness of an environment."""
        return self._scope.seed

    def reward(self, value: float, function: str | None = None) -> None:
        """Add to the step reward of the latest model call: of the running function, or else of the episode.

        `function` names another function that has made one; WorkflowError if it has not. In training, calls that are
        not trained (a judge's, say) are passed over.
        """
        self._scope.reward(value, function)

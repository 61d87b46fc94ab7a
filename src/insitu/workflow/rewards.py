"""Step rewards: which model call a reward falls to that is given while an episode runs."""

import math

from insitu.capture.ledger import Invocation
from insitu.errors import WorkflowError
from insitu.schemas.episodes import ModelCall


class StepRewards:
    """Sums of step rewards by call index.

    A reward falls to the latest call of the running function, or else of the episode. Calls that are not trained are
    passed over once the function has made one that is: a reward that falls to one of these trains nothing.
    """

    def __init__(self) -> None:
        self.by_call: dict[int, float] = {}
        self._latest: int | None = None
        self._latest_in: dict[str, int] = {}  # by the name of a function
        self._trained: set[int] = set()

    @property
    def can_be_given(self) -> bool:
        """Whether there is a call for them to fall to."""
        return self._latest is not None

    def add_call(self, call: ModelCall, invocation: Invocation, is_trained: bool) -> None:
        """Rewards now fall to this call, in all functions it was made in."""
        if is_trained:
            self._trained.add(call.index)
        if is_trained or self._latest not in self._trained:
            self._latest = call.index
        for name in call.functions:
            if is_trained or self._latest_in.get(name) not in self._trained:
                self._latest_in[name] = call.index
        around: Invocation | None = invocation
        while around is not None:
            if is_trained or around.latest_call not in self._trained:
                around.latest_call = call.index
            around = around.caller

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
            index = self._latest
        if index is None:
            raise WorkflowError("a step reward was given before the episode's first model call: it belongs to none")
        self.by_call[index] = self.by_call.get(index, 0.0) + value

"""Episodes, model calls and training rows.

An episode of a two-move game, and the training row of its first call:

    EpisodeKey(run="r1", epoch=3, row_id="17", generation=2, attempt=0).text()  ->  "r1/3/17/2/0"
    ModelCall(prompt_token_ids=[1, 5, 9], token_ids=[7, 2], logprobs=[-0.1, -0.7], finish_reason="stop", ...)
    TrainingRow(token_ids=[1, 5, 9, 7, 2], loss_mask=[0, 0, 0, 1, 1], logprobs=[0, 0, 0, -0.1, -0.7],
                advantages=[0, 0, 0, 0.8, 0.8], episode="r1/3/17/2/0", calls=[0])
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from pydantic import BaseModel

FORMAT_VERSION = 1
"""Version of the records in a run directory, in the first line of each file."""


class EpisodeKey(NamedTuple):
    """The identity of one run of the workflow on one dataset row."""

    run: str
    epoch: int
    row_id: str
    generation: int
    attempt: int = 0

    def text(self) -> str:
        return f"{self.run}/{self.epoch}/{self.row_id}/{self.generation}/{self.attempt}"

    def seed(self, run_seed: int, purpose: str = "episode") -> int:
        """A 63-bit seed derived from the configured seed and this key without its random run id."""
        text = f"{run_seed}|{purpose}|{self.epoch}|{self.row_id}|{self.generation}|{self.attempt}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(slots=True)
class ModelCall:
    """One prompt and one completion, as sent and received.

    `messages` of a text completion hold the prompt as a user message; `sampling` holds the other request parameters.
    `prompt_token_ids` (P), `token_ids` (C) and `logprobs` (C, natural logarithms) are the server's. With `n` > 1 or
    several prompts, each choice is a separate call. `functions` are the enclosing functions, outermost first; `started`
    and `ended` are seconds since 1970. `error` says why there is no completion.
    """

    index: int
    model: str
    messages: list[dict[str, Any]]
    llm: str | None = None
    tools: list[dict[str, Any]] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    message: dict[str, Any] | None = None
    choice: int = 0
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    finish_reason: str | None = None
    policy_version: int | None = None
    functions: tuple[str, ...] = ()
    started: float = 0.0
    ended: float = 0.0
    usage: dict[str, Any] | None = None
    error: str | None = None


class TrainingRow(BaseModel):
    """A training sequence of T tokens; all lists but `calls` have length T.

    `loss_mask` is 1 for trained tokens, which the policy sampled. `logprobs` are natural logarithms from the sampler,
    arbitrary where the mask is 0. `advantages` may be a single number for all trained tokens. `calls` are the indices
    of the episode's calls in the row, in order.
    """

    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    advantages: float | list[float] = 0.0
    episode: str = ""
    calls: list[int] = []


class DropReason(StrEnum):
    """Why an episode or a group was not trained. Every drop is counted under one of these."""

    WORKFLOW_ERROR = "workflow_error"
    TIMEOUT = "timeout"
    BACKEND_ERROR = "backend_error"
    CAPTURE_ERROR = "capture_error"
    NO_ANSWER = "no_answer"
    EVALUATOR_ERROR = "evaluator_error"
    NO_SCORE = "no_score"
    NAN_SCORE = "nan_score"
    NO_CALLS = "no_calls"
    NO_TARGET_CALLS = "no_target_calls"
    NO_STEP_REWARDS = "no_step_rewards"
    EPISODE_ORDER = "episode_order"
    SINGLE_MEMBER = "single_member"
    NO_VARIANCE = "no_variance"
    CURRICULUM = "curriculum"
    SUBSAMPLE = "subsample"


class Outcome(StrEnum):
    OK = "ok"
    FAILED = "failed"


@dataclass(slots=True)
class Episode:
    """One run of the workflow on one row. A failed one has `reason` and `error`; `seconds` is wall-clock time."""

    key: EpisodeKey
    outcome: Outcome
    output: Any = None
    calls: list[ModelCall] = field(default_factory=list)
    steps: list[Any] = field(default_factory=list)
    reason: DropReason | None = None
    error: str | None = None
    seconds: float = 0.0
    reward: float | None = None
    reasoning: Any = None
    step_rewards: list[float] | None = None
    rewarded_functions: list[str] = field(default_factory=list)
    """Functions whose calls have step rewards; calls of other functions have 0.0 in `step_rewards`."""
    failed_requests: dict[str, int] = field(default_factory=dict)
    """Failed requests of all attempts by reason; a request that succeeded on retry is one call."""
    requested: Mapping[str, int] = field(default_factory=dict)
    """Completions requested by all attempts, by URL of the server; those of failed requests too."""

"""Episodes, model calls and training rows: what capture writes, disk keeps, and training reads.

One episode of a two-move game, and the row its first call becomes:

    EpisodeKey(run="r1", epoch=3, row_id="17", generation=2, attempt=0).text()  ->  "r1/3/17/2/0"
    ModelCall(prompt_token_ids=[1, 5, 9], token_ids=[7, 2], logprobs=[-0.1, -0.7], finish_reason="stop", ...)
    TrainingRow(token_ids=[1, 5, 9, 7, 2], loss_mask=[0, 0, 0, 1, 1], logprobs=[0, 0, 0, -0.1, -0.7],
                advantages=[0, 0, 0, 0.8, 0.8], episode="r1/3/17/2/0", calls=[0])
"""

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from pydantic import BaseModel

FORMAT_VERSION = 1
"""Of the records in a run's directory; written in each file's first line."""


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
        """A 63-bit seed fixed by the configured seed and this identity, the random run id left out."""
        text = f"{run_seed}|{purpose}|{self.epoch}|{self.row_id}|{self.generation}|{self.attempt}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(slots=True)
class ModelCall:
    """One request to a model, exactly as it crossed the wire.

    `messages` and `tools` as sent, of a text completion the prompt as a user's message; `sampling` holds the other
    parameters of the request; `prompt_token_ids` (P) and `token_ids` (C) as the server tokenised and sampled them;
    `logprobs` (C) natural logarithms, as sampled; `message` the assistant message that came back (of choice 0 when
    `n` > 1: each further choice is a call of its own with `choice` 1, 2, ...; further prompts are calls too);
    `functions` the names of the functions the call was made in, outermost first; `started` and `ended` in seconds
    since 1970. `error` says why there is no completion.
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
    """A sequence the learner is given: all four lists have the length of `token_ids` (T).

    `loss_mask` is 1 where the token was sampled by the policy and is trained, else 0; `logprobs` are natural
    logarithms as sampled (anything where the mask is 0); `advantages` one weight a token, or a single number for all
    trained tokens. `calls` are the indices of the episode's calls that the row holds, in order.
    """

    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    advantages: float | list[float] = 0.0
    episode: str = ""
    calls: list[int] = []


class DropReason(StrEnum):
    """Why an episode, or a whole group, was not trained on. Every drop is counted under one of these."""

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
    """One run of the workflow on one row, and what is known of it when it has ended.

    `steps` are the intermediate steps, `output` the workflow's answer. A failed episode has `reason` and `error`.
    Costs: `seconds` wall-clock, `calls` with their tokens.
    """

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
    """The functions whose calls step rewards were given to; for those of others 0.0 stands in `step_rewards`."""
    failed_requests: dict[str, int] = field(default_factory=dict)
    """Requests that brought no answer, over all attempts, by reason; a client that tried again made one call."""

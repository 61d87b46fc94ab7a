"""Episodes, model calls and training rows.

An episode of a two-move game, and the training row of its first call:

    EpisodeKey(run_id="r1", epoch=3, row_id="17", generation=2, attempt=0).text()  ->  "r1/3/17/2/0"
    ModelCall(prompt_token_ids=[1, 5, 9], token_ids=[7, 2], logprobs=[-0.1, -0.7], finish_reason="stop", ...)
    TrainingRow(token_ids=[1, 5, 9, 7, 2], loss_mask=[0, 0, 0, 1, 1], logprobs=[0, 0, 0, -0.1, -0.7],
                advantages=[0, 0, 0, 0.8, 0.8], episode="r1/3/17/2/0", calls=[0])
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from operator import attrgetter
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from insitu.schemas.evaluation import EvalInputItem
from insitu.schemas.steps import IntermediateStep

FORMAT_VERSION = 2
"""Format version, written as the first line of each `.jsonl` file of a run except `training_metrics.jsonl`."""
GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy, as in vLLM; dividing by them would overflow."""


class EpisodeKey(NamedTuple):
    """Identifies one episode: an execution of the workflow on a dataset row.

    `generation` is its index in the group, `attempt` counts retries from 0. `replays` of them repeat an attempt that an
    outage of the model's server has ended, with the same seed.
    """

    run_id: str
    epoch: int
    row_id: str
    generation: int
    attempt: int = 0
    replays: int = 0

    @property
    def member(self) -> tuple[str, int]:
        """The row and the generation: its place in the epoch, whatever the attempt."""
        return self.row_id, self.generation

    def replayed(self, last_attempt: int) -> "EpisodeKey":
        """This attempt again, as a new one after `last_attempt`."""
        following = last_attempt + 1
        return self._replace(attempt=following, replays=self.replays + following - self.attempt)

    def text(self) -> str:
        return f"{self.run_id}/{self.epoch}/{self.row_id}/{self.generation}/{self.attempt}"

    def label(self) -> str:
        """The episode in messages about a run, whatever the attempt."""
        epoch = f" of epoch {self.epoch}" if self.epoch else ""
        return f"row {self.row_id!r:.80}, generation {self.generation}{epoch}"

    def seed(self, run_seed: int) -> int:
        """A 63-bit seed derived from the configured seed and this key without its random run id."""
        text = f"{run_seed}|episode|{self.epoch}|{self.row_id}|{self.generation}|{self.attempt - self.replays}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


GROUP_KEY = "insitu_group"
"""In the metadata of a trajectory: the id of its group, if that may have episodes of several rows."""


@dataclass(slots=True)
class ModelCall:
    """One prompt and one completion, as sent and received.

    `index` is the call's position in the episode; `model` the requested name and `llm` its key under `llms`. `messages`
    of a text completion hold the prompt as a user message; `sampling` holds the remaining request parameters
    (temperature, max_tokens, ...). `message` is the sampled assistant message. With `n` > 1 or several prompts, each
    choice is a separate call. `prompt_token_ids` (P), `token_ids` (C) and `logprobs` (C, natural logarithms) are as
    returned by the server, and `policy_version` is the version of the weights that sampled them, `weights` their digest
    if the server sends one. `logprobs` are of the logits divided by `logprobs_temperature`; None if the server does not
    say: they are the model's own. `functions` are the enclosing
    functions, outermost first; `started` and `ended` are Unix timestamps. `error` says why the completion is missing or
    incomplete, and `tool_call_malformed` that its text has tool calls that the server could not parse.
    `teacher_logprobs` are those of the sampled tokens under a teacher, if the trainer has one; None for a
    token that the teacher has no room for. `sent_logprobs` (C) are the entries that the server sent (`token`, `bytes`,
    `logprob`, `top_logprobs`), for training that needs what is `GIVEN`, or if there are no token ids.
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
    logprobs_temperature: float | None = None
    weights: str | None = None
    tool_call_malformed: bool = False
    teacher_logprobs: list[float | None] | None = None
    sent_logprobs: list[dict[str, Any]] | None = None

    @property
    def all_token_ids(self) -> list[int]:
        """The token ids of the prompt and the completion; an unknown part is left out."""
        return (self.prompt_token_ids or []) + (self.token_ids or [])


class TrainingRow(BaseModel):
    """A training sequence of T tokens, or a dialogue to be rendered.

    `token_ids`, `loss_mask`, `logprobs` and `advantages` (if a list) have length T. `loss_mask` is 1 for trained
    tokens. `logprobs` are natural logarithms from the sampler, arbitrary where the mask is 0; `advantages` may be a
    single number for all trained tokens. Both are for `method: grpo`, as is `temperature`, at which the trained tokens
    were sampled: `logprobs` are those after division of the logits by it, and the learner divides too. `shaping` has
    the keys of the request that changed the logits before (`logit_bias`, `response_format` ...). `calls` lists
    the `ModelCall.index` of each call whose tokens the row contains.

    `pair` (dpo) is shared by the rows of a preference pair. `preferred` is true for the chosen side (dpo) or a
    desirable episode (kto), and false for the other.

    `messages` (and `tools`) replace `token_ids` for text that was not sampled from the model: the backend renders them
    with its chat template. `trained_messages` are positions in `messages`; None: all assistant messages are trained.
    """

    token_ids: list[int] = []
    loss_mask: list[int] = []
    logprobs: list[float] = []
    advantages: float | list[float] = 0.0
    temperature: float = 1.0
    shaping: dict[str, Any] = {}
    episode: str = ""
    calls: list[int] = []
    pair: str = ""
    preferred: bool | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    trained_messages: list[int] | None = None


class Needs(IntEnum):
    """What training needs of each call that it trains: `GIVEN`, or a level that includes those before it.

    With `GIVEN` the server is asked for everything, what it does not give may be missing, and the tokens and
    alternatives that it sends are kept.
    """

    GIVEN = 0
    TEXT = 1
    LOGPROBS = 2
    TOKEN_IDS = 3


class DropReason(StrEnum):
    """Why an episode or a group was left out of training or evaluation. Every drop is counted under one of these."""

    WORKFLOW_ERROR = "workflow_error"
    TIMEOUT = "timeout"
    BACKEND_ERROR = "backend_error"
    CAPTURE_ERROR = "capture_error"  # a response without logprobs, or without required token ids
    NO_ANSWER = "no_answer"  # the workflow is skipped and the dataset row has no answer
    EVALUATOR_ERROR = "evaluator_error"
    NO_SCORE = "no_score"  # missing or not a number
    NAN_SCORE = "nan_score"  # NaN or infinite
    NO_CALLS = "no_calls"
    NO_TARGET_CALLS = "no_target_calls"  # calls were made, but none is selected for training
    NO_STEP_REWARDS = "no_step_rewards"
    TEACHER_ERROR = "teacher_error"  # the teacher gave no log-probabilities of the sampled tokens
    NO_TEACHER_CONTEXT = "no_teacher_context"  # no expected answer, or no reasoning, for the context of the teacher
    EPISODE_ORDER = "episode_order"  # OpenPipe ART does not accept the order of the messages
    SINGLE_MEMBER = "single_member"  # only one episode of the group remains
    NO_VARIANCE = "no_variance"
    UNMODELED_SAMPLING = "unmodeled_sampling"  # greedy, truncated, or with logprobs of another temperature
    CURRICULUM = "curriculum"  # a group that curriculum learning does not include yet
    SUBSAMPLE = "subsample"  # not selected by `random_subsample`
    # of preferences; the first counts episodes, the next three candidates, then turns, and the last six pairs
    NO_CANDIDATES = "no_candidates"
    UNSCORED_CANDIDATE = "unscored_candidate"  # without a finite score
    UNTARGETED_CANDIDATE = "untargeted_candidate"  # of a model or function that is not trained
    UNSAMPLED_CANDIDATE = "unsampled_candidate"  # not sampled by a recorded call, which training on tokens needs
    SINGLE_CANDIDATE = "single_candidate"
    EQUAL_SCORES = "equal_scores"
    IDENTICAL_RESPONSES = "identical_responses"
    DIFFERENT_PROMPTS = "different_prompts"
    SMALL_DIFFERENCE = "small_difference"  # of scores, below the configured minimum
    MAX_PAIRS = "max_pairs"  # beyond the configured maximum
    DUPLICATE_PAIR = "duplicate_pair"
    NO_PAIR = "no_pair"  # an episode that is in no pair; why not is counted by the reasons of pairs
    NOT_BEST = "not_best"  # of its row, for finetuning on the best episodes
    NOT_TEXT = "not_text"  # a dialogue with images or other parts that an exported format cannot hold


class EpisodeStatus(StrEnum):
    OK = "ok"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class CandidateStep:
    """A scored candidate of a turn: one of several completions of the same prompt.

    `prompt` is what the model was shown, as messages or text. `score` is None if it is not a finite number. `call` is
    the position in the episode's calls of the one that sampled the candidate; None if no recorded call did.
    `example_id` is the id of the dataset row, `raw_metadata` what the step that reported the candidate holds besides.
    """

    turn_id: str
    candidate_index: int
    prompt: list[dict[str, Any]] | str
    response: str
    score: float | None
    turn_index: int | None = None
    call: int | None = None
    example_id: str = ""
    raw_metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two candidates of one turn, the better one first."""

    chosen: CandidateStep
    rejected: CandidateStep

    example_id = property(attrgetter("chosen.example_id"))
    turn_id = property(attrgetter("chosen.turn_id"))
    prompt = property(attrgetter("chosen.prompt"))
    chosen_response = property(attrgetter("chosen.response"))
    rejected_response = property(attrgetter("rejected.response"))

    @property
    def score_diff(self) -> float:
        assert self.chosen.score is not None  # only candidates with scores are paired
        assert self.rejected.score is not None
        return self.chosen.score - self.rejected.score


class StepLog(Sequence[IntermediateStep]):
    """The steps of an episode in the order in which they happened; entries may be functions that make some."""

    def __init__(self, entries: Iterable[Any] = ()) -> None:
        self.entries = [*entries]

    def append(self, step: IntermediateStep) -> None:
        self.entries.append(step)

    def tolist(self) -> list[IntermediateStep]:
        """All steps; JSON holds a log as this list."""
        steps: list[Any] = []
        for entry in self.entries:
            steps += [entry] if isinstance(entry, IntermediateStep) else entry()
        self.entries[:] = steps
        return steps

    def reported(self) -> list[IntermediateStep]:
        """The steps that exist, without those that are yet to be made of calls and functions."""
        return [entry for entry in self.entries if isinstance(entry, IntermediateStep)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepLog) and self.tolist() == other.tolist()

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self.tolist())

    def __iter__(self) -> Iterator[IntermediateStep]:
        return iter(self.tolist())

    def __getitem__(self, index: Any) -> Any:
        return self.tolist()[index]


@dataclass(slots=True)
class Episode:
    """One execution of the workflow on one dataset row.

    `reason` and `error` say why it failed or was dropped; `seconds` is the wall-clock time of the last attempt. `steps`
    are its IntermediateSteps. `reasoning` is the evaluator's explanation of the reward. `step_rewards` has one reward
    per entry of `calls`, or per trained call if the evaluator returned it that way.
    """

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)

    key: EpisodeKey
    outcome: EpisodeStatus
    output: Any = None
    calls: list[ModelCall] = field(default_factory=list)
    steps: StepLog = field(default_factory=StepLog)
    reason: DropReason | None = None
    error: str | None = None
    seconds: float = 0.0
    reward: float | None = None
    reasoning: Any = None
    scores: dict[str, float | None] = field(default_factory=dict)
    """By evaluator, the reward's included; None: it gave none."""
    step_rewards: list[float] | None = None
    rewarded_functions: list[str] = field(default_factory=list)
    """Functions whose calls have step rewards; calls of other functions have 0.0 in `step_rewards`."""
    failed_requests: dict[str, int] = field(default_factory=dict)
    """Number of failed model requests over all attempts, by reason.

    A request that later succeeds on retry is still one call.
    """
    requested: Mapping[str, int] = field(default_factory=dict)
    """Completions requested by all attempts, by URL of the server; those of failed requests too."""
    candidates: list[CandidateStep] = field(default_factory=list)
    """The candidates of the targeted functions and llms; only preference builders read them from the steps."""
    trained_calls: list[int] | None = None
    """Positions in `calls` of those that are trained; None: not determined yet."""
    source: str | None = None
    """The name of the recorded episode that this is, if it was read from another run."""
    abandoned_attempts: int = 0
    """Attempts whose code ignored its cancellation, so that it may still run."""

    def fill(self, item: EvalInputItem) -> EvalInputItem:
        """Writes the answer, or why there is none, and the steps into a dataset row."""
        item.output_obj, item.error, item.reason = self.output, self.error, self.reason
        item._steps = self.steps
        item.__dict__.pop("trajectory", None)  # made when it is first read
        return item

"""Base class for evaluators, scoring, and the rewards of episodes; a failure is an error, not a score of 0."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from insitu.advantages.credit import TrainedCalls, credited_function
from insitu.capture.ledger import OUTSIDE, SCORING, current_call_site
from insitu.collect.episodes import isolated, own_copy
from insitu.collect.watchdog import doing, seconds_since
from insitu.config import Config
from insitu.errors import ConfigError, InsituError, a_type, describe_error, format_error
from insitu.schemas.episodes import DropReason, Episode, EpisodeStatus
from insitu.schemas.evaluation import (
    EvalInput,
    EvalInputItem,
    EvalOutput,
    EvalOutputItem,
    EvaluatorBaseConfig,
    EvaluatorInfo,
)
from insitu.schemas.finetuning import ALLOWED_REWARDS, MAX_REWARD, RewardFunctionConfig, signed
from insitu.schemas.kinds import EVALUATOR

logger = logging.getLogger(__name__)

_PENALIZED = (DropReason.WORKFLOW_ERROR, DropReason.TIMEOUT, DropReason.EVALUATOR_ERROR, DropReason.NAN_SCORE)
"""Failures of the workflow and of its evaluator: these get `reward_function.on_failure` if it is a number."""


class BaseEvaluator(ABC):
    """Scores up to `max_concurrency` items concurrently; an exception becomes the item's error.

    `tqdm_desc` is accepted for compatibility and ignored.
    """

    def __init__(self, max_concurrency: int = 4, tqdm_desc: str = "Evaluating") -> None:
        self.max_concurrency = max_concurrency
        self.tqdm_desc = tqdm_desc

    @abstractmethod
    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        """Scores one item."""

    async def evaluate(self, eval_input: EvalInput) -> EvalOutput:
        semaphore = asyncio.Semaphore(self.max_concurrency)

        async def evaluate_one(item: EvalInputItem) -> EvalOutputItem:
            async with semaphore:
                scored = await isolated(lambda: self.evaluate_item(item))
            if scored.value is not None:
                return scored.value
            problem = "it returned None"
            if scored.error is not None:
                form = format_error if isinstance(scored.error, InsituError) else describe_error
                problem = form(scored.error)
            return EvalOutputItem(id=item.id, rep=item.rep, error=problem)

        items = await asyncio.gather(*(evaluate_one(item) for item in eval_input.eval_input_items))
        return EvalOutput(average_score=average(items), eval_output_items=list(items))


async def score(
    evaluator: EvaluatorInfo, name: str, items: Sequence[EvalInputItem], limit: float | None = None
) -> EvalOutput:
    """Runs an evaluator for at most `limit` seconds.

    Returns one output item per input item, in order; items it omits, or all if it raises, have an `error`. Items are
    matched by id, and repetitions of a row in order.
    """

    async def evaluate() -> EvalOutput:
        if current_call_site.get() is OUTSIDE:
            current_call_site.set(SCORING)
        return await evaluator.evaluate_fn(EvalInput(eval_input_items=[own_copy(item) for item in items]))

    started = time.monotonic()
    with doing(lambda: f"its evaluator {name} has run for {seconds_since(started)}"):
        ran = await isolated(evaluate, limit)
    if ran.timed_out:
        return _failed(f"evaluator {name} took longer than eval.general.evaluator_timeout allows: {limit:g} s", items)
    if ran.error is not None:
        return _failed(f"evaluator {name} raised {describe_error(ran.error)}", items)
    output = ran.value
    if not isinstance(output, EvalOutput):
        return _failed(f"evaluator {name} returned {a_type(output)}, not an EvalOutput", items)
    by_id: dict[str, list[EvalOutputItem]] = {}
    for scored in output.eval_output_items:
        by_id.setdefault(str(scored.id), []).append(scored)
    matched = []
    for item in items:
        scores = by_id.get(str(item.id))
        missing = f"evaluator {name} returned no score for this item"
        scored = scores.pop(0) if scores else EvalOutputItem(id=item.id, error=missing)
        scored.rep = item.rep
        matched.append(scored)
    mean = average(matched) if output.average_score is None else output.average_score
    return output.model_copy(update={"eval_output_items": matched, "average_score": mean})


def _failed(message: str, items: Sequence[EvalInputItem]) -> EvalOutput:
    return EvalOutput(eval_output_items=[EvalOutputItem(id=item.id, rep=item.rep, error=message) for item in items])


def parse_score(item: EvalOutputItem) -> tuple[float | None, DropReason | None, str | None]:
    """Returns (score, None, None), or (None, drop reason, message) if the score is missing or invalid."""
    if item.error is not None:
        return None, DropReason.EVALUATOR_ERROR, item.error
    if item.score is None:
        return None, DropReason.NO_SCORE, "the evaluator returned no score"
    try:
        value = float(item.score)
    except Exception:  # of an evaluator's own type
        return None, DropReason.NO_SCORE, f"the score {item.score!r:.80} is not a number"
    if not is_reward(value):
        return None, DropReason.NAN_SCORE, f"the score is {value}; allowed: {ALLOWED_REWARDS}"
    return value, None, None


def reward_of(config: Config) -> tuple[str, int]:
    """The evaluator that gives the reward, and its sign: that of `finetuning.reward_function`, or the only one.

    Raises ConfigError if there are several, or none.
    """
    names, reward = config.names(EVALUATOR), config.finetuning.reward_function
    if reward is not None and reward.evaluator in names:
        return reward.evaluator, reward.sign
    if len(names) != 1:
        raise ConfigError(
            f"{config.source}: finetuning.reward_function must name the evaluator whose scores are the reward; "
            f"available: {', '.join(names) or 'none'}"
        )
    return names[0], 1


def check_rows(config: Config, rows: Sequence[EvalInputItem]) -> None:
    """Raises ConfigError if an evaluator can score none of the rows."""
    for name in config.names(EVALUATOR):
        if isinstance(block := config.block(EVALUATOR, name), EvaluatorBaseConfig):
            block.check_rows(f"eval.evaluators.{name}", rows)


def unshaped_reward_of(config: Config) -> tuple[str, int]:
    """The evaluator and sign of `reward_of`, for a file whose rows another trainer plays.

    Raises ConfigError for a reward with a shape, which reads episodes of insitu.
    """
    reward = config.finetuning.reward_function
    if reward is not None and reward.shape is not None:
        raise ConfigError(
            f"{config.source}: finetuning.reward_function.shape reads episodes, which another trainer does not have: "
            "use a file without it"
        )
    return reward_of(config)


def as_reward(item: EvalOutputItem, sign: int) -> EvalOutputItem:
    """The scored item of the reward's evaluator, with negated scores if less is better (a `sign` of -1)."""
    score, _, _ = parse_score(item)
    if sign > 0 or score is None:
        return item
    steps = item.step_scores and [signed(each, sign) for each in item.step_scores]
    return item.model_copy(update={"score": signed(score, sign), "step_scores": steps})


def is_reward(value: float) -> bool:
    """Whether it is finite, and small enough for sums and squares to be finite."""
    return abs(value) <= MAX_REWARD


def average(items: Sequence[EvalOutputItem]) -> float | None:
    """The mean of the valid scores; None if there are none."""
    scores = [value for item in items if (value := parse_score(item)[0]) is not None]
    return fmean(scores) if scores else None


def scores_by_row(output: EvalOutput, sign: int = 1) -> dict[str, list[float]]:
    """Valid scores, or rewards of this sign, by row id, as repetitions of a row are not independent samples."""
    scores: dict[str, list[float]] = {}
    for item in output.eval_output_items:
        if (value := parse_score(item)[0]) is not None:
            scores.setdefault(str(item.id), []).append(signed(value, sign))
    return scores


@dataclass(frozen=True)
class Scoring:
    """How the episodes of training are scored: by `evaluators`, of which the first is that of `reward`, if any.

    `limit` is in seconds per evaluator. `compute_reward` turns a scored item into the reward; None: its score. `shape`
    changes the reward of an episode.
    """

    evaluators: Sequence[str] = ()
    reward: RewardFunctionConfig | None = None
    limit: float | None = None
    compute_reward: Callable[[EvalOutputItem], Awaitable[float]] | None = None
    shape: Callable[[float, Episode, EvalInputItem], Awaitable[float]] | None = None

    @cached_property
    def sign(self) -> int:
        """-1 if less is better."""
        return self.reward.sign if self.reward is not None else 1


@dataclass(frozen=True)
class Scorer:
    """Scores the episodes of a plan. Adds the names of evaluators that give one no score to `unscored`."""

    scoring: Scoring
    evaluators: Mapping[str, EvaluatorInfo]
    trained: TrainedCalls
    unscored: set[str]

    async def score(self, episode: Episode, row: EvalInputItem) -> None:
        """Sets the scores of an episode and its reward, or the reason and error if there is none.

        A failed one gets the reward of `on_failure`, if that is a number.
        """
        if episode.outcome is EpisodeStatus.OK:
            await self._score(episode, row)
        reward = self.scoring.reward
        if episode.reason in _PENALIZED and reward is not None and isinstance(reward.on_failure, float):
            episode.reward = reward.on_failure
            if positions := self.trained.of(episode):  # charged to the last trained call, on top of the step rewards
                episode.step_rewards = episode.step_rewards or [0.0] * len(episode.calls)
                episode.step_rewards[positions[-1]] += reward.on_failure

    async def _score(self, episode: Episode, row: EvalInputItem) -> None:
        scoring = self.scoring
        item = episode.fill(row.model_copy())
        outputs = await asyncio.gather(
            *(score(info, key, [item], scoring.limit) for key, info in self.evaluators.items())
        )
        items = {key: output.eval_output_items[0] for key, output in zip(self.evaluators, outputs, strict=True)}
        name = scoring.evaluators[0] if scoring.reward is not None else None
        rewarding = items.pop(name) if name is not None else None
        for key, other in items.items():
            episode.scores[key], _, message = parse_score(other)
            if message is not None and key not in self.unscored:
                self.unscored.add(key)
                logger.warning("the evaluator %s gave an episode of training no score: %s", key, message)
        if name is None or rewarding is None:
            return
        value, episode.reason, message = parse_score(rewarding)
        episode.scores = {name: value, **episode.scores}
        if value is None:
            episode.error = message
            return
        rewarding = as_reward(rewarding, scoring.sign)
        reward, what = float(rewarding.score), "compute_reward"
        try:
            if scoring.compute_reward is not None:
                reward = float(await scoring.compute_reward(rewarding))
            what = "reward_function.shape"
            if scoring.shape is not None:
                reward = await scoring.shape(reward, episode, item)
        except Exception as error:  # code of the user may raise anything
            episode.reason, episode.error = DropReason.EVALUATOR_ERROR, f"{what}: {describe_error(error)}"
            return
        if not is_reward(reward):
            episode.reason, episode.error = DropReason.NAN_SCORE, f"the reward is {reward}; allowed: {ALLOWED_REWARDS}"
            return
        steps = rewarding.step_scores if rewarding.step_scores is not None else episode.step_rewards
        if not all(map(is_reward, steps or ())):
            episode.reason, episode.error = (
                DropReason.NAN_SCORE,
                f"the step rewards are {steps}; allowed: {ALLOWED_REWARDS}",
            )
            episode.step_rewards = None
            return
        episode.reward, episode.reasoning = reward, rewarding.reasoning
        if rewarding.step_scores is not None:
            episode.step_rewards = rewarding.step_scores
            functions = {credited_function(call.functions, self.trained.functions) for call in episode.calls}
            episode.rewarded_functions = sorted(functions)

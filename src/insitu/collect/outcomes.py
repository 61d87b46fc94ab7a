"""Rewards that an episode's environment has given, and the evaluator that reads them.

A workflow that runs somebody else's environment returns an `Outcome` as its output:

    return Outcome(answer=text, reward=1.0, rewards={"correct": 1.0}, metrics={"turns": 3}).model_dump()

    evaluators: {reward: {_type: outcome}}
"""

from collections.abc import AsyncIterator

from pydantic import ValidationError

from insitu.builder import Builder
from insitu.collect.scores import FunctionEvaluator, Score
from insitu.errors import WorkflowError, a_type, first_problem, not_found
from insitu.registry import register_evaluator
from insitu.schemas.evaluation import EvalInputItem, EvaluatorBaseConfig, EvaluatorInfo, Outcome


class OutcomeConfig(EvaluatorBaseConfig, name="outcome"):
    """The reward that the environment of the workflow has given to the episode."""

    part: str | None = None
    """A part of the reward or a metric, by its name there; none: the reward."""


async def outcome_score(config: OutcomeConfig, builder: Builder) -> AsyncIterator[EvaluatorInfo]:
    """Yields an evaluator that reads an `Outcome`. Environments register it for their own configuration classes."""

    async def score(item: EvalInputItem) -> Score:
        output = item.output_obj
        if not isinstance(output, dict):
            raise WorkflowError(
                f"the workflow's output is {a_type(output)}, not the outcome of an environment: use _type: "
                f"{config.static_type()} with a workflow that runs one"
            )
        try:
            outcome = Outcome.model_validate(output)
        except ValidationError as error:
            problem = first_problem(error)
            raise WorkflowError(f"the workflow's output is no outcome of an environment: {problem}") from None
        named, part = {**outcome.metrics, **outcome.rewards}, config.part
        if part is not None and part not in named:
            raise WorkflowError(not_found("the outcome's reward or metric", part, named))
        steps = outcome.step_rewards if part is None else None
        return Score(
            outcome.reward if part is None else named[part], {**outcome.rewards, **outcome.metrics} or None, steps
        )

    evaluator = FunctionEvaluator(score)
    yield EvaluatorInfo(config=config, evaluate_fn=evaluator.evaluate, description="The reward of the environment")


register_evaluator(config_type=OutcomeConfig)(outcome_score)

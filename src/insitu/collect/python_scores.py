"""A Python function as a score.

evaluators:
  correct: {_type: python, function: my_agent:score}

def score(answer: str, row: dict) -> float:
    return float(answer == row["answer"])
"""

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from pydantic import Field

from insitu.agents.python import called, parameters
from insitu.builder import Builder, name_being_built
from insitu.collect.evaluators import BaseEvaluator
from insitu.config.code import call_with, load_code
from insitu.errors import ConfigError, WorkflowError
from insitu.registry import register_evaluator
from insitu.schemas.components import CodeRef
from insitu.schemas.episodes import Episode
from insitu.schemas.evaluation import EvalInputItem, EvalOutputItem, EvaluatorBaseConfig, EvaluatorInfo
from insitu.workflow.functions import convert, is_model, type_hints

_FROM_ITEM: dict[str, Callable[[EvalInputItem], Any]] = {
    "row": lambda item: item.full_dataset_entry,
    "expected": lambda item: item.expected_output_obj,
    "question": lambda item: item.input_obj,
}


class PythonScoreConfig(EvaluatorBaseConfig, name="python"):
    """A Python function, `def` or `async def`. Its first parameter gets the answer, as a pydantic model if one is its
    type; parameters called `row`, `expected` and `question` get the row, its expected answer and its question. It
    returns a number, a number and a text that explains it, or an `insitu.Score`; an exception is counted as
    `evaluator_error`. A function that is not asynchronous runs in a thread."""

    function: CodeRef
    """The function, as MODULE:NAME or FILE.py:NAME. Files are relative to the folder of the YAML file, modules in which
    can be imported."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Values of further parameters."""
    max_concurrency: int = Field(default=8, ge=1)
    """How many answers are scored concurrently."""


class Score(NamedTuple):
    """What a score's function may return in place of a number."""

    score: float
    reasoning: Any = None
    """Recorded with the episode."""
    steps: Sequence[float] | None = None
    """Scores of the answers of the model under training, in order, for `credit: step`."""


class FunctionEvaluator(BaseEvaluator):
    """Scores each item by a function, which returns a number, a number and an explanation, or a `Score`."""

    def __init__(self, score: Callable[[EvalInputItem], Any], max_concurrency: int = 8) -> None:
        super().__init__(max_concurrency)
        self._score = score

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        result = await self._score(item)
        given = Score(*result) if isinstance(result, tuple) and len(result) in (2, 3) else Score(result)
        steps = None if given.steps is None else [_number(step) for step in given.steps]
        return EvalOutputItem(id=item.id, score=_number(given.score), reasoning=given.reasoning, step_scores=steps)


async def shaped(function: Callable[..., Any], reward: float, episode: Episode, item: EvalInputItem) -> float:
    """The reward that a function makes of a score, with those of the following values for which it has a parameter:
    `row`, `expected`, `question`, `answer`, `scores` (of all evaluators) and `calls`.
    """
    offered = {name: of(item) for name, of in _FROM_ITEM.items()}
    offered |= {"answer": episode.output, "scores": episode.scores, "calls": episode.calls}
    return _number(await called(partial(call_with, function), reward, **offered))


def _number(score: Any) -> float:
    """Also a number of another library, such as numpy. Raises WorkflowError for anything else."""
    if score is None or isinstance(score, str) or not hasattr(score, "__float__"):
        raise WorkflowError(f"the score is {score!r:.80}; it must be a number, or a number and a text")
    return float(score)


@register_evaluator(config_type=PythonScoreConfig)
async def python_score(config: PythonScoreConfig, builder: Builder) -> AsyncIterator[EvaluatorInfo]:
    where = f"eval.evaluators.{name_being_built()}"
    function = load_code(config.function, f"{where}.function", builder.config.folder)
    if not callable(function):
        raise ConfigError(f"{where}.function: {config.function} is a {type(function).__name__}; it must be a function")
    first, names = parameters(function, f"{where} ({config.function})", config.arguments, _FROM_ITEM)

    wanted = type_hints(function).get(first or "", Any)

    async def score(item: EvalInputItem) -> Any:
        answer = item.output_obj
        if is_model(wanted) and not isinstance(answer, wanted):
            answer = convert(answer, wanted)
        args = [answer] if first is not None else []
        kwargs = config.arguments | {name: _FROM_ITEM[name](item) for name in names}
        return await called(function, *args, **kwargs)

    evaluator = FunctionEvaluator(score, config.max_concurrency)
    yield EvaluatorInfo(config=config, evaluate_fn=evaluator.evaluate, description=f"The score of {config.function}")

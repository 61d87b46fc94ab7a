"""A Python function as a score.

evaluators:
  correct: {_type: python, function: my_agent:score}

def score(answer: str, row: dict) -> float:
    return float(answer == row["answer"])
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from pydantic import Field

from insitu.builder import Builder, name_being_built
from insitu.config.code import load_code
from insitu.errors import WorkflowError
from insitu.evaluation.evaluators import BaseEvaluator
from insitu.plain.functions import is_blocking, parameters
from insitu.registry import register_evaluator
from insitu.schemas.components import CodeRef
from insitu.schemas.evaluation import EvalInputItem, EvalOutputItem, EvaluatorBaseConfig, EvaluatorInfo

_FROM_ITEM: dict[str, Callable[[EvalInputItem], Any]] = {
    "row": lambda item: item.full_dataset_entry,
    "expected": lambda item: item.expected_output_obj,
    "question": lambda item: item.input_obj,
}


class PythonScoreConfig(EvaluatorBaseConfig, name="python"):
    """A Python function, `def` or `async def`. Its first parameter gets the answer; parameters called `row`, `expected`
    and `question` get the row, its expected answer and its question. It returns a number, or a number and a text that
    explains it; an exception is counted as `evaluator_error`. A function that is not asynchronous runs in a thread."""

    function: CodeRef
    """The function, as MODULE:NAME; modules in the folder of the YAML file can be imported."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Values of further parameters."""
    max_concurrency: int = Field(default=8, ge=1)
    """How many answers are scored concurrently."""


class FunctionEvaluator(BaseEvaluator):
    """Scores each item by a function, which returns a number, or a number and an explanation."""

    def __init__(self, score: Callable[[EvalInputItem], Any], max_concurrency: int = 8) -> None:
        super().__init__(max_concurrency)
        self._score = score

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        result = await self._score(item)
        score, reasoning = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if not isinstance(score, int | float):
            score = _number(score)
        return EvalOutputItem(id=item.id, score=float(score), reasoning=reasoning)


def _number(score: Any) -> float:
    """A number of another library, such as numpy. Raises WorkflowError for anything else."""
    if score is None or isinstance(score, str) or not hasattr(score, "__float__"):
        raise WorkflowError(f"the score is {score!r:.80}; it must be a number, or a number and a text")
    return float(score)


@register_evaluator(config_type=PythonScoreConfig)
async def python_score(config: PythonScoreConfig, builder: Builder) -> AsyncIterator[EvaluatorInfo]:
    where = f"eval.evaluators.{name_being_built()}"
    function = load_code(config.function, f"{where}.function", builder.config.folder)
    first, names = parameters(function, f"{where} ({config.function})", config.arguments, _FROM_ITEM)
    blocking = is_blocking(function)

    async def score(item: EvalInputItem) -> Any:
        args = [item.output_obj] if first is not None else []
        kwargs = config.arguments | {name: _FROM_ITEM[name](item) for name in names}
        if blocking:
            return await asyncio.to_thread(function, *args, **kwargs)
        return await function(*args, **kwargs)

    evaluator = FunctionEvaluator(score, config.max_concurrency)
    yield EvaluatorInfo(config=config, evaluate_fn=evaluator.evaluate, description=f"The score of {config.function}")

"""The taskset that an exported package defines: the rows of a file as tasks, its evaluators as rewards and metrics.

Import this with verifiers only.
"""

import json
from collections.abc import Collection, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import verifiers.v1 as vf

from insitu.builder import Builder
from insitu.collect.datasets import load_dataset
from insitu.collect.evaluators import parse_score, reward_of, score
from insitu.config import load_config
from insitu.errors import WorkflowError
from insitu.schemas.evaluation import EvalInputItem
from insitu.schemas.finetuning import signed
from insitu.schemas.kinds import EVALUATOR

_config = lru_cache(maxsize=8)(load_config)


class RowData(vf.TaskData):
    """A row of `file`."""

    file: str
    columns: dict[str, Any]
    question: Any
    answer: Any


class RowTask(vf.Task[RowData]):
    @vf.reward
    async def reward(self, trace: vf.Trace) -> dict[str, float]:
        name, sign = reward_of(_config(Path(self.data.file)))
        scores = await self._scores(trace, [name])
        return {name: signed(scores[name], sign)}

    @vf.metric
    async def scores(self, trace: vf.Trace) -> dict[str, float]:
        config = _config(Path(self.data.file))
        return await self._scores(trace, {*config.names(EVALUATOR)} - {reward_of(config)[0]})

    async def _scores(self, trace: vf.Trace, names: Collection[str]) -> dict[str, float]:
        """The scores of the last answer. Raises WorkflowError if an evaluator gives none."""
        config = _config(Path(self.data.file))
        scores: dict[str, float] = {}
        async with Builder(config) as builder:
            for name in names:
                item = EvalInputItem(
                    id=self.data.name,
                    input_obj=self.data.question,
                    expected_output_obj=self.data.answer,
                    full_dataset_entry=self.data.columns,
                    output_obj=trace.last_reply,
                )
                output = await score(await builder.get_evaluator(name), name, [item], config.eval.scoring_limit(1))
                value, reason, error = parse_score(output.eval_output_items[0])
                if value is None:
                    raise WorkflowError(f"evaluator {name} has not scored the answer: {reason}: {error}")
                scores[name] = value
        return scores


class RowTaskset(vf.Taskset[RowTask, vf.TasksetConfig]):
    file: ClassVar[Path]

    def load(self) -> Iterator[RowTask]:
        for item in load_dataset(_config(self.file)):
            data = RowData(
                prompt=_prompt(item.input_obj),
                name=str(item.id),
                file=str(self.file),
                columns=item.full_dataset_entry,
                question=item.input_obj,
                answer=item.expected_output_obj,
            )
            yield RowTask(data, self.config.task)


def taskset_of(file: Path) -> type[RowTaskset]:
    """The taskset of an exported file."""
    return type("Rows", (RowTaskset,), {"file": file})


def _prompt(question: Any) -> Any:
    """A text or messages as they are, other values as JSON."""
    is_messages = isinstance(question, list) and all(isinstance(each, dict) and "role" in each for each in question)
    return question if isinstance(question, str) or is_messages else json.dumps(question)

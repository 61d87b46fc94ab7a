"""A trajectory builder that makes preference pairs by hand, and the little that a file needs besides it.

Each dataset row is one turn, with the pairs of all its answers: `{"id": 1, "question": "2 + 2 =", "answers": ["4", "5",
"6"]}` makes 4 > 5, 4 > 6 and 5 > 6. An answer `raise` fails the collection.
"""

import asyncio
from collections.abc import AsyncIterator
from itertools import combinations
from pathlib import Path
from typing import Any

from pydantic import Field

from insitu.collect.datasets import load_dataset
from insitu.plugin_api import (
    Builder,
    DPOItem,
    EvalOutput,
    EvaluatorInfo,
    FunctionBaseConfig,
    OpenAIMessage,
    Trajectory,
    TrajectoryBuilder,
    TrajectoryBuilderConfig,
    TrajectoryCollection,
    register_evaluator,
    register_function,
    register_trajectory_builder,
)
from insitu.schemas.evaluation import EvaluatorBaseConfig


class PairsBuilderConfig(TrajectoryBuilderConfig, name="pairs_by_hand"):
    failing_runs: list[int] = Field(default_factory=list)
    waits_for: Path | None = None
    """A collection ends when this file exists."""


class PairsBuilder(TrajectoryBuilder):
    """Collections are numbered from 1; those of `failing_runs` fail."""

    def __init__(self, config: PairsBuilderConfig, builder: Builder) -> None:
        super().__init__(config)
        self.config = config
        self._builder = builder
        self.collected = 0

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        self.collected += 1

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        while (path := self.config.waits_for) is not None and not path.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        if self.collected in self.config.failing_runs:
            raise ValueError("the game server is gone")
        rows = load_dataset(self._builder.config, None)
        return TrajectoryCollection(trajectories=[pairs_of(row.full_dataset_entry) for row in rows], run_id=run_id)

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        pass


def pairs_of(row: dict[str, Any]) -> list[Trajectory]:
    prompt = [OpenAIMessage(role="system", content="Add."), OpenAIMessage(role="user", content=row["question"])]
    metadata = {"row_id": str(row["id"]), "turn_id": "0"}
    return [
        Trajectory(
            episode=[DPOItem(prompt=prompt, chosen_response=chosen, rejected_response=rejected)],
            reward=1.0,
            metadata=metadata,
        )
        for chosen, rejected in combinations(row["answers"], 2)
    ]


class NothingConfig(FunctionBaseConfig, name="nothing"):
    pass


class ZeroConfig(EvaluatorBaseConfig, name="zero"):
    pass


@register_trajectory_builder(config_type=PairsBuilderConfig)
async def pairs_by_hand(config: PairsBuilderConfig, builder: Builder) -> AsyncIterator[PairsBuilder]:
    yield PairsBuilder(config, builder)


@register_function(config_type=NothingConfig)
async def nothing(config: NothingConfig, builder: Builder) -> AsyncIterator[Any]:
    async def answer(text: str) -> str:
        return text

    yield answer


@register_evaluator(config_type=ZeroConfig)
async def zero(config: ZeroConfig, builder: Builder) -> AsyncIterator[EvaluatorInfo]:
    async def evaluate(data: Any) -> EvalOutput:
        return EvalOutput(average_score=0.0, eval_output_items=[])

    yield EvaluatorInfo(config=config, evaluate_fn=evaluate, description="zero")

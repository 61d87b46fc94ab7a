"""Gathers several generations of each example concurrently and parses their steps."""

import asyncio
import logging
from collections import Counter
from typing import Any

from nat.data_models.finetuning import (
    EpisodeItem,
    EpisodeItemRole,
    Trajectory,
    TrajectoryBuilderConfig,
    TrajectoryCollection,
)
from nat.eval.config import EvaluationRunOutput
from nat.eval.evaluator.evaluator_model import EvalInputItem, EvalOutputItem
from nat.finetuning.interfaces.trajectory_builder import TrajectoryBuilder
from nat.finetuning.utils.parsers.base_parser import parse_to_openai_messages
from pydantic import Field

logger = logging.getLogger(__name__)


class MyTrajectoryBuilderConfig(TrajectoryBuilderConfig, name="my_traj_builder"):
    """Configuration for my custom trajectory builder."""

    num_generations: int = Field(default=2, ge=1, description="Number of trajectory generations per example")
    include_tool_calls: bool = Field(default=True, description="Whether to include tool call messages in trajectories")
    min_episode_length: int = Field(default=2, description="Minimum number of messages required for a valid trajectory")


class MyTrajectoryBuilder(TrajectoryBuilder):
    def __init__(self, trajectory_builder_config: MyTrajectoryBuilderConfig):
        super().__init__(trajectory_builder_config)
        self.evaluation_runs: dict[str, list[asyncio.Task[EvaluationRunOutput]]] = {}
        self.left_out: Counter[str] = Counter()

    async def start_run(self, run_id: str, meta: dict | None = None) -> None:
        generations = range(self.trajectory_builder_config.num_generations)
        self.evaluation_runs[run_id] = [asyncio.create_task(self.run_eval()) for _ in generations]

    async def finalize(self, run_id: str, meta: dict | None = None) -> TrajectoryCollection:
        outputs = await asyncio.gather(*self.evaluation_runs[run_id])
        del self.evaluation_runs[run_id]
        self.left_out.clear()
        groups: dict[str, list[Trajectory]] = {}
        for generation, output in enumerate(outputs):
            scores = {str(score.id): score for score in self._scores(output)}
            for item in output.eval_input.eval_input_items:
                trajectory = await self._trajectory(item, scores.get(str(item.id)), generation)
                if trajectory is not None:
                    groups.setdefault(str(item.id), []).append(trajectory)
        return TrajectoryCollection(trajectories=list(groups.values()), run_id=run_id)

    def _scores(self, output: EvaluationRunOutput) -> list[EvalOutputItem]:
        results = dict(output.evaluation_results)
        reward = self.trajectory_builder_config.reward
        name = reward.name if reward is not None else next(iter(results))
        return results[name].eval_output_items

    async def _trajectory(
        self, item: EvalInputItem, score: EvalOutputItem | None, generation: int
    ) -> Trajectory | None:
        if score is None or score.score is None:
            self.left_out["no score"] += 1
            return None
        messages = parse_to_openai_messages(item.trajectory)
        episode = [self._item(message) for message in messages if self._wanted(message)]
        if len(episode) < self.trajectory_builder_config.min_episode_length:
            self.left_out["too short"] += 1
            return None
        return Trajectory(
            episode=episode,
            reward=await self.compute_reward(score),
            metadata={"example_id": str(item.id), "generation": generation},
        )

    def _wanted(self, message: dict[str, Any]) -> bool:
        of_a_tool = message["role"] == "tool" or bool(message.get("tool_calls"))
        return self.trajectory_builder_config.include_tool_calls or not of_a_tool

    def _item(self, message: dict[str, Any]) -> EpisodeItem:
        others = {k: v for k, v in message.items() if k in ("tool_calls", "tool_call_id")}
        return EpisodeItem(
            role=EpisodeItemRole(message["role"]),
            content=message.get("content") or "",
            logprobs=message.get("logprobs"),
            metadata=others or None,
        )

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        logger.info("run %s: gathered %s, left out %s", run_id, metrics, dict(self.left_out))

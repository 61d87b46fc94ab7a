"""What `store.py` runs: an agent of three turns, a random score, and an adapter that completes every job at once."""

import random
from collections.abc import AsyncIterator
from typing import Any

from insitu.collect.evaluators import BaseEvaluator
from insitu.plugin_api import Builder, EvaluatorInfo, register_evaluator, register_function, register_trainer_adapter
from insitu.schemas.components import FunctionBaseConfig, LLMRef
from insitu.schemas.evaluation import EvalInputItem, EvalOutputItem, EvaluatorBaseConfig
from insitu.schemas.finetuning import (
    PolicyEndpoint,
    TrainerAdapterConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    TrajectoryCollection,
)
from insitu.training.interfaces import ResumableAdapter
from insitu.workflow.functions import FunctionInfo

TURNS = 3
RULES = "You play tic-tac-toe with X. Answer with the number of a free cell, as <move>N</move>, and nothing else."


class AgentConfig(FunctionBaseConfig, name="store_agent"):
    llm: LLMRef


@register_function(config_type=AgentConfig)
async def agent(config: AgentConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    model: Any = await builder.get_llm(config.llm)

    async def play(question: str) -> str:
        messages = [{"role": "system", "content": RULES}]
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"{question} Turn {turn}. The board:\n. X .\nO . .\n. . ."})
            answer = await model.client.chat.completions.create(
                model=model.model, messages=messages, temperature=1.0, max_tokens=16
            )
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        return messages[-1]["content"]

    yield FunctionInfo.from_fn(play)


class ScoreConfig(EvaluatorBaseConfig, name="store_score"):
    pass


class Score(BaseEvaluator):
    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        return EvalOutputItem(id=item.id, score=random.random(), reasoning="a random number")


@register_evaluator(config_type=ScoreConfig)
async def score(config: ScoreConfig, builder: Builder) -> AsyncIterator[EvaluatorInfo]:
    yield EvaluatorInfo(config=config, evaluate_fn=Score(builder.get_max_concurrency()).evaluate, description="Random")


class AdapterConfig(TrainerAdapterConfig, name="store_adapter"):
    url: str


class Adapter(ResumableAdapter):
    adapter_config: AdapterConfig

    async def find(self, run_id: str, epoch: int, version: int | None) -> TrainingJobRef | None:
        return None

    async def policy_endpoint(self) -> PolicyEndpoint:
        return PolicyEndpoint(self.adapter_config.url, "stub")

    async def is_healthy(self) -> bool:
        return True

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        return TrainingJobRef(run_id=trajectories.run_id, backend="none")

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        return TrainingJobStatus(run_id=ref.run_id, backend=ref.backend, status=TrainingStatusEnum.COMPLETED)

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        return await self.status(ref)

    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        pass


@register_trainer_adapter(config_type=AdapterConfig)
async def adapter(config: AdapterConfig, builder: Builder) -> AsyncIterator[Adapter]:
    yield Adapter(config)

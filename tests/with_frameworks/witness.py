"""A workflow that numbers its questions, runs an agent on all of them concurrently, and records the steps it sees."""

import asyncio
import json
from pathlib import Path
from typing import Any

from insitu.plugin_api import (
    BaseEvaluator,
    Builder,
    Context,
    EvalBuilder,
    EvalInputItem,
    EvalOutputItem,
    EvaluatorBaseConfig,
    EvaluatorInfo,
    FunctionBaseConfig,
    FunctionRef,
    IntermediateStep,
    register_evaluator,
    register_function,
)

RECORDED = ("LLM_START", "LLM_END", "TOOL_START", "TOOL_END")


def record_of(step: IntermediateStep) -> dict[str, Any]:
    """A step as a record; a tool's input as an object, whether a framework has it as one or as JSON."""
    known, data = step.payload.metadata or {}, step.payload.data
    known = known if isinstance(known, dict) else known.model_dump()
    given = data.input if step.event_type.startswith("TOOL") else None
    return {
        "type": step.event_type,
        "name": step.payload.name,
        "input": json.loads(given) if isinstance(given, str) else given,
        "output": str(data.output),
        "error": known.get("error"),
        "token_ids": known.get("token_ids"),
    }


class WitnessConfig(FunctionBaseConfig, name="witness"):
    agent: FunctionRef
    episodes: int
    """How many wait for one another before they begin."""
    file: Path


@register_function(config_type=WitnessConfig)
async def witness(config: WitnessConfig, builder: Builder):
    agent = await builder.get_function(config.agent)
    together = asyncio.Barrier(config.episodes)
    is_rehearsed = False

    async def answer(question: str) -> str:
        nonlocal is_rehearsed
        if not is_rehearsed:  # the row that is run before the first epoch has no others to wait for
            is_rehearsed = True
            return "[0000]"
        number = f"{Context.get().seed % 10_000:04d}"
        steps = []
        Context.get().intermediate_step_manager.subscribe(steps.append)
        await asyncio.wait_for(together.wait(), 60)
        try:
            return f"[{number}] {await agent.ainvoke(f'[{number}] {question}', to_type=str)}"
        finally:
            seen = [record_of(step) for step in steps if step.event_type in RECORDED]
            with config.file.open("a") as file:
                file.write(json.dumps({"number": number, "steps": seen}) + "\n")

    yield answer


class NumberConfig(EvaluatorBaseConfig, name="number"):
    """The question's number as the score: rewards that differ within a group for any samples."""


class Number(BaseEvaluator):
    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        return EvalOutputItem(id=item.id, score=int(str(item.output_obj)[1:5]) / 10_000, reasoning=None)


@register_evaluator(config_type=NumberConfig)
async def number(config: NumberConfig, builder: EvalBuilder):
    evaluator = Number(max_concurrency=builder.get_max_concurrency())
    yield EvaluatorInfo(config=config, evaluate_fn=evaluator.evaluate, description="The question's number")

"""An agent with one tool, and an evaluator that likes every other seed: runs over ART's protocol are tested on."""

import json

from nat.builder.builder import Builder, EvalBuilder
from nat.builder.context import Context
from nat.builder.evaluator import EvaluatorInfo
from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import register_evaluator, register_function
from nat.data_models.component_ref import LLMRef
from nat.data_models.evaluator import EvalInputItem, EvaluatorBaseConfig
from nat.data_models.function import FunctionBaseConfig
from nat.plugins.eval.data_models.evaluator_io import EvalOutputItem
from nat.plugins.eval.evaluator.base_evaluator import BaseEvaluator

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}


class ToolAgentConfig(FunctionBaseConfig, name="tool_agent"):
    llm: LLMRef


@register_function(config_type=ToolAgentConfig)
async def tool_agent(config: ToolAgentConfig, builder: Builder):
    llm = await builder.get_llm(config.llm)

    async def answer(question: str) -> str:
        messages = [{"role": "user", "content": question}]
        said = (await llm.complete(messages, tools=[LOOK])).choices[0].message
        calls = [call.model_dump(include={"id", "type", "function"}) for call in said.tool_calls or ()]
        messages.append({"role": "assistant", "content": said.content, "tool_calls": calls})
        for call in said.tool_calls or ():
            seen = "blue" if json.loads(call.function.arguments) == {"at": "sky"} else "dark"
            messages.append({"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": seen})
        last = (await llm.complete(messages, tools=[LOOK])).choices[0].message
        return f"{last.content} {Context.get().seed % 2}"

    yield FunctionInfo.from_fn(answer, description="Looks, then answers.")


class OddSeedConfig(EvaluatorBaseConfig, name="odd_seed"):
    """1 for an episode whose seed is odd: rewards that differ within a group, whatever is sampled."""


class OddSeed(BaseEvaluator):
    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        return EvalOutputItem(id=item.id, score=float(str(item.output_obj).split()[-1]), reasoning=None)


@register_evaluator(config_type=OddSeedConfig)
async def odd_seed(config: OddSeedConfig, builder: EvalBuilder):
    evaluator = OddSeed(max_concurrency=builder.get_max_concurrency())
    yield EvaluatorInfo(config=config, evaluate_fn=evaluator.evaluate, description="1 for an odd seed")

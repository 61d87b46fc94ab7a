"""The agent that is trained, which looks with a tool before it answers, and the evaluator that gives its reward."""

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from nat.builder.builder import Builder
from nat.builder.evaluator import EvaluatorInfo
from nat.builder.framework_enum import LLMFrameworkEnum
from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import register_evaluator, register_function
from nat.data_models.component_ref import LLMRef
from nat.data_models.evaluator import EvaluatorBaseConfig
from nat.data_models.function import FunctionBaseConfig
from nat.eval.evaluator.base_evaluator import BaseEvaluator
from nat.eval.evaluator.evaluator_model import EvalInputItem, EvalOutputItem


class MyAgentWorkflowConfig(FunctionBaseConfig, name="my_agent_workflow"):
    llm: LLMRef
    max_turns: int = 3


@tool
def look(animal: str) -> str:
    """What can be seen of an animal."""
    return f"A {animal} that stands in the grass."


@register_function(config_type=MyAgentWorkflowConfig, framework_wrappers=[LLMFrameworkEnum.LANGCHAIN])
async def my_agent_workflow(config: MyAgentWorkflowConfig, builder: Builder):
    llm = await builder.get_llm(config.llm, wrapper_type=LLMFrameworkEnum.LANGCHAIN)
    llm_with_tools = llm.bind_tools([look])

    async def answer(question: str) -> str:
        messages = [SystemMessage("Look first, then answer with one digit."), HumanMessage(question)]
        for _ in range(config.max_turns):
            reply = await llm_with_tools.ainvoke(messages)
            messages.append(reply)
            if not reply.tool_calls:
                return reply.content
            messages.extend([await look.ainvoke(call) for call in reply.tool_calls])
        return ""

    yield FunctionInfo.from_fn(answer, description="Tells how many legs an animal has.")


class MyCustomEvaluatorConfig(EvaluatorBaseConfig, name="my_custom_evaluator"):
    pass


class MyCustomEvaluator(BaseEvaluator):
    """1 for the right digit, less by a ninth for each step away from it."""

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        away = abs(int(item.output_obj) - int(item.expected_output_obj))
        return EvalOutputItem(id=item.id, score=1 - away / 9, reasoning=f"{away} away")


@register_evaluator(config_type=MyCustomEvaluatorConfig)
async def my_custom_evaluator(config: MyCustomEvaluatorConfig, builder: Builder):
    evaluator = MyCustomEvaluator(max_concurrency=builder.get_max_concurrency())
    yield EvaluatorInfo(config=config, evaluate_fn=evaluator.evaluate, description="How near the digit is")

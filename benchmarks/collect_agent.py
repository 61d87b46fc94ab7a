"""The agent that `collect.py` measures: one model call for each row, by the plain client or by ChatOpenAI."""

from collections.abc import AsyncIterator
from typing import Any, Literal

from insitu.collect.evaluators import BaseEvaluator
from insitu.plugin_api import Builder, EvaluatorInfo, register_evaluator, register_function
from insitu.schemas.components import FunctionBaseConfig, LLMRef
from insitu.schemas.evaluation import EvalInputItem, EvalOutputItem, EvaluatorBaseConfig
from insitu.workflow.functions import FunctionInfo

PARAMS = {"temperature": 1.0, "max_tokens": 16}


def prompt(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "You play tic-tac-toe."}, {"role": "user", "content": question}]


class AgentConfig(FunctionBaseConfig, name="collect_agent"):
    llm: LLMRef
    through: Literal["openai", "langchain"] = "openai"


@register_function(config_type=AgentConfig)
async def agent(config: AgentConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    model: Any = await builder.get_llm(config.llm, None if config.through == "openai" else config.through)

    async def by_client(question: str) -> str:
        answer = await model.client.chat.completions.create(model=model.model, messages=prompt(question), **PARAMS)
        return answer.choices[0].message.content

    async def by_langchain(question: str) -> str:
        return (await model.ainvoke(prompt(question))).text

    yield FunctionInfo.from_fn(by_client if config.through == "openai" else by_langchain)


class LengthConfig(EvaluatorBaseConfig, name="collect_length"):
    pass


class Length(BaseEvaluator):
    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        return EvalOutputItem(id=item.id, score=len(item.output_obj) / 100)


@register_evaluator(config_type=LengthConfig)
async def length(config: LengthConfig, builder: Builder) -> AsyncIterator[EvaluatorInfo]:
    evaluator = Length(max_concurrency=builder.get_max_concurrency())
    yield EvaluatorInfo(config=config, evaluate_fn=evaluator.evaluate, description="Length of the answer")

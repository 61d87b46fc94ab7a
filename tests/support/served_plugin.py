"""A workflow for tests of the service: it does what its input says, and records steps of every form.

{"do": "echo" | "plain" | "chain" | "steps" | "nest" | "raise" | "hang" | "block" | "deep" | "model", "say": text}
"""

import asyncio
import time
from typing import Any, Literal

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from pydantic import BaseModel
from waiting import hang

from insitu.plugin_api import Builder, EvaluatorInfo, LLMFrameworkEnum, register_evaluator, register_function
from insitu.schemas.components import FunctionBaseConfig, FunctionRef, LLMRef
from insitu.schemas.evaluation import EvalInput, EvalOutput, EvalOutputItem, EvaluatorBaseConfig
from insitu.schemas.steps import (
    IntermediateStepPayload,
    IntermediateStepType,
    StreamEventData,
    TraceMetadata,
    TTCEventData,
)
from insitu.workflow.context import Context
from insitu.workflow.functions import FunctionInfo


class Answer(BaseModel):
    text: str
    parts: list[str]


class ServedConfig(FunctionBaseConfig, name="served"):
    llm: LLMRef
    inner: FunctionRef | None = None
    fails: Literal["", "cancel", "exit"] = ""
    """How building it ends: "cancel" as a client of MCP that cannot connect."""


class StreamedConfig(FunctionBaseConfig, name="streamed"):
    llm: LLMRef


class EchoedConfig(FunctionBaseConfig, name="echoed"):
    """Answers with its input, whatever it is."""


class SpelledConfig(EvaluatorBaseConfig, name="spelled"):
    """A number that every letter of the answer changes, less what the custom steps say it costs."""


built: list[str] = []
"""The address of the llm of every workflow that was built and not closed."""


@tool
async def look(at: str) -> str:
    """Looks."""
    return f"blue {at}"


def push(kind: str, **content: Any) -> None:
    payload = IntermediateStepPayload(event_type=IntermediateStepType(kind), **content)
    Context.get().intermediate_step_manager.push_intermediate_step(payload)


def push_steps() -> None:
    push("CUSTOM_START", name="move", UUID="m", metadata={"board": [["x", None]], "cost": 0.25}, tags=["a"])
    push("CUSTOM_END", name="move", UUID="m", metadata={"reward": 0.5, "nan": float("nan"), "big": 2**70})
    push("TTC_END", name="pick", data=TTCEventData(turn_id="t", turn_index=1, candidate_index=2, score=0.5, more="m"))
    push("SPAN_CHUNK", name="span", data=StreamEventData(chunk=b"\xff", more=1), metadata=TraceMetadata(mine=(1, 2)))


@register_function(config_type=ServedConfig)
async def served(config: ServedConfig, builder: Builder):
    if config.fails:
        raise asyncio.CancelledError("no connection") if config.fails == "cancel" else SystemExit(3)
    llm = await builder.get_llm(config.llm)
    chat = await builder.get_llm(config.llm, wrapper_type=LLMFrameworkEnum.LANGCHAIN)
    inner = await builder.get_function(config.inner) if config.inner else None

    async def ask(say: str) -> str:
        return (await llm.complete([{"role": "user", "content": say}])).choices[0].message.content

    async def answer(question: dict[str, Any]) -> Any:
        do, say = question["do"], question.get("say", "hello")
        match do:
            case "echo":
                return say
            case "chain":
                seen = await look.ainvoke({"at": say})
                return (await chat.ainvoke([HumanMessage(seen)])).content
            case "steps":
                text = await ask(say)
                push_steps()
                return text + await ask(text or say)
            case "nest":
                assert inner is not None
                return "|".join([await inner.ainvoke({"do": "plain", "say": f"{say} {i}"}) for i in range(3)])
            case "raise":
                await ask(say)
                raise RuntimeError(say)
            case "hang":
                await hang()
            case "block":
                time.sleep(2)  # noqa: ASYNC251 (it is the mistake to be made)
            case "deep":
                nested: list[Any] = []
                for _ in range(300):
                    nested = [nested]
                push("CUSTOM_END", name="deep", metadata={"nested": nested})
            case "model":
                return Answer(text=await ask(say), parts=["a", "b"])
        return await ask(say)

    built.append(str(llm.client.base_url))
    yield FunctionInfo.from_fn(answer, description="does what it is told")
    built.remove(str(llm.client.base_url))


@register_function(config_type=StreamedConfig)
async def streamed(config: StreamedConfig, builder: Builder):
    llm = await builder.get_llm(config.llm)

    async def pieces(question: str):
        messages = [{"role": "user", "content": question}]
        stream = await llm.client.chat.completions.create(model=llm.model, messages=messages, stream=True, **llm.params)
        async for event in stream:
            if event.choices and event.choices[0].delta.content:
                yield event.choices[0].delta.content

    yield pieces


@register_function(config_type=EchoedConfig)
async def echoed(config: EchoedConfig, builder: Builder):
    async def answer(question: Any) -> Any:
        return question

    yield FunctionInfo.from_fn(answer, description="echoes")


@register_evaluator(config_type=SpelledConfig)
async def spelled(config: SpelledConfig, builder: Builder):
    async def evaluate(given: EvalInput) -> EvalOutput:
        return EvalOutput(eval_output_items=[score(item) for item in given.eval_input_items])

    def score(item: Any) -> EvalOutputItem:
        costs = [s.metadata["cost"] for s in item.trajectory if s.event_type == "CUSTOM_START"]
        return EvalOutputItem(id=item.id, score=sum(map(ord, str(item.output_obj))) % 101 / 100 - sum(costs))

    yield EvaluatorInfo(config=config, evaluate_fn=evaluate, description="a number of the text")

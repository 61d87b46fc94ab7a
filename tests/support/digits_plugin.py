"""A small workflow for tests of whole runs: the model answers, the evaluator likes large digits.

A row's question says what happens: {"say": text} asks the model, with "stream" for a streamed answer; "earn" is its
step reward; "sampling" are parameters of the agent's own request; "raise", "hang" and "block" fail each in its way;
"pause" makes episodes slow, or each call of a conversation; "mark" is a file that gets a character for each episode;
"score" is what the evaluator gives, "nan" and "none" among it, or "hang"; "chdir" is the directory that the process
changes to. What hangs ends once the file `released` is there.
"""

import asyncio
import math
import os
import random
import time
from typing import Any

from insitu.plugin_api import Builder, EvaluatorInfo, register_evaluator, register_function
from insitu.schemas.components import FunctionBaseConfig, LLMRef
from insitu.schemas.evaluation import EvalInput, EvalOutput, EvalOutputItem, EvaluatorBaseConfig
from insitu.workflow.context import Context
from insitu.workflow.functions import FunctionInfo


async def hang(seconds: float = math.inf) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not os.path.exists("released"):  # noqa: ASYNC110, ASYNC240 (another process makes it)
        await asyncio.sleep(0.05)


class AskConfig(FunctionBaseConfig, name="ask"):
    llm: LLMRef


@register_function(config_type=AskConfig)
async def ask(config: AskConfig, builder: Builder):
    llm = await builder.get_llm(config.llm)

    async def answer(question: dict[str, Any]) -> str:
        messages = [{"role": "user", "content": question["say"]}]
        if "chdir" in question:
            os.chdir(question["chdir"])
        if "pause" in question:  # as of a slow tool, of so many seconds on average
            await hang(random.Random(Context.get().seed).expovariate(1 / question["pause"]))
        if question.get("stream"):
            chunks = await llm.client.chat.completions.create(
                model=llm.model, messages=messages, stream=True, **llm.params
            )
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
        else:
            text = (await llm.complete(messages, **question.get("sampling", {}))).choices[0].message.content
        if "earn" in question:
            Context.get().reward(question["earn"])
        if "raise" in question:
            raise RuntimeError(question["raise"])
        if "mark" in question:
            with open(question["mark"], "a") as marks:  # noqa: ASYNC230 (a byte)
                marks.write(".")
        if "block" in question:
            while not os.path.exists("released"):  # noqa: ASYNC240
                time.sleep(0.05)  # noqa: ASYNC251 (it is the mistake to be made)
        if "hang" in question:
            await hang()
        return f"{question.get('score', '')}|{text}"

    yield FunctionInfo.from_fn(answer, description="asks the model")


class ConverseConfig(FunctionBaseConfig, name="converse"):
    """Asks one to three times in one conversation, as its seed decides. Each answer earns its mean digit."""

    llm: LLMRef


@register_function(config_type=ConverseConfig)
async def converse(config: ConverseConfig, builder: Builder):
    llm = await builder.get_llm(config.llm)

    async def answer(question: dict[str, Any]) -> str:
        context = Context.get()
        messages, texts = [], []
        for call in range(random.Random(context.seed).randint(1, 3)):
            if "pause" in question:
                await hang(random.Random(context.seed + call).expovariate(1 / question["pause"]))
            messages.append({"role": "user", "content": question["say"]})
            texts.append((await llm.complete(messages)).choices[0].message.content)
            messages.append({"role": "assistant", "content": texts[-1]})
            context.reward(mean_digit(texts[-1]))
        return f"{question.get('score', '')}|" + " ".join(texts)

    yield FunctionInfo.from_fn(answer, description="talks to the model")


def mean_digit(text: str) -> float:
    """In [0, 1]; 0 without digits."""
    found = [int(c) for c in text if c.isdigit()]
    return sum(found) / len(found) / 9 if found else 0.0


class DigitsConfig(EvaluatorBaseConfig, name="digits"):
    """Mean of the digits in the answer, in [0, 1]."""


@register_evaluator(config_type=DigitsConfig)
async def digits(config: DigitsConfig, builder: Builder):
    async def evaluate(given: EvalInput) -> EvalOutput:
        if any(item.output_obj.startswith("hang|") for item in given.eval_input_items):
            await hang()
        return EvalOutput(eval_output_items=[score(item.id, item.output_obj) for item in given.eval_input_items])

    def score(row_id: Any, output: str) -> EvalOutputItem:
        asked, _, text = output.partition("|")
        if asked == "none":
            return EvalOutputItem(id=row_id, score=None)
        if asked not in ("", "hang"):
            return EvalOutputItem(id=row_id, score=float(asked))
        return EvalOutputItem(id=row_id, score=mean_digit(text))

    yield EvaluatorInfo(config=config, evaluate_fn=evaluate, description="mean digit")

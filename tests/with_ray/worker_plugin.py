"""A workflow for tests of what can happen to workers.

A question says what happens: {"say": text} asks the model, with "earn" for a step reward. With "wait" the episode then
adds a character to the file `marks` and waits for the file `released`, unless it is the first one, which is the
rehearsal. "exit" ends the process, "block" its event loop, "show" prints secrets.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

from insitu.plugin_api import Builder, register_function
from insitu.schemas.components import FunctionBaseConfig, LLMRef
from insitu.workflow.context import Context
from insitu.workflow.functions import FunctionInfo


class WorkerConfig(FunctionBaseConfig, name="worker"):
    llm: LLMRef
    token: str = ""


@register_function(config_type=WorkerConfig)
async def worker(config: WorkerConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    llm = await builder.get_llm(config.llm)

    async def answer(question: dict[str, Any]) -> str:
        answered = await llm.complete([{"role": "user", "content": question["say"]}])
        if "earn" in question:
            Context.get().reward(question["earn"])
        if question.get("wait"):
            with open("marks", "a") as marks:  # noqa: ASYNC230 (a byte)
                marks.write(".")
                is_first = marks.tell() == 1
            while not is_first and not os.path.exists("released"):  # noqa: ASYNC110, ASYNC240 (another process makes it)
                await asyncio.sleep(0.05)
        while question.get("block") and not os.path.exists("released"):  # noqa: ASYNC240
            time.sleep(0.05)  # noqa: ASYNC251 (it is the mistake to be made)
        if question.get("exit"):
            os.kill(os.getpid(), signal.SIGKILL)
        if "show" in question:
            print("shown:", config.token, *(os.environ.get(name) for name in question["show"]), flush=True)
            raise RuntimeError(f"{config.token} is wrong")
        return f"|{answered.choices[0].message.content}"

    yield FunctionInfo.from_fn(answer, description="asks the model")

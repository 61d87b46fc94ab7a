"""A workflow of two functions that both ask two models, and an adapter that keeps what it has sent to be trained.

`framework: langchain` asks by LangChain's own model objects.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pydantic import Field

from insitu.plugin_api import (
    Builder,
    EvaluatorInfo,
    PolicyEndpoint,
    register_evaluator,
    register_function,
    register_trainer_adapter,
)
from insitu.schemas.components import FunctionBaseConfig, FunctionRef, LLMRef
from insitu.schemas.episodes import TrainingRow
from insitu.schemas.evaluation import EvalInput, EvalOutput, EvalOutputItem, EvaluatorBaseConfig
from insitu.schemas.finetuning import TrainingJobRef, TrajectoryCollection
from insitu.training.interfaces import RewardAdapter
from insitu.training.native.config import InsituAdapterConfig
from insitu.training.native.trainer_adapter import InsituTrainerAdapter
from insitu.workflow.context import Context

released = asyncio.Event()
"""Ends the calls of `ask_both` that ignore their cancellation."""


class AskBothConfig(FunctionBaseConfig, name="ask_both"):
    """Asks each model for its word on a text; `earn` is the step reward of a character that they have answered.

    `thread`: it also asks by our client in a thread that enters no episode.
    `clings`: with texts that contain this, it ignores its cancellation until `released` is set.
    """

    word: str
    player: LLMRef
    judge: LLMRef
    framework: str | None = None
    earn: float | None = None
    thread: bool = False
    clings: str | None = None


@register_function(config_type=AskBothConfig)
async def ask_both(config: AskBothConfig, builder: Builder) -> AsyncIterator[Any]:
    llms = {name: await builder.get_llm(name, config.framework) for name in (config.player, config.judge)}

    async def ask(text: str) -> str:
        answers = []
        while config.clings is not None and config.clings in text and not released.is_set():
            with suppress(asyncio.CancelledError):
                await released.wait()
        for name, llm in llms.items():
            messages = [{"role": "user", "content": f"{name} {config.word}: {text}"}]
            if config.framework is None:
                answers.append((await llm.complete(messages)).choices[0].message.content)
            else:
                answers.append((await llm.ainvoke(messages)).content)
        if config.thread:
            known = llms[config.player]
            thread = threading.Thread(target=asyncio.run, args=[known.complete([{"role": "user", "content": text}])])
            thread.start()
            await asyncio.to_thread(thread.join)
        if config.earn is not None:
            Context.get().reward(config.earn * sum(map(len, answers)))
        return "".join(answers)

    yield ask


class DuoConfig(FunctionBaseConfig, name="duo"):
    functions: list[FunctionRef]


@register_function(config_type=DuoConfig)
async def duo(config: DuoConfig, builder: Builder) -> AsyncIterator[Any]:
    functions = [await builder.get_function(name) for name in config.functions]

    async def run(text: str) -> str:
        return "".join([await function.ainvoke(text) for function in functions])

    yield run


class LettersConfig(EvaluatorBaseConfig, name="letters"):
    """The mean code of the answer's characters, and `more`; or what is `fixed` for the row.

    `raises` are the rows that it cannot score.
    """

    more: float = 0
    raises: list[str] = Field(default_factory=list)
    fixed: dict[str, float] = Field(default_factory=dict)


@register_evaluator(config_type=LettersConfig)
async def letters(config: LettersConfig, builder: Builder) -> AsyncIterator[EvaluatorInfo]:
    async def evaluate(given: EvalInput) -> EvalOutput:
        if any(i.id in config.raises for i in given.eval_input_items):
            raise LookupError("no such column")
        means = [sum(map(ord, i.output_obj)) / (len(i.output_obj) + 1) for i in given.eval_input_items]
        scored = zip(given.eval_input_items, means, strict=True)
        items = [EvalOutputItem(id=i.id, score=config.fixed.get(i.id, config.more + mean)) for i, mean in scored]
        return EvalOutput(eval_output_items=items)

    yield EvaluatorInfo(config=config, evaluate_fn=evaluate, description="mean letter")


class KeepingAdapterConfig(InsituAdapterConfig, name="keeping_adapter"):
    """The native adapter, which keeps what it sends; `stuck`: it tells the version it has seen first for ever.

    `vocab_size` is what it tells instead of the model's.
    """

    stuck: bool = False
    vocab_size: int | None = None


class KeepingAdapter(InsituTrainerAdapter):
    first: PolicyEndpoint | None = None

    async def policy_endpoint(self) -> PolicyEndpoint:
        served = await super().policy_endpoint()
        self.first = self.first or served
        assert isinstance(self.config, KeepingAdapterConfig)
        if self.config.vocab_size is not None:
            served = replace(served, vocab_size=self.config.vocab_size)
        return self.first if self.config.stuck else served

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        sent.extend(row for group in trajectories.trajectories for t in group for row in t.rows)
        collections.append(trajectories)
        on_submit()
        return await super().submit(trajectories)


class WeighingAdapterConfig(KeepingAdapterConfig, name="weighing_adapter"):
    """Settings of an adapter whose backend is said to compute the advantages."""


class WeighingAdapter(KeepingAdapter, RewardAdapter):
    pass


@register_trainer_adapter(config_type=WeighingAdapterConfig)
async def weighing_adapter(config: WeighingAdapterConfig, builder: Builder) -> AsyncIterator[WeighingAdapter]:
    yield WeighingAdapter(config, builder)


def on_submit() -> None:
    """Called with each submission; tests replace it."""


sent: list[TrainingRow] = []
collections: list[TrajectoryCollection] = []


@register_trainer_adapter(config_type=KeepingAdapterConfig)
async def keeping_adapter(config: KeepingAdapterConfig, builder: Builder) -> AsyncIterator[KeepingAdapter]:
    adapter = KeepingAdapter(config, builder)
    try:
        yield adapter
    finally:
        await adapter.close()

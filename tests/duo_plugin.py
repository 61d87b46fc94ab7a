"""A workflow of two functions that both ask two models, and an adapter that keeps what it has sent to be trained.

`framework: langchain` asks by LangChain's own model objects.
"""

from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from insitu.adapters.insitu_backend import InsituAdapterConfig, InsituTrainerAdapter
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
from insitu.workflow.context import Context


class AskBothConfig(FunctionBaseConfig, name="ask_both"):
    """Asks each model for its word on a text; `earn` is the step reward of a character that they have answered."""

    word: str
    player: LLMRef
    judge: LLMRef
    framework: str | None = None
    earn: float | None = None


@register_function(config_type=AskBothConfig)
async def ask_both(config: AskBothConfig, builder: Builder) -> AsyncIterator[Any]:
    llms = {name: await builder.get_llm(name, config.framework) for name in (config.player, config.judge)}

    async def ask(text: str) -> str:
        answers = []
        for name, llm in llms.items():
            messages = [{"role": "user", "content": f"{name} {config.word}: {text}"}]
            if config.framework is None:
                answers.append((await llm.complete(messages)).choices[0].message.content)
            else:
                answers.append((await llm.ainvoke(messages)).content)
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
    """The mean code of the answer's characters, and `more`; or what is `fixed` for the row."""

    more: float = 0
    fixed: dict[str, float] = Field(default_factory=dict)


@register_evaluator(config_type=LettersConfig)
async def letters(config: LettersConfig, builder: Builder) -> AsyncIterator[EvaluatorInfo]:
    async def evaluate(given: EvalInput) -> EvalOutput:
        means = [sum(map(ord, i.output_obj)) / (len(i.output_obj) + 1) for i in given.eval_input_items]
        scored = zip(given.eval_input_items, means, strict=True)
        items = [EvalOutputItem(id=i.id, score=config.fixed.get(i.id, config.more + mean)) for i, mean in scored]
        return EvalOutput(eval_output_items=items)

    yield EvaluatorInfo(config=config, evaluate_fn=evaluate, description="mean letter")


class KeepingAdapterConfig(InsituAdapterConfig, name="keeping_adapter"):
    """The native adapter, which keeps what it sends; `stuck`: it tells the version it has seen first for ever."""

    stuck: bool = False


class KeepingAdapter(InsituTrainerAdapter):
    first: PolicyEndpoint | None = None

    async def policy_endpoint(self) -> PolicyEndpoint:
        self.first = self.first or await super().policy_endpoint()
        return self.first if getattr(self.config, "stuck", False) else await super().policy_endpoint()

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        sent.extend(row for group in trajectories.trajectories for t in group for row in t.rows)
        collections.append(trajectories)
        on_submit()
        return await super().submit(trajectories)


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

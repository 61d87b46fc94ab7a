"""Small registered components for tests: functions that misbehave on request, and evaluators that do."""

import ast
import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import anyio
from pydantic import BaseModel, Field, SecretStr
from waiting import hang

from insitu.errors import BackendUnavailable
from insitu.plugin_api import Builder, EvaluatorInfo, register_evaluator, register_function
from insitu.schemas.components import FunctionBaseConfig, FunctionRef, LLMRef
from insitu.schemas.evaluation import EvalInput, EvalOutput, EvalOutputItem, EvaluatorBaseConfig
from insitu.workflow.context import Context


class Inner(BaseModel):
    depth: int = 1
    llm: LLMRef | None = None
    functions: list[FunctionRef] = Field(default_factory=list)


class Other(BaseModel):
    height: int = 2
    width: int = 3


class PartsConfig(FunctionBaseConfig, name="parts"):
    """A workflow whose input says what it is to do; see `Parts.run`."""

    seconds: float = 0.0
    llm: LLMRef | None = None
    inner: Inner = Field(default_factory=Inner)
    inners: list[Inner] = Field(default_factory=list)
    named: dict[str, Inner] = Field(default_factory=dict)
    either: Inner | Other | None = None
    api_key: SecretStr | None = None
    password: SecretStr | list[int] | None = None
    credentials: dict[str, int] = Field(default_factory=dict)
    words: str | list[str] = ""
    spelled: int = Field(default=1, alias="spelt")


class Parts:
    """What happened: `begun` inputs in their order, `most` in flight at once."""

    def __init__(self, config: PartsConfig) -> None:
        self.config = config
        self.begun: list[str] = []
        self.running = 0
        self.most = 0
        self.attempts: Counter[str] = Counter()

    async def run(self, text: str) -> Any:
        self.begun.append(text)
        self.attempts[text] += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.config.seconds)
            return await self._answer(text)
        finally:
            self.running -= 1

    async def _answer(self, text: str) -> Any:
        word, _, rest = text.partition(" ")
        match word:
            case "raise":
                raise ValueError(rest)
            case "exit":
                raise SystemExit(0)
            case "interrupt":
                raise KeyboardInterrupt
            case "generator":
                raise GeneratorExit
            case "group":
                raise BaseExceptionGroup("several", [KeyboardInterrupt()])
            case "enter":  # a cancel scope of a client that is kept for other episodes
                scopes.append(anyio.CancelScope())
                scopes[-1].__enter__()
            case "leave":
                for scope in scopes:
                    scope.cancel()
            case "wait":
                waiting.append(asyncio.current_task())
                await hang()
            case "cancel":
                waiting.pop().cancel()
            case "swallow":
                release = asyncio.Event()
                released.append(release)
                while not release.is_set():
                    with contextlib.suppress(asyncio.CancelledError):
                        await release.wait()
            case "hang":
                await hang()
            case "stubborn":
                try:
                    await hang()
                except asyncio.CancelledError:
                    return "too late"
            case "cancelled":
                task = asyncio.create_task(hang())
                task.cancel()
                await task
            case "unavailable" if self.attempts[text] <= int(rest):
                raise BackendUnavailable("nobody there")
            case "big":
                return 2**100
            case "odd":
                return {(1, 2): object(), "text": "\ud800", "nan": math.nan}
            case "circle":
                answer: dict[str, Any] = {"text": "a"}
                return answer | {"circle": [answer.setdefault("itself", answer)]}
            case "seed":
                return Context.get().seed
            case "say" if rest == "parts.Inner":
                return PartsConfig()
            case "say":
                return ast.literal_eval(rest)
        return text.upper()


waiting: list[Any] = []
scopes: list[anyio.CancelScope] = []
released: list[asyncio.Event] = []
"""Set to end an episode that swallows its cancellation."""
made: list[Parts] = []
"""Every Parts that was built, the latest last."""


@register_function(config_type=PartsConfig)
async def parts(config: PartsConfig, builder: Builder) -> AsyncIterator[Any]:
    made.append(Parts(config))
    yield made[-1].run


class JudgeConfig(EvaluatorBaseConfig, name="judge"):
    """`says` names what the evaluator does instead of scoring 1 for the expected answer and 0 for another."""

    says: str = ""


@register_evaluator(config_type=JudgeConfig)
async def judge(config: JudgeConfig, builder: Builder) -> AsyncIterator[EvaluatorInfo]:
    async def evaluate(given: EvalInput) -> Any:
        items = [
            EvalOutputItem(id=i.id, score=float(i.output_obj == i.expected_output_obj), reasoning=i.output_obj)
            for i in given.eval_input_items
        ]
        match config.says:
            case "raise":
                raise RuntimeError("no judge today")
            case "exit" | "interrupt" | "generator":
                raise {"exit": SystemExit, "interrupt": KeyboardInterrupt, "generator": GeneratorExit}[config.says]
            case "hang":
                await hang()
            case "cancelled":
                task = asyncio.create_task(hang())
                task.cancel()
                await task
            case "nothing":
                return None
            case "nan":
                items[0].score = math.nan
            case "huge":
                items[0].score = -1e308
            case "none":
                items[0].score = None
            case "words":
                items[0].score = "good"
            case "fewer":
                items = items[1:]
            case "reordered":
                items.reverse()
            case "objects":
                items[0].reasoning = {"seen": object()}
        return EvalOutput(average_score=None, eval_output_items=items)

    yield EvaluatorInfo(config=config, evaluate_fn=evaluate, description="for tests")

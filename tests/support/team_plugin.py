"""A team behind one model, in which only the solver's answers decide the reward; `logs` has what happened.

A planner is asked up to twice, then one or two solvers at once, each of which may ask an expert first. How often, and
whether the episode fails, is drawn from its seed. Who pays asks a judge before, which is another model.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any, Literal

from insitu.plugin_api import Builder, EvaluatorInfo, register_evaluator, register_function
from insitu.schemas.components import FunctionBaseConfig, FunctionRef, LLMRef
from insitu.schemas.evaluation import EvalInput, EvalOutput, EvalOutputItem, EvaluatorBaseConfig
from insitu.schemas.steps import IntermediateStepPayload, IntermediateStepType
from insitu.workflow.context import Context, current_scope
from insitu.workflow.llms import ModelClient


class Asked:
    """A model call as the team knows it: who asked what, and what it was paid, None for nothing."""

    def __init__(self, role: str, text: str) -> None:
        self.role, self.text = role, f"{role}: {text}"
        self.answer = ""
        self.paid: float | None = None


logs: dict[str, list[Asked]] = {}
"""By the name of the episode, its calls in the order they were made."""


def log() -> list[Asked]:
    scope = current_scope()
    assert scope is not None
    assert scope.key is not None
    return logs.setdefault(scope.key.text(), [])


def value(answer: str) -> float:
    """What an answer is worth: the share of its characters whose codes are even."""
    return sum(ord(c) % 2 == 0 for c in answer) / max(len(answer), 1)


def tell(metadata: dict[str, Any]) -> None:
    """A custom step, the metadata at both of its ends."""
    manager = Context.get().intermediate_step_manager
    begin = IntermediateStepPayload(event_type=IntermediateStepType.CUSTOM_START, name="paid", metadata=metadata)
    manager.push_intermediate_step(begin)
    manager.push_intermediate_step(begin.model_copy(update={"event_type": IntermediateStepType.CUSTOM_END}))


async def complete(llm: ModelClient, role: str, text: str) -> Asked:
    made = Asked(role, text)
    log().append(made)
    reply = await llm.complete([{"role": "user", "content": made.text}])
    made.answer = reply.choices[0].message.content
    return made


class MemberConfig(FunctionBaseConfig, name="member"):
    """Asks the model, and before it `first` where its text ends with a 1, which it gives a `tip`.

    `pays` is how it pays the answer, its value x `worth`; one that might have had value and has none is not paid.
    """

    role: str
    llm: LLMRef
    judge: LLMRef
    first: FunctionRef | None = None
    pays: Literal["nothing", "reward", "step"] = "nothing"
    worth: float = 1.0
    tip: float | None = None


@register_function(config_type=MemberConfig)
async def member(config: MemberConfig, builder: Builder) -> AsyncIterator[Any]:
    llm, judge = [await builder.get_llm(name) for name in (config.llm, config.judge)]
    first = await builder.get_function(config.first) if config.first else None

    async def ask(text: str) -> str:
        if first is not None and text.endswith("1"):
            hint = await first.ainvoke(text)
            if config.tip is not None:
                Context.get().reward(config.tip)
                hinted = next(made for made in log() if made.role != "judge" and made.text.endswith(f": {text}"))
                hinted.paid = (hinted.paid or 0.0) + config.tip
            text += f" {value(hint):.1f}"
        made = await complete(llm, config.role, text)
        if config.pays != "nothing" and (value(made.answer) or not config.worth):
            await complete(judge, "judge", text)
            made.paid = config.worth * value(made.answer)
        if made.paid is None:
            return made.answer
        if config.pays == "reward":
            Context.get().reward(made.paid / 4)  # what is given twice adds up
            Context.get().reward(made.paid * 3 / 4)
        else:
            tell({"reward": made.paid})
        return made.answer

    yield ask


class TeamConfig(FunctionBaseConfig, name="team"):
    """`fails` is the share of episodes that do; `pays`: at the end the solver's last call, by the function's name."""

    planner: FunctionRef
    solver: FunctionRef
    fails: float = 0.0
    pays: bool = False


@register_function(config_type=TeamConfig)
async def team(config: TeamConfig, builder: Builder) -> AsyncIterator[Any]:
    planner, solver = [await builder.get_function(name) for name in (config.planner, config.solver)]

    async def play(text: str) -> float:
        draw = random.Random(Context.get().seed)
        for k in range(draw.randrange(3)):
            await planner.ainvoke(f"{text}, plan {k}")
        hints = [draw.randrange(2) for _ in range(1 if config.pays else draw.randint(1, 2))]
        if draw.random() < config.fails / 2:
            raise RuntimeError("lost before the solver")
        await asyncio.gather(*(solver.ainvoke(f"{text}, part {k}, hint {hint}") for k, hint in enumerate(hints)))
        solved = [made for made in log() if made.role == "solver"]
        if config.pays:
            await planner.ainvoke(f"{text}, looking back")
            solved[-1].paid = value(solved[-1].answer)
            tell({"reward": solved[-1].paid, "function": config.solver})
        if draw.random() < config.fails / 2:
            raise RuntimeError("lost at the end")
        return sum(value(made.answer) for made in solved) / len(solved)

    yield play


class TeamScoreConfig(EvaluatorBaseConfig, name="team_score"):
    """The workflow's answer, times `worth`."""

    worth: float = 1.0


@register_evaluator(config_type=TeamScoreConfig)
async def team_score(config: TeamScoreConfig, builder: Builder) -> AsyncIterator[EvaluatorInfo]:
    async def evaluate(given: EvalInput) -> EvalOutput:
        items = [EvalOutputItem(id=item.id, score=config.worth * item.output_obj) for item in given.eval_input_items]
        return EvalOutput(eval_output_items=items)

    yield EvaluatorInfo(config=config, evaluate_fn=evaluate, description="as it says itself")

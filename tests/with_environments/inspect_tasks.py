"""Tasks of inspect_ai for `test_inspect`: one turn, tools and several turns, several scores, and what goes wrong."""

import asyncio
import os
import threading
from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageTool, get_model
from inspect_ai.scorer import Score, accuracy, includes, mean, scorer, stderr
from inspect_ai.solver import generate, solver, use_tools
from inspect_ai.tool import tool


def numbered(count: int) -> MemoryDataset:
    return MemoryDataset([Sample(input=f"word {n}", target=f"word {n % 2}", id=f"s{n}") for n in range(count)])


@task
def words(count: int = 6) -> Task:
    """One turn: the answer of the echo includes the target for two of the rows."""
    return Task(dataset=numbered(count), solver=generate(), scorer=includes())


@tool
def look():
    async def execute(at: str) -> str:
        """Looks.

        Args:
            at: Where.
        """
        return f"the {at} is blue"

    return execute


@scorer(metrics=[mean()])
def looks():
    """A number: a quarter for each look."""

    async def score(state, target):
        return Score(value=0.25 * sum(isinstance(each, ChatMessageTool) for each in state.messages))

    return score


@task
def looking() -> Task:
    """Several turns with a tool."""
    samples = [Sample(input=text, id=text) for text in ("tool", "no need")]
    return Task(dataset=samples, solver=[use_tools(look()), generate()], scorer=looks())


@scorer(metrics={"length": [mean()], "first": [mean()]})
def parts():
    async def score(state, target):
        text = state.output.completion
        return Score(value={"length": len(text), "first": text[:1] == "e"})

    return score


@scorer(metrics=[accuracy(), stderr()])
def graded():
    """A model grades: `C` if it repeats what it is asked."""

    async def score(state, target):
        grade = await get_model(role="grader").generate(f"grade {state.output.completion}")
        return Score(value="C" if grade.completion.startswith("echo: grade") else "I")

    return score


@task
def several(count: int = 4, epochs: int = 2) -> Task:
    return Task(dataset=numbered(count), solver=generate(), scorer=[graded(), parts(), includes()], epochs=epochs)


@solver
def misbehave():
    async def solve(state, generate):
        what, marker = state.input_text, Path(os.environ["MARKERS"]) / f"{state.sample_id}"
        if what == "raise":
            raise ValueError("the solver has failed")
        if what == "wait":
            await asyncio.Event().wait()
        if what == "block" and not marker.exists():
            marker.touch()
            threading.Event().wait()  # and so does the event loop
        if what in ("die", "leave") and not marker.exists():
            if what == "leave":
                program = await asyncio.create_subprocess_exec("sleep", "3600", start_new_session=True)
                marker.write_text(str(program.pid))
            marker.touch()
            os._exit(3)
        state = await generate(state)
        if what == "talk":
            state = await generate(state)
        return state

    return solve


@scorer(metrics=[mean()])
def odd():
    async def score(state, target):
        if state.input_text == "unscorable":
            raise ValueError("the scorer has failed")
        return Score(value={"maybe": "maybe", "nan": float("nan")}.get(state.input_text, 1))

    return score


@task
def unruly(inputs: list[str]) -> Task:
    """Each input says what goes wrong."""
    dataset = MemoryDataset([Sample(input=text, id=number) for number, text in enumerate(inputs)])
    return Task(dataset=dataset, solver=misbehave(), scorer=odd(), message_limit=2)


@scorer(metrics=[mean()])
def small_letters():
    async def score(state, target):
        text = state.output.completion
        return Score(value=sum("a" <= each <= "z" for each in text) / max(len(text), 1))

    return score


@task
def letters() -> Task:
    samples = [Sample(input=f"say {n}", id=n) for n in range(8)]
    return Task(dataset=MemoryDataset(samples), solver=generate(), scorer=small_letters())


@task
def self_graded() -> Task:
    """The scorer calls the model that is evaluated."""

    @scorer(metrics=[mean()])
    def own():
        async def score(state, target):
            return Score(value=len((await get_model().generate("grade this")).completion))

        return score

    return Task(dataset=numbered(2), solver=generate(), scorer=own())

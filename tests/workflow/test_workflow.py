"""Functions, their context and intermediate steps."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from typing import Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel
from waiting import turns

from insitu.capture.ledger import current_call_site
from insitu.errors import PluginError, WorkflowError
from insitu.schemas.components import FunctionBaseConfig
from insitu.schemas.episodes import ModelCall
from insitu.schemas.steps import (
    ROOT_INVOCATION,
    IntermediateStep,
    IntermediateStepPayload,
    IntermediateStepType,
    StreamEventData,
    TTCEventData,
)
from insitu.workflow import event_loop
from insitu.workflow.context import Context, EpisodeScope
from insitu.workflow.event_loop import run_async
from insitu.workflow.functions import Function, FunctionInfo, as_function


class Config(FunctionBaseConfig, name="test_function"):
    pass


class Order(BaseModel):
    item: str
    count: int = 1


def function(fn: Any, name: str = "f", **info: Any) -> Function:
    return as_function(name, Config(), FunctionInfo.from_fn(fn, **info))


async def describe(order: Order) -> str:
    """Says what was ordered."""
    return f"{order.count} {order.item}"


@pytest.mark.parametrize("value", [Order(item="pear"), {"item": "pear"}, '{"item": "pear", "count": 1}'])
async def test_input_is_converted_to_the_declared_model(value: Any) -> None:
    assert await function(describe).ainvoke(value) == "1 pear"


async def test_a_value_that_does_not_fit_is_told_with_function_and_types() -> None:
    with pytest.raises(WorkflowError, match=r"function shop takes Order; a value of type int cannot"):
        await function(describe, "shop").ainvoke(3)
    with pytest.raises(WorkflowError, match=r"function shop takes Order; a value of type str .* JSON"):
        await function(describe, "shop").ainvoke("a pear")


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (str, 3, "3"),
        (str, {"a": 1}, '{"a":1}'),
        (str, Order(item="fig"), '{"item":"fig","count":1}'),
        (int, "12", 12),
        (list[int], "[1, 2]", [1, 2]),
        (dict, '{"a": 1}', {"a": 1}),
        (dict[str, Any], Order(item="fig"), {"item": "fig", "count": 1}),
        (Order | None, None, None),
        (Literal["C", "F"] | None, "C", "C"),
        (date, "2026-01-02", date(2026, 1, 2)),
        (IntermediateStepType, "LLM_END", IntermediateStepType.LLM_END),
        (Any, Order(item="fig"), Order(item="fig")),
    ],
)
async def test_plain_types(annotation: Any, value: Any, expected: Any) -> None:
    async def same(value: Any) -> Any:
        return value

    same.__annotations__["value"] = annotation
    assert await function(same).ainvoke(value) == expected


async def test_output_is_converted_when_asked() -> None:
    async def order(item: str) -> Order:
        return Order(item=item)

    made = function(order)
    assert await made.ainvoke("fig") == Order(item="fig")
    assert await made.ainvoke("fig", to_type=str) == '{"item":"fig","count":1}'
    assert await made.ainvoke("fig", to_type=dict) == {"item": "fig", "count": 1}
    with pytest.raises(WorkflowError, match="f answers int"):
        await made.ainvoke("fig", to_type=int)


async def test_several_parameters_are_the_fields_of_the_input() -> None:
    async def area(width: int, height: int = 2) -> int:
        return width * height

    made = function(area)
    assert await made.ainvoke({"width": 3}) == 6
    assert await made.ainvoke('{"width": 3, "height": 5}') == 15
    assert made.input_schema.model_json_schema()["required"] == ["width"]
    with pytest.raises(WorkflowError, match="width: Field required"):
        await made.ainvoke({"height": 1})


async def test_a_declared_schema_of_a_plain_parameter() -> None:
    class Question(BaseModel):
        text: str

    async def answer(text: str) -> str:
        return text.upper()

    made = function(answer, input_schema=Question, description="Answers")
    assert made.input_schema is Question
    assert made.description == "Answers"
    assert await made.ainvoke({"text": "why"}) == "WHY"
    assert await made.ainvoke("why") == "WHY"


async def test_own_converters_come_first() -> None:
    def from_number(value: int) -> Order:
        return Order(item="number", count=value)

    assert await function(describe, converters=[from_number]).ainvoke(4) == "4 number"


async def test_description_schema_and_config() -> None:
    made = function(describe)
    assert made.description == "Says what was ordered."
    assert made.input_schema is Order
    assert isinstance(made.config, Config)


async def test_annotations_as_text_with_names_local_to_a_factory() -> None:
    class Local(BaseModel):
        n: int

    async def double(value: "Local") -> "Unknown":  # type: ignore[name-defined]  # noqa: F821
        return value.n * 2 if isinstance(value, Local) else value

    async def keep(value: "Local") -> int:
        return Local.model_validate(value).n

    assert await function(keep).ainvoke({"n": 4}) == 4
    assert await function(double).ainvoke({"n": 4}) == 8


def test_what_a_factory_may_yield() -> None:
    made = as_function("f", Config(), describe)
    assert as_function("f", Config(), made) is made
    with pytest.raises(PluginError, match=r"functions\.f: its factory \(test_function\) yielded an int"):
        as_function("f", Config(), 3)
    with pytest.raises(PluginError, match="async def"):
        as_function("f", Config(), lambda value: value)
    with pytest.raises(PluginError, match="does not know sinlge_fn"):
        FunctionInfo.create(single_fn=describe, sinlge_fn=describe)


async def test_callable_objects_and_bound_methods() -> None:
    class Greeter:
        async def __call__(self, name: str) -> str:
            return f"hi {name}"

        async def bye(self, name: str) -> str:
            return f"bye {name}"

    assert await as_function("f", Config(), Greeter()).ainvoke(7) == "hi 7"
    assert await as_function("f", Config(), Greeter().bye).ainvoke(7) == "bye 7"


async def letters(text: str) -> Any:
    for letter in text:
        await turns(1)
        yield letter


async def test_streaming() -> None:
    made = function(letters)
    assert [piece async for piece in made.astream("abc")] == ["a", "b", "c"]
    assert await made.ainvoke("abc") == "abc"
    assert [piece async for piece in function(describe).astream({"item": "fig"})] == ["1 fig"]


async def test_both_kinds_of_output() -> None:
    async def whole(text: str) -> str:
        return text.upper()

    made = as_function("f", Config(), FunctionInfo.create(single_fn=whole, stream_fn=letters))
    assert await made.ainvoke("ab") == "AB"
    assert [piece async for piece in made.astream("ab")] == ["a", "b"]


async def test_a_stream_runs_inside_its_function_and_its_consumer_outside() -> None:
    async def inner(text: str) -> Any:
        for letter in text:
            yield letter, Context.get().active_function.function_name

    async def outer(text: str) -> list[Any]:
        seen = []
        async for letter, inside in function(inner, "inner").astream(text):
            seen.append((letter, inside, Context.get().active_function.function_name))
        return seen

    with EpisodeScope() as scope:
        assert await function(outer, "outer").ainvoke("ab") == [("a", "inner", "outer"), ("b", "inner", "outer")]
        assert Context.get().active_function.function_name == "root"
    assert [s.name for s in scope.steps] == ["outer", "inner", "inner", "outer"]
    assert scope.steps[2].data is not None
    assert scope.steps[2].data.output == [("a", "inner"), ("b", "inner")]


async def test_a_stream_left_early_is_closed_and_ended() -> None:
    closed = []

    async def endless(text: str) -> Any:
        try:
            while True:
                yield text
        finally:
            closed.append(text)

    with EpisodeScope() as scope:
        pieces = function(endless).astream("x")
        assert await anext(pieces) == "x"
        await pieces.aclose()
    assert closed == ["x"]
    assert [s.event_type for s in scope.steps] == ["FUNCTION_START", "FUNCTION_END"]


async def test_steps_of_nested_functions() -> None:
    async def child(text: str) -> str:
        return text + "!"

    async def parent(text: str) -> str:
        return await function(child, "child").ainvoke(text)

    with EpisodeScope() as scope:
        await function(parent, "<workflow>").ainvoke("hi")
    began, start, child_start, child_end, end, ended = scope.steps
    assert [s.event_type for s in scope.steps] == [
        "WORKFLOW_START",
        *["FUNCTION_START"] * 2,
        *["FUNCTION_END"] * 2,
        "WORKFLOW_END",
    ]
    assert len({began.UUID, start.UUID, child_start.UUID}) == 3
    assert (began.UUID, start.UUID, child_start.UUID) == (ended.UUID, end.UUID, child_end.UUID)
    parents = ["root", began.UUID, start.UUID, start.UUID, began.UUID, "root"]
    assert [s.parent_id for s in scope.steps] == parents
    assert (began.function_ancestry, ended.function_ancestry) == (ROOT_INVOCATION, ROOT_INVOCATION)
    assert (began.data, ended.data) == (StreamEventData(input="hi"), end.data)
    assert child_start.function_ancestry.function_name == "child"
    assert child_start.function_ancestry.parent_name == "<workflow>"
    assert child_start.function_ancestry.parent_id == start.function_ancestry.function_id
    assert end.data == StreamEventData(input="hi", output="hi!")


async def test_a_failing_function_ends_its_step() -> None:
    async def broken(text: str) -> str:
        raise KeyError(text)

    with EpisodeScope() as scope:
        with pytest.raises(KeyError):
            await function(broken).ainvoke("hi")
        assert Context.get().active_function.function_name == "root"
    assert scope.steps[-1].metadata == {"error": "KeyError('hi')"}


def push(event_type: str, **fields: Any) -> IntermediateStepPayload:
    payload = IntermediateStepPayload(event_type=IntermediateStepType(event_type), **fields)
    Context.get().intermediate_step_manager.push_intermediate_step(payload)
    return payload


async def test_custom_steps_know_their_parents() -> None:
    with EpisodeScope() as scope:
        outer = push("TASK_START", name="outer")
        inner = push("TOOL_START", name="inner", metadata={"depth": 2})
        push("SPAN_CHUNK", name="between")
        push("TOOL_END", name="inner", UUID=inner.UUID)
        lone = push("TTC_END", name="lone", data=TTCEventData(score=0.5, turn_id="t"))
        push("TASK_END", name="outer", UUID=outer.UUID)
        push("CUSTOM_END", name="late")
    parents = {(s.name, s.event_type.value): s.parent_id for s in scope.steps}
    assert parents == {
        ("outer", "TASK_START"): "root",
        ("inner", "TOOL_START"): outer.UUID,
        ("between", "SPAN_CHUNK"): inner.UUID,
        ("inner", "TOOL_END"): outer.UUID,
        ("lone", "TTC_END"): outer.UUID,
        ("outer", "TASK_END"): "root",
        ("late", "CUSTOM_END"): "root",
    }
    assert scope.steps[1].metadata == {"depth": 2}
    assert lone.data == TTCEventData(score=0.5, turn_id="t")


async def test_an_end_from_another_task_closes_its_start() -> None:
    async def end(uuid: str) -> None:
        push("TOOL_END", name="tool", UUID=uuid)

    with EpisodeScope() as scope:
        outer = push("TASK_START", name="outer")
        started = push("TOOL_START", name="tool")
        await asyncio.create_task(end(started.UUID))
        push("CUSTOM_START", name="next")
    assert [s.parent_id for s in scope.steps] == ["root", outer.UUID, outer.UUID, outer.UUID]


async def test_parallel_tasks_have_their_own_place() -> None:
    async def work(name: str) -> str:
        started = push("TASK_START", name=name)
        await turns(3)
        inner = push("CUSTOM_START", name=f"in {name}")
        await turns(1)
        push("TASK_END", name=name, UUID=started.UUID)
        return f"{started.UUID} {inner.UUID}"

    with EpisodeScope() as scope:
        for pair in await asyncio.gather(*(work(str(i)) for i in range(20))):
            outer, inner = pair.split()
            by_uuid = {s.UUID: s for s in scope.steps}
            assert by_uuid[inner].parent_id == outer
            assert by_uuid[outer].parent_id == "root"


async def test_subscribers() -> None:
    errors: list[Exception] = []
    completed: list[str] = []

    def broken(step: IntermediateStep) -> None:
        raise ValueError(step.name)

    with EpisodeScope() as scope:
        manager = Context.get().intermediate_step_manager
        names: list[str | None] = []
        subscription = manager.subscribe(
            lambda step: names.append(step.name), on_complete=lambda: completed.append("a")
        )
        manager.subscribe(broken, on_error=errors.append, on_complete=lambda: completed.append("b"))
        push("CUSTOM_START", name="one")
        subscription.unsubscribe()
        subscription.unsubscribe()
        push("CUSTOM_START", name="two")
    assert names == ["one"]
    assert [s.name for s in scope.steps] == ["one", "two"]
    assert [str(e) for e in errors] == ["one", "two"]
    assert completed == ["b"]


def test_a_failing_subscriber_fails_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    def broken(step: IntermediateStep) -> None:
        raise ValueError("mine")

    with EpisodeScope() as scope:
        scope.step_manager.subscribe(broken)
        push("CUSTOM_START")
    assert len(scope.steps) == 1
    assert "subscriber" in caplog.text


async def test_context_inside_and_outside_an_episode() -> None:
    outside = Context.get()
    assert (outside.input_message, outside.is_evaluating, outside.active_function.function_name) == (
        None,
        False,
        "root",
    )
    outside.reward(1.0)
    push("CUSTOM_START", metadata={"reward": 1.0})
    with EpisodeScope(input_message="hi", seed=5, is_evaluating=True):
        inside = Context.get()
        assert (inside.input_message, inside.seed, inside.is_evaluating) == ("hi", 5, True)
        assert await asyncio.to_thread(lambda: Context.get().input_message) == "hi"
    assert Context.get().input_message is None
    assert Context.get().intermediate_step_manager is outside.intermediate_step_manager


async def test_steps_outside_an_episode_reach_subscribers_and_are_not_kept() -> None:
    names = []
    manager = Context.get().intermediate_step_manager
    subscription = manager.subscribe(lambda step: names.append(step.name))
    await function(describe, "free").ainvoke({"item": "fig"})
    subscription.unsubscribe()
    assert names == ["free", "free"]


async def test_concurrent_episodes_never_see_one_another() -> None:
    async def work(n: int) -> int:
        await turns(1)
        push("CUSTOM_START", name=f"step {n}")
        await asyncio.gather(*(asyncio.create_task(turns(1)) for _ in range(3)))
        return Context.get().input_message

    async def episode(n: int) -> EpisodeScope:
        with EpisodeScope(input_message=n) as scope:
            assert await function(work).ainvoke(n) == n
        return scope

    for n, scope in enumerate(await asyncio.gather(*(episode(n) for n in range(64)))):
        assert [s.name for s in scope.steps] == ["f", f"step {n}", "f"]


def call(index: int) -> ModelCall:
    return ModelCall(index=index, model="m", messages=[])


def test_step_rewards_add_up_on_the_latest_call() -> None:
    with EpisodeScope() as scope:
        with pytest.raises(WorkflowError, match="before the episode made any model call"):
            Context.get().reward(1.0)
        push("CUSTOM_START", metadata={"reward": 7})
        scope.ledger.record([call(0)], current_call_site.get())
        Context.get().reward(0.5)
        Context.get().reward(np.array(0.25))
        scope.ledger.record([call(1)], current_call_site.get())
        step = push("CUSTOM_START", metadata={"reward": np.float32(-1)})
        push("CUSTOM_END", UUID=step.UUID, metadata={"reward": -1})
        push("TOOL_START", metadata={"reward": 100})
        push("CUSTOM_END", metadata={"reward": True})
        with pytest.raises(WorkflowError, match="a step reward is nan; allowed: from -1e"):
            Context.get().reward(float("nan"))
    assert scope.rewards.by_call == {0: 0.75, 1: -1}
    assert {*map(type, scope.rewards.by_call.values())} == {float}


def test_in_training_a_step_reward_passes_over_calls_of_other_models() -> None:
    def of(llm: str, index: int) -> ModelCall:
        return ModelCall(index=index, model="m", messages=[], llm=llm)

    with EpisodeScope(training=frozenset({"student"})) as scope:
        scope.ledger.record([of("judge", 0)], current_call_site.get())
        with pytest.raises(WorkflowError, match="before the episode made any model call"):
            Context.get().reward(1.0)
        for index, llm in enumerate(["student", "judge"], 1):
            scope.ledger.record([of(llm, index)], current_call_site.get())
        Context.get().reward(0.5)
        push("CUSTOM_END", metadata={"reward": 2})
    assert scope.rewards.by_call == {1: 2.5}


async def test_in_training_a_step_reward_passes_over_calls_outside_the_target_functions() -> None:
    async def call_and_earn(n: int) -> None:
        here = current_call_site.get()
        scope.ledger.record([ModelCall(index=n, model="m", messages=[], functions=here.invocation.names)], here)
        Context.get().reward(n)

    async def both(first: int) -> None:
        await function(call_and_earn, "plan").ainvoke(first)
        Context.get().reward(0.25)  # the first time, no trained call has been made that could have earned it
        await function(call_and_earn, "move").ainvoke(first + 1)
        await function(call_and_earn, "plan").ainvoke(first + 2)
        Context.get().reward(0.5)

    with EpisodeScope(training=True, target_functions=("move",)) as scope:
        await function(both, "<workflow>").ainvoke(1)
        await function(both, "again").ainvoke(4)
        Context.get().reward(0.125)
    assert scope.rewards.by_call == {1: 1.25, 2: 2.5, 3: 3, 4: 4.25, 5: 5.5 + 0.125, 6: 6}


async def test_a_step_reward_goes_to_the_latest_call_of_the_running_function() -> None:
    async def player(n: int) -> None:
        scope.ledger.record([call(n)], current_call_site.get())
        await turns(3 - n)
        Context.get().reward(n)

    with EpisodeScope() as scope:
        await asyncio.gather(*(function(player, f"player {n}").ainvoke(n) for n in range(3)))
    assert scope.rewards.by_call == {0: 0, 1: 1, 2: 2}


def test_nothing_is_recorded_after_the_end() -> None:
    with EpisodeScope() as scope:
        manager = Context.get().intermediate_step_manager
        push("CUSTOM_START")
    manager.push_intermediate_step(IntermediateStepPayload(event_type=IntermediateStepType.CUSTOM_END))
    assert len(scope.steps) == 1


async def test_a_step_reward_may_name_its_function() -> None:
    async def ask(n: int) -> None:
        scope.ledger.record(
            [ModelCall(index=n, model="m", messages=[], functions=current_call_site.get().invocation.names)],
            current_call_site.get(),
        )

    with EpisodeScope() as scope:
        await function(ask, "planner").ainvoke(0)
        await function(ask, "worker").ainvoke(1)
        Context.get().reward(0.5, function="planner")
        push("CUSTOM_END", metadata={"reward": 2, "function": "planner"})
        push("CUSTOM_END", metadata={"reward": 1})
        with pytest.raises(WorkflowError, match=r"cannot reward 'plan': .* no model call .*: planner, worker"):
            Context.get().reward(1.0, function="plan")
    assert scope.rewards.by_call == {0: 2.5, 1: 1}


def test_idle_threads_of_others_are_not_waited_for() -> None:
    """They would end the process of a command that shares it with them, such as one that a notebook runs."""
    with ThreadPoolExecutor(1, "insitu-training") as others:
        others.submit(int).result()
        run_async(turns(1))
        assert not event_loop.left_behind

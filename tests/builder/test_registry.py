"""Registering components, and the Builder: each block once, shared, taken down in reverse."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import plain_parts  # noqa: F401  (registers `parts`)
import pytest
from pydantic import Field
from waiting import turns

from insitu.config import Config, load_config
from insitu.errors import ConfigError, PluginError
from insitu.plugin_api import Builder, WorkflowBuilder, register_function, register_trainer_adapter
from insitu.registry import Registry, registry
from insitu.schemas.components import FunctionBaseConfig
from insitu.schemas.evaluation import EvaluatorBaseConfig
from insitu.schemas.finetuning import TrainerAdapterConfig
from insitu.schemas.kinds import EVALUATOR, FUNCTION, LLM
from insitu.workflow.llms import OpenAIConfig

events: list[str] = []


class LoggedConfig(FunctionBaseConfig, name="logged"):
    needs: list[str] = Field(default_factory=list)
    at_once: bool = False
    turns: int = 0
    fails: int = 0


@register_function(config_type=LoggedConfig)
async def logged(config: LoggedConfig, builder: Builder) -> AsyncIterator[Any]:
    if config.at_once:
        needed = await asyncio.gather(*map(builder.get_function, config.needs))
    else:
        needed = [await builder.get_function(name) for name in config.needs]
    await turns(config.turns)
    if events.count(f"fail {config.fails}") < config.fails:
        events.append(f"fail {config.fails}")
        raise RuntimeError("not today")

    async def answer(text: str) -> str:
        return " ".join([text, *[await f.ainvoke(text) for f in needed]])

    label = f"turns {config.turns} needs {len(needed)}"
    events.append(f"up {label}")
    yield answer
    events.append(f"down {label}")


@pytest.fixture(autouse=True)
def _no_events() -> None:
    events.clear()


def file(write: Any, **functions: dict[str, Any]) -> Config:
    return load_config(write({"functions": {n: {"_type": "logged", **f} for n, f in functions.items()}}))


async def test_concurrent_askers_get_the_one_object(write: Any) -> None:
    async with Builder(file(write, f={"turns": 10})) as builder:
        found = await asyncio.gather(*(builder.get_function("f") for _ in range(20)))
        assert len({id(f) for f in found}) == 1
        assert await builder.get_function("f") is found[0]
        assert events == ["up turns 10 needs 0"]
    assert events[1:] == ["down turns 10 needs 0"]


async def test_taken_down_in_reverse_also_when_the_block_fails(write: Any) -> None:
    config = file(write, a={}, b={"needs": ["a"]}, c={"needs": ["b", "a"], "turns": 1})

    async def block() -> None:
        async with Builder(config) as builder:
            assert await (await builder.get_function("c")).ainvoke("x") == "x x x x"
            raise KeyError

    with pytest.raises(KeyError):
        await block()
    ups = [e.removeprefix("up ") for e in events if e.startswith("up")]
    downs = [e.removeprefix("down ") for e in events if e.startswith("down")]
    assert len(ups) == 3
    assert downs == ups[::-1]


async def test_a_failing_factory_fails_all_who_wait_and_may_be_tried_again(write: Any) -> None:
    async with Builder(file(write, f={"fails": 1, "turns": 10})) as builder:
        found = await asyncio.gather(*(builder.get_function("f") for _ in range(3)), return_exceptions=True)
        assert [type(e.__cause__) for e in found if isinstance(e, PluginError)] == [RuntimeError] * 3
        assert events == ["fail 1"]
        assert await (await builder.get_function("f")).ainvoke("x") == "x"


async def test_who_waits_is_not_cancelled_with_who_builds(write: Any) -> None:
    async with Builder(file(write, f={"turns": 50})) as builder:
        first = asyncio.create_task(builder.get_function("f"))
        await turns()
        second = asyncio.create_task(builder.get_function("f"))
        await turns()
        first.cancel()
        assert await (await second).ainvoke("x") == "x"
        assert first.cancelled()


async def test_who_waits_may_be_cancelled_alone(write: Any) -> None:
    async with Builder(file(write, f={"turns": 50})) as builder:
        first = asyncio.create_task(builder.get_function("f"))
        await turns()
        second = asyncio.create_task(builder.get_function("f"))
        await turns()
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert await (await first).ainvoke("x") == "x"


async def test_components_that_need_each_other_are_an_error_and_no_standstill(write: Any) -> None:
    async with Builder(file(write, f={"needs": ["g"]}, g={"needs": ["f"]})) as builder, asyncio.timeout(60):
        with pytest.raises(ConfigError, match=r"functions\.f -> functions\.g -> functions\.f"):
            await builder.get_function("f")


async def test_components_that_need_each_other_and_are_built_at_once_are_an_error(write: Any) -> None:
    config = file(
        write, a={"needs": ["g", "f"], "at_once": True}, f={"needs": ["g"]}, g={"needs": ["h"]}, h={"needs": ["f"]}
    )
    async with Builder(config) as builder, asyncio.timeout(60):
        with pytest.raises(ConfigError, match=r"(functions\.\w)( -> functions\.\w){2} -> \1: each needs the next"):
            await builder.get_function("a")


async def test_unknown_names_list_what_exists(write: Any) -> None:
    async with Builder(file(write, f={})) as builder:
        with pytest.raises(ConfigError, match=r"functions: 'ff' does not exist \(did you mean 'f'\?\); available: f"):
            await builder.get_function("ff")
        with pytest.raises(ConfigError, match="llms: 'm' does not exist; available: none"):
            await builder.get_llm("m")


async def test_blocks_can_be_added(write: Any) -> None:
    async with Builder(file(write)) as builder:
        config = LoggedConfig()
        made = await builder.add_function("extra", config)
        assert await builder.get_function("extra") is made
        assert builder.get_function_config("extra") is config
        assert await builder.get_function_config("extra") is config
        with pytest.raises(ConfigError, match=r"functions\.extra exists already"):
            await builder.add_function("extra", config)
        with pytest.raises(PluginError):
            await builder.add_function("broken", LoggedConfig(fails=1))
        await builder.add_function("broken", LoggedConfig())


async def test_a_builder_needs_no_file_and_an_added_model_knows_its_name() -> None:
    async with WorkflowBuilder() as builder:
        config = OpenAIConfig(model_name="x", base_url="http://127.0.0.1:9/v1")
        first, second = await builder.add_llm("first", config), await builder.add_llm("second", config)
        assert (first.name, second.name) == ("first", "second")
        assert await builder.get_llm("second") is second
        assert builder.get_max_concurrency() == 8
        with pytest.raises(ConfigError, match="functions: 'f' does not exist; available: none"):
            await builder.get_function("f")


class LiveAdapterConfig(TrainerAdapterConfig, name="live_adapter"):
    pass


@register_trainer_adapter(config_type=LiveAdapterConfig)
async def live_adapter(config: LiveAdapterConfig, builder: Builder) -> AsyncIterator[object]:
    events.append("up adapter")
    yield object()
    events.append("down adapter")


async def test_a_child_builder_shares_the_parents_trainer_adapter_and_leaves_it_open(write: Any) -> None:
    config = load_config(write({"trainer_adapters": {"a": {"_type": "live_adapter"}}}))
    async with Builder(config) as parent:
        adapter = await parent.get_trainer_adapter("a")
        async with Builder(file(write, f={}), parent=parent) as child:
            assert await child.get_trainer_adapter("a") is adapter
            await child.get_function("f")
        assert events == ["up adapter", "up turns 0 needs 0", "down turns 0 needs 0"]
    assert events[-1] == "down adapter"


async def test_frameworks_without_support_are_named(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write({"llms": {"m": {"_type": "openai", "model_name": "x", "base_url": "http://127.0.0.1:9/v1"}}})
    async with Builder(load_config(path)) as builder:
        with pytest.raises(ConfigError, match=r"llms\.m: the framework .* available: adk"):
            await builder.get_llm("m", wrapper_type="smoke_signals")
        assert await builder.get_llm("m") is await builder.get_llm("m")


async def test_a_factory_that_raises_is_named_with_the_place(write: Any) -> None:
    path = write({"functions": {"f": {"_type": "logged", "fails": 99}}, "workflow": {"_type": "logged", "fails": 99}})
    async with Builder(load_config(path)) as builder:
        with pytest.raises(
            PluginError, match=r"functions\.f \(_type: logged\) .*not today \(.*test_registry.py, line "
        ):
            await builder.get_function("f")
        with pytest.raises(
            PluginError, match=r"^workflow \(_type: logged\) could not be built: RuntimeError: not today"
        ):
            await builder.get_workflow()


async def test_a_policy_without_an_adapter_says_what_is_missing(write: Any) -> None:
    async with Builder(load_config(write({"llms": {"m": {"_type": "policy"}}}))) as builder:
        with pytest.raises(ConfigError, match=r"finetuning\.trainer_adapter names no adapter"):
            await builder.get_llm("m")


async def factory(config: Any, builder: Any) -> AsyncIterator[None]:
    yield None


def test_names_clash_even_between_classes_of_the_same_name() -> None:
    mine = Registry()
    one = type("Config", (FunctionBaseConfig,), {"__module__": "package_a"}, name="same")
    other = type("Config", (FunctionBaseConfig,), {"__module__": "package_b"}, name="same")
    mine.add(FUNCTION, one, factory)
    mine.add(FUNCTION, type("Config", (FunctionBaseConfig,), {"__module__": "package_a"}, name="same"), factory)
    with pytest.raises(PluginError, match=r"two components of functions are called 'same'.*package_a.*package_b"):
        mine.add(FUNCTION, other, factory)


@pytest.mark.parametrize("ours_first", [False, True])
def test_a_plugins_evaluator_may_have_the_name_of_one_of_ours(ours_first: bool) -> None:
    from insitu.collect.comparisons import ContainsConfig

    registry, mine = Registry(), type("Mine", (EVALUATOR.base,), {"__module__": "my_plugin"}, name="contains")
    for config_type in (ContainsConfig, mine) if ours_first else (mine, ContainsConfig):
        registry.add(EVALUATOR, config_type, factory)
    found = registry.find(EVALUATOR, "contains")
    assert found is not None
    assert found.config_type is mine


def test_a_plugin_cannot_take_the_name_of_a_part_of_ours() -> None:
    mine = type("Mine", (LLM.base,), {"__module__": "my_plugin"}, name="openai")
    with pytest.raises(PluginError, match="'openai' of llms is built into insitu"):
        Registry().add(LLM, mine, factory)


def test_a_configuration_must_be_of_its_kind_and_have_a_name() -> None:
    class Judge(EvaluatorBaseConfig, name="judge_of_functions"):
        pass

    class Nameless(FunctionBaseConfig):
        pass

    with pytest.raises(PluginError, match=r"Judge \(judge_of_functions\) is not a FunctionBaseConfig"):
        Registry().add(FUNCTION, Judge, factory)
    with pytest.raises(PluginError, match="Nameless has no name"):
        Registry().add(FUNCTION, Nameless, factory)


def test_a_subclass_has_a_name_of_its_own() -> None:
    class Base(FunctionBaseConfig, name="base_name"):
        pass

    class Derived(Base, name="derived_name"):
        pass

    assert (Base.static_type(), Base().type) == ("base_name", "base_name")
    assert (Derived.static_type(), Derived().type) == ("derived_name", "derived_name")


@pytest.mark.parametrize("kind", [LLM, FUNCTION, EVALUATOR], ids=lambda k: k.section)
def test_built_in_names_are_found_without_importing_them_first(kind: Any) -> None:
    assert set(kind.built_in) <= set(registry.names(kind))
    for name in kind.built_in:
        assert registry.find(kind, name) is not None
    assert registry.find(kind, "no such thing") is None

"""Test-time compute: strategies found by name and checked for what they are asked for, and quiet libraries."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from waiting import turns

from insitu.config import load_config
from insitu.errors import ConfigError, PluginError, WorkflowError
from insitu.plugin_api import (
    Builder,
    FunctionBaseConfig,
    FunctionRef,
    PipelineTypeEnum,
    StageTypeEnum,
    StrategyBase,
    TTCItem,
    TTCStrategyBaseConfig,
    TTCStrategyRef,
    WorkflowBuilder,
    register_function,
    register_ttc_strategy,
    suppress_logs,
)


class DoubledConfig(FunctionBaseConfig, name="ttc_doubled"):
    pass


@register_function(config_type=DoubledConfig)
async def doubled(config: DoubledConfig, builder: Builder) -> AsyncIterator[Any]:
    async def double(text: str) -> str:
        return text * 2

    yield double


class RewriteConfig(TTCStrategyBaseConfig, name="ttc_rewrite"):
    function: FunctionRef
    breaks: bool = False


class Rewrite(StrategyBase):
    config: RewriteConfig

    async def build_components(self, builder: Builder) -> None:
        if self.config.breaks:
            raise RuntimeError("no thesaurus")
        self.function = await builder.get_function(self.config.function)

    async def ainvoke(self, items: list[TTCItem], *args: Any, **kwargs: Any) -> list[TTCItem]:
        return [item.model_copy(update={"output": await self.function.ainvoke(item.output)}) for item in items]

    def supported_pipeline_types(self) -> list[PipelineTypeEnum]:
        return [PipelineTypeEnum.PLANNING, PipelineTypeEnum.TOOL_USE]

    def stage_type(self) -> StageTypeEnum:
        return StageTypeEnum.EDITING


@register_ttc_strategy(config_type=RewriteConfig)
async def rewrite(config: RewriteConfig, builder: Builder) -> AsyncIterator[Rewrite]:
    yield Rewrite(config)


class SearchConfig(FunctionBaseConfig, name="ttc_search"):
    editor: TTCStrategyRef
    selector: TTCStrategyRef


@register_function(config_type=SearchConfig)
async def search(config: SearchConfig, builder: Builder) -> AsyncIterator[Any]:
    editor = await builder.get_ttc_strategy(config.editor, PipelineTypeEnum.PLANNING, StageTypeEnum.EDITING)
    selector = await builder.get_ttc_strategy(config.selector, PipelineTypeEnum.PLANNING, StageTypeEnum.SELECTION)

    async def find(text: str) -> str:
        candidates = [TTCItem(output=letter, score=text.count(letter)) for letter in sorted(set(text))]
        [chosen] = await selector.ainvoke(await editor.ainvoke(candidates))
        return str(chosen.output)

    yield find


FILE = {
    "functions": {"twice": {"_type": "ttc_doubled"}},
    "ttc_strategies": {
        "edit": {"_type": "ttc_rewrite", "function": "twice"},
        "best": {"_type": "best_of_n_selection"},
        "broken": {"_type": "ttc_rewrite", "function": "twice", "breaks": True},
    },
    "workflow": {"_type": "ttc_search", "editor": "edit", "selector": "best"},
}


async def test_a_workflow_of_strategies(write: Any) -> None:
    async with Builder(load_config(write(FILE))) as builder:
        assert await (await builder.get_workflow()).ainvoke("banana") == "aa"


async def test_a_strategy_is_checked_and_there_is_one_for_each_pipeline_type(write: Any) -> None:
    planning, tools = PipelineTypeEnum.PLANNING, PipelineTypeEnum.TOOL_USE
    async with Builder(load_config(write(FILE))) as builder:
        edit = await builder.get_ttc_strategy("edit", planning, StageTypeEnum.EDITING)
        assert await builder.get_ttc_strategy("edit", planning, StageTypeEnum.EDITING) is edit
        assert edit.pipeline_type is planning
        for_tools = await builder.get_ttc_strategy("edit", tools, StageTypeEnum.EDITING)
        assert (edit.pipeline_type, for_tools.pipeline_type) == (planning, tools)
        with pytest.raises(ConfigError, match=r"^ttc_strategies\.edit is a strategy of stage editing, not scoring$"):
            await builder.get_ttc_strategy("edit", PipelineTypeEnum.CUSTOM, StageTypeEnum.SCORING)
        with pytest.raises(ConfigError, match=r"edit supports the pipeline types planning, tool_use, not custom"):
            await builder.get_ttc_strategy("edit", PipelineTypeEnum.CUSTOM, StageTypeEnum.EDITING)
        with pytest.raises(PluginError, match=r"^ttc_strategies\.broken \(_type: ttc_rewrite\).*no thesaurus"):
            await builder.get_ttc_strategy("broken", planning, StageTypeEnum.EDITING)
        with pytest.raises(ConfigError, match=r"ttc_strategies: 'bets' does not exist \(did you mean 'best'\?\)"):
            await builder.get_ttc_strategy("bets", planning, StageTypeEnum.SELECTION)


async def test_strategies_can_be_added() -> None:
    async with WorkflowBuilder() as builder:
        await builder.add_function("twice", DoubledConfig())
        await builder.add_ttc_strategy("edit", RewriteConfig(function=FunctionRef("twice")))
        edit = await builder.get_ttc_strategy("edit", PipelineTypeEnum.PLANNING, StageTypeEnum.EDITING)
        assert builder.get_ttc_strategy_config("edit") is edit.config
        made = await edit.ainvoke([TTCItem(output="ab", turn=3)])
        assert [item.model_dump(exclude_none=True) for item in made] == [{"output": "abab", "turn": 3}]


async def test_best_of_n_never_takes_a_missing_score_for_a_number(write: Any) -> None:
    async with Builder(load_config(write(FILE))) as builder:
        best = await builder.get_ttc_strategy("best", PipelineTypeEnum.AGENT_EXECUTION, StageTypeEnum.SELECTION)
        items = [TTCItem(name="a"), TTCItem(name="b", score=-2), TTCItem(name="c", score=float("nan"))]
        items += [TTCItem(name="d", score=-1), TTCItem(name="e", score=-1)]
        assert [item.name for item in await best.ainvoke(items)] == ["d"]
        with pytest.raises(WorkflowError, match="none of 1 candidates has a score"):
            await best.ainvoke(items[:1])


@pytest.fixture
def loggers() -> Iterator[list[logging.Logger]]:
    names = ("quiet", "quiet.set", "quiet.inherits", "quietly")
    made = [logging.getLogger(name) for name in names]
    for logger, level in zip(made, (logging.INFO, logging.DEBUG, logging.NOTSET, logging.DEBUG), strict=True):
        logger.setLevel(level)
    made[1].propagate = False
    yield made
    for logger in made:
        logger.setLevel(logging.NOTSET)
        logger.propagate = True


def state(loggers: list[logging.Logger]) -> list[tuple[int, bool]]:
    return [(logger.level, logger.propagate) for logger in loggers]


def effective(loggers: list[logging.Logger]) -> list[int]:
    return [logger.getEffectiveLevel() for logger in loggers]


async def test_logs_are_suppressed_and_every_logger_is_as_before(loggers: list[logging.Logger]) -> None:
    before = state(loggers)

    async def fail() -> None:
        async with suppress_logs("quiet", logging.ERROR):
            assert effective(loggers) == [logging.ERROR] * 3 + [logging.DEBUG]
            loggers[2].setLevel(logging.DEBUG)
            loggers[2].propagate = False
            assert not logging.getLogger("quiet.set.created").isEnabledFor(logging.WARNING)
            raise KeyError("banana")

    with pytest.raises(KeyError, match="banana"):
        await fail()
    assert state(loggers) == before
    assert state([logging.getLogger("quiet.set.created")]) == [(logging.NOTSET, True)]


async def test_suppressions_nest_and_overlap(loggers: list[logging.Logger]) -> None:
    before = state(loggers)
    async with suppress_logs("quiet", logging.WARNING):
        async with suppress_logs("quiet.inherits", "CRITICAL"):
            assert effective(loggers)[:3] == [logging.WARNING, logging.WARNING, logging.CRITICAL]
        assert effective(loggers)[:3] == [logging.WARNING] * 3
        async with suppress_logs("quiet", logging.DEBUG):
            assert effective(loggers)[:3] == [logging.WARNING] * 3
    assert state(loggers) == before

    first, second = suppress_logs("quiet", logging.ERROR), suppress_logs("quiet", logging.WARNING)
    await first.__aenter__()
    await second.__aenter__()
    await first.__aexit__(None, None, None)
    assert effective(loggers)[:3] == [logging.WARNING] * 3
    await second.__aexit__(None, None, None)
    assert state(loggers) == before


async def test_many_tasks_suppress_at_once(loggers: list[logging.Logger]) -> None:
    before = state(loggers)

    async def quiet(number: int) -> None:
        async with suppress_logs("quiet"):
            await turns(number)
            assert not loggers[1].isEnabledFor(logging.WARNING)

    await asyncio.gather(*(quiet(7 * n % 10) for n in range(10)))
    assert state(loggers) == before


async def test_the_root_and_unknown_levels(loggers: list[logging.Logger]) -> None:
    root = logging.getLogger()
    before = (root.level, *state(loggers))
    async with suppress_logs("", logging.CRITICAL):
        assert effective([root, *loggers]) == [logging.CRITICAL] * 5
    assert (root.level, *state(loggers)) == before
    with pytest.raises(ConfigError, match=r"log level 'ERORR' does not exist .*did you mean 'ERROR'"):
        async with suppress_logs("quiet", "ERORR"):
            pass

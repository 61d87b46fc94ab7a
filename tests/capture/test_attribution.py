"""To which episode a model call belongs that is made in a thread, an executor, or a worker that episodes share."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from factories import connected
from fake_openai import FakeOpenAI, encode
from test_capture import ask, text_of

from insitu.agents.frameworks import sync_client
from insitu.capture.ledger import CallLedger
from insitu.collect.collector import Plan, collect
from insitu.collect.episodes import EpisodeOptions
from insitu.collect.shared_run import RunState
from insitu.config import Config
from insitu.plugin_api import Builder, register_function
from insitu.schemas.components import FunctionBaseConfig
from insitu.schemas.episodes import Episode
from insitu.schemas.evaluation import EvalInputItem
from insitu.workflow.context import Context
from insitu.workflow.event_loop import run_async
from insitu.workflow.llms import ModelClient, OpenAIConfig

Agent = Callable[[ModelClient, str], Awaitable[str]]


class AgentConfig(FunctionBaseConfig, name="test_attribution"):
    agent: Any = None


@register_function(config_type=AgentConfig)
async def agent_function(config: AgentConfig, builder: Builder) -> AsyncIterator[Any]:
    player = await builder.get_llm("player")

    async def run(text: str) -> str:
        return str(await config.agent(player, text))

    yield run


async def collected(server: FakeOpenAI, agent: Agent, rows: list[str], limit: int = 8) -> list[Episode]:
    """The training episodes of an agent on these rows, in the order of the rows."""
    llm = OpenAIConfig(model_name="fake", base_url=server.base_url, max_retries=0)
    blocks = {("functions", "<workflow>"): AgentConfig(agent=agent), ("llms", "player"): llm}
    async with Builder(Config(blocks=blocks)) as builder:
        members = [(EvalInputItem(id=t, input_obj=t), 0) for t in rows]
        plan = Plan("run", 1, members, EpisodeOptions(training=frozenset({"player"})), limit)
        episodes = [e async for group in collect(plan, builder, RunState.of(builder)) for e in group.episodes]
        return sorted(episodes, key=lambda e: rows.index(e.key.row_id))


def said(episode: Episode) -> list[str]:
    return [call.messages[0]["content"] for call in episode.calls]


ROWS = [f"row {n}" for n in range(12)]


@pytest.mark.parametrize("own_pool", [False, True])
def test_calls_in_executors_belong_to_the_episode(server: FakeOpenAI, own_pool: bool) -> None:
    async def run() -> list[Episode]:
        with ThreadPoolExecutor(3) as pool:

            async def agent(player: ModelClient, text: str) -> str:
                def create() -> str:
                    answer = client.chat.completions.create(model="fake", messages=ask(text))
                    return str(answer.choices[0].message.content)

                client = clients.setdefault("one", sync_client(player))
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(pool if own_pool else None, create)

            clients: dict[str, Any] = {}
            return await collected(server, agent, ROWS)

    episodes = run_async(run())
    assert [(e.output, said(e)) for e in episodes] == [(f"echo: {text}", [text]) for text in ROWS]


@pytest.mark.parametrize("enters", [False, True])
async def test_calls_in_threads_are_counted_or_enter_their_episode(
    server: FakeOpenAI, enters: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def agent(player: ModelClient, text: str) -> str:
        context = Context.get()

        def create() -> None:
            if enters:
                with context.activate():
                    client.chat.completions.create(model="fake", messages=ask(text), n=2)
            else:
                client.chat.completions.create(model="fake", messages=ask(text), n=2)

        client = sync_client(player)
        thread = threading.Thread(target=create)
        thread.start()
        await asyncio.to_thread(thread.join)
        return text

    episodes = await collected(server, agent, ROWS[:3])
    warnings = [r.message for r in caplog.records if r.levelname == "WARNING"]
    if enters:
        assert ([said(e) for e in episodes], warnings) == ([[text] * 2 for text in ROWS[:3]], [])
        assert all(call.functions == ("<workflow>",) for e in episodes for call in e.calls)
    else:
        assert [e.calls for e in episodes] == [[]] * 3
        (warning,) = warnings
        assert "6 completions of llms.player were requested outside every episode while 3 episodes ran" in warning


class Worker:
    """Answers the questions of all episodes in one task, which the first episode starts."""

    def __init__(self, enters: bool) -> None:
        self.enters = enters
        self.jobs: asyncio.Queue[Any] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None

    async def __call__(self, player: ModelClient, text: str) -> str:
        if self.task is None:
            self.task = asyncio.create_task(self.work(player))
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.jobs.put_nowait((Context.get(), text, answer))
        return await answer

    async def work(self, player: ModelClient) -> None:
        while True:
            context, text, answer = await self.jobs.get()
            try:
                if self.enters:
                    with context.activate():
                        answer.set_result(await text_of(player, text))
                else:
                    answer.set_result(await text_of(player, text))
            except Exception as error:  # passed on
                answer.set_exception(error)


@pytest.mark.parametrize("limit", [1, 4])
async def test_a_worker_that_episodes_share_is_found_out(server: FakeOpenAI, limit: int) -> None:
    worker = Worker(enters=False)
    episodes = await collected(server, worker, ROWS[:6], limit)
    assert worker.task is not None
    worker.task.cancel()
    assert {e.reason for e in episodes if e.calls} == {"capture_error"}
    first, *others = episodes
    assert "the task Worker.work made model calls and still runs after the episode" in str(first.error)
    assert "Context.activate()" in str(first.error)
    refused = [str(e.error) for e in others if e.reason == "capture_error"]
    assert len(refused) >= len(others) - limit
    assert all("was refused because its episode run/1/row 0/0/0 had ended" in error for error in refused)


async def test_a_worker_that_enters_each_episode_serves_them_all(server: FakeOpenAI) -> None:
    worker = Worker(enters=True)
    episodes = await collected(server, worker, ROWS, 4)
    assert worker.task is not None
    worker.task.cancel()
    assert [(e.reason, said(e)) for e in episodes] == [(None, [text]) for text in ROWS]
    assert all(e.calls[0].token_ids == encode(f"echo: {e.key.row_id}") for e in episodes)


async def test_tasks_that_end_with_their_episode_are_no_shared_workers(server: FakeOpenAI) -> None:
    async def agent(player: ModelClient, text: str) -> str:
        async def twice() -> str:
            await text_of(player, f"{text} first")
            return await text_of(player, text)

        first = asyncio.create_task(twice())
        other = asyncio.create_task(twice())
        await asyncio.wait({first, other}, return_when=asyncio.FIRST_COMPLETED)
        other.cancel()
        return await first

    episodes = await collected(server, agent, ROWS[:4])
    assert [(e.output, e.reason) for e in episodes] == [(f"echo: {text}", None) for text in ROWS[:4]]


async def test_outside_an_episode_entering_does_nothing(server: FakeOpenAI) -> None:
    async with connected(server) as plain:
        with Context.get().activate() as context:
            assert await text_of(plain, "hi") == "echo: hi"
            assert context.row is None


def test_calls_of_threads_have_different_numbers_and_seeds() -> None:
    ledger = CallLedger(training=True)
    pending: list[Any] = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def begin() -> None:
        for number in range(1500):
            call = ledger.begin_call(b"prompt", 2, "here")
            if number % 3 == 0:
                ledger.abandon(call, "http 500", by_server=True)
            else:
                pending.append(call)

    try:
        threads = [threading.Thread(target=begin) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    indices = [index for call in pending for index in call.indices]
    assert len(set(indices)) == len(indices) == 2 * 16 * 1000
    assert len({call.seed for call in pending}) > len(pending) - 10  # 31 bits: few may collide
    assert len({call.repetition for call in pending}) == len(pending)
    assert ledger.failed_attempts["http 500"] == 16 * 500
    assert ledger.requested["here"] == 2 * 16 * 1500

"""OpenEnv environments as workflows, and files as OpenEnv servers; the real package is in with_environments."""

import asyncio
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import processes
import psutil
import pytest
from fake_openai import FakeOpenAI
from fake_openenv import FakeOpenEnv
from processes import HANGS
from waiting import turns, until

from insitu.builder import Builder
from insitu.collect.episodes import EpisodeOptions, in_process, run_episode
from insitu.config import load_config
from insitu.errors import BackendUnavailable, ConfigError, WorkflowError
from insitu.integrations.environments.openenv.served_file import serve_file
from insitu.integrations.environments.openenv.sessions import Session
from insitu.integrations.environments.openenv.workflow import text_of, tool_text
from insitu.schemas.episodes import DropReason, Episode, EpisodeKey, EpisodeStatus
from insitu.schemas.evaluation import EvalInputItem
from insitu.wire.http_access import AccessPolicy

FAKE = Path(__file__).parents[2] / "support/fake_openenv.py"
RESET = {name: f"{{{name}}}" for name in ("do", "times", "key", "last", "pay", "say")}


def project(write: Any, server: FakeOpenAI, **workflow: Any) -> Path:
    return write(
        {
            "llms": {"player": {"_type": "openai", "model_name": "fake", "base_url": server.base_url, "api_key": "k"}},
            "workflow": {"_type": "openenv", "model": "player", "reset": RESET, "patience": 20, **workflow},
            "eval": {"evaluators": {"reward": {"_type": "openenv"}}},
        }
    )


def row(**told: Any) -> dict[str, Any]:
    return {"question": "", **dict.fromkeys(RESET), "last": 1, "pay": 0.5, "say": "hello", **told}


async def play(builder: Builder, *rows: dict[str, Any], retries: int = 1, seconds: float = 30) -> list[Episode]:
    attempt = in_process(await builder.get_workflow())
    options = EpisodeOptions(seed=3, timeout=seconds, retries=retries)
    return await asyncio.gather(
        *(
            run_episode(
                attempt,
                EvalInputItem(id=i, input_obj=each["question"], full_dataset_entry=each),
                EpisodeKey("r", 0, str(i), 0),
                options,
            )
            for i, each in enumerate(rows)
        )
    )


@asynccontextmanager
async def playing(write: Any, server: FakeOpenAI, environment: FakeOpenEnv, **workflow: Any) -> AsyncIterator[Builder]:
    async with environment.listening() as url:
        async with Builder(load_config(project(write, server, url=url, **workflow))) as builder:
            yield builder


def servers_below(process: psutil.Process) -> list[psutil.Process]:
    return [each for each, command in processes.commands_below(process).items() if FAKE.name in " ".join(command)]


async def test_an_episode_is_a_session(write: Any, server: FakeOpenAI) -> None:
    """Its observations are the model's messages, its answers the actions, its rewards those of the answers."""
    environment, before = FakeOpenEnv(), len(server.requests)
    async with playing(write, server, environment, system="Count.") as builder:
        (episode,) = await play(builder, row(question="Begin.", last=3))
        assert environment.open == 0
    assert episode.outcome is EpisodeStatus.OK, episode.error
    output = episode.output
    assert (output["reward"], output["step_rewards"]) == (1.5, [0.5, 0.5, 0.5])
    assert output["metrics"] == {"turns": 3, "steps": 3, "done": 1}
    asked = server.requests[before:]
    assert [message["role"] for message in asked[-1]["messages"]] == ["system", "user", *["assistant", "user"] * 2]
    assert asked[0]["messages"][1]["content"] == "Begin.\n\nhello"
    assert asked[1]["messages"][3]["content"] == "1"
    assert environment.actions[0] == {"message": "echo: Begin.\n\nhello"}
    assert 0 <= environment.resets[0]["seed"] < 2**31


async def test_rewards(write: Any, server: FakeOpenAI) -> None:
    environment = FakeOpenEnv()
    async with playing(write, server, environment, reward="last", max_turns=2) as builder:
        last, none = await play(builder, row(pay=0.25, last=9, seed=5), row(pay=None))
    assert (last.output["reward"], last.output["metrics"]["done"], last.output["metrics"]["turns"]) == (0.25, 0, 2)
    assert none.reason is DropReason.WORKFLOW_ERROR
    assert "the environment is done and has given no reward" in (none.error or "")
    assert 5 in [reset["seed"] for reset in environment.resets]
    async with playing(write, server, FakeOpenEnv(), no_reward=-1.0) as builder:
        (none,) = await play(builder, row(pay=None))
    assert (none.output["reward"], none.output["step_rewards"]) == (-1.0, [-1.0])


async def test_an_environment_gives_its_tools(write: Any, server: FakeOpenAI) -> None:
    environment, before = FakeOpenEnv(fields={}), len(server.requests)
    async with playing(write, server, environment) as builder:
        done, stopped = await play(builder, row(say="tool"), row(say="talk", pay=None))
    assert done.output["reward"] == 0.5
    assert environment.actions[0]["type"] == "call_tool"
    assert server.requests[before]["tools"][0]["function"]["name"] == "look"
    assert "is not done after 1 answers" in (stopped.error or "")
    async with playing(write, server, FakeOpenEnv(fields={})) as builder:
        (episode,) = await play(builder, row(say="tool", last=2))
    assert server.requests[-1]["messages"][-1]["content"] == "seen 1"
    assert episode.output["step_rewards"] == [0.5, 0.0]  # the second answer calls nothing


async def test_a_message_that_nothing_asked_for_shifts_no_reward(write: Any, server: FakeOpenAI) -> None:
    """The reward of each later step would be that of the one before."""
    async with playing(write, server, FakeOpenEnv()) as builder:
        episode, fine = await play(builder, row(do="twice", last=3, say="slow 0.2"), row(last=3))
    assert fine.output["step_rewards"] == [0.5] * 3
    assert episode.reason is DropReason.WORKFLOW_ERROR
    assert "before step, a message came that nothing had asked for" in (episode.error or "")


@asynccontextmanager
async def session_with(environment: FakeOpenEnv) -> AsyncIterator[Session]:
    async with environment.listening() as url, aiohttp.ClientSession() as http:
        session = Session(await http.ws_connect(f"{url}/ws"), url, HANGS)
        yield session
        await session.close()


async def test_messages_before_the_reset_are_not_its_answer() -> None:
    environment = FakeOpenEnv()
    environment.unasked = 1
    async with session_with(environment) as session:
        await until(lambda: environment.sent)
        await turns()
        with pytest.raises(WorkflowError, match="before reset, a message came that nothing had asked for"):
            await session.reset({})


async def test_a_flood_of_messages_that_nothing_asked_for_is_not_read() -> None:
    """The server waits, with what the buffers of the connection hold; a session of it is closed all the same."""
    environment = FakeOpenEnv()
    environment.unasked = sys.maxsize

    async def stands_still() -> bool:
        before = environment.sent
        await turns(100)
        return before == environment.sent > 0

    async with session_with(environment) as session:
        await until(stands_still)
        assert environment.sent < 1000
        with pytest.raises(WorkflowError, match="before reset, a message came that nothing had asked for"):
            await session.reset({})


async def test_a_schema_that_is_too_large_is_refused(write: Any, server: FakeOpenAI) -> None:
    async with playing(write, server, FakeOpenEnv(fields={"x" * 2**22: "string"})) as builder:
        with pytest.raises(BackendUnavailable, match="/schema is answered with more than 4194304 bytes"):
            await builder.get_workflow()


async def test_a_session_sends_no_cookies_of_another(write: Any, server: FakeOpenAI) -> None:
    environment = FakeOpenEnv()
    async with environment.listening() as url:
        named = url.replace("127.0.0.1", "localhost")  # clients keep no cookies of addresses
        async with Builder(load_config(project(write, server, url=named))) as builder:
            for _ in range(2):
                await play(builder, row())
    assert environment.cookies == [{}, {}]


async def test_a_redirect_gets_no_secret(write: Any, server: FakeOpenAI) -> None:
    environment = FakeOpenEnv()
    async with environment.listening() as url:
        config = project(write, server, url=f"{url}/elsewhere", headers={"X-Secret": "s3cr3t"})
        async with Builder(load_config(config)) as builder:
            with pytest.raises(WorkflowError, match=r"redirects to .*, which is not followed"):
                await play(builder, row(), retries=0)
    assert not environment.resets


@pytest.mark.parametrize("do", ["die", "hang", "garble", "raise"])
async def test_failures(do: str, write: Any, server: FakeOpenAI) -> None:
    """A lost or hanging server is tried again, a failing environment is not; neither has a reward."""
    retried = do in ("die", "hang")
    async with playing(write, server, FakeOpenEnv(), timeout=0.5) as builder:
        once, always, fine = await play(builder, row(do=do, times=1, key="a"), row(do=do), row())
    assert fine.outcome is EpisodeStatus.OK
    assert (once.outcome is EpisodeStatus.OK, once.key.attempt) == (retried, int(retried))
    assert always.outcome is EpisodeStatus.FAILED
    assert always.output is None
    assert always.reason is (DropReason.BACKEND_ERROR if retried else DropReason.WORKFLOW_ERROR)
    expected = {
        "die": "the connection was lost in step",
        "hang": "no answer to step within timeout: 0.5 s",
        "garble": "the answer to step is not OpenEnv's",
        "raise": "it is broken (EXECUTION_ERROR)",
    }
    assert expected[do] in (always.error or "")


async def test_sessions_are_within_the_limit_of_the_server(write: Any, server: FakeOpenAI) -> None:
    """It is known from the first refusal on, or configured; then nothing is refused."""
    environment = FakeOpenEnv(limit=2)
    async with playing(write, server, environment) as builder:
        episodes = await play(builder, *[row(say="slow 0.02")] * 12)
        refused = environment.refused
        episodes += await play(builder, *[row(say="slow 0.02")] * 12)
    assert Counter(episode.outcome for episode in episodes) == {EpisodeStatus.OK: 24}
    assert environment.most == 2
    assert 0 < refused == environment.refused
    environment = FakeOpenEnv(limit=2)
    async with playing(write, server, environment, sessions=2) as builder:
        await play(builder, *[row(say="slow 0.02")] * 12)
    assert environment.refused == 0


@pytest.mark.parametrize("limit", [0, -1])
async def test_a_server_without_sessions_is_no_reward(write: Any, server: FakeOpenAI, limit: int) -> None:
    async with playing(write, server, FakeOpenEnv(limit), patience=0.3) as builder:
        (episode,) = await play(builder, row(), retries=0)
    assert episode.reason is DropReason.BACKEND_ERROR
    assert "at capacity (CAPACITY_REACHED)" in (episode.error or "")


async def test_a_started_server_is_started_again(write: Any, server: FakeOpenAI) -> None:
    file = project(write, server, command=[sys.executable, str(FAKE), "{port}"])
    async with Builder(load_config(file)) as builder:
        (dead,) = await play(builder, row(do="exit"))
        (later,) = await play(builder, row())
        children = servers_below(psutil.Process())
        assert len(children) == 2  # one of them watches
    assert dead.reason is DropReason.BACKEND_ERROR
    assert later.outcome is EpisodeStatus.OK
    await until(lambda: not any(child.is_running() for child in children))


async def test_a_started_server_that_keeps_all_sessions_is_started_again(write: Any, server: FakeOpenAI) -> None:
    """But not below an episode that it plays or resets."""
    file = project(write, server, command=[sys.executable, str(FAKE), "{port}", "2"], timeout=2)
    async with Builder(load_config(file)) as builder:
        (fine,) = await play(builder, row())
        first = servers_below(psutil.Process())
        hung, beside, third = await play(builder, row(do="hang"), row(say="slow 5"), row(), retries=0)
        resets = await play(builder, row(do="reset"), row(do="reset"), retries=0)
        assert servers_below(psutil.Process()) == first
        (again,) = await play(builder, row(do="hang"), retries=0)
        (later,) = await play(builder, row(), retries=0)
        second = servers_below(psutil.Process())
        assert not {*first} & {*second}
        (last,) = await play(builder, row(), retries=0)
        assert servers_below(psutil.Process()) == second
    for episode in (hung, again):
        assert "no answer to step within timeout: 2 s" in (episode.error or "")
    assert {each.outcome for each in (fine, beside, third, *resets, later, last)} == {EpisodeStatus.OK}


async def test_a_server_that_hangs_in_a_reset_costs_its_own_episode_only(write: Any, server: FakeOpenAI) -> None:
    """The other one has waited longer than `patience`."""
    file = project(write, server, command=[sys.executable, str(FAKE), "{port}", "1"], sessions=1, timeout=5, patience=4)
    async with Builder(load_config(file)) as builder:
        hung, other = await play(builder, row(do="hang reset"), row(), retries=0)
    assert "no answer to reset within timeout: 5 s" in (hung.error or "")
    assert other.outcome is EpisodeStatus.OK, other.error


async def test_a_server_that_accepts_no_connection_is_started_again(write: Any, server: FakeOpenAI) -> None:
    """But not below an episode."""
    file = project(write, server, command=[sys.executable, str(FAKE), "{port}"], timeout=2)
    before = len(server.requests)
    async with Builder(load_config(file)) as builder:
        deaf = asyncio.create_task(play(builder, row(do="deaf", say="slow 5"), retries=0))
        await until(lambda: len(server.requests) > before)
        (other,) = await play(builder, row(), retries=0)
        (first,) = await deaf
    assert {each.outcome for each in (first, other)} == {EpisodeStatus.OK}, (first.error, other.error)


async def test_refusals_beside_another_client_are_no_hang(write: Any, server: FakeOpenAI) -> None:
    file = project(write, server, command=[sys.executable, str(FAKE), "{port}", "1"], patience=4)
    async with Builder(load_config(file)) as builder, aiohttp.ClientSession() as http:
        await play(builder, row())
        first = servers_below(psutil.Process())
        async with http.ws_connect(f"http://127.0.0.1:{first[0].cmdline()[-2]}/ws"):
            (refused,) = await play(builder, row(), retries=0)
        (later,) = await play(builder, row(), retries=0)
        assert servers_below(psutil.Process()) == first
    assert (refused.reason, later.outcome) == (DropReason.BACKEND_ERROR, EpisodeStatus.OK)


STARTS = """import os, sys
with open("starts", "a") as file:
    file.write("x")
if os.path.getsize("starts") > 1:
    {then}
os.execv(sys.executable, [sys.executable, {fake!r}, sys.argv[1]])
"""


async def test_episodes_share_a_start_that_fails(write: Any, server: FakeOpenAI) -> None:
    script = write(STARTS.format(then="raise SystemExit('no game today')", fake=str(FAKE)), "starts.py")
    file = project(write, server, command=[sys.executable, str(script), "{port}"])
    async with Builder(load_config(file)) as builder:
        await play(builder, row(do="exit"), retries=0)
        episodes = await play(builder, *[row()] * 6, retries=0)
    assert {episode.reason for episode in episodes} == {DropReason.BACKEND_ERROR}
    assert all("no game today" in (episode.error or "") for episode in episodes)
    assert (script.parent / "starts").read_text() == "xx"


async def test_a_start_goes_on_without_the_episode_that_needed_it(write: Any, server: FakeOpenAI) -> None:
    script = write(STARTS.format(then="open('go').read()", fake=str(FAKE)), "starts.py")
    os.mkfifo(script.parent / "go")
    file = project(write, server, command=[sys.executable, str(script), "{port}"])
    async with Builder(load_config(file)) as builder:
        await play(builder, row(do="exit"), retries=0)
        (cut,) = await play(builder, row(), retries=0, seconds=0.5)
        (script.parent / "go").write_text("")
        (later,) = await play(builder, row(), retries=0)
    assert (cut.reason, later.outcome) == (DropReason.TIMEOUT, EpisodeStatus.OK)
    assert (script.parent / "starts").read_text() == "xx"


async def test_a_slow_step_that_is_cut_off_is_no_hang(write: Any, server: FakeOpenAI) -> None:
    file = project(write, server, command=[sys.executable, str(FAKE), "{port}"])
    async with Builder(load_config(file)) as builder:
        await play(builder, row())
        first = servers_below(psutil.Process())
        (cut,) = await play(builder, row(do="hang"), retries=0, seconds=0.5)
        (later,) = await play(builder, row(), retries=0)
        assert servers_below(psutil.Process()) == first
    assert (cut.reason, later.outcome) == (DropReason.TIMEOUT, EpisodeStatus.OK)


async def test_episodes_take_turns_beside_another_client(write: Any, server: FakeOpenAI) -> None:
    """It holds one of two sessions for ever; a refusal counts for `patience` only while no episode is played."""
    environment = FakeOpenEnv(limit=2)
    async with playing(write, server, environment, patience=0.3) as builder, aiohttp.ClientSession() as http:
        async with http.ws_connect(f"{environment.url}/ws"):
            episodes = await play(builder, *[row(say="slow 0.1")] * 12, retries=0)
    assert Counter(episode.outcome for episode in episodes) == {EpisodeStatus.OK: 12}
    assert environment.most == 2


async def test_a_long_reset_is_waited_for(write: Any, server: FakeOpenAI) -> None:
    environment = FakeOpenEnv(limit=2)
    async with playing(write, server, environment, patience=0.05) as builder, aiohttp.ClientSession() as http:
        async with http.ws_connect(f"{environment.url}/ws"):
            episodes = await play(builder, row(do="reset"), row(do="reset"), retries=0)
    assert [episode.outcome for episode in episodes] == [EpisodeStatus.OK] * 2, episodes


async def test_a_server_that_does_not_start(write: Any, server: FakeOpenAI) -> None:
    file = project(write, server, command=[sys.executable, "-c", "raise SystemExit('no game today')"])
    async with Builder(load_config(file)) as builder:
        with pytest.raises(
            BackendUnavailable, match=r"ended with exit code 1; the end of its log \(.*server.log\):\n  no game today"
        ):
            await builder.get_workflow()


def test_a_started_server_ends_with_the_run(write: Any, tmp_path: Path, server: FakeOpenAI) -> None:
    """Also if that is killed."""
    before = len(server.requests)
    write([row(do="hang")], "rows.jsonl")
    file = project(write, server, command=[sys.executable, str(FAKE), "{port}"])
    dataset = "{_type: jsonl, file_path: rows.jsonl}"
    with processes.start("eval", "config.yml", "-o", "eval.general.dataset", dataset, folder=file.parent) as run:
        run.wait_until(lambda: len(server.requests) > before)
        children = servers_below(psutil.Process(run.pid))
        assert len(children) == 2
        run.kill()
        processes.wait_until(lambda: not any(child.is_running() for child in children))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, "set one of url, command and class"),
        ({"url": "http://a", "class": "game:Game"}, "set one of url, command and class"),
        ({"class": "game"}, "workflow.class"),
        ({"url": "http://a", "reset": {"index": "{"}}, "reset.index has a brace without its counterpart"),
        ({"url": "http://a", "action": "nothing:here"}, "workflow.action: no module named 'nothing'"),
    ],
)
def test_mistakes_in_the_file(changed: dict[str, Any], message: str, write: Any, server: FakeOpenAI) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(project(write, server, **changed))


async def test_actions_need_a_function_if_they_are_not_one_text(write: Any, server: FakeOpenAI) -> None:
    fields = {"x": "integer", "y": "integer"}
    async with playing(write, server, FakeOpenEnv(fields=fields)) as builder:
        with pytest.raises(
            ConfigError, match=r"has the fields x \(integer\), y \(integer\), not one text; name a func"
        ):
            await builder.get_workflow()
    write("def act(text, observation, row):\n    return {'x': len(text), 'y': row['pay']}\n", "openenv_act.py")
    write("def bad(text):\n    return text\n", "openenv_bad.py")
    environment = FakeOpenEnv(fields=fields)
    async with playing(write, server, environment, action="openenv_act:act") as builder:
        (episode,) = await play(builder, row())
    assert environment.actions == [{"x": len("echo: hello"), "y": 0.5}]
    assert episode.output["reward"] == 0.5
    async with playing(write, server, FakeOpenEnv(fields=fields), action="openenv_bad:bad") as builder:
        (episode,) = await play(builder, row())
    assert "workflow.action returned a str" in (episode.error or "")


def test_texts() -> None:
    assert text_of({"prompt": "Go.", "metadata": {"a": 1}, "hint": None}) == "Go."
    assert text_of({"board": [1, 2], "turn": 3}) == '{"board": [1, 2], "turn": 3}'
    assert text_of({"metadata": {}}) == ""
    assert tool_text({"error": {"message": "no such tool"}}) == "error: no such tool"
    assert (
        tool_text({"result": {"content": [{"type": "text", "text": "a"}, {"type": "image"}]}}) == 'a\n{"type": "image"}'
    )
    assert tool_text({"result": 3}) == "3"


# files as servers

ROWS = [{"id": f"r{i}", "question": f"Say {i}.", "answer": str(i)} for i in range(5)]


def file_of_rows(write: Any, evaluator: dict[str, Any]) -> Any:
    write(ROWS, "rows.jsonl")
    dataset = {"_type": "jsonl", "file_path": "rows.jsonl"}
    return load_config(write({"eval": {"general": {"dataset": dataset}, "evaluators": {"right": evaluator}}}))


@asynccontextmanager
async def connected(config: Any) -> AsyncIterator[Any]:
    """A function that sends a message and returns the answer."""
    async with serve_file(config, AccessPolicy(), "127.0.0.1", 0) as url, aiohttp.ClientSession() as http:
        async with http.ws_connect(f"{url}/ws") as socket:

            async def ask(kind: str, **data: Any) -> dict[str, Any]:
                await socket.send_json({"type": kind, "data": data})
                return await socket.receive_json()

            yield ask


async def test_a_session_of_a_file_is_a_row(write: Any) -> None:
    async with connected(file_of_rows(write, {"_type": "exact_match"})) as ask:
        first = (await ask("reset", seed=7))["data"]
        assert first["observation"] == {"question": "Say 2.", "metadata": {"row_id": "r2"}}
        assert (first["reward"], first["done"]) == (None, False)
        done = (await ask("step", answer="2"))["data"]
        assert (done["reward"], done["done"]) == (1.0, True)
        assert (await ask("state"))["data"]["step_count"] == 1
        assert "the episode is done" in (await ask("step", answer="2"))["data"]["message"]
        assert (await ask("reset", row_id="r4"))["data"]["metadata"] == {"row_id": "r4"}
        assert (await ask("step", text="4"))["data"]["code"] == "VALIDATION_ERROR"
        assert (await ask("step", answer="3"))["data"]["reward"] == 0.0
        assert (await ask("reset", row_id="r9"))["data"]["message"] == "there is no row 'r9'"
        assert (await ask("jump"))["data"]["code"] == "UNKNOWN_TYPE"


async def test_an_answer_that_cannot_be_scored_has_no_reward(write: Any) -> None:
    write("def score(answer):\n    raise RuntimeError('the judge is away')\n", "openenv_judge.py")
    async with connected(file_of_rows(write, {"_type": "python", "function": "openenv_judge:score"})) as ask:
        await ask("reset", seed=0)
        answer = await ask("step", answer="0")
    assert answer["type"] == "error"
    assert "the judge is away" in answer["data"]["message"]


async def test_a_file_trains_on_a_file(write: Any, server: FakeOpenAI) -> None:
    """The workflow plays the server of another file, without a function of its own."""
    async with serve_file(file_of_rows(write, {"_type": "contains"}), AccessPolicy(), "127.0.0.1", 0) as url:
        file = project(write, server, url=url, reset={})
        async with Builder(load_config(file)) as builder:
            (episode,) = await play(builder, {"question": "", "seed": 3})
    assert episode.outcome is EpisodeStatus.OK, episode.error
    assert (episode.output["answer"], episode.output["reward"]) == ("echo: Say 3.", 1.0)


def test_serve_says_what_is_missing(write: Any, tmp_path: Path) -> None:
    write(ROWS, "rows.jsonl")
    file = write({"eval": {"general": {"dataset": {"_type": "jsonl", "file_path": "rows.jsonl"}}}})
    done = processes.run("serve", file.name, "--as", "openenv", folder=tmp_path)
    assert done.returncode == 2
    assert "finetuning.reward_function must name the evaluator whose scores are the reward" in done.stderr
    done = processes.run("serve", file.name, "--as", "gym", folder=tmp_path)
    assert "--as: 'gym' does not exist; available: openenv" in done.stderr

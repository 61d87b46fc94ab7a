"""Histories that are not one dialogue: 120 episodes of every shape at once, against a reference made of strings.

Each is played twice, by a client of ours and by a foreign one through the gateway, all at the same time, with answers
streamed and whole. The server keeps what it was sent and has sampled under the request's `user`, which no two calls
share. What the recorder has kept, and the rows made of it, are compared with that and with nothing insitu computes.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import aiohttp
import openai
import orjson
import pytest
from aiohttp import web
from fake_openai import FakeOpenAI, encode, logprob, texts_of

from insitu.advantages.estimator import rows_of
from insitu.collect.collector import run_limited
from insitu.collect.conversations import conversations
from insitu.collect.episodes import EpisodeOptions, in_process, run_episode
from insitu.gateway.server import Gateway
from insitu.runs.records import call_records, restore_calls
from insitu.schemas.episodes import Episode, EpisodeKey, EpisodeStatus
from insitu.schemas.evaluation import EvalInputItem
from insitu.workflow.context import current_scope
from insitu.workflow.llms import ModelClient, OpenAIConfig, connect

Message = dict[str, Any]
EPISODES, AT_ONCE = 40, 32
MARKS = {"system": "\x01", "user": "\x02", "assistant": "\x03", "tool": "\x04"}


def rendered(messages: list[Message]) -> str:
    """A chat template: a mark and the text of each message, and the mark of the answer to come."""
    texts = ["echo: tool" if m.get("tool_calls") else str(m["content"]) for m in messages]
    return "".join(MARKS[m["role"]] + text for m, text in zip(messages, texts, strict=True)) + MARKS["assistant"]


def prompt_of(body: dict[str, Any]) -> str:
    return rendered(body["messages"]) if "messages" in body else str(body["prompt"])


class Sampled(NamedTuple):
    prompt: str
    answer: str


class Templated(FakeOpenAI):
    """A server whose prompts are tokenised by `rendered`; `log` has its samples, by the request's `user` and choice.

    An answer that is not streamed is cut off at `max_tokens`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: dict[tuple[str, int], Sampled] = {}
        self.refused: Counter[str] = Counter()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        name, _, failures = body["user"].partition("!")
        if self.refused[name] < int(failures or 0):
            self.refused[name] += 1
            return web.json_response({"error": {"message": "not now"}}, status=503)
        await asyncio.sleep(random.Random(name).choice([0, 0, 0.002, 0.01]))
        (text,) = texts_of(body)
        for choice in range(body.get("n") or 1):
            assert (name, choice) not in self.log, "answered twice"
            answer = f"echo: {text}" if choice == 0 else f"echo {choice}: {text}"
            if text == "tool" and body.get("stream"):
                answer = "abc"  # the arguments in pieces, which come back in the next prompt as if they had been whole
            self.log[name, choice] = Sampled(prompt_of(body), answer[: body.get("max_tokens")])
        return await super()._complete(request)

    def _choice(self, body: dict[str, Any], text: str, index: int, number: int) -> dict[str, Any]:
        choice = super()._choice(body, text, index, number)
        if (limit := body.get("max_tokens")) is not None:
            choice["message"]["content"] = choice["message"]["content"][:limit]
            choice["finish_reason"] = "length"
            self._add_tokens(body, choice, choice["message"]["content"])
        return choice

    def _head(self, body: dict[str, Any], kind: str) -> dict[str, Any]:
        return {**super()._head(body, kind), "prompt_token_ids": encode(prompt_of(body))}


@dataclass
class Agent:
    """The hands of an episode's workflow; `begun` and `ended` hold the moments of its answered calls, by name."""

    send: Callable[[dict[str, Any]], Awaitable[list[dict[str, Any]]]]
    name: str
    draw: random.Random
    made: int = 0
    clock: int = 0
    begun: dict[str, int] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    answers: dict[tuple[str, int], str | None] = field(default_factory=dict)
    judged: set[str] = field(default_factory=set)
    failed: int = 0
    in_flight: int = 0
    most: int = 0

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    async def judge(self, messages: list[Message]) -> list[Message]:
        """Asks the model that is not trained."""
        self.judged.add(f"{self.name}/{self.made}")
        return await self.ask(messages, model="judge")

    async def complete(self, text: str) -> str:
        """The text and what the model makes of it."""
        (answer,) = await self.ask([], prompt=text)
        return text + str(answer["content"])

    async def ask(self, messages: list[Message], failures: int = 0, retries: int = 9, **options: Any) -> list[Message]:
        """The answers, as messages; none if the request failed and was given up."""
        name = f"{self.name}/{self.made}"
        self.made += 1
        options["user"] = f"{name}!{failures}"
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            return await self._tried(name, messages, retries, options)
        finally:
            self.in_flight -= 1

    async def _tried(self, name: str, messages: list[Message], retries: int, options: dict[str, Any]) -> list[Message]:
        await asyncio.sleep(self.draw.choice([0, 0, 0.001, 0.005]))
        for _ in range(retries + 1):
            began = self.tick()
            asked = {} if "prompt" in options else {"messages": messages}
            body = {"model": "player", "stream": self.draw.random() < 0.5, **asked, **options}
            try:
                found = messages_of(await self.send(body))
            except (openai.InternalServerError, aiohttp.ClientResponseError):
                self.failed += 1
                continue
            self.begun[name], self.ended[name] = began, self.tick()
            self.answers |= {(name, k): message["content"] for k, message in enumerate(found)}
            return found
        return []


def messages_of(events: list[dict[str, Any]]) -> list[Message]:
    """The answers in the order of their choices, from a whole answer or the events of a streamed one."""
    found: dict[int, Message] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        message = found.setdefault(choice["index"], {"role": "assistant", "content": None})
        piece = {"content": choice["text"]} if "text" in choice else choice.get("message") or choice["delta"]
        if piece.get("content") is not None:
            message["content"] = (message["content"] or "") + piece["content"]
        for number, called in enumerate(piece.get("tool_calls") or ()):
            known = message.setdefault("tool_calls", [])
            if called.get("index", number) == len(known):
                known.append({"id": called["id"], "type": "function", "function": dict(called["function"])})
            else:
                known[called["index"]]["function"]["arguments"] += called["function"]["arguments"]
    return [found[k] for k in sorted(found)]


def route_of(body: dict[str, Any]) -> str:
    return "/chat/completions" if "messages" in body else "/completions"


async def by_our_client(clients: dict[str, openai.AsyncOpenAI], body: dict[str, Any]) -> list[dict[str, Any]]:
    client = clients[body["model"]]
    how: dict[str, Any] = {"stream": True, "stream_cls": openai.AsyncStream[object]} if body["stream"] else {}
    answer = await client.post(route_of(body), body=body, cast_to=object, **how)
    return [event async for event in answer] if body["stream"] else [answer]


async def by_a_foreign_client(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with session.post(url + route_of(body), json=body, raise_for_status=True) as answer:
        text = await answer.text()
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [orjson.loads(event) for event in (events if body["stream"] else [text])]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


# the shapes


async def dialogue(a: Agent, start: list[Message] | None = None, turns: int = 3) -> list[Message]:
    messages = start or [system("be brief")]
    for turn in range(turns):
        messages = [*messages, user(f"turn {turn}")]
        messages += await a.ask(messages)
    return messages


async def parallel(a: Agent) -> None:
    history = await dialogue(a, turns=1)
    asked = [a.ask([*history, user(f"branch {k % 3}")]) for k in range(5)]  # some are asked the very same
    (first,), *_ = await asyncio.gather(*asked)
    await a.ask([*history, user("branch 0"), first, user("and then?")])


async def sub_agents(a: Agent) -> None:
    main = [system("you lead"), user("the task")]
    main += await a.ask(main)
    found = await asyncio.gather(*(dialogue(a, [system(f"you are {who}")], 2) for who in ("a critic", "an expert")))
    main += [user("; ".join(m[-1]["content"] for m in found))]
    await a.ask(main)


async def map_reduce(a: Agent) -> None:
    parts = await asyncio.gather(*(a.ask([system("sum up"), user(f"part {k}")]) for k in range(4)))
    await a.ask([system("join"), user(" ".join(m["content"] for (m,) in parts))])


async def trimmed(a: Agent) -> None:
    messages = await dialogue(a)
    messages = [*messages[:1], *messages[-2:], user("go on")]
    messages += await a.ask(messages)
    await a.ask([*messages, user("and on")])


async def summarised(a: Agent) -> None:
    messages = await dialogue(a)
    (summary,) = await a.ask([*messages, user("sum up so far")])
    await dialogue(a, [messages[0], user(f"before: {summary['content']}"), said("I see")], 2)


async def thinking(a: Agent) -> None:
    messages = [user("<think>hm</think> first")]
    for turn in range(3):
        (answer,) = await a.ask(messages)
        messages += [said(answer["content"].replace("<think>hm</think> ", "")), user(f"<think>hm</think> {turn}")]


async def stripped(a: Agent) -> None:
    messages = [user("with a space at its end ")]
    for _ in range(3):
        (answer,) = await a.ask(messages)
        messages += [said(answer["content"].rstrip()), user("and another ")]


async def retried(a: Agent) -> None:
    messages = [user("once more")]
    messages += await a.ask(messages, failures=a.draw.randint(1, 2))
    assert await a.ask([*messages, user("in vain")], failures=2, retries=1) == []
    rejected = await a.ask([*messages, user("valid?")])
    messages += [user("valid?"), *rejected, user("no: again")]
    await asyncio.gather(a.ask(messages, failures=1), a.ask([*messages[:2], user("instead")]))


async def patient(a: Agent) -> None:
    messages = await dialogue(a, turns=1)
    for turn in range(2):
        messages = [*messages, user(f"still there? {turn}")]
        messages += await a.ask(messages, failures=2)


async def judged(a: Agent) -> None:
    messages = [system("under judgement"), user("first")]
    for turn in range(3):
        messages += await a.ask(messages)
        (verdict,) = await a.judge([user(messages[-1]["content"])] if turn else messages)
        messages += [user(verdict["content"])]


async def continued(a: Agent) -> None:
    text = "once upon"
    for _ in range(3):
        text = await a.complete(text)  # sent again as it is: the next prompt is the row, to its end
    await asyncio.gather(a.complete(text), a.complete("once more"))


async def cut_off(a: Agent) -> None:
    messages = [user("at length")]
    for limit in (3, 6):
        await a.ask(messages, max_tokens=limit, stream=False)
    messages += await a.ask(messages)
    await a.ask([*messages, user("thanks")])


async def repeated(a: Agent) -> None:
    messages: list[Message] = []
    for _ in range(4):
        messages = [*messages, user("again"), user("again")]
        messages += await a.ask(messages)
    await a.ask([user("again"), user("again")])


async def best_of_n(a: Agent) -> None:
    messages = [system("choose"), user("which?")]
    several = await a.ask(messages, n=3)
    alone = await asyncio.gather(*(a.ask(messages) for _ in range(2)))
    best = a.draw.choice([*several, *(m for (m,) in alone)])
    await a.ask([*messages, best, user("why?")], n=2)


async def tool_loop(a: Agent) -> None:
    messages = [system("look"), user("tool")]
    for turn in range(3):
        (answer,) = await a.ask(messages)
        result = {"role": "tool", "content": "tool" if turn < 1 else "blue", "tool_call_id": "t1"}
        messages = [*messages, answer, result if answer.get("tool_calls") else user("thanks")]


SHAPES: list[Callable[[Agent], Awaitable[Any]]] = [
    *(dialogue, parallel, sub_agents, map_reduce, trimmed, summarised),
    *(thinking, stripped, retried, patient, judged, continued, cut_off, repeated, best_of_n, tool_loop),
]


class Workflow:
    """Each row is an episode: of one shape, of two after one another, or of two at the same time.

    `7 ours` is asked by our own client, `7 foreign` by one that is given an address of the gateway.
    """

    def __init__(self, llms: list[ModelClient], gateway: Gateway, foreign: aiohttp.ClientSession) -> None:
        self.gateway, self.foreign = gateway, foreign
        self.clients = {llm.name: llm.client for llm in llms}
        self.agents: dict[str, Agent] = {}

    async def ainvoke(self, name: str) -> str:
        if name.endswith("ours"):
            return await self._play(name, partial(by_our_client, self.clients))
        scope = current_scope()
        assert scope is not None
        with self.gateway.endpoint(scope) as door:
            return await self._play(name, partial(by_a_foreign_client, self.foreign, door.openai_url))

    async def _play(self, name: str, send: Any) -> str:
        draw = random.Random(f"shapes of {name}")
        agent = self.agents[name] = Agent(send, name, draw)
        first, second = SHAPES[int(name.split()[0]) % len(SHAPES)], draw.choice(SHAPES)
        kind = draw.random()
        if kind < 0.3:
            await first(agent)
            await second(agent)
        elif kind < 0.6:
            await asyncio.gather(first(agent), second(agent))
        else:
            await first(agent)
        return "done"


class Played(NamedTuple):
    server: Templated
    agents: dict[str, Agent]
    episodes: dict[str, Episode]


async def _play(server: Templated) -> Played:
    config = OpenAIConfig(model_name="fake", base_url=server.base_url, max_retries=0)
    llms = [connect(name, config, "fake", server.base_url, "none") for name in ("player", "judge")]
    names = [f"{k} {way}" for k in range(EPISODES) for way in ("ours", "foreign")]
    random.Random(7).shuffle(names)
    rules = EpisodeOptions(training=frozenset(["player"]))
    episodes: dict[str, Episode] = {}

    async def run(name: str) -> Episode:
        item = EvalInputItem(id=name, input_obj=name)
        return await run_episode(in_process(workflow), item, EpisodeKey("r", 1, name, 0), rules)

    try:
        async with aiohttp.ClientSession() as foreign, Gateway(llms) as gateway:
            workflow = Workflow(llms, gateway, foreign)
            async with aclosing(run_limited(names, run, AT_ONCE)) as ended:
                async for episode in ended:
                    episodes[episode.key.row_id] = episode
    finally:
        for llm in llms:
            await llm.aclose()
    return Played(server, workflow.agents, episodes)


@pytest.fixture(scope="module")
def played() -> Iterator[Played]:
    with Templated() as server:
        yield asyncio.run(_play(server))


def names_of(episode: Episode) -> list[tuple[str, int]]:
    return [(call.sampling["user"].partition("!")[0], call.choice) for call in episode.calls]


def test_every_shape_was_played(played: Played) -> None:
    assert len(played.episodes) == 2 * EPISODES
    assert [e.error for e in played.episodes.values() if e.outcome is not EpisodeStatus.OK] == []
    assert len(played.server.log) > 8 * EPISODES
    streamed = Counter(bool(body.get("stream")) for body in played.server.requests)
    assert min(streamed.values()) > 3 * EPISODES
    assert {len(e.calls) for e in played.episodes.values()} >= {3, 4, 5, 6, 7}


def test_every_call_is_in_exactly_one_episode(played: Played) -> None:
    kept = Counter(name for episode in played.episodes.values() for name in names_of(episode))
    assert kept == Counter(dict.fromkeys(played.server.log, 1))
    for row, episode in played.episodes.items():
        agent = played.agents[row]
        assert {name.partition("/")[0] for name, _ in names_of(episode)} == {row}
        assert set(names_of(episode)) == agent.answers.keys()
        assert sum(episode.failed_requests.values()) == agent.failed


def test_each_call_is_what_was_sampled_in_the_order_it_began(played: Played) -> None:
    for row, episode in played.episodes.items():
        agent = played.agents[row]
        indices = [call.index for call in episode.calls]
        assert sorted(set(indices)) == indices
        assert agent.most > 1 or indices == [*range(len(indices))], "one after another, and the numbers have gaps"
        for name, call in zip(names_of(episode), episode.calls, strict=True):
            prompt, answer = played.server.log[name]
            judged = name[0] in agent.judged
            assert call.llm == ("judge" if judged else "player")
            assert call.prompt_token_ids == encode(prompt)
            assert call.token_ids == (None if judged else encode(answer))
            assert call.logprobs == (None if judged else [logprob(c) for c in answer])
            assert call.error is None
            assert call.message is not None
            assert call.message["content"] == agent.answers[name]
        order = [name for name, _ in names_of(episode)]
        for k, name in enumerate(order):
            assert all(agent.begun[earlier] < agent.ended[name] for earlier in order[:k]), "began after its end"


class Reference(NamedTuple):
    text: str
    spans: list[tuple[int, int, float]]
    calls: list[int]


def reference(sampled: dict[int, Sampled], weights: dict[int, float]) -> list[Reference]:
    """The rows as strings: each call goes on from the open end of a row that is all of its prompt's beginning."""
    follows: dict[int, int] = {}
    firsts: dict[int, int] = {}
    for k, call in sampled.items():
        ends = [j for j in firsts if j not in follows.values() and call.prompt.startswith("".join(sampled[j]))]
        ends.sort(key=lambda j: (-len("".join(sampled[j])), firsts[j]))
        firsts[k] = firsts[ends[0]] if ends else k
        if ends:
            follows[k] = ends[0]
    rows = []
    for last in sorted(set(sampled) - set(follows.values()), key=firsts.__getitem__):
        chain = [last]
        while chain[0] in follows:
            chain.insert(0, follows[chain[0]])
        begins = {k: (len(sampled[k].prompt), len("".join(sampled[k]))) for k in chain}
        spans = [(*begins[k], weights[k]) for k in chain if k in weights]
        if spans:
            rows.append(Reference("".join(sampled[last]), spans, chain))
    return rows


@pytest.mark.parametrize("trained", [1.0, 0.6], ids=["all", "some"])
def test_the_rows_are_those_of_the_reference(played: Played, trained: float) -> None:
    merged = cut = 0
    for row, episode in played.episodes.items():
        draw = random.Random(f"weights of {row}")
        judged = played.agents[row].judged
        sampled = {k: played.server.log[n] for k, n in enumerate(names_of(episode)) if n[0] not in judged}
        weights = {k: draw.uniform(-1, 1) for k in sampled if draw.random() < trained}
        rows = rows_of(episode.calls, weights, row)
        wanted = reference(sampled, weights)
        assert [r.calls for r in rows] == [[episode.calls[k].index for k in w.calls] for w in wanted]
        for found, want in zip(rows, wanted, strict=True):
            mask, logprobs, advantages = ([0.0] * len(want.text) for _ in range(3))
            for begin, end, weight in want.spans:
                for at in range(begin, end):
                    mask[at], logprobs[at], advantages[at] = 1, logprob(want.text[at]), weight
            assert found.token_ids == encode(want.text)
            assert (found.loss_mask, found.logprobs, found.advantages) == (mask, logprobs, advantages)
        assert sum(sum(r.loss_mask) for r in rows) == sum(len(episode.calls[k].token_ids or ()) for k in weights)
        merged += any(len(r.calls) > 1 for r in rows)
        cut += len(rows) > 1
    assert min(merged, cut) > EPISODES / 4


def test_every_answer_has_its_call_in_exactly_one_dialogue(played: Played) -> None:
    for episode in played.episodes.values():
        held = [turn.call.index for turns in conversations(episode.calls) for turn in turns if turn.call is not None]
        assert sorted(held) == [call.index for call in episode.calls]


def test_every_history_is_stored_and_restored(played: Played) -> None:
    for episode in played.episodes.values():
        records = [orjson.loads(orjson.dumps(r)) for r in call_records(episode.key.text(), episode.calls)]
        assert restore_calls(records) == episode.calls

"""The documented parsers, held against what the frameworks themselves sent over the wire for the same steps."""

import json
import logging
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from factories import sampled
from fake_openai import FakeOpenAI, encode, logprob
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.load import dumpd
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.outputs import ChatGeneration, Generation, LLMResult
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from insitu.errors import TrajectoryError
from insitu.integrations.frameworks.langchain import make_llm
from insitu.integrations.nat import adk_parser, langchain_parser, llama_index_parser
from insitu.integrations.nat.base_parser import parse_calls, parse_to_conversations, parse_to_openai_messages
from insitu.schemas.steps import IntermediateStep, IntermediateStepPayload, StreamEventData, TraceMetadata, read_step
from insitu.wire.json_values import decode
from insitu.wire.json_values import encode as as_json
from insitu.workflow.context import EpisodeScope
from insitu.workflow.llms import ModelClient, OpenAIConfig, connect, http_library

DATA = Path(__file__).parents[1] / "data" / "parsers"
RECORDED = {name: json.loads((DATA / f"{name}.json").read_text())["episodes"] for name in ("llama_index", "adk")}
EPISODES = [(name, title) for name, episodes in RECORDED.items() for title in episodes]


def connected(server: FakeOpenAI) -> ModelClient:
    config = OpenAIConfig(model_name="fake", base_url=server.base_url)
    return connect("player", config, "fake", server.base_url, "none")


def step(event_type: str, key: str = "k", data: Any = None, **metadata: Any) -> IntermediateStep:
    payload = IntermediateStepPayload(
        event_type=event_type,
        UUID=key,
        name="look",
        event_timestamp=0.0,
        data=data and StreamEventData(**data),
        metadata=TraceMetadata(**metadata),
    )
    return IntermediateStep(payload=payload)


def pair(messages: Any, answers: Any, key: str = "k", **known: Any) -> list[IntermediateStep]:
    return [step("LLM_START", key, chat_inputs=messages), step("LLM_END", key, chat_responses=answers, **known)]


def said(role: str, content: Any, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


def on_the_wire(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what one client sends and another leaves out: empty content, and the name of a tool beside its call."""
    kept = [{k: v for k, v in m.items() if v is not None and (k, m["role"]) != ("name", "tool")} for m in messages]
    return [{**m, "tool_calls": by_key} if (by_key := m.get("tool_calls")) else m for m in kept]


def written_down(steps: list[IntermediateStep]) -> list[IntermediateStep]:
    return [read_step(decode(as_json(step))) for step in steps]


# LlamaIndex and ADK, as their own packages reported it


@pytest.mark.parametrize(("name", "title"), [e for e in EPISODES if e[1] != "own model"])
def test_prompts_are_what_the_framework_sent(name: str, title: str) -> None:
    episode = RECORDED[name][title]
    calls = parse_calls(episode["steps"])
    sent = [request["messages"] for request in episode["requests"]]
    assert [on_the_wire(call.messages) for call in calls] == [on_the_wire(messages) for messages in sent]
    (dialogue,) = parse_to_conversations(episode["steps"])
    assert dialogue == parse_to_openai_messages(episode["steps"])
    assert [m["role"] for m in dialogue] == [m["role"] for m in sent[-1]] + ["assistant"]
    assert dialogue[-1]["content"] == f"echo: {sent[-1][-1]['content']}"


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("title", ["agent", "streaming"])
def test_agents_of_the_frameworks(name: str, title: str) -> None:
    dialogue = parse_to_openai_messages(RECORDED[name][title]["steps"])
    assert "".join(m["role"][0] for m in dialogue) == "suatauaua"
    assert [m["content"] for m in dialogue if m["role"] == "user"] == ["tool", "again", "again"]
    answers = [m for m in dialogue if m["role"] == "assistant"]
    assert [m["finish_reason"] for m in answers] == ["tool_calls", "stop", "stop", "stop"]
    assert answers[0]["tool_calls"][0]["id"] == dialogue[3]["tool_call_id"] == "t1"
    assert "blue sky" in dialogue[3]["content"]
    if (name, title) == ("llama_index", "agent"):
        texts = ["echo: tool", *(m["content"] for m in answers[1:])]
        assert [sampled(m["logprobs"]) for m in answers] == [[logprob(c) for c in text] for text in texts]
    else:
        assert [m["logprobs"] for m in answers] == [{}] * 4


def test_a_model_of_adk_without_http() -> None:
    _, asked, called, sky, sea, answer = parse_to_openai_messages(RECORDED["adk"]["own model"]["steps"])
    assert asked == said("user", "where?")
    assert [c["id"] for c in called["tool_calls"]] == [sky["tool_call_id"], sea["tool_call_id"]]
    assert [json.loads(c["function"]["arguments"]) for c in called["tool_calls"]] == [{"at": "sky"}, {"at": "sea"}]
    assert [json.loads(m["content"]) for m in (sky, sea)] == [{"result": "blue sky"}, {"result": "blue sea"}]
    assert (called["reasoning_content"], called["finish_reason"], called["logprobs"]) == (
        "Both, then.",
        "tool_calls",
        {},
    )
    assert sampled(answer.pop("logprobs")) == [-0.5, -0.25]
    assert answer == said("assistant", "all bl", token_ids=[7, 8], finish_reason="length")


def test_both_spellings_of_adk() -> None:
    parts = [{"text": "hm", "thought": True}, {"function_call": {"name": "f", "args": {"a": "ü"}, "id": "adk-1"}}]
    request = {
        "contents": [
            {"role": "user", "parts": [{"text": "a"}, {"text": "b"}]},
            {"role": "model", "parts": parts},
            {"role": "user", "parts": [{"function_response": {"name": "f", "id": "adk-1", "response": {"x": 1}}}]},
            {"role": "model", "parts": None},
        ],
        "config": {"system_instruction": {"parts": [{"text": "rules"}]}},
    }
    call = {"id": "call_2_0", "type": "function", "function": {"name": "f", "arguments": '{"a": "ü"}'}}
    (found,) = parse_calls(pair(request, []))
    assert found.messages == [
        said("system", "rules"),
        said("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        said("assistant", None, tool_calls=[call], reasoning_content="hm"),
        {"role": "tool", "tool_call_id": "call_2_0", "name": "f", "content": '{"x": 1}'},
    ]
    response = {"content": {"parts": [{"text": "ok"}]}, "finish_reason": "MAX_TOKENS", "partial": None}
    assert adk_parser.parse_to_openai_message(step("LLM_END", chat_responses=[response]))["finish_reason"] == "length"
    failed = {"content": None, "error_code": "SAFETY"}
    assert parse_calls(pair(request, [failed]))[0].error == "it ended without a completion"


def test_contents_of_adk_without_parts() -> None:
    """JSON without None lacks the `parts` of a Content that holds none."""
    request = {
        "contents": [{"role": "user", "parts": [{"text": "q"}]}, {"role": "model"}],
        "config": {"systemInstruction": {"role": "system"}},
    }
    (call,) = parse_calls(pair(request, [{"content": {"role": "model"}, "finishReason": "STOP"}]))
    assert (call.messages, call.message) == ([said("user", "q")], said("assistant", ""))
    (call,) = parse_calls(pair([*request["contents"]], [{"role": "model"}]))
    assert (call.messages, call.message) == ([said("user", "q")], said("assistant", ""))


def test_blocks_of_llama_index() -> None:
    blocks = [
        {"block_type": "thinking", "content": "hm"},
        {"block_type": "text", "text": "<think>x</think>a"},
        {"block_type": "cache"},
        {"block_type": "citable", "content": [{"block_type": "text", "text": "b"}]},
        {"block_type": "tool_call", "tool_call_id": None, "tool_name": "f", "tool_kwargs": {"a": 1}},
    ]
    message = {"role": "chatbot", "blocks": blocks, "additional_kwargs": {}}
    asked = {"role": "user", "additional_kwargs": {"name": "bob"}, "content": "q"}  # before there were blocks
    (call,) = parse_calls(pair([asked], [{"message": message, "raw": {"done_reason": "length"}}]))
    called = {"id": "call_1_0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert call.messages == [said("user", "q", name="bob")]
    assert call.message == said("assistant", "<think>x</think>ab", tool_calls=[called], reasoning_content="hm")
    assert call.finish_reason == "length"
    completion = {"text": "done", "additional_kwargs": {}, "raw": None, "logprobs": None, "delta": None}
    (call,) = parse_calls([step("LLM_START", data={"input": "go"}), step("LLM_END", chat_responses=[completion])])
    assert (call.messages, call.message) == ([said("user", "go")], said("assistant", "done"))


# LangChain, live


CALL = {"name": "look", "args": {"at": "sky"}, "id": "t1"}
PNG = "iVBORw0KGgo="
HISTORIES: dict[str, list[BaseMessage]] = {
    "roles": [SystemMessage("s"), HumanMessage("u", name="bob"), AIMessage("a"), HumanMessage("a"), HumanMessage("a")],
    "developer": [
        SystemMessage("s", additional_kwargs={"__openai_role__": "developer"}),
        ChatMessage("u", role="user"),
    ],
    "tools": [HumanMessage("u"), AIMessage("", tool_calls=[CALL]), ToolMessage("r", tool_call_id="t1", name="look")],
    "both": [
        HumanMessage("u"),
        AIMessage("so", tool_calls=[CALL]),
        ToolMessage([{"type": "text", "text": "r"}], tool_call_id="t1"),
    ],
    "broken call": [
        HumanMessage("u"),
        AIMessage("", invalid_tool_calls=[{"name": "look", "args": '{"at": ', "id": "t2", "error": "cut off"}]),
        ToolMessage("no JSON", tool_call_id="t2", status="error"),
    ],
    "function": [HumanMessage("u"), FunctionMessage("r", name="look"), HumanMessage("v")],
    "parts": [
        HumanMessage(
            [
                "so",
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png", "detail": "low"}},
                {"type": "image", "base64": PNG, "mime_type": "image/png"},
                {"type": "image", "source_type": "url", "url": "http://127.0.0.1/b.png"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
                {"type": "audio", "base64": "UklGRg==", "mime_type": "audio/wav"},
                {"type": "file", "base64": PNG, "mime_type": "application/pdf", "filename": "a.pdf"},
                {"type": "file", "base64": PNG, "mime_type": "application/pdf", "extras": {"filename": "b.pdf"}},
            ]
        )
    ],
    "thinking": [
        HumanMessage("u"),
        AIMessage([{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "a"}]),
        HumanMessage("<think>not</think>"),
    ],
    "of another provider": [
        HumanMessage("u"),
        AIMessage(
            [{"type": "text", "text": "so"}, {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "sky"}}],
            tool_calls=[CALL],
        ),
        ToolMessage("r", tool_call_id="t1"),
    ],
}


def spoken(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As `on_the_wire`, and without the thoughts that ChatOpenAI does not send, and with loose texts as parts."""
    found = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in on_the_wire(messages)]
    for message in found:
        if isinstance(message.get("content"), list):
            parts = [{"type": "text", "text": p} if isinstance(p, str) else p for p in message["content"]]
            message["content"] = parts
    return found


@pytest.mark.parametrize("title", HISTORIES)
@pytest.mark.parametrize("through", [list, written_down], ids=["live", "as JSON"])
async def test_langchain_prompts_are_what_it_sent(
    server: FakeOpenAI, title: str, through: Callable[[list[IntermediateStep]], list[IntermediateStep]]
) -> None:
    plain = connected(server)
    with EpisodeScope(training=True) as scope:
        answer = await make_llm(plain).ainvoke(HISTORIES[title])
    await plain.aclose()
    (call,) = parse_calls(through(scope.steps))
    (sent,) = scope.calls
    assert spoken(call.messages) == spoken(sent.messages)
    assert call.message == said("assistant", answer.content)
    known = ("logprobs", "token_ids", "finish_reason", "model", "llm", "tools")
    assert [getattr(call, name) for name in known] == [getattr(sent, name) for name in known]


def test_both_json_forms_of_langchain() -> None:
    for history in HISTORIES.values():
        live, dumped = (parse_calls(pair(form, []))[0].messages for form in (history, [dumpd(m) for m in history]))
        assert live == dumped


@tool
def look(at: str) -> str:
    """Looks."""
    return f"blue {at}"


@pytest.mark.parametrize("through", [list, written_down], ids=["live", "as JSON"])
@pytest.mark.parametrize("streaming", [False, True])
async def test_a_langchain_model_that_is_not_captured(
    server: FakeOpenAI, streaming: bool, through: Callable[[list[IntermediateStep]], list[IntermediateStep]]
) -> None:
    options: dict[str, Any] = {"base_url": server.base_url, "api_key": "none", "logprobs": True, "streaming": streaming}
    async with http_library().AsyncClient() as http:
        chat = ChatOpenAI(model="fake", http_async_client=http, **options)
        with EpisodeScope() as scope:
            history: list[BaseMessage] = [SystemMessage("s"), HumanMessage("tool")]
            history.append(await chat.bind_tools([look]).ainvoke(history))
            history.append(await look.ainvoke(history[-1].tool_calls[0]))
            for turn in ("again", "again"):
                history.append(await chat.ainvoke(history))
                history.append(HumanMessage(turn))
            await chat.ainvoke(history)
    assert scope.calls == []
    (dialogue,) = parse_to_conversations(through(scope.steps))
    answers = [m for m in dialogue if m["role"] == "assistant"]
    texts = ["abc" if streaming else "echo: tool", "echo: blue sky", "echo: again", "echo: again"]
    assert [sampled(m["logprobs"]) for m in answers] == [[logprob(c) for c in text] for text in texts]
    assert [m["finish_reason"] for m in answers] == ["tool_calls", "stop", "stop", "stop"]
    assert answers[0]["tool_calls"][0]["function"]["arguments"] == '{"at": "sky"}'
    assert dialogue[3] == {"role": "tool", "content": "blue sky", "name": "look", "tool_call_id": "t1"}


async def test_a_captured_openai_client(server: FakeOpenAI) -> None:
    plain = connected(server)
    start = [said("system", "s"), said("user", [{"type": "text", "text": "tool"}])]
    with EpisodeScope(training=True) as scope:
        create = plain.client.chat.completions.create
        first = await create(model="fake", messages=[*start, said("user", "tool")])
        asked = first.choices[0].message.model_dump()
        history = [*start, said("user", "tool"), asked, said("tool", "r", tool_call_id="t1")]
        await create(model="fake", messages=history)
    await plain.aclose()
    for steps in (scope.steps, written_down(scope.steps), [decode(as_json(step)) for step in scope.steps]):
        dialogue = parse_to_openai_messages(steps)
        assert [m["role"] for m in dialogue] == ["system", "user", "user", "assistant", "tool", "assistant"]
        assert dialogue[1]["content"] == [{"type": "text", "text": "tool"}]
        assert dialogue[3]["token_ids"] == encode("echo: tool")
        assert dialogue[3]["finish_reason"] == "tool_calls"
        assert sampled(dialogue[5]["logprobs"]) == [logprob(c) for c in "echo: r"]


def test_candidates_are_calls_of_their_own() -> None:
    generations = [ChatGeneration(message=AIMessage(text)) for text in ("a", "b")]
    for answers in (generations, LLMResult(generations=[generations])):
        steps = pair([HumanMessage("q")], answers, logprobs=[-1.0], token_ids=[5])
        calls = parse_calls(steps)
        assert [(c.choice, c.message, c.logprobs) for c in calls] == [
            (0, said("assistant", "a"), [-1.0]),
            (1, said("assistant", "b"), None),
        ]
        first, second = parse_to_conversations(steps)
        assert [first[-1]["content"], second[-1]["content"]] == ["a", "b"]
    (call,) = parse_calls(
        [step("LLM_START", data={"input": ["go"]}), step("LLM_END", chat_responses=[Generation(text="x")])]
    )
    assert (call.messages, call.message) == ([said("user", "go")], said("assistant", "x"))


# one step


def test_the_message_of_one_step() -> None:
    parse = langchain_parser.parse_to_openai_message
    answer = AIMessage("", tool_calls=[CALL], response_metadata={"stop_reason": "tool_use"})
    asked = parse(step("LLM_START", chat_inputs=[HumanMessage("a"), HumanMessage("b")]))
    called = parse(step("LLM_END", chat_responses=[ChatGeneration(message=answer)]), asked, more="ignored")
    assert asked == said("user", "b")
    assert called["finish_reason"] == "tool_calls"
    message = {"role": "tool", "tool_call_id": "t1", "name": "look", "content": "r"}
    output = ToolMessage("r", tool_call_id="t1", name="look")
    assert parse(step("TOOL_END", tool_outputs=output), previous_message=None) == message
    assert parse(step("TOOL_END", data={"output": "r"}), previous_message=called) == message
    assert (
        adk_parser.parse_to_openai_message(step("TOOL_END", data={"output": {"r": 1}}), called)["content"] == '{"r": 1}'
    )
    output = {"blocks": [{"block_type": "text", "text": "r"}], "tool_name": "look", "raw_input": {}, "raw_output": "r"}
    assert llama_index_parser.parse_to_openai_message(step("TOOL_END", data={"output": output}), called) == message


RESULTS: list[Any] = [  # of tools that know nothing of frameworks
    {"parts": ["bolt"]},
    {"parts": [{"name": "bolt"}], "role": "spare"},
    {"contents": ["milk"]},
    {"type": "tool", "content": "hammer"},
    {"type": "chat", "content": "hi"},
    {"role": "captain", "blocks": 3},
    {"role": "user", "content": "hi"},
]


@pytest.mark.parametrize("parser", [langchain_parser, llama_index_parser, adk_parser])
@pytest.mark.parametrize("result", RESULTS)
def test_a_tool_result_is_json_unless_it_is_a_tool_message(parser: Any, result: Any) -> None:
    called = said("assistant", None, tool_calls=[{"id": "t1", "function": {"name": "look", "arguments": "{}"}}])
    message = parser.parse_to_openai_message(step("TOOL_END", data={"output": result}), called)
    assert message == {"role": "tool", "tool_call_id": "t1", "name": "look", "content": json.dumps(result)}


def test_a_function_response_of_adk_as_tool_result() -> None:
    response = {
        "role": "user",
        "parts": [{"functionResponse": {"id": "t1", "name": "look", "response": {"at": "sky"}}}],
    }
    message = adk_parser.parse_to_openai_message(step("TOOL_END", data={"output": response}))
    assert message == {"role": "tool", "tool_call_id": "t1", "name": "look", "content": '{"at": "sky"}'}


@pytest.mark.parametrize(
    ("mime", "audio_format"),
    [("audio/mpeg", "mp3"), ("audio/x-wav", "wav"), ("audio/wav", "wav"), ("audio/ogg", "ogg")],
)
def test_audio_has_the_format_names_of_openai(mime: str, audio_format: str) -> None:
    content = {"role": "user", "parts": [{"inline_data": {"mime_type": mime, "data": "UklGRg=="}}]}
    message = adk_parser.parse_to_openai_message(step("LLM_START", chat_inputs=[content]))
    audio = {"data": "UklGRg==", "format": audio_format}
    assert message["content"] == [{"type": "input_audio", "input_audio": audio}]


def test_logprobs_of_text_completions() -> None:
    logprobs = {"tokens": ["token_id:7", "token_id:8"], "token_logprobs": [-0.5, -0.25], "text_offset": [0, 1]}
    generation = Generation(text="ok", generation_info={"finish_reason": "stop", "logprobs": logprobs})
    response = {"text": "ok", "raw": {"choices": [{"finish_reason": "stop", "logprobs": logprobs}]}}
    for parser, answer in ((langchain_parser, generation), (llama_index_parser, response)):
        message = parser.parse_to_openai_message(step("LLM_END", chat_responses=[answer]))
        assert sampled(message.pop("logprobs")) == [-0.5, -0.25]
        assert message == said("assistant", "ok", token_ids=[7, 8], finish_reason="stop")


@pytest.mark.parametrize("parser", [langchain_parser, llama_index_parser, adk_parser])
def test_each_parser_reads_captured_steps(parser: Any) -> None:
    start, end = pair([said("user", "q")], [said("assistant", "a")], logprobs=[-1.0], finish_reason="length")
    assert parser.parse_to_openai_message(start) == said("user", "q")
    answer = parser.parse_to_openai_message(end)
    assert (answer["content"], answer["finish_reason"], sampled(answer["logprobs"])) == ("a", "length", [-1.0])
    assert parser.parse_to_openai_message(end.payload) == parser.parse_to_openai_message(end.model_dump()) == answer


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (step("TOOL_START"), "(TOOL_START): the step has no message: not an LLM_START"),
        (step("LLM_START", chat_inputs=[]), "(LLM_START): the step has no message"),
        (step("LLM_END", chat_responses=[]), "or its prompt or completion is empty"),
        (
            step("TOOL_END", data={"output": "r"}),
            "(TOOL_END): cannot match the tool result to a call: previous_message has 0",
        ),
    ],
)
def test_a_step_without_a_message(given: IntermediateStep, complaint: str) -> None:
    with pytest.raises(TrajectoryError, match=r"^step k ") as refused:
        langchain_parser.parse_to_openai_message(given)
    assert complaint in str(refused.value)


# what cannot be read


ADK_CODE = {"role": "user", "parts": [{"executable_code": {"code": "1"}}]}
ADK_LOST = {"role": "user", "parts": [{"function_response": {"name": "f", "response": {}}}]}
UNREADABLE: list[tuple[Any, Any, str]] = [
    ([object()], ["a"], "is neither text nor a message"),
    ([7], ["a"], "int 7 is not a message of a known framework"),
    ([{"role": "narrator", "content": "x"}], ["a"], "'narrator'"),
    ([{"role": "user"}], ["a"], "is not a message of a known framework"),
    (["q"], [{"answer": "x"}], "is not a completion of a known framework"),
    (["q"], [said("user", "x")], "is not a completion of a known framework"),
    (["q"], [{"choices": [{"text": "x"}]}], "is not a completion of a known framework"),
    ([HumanMessage([{"type": "hologram"}])], ["a"], "content of type 'hologram'"),
    ([HumanMessage([{"type": "image"}])], ["a"], "neither data nor url"),
    ([ChatMessage("x", role="narrator")], ["a"], "role 'narrator'"),
    (["q"], LLMResult(generations=[[], []]), "2 prompts"),
    ([{"role": "user", "blocks": [{"block_type": "hologram"}]}], ["a"], "block of type 'hologram'"),
    ([{"role": "user", "blocks": [{"block_type": "image", "path": "/a.png"}]}], ["a"], "neither data nor url"),
    ([ADK_CODE], ["a"], "Part with executable_code has no OpenAI equivalent"),
    ([ADK_LOST], ["a"], "function response for 'f' has no preceding call"),
    ([{"role": "critic", "parts": []}], ["a"], "Content has role 'critic'; allowed: user, model, system"),
    (["q"], [{"content": {"parts": [{"text": "x"}]}, "partial": True}], "partial response of a stream"),
    (None, ["a"], "no prompt in it, nor in an LLM_START"),
]


@pytest.mark.parametrize(("messages", "answers", "complaint"), UNREADABLE)
def test_what_cannot_be_read_is_told_with_its_step(messages: Any, answers: Any, complaint: str) -> None:
    holder = "LLM_END" if messages in (["q"], None) else "LLM_START"
    with pytest.raises(TrajectoryError, match=rf"^step the-key \({holder}\): ") as refused:
        parse_to_openai_messages(pair(messages, answers, "the-key"))
    assert complaint in str(refused.value)


def fields_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every field and item in a JSON value."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*path, key)
        yield from fields_of(value[key], (*path, key))


@pytest.mark.parametrize("name", RECORDED)
@given(st.data())
def test_a_payload_of_another_form_is_told_too(name: str, data: st.DataObject) -> None:
    """A field of a recorded payload is missing or of another type, as another version of a framework may have it."""
    steps = deepcopy(RECORDED[name]["agent"]["steps"])
    payload = data.draw(st.sampled_from([s["payload"] for s in steps if s["payload"]["event_type"].startswith("LLM")]))
    *path, last = data.draw(st.sampled_from(list(fields_of(payload["metadata"]))))
    holder = reduce(lambda value, key: value[key], path, payload["metadata"])
    if data.draw(st.booleans()):
        del holder[last]
    else:
        holder[last] = data.draw(st.sampled_from([None, 7, "s", [], [3], {}, {"a": 1}]))
    complaint = ""
    try:
        parse_to_conversations(steps)
    except TrajectoryError as error:
        complaint = str(error)
    assert not complaint or complaint.startswith(f"step {payload['UUID']} (")


def test_logprobs_of_another_kind_and_what_is_no_step() -> None:
    with pytest.raises(TrajectoryError, match=r"step k \(LLM_END\): logprobs list \['high'\]"):
        parse_to_openai_messages(pair(["q"], ["a"], logprobs=["high"]))
    with pytest.raises(TrajectoryError, match="is not an intermediate step"):
        parse_to_openai_messages([{"payload": {"event_type": "LLM_END?"}}])


def test_calls_without_an_answer_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    steps = [
        *pair(["q"], [], "a"),
        *pair(["q"], None, "b", error="RateLimitError()"),
        step("LLM_START", "c", chat_inputs=["q"]),
        *pair(["q"], ["yes"], "d"),
        step("LLM_NEW_TOKEN", "d", data={"chunk": "yes"}),
        step("TOOL_START", "e"),
    ]
    with caplog.at_level(logging.WARNING):
        assert parse_to_conversations(steps) == [[said("user", "q"), said("assistant", "yes", logprobs={})]]
    assert [c.error for c in parse_calls(steps)][:3] == [
        "it ended without a completion",
        "RateLimitError()",
        "its LLM_END is missing",
    ]
    assert "skipped 3 of 4 model calls without a completion: RateLimitError(), it" in caplog.text
    assert parse_to_openai_messages([]) == []


# several dialogues


def at(steps: list[IntermediateStep], when: float) -> list[IntermediateStep]:
    for one in steps:
        one.payload.event_timestamp = when
    return steps


def test_calls_are_in_the_order_they_began() -> None:
    late, early = at(pair(["late"], ["x"], "a"), 2.0), at(pair(["early"], ["x"], "b"), 1.0)
    assert [c.messages[0]["content"] for c in parse_calls([*late, *early])] == ["early", "late"]
    same = [*pair(["first"], ["x"], "a"), *pair(["second"], ["x"], "a")]  # a UUID used twice
    assert [c.messages[0]["content"] for c in parse_calls(same)] == ["first", "second"]
    only_end = [step("LLM_END", chat_inputs=["q"], chat_responses=["a"])]
    assert parse_to_openai_messages(only_end)[0] == said("user", "q")


def test_equal_system_prompts_are_not_spliced() -> None:
    system = said("system", "s")
    steps = [
        *pair([system, said("user", "1")], ["one"], "a", logprobs=[-1.0]),
        *pair([system, said("user", "2")], ["two"], "b", logprobs=[-2.0]),
    ]
    first, second = parse_to_conversations(steps)
    assert [m["content"] for m in first] == ["s", "1", "one"]
    assert [m["content"] for m in second] == ["s", "2", "two"]


def test_a_changed_answer_is_context_here_and_whole_in_its_own_dialogue() -> None:
    asked, stripped = said("user", "q"), said("assistant", "a")
    steps = [
        *pair([asked], ["<think>hm</think>a"], "a", logprobs=[-1.0], finish_reason="stop"),
        *pair([asked, stripped, said("user", "and?")], ["b"], "b", logprobs=[-2.0], finish_reason="stop"),
    ]
    main, own = parse_to_conversations(steps)
    assert [sampled(m["logprobs"]) for m in main if m["role"] == "assistant"] == [[], [-2.0]]
    assert sampled(own[-1].pop("logprobs")) == [-1.0]
    assert own == [asked, said("assistant", "<think>hm</think>a", finish_reason="stop")]


WORDS = st.sampled_from(["a", "b", "<think>x</think>a"])
SCRIPTS = st.lists(  # a dialogue: who asks, what is answered, and whether the next prompt repeats that unchanged
    st.tuples(st.sampled_from(["user", "tool"]), WORDS, WORDS, st.sampled_from([0, 0, 0, 1])), min_size=1, max_size=4
)


@given(st.lists(SCRIPTS, min_size=1, max_size=5), st.randoms(use_true_random=False), st.booleans())
def test_each_answer_stands_once_and_where_it_was_given(scripts: list[Any], random: Any, as_records: bool) -> None:
    """Any number of dialogues at once, made of hardly any different words, so that many begin alike."""
    queues = [_calls(script) for script in scripts]
    made: list[tuple[list[dict[str, Any]], str]] = []
    while any(queues):
        made.append(random.choice([queue for queue in queues if queue]).pop(0))
    steps = [
        one
        for number, (messages, answer) in enumerate(made)
        for one in pair(messages, [said("assistant", answer)], str(number), logprobs=[-float(number)])
    ]
    found = parse_to_conversations([s.model_dump() for s in steps] if as_records else steps)
    places: dict[int, tuple[int, int]] = {}
    for d, dialogue in enumerate(found):
        for place, message in enumerate(dialogue):
            for value in sampled(message.get("logprobs") or {}):
                assert int(-value) not in places
                places[int(-value)] = (d, place)
    assert sorted(places) == [*range(len(made))]
    for number, (messages, answer) in enumerate(made):
        d, place = places[number]
        assert place == len(messages)
        assert bare(found[d][: place + 1]) == [*messages, said("assistant", answer)]
    for dialogue in found:  # none of them is the beginning of another, which would have taken its end in
        size = len(dialogue)
        longer = [other for other in found if len(other) > size and bare(other[:size]) == bare(dialogue)]
        assert all(other[size - 1]["logprobs"] for other in longer)
    ends = [(bare(dialogue[:-1]), dialogue[-1]["content"]) for dialogue in found]
    assert all(end in made for end in ends)
    assert ends[0] == _main(made)


def bare(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in m.items() if k != "logprobs"} for m in messages]


def _calls(script: Any) -> list[tuple[list[dict[str, Any]], str]]:
    history: list[dict[str, Any]] = []
    calls = []
    for role, asked, answer, changed in script:
        history = [*history, said(role, asked, **({"tool_call_id": "t"} if role == "tool" else {}))]
        calls.append((history, answer))
        history = [*history, said("assistant", "changed" if changed else answer)]
    return calls


def _main(made: list[Any]) -> Any:
    """By brute force: the last call, going forward from the first, whose prompt begins with that of the one before."""
    last = made[0]
    for call in made[1:]:
        if len(call[0]) > len(last[0]) and call[0][: len(last[0])] == last[0]:
            last = call
    return last

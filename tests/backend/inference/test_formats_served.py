"""Unknown formats, broken templates, and requests about formats: commands, a backend, and its clients."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import yaml
from factories import connected, digits_project, read_lines
from fake_openai import FakeOpenAI
from marks import slow_after
from message_formats import ALL_FAMILIES, END, TOOLS
from processes import run as run_command
from processes import run_project, serving
from taught_agents import expected
from taught_families import TOKEN, Taught, run_agent
from taught_models import BREAK, QUESTION, Turn, dialogue, lessons, teach
from tiny_models import byte_tokenizer, save_tiny_model

from insitu.agents.frameworks import async_client, sync_client
from insitu.agents.python import BlockingModel
from insitu.backend.inference.tokenizer import ChatTokenizer
from insitu.backend.protocols.openai.chat import ChatRequest
from insitu.formats.parser import MessageFormats, message_parser
from insitu.formats.templates import dropped_reasoning, template_error
from insitu.gateway.server import Gateway
from insitu.integrations.frameworks import anthropic as claude
from insitu.integrations.frameworks import langchain
from insitu.workflow.context import EpisodeScope

FORMATS = (
    "deepseek_v3, gemma3, gemma4, glm45, granite, hermes, kimi_k2, llama3_json, llama4_pythonic, minimax_m2, mistral, "
    "openai, phi4_mini_json, pythonic, qwen3_coder, xlam"
)
UNKNOWN = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
)
HERMES = ALL_FAMILIES["hermes"].source


@pytest.fixture(scope="module")
def strange(tmp_path_factory) -> Path:
    """A model with random weights whose template renders tools in no known format."""
    folder = save_tiny_model(tmp_path_factory.mktemp("strange") / "model", max_position_embeddings=1024)
    (folder / "chat_template.jinja").write_text(UNKNOWN)
    return folder


def validate(folder: Path, *arguments: str) -> tuple[int, str]:
    code, out, err = run_project(folder, *arguments, command="validate")
    return code, out + err


def test_validate_lists_the_formats_of_a_model_that_has_none(tmp_path, strange):
    project = digits_project(tmp_path, rows=4, model=str(strange))
    code, said = validate(project)
    assert code == 2
    assert (
        f"trainer_adapters: the chat template of {strange} renders tools, but its tool calls have none of the known "
        f"formats; set tool_format to one of {FORMATS}, or to none to leave them in the text"
    ) in said
    for name in ("hermes", "none"):
        assert validate(project, "-o", "trainer_adapters.backend.tool_format", name)[0] == 0
    code, said = validate(project, "-o", "trainer_adapters.backend.tool_format", "herms")
    assert code == 2
    assert "trainer_adapters.backend.tool_format" in said
    assert f"'herms' does not exist; available: {FORMATS}, none" in said
    code, said = validate(project, "-o", "llms.player.reasoning_format", "thinks")
    assert code == 2
    assert "llms.player.reasoning_format" in said
    assert "'thinks' does not exist; available: deepseek_r1, gemma4, granite, harmony, mistral, think, none" in said


def test_validate_reads_the_file_of_a_template(tmp_path, strange):
    project = digits_project(tmp_path, rows=4, model=str(strange))
    option = ("-o", "trainer_adapters.backend.chat_template")
    (tmp_path / "good.jinja").write_text(HERMES)
    (tmp_path / "bad.jinja").write_text("{% if messages %}\n{% for %}")
    (tmp_path / "binary.jinja").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.jinja").mkdir()
    assert validate(project, *option, "good.jinja")[0] == 0
    for name, problem in (
        ("missing.jinja", "missing.jinja"),
        ("bad.jinja", "(line 2)"),
        ("binary.jinja", "cannot be read"),
        ("folder.jinja", "folder.jinja"),
    ):
        code, said = validate(project, *option, name)
        assert (code, "trainer_adapters: chat_template" in said, problem in said) == (2, True, True), said


def test_validate_warns_of_a_template_that_drops_reasoning(tmp_path):
    project = digits_project(tmp_path, rows=4)
    (tmp_path / "keeps.jinja").write_text(HERMES)
    (tmp_path / "drops.jinja").write_text(
        HERMES.replace("if m.reasoning_content", "if loop.last and m.reasoning_content")
    )
    option = ("-o", "trainer_adapters.backend.chat_template")
    code, said = validate(project, *option, "drops.jinja")
    assert code == 0
    assert "leaves out the reasoning of every earlier message: a conversation then needs several training rows" in said
    code, said = validate(project, *option, "keeps.jinja")
    assert (code, "reasoning" in said) == (0, False)


def test_what_a_template_drops():
    since_question = HERMES.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% set later = messages[loop.index:] | map(attribute='role') %}",
    ).replace("if m.reasoning_content", "if m.reasoning_content and 'user' not in later")
    assert dropped_reasoning(since_question) == "of a message once the user has sent another"
    assert dropped_reasoning("{{ raise_exception('never') }}") is None
    assert dropped_reasoning("{% for %}") is None
    assert template_error("{% generation %}{{ 'x' }}{% endgeneration %}{% break %}") is not None
    assert template_error("{% for m in messages %}{% generation %}{% break %}{% endgeneration %}{% endfor %}") is None


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("tool_format", "herms", f"tool_format: 'herms' does not exist; available: {FORMATS}, none"),
        (
            "reasoning_format",
            "x",
            "reasoning_format: 'x' does not exist; available: deepseek_r1, gemma4, granite, harmony",
        ),
        ("chat_template", "missing.jinja", "File 'missing.jinja' does not exist"),
        ("chat_template", "bad.jinja", "bad.jinja is no template: "),
    ],
)
def test_the_command_of_a_backend_refuses(tmp_path, strange, option, value, problem):
    (tmp_path / "bad.jinja").write_text("{% if messages %}\n{% for %}")
    done = run_command("backend", "--model", strange, "--port", 0, f"--{option}", value, folder=tmp_path)
    assert done.returncode != 0
    assert problem in done.stderr.replace("\n", " "), done.stderr


def tokenizer(template: str) -> ChatTokenizer:
    return ChatTokenizer(byte_tokenizer(template))


def test_requests_with_tools_to_a_model_of_unknown_format_are_refused(strange):
    with serving("backend", "--model", strange, "--port", 0) as (_, address):
        with openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client:
            asked: Any = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(**asked, tools=TOOLS)
            assert refused.value.param == "tools"
            assert f"set tool_format to one of {FORMATS}" in str(refused.value)
            for body in ({"tool_format": "herms"}, {"reasoning_format": "herms"}):
                with pytest.raises(openai.BadRequestError, match="'herms' does not exist; available: ") as refused:
                    client.chat.completions.create(**asked, extra_body=body)
                assert refused.value.param in body
            for more in ({"tool_choice": "none"}, {"extra_body": {"tool_format": "none"}}):
                assert (
                    client.chat.completions.create(**asked, tools=TOOLS, **more).choices[0].message.tool_calls is None
                )


@pytest.mark.parametrize("content", ["", None])
def test_a_template_that_asks_for_no_content_gets_none(content):
    """Those of DeepSeek leave out the calls of a message that has content, be it empty."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": content, "tool_calls": [call]}]
    deepseek = tokenizer(ALL_FAMILIES["deepseek_text"].source)
    (ids,) = ChatRequest(model="m", messages=messages).prompts(deepseek)
    assert 'function<｜tool▁sep｜>f\n```json\n{"x":1}\n```' in deepseek.decode(ids)


@pytest.mark.parametrize("size", [1, 3, 10**6])
@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls", "malformed"),
    [
        ("<think>Why.</think>Yes.", "Yes.", "Why.", [], False),
        ('<call>{"name": "f", "arguments": {"x": [1, "ü"]}}</call>', "", "", [("f", {"x": [1, "ü"]})], False),
        ("<call>not json</call>", "<call>not json</call>", "", [], True),
        ('<call>{"name": "f"', '<call>{"name": "f"', "", [], True),
    ],
)
def test_a_response_template_of_the_tokenizer(size, text, content, reasoning, calls, malformed):
    template = response_template("<call>", "</call>")
    parser = message_parser(MessageFormats.of(UNKNOWN, template), "", TOOLS)
    pieces = [parser.feed(text[at : at + size]) for at in range(0, len(text), size)]
    last = parser.finish()
    pieces.append(last)
    assert "".join(piece.content for piece in pieces) == content
    assert "".join(piece.reasoning for piece in pieces) == reasoning
    found = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in last.calls]
    assert (found, last.malformed) == (calls, malformed)


def response_template(start: str, end: str) -> dict[str, Any]:
    """As a tokenizer has it in its `tokenizer_config.json`."""
    call = {"type": "function", "function": "{content}"}
    return {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "content": {"content": "text", "repeats": True, "join": ""},
            "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
            "tool_calls": {"open": start, "close": end, "content": "json", "repeats": True, "transform": call},
        },
    }


@pytest.fixture(scope="module")
def hermes(tmp_path_factory) -> Iterator[tuple[Taught, Taught, Path]]:
    """A model that was taught, the same with a response template of its tokenizer, and its folder."""
    family, folder = ALL_FAMILIES["hermes"], tmp_path_factory.mktemp("hermes")
    teach(family, folder / "plain")
    shutil.copytree(folder / "plain", folder / "own")
    settings = json.loads((folder / "own/tokenizer_config.json").read_text())
    settings["response_template"] = response_template("<tool_call>", "</tool_call>")
    (folder / "own/tokenizer_config.json").write_text(json.dumps(settings))
    options = ("--port", 0, "--token", TOKEN)
    with serving("backend", "--model", folder / "plain", *options) as (_, plain):
        with serving("backend", "--model", folder / "own", *options) as (_, own):
            yield Taught("hermes", family, plain), Taught("hermes", family, own), folder / "plain"


@pytest.mark.parametrize("streamed", slow_after(1, [False, True]))
async def test_an_agent_of_a_tokenizer_with_a_response_template(hermes, streamed):
    for dialect in ("chat", "responses", "messages"):
        answers, _ = await run_agent(hermes[1], dialect, streamed)
        assert [answer._replace(ids=[]) for answer in answers] == expected(hermes[1].family)
    (answer,), (call,) = await run_agent(hermes[1], "chat", streamed, BREAK, [Turn("", [], "", [])])
    assert (answer.calls, call.tool_call_malformed) == ([], True)
    assert "<tool_call>" in answer.content


def ask(taught: Taught, streamed: bool = False, **more: Any) -> list[SimpleNamespace]:
    """The choices for the first question: content, reasoning, calls, finish reason, and token ids."""
    asked: Any = {"model": "policy", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    extra = {"return_token_ids": True} | more.pop("extra_body", {})
    asked |= {"tools": TOOLS, "extra_body": extra, **more}
    with openai.OpenAI(base_url=f"{taught.address}/v1", api_key=TOKEN, max_retries=0) as client:
        if not streamed:
            answer = client.chat.completions.create(**asked)
            return [
                SimpleNamespace(
                    content=choice.message.content or "",
                    reasoning=getattr(choice.message, "reasoning_content", ""),
                    calls=[call.function.name for call in choice.message.tool_calls or []],
                    ended=choice.finish_reason,
                    ids=choice.token_ids,
                    malformed=getattr(choice, "tool_call_malformed", False),
                )
                for choice in answer.choices
            ]
        found = [
            SimpleNamespace(content="", reasoning="", calls=[], ended=None, ids=[], malformed=False)
            for _ in range(more.get("n", 1))
        ]
        for chunk in client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                each = found[choice.index]
                each.content += choice.delta.content or ""
                each.reasoning += getattr(choice.delta, "reasoning_content", "")
                each.calls += [call.function.name for call in choice.delta.tool_calls or []]
                each.ended = choice.finish_reason or each.ended
                each.ids += choice.token_ids
                each.malformed = each.malformed or getattr(choice, "tool_call_malformed", False)
        return found


AGENT = """
import json
from itertools import count
from pathlib import Path

told = json.loads((Path(__file__).parent / "dialogue.json").read_text())
scores = count()

async def answer(question, model):
    messages = [{"role": "user", "content": told["question"]}]
    for results in told["results"]:
        said = (await model.complete(messages, tools=told["tools"])).choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        for call, result in zip(said.tool_calls or [], results):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    await model.complete(told["broken"], tools=told["tools"])
    return said.content or ""

def score(answer):
    return float(next(scores) % 2)
"""


@pytest.mark.slow
def test_a_run_trains_on_calls_and_counts_the_malformed(hermes, tmp_path):
    project = digits_project(tmp_path, rows=2, model=str(hermes[2]))
    (tmp_path / "agent.py").write_text(AGENT)
    results = [turn.results for turn in dialogue(hermes[0].family)]
    told = {"tools": TOOLS, "question": QUESTION, "results": results, "broken": BREAK}
    (tmp_path / "dialogue.json").write_text(json.dumps(told))
    file = tmp_path / "config.yml"
    config = yaml.safe_load(file.read_text())
    config["general"]["plugins"] = []
    config["llms"]["player"] = {"_type": "policy", "temperature": 0.2}
    config["workflow"] = {"_type": "python", "function": "agent:answer", "model": "player"}
    config["eval"]["evaluators"]["score"] = {"_type": "python", "function": "agent:score"}
    config["finetuning"]["num_epochs"] = 1
    file.write_text(yaml.safe_dump(config))
    code, out, err = run_project(project)
    assert code == 0, err + out
    run = tmp_path / "run"
    (metrics,) = read_lines(run / "training_metrics.jsonl")
    assert metrics["malformed_tool_calls"] == 8
    assert metrics["logprob_gap"] < 1e-5
    assert (metrics["episodes"], metrics["rows"]) == (8, 16)
    settings = json.loads((run / "run.json").read_text())
    assert (settings["tool_format"], settings["reasoning_format"]) == ("hermes", "think")
    calls = read_lines(run / "calls.jsonl.gz")[1:]
    assert [call["index"] for call in calls if call.get("tool_call_malformed")] == [3] * 8


both_ways = pytest.mark.parametrize("streamed", slow_after(1, [False, True]))


@both_ways
def test_each_of_several_choices_has_its_calls(hermes, streamed):
    first = dialogue(hermes[0].family)[0]
    choices = ask(hermes[0], streamed, n=3)
    names = [name for name, _ in first.calls]
    assert [(c.content, c.reasoning, c.calls, c.ended) for c in choices] == [
        (first.content, first.reasoning, names, "tool_calls")
    ] * 3


@both_ways
def test_formats_of_a_request(hermes, streamed):
    text = lessons(hermes[0].family)[0][1]
    [raw] = ask(hermes[0], streamed, extra_body={"tool_format": "none", "reasoning_format": "none"})
    assert raw.content == text.removesuffix(END)
    assert (raw.calls, raw.reasoning, raw.ended, raw.malformed) == ([], "", "stop", False)
    [thinks] = ask(hermes[0], streamed, extra_body={"tool_format": "none"})
    assert (thinks.calls, thinks.reasoning) == ([], dialogue(hermes[0].family)[0].reasoning)
    assert thinks.content.startswith("I look.<tool_call>")
    [other] = ask(hermes[0], streamed, extra_body={"tool_format": "mistral"})
    assert (other.calls, other.malformed, other.content) == ([], False, thinks.content)


@both_ways
def test_stop_strings_beside_calls(hermes, streamed):
    [inside] = ask(hermes[0], streamed, stop="Zürich")
    assert (inside.calls, inside.malformed, inside.ended) == ([], True, "stop")
    assert inside.content == 'I look.<tool_call>\n{"name": "weather", "arguments": {"city": "'
    [between] = ask(hermes[0], streamed, stop="</tool_call>")
    assert (between.calls, between.ended, between.malformed) == (["weather"], "tool_calls", False)
    [before] = ask(hermes[0], streamed, stop="<tool_call>")
    assert (before.content, before.calls, before.ended) == ("I look.", [], "stop")


@both_ways
@pytest.mark.parametrize("name", ["hermes", "own"])
def test_special_tokens_stay_where_they_are_asked_for(hermes, streamed, name):
    taught = hermes[name == "own"]
    [kept] = ask(taught, streamed, extra_body={"skip_special_tokens": False})
    [left] = ask(taught, streamed)
    assert (kept.calls, kept.ids) == (left.calls, left.ids)
    assert END not in left.content


@both_ways
@pytest.mark.parametrize("text", ["I think.\n</think>\n\nYes.", "I think, and am cut off"])
def test_a_prompt_that_ends_with_the_start_of_reasoning(text, streamed):
    prompt, (before, _, after) = "<|im_start|>assistant\n<think>\n", text.partition("\n</think>\n\n")
    parser = message_parser(MessageFormats.of(HERMES), prompt)
    pieces = [*map(parser.feed, text)] if streamed else [parser.feed(text)]
    pieces.append(parser.finish())
    assert "".join(piece.reasoning for piece in pieces) == before
    assert "".join(piece.content for piece in pieces) == after
    closed = message_parser(MessageFormats.of(HERMES), f"{prompt}\n</think>\n\n")
    assert closed.feed("Yes").content + closed.finish().content == "Yes"


async def test_template_variables_reach_the_server_from_every_client(server: FakeOpenAI):
    """Through the object of an agent, blocking or not, the clients of frameworks, and the gateway."""
    variables = {"enable_thinking": False, "reasoning_effort": "low"}
    question: Any = [{"role": "user", "content": "hi"}]
    async with connected(server, max_retries=0, chat_template_kwargs=variables) as llm:
        count = len(server.requests)
        with EpisodeScope(training=True) as scope:
            await llm.complete(question)
            await llm.complete(question, timeout=30)  # not as plain JSON
            await asyncio.to_thread(BlockingModel(llm).ask, "hi")
            await langchain.make_llm(llm).ainvoke("hi")
            await asyncio.to_thread(langchain.make_llm(llm).invoke, "hi")
            await async_client(llm).chat.completions.create(model="m", messages=question)
            await asyncio.to_thread(sync_client(llm).chat.completions.create, model="m", messages=question)
            await async_client(llm).responses.create(model="m", input="hi")
            await claude.make_llm(llm).messages.create(model="m", max_tokens=9, messages=question)
            async with Gateway([llm]) as gateway:
                with gateway.endpoint(scope) as door:
                    async with openai.AsyncOpenAI(base_url=door.openai_url, api_key=door.key) as client:
                        await client.chat.completions.create(model="m", messages=question)
                        await client.responses.create(model="m", input="hi")
                        stream = await client.chat.completions.create(model="m", messages=question, stream=True)
                        assert [chunk async for chunk in stream]
        bodies = server.requests[count:]
    assert len(bodies) == len(scope.calls) == 12
    assert [body.get("chat_template_kwargs") for body in bodies] == [variables] * 12
    assert not any("extra_body" in body for body in bodies)


@pytest.mark.parametrize("thinking", slow_after(1, [True, False]))
async def test_a_template_reads_its_variables(hermes, tmp_path, thinking):
    suffix = "{% if add_generation_prompt and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    (tmp_path / "thinks.jinja").write_text(HERMES + suffix)
    model = save_tiny_model(tmp_path / "model", max_position_embeddings=1024)
    options = ("--port", 0, "--token", TOKEN, "--chat_template", tmp_path / "thinks.jinja")
    with serving("backend", "--model", model, *options) as (_, address):
        taught = Taught("hermes", ALL_FAMILIES["hermes"], address)
        nothing = [Turn("", [], "", [])]
        kwargs = {"chat_template_kwargs": {"enable_thinking": thinking}, "max_tokens": 2}
        _, (call,) = await run_agent(taught, "chat", False, turns=nothing, **kwargs)
    text = byte_tokenizer().decode(call.prompt_token_ids)
    assert text.endswith("</think>\n\n") is not thinking

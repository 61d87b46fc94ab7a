"""`tool_choice`: models that know nothing write calls of the function, with arguments that match its schema."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import llguidance
import openai
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from marks import slow_but
from message_formats import ALL_FAMILIES, TOOLS, completion, message
from processes import serving
from taught_agents import post_job
from taught_families import TOKEN, Taught, gateway_to
from taught_models import dialogue, tokenizer_of
from test_engine import running
from transformers import LlamaConfig, LlamaForCausalLM

from insitu.advantages.estimator import rows_of, truncation
from insitu.backend.inference.engine import Engine
from insitu.backend.inference.tokenizer import ChatTokenizer
from insitu.backend.protocols.openai.chat import ChatFormatter, ChatRequest
from insitu.errors import RequestRefused
from insitu.formats.parser import MessageFormats, forced_grammar
from insitu.gateway.endpoint import EpisodeEndpoint
from insitu.workflow.context import EpisodeScope

LENGTH = 2048
QUESTION: list[Any] = [{"role": "user", "content": "Zürich?"}]
PLACE = {
    "type": "object",
    "properties": {"größe": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"$ref": "#/$defs/kind"}},
    "required": ["größe"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["°C", 'say "hi"\\n', "7", 7]},
        "code": {"type": "string", "pattern": "^[a-z]{2,3}/[0-9]$"},
        "kind": {"$ref": "#/$defs/kind"},
        "days": {"type": "integer", "minimum": 1, "maximum": 30},
        "note": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]},
        "size": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "integer", "minimum": 3, "maximum": 5}]},
        "brief": {"type": "boolean"},
        "places": {"type": "array", "items": PLACE, "maxItems": 2},
    },
    "required": ["city", "unit", "places"],
    "$defs": {"kind": {"enum": ["ü, }] x", "日本"]}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
FEW = {
    "type": "object",
    "properties": {key: SCHEMA["properties"][key] for key in ("days", "code")},
    "required": ["days"],
}
SHORT = [{"type": "function", "function": {"name": "weather", "parameters": FEW}}, NOW]
"""Functions with few arguments, of which a model writes several calls in a moment."""
BY_NAME = {"type": "function", "function": {"name": "weather"}}
CIRCLE = {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}
TOWER = {f"a{n}": {"anyOf": 2 * [{"$ref": f"#/$defs/a{n + 1}"}]} for n in range(40)} | {"a40": {"type": "string"}}
FORCED = [name for name in ALL_FAMILIES if name != "gemma4"]
each_family = pytest.mark.parametrize("name", FORCED)


def untrained(name: str, folder: Path) -> Path:
    """A model with random weights, and a tokenizer with the markers of a family."""
    tokenizer = tokenizer_of(ALL_FAMILIES[name])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=LENGTH,
            eos_token_id=tokenizer.eos_token_id,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


async def answers(engine: Engine, streamed: bool = False, **body: Any) -> list[dict[str, Any]]:
    """The choices of a chat completion; deltas of a stream are put together."""
    asked = {"model": "m", "messages": [{"role": "user", "content": "Zürich?"}], "tools": [WEATHER, NOW], "seed": 1}
    request = ChatRequest.model_validate(asked | {"tool_choice": "required", "reasoning_format": "none"} | body)
    request.check()
    prompts = request.prompts(engine.tokenizer)
    limits = LENGTH, engine.vocab_size, len(engine.tokenizer.eos_token_ids)
    requests = request.generation_requests(prompts, *limits)
    formatter = ChatFormatter(request, [each.prompt for each in requests], engine.tokenizer)
    formatter.says_processed = True
    if not streamed:
        return formatter.response(await engine.complete(requests))["choices"]
    choices: dict[int, dict[str, Any]] = {}
    async for index, delta in engine.stream(requests):
        (choice,) = formatter.chunk(index, delta)["choices"]
        whole = choices.setdefault(index, {"message": {"content": ""}})
        whole["message"]["content"] += choice["delta"].pop("content")
        whole["message"] |= choice.pop("delta")
        whole |= choice
    return [choices[index] for index in sorted(choices)]


def called(choice: dict[str, Any], schema: dict[str, Any] = SCHEMA) -> list[tuple[str, Any]]:
    """The calls, whose arguments must match."""
    functions = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    calls = [(each["name"], json.loads(each["arguments"])) for each in functions]
    for function, arguments in calls:
        allowed = schema | {"additionalProperties": False} if function == "weather" else {"maxProperties": 0}
        jsonschema.Draft202012Validator(allowed).validate(arguments)
    return calls


@pytest.mark.parametrize("name", slow_but(("hermes",), FORCED))
async def test_a_model_without_training_writes_calls(name: str, tmp_path: Path) -> None:
    async with running(untrained(name, tmp_path)) as engine:
        end = {str(each): -1 for each in engine.tokenizer.eos_token_ids}
        named = await answers(engine, tool_choice=BY_NAME, n=3, logprobs=True)
        streamed = await answers(engine, True, tool_choice=BY_NAME, n=3, logprobs=True)
        several = await answers(engine, n=8, tools=SHORT, logit_bias=end, max_tokens=200)
        one = await answers(engine, n=4, logit_bias=end, parallel_tool_calls=False)
    for choice in named:
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None), choice
        assert [function for function, _ in called(choice)] == ["weather"]
        assert choice["structured_outputs"]["grammar"].startswith("start: ")
    assert [[*called(choice)] for choice in streamed] == [[*called(choice)] for choice in named]
    assert {choice["finish_reason"] for choice in streamed} == {"tool_calls"}
    counts = [len(called(choice, FEW)) for choice in several if choice["finish_reason"] == "tool_calls"]
    assert len(counts) > 1
    assert min(counts) >= 1
    assert max(counts) > 1 or ALL_FAMILIES[name].tools == "openai"
    assert {len(called(choice)) for choice in one} == {1}


@each_family
@pytest.mark.parametrize("reasoning", ["", "Because of <this>.\nYes."])
def test_what_a_template_renders_is_in_the_grammar(name: str, reasoning: str) -> None:
    """With all tokens that grammars take as no text, and no other."""
    family = ALL_FAMILIES[name]
    if reasoning and family.reasoning == "none":
        return
    calls = dialogue(family)[0].calls
    prompt, text = completion(family, message("", calls, reasoning))
    accepts, markers = matcher(name, prompt)
    tokenizer = tokenizer_of(family)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert accepts(ids) == len(ids), tokenizer.decode(ids[accepts(ids) :])
    assert accepts(tokenizer.encode("I look.", add_special_tokens=False)) == 0
    assert markers == {token.content for token in tokenizer.added_tokens_decoder.values()}


def matcher(name: str, prompt: str) -> tuple[Callable[[list[int]], int], set[str]]:
    """Returns how many tokens calls may begin with, and the markers."""
    family, tokenizer = ALL_FAMILIES[name], tokenizer_of(ALL_FAMILIES[name])
    markers = ChatTokenizer(tokenizer).markers
    text = forced_grammar(MessageFormats.of(family.source), TOOLS, prompt, markers, several=True)
    tokens = LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=len(tokenizer), eos_token=tokenizer.eos_token_id)
    assert all(tokens.is_special_token(number) for number in markers.values())
    found = LLMatcher(tokens, llguidance.grammar_from("grammar", text), log_level=0)
    assert not found.get_error()
    return found.validate_tokens, {*markers}


@pytest.mark.parametrize("name", slow_but(["mistral"], ["hermes", "gpt_oss", "granite", "mistral"]))
async def test_calls_after_reasoning(name: str, tmp_path: Path) -> None:
    """Which the model begins, or not; its end is made likely."""
    family = ALL_FAMILIES[name]
    async with running(untrained(name, tmp_path)) as engine:
        tokenizer = tokenizer_of(family)
        ends = {"hermes": "</think>", "gpt_oss": "<|end|>", "mistral": "[/THINK]"}
        likely = {str(tokenizer.convert_tokens_to_ids(ends[name])): 4} if name in ends else {}
        choices = await answers(
            engine, n=16, reasoning_format=None, logit_bias=likely, tool_choice=BY_NAME, max_tokens=400
        )
    finished = [choice for choice in choices if choice["finish_reason"] == "tool_calls"]
    assert finished
    assert [[function for function, _ in called(choice)] for choice in finished] == [["weather"]] * len(finished)
    assert name not in ends or any(choice["message"].get("reasoning_content") for choice in finished)
    assert {choice["finish_reason"] for choice in choices} <= {"tool_calls", "length"}


@pytest.mark.parametrize(
    ("end", "reasoning"), [("<think>\n", "always"), ("<think>\n\n</think>\n\n", "never"), ("", "perhaps")]
)
def test_the_prompt_says_whether_reasoning_comes(end: str, reasoning: str) -> None:
    accepts, _ = matcher("hermes", f"<|im_start|>assistant\n{end}")
    tokenizer = tokenizer_of(ALL_FAMILIES["hermes"])
    call = '<tool_call>\n{"name": "lookup_name", "arguments": {}}\n</tool_call>'
    texts = {"always": f"Why.</think>\n\n{call}", "never": call, "perhaps": f"<think>Why.</think>{call}"}
    ids = {kind: tokenizer.encode(text, add_special_tokens=False) for kind, text in texts.items()}
    allowed = {kind for kind, tokens in ids.items() if accepts(tokens) == len(tokens)}
    assert allowed == ({"never", "perhaps"} if reasoning == "perhaps" else {reasoning})


def function(name: str = "f", **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}


@pytest.mark.parametrize(
    ("name", "body", "param", "problem"),
    [
        ("hermes", {"tool_choice": "any"}, "tool_choice", "'any'; allowed: none, auto, required, a function"),
        ("hermes", {"tool_choice": {"type": "tool"}}, "tool_choice", "allowed: none, auto"),
        ("hermes", {"tools": None}, "tool_choice", "'required', which needs tools"),
        ("hermes", {"tools": [], "tool_choice": BY_NAME}, "tool_choice", "needs tools"),
        ("hermes", {"tools": [NOW], "tool_choice": BY_NAME}, "tool_choice", "'weather'; those of tools: now"),
        ("hermes", {"tools": [{"type": "function"}]}, "tool_choice", "the function ''"),
        (
            "hermes",
            {"tools": [function("f") | {"function": {"name": "f", "strict": 1}}]},
            "tools.0.function.strict",
            "1",
        ),
        ("hermes", {"tools": [function(type="string")]}, "tool_choice", "'f' are not the schema of an object"),
        ("hermes", {"tools": [function(required=5)]}, None, "response_format|schema"),
        ("hermes", {"response_format": {"type": "json_object"}}, "tool_choice", "exclude each other"),
        ("hermes", {"min_tokens": 2}, "min_tokens", "cannot be used"),
        ("hermes", {"tool_format": "none"}, "tool_choice", "tool format none, but in deepseek_v3, gemma3, glm45"),
        ("hermes", {"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice", "the mode auto or"),
        ("gemma4", {}, "tool_choice", "tool format gemma4, but in deepseek_v3"),
        ("pythonic", {"tools": [function("a-b")]}, "tool_choice", "'a-b' is no name in Python"),
        ("pythonic", {"tools": [function(properties={"from": {}})]}, "tool_choice", "'from' is no name in Python"),
        ("qwen3_coder", {"tools": [function("a b")]}, "tool_choice", "'a b' cannot be written"),
        ("qwen3_coder", {"tools": [function(anyOf=[])]}, "tool_choice", "anyOf, which this format cannot write"),
        ("qwen3_coder", {"tools": [function(properties=5)]}, "tools", "no JSON schema"),
        ("qwen3_coder", {"tools": [function(properties=CIRCLE, **{"$defs": CIRCLE})]}, "tools", "no JSON schema"),
        ("qwen3_coder", {"tools": [function(properties=TOWER, **{"$defs": TOWER})]}, "tool_choice", "more than 4096"),
        ("qwen3_coder", {"tools": [function(properties={"a": {"enum": []}})]}, "tool_choice", "enum without values"),
    ],
)
async def test_what_cannot_be_forced_is_refused(
    name: str, body: dict[str, Any], param: str | None, problem: str, tmp_path: Path
) -> None:
    async with running(untrained(name, tmp_path)) as engine:
        with pytest.raises(RequestRefused, match=problem) as refused:
            await answers(engine, **body)
    assert refused.value.status == 400
    assert param is None or refused.value.param == param


async def test_which_tools_are_offered(tmp_path: Path) -> None:
    async with running(untrained("hermes", tmp_path)) as engine:
        by_name = [{"type": "function", "function": {"name": "now"}}]
        offered = {}
        for mode in ("auto", "required"):
            choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": by_name}}
            request = ChatRequest.model_validate(
                {"model": "m", "messages": [{"role": "user", "content": "?"}], "tools": [WEATHER, NOW]}
                | {"tool_choice": choice}
            )
            request.check()
            (prompt,) = request.prompts(engine.tokenizer)
            offered[mode] = ("now" in (text := engine.tokenizer.decode(prompt)), "weather" in text, request.forced)
        (choice,) = await answers(engine, tool_choice=choice, parallel_tool_calls=False)
    assert (offered["auto"], offered["required"][:2]) == ((True, False, None), (True, False))
    assert called(choice) == [("now", {})]


async def of_chat(door: EpisodeEndpoint, choice: Any, streamed: bool) -> list[str]:
    async with openai.AsyncOpenAI(base_url=door.openai_url, api_key=door.key, max_retries=0) as client:
        asked: Any = {"model": "m", "messages": QUESTION, "tools": [WEATHER, NOW], "tool_choice": choice}
        if not streamed:
            answer = (await client.chat.completions.create(**asked)).choices[0]
            assert not answer.model_extra
            return [call.function.name for call in answer.message.tool_calls or []]
        chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
        assert not any(chunk.choices[0].model_extra for chunk in chunks)
        return [call.function.name for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]


async def of_responses(door: EpisodeEndpoint, choice: Any, streamed: bool) -> list[str]:
    tools: Any = [{"type": "function", **tool["function"]} for tool in SHORT]
    async with openai.AsyncOpenAI(base_url=door.openai_url, api_key=door.key, max_retries=0) as client:
        asked: Any = {"model": "m", "input": QUESTION, "tools": tools, "tool_choice": choice}
        if streamed:
            async with client.responses.stream(**asked) as stream:
                response = await stream.get_final_response()
        else:
            response = await client.responses.create(**asked)
        return [item.name for item in response.output if item.type == "function_call"]


async def of_messages(door: EpisodeEndpoint, choice: Any, streamed: bool) -> list[str]:
    tools: Any = [{"name": "weather", "input_schema": FEW}, {"name": "now", "input_schema": {"type": "object"}}]
    async with anthropic.AsyncAnthropic(base_url=door.anthropic_url, api_key=door.key, max_retries=0) as client:
        asked: Any = {"model": "m", "max_tokens": 400, "messages": QUESTION, "tools": tools, "tool_choice": choice}
        if streamed:
            async with client.messages.stream(**asked) as stream:
                answer = await stream.get_final_message()
        else:
            answer = await client.messages.create(**asked)
        return [block.name for block in answer.content if block.type == "tool_use"]


_NOW = {"type": "function", "name": "now"}
CHOICES: list[tuple[Any, Any, list[str]]] = [
    (of_chat, BY_NAME, ["weather"]),
    (of_chat, "none", []),
    (of_responses, _NOW, ["now"]),
    (of_responses, {"type": "allowed_tools", "mode": "required", "tools": [_NOW]}, ["now"]),
    (of_messages, {"type": "tool", "name": "weather"}, ["weather"]),
    (of_messages, {"type": "any", "disable_parallel_tool_use": True}, ["weather", "now"]),
    (of_messages, {"type": "none"}, []),
]


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
async def test_forced_calls_of_every_dialect_are_trained(tmp_path: Path, streamed: bool) -> None:
    """As what was sampled from among the tokens that the grammar allows."""
    options = ("--port", 0, "--token", TOKEN, "--output_dir", tmp_path / "out")
    with serving("backend", "--model", untrained("hermes", tmp_path / "model"), *options) as (_, address):
        taught = Taught("hermes", ALL_FAMILIES["hermes"], address)
        async with gateway_to(taught, reasoning_format="none", max_tokens=400) as gateway:
            with EpisodeScope(training=True, seed=3) as scope, gateway.endpoint(scope) as door:
                for ask, choice, expected in CHOICES:
                    names = await ask(door, choice, streamed)
                    assert names == expected or (len(expected) == 2 and names[0] in expected), choice
                with pytest.raises(openai.BadRequestError, match="those of tools: weather, now"):
                    await of_responses(door, {"type": "function", "name": "look"}, streamed)
                with pytest.raises(openai.BadRequestError, match="'mcp'; allowed: function, allowed_tools"):
                    await of_responses(door, {"type": "mcp"}, streamed)
                with pytest.raises(anthropic.BadRequestError, match="'all'; allowed: auto, any, tool, none"):
                    await of_messages(door, {"type": "all"}, streamed)
            calls = scope.calls
            assert [bool(call.sampling.get("structured_outputs")) for call in calls] == [
                bool(expected) for _, _, expected in CHOICES
            ]
            assert [truncation({**call.sampling, "temperature": 1}) for call in calls] == [None] * len(calls)
            rows = rows_of(calls, {0: 1.0, 2: -1.0, 4: 1.0}, "forced")
            assert [bool(row.shaping) for row in rows] == [True] * 3
            names = {"token_ids", "loss_mask", "logprobs", "advantages", "episode", "shaping"}
            body = [row.model_dump(include=names) for row in rows]
            job = await asyncio.to_thread(post_job, address, TOKEN, body, learning_rate=1e-5)
            assert job["status"] == "completed", job
            assert job["metrics"]["logprob_gap"] < 1e-5
            assert job["metrics"]["ratio_mean"] == pytest.approx(1, abs=1e-5)

"""`tool_choice`: models that know nothing write calls of the function, with arguments that match its schema."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from message_formats import ALL_FAMILIES, TOOLS, completion, message
from taught_models import dialogue, tokenizer_of
from test_engine import running
from transformers import LlamaConfig, LlamaForCausalLM

from insitu.backend.inference.engine import Engine
from insitu.backend.inference.tokenizer import ChatTokenizer
from insitu.backend.protocols.openai.chat import ChatFormatter, ChatRequest
from insitu.errors import RequestRefused
from insitu.formats.parser import MessageFormats, forced_grammar

LENGTH = 2048
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
BY_NAME = {"type": "function", "function": {"name": "weather"}}
each_family = pytest.mark.parametrize("name", ALL_FAMILIES)


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


def called(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    """The calls, whose arguments must match."""
    functions = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    calls = [(each["name"], json.loads(each["arguments"])) for each in functions]
    for function, arguments in calls:
        schema = SCHEMA | {"additionalProperties": False} if function == "weather" else {"maxProperties": 0}
        jsonschema.Draft202012Validator(schema).validate(arguments)
    return calls


@each_family
async def test_a_model_without_training_writes_calls(name: str, tmp_path: Path) -> None:
    async with running(untrained(name, tmp_path)) as engine:
        end = {str(each): -3 for each in engine.tokenizer.eos_token_ids}
        named = await answers(engine, tool_choice=BY_NAME, n=8, logprobs=True)
        streamed = await answers(engine, True, tool_choice=BY_NAME, n=8, logprobs=True)
        several = await answers(engine, n=8, logit_bias=end)
        one = await answers(engine, n=8, logit_bias=end, parallel_tool_calls=False)
    for choice in named:
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None), choice
        assert [function for function, _ in called(choice)] == ["weather"]
        assert choice["structured_outputs"]["grammar"].startswith("start: ")
    assert [[*called(choice)] for choice in streamed] == [[*called(choice)] for choice in named]
    assert {choice["finish_reason"] for choice in streamed} == {"tool_calls"}
    counts = [len(called(choice)) for choice in several if choice["finish_reason"] == "tool_calls"]
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


@pytest.mark.parametrize("name", ["hermes", "gpt_oss", "granite", "mistral"])
async def test_calls_after_reasoning(name: str, tmp_path: Path) -> None:
    """Which the model begins, or not; its end is made likely."""
    family = ALL_FAMILIES[name]
    async with running(untrained(name, tmp_path)) as engine:
        tokenizer = tokenizer_of(family)
        ends = {"hermes": "</think>", "gpt_oss": "<|end|>", "mistral": "[/THINK]"}
        likely = {str(tokenizer.convert_tokens_to_ids(ends[name])): 4} if name in ends else {}
        choices = await answers(engine, n=16, reasoning_format=None, logit_bias=likely, tool_choice=BY_NAME)
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
        ("pythonic", {"tools": [function("a-b")]}, "tool_choice", "'a-b' is no name in Python"),
        ("pythonic", {"tools": [function(properties={"from": {}})]}, "tool_choice", "'from' is no name in Python"),
        ("qwen3_coder", {"tools": [function("a b")]}, "tool_choice", "'a b' cannot be written"),
        ("qwen3_coder", {"tools": [function(anyOf=[])]}, "tool_choice", "anyOf, which this format cannot write"),
        ("qwen3_coder", {"tools": [function(properties=5)]}, "tools", "no JSON schema"),
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

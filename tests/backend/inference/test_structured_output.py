"""Structured output: completed answers match; what the library cannot do is refused; truncation stays `length`.

`STRUCTURED_SCHEMAS=1000` runs so many generated schemas.
"""

import asyncio
import json
import os
import re
import threading
from pathlib import Path

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from test_engine import asks, pairs, params, running
from test_sampling_parameters import PROMPT, ids
from tiny_models import save_tiny_model
from waiting import turns, until

from insitu.backend.inference.structured import Grammar, SharedCompiler
from insitu.backend.model import load_model
from insitu.backend.protocols.openai.parameters import SamplingParameters
from insitu.errors import RequestRefused

NUM_SCHEMAS = int(os.environ.get("STRUCTURED_SCHEMAS", "60"))
MAX_TOKENS = 200
EOS = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "m", max_position_embeddings=512)


def bounds(numbers: st.SearchStrategy) -> st.SearchStrategy[dict]:
    pair = st.tuples(numbers, numbers).map(sorted)
    keys = st.sampled_from([("minimum", "maximum"), ("exclusiveMinimum", "maximum"), ("minimum",), ("maximum",)])
    # An exclusive lower bound needs a number above it.
    return st.tuples(keys, pair).map(lambda each: dict(zip(each[0], (each[1][0] - 1, each[1][1]), strict=False)))


PATTERNS = ["^[a-z]{2,6}$", "^[A-Z][a-z]*$", r"^\d{4}-\d{2}-\d{2}$", "^(yes|no|maybe)$", "[0-9]+", r"^\w+@\w+\.com$"]
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8)
SCALARS = st.one_of(
    st.builds(lambda more: {"type": "integer", **more}, bounds(st.integers(-1000, 1000))),
    st.builds(lambda more: {"type": "number", **more}, bounds(st.integers(-1000, 1000).map(lambda n: n / 8))),
    st.builds(lambda p: {"type": "string", "pattern": p}, st.sampled_from(PATTERNS)),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more}, *[st.integers(0, 9)] * 2
    ),
    st.builds(
        lambda v: {"enum": v},
        st.lists(st.one_of(TEXTS, st.integers(-(2**53), 2**53), st.booleans(), st.none()), min_size=1),
    ),
    st.builds(lambda v: {"const": v}, TEXTS),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}]),
)


@st.composite
def objects(draw: st.DrawFn, children: st.SearchStrategy[dict]) -> dict:
    properties = draw(st.dictionaries(TEXTS, children, max_size=4))
    required = [name for name in properties if draw(st.booleans())]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


@st.composite
def arrays(draw: st.DrawFn, children: st.SearchStrategy[dict]) -> dict:
    if draw(st.booleans()):
        items = draw(st.lists(children, min_size=1, max_size=3))
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    least = draw(st.integers(0, 2))
    return {"type": "array", "items": draw(children), "minItems": least, "maxItems": least + draw(st.integers(0, 2))}


SCHEMAS = st.recursive(
    SCALARS,
    lambda children: st.one_of(
        objects(children),
        arrays(children),
        st.builds(lambda options: {"anyOf": options}, st.lists(children, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)


def generated(count: int) -> list[dict]:
    """So many schemas of the strategy, the same in each run."""
    schemas: list[dict] = []

    @seed(0)
    @settings(max_examples=count, database=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck])
    @given(SCHEMAS)
    def collect(schema: dict) -> None:
        schemas.append(schema)

    collect()
    return schemas


async def test_completed_answers_match_their_schemas(model):
    refused, completed, cut = [], 0, 0

    async def answer(engine, number: int, schema: dict):
        each = params(number, MAX_TOKENS, ignore_eos=False, grammar=Grammar("json", json.dumps(schema)))
        try:
            return (await engine.complete(asks(PROMPT, [each])))[0]
        except RequestRefused as error:
            refused.append((schema, str(error)))
            return None

    schemas = generated(NUM_SCHEMAS)
    async with running(model) as engine:
        answers = await asyncio.gather(*(answer(engine, *each) for each in enumerate(schemas)))
    for schema, output in zip(schemas, answers, strict=True):
        if output is not None and output.finish_reason == "stop":
            completed += 1
            jsonschema.Draft202012Validator(schema).validate(json.loads(output.text))
        elif output is not None:
            cut += 1
            assert (output.finish_reason, len(output.tokens)) == ("length", MAX_TOKENS)
    print(f"{len(schemas)} schemas: {len(refused)} refused, {completed} completed, {cut} cut off")
    assert len(refused) <= 0.1 * len(schemas), refused[:3]
    assert completed >= 0.5 * (len(schemas) - len(refused))


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar("regex", "[ab]{3,5}!?"), "[ab]{3,5}!?"),
        (Grammar("choice", '["yes", "no", "p\\u00eat-\\u00eatre"]'), "yes|no|p\u00eat-\u00eatre"),
        (Grammar("grammar", 'root ::= "x" [0-9]+ | "y"'), "x[0-9]+|y"),
        (Grammar("grammar", 'start: "<" WORD ">"\nWORD: /[a-c]+/'), "<[a-c]+>"),
    ],
)
async def test_other_grammars(model, grammar, pattern):
    async with running(model) as engine:
        asked = [params(seed, 100, ignore_eos=False, grammar=grammar, temperature=seed % 2) for seed in range(8)]
        outputs = await engine.complete(asks(PROMPT, asked))
        streamed = [delta async for _, delta in engine.stream(asks(PROMPT, asked[1:2]))]
    assert {output.finish_reason for output in outputs[1::2]} == {"stop"}
    assert all(re.fullmatch(pattern, output.text) for output in outputs if output.finish_reason == "stop")
    assert "".join(delta.text for delta in streamed) == outputs[1].text


async def test_log_probabilities_are_those_of_the_allowed_tokens(model):
    grammar = Grammar("regex", "[ab][cd]")
    async with running(model) as engine:
        each = params(0, 9, ignore_eos=False, grammar=grammar, temperature=1.3, top_logprobs=5)
        ((tokens),) = [output.tokens for output in await engine.complete(asks(PROMPT, [each]))]
    module = load_model(str(model), "cpu").module
    allowed = [ids("ab"), ids("cd"), [EOS]]
    for place, (token, rest) in enumerate(zip(tokens, allowed, strict=True)):
        with torch.no_grad():
            logits = module(input_ids=torch.tensor([PROMPT + tokens.ids[:place]])).logits[0, -1].float() / 1.3
        expected = logits[rest].log_softmax(-1).tolist()
        assert dict(token.top) == pytest.approx(dict(zip(rest, expected, strict=True)), abs=1e-5)
        assert token.logprob == pytest.approx(dict(token.top)[token.id], abs=1e-9)


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        (Grammar("json", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (
            Grammar("json", '{"type": "string", "pattern": "(?=a)b"}', "response_format"),
            "response_format: .*look-ahead",
        ),
        (Grammar("json", '{"$ref": "#/$defs/x"}'), r"/\$defs/x"),
        (Grammar("regex", "a(b"), "unclosed group"),
        (Grammar("grammar", 'start: "a" | b'), 'unknown name: "b"'),
        (Grammar("grammar", "::="), "structured_outputs: "),
    ],
)
async def test_what_is_not_supported_is_refused_before_anything_is_sampled(model, grammar, problem):
    async with running(model) as engine:
        with pytest.raises(RequestRefused, match=problem) as refused:
            await engine.complete(asks(PROMPT, [params(0, 5), params(0, 5, grammar=grammar)]))
        assert (refused.value.status, refused.value.param) == (400, grammar.key)
        assert engine.num_requests == (0, 0)
        assert engine.num_completed == 0


@pytest.mark.slow
async def test_a_grammar_beyond_the_limits_of_the_library_fails_its_own_completion_only(model):
    grammar = Grammar("regex", "((x|y){1,300}){1,300}")
    async with running(model) as engine:
        options = {"grammar": grammar, "ignore_eos": False, "logit_bias": ((*ids("x"), 100.0),)}
        failing = engine.complete(asks(PROMPT, [params(1, 250, **options)]))
        beside = engine.complete(asks(PROMPT, [params(1, 200)]))
        error, (other,) = await asyncio.gather(failing, beside, return_exceptions=True)
        (alone,) = await engine.complete(asks(PROMPT, [params(1, 200)]))
    assert isinstance(error, RequestRefused)
    assert "structured_outputs: the grammar of a completion cannot be followed further: lexer error" in str(error)
    assert (error.status, error.param, error.code) == (400, "structured_outputs", "unsupported_grammar")
    assert pairs(other) == pairs(alone)


DEEP: dict = {"type": "object"}
for _ in range(300):
    DEEP = {"type": "object", "properties": {"a": DEEP}}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"structured_outputs": {"choice": [str(number) for number in range(60_000)]}},
            "has 60000 choices; allowed: 4096",
        ),
        ({"structured_outputs": {"choice": ["\ud800"]}}, "cannot be read"),
        ({"structured_outputs": {"regex": "\ud800"}}, "cannot be read"),
        ({"structured_outputs": {"regex": "a" * 2**19}}, "has 524288 bytes; allowed: 262144"),
        ({"structured_outputs": {"json": DEEP}}, "cannot be read"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}}, "cannot be read"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"minimum": 10**40}}}},
            "cannot be read",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "\ud800"}}}},
            "cannot be read",
        ),
    ],
)
def test_a_grammar_that_cannot_be_read_or_takes_long_is_refused(parameters: dict, message: str) -> None:
    with pytest.raises(RequestRefused, match=message):
        _ = SamplingParameters(**parameters).grammar


class HeldCompiler(SharedCompiler):
    """Notes what it begins to compile, and ends each when it is told to."""

    def __init__(self, model: Path) -> None:
        super().__init__(load_model(str(model), "cpu").tokenizer, [EOS], 512)
        self.begun: list[str] = []
        self.may_end = threading.Semaphore(0)

    def compile(self, grammar: Grammar):
        self.begun.append(grammar.text)
        self.may_end.acquire()
        return super().compile(grammar)


async def test_a_short_grammar_waits_for_a_single_one_of_a_client_that_sends_many_long_ones(model):
    compiler, done = HeldCompiler(model), []

    async def ask(text: str) -> None:
        await compiler.matchers([Grammar("regex", text), None])
        done.append(text)

    long = [number * "a" for number in (900, 700, 800)]
    asked = [asyncio.create_task(ask(text)) for text in long]
    await until(lambda: compiler.begun)
    asked += [asyncio.create_task(ask("b+")) for _ in range(2)]
    await turns()
    assert compiler.begun == long[:1]
    compiler.may_end.release(4)
    await asyncio.gather(*asked)
    assert compiler.begun == [long[0], "b+", long[1], long[2]]
    assert done == [long[0], "b+", "b+", long[1], long[2]]


async def test_a_client_that_leaves_lets_no_second_grammar_be_compiled_beside_its_own(model):
    """And one that waits gives up its turn."""
    compiler = HeldCompiler(model)
    first, second, third = [
        asyncio.create_task(compiler.matchers([Grammar("regex", text)])) for text in ("a+", "b+", "c+")
    ]
    await until(lambda: compiler.begun)
    for task in (first, second):
        task.cancel()
    await turns()
    assert (first.cancelled(), second.cancelled(), compiler.begun) == (True, True, ["a+"])
    compiler.may_end.release(2)
    assert len(await third) == 1
    assert compiler.begun == ["a+", "c+"]
    assert len(await compiler.matchers([Grammar("regex", "a+")])) == 1  # what was compiled is kept


async def test_a_grammar_that_would_take_long_to_compile_is_refused(model):
    properties = {f"key{number}": {"type": "integer"} for number in range(8000)}
    text = json.dumps({"type": "object", "properties": properties, "additionalProperties": False})
    async with running(model) as engine:
        with pytest.raises(RequestRefused, match=r"grammar size .* too big") as refused:
            await engine.complete(asks(PROMPT, [params(0, 5, grammar=Grammar("json", text))]))
        assert refused.value.status == 400
        (output,) = await engine.complete(asks(PROMPT, [params(0, 5, grammar=Grammar("regex", "a{5}"))]))
    assert output.text == "aaaaa"

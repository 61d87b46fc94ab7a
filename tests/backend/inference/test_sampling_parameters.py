"""Parameters that shape the distribution: equal to transformers' processors, whatever else is in the batch."""

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from marks import slow_after, slow_but
from test_engine import asks, pairs, params, running
from tiny_models import byte_tokenizer, save_tiny_model
from transformers import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from insitu.backend.inference.sampler import SamplingParams
from insitu.backend.inference.sampling import SLOT, bad_word_ids, sample, truncated
from insitu.backend.inference.structured import Grammar
from insitu.backend.inference.tokenizer import ChatTokenizer
from insitu.backend.learner.batches import Row, collate
from insitu.backend.learner.logit_offsets import NAMES, shaping_text
from insitu.backend.learner.logprobs import LogprobComputer
from insitu.backend.model import load_model
from insitu.errors import JobFailed

TOKENIZER = ChatTokenizer(byte_tokenizer())


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, False)


PROMPT = ids("the cat sat on the mat, the cat")


class Subtracted:
    """The presence and frequency penalties as OpenAI defines them: transformers has none."""

    def __init__(self, presence: float, frequency: float, prompt: int) -> None:
        self.presence, self.frequency, self.prompt = presence, frequency, prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        output = input_ids[0, self.prompt :].tolist()
        lower = [output.count(v) * self.frequency + (v in output) * self.presence for v in range(scores.shape[-1])]
        return scores - torch.tensor(lower)


BIAS = {101: 4.0, 32: -3.5, 260: 1.0}
WORDS = ["e", "ab", " t"]
SHAPING = {
    "repetition_penalty": ({"repetition_penalty": 1.4}, [RepetitionPenaltyLogitsProcessor(1.4)]),
    "logit_bias": (
        {"logit_bias": tuple(BIAS.items())},
        [SequenceBiasLogitsProcessor([[[token], bias] for token, bias in BIAS.items()])],
    ),
    "bad_words": (
        {"bad_words": tuple(WORDS)},
        [NoBadWordsLogitsProcessor([ids(word.lstrip()) for word in WORDS], eos_token_id=256)],
    ),
    "presence_penalty": ({"presence_penalty": 1.3}, [Subtracted(1.3, 0, len(PROMPT))]),
    "frequency_penalty": ({"frequency_penalty": 0.8}, [Subtracted(0, 0.8, len(PROMPT))]),
    "all of them": (
        {
            "bad_words": ("e",),
            "logit_bias": tuple(BIAS.items()),
            "repetition_penalty": 0.7,
            "presence_penalty": -0.5,
            "frequency_penalty": 0.3,
        },
        [
            NoBadWordsLogitsProcessor([ids("e")], eos_token_id=256),
            SequenceBiasLogitsProcessor([[[token], bias] for token, bias in BIAS.items()]),
            RepetitionPenaltyLogitsProcessor(0.7),
            Subtracted(-0.5, 0.3, len(PROMPT)),
        ],
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "m", initializer_range=0.15)


@pytest.mark.parametrize("name", SHAPING)
@pytest.mark.parametrize("temperature", slow_but([1.6], [1.0, 1.6]))
async def test_log_probabilities_are_those_of_transformers_processors(model, name, temperature):
    options, processors = SHAPING[name]
    async with running(model) as engine:
        each = params(5, 60, temperature=temperature, top_logprobs=20, **options)
        tokens = (await engine.complete(asks(PROMPT, [each])))[0].tokens
    module = load_model(str(model), "cpu").module
    with torch.no_grad():
        logits = module(input_ids=torch.tensor([PROMPT + tokens.ids])).logits[0].float()
    for place, token in enumerate(tokens):
        input_ids, scores = torch.tensor([PROMPT + tokens.ids[:place]]), logits[None, len(PROMPT) - 1 + place]
        for processor in [*processors, TemperatureLogitsWarper(temperature)]:
            scores = processor(input_ids, scores)
        expected = scores[0].log_softmax(-1)
        assert token.logprob == pytest.approx(float(expected[token.id]), abs=1e-5)
        assert dict(token.top) == pytest.approx({v: float(expected[v]) for v, _ in token.top}, abs=1e-5)


@pytest.mark.parametrize(
    ("values", "warpers"),
    [
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        ({"top_k": 7}, [TopKLogitsWarper(7)]),
        ({"top_k": 400}, [TopKLogitsWarper(320)]),
        ({"top_p": 0.7}, [TopPLogitsWarper(0.7)]),
        (
            {"min_p": 0.02, "top_k": 9, "top_p": 0.8},
            [MinPLogitsWarper(0.02), TopKLogitsWarper(9), TopPLogitsWarper(0.8)],
        ),
    ],
)
def test_tokens_are_left_out_as_by_transformers(values, warpers):
    logits_BV = torch.randn(64, 320, generator=torch.Generator().manual_seed(0)) * 3
    slots = np.zeros(64, SLOT)
    slots["top_p"] = 1
    for key, value in values.items():
        slots[key][1::2] = value  # every other row has no parameters: it keeps all of its tokens
    probs_BV = truncated(logits_BV.softmax(-1), slots)
    for warper in warpers:
        logits_BV = torch.cat([logits_BV[::2], warper(None, logits_BV[1::2])]).view(2, 32, -1).transpose(0, 1)
        logits_BV = logits_BV.reshape(64, -1)
    torch.testing.assert_close(probs_BV / probs_BV.sum(-1, keepdim=True), logits_BV.softmax(-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("scale", [0.5, 2, 5, 8])
def test_top_p_is_the_same_whether_few_or_all_tokens_are_sorted(scale):
    """In flat and in peaked rows, with ties, beside rows with other parameters."""
    rng, count = np.random.default_rng(0), 64
    logits_BV = torch.from_numpy(rng.normal(0, scale, (count, 5000))).float()
    logits_BV[:, 100:110] = logits_BV[:, 50:51]
    slots = np.zeros(count, SLOT)
    slots["temperature"], slots["index"] = 1, np.arange(count)
    slots["top_p"] = rng.choice([1, 0.3, 0.8, 0.95], count)
    slots["seed"] = rng.integers(0, 2**60, count)
    slots["top_k"] = rng.choice([0, 0, 0, 5], count)
    slots["min_p"] = rng.choice([0, 0, 0, 0.1], count)
    few = sample(logits_BV, slots)
    kept_BV = truncated(logits_BV.softmax(-1), slots).log()
    slots["top_p"], slots["top_k"], slots["min_p"] = 1, 0, 0
    all_kept = sample(kept_BV, slots)
    assert few.tokens == all_kept.tokens


async def test_tokens_that_are_left_out_are_not_sampled(model):
    cases = [{"top_k": 3}, {"min_p": 0.3}, {"top_k": 1}, {"top_k": 5, "top_p": 0.5}]
    async with running(model) as engine:
        asked = [params(seed, 40, top_logprobs=5, **case) for case in cases for seed in range(4)]
        completions = await engine.complete(asks(PROMPT, asked))
    for each, completion in zip(asked, completions, strict=True):
        for token in completion.tokens:
            assert token.logprob >= token.top[0][1] + math.log(each.min_p or 1e-30)
            assert not each.top_k or token.id in [v for v, _ in token.top[: each.top_k]]


@pytest.mark.slow
async def test_parameters_do_not_affect_other_requests(model):
    """Each gets what it gets alone, and again by its seed."""
    rng = random.Random(3)
    plain = [params(seed, 30, temperature=rng.choice([0, 1.0])) for seed in range(6)]
    grammar = Grammar("regex", "[a-z ]{0,40}")
    options = [{"top_k": 4}, {"min_p": 0.2}, *(options for options, _ in SHAPING.values())]
    shaped = [params(seed, 30, **each) for seed, each in enumerate(options)]
    shaped.append(params(9, 30, grammar=grammar, ignore_eos=False))
    async with running(model) as engine:
        alone = [pairs((await engine.complete(asks(PROMPT, [each])))[0]) for each in plain + shaped]
        together = await engine.complete(asks(PROMPT, plain + shaped))
    assert [*map(pairs, together)] == alone
    assert len({tuple(token for token, _ in each) for each in alone[len(plain) :]}) == len(shaped)


async def test_stop_token_ids_end_a_completion_and_are_not_in_its_text(model):
    async with running(model) as engine:
        (whole,) = await engine.complete(asks(PROMPT, [params(1, 40)]))
        end = whole.tokens.ids[20]
        first = whole.tokens.ids.index(end)
        options = {"stop_token_ids": frozenset({end})}
        (ended,) = await engine.complete(asks(PROMPT, [params(1, 40, **options)]))
        (later,) = await engine.complete(asks(PROMPT, [params(1, 40, min_tokens=40, **options)]))
        streamed = [delta async for _, delta in engine.stream(asks(PROMPT, [params(1, 40, **options)]))]
    assert (ended.tokens.ids, ended.finish_reason) == (whole.tokens.ids[: first + 1], "stop")
    assert (ended.stop_reason, later.stop_reason) == (end, None)
    assert ended.text == engine.tokenizer.decode(whole.tokens.ids[:first])
    assert "".join(delta.text for delta in streamed) == ended.text
    assert end not in later.tokens.ids
    assert (len(later.tokens), later.finish_reason) == (40, "length")


def test_bad_words_are_tokenized_as_by_vllm():
    assert bad_word_ids(["e", " ab"], TOKENIZER) == [(*ids("e"),), (*ids("ab"),)]

    # A tokenizer with a token for a word after a space: both are left out.
    class Words:
        def encode(self, text, special):
            return {"no": [1], " no": [2], "not so": [3, 4], " not so": [5, 6, 4]}[text]

    assert bad_word_ids(["no", " not so"], Words()) == [(1,), (2,), (3, 4)]


@pytest.mark.parametrize("packed", slow_but([True], [False, True]))
@pytest.mark.parametrize("chunk_tokens", slow_after(1, [7, 10_000]))
async def test_the_learner_has_the_log_probabilities_that_were_sampled(model, packed, chunk_tokens):
    """Of rows with several completions, with and without parameters, in one micro-batch."""
    grammar = Grammar("json", '{"type": "array", "items": {"type": "integer"}, "maxItems": 3}')
    options = [{}, {"grammar": grammar, "ignore_eos": False}]
    options += [each for name, (each, _) in SHAPING.items() if name not in ("repetition_penalty", "all of them")]
    loaded, rows, expected = load_model(str(model), "cpu"), [], []
    async with running(loaded) as engine:
        for number, each in enumerate(options):
            asked = params(number, 20, temperature=1.4, **each)
            (first,) = await engine.complete(asks(PROMPT, [asked]))
            prompt = PROMPT + first.tokens.ids + ids(" and")
            (second,) = await engine.complete(asks(prompt, [asked]))
            tokens = np.array(prompt + second.tokens.ids, np.int32)
            starts = (len(PROMPT), first), (len(prompt), second)
            positions = np.concatenate([np.arange(at, at + len(output.tokens)) for at, output in starts])
            shaping = shaping_text({name: getattr(asked, name) for name in NAMES})
            rows.append(Row(tokens, positions.astype(np.int32), temperature=1.4, shaping=shaping))
            expected.append(first.tokens.logprobs + second.tokens.logprobs)
    loaded.module.requires_grad_(True)
    compute = LogprobComputer(loaded, chunk_elements=chunk_tokens * loaded.vocab_size)
    batch = collate(rows, loaded.device, packed=packed)
    logprobs_BK = batch.to_rows(compute(loaded.module, batch).logprobs_N)
    for row, logprobs in zip(logprobs_BK.tolist(), expected, strict=True):
        assert row[: len(logprobs)] == pytest.approx(logprobs, abs=1e-5)
    logprobs_BK.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in loaded.module.parameters())


def test_a_row_with_tokens_that_its_request_does_not_allow_fails_the_job(model):
    loaded = load_model(str(model), "cpu")
    shaping = shaping_text(
        {name: getattr(SamplingParams(0, 0), name) for name in NAMES} | {"grammar": Grammar("regex", "[ab]+")}
    )
    row = Row(np.array(PROMPT + ids("abc"), np.int32), np.arange(len(PROMPT), len(PROMPT) + 3), shaping=shaping)
    with pytest.raises(JobFailed, match=r"token 2 of a completion is \d+, which its request does not allow"):
        LogprobComputer(loaded)(loaded.module, collate([row], loaded.device))

"""Whether a vLLM server has the model of this process, and returns what training needs."""

import asyncio
import math

import torch
from torch import nn

from insitu.backend.compute import ComputeThread
from insitu.backend.inference.sampler import Completion, SamplingParams
from insitu.backend.model import LoadedModel
from insitu.errors import BackendError, BackendUnavailable, RequestRefused
from insitu.integrations.vllm.replica import LOAD_SECONDS, Replica, request_body, sampled_tokens

_TOKENS = 16
_TEMPERATURE = 2.0
"""Not 1, so that log-probabilities after temperature differ from the model's own."""
_TOLERANCES = {torch.float32: 0.01}
_WEIGHT_TOLERANCES = {torch.float32: 0.001}
"""Smaller: a training job changes little."""
_TOLERANCE = 0.25
"""Mean difference in nats for 16-bit weights, whose rounding depends on the kernels."""


async def check_answers(replica: Replica, model: str, loaded: LoadedModel, compute: ComputeThread) -> None:
    """Compares the log-probabilities of a completion with those computed here. Raises BackendError if they differ."""
    last = min(max(loaded.tokenizer.get_vocab().values()), loaded.vocab_size - 1)
    prompt = [last, *range(min(8, last))]
    params = SamplingParams(seed=0, max_tokens=_TOKENS, temperature=_TEMPERATURE, ignore_eos=True)
    body = request_body(model, Completion(prompt, params), (), stream=False)
    try:
        async with asyncio.timeout(LOAD_SECONDS):
            answer = await replica.generate(body)
    except RequestRefused as error:
        raise BackendError(f"{replica.name} has another vocabulary or model than {loaded.source}: {error}") from None
    except TimeoutError:
        raise BackendUnavailable(f"{replica.name} has not answered within {LOAD_SECONDS:g} s") from None
    tokens = sampled_tokens(answer["choices"][0], 0)
    ids = [token.id for token in tokens]
    if not ids:
        raise BackendError(f"{replica.name} returns no tokens with log-probabilities: start it with --max-logprobs 21")
    if max(ids) >= loaded.vocab_size:
        problem = f"it has sampled token {max(ids)}, but that of {loaded.source} ends at {loaded.vocab_size - 1}"
        raise BackendError(f"{replica.name} has another vocabulary: {problem}")
    sampled = [token.logprob for token in tokens]
    own, tempered = await compute.call(_logprobs, loaded, prompt, ids)
    tolerance = _TOLERANCES.get(loaded.dtype, _TOLERANCE)
    if (gap := _mean_gap(sampled, own)) <= tolerance:
        return
    if _mean_gap(sampled, tempered) <= tolerance:
        problem = "returns log-probabilities after temperature: start it with --logprobs-mode raw_logprobs"
        raise BackendError(f"{replica.name} {problem}")
    problem = f"the log-probabilities of its samples differ by {gap:.2g} on average (allowed: {tolerance:g})"
    raise BackendError(f"{replica.name} has another model than {loaded.source}: {problem}")


def fingerprint(loaded: LoadedModel, module: nn.Module) -> list[float]:
    """Log-probabilities of a fixed text by some weights of the loaded model. Runs in the compute thread."""
    tokens = torch.tensor([_text(loaded)], device=loaded.device)
    with torch.inference_mode():
        logprobs_TV = torch.log_softmax(module(input_ids=tokens, use_cache=False).logits[0, :-1].float(), -1)
    return logprobs_TV.gather(-1, tokens[0, 1:, None])[:, 0].tolist()


async def compare_weights(replica: Replica, model: str, loaded: LoadedModel, expected: list[float]) -> None:
    """Compares the weights of a model with those of a fingerprint. Raises BackendError if they differ."""
    text = _text(loaded)
    params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
    async with asyncio.timeout(LOAD_SECONDS):
        answer = await replica.generate({"model": model, "token_ids": text, "sampling_params": params})
    found = [entry[str(token)]["logprob"] for token, entry in zip(text[1:], answer["prompt_logprobs"][1:], strict=True)]
    tolerance = _WEIGHT_TOLERANCES.get(loaded.dtype, _TOLERANCE)
    if (gap := _mean_gap(found, expected)) > tolerance:
        problem = f"log-probabilities differ by {gap:.2g} on average (allowed: {tolerance:g})"
        if getattr(loaded.module.config, "tie_word_embeddings", False):
            problem += "; vLLM may have kept the output layer, as the embeddings are tied: train with lora"
        raise BackendError(f"{replica.name} computes with other weights than it was given: {problem}")


def _text(loaded: LoadedModel) -> list[int]:
    return [index * 7919 % loaded.vocab_size for index in range(1, min(32, loaded.max_length))]


def _logprobs(loaded: LoadedModel, prompt: list[int], ids: list[int]) -> tuple[list[float], list[float]]:
    """Log-probabilities of the tokens `ids` after the prompt, before and after temperature."""
    tokens = torch.tensor([prompt + ids], device=loaded.device)
    with torch.inference_mode():
        logits_TV = loaded.module(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    chosen_T1 = tokens[0, len(prompt) :, None]
    own, tempered = (
        torch.log_softmax(logits_TV / temperature, -1).gather(-1, chosen_T1)[:, 0].tolist()
        for temperature in (1.0, _TEMPERATURE)
    )
    return own, tempered


def _mean_gap(one: list[float], other: list[float]) -> float:
    return math.fsum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)

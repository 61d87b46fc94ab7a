"""Whether a vLLM server has the model of this process, and returns what training needs."""

import asyncio
import math
from collections.abc import Callable

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


class Probe:
    """Compares servers with the loaded model, by what both compute."""

    def __init__(self, loaded: LoadedModel, compute: ComputeThread) -> None:
        self._loaded = loaded
        self._compute = compute
        self._text = [index * 7919 % loaded.vocab_size for index in range(1, min(32, loaded.max_length))]

    async def check_answers(self, replica: Replica, model: str) -> None:
        """Raises BackendError if the log-probabilities of a completion differ from those computed here."""
        loaded, name = self._loaded, replica.name
        last = min(max(loaded.tokenizer.get_vocab().values()), loaded.vocab_size - 1)
        prompt = [last, *range(min(8, last))]
        params = SamplingParams(seed=0, max_tokens=_TOKENS, temperature=_TEMPERATURE, ignore_eos=True)
        body = request_body(model, Completion(prompt, params), frozenset(), stream=False)
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                answer = await replica.generate(body)
        except RequestRefused as error:
            raise BackendError(f"{name} has another vocabulary or model than {loaded.source}: {error}") from None
        except TimeoutError:
            raise BackendUnavailable(f"{name} has not answered within {LOAD_SECONDS:g} s") from None
        tokens = sampled_tokens(answer["choices"][0], 0)
        ids, sampled = tokens.ids, tokens.logprobs
        if not ids:
            raise BackendError(f"{name} returns no tokens with log-probabilities: start it with --max-logprobs 21")
        if max(ids) >= loaded.vocab_size:
            problem = f"it has sampled token {max(ids)}, but that of {loaded.source} ends at {loaded.vocab_size - 1}"
            raise BackendError(f"{name} has another vocabulary: {problem}")
        own, tempered = await self._compute.call(_logprobs, loaded, loaded.module, prompt, ids)
        tolerance = _TOLERANCES.get(loaded.dtype, _TOLERANCE)
        if (gap := _mean_gap(sampled, tempered)) <= tolerance:
            return
        if _mean_gap(sampled, own) <= tolerance:
            problem = "returns log-probabilities before temperature: start it with --logprobs-mode processed_logprobs"
            raise BackendError(f"{name} {problem}")
        problem = f"the log-probabilities of its samples differ by {gap:.2g} on average (allowed: {tolerance:g})"
        raise BackendError(f"{name} has another model than {loaded.source}: {problem}")

    async def fingerprint(self, load: Callable[[], nn.Module]) -> list[float]:
        """Log-probabilities of a fixed text by some weights of the loaded model."""
        return (await self._compute.call(lambda: _logprobs(self._loaded, load(), self._text[:1], self._text[1:])))[0]

    async def compare_weights(self, replica: Replica, model: str, expected: list[float]) -> None:
        """Compares the weights of a model with those of a fingerprint. Raises BackendError if they differ."""
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        async with asyncio.timeout(LOAD_SECONDS):
            answer = await replica.generate({"model": model, "token_ids": self._text, "sampling_params": params})
        entries = zip(self._text[1:], answer["prompt_logprobs"][1:], strict=True)
        gap = _mean_gap([entry[str(token)]["logprob"] for token, entry in entries], expected)
        tolerance = _WEIGHT_TOLERANCES.get(self._loaded.dtype, _TOLERANCE)
        if gap > tolerance:
            problem = f"log-probabilities differ by {gap:.2g} on average (allowed: {tolerance:g})"
            if getattr(self._loaded.module.config, "tie_word_embeddings", False):
                problem += "; vLLM may have kept the output layer, as the embeddings are tied: train with lora"
            raise BackendError(f"{replica.name} computes with other weights than it was given: {problem}")


def _logprobs(
    loaded: LoadedModel, module: nn.Module, prompt: list[int], ids: list[int]
) -> tuple[list[float], list[float]]:
    """Log-probabilities of the tokens `ids` after the prompt, before and after temperature."""
    tokens = torch.tensor([prompt + ids], device=loaded.device)
    with torch.inference_mode():
        logits_TV = module(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    chosen_T1 = tokens[0, len(prompt) :, None]
    own, tempered = (
        torch.log_softmax(logits_TV / temperature, -1).gather(-1, chosen_T1)[:, 0].tolist()
        for temperature in (1.0, _TEMPERATURE)
    )
    return own, tempered


def _mean_gap(one: list[float], other: list[float]) -> float:
    return math.fsum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)

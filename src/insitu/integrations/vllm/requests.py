"""The bodies of vLLM's `/inference/v1/generate`, which takes and returns token ids."""

from collections.abc import Iterable
from typing import Any

from insitu.backend.inference.sampler import GREEDY_TEMPERATURE, LOGITS_NOT_FINITE, Completion, SampledToken
from insitu.errors import BackendError, BackendUnavailable

_MAX_SEED = 2**63 - 1
_NOT_FINITE = -9999.0
"""What vLLM writes for a log-probability that is not a number."""


def request_body(model: str, completion: Completion, eos_token_ids: Iterable[int], stream: bool) -> dict[str, Any]:
    """Token ids that end a turn are ours: vLLM's own (`ignore_eos`) are those of its generation config."""
    params = completion.params
    return {
        "model": model,
        "token_ids": completion.prompt,
        "stream": stream,
        "sampling_params": {
            "seed": params.seed & _MAX_SEED,
            "max_tokens": params.max_tokens,
            "min_tokens": min(params.min_tokens, params.max_tokens),
            "temperature": 0.0 if params.temperature < GREEDY_TEMPERATURE else params.temperature,
            "top_p": params.top_p,
            "ignore_eos": True,
            "stop_token_ids": [] if params.ignore_eos else sorted(eos_token_ids),
            # vLLM counts the sampled token among these, wherever it ranks.
            "logprobs": params.top_logprobs + 1 if params.top_logprobs else 0,
            "detokenize": False,
        },
    }


def sampled_tokens(choice: dict[str, Any], num_top_logprobs: int) -> list[SampledToken]:
    """The tokens of a choice, or of its part in an event, with the model's own log-probabilities."""
    content = (choice.get("logprobs") or {}).get("content") or []
    ids = choice.get("token_ids") or []
    if len(content) != len(ids):
        raise BackendUnavailable(f"vLLM returned {len(ids)} tokens with {len(content)} log-probabilities")
    tokens = []
    for token_id, entry in zip(ids, content, strict=True):
        if entry["logprob"] <= _NOT_FINITE:
            raise BackendError(LOGITS_NOT_FINITE)
        top = None
        if num_top_logprobs:
            ranked = sorted((each for each in entry["top_logprobs"] if each["rank"]), key=lambda each: each["rank"])
            top = [(each["token_id"], each["logprob"]) for each in ranked if each["rank"] <= num_top_logprobs]
        tokens.append(SampledToken(token_id, entry["logprob"], top))
    return tokens


def weight_tags(choice: dict[str, Any]) -> set[str]:
    """The versions of the full weights that a finished choice was sampled from; empty if vLLM does not say."""
    return {span["version"] for span in choice.get("weight_versions") or ()}

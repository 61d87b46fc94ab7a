"""Log-probabilities and entropies of trained tokens, under the weights being trained or a reference.

Shapes: S distinct sequences, T input tokens of the longest, N trained tokens of all sequences, D hidden size, V
vocab_size.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from insitu.backend.learner.batches import MicroBatch, Row, collate
from insitu.backend.model import LoadedModel, has_sliding_window

logger = logging.getLogger(__name__)

CHUNK_ELEMENTS = 1 << 26
"""Maximum logits (N x V) computed together where only trained positions are projected; more are computed in chunks and
recomputed in the backward pass."""
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on the length of the input, which a shared prompt changes."""


class TokenLogprobs(NamedTuple):
    logprobs_N: Tensor
    entropy_N: Tensor
    """Entropy of each token's distribution, in nats; without gradient."""


class LogprobComputer:
    """Computes log-probabilities under the policy or the reference model (the starting weights).

    Most models end in a linear LM head. If a test forward pass confirms that, only the positions of trained tokens are
    projected; otherwise (logit softcapping or scaling) all positions are.
    """

    def __init__(self, loaded: LoadedModel, chunk_elements: int = CHUNK_ELEMENTS) -> None:
        self._module, self._device, self._dtype = loaded.module, loaded.device, loaded.dtype
        self._vocab_size = loaded.vocab_size
        self._chunk_tokens = max(1, chunk_elements // loaded.vocab_size)
        self.can_project_selected = self._probe_projection(loaded.module)

    def __call__(self, module: nn.Module, batch: MicroBatch) -> TokenLogprobs:
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            inputs = {"input_ids": batch.input_ids_ST, **_context(module, batch)}
            if not self.can_project_selected:
                logits_STV = module(**inputs).logits
                logits_NV = logits_STV.flatten(0, 1)[batch.logit_positions_N]
                return _token_logprobs(logits_NV, batch.targets_N, batch.temperature_N)
            body, head = _parts(module)
            assert head is not None  # the test forward pass used it
            hidden_STD = body(**inputs).last_hidden_state
            hidden_ND = hidden_STD.flatten(0, 1).index_select(0, batch.logit_positions_N)
            return _in_chunks(head, self._chunk_tokens, hidden_ND, batch)

    @torch.no_grad()
    def of_text(self, module: nn.Module, token_ids: Sequence[int]) -> list[float]:
        """The log-probability of each token but the first, given those before it."""
        if len(token_ids) < 2:
            return []
        row = Row(np.array(token_ids, np.int32), np.arange(1, len(token_ids)))
        logprobs: list[float] = self(module, collate([row], self._device)).logprobs_N.tolist()
        return logprobs

    @functools.cached_property
    def can_share_prompts(self) -> bool:
        """Whether sequences can go on from a common prompt: a test forward pass gives the same log-probabilities.

        Not with a sliding window, which would count the padding after a prompt.
        """
        config: Any = self._module.config
        rope = str(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
        if has_sliding_window(config) or any(kind in rope for kind in LENGTH_DEPENDENT_ROPE):
            return False
        tokens = (np.arange(16, dtype=np.int32) * 7 + 3) % self._vocab_size
        rows = [
            Row(np.concatenate([tokens[:length], tokens[start:]]), np.arange(length, length + 3))
            for length, start in ((8, 8), (8, 10), (3, 9), (3, 11))
        ]
        try:
            shared, plain = (self._probe_logprobs(rows, share_prompts) for share_prompts in (True, False))
        except Exception as error:  # models without a key-value cache fail in their own ways; they share nothing
            logger.info("prompts are not shared: %s: %s", type(error).__name__, error)
            return False
        tolerance = 1e-3 if self._dtype == torch.float32 else 0.1
        return torch.allclose(shared, plain, rtol=0, atol=tolerance)

    @torch.no_grad()
    def _probe_logprobs(self, rows: list[Row], share_prompts: bool) -> Tensor:
        batch = collate(rows, self._device, share_prompts=share_prompts)
        return batch.to_rows(self(self._module, batch).logprobs_N)

    @torch.no_grad()
    def _probe_projection(self, module: nn.Module) -> bool:
        body, head = _parts(module)
        input_ids_ST = torch.arange(min(8, self._vocab_size), device=self._device)[None]
        hidden = getattr(body(input_ids=input_ids_ST, use_cache=False), "last_hidden_state", None)
        if hidden is None or head is None:  # another architecture
            return False
        return torch.equal(head(hidden), module(input_ids=input_ids_ST, use_cache=False).logits)


class PolicyForward(nn.Module):
    """The policy's forward pass as one module, in which sharded weights are available."""

    def __init__(self, module: nn.Module, compute: LogprobComputer) -> None:
        super().__init__()
        self.policy = module
        self._compute = compute

    def forward(self, batch: MicroBatch) -> TokenLogprobs:
        logprobs_N, entropy_N = self._compute(self.policy, batch)
        return TokenLogprobs(logprobs_N.clone(), entropy_N)  # FSDP's hooks get lost on a view


def _context(module: nn.Module, batch: MicroBatch) -> dict[str, Any]:
    """What the sequences go on from: the keys and values of their prompts, through which gradients flow."""
    if batch.prompts is None:
        return {"use_cache": False}
    prompts = batch.prompts
    body, _ = _parts(module)
    cache = body(input_ids=prompts.input_ids_GP, use_cache=True).past_key_values
    cache.reorder_cache(prompts.prompt_index_S)
    return {
        "past_key_values": cache,
        "attention_mask": prompts.attention_mask_SL,
        "position_ids": prompts.position_ids_ST,
        "use_cache": True,
    }


def _parts(module: nn.Module) -> tuple[nn.Module, nn.Module | None]:
    """The transformer body, which returns hidden states, and the LM head."""
    if hasattr(module, "get_base_model"):  # PEFT: LoRA adapters live inside the base model's layers
        module = module.get_base_model()  # type: ignore[operator]
    return module.base_model, module.get_output_embeddings()  # type: ignore[return-value, operator]


def _in_chunks(head: nn.Module, size: int, hidden_ND: Tensor, batch: MicroBatch) -> TokenLogprobs:
    def project(hidden_ND: Tensor, targets_N: Tensor, temperature_N: Tensor | None) -> TokenLogprobs:
        return _token_logprobs(head(hidden_ND), targets_N, temperature_N)

    count = len(batch.targets_N)
    if count <= size:
        return project(hidden_ND, batch.targets_N, batch.temperature_N)
    parts = [slice(start, start + size) for start in range(0, count, size)]
    temperatures = [None if batch.temperature_N is None else batch.temperature_N[part] for part in parts]
    chunks = [
        checkpoint(project, hidden_ND[part], batch.targets_N[part], temperature_N, use_reentrant=False)
        for part, temperature_N in zip(parts, temperatures, strict=True)
    ]
    return TokenLogprobs(*(torch.cat(values) for values in zip(*chunks, strict=True)))


def _token_logprobs(logits_NV: Tensor, targets_N: Tensor, temperature_N: Tensor | None) -> TokenLogprobs:
    """The log-probabilities of the distribution sampled from: the logits are divided by the temperature."""
    logits_NV = logits_NV.float()
    if temperature_N is not None:
        logits_NV = logits_NV / temperature_N[:, None]
    logprobs_NV = logits_NV.log_softmax(-1)
    with torch.no_grad():
        entropy_N = torch.special.entr(logprobs_NV.exp()).sum(-1)
    return TokenLogprobs(logprobs_NV.gather(-1, targets_N[:, None]).squeeze(-1), entropy_N)

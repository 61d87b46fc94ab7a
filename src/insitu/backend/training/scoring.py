"""Log-probabilities of selected tokens under a causal language model, in float32 and bounded memory.

Shapes: S sequences, T tokens, N scored tokens, D hidden size, V vocab_size.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from insitu.backend.model import LoadedModel
from insitu.backend.training.batches import MicroBatch

CHUNK_ELEMENTS = 1 << 26
"""Logits (N x V) held in memory; beyond this they are computed in chunks, and recomputed for the gradient."""


class Scores(NamedTuple):
    logprobs_N: Tensor
    entropy_N: Tensor
    """Entropy of each token's distribution, in nats; without gradient."""


class Scorer:
    """Scores micro-batches under the policy or the starting weights.

    Most models end in a linear projection to the vocabulary. If a probe confirms that for the loaded model, only scored
    positions are projected; if the model does more (soft caps, scales), all positions are.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._device, self._dtype = loaded.device, loaded.dtype
        self._vocab_size = loaded.vocab_size
        self._ends_in_projection = self._probe_projection(loaded.module)

    def __call__(self, module: nn.Module, batch: MicroBatch) -> Scores:
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            if not self._ends_in_projection:
                logits_STV = module(input_ids=batch.tokens_ST, use_cache=False).logits
                return _score(logits_STV.flatten(0, 1)[batch.predecessors_N], batch.targets_N)
            body, head = _parts(module)
            hidden_STD = body(input_ids=batch.tokens_ST, use_cache=False).last_hidden_state
            hidden_ND = hidden_STD.flatten(0, 1).index_select(0, batch.predecessors_N)
            return _in_chunks(head, self._vocab_size, hidden_ND, batch.targets_N)

    @torch.no_grad()
    def _probe_projection(self, module: nn.Module) -> bool:
        body, head = _parts(module)
        tokens_ST = torch.arange(min(8, self._vocab_size), device=self._device)[None]
        hidden = getattr(body(input_ids=tokens_ST, use_cache=False), "last_hidden_state", None)
        if hidden is None or head is None:  # another architecture
            return False
        return torch.equal(head(hidden), module(input_ids=tokens_ST, use_cache=False).logits)


def _parts(module: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The transformer body, which returns hidden states, and the projection to the vocabulary."""
    if hasattr(module, "get_base_model"):  # adapters are inside the layers of the base model
        module = module.get_base_model()  # type: ignore[operator]
    return module.base_model, module.get_output_embeddings()  # type: ignore[return-value, operator]


def _in_chunks(head: nn.Module, vocab_size: int, hidden_ND: Tensor, targets_N: Tensor) -> Scores:
    def score(hidden_ND: Tensor, targets_N: Tensor) -> Scores:
        return _score(head(hidden_ND), targets_N)

    size = max(1, CHUNK_ELEMENTS // vocab_size)
    if len(targets_N) <= size:
        return score(hidden_ND, targets_N)
    parts = [
        checkpoint(score, hidden, targets, use_reentrant=False)
        for hidden, targets in zip(hidden_ND.split(size), targets_N.split(size), strict=True)
    ]
    return Scores(*(torch.cat(values) for values in zip(*parts, strict=True)))


def _score(logits_NV: Tensor, targets_N: Tensor) -> Scores:
    log_NV = logits_NV.float().log_softmax(-1)
    with torch.no_grad():
        entropy_N = torch.special.entr(log_NV.exp()).sum(-1)
    return Scores(log_NV.gather(-1, targets_N[:, None]).squeeze(-1), entropy_N)

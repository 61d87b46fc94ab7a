"""Log-probabilities a causal language model gives to chosen tokens, in float32 and in bounded memory.

Shapes: S sequences, T tokens, N scored tokens, D hidden size, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from insitu.backend.model import LoadedModel
from insitu.backend.training.batches import MicroBatch

CHUNK_ELEMENTS = 1 << 26
"""Of the logits held at once (N x V); beyond it they are computed chunk by chunk, and again for the gradient."""


class Scores(NamedTuple):
    logprobs_N: Tensor
    entropy_N: Tensor
    """Of the distribution each token was one choice of, in nats; carries no gradient."""


class Scorer:
    """Scores micro-batches under a model of the loaded kind: the policy or the starting weights.

    Most models end in a plain projection to the vocabulary. Where the loaded one does, which is tried out once, only
    the positions that are asked for are projected; where it does more (soft caps, scales), all positions are.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._device, self._dtype = loaded.device, loaded.dtype
        self._vocabulary = loaded.vocabulary
        self._ends_in_projection = self._try(loaded.module)

    def __call__(self, module: nn.Module, batch: MicroBatch) -> Scores:
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            if not self._ends_in_projection:
                logits_STV = module(input_ids=batch.tokens_ST, use_cache=False).logits
                return _score(logits_STV.flatten(0, 1)[batch.predecessors_N], batch.targets_N)
            body, head = _parts(module)
            hidden_STD = body(input_ids=batch.tokens_ST, use_cache=False).last_hidden_state
            hidden_ND = hidden_STD.flatten(0, 1).index_select(0, batch.predecessors_N)
            return _in_chunks(head, self._vocabulary, hidden_ND, batch.targets_N)

    @torch.no_grad()
    def _try(self, module: nn.Module) -> bool:
        body, head = _parts(module)
        tokens_ST = torch.arange(min(8, self._vocabulary), device=self._device)[None]
        hidden = getattr(body(input_ids=tokens_ST, use_cache=False), "last_hidden_state", None)
        if hidden is None or head is None:  # an architecture with other parts
            return False
        return torch.equal(head(hidden), module(input_ids=tokens_ST, use_cache=False).logits)


def _parts(module: nn.Module) -> tuple[nn.Module, nn.Module]:
    """A causal language model's body, which ends in hidden states, and its projection to the vocabulary."""
    if hasattr(module, "get_base_model"):  # adapters sit inside the layers of the model they are for
        module = module.get_base_model()  # type: ignore[operator]
    return module.base_model, module.get_output_embeddings()  # type: ignore[return-value, operator]


def _in_chunks(head: nn.Module, vocabulary: int, hidden_ND: Tensor, targets_N: Tensor) -> Scores:
    def score(hidden_ND: Tensor, targets_N: Tensor) -> Scores:
        return _score(head(hidden_ND), targets_N)

    size = max(1, CHUNK_ELEMENTS // vocabulary)
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

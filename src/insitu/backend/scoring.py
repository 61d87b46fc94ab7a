"""Log-probabilities a causal language model gives to chosen tokens, in float32 and in bounded memory.

Shapes: S sequences, T tokens, N scored tokens, D hidden size, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from insitu.backend.batches import MicroBatch
from insitu.backend.model import LoadedModel

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
        self._vocabulary = 0
        self._ends_in_projection = self._try(loaded.module)

    def __call__(self, module: nn.Module, batch: MicroBatch) -> Scores:
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            if not self._ends_in_projection:
                logits_STV = module(input_ids=batch.tokens_ST, use_cache=False).logits
                return _score(logits_STV.flatten(0, 1)[batch.predecessors_N], batch.targets_N)
            head = module.get_output_embeddings()  # type: ignore[operator]
            hidden_ND = _hidden(module, head, batch.tokens_ST).flatten(0, 1).index_select(0, batch.predecessors_N)
            return _in_chunks(head, self._vocabulary, hidden_ND, batch.targets_N)

    @torch.no_grad()
    def _try(self, module: nn.Module) -> bool:
        head = module.get_output_embeddings()  # type: ignore[operator]
        if head is None:  # an architecture with another end
            return False
        projected: list[Tensor] = []
        handle = head.register_forward_hook(lambda _module, _args, output: projected.append(output))
        try:
            logits = module(input_ids=torch.arange(8, device=self._device)[None], use_cache=False).logits
        finally:
            handle.remove()
        self._vocabulary = logits.shape[-1]
        return len(projected) == 1 and torch.equal(projected[0], logits)


def _hidden(module: nn.Module, head: nn.Module, tokens_ST: Tensor) -> Tensor:
    """What goes into the projection (S, T, D); the projection itself is spared all but one position."""
    caught: list[Tensor] = []

    def catch(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        caught.append(args[0])
        return (args[0][:1, :1].detach(),)

    handle = head.register_forward_pre_hook(catch)
    try:
        module(input_ids=tokens_ST, use_cache=False)
    finally:
        handle.remove()
    return caught[0]


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

"""Log-probabilities and entropies of trained tokens, under the weights being trained or a reference.

Shapes: S sequences, T input tokens of the longest, N distinct trained tokens, D hidden size, V vocab_size.
"""

import functools
import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from insitu.algorithms.memory_budget import CHUNK_LOGITS
from insitu.backend.attention import attend_as_before, attend_to_trees, sliding_window, stateful_layers, text_config
from insitu.backend.learner.batches import MicroBatch, Ranks, Row, collate, pad
from insitu.backend.learner.logit_offsets import LogitOffsets
from insitu.backend.model import LoadedModel

logger = logging.getLogger(__name__)

CHUNK_ELEMENTS = 1 << 26
"""Maximum logits (N x V) computed together where only trained positions are projected; more are computed in chunks and
recomputed in the backward pass; on a CPU it is less."""
FLOAT32_TOLERANCE, NOISE_FACTOR = 2e-4, 4.0
"""Maximum difference of a log-probability between packed and padded rows, in nats; with fewer bits, as a multiple of
the dtype's noise: each layer rounds another sum, so that it adds up to more than that of the padding."""
LEAST_LOGPROB = -1e4
"""Below it, tokens do not count in an entropy: their probability is 0."""
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on the longest position of the input."""


class TokenLogprobs(NamedTuple):
    logprobs_N: Tensor
    entropy_N: Tensor
    """Entropy of each token's distribution, in nats; without gradient."""


class LogprobComputer:
    """Computes log-probabilities under the policy or the reference model (the starting weights).

    Most models end in a linear LM head. If a test forward pass confirms that, only the positions of trained tokens are
    projected; otherwise (logit softcapping or scaling) all positions are.
    """

    def __init__(self, loaded: LoadedModel, chunk_elements: int | None = None) -> None:
        self._module, self._device, self._dtype = loaded.module, loaded.device, loaded.dtype
        self._vocab_size = loaded.vocab_size
        most = chunk_elements or (CHUNK_LOGITS if self._device.type == "cpu" else CHUNK_ELEMENTS)
        self._chunk_tokens = max(1, most // loaded.vocab_size)
        self._offsets = LogitOffsets(loaded)
        self.can_project_selected = self._probe_projection(loaded.module)
        self.window = sliding_window(text_config(loaded.module))
        """Length of the longest rows that a tree computes as the model does, whose window it ignores."""

    def __call__(self, module: nn.Module, batch: MicroBatch) -> TokenLogprobs:
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            inputs = _inputs(batch)
            body, head = _parts(module)
            if batch.tree is not None:
                attend_to_trees(body)
            if not self.can_project_selected:
                logits_NV = module(**inputs).logits.flatten(0, 1)[batch.logit_positions_N]
                if batch.shaped:
                    logits_NV = self._offsets.add_to(logits_NV, batch.shaped, 0)
                return _token_logprobs(logits_NV, batch.targets_N, batch.temperature_N)
            assert head is not None  # the test forward pass used it
            hidden_ND = body(**inputs).last_hidden_state.flatten(0, 1).index_select(0, batch.logit_positions_N)
            return self._in_chunks(head, hidden_ND, batch)

    def _in_chunks(self, head: nn.Module, hidden_ND: Tensor, batch: MicroBatch) -> TokenLogprobs:
        def project(hidden_ND: Tensor, targets_N: Tensor, temperature_N: Tensor | None, first: int) -> TokenLogprobs:
            logits_NV = head(hidden_ND)
            if batch.shaped:
                logits_NV = self._offsets.add_to(logits_NV, batch.shaped, first)
            return _token_logprobs(logits_NV, targets_N, temperature_N)

        count, size = len(batch.targets_N), self._chunk_tokens
        if count <= size:
            return project(hidden_ND, batch.targets_N, batch.temperature_N, 0)
        parts = [slice(start, start + size) for start in range(0, count, size)]
        temperatures = [None if batch.temperature_N is None else batch.temperature_N[part] for part in parts]
        chunks = [
            checkpoint(project, hidden_ND[part], batch.targets_N[part], temperature_N, part.start, use_reentrant=False)
            for part, temperature_N in zip(parts, temperatures, strict=True)
        ]
        return TokenLogprobs(*(torch.cat(values) for values in zip(*chunks, strict=True)))

    @torch.no_grad()
    def of_text(self, module: nn.Module, token_ids: Sequence[int]) -> list[float]:
        """The log-probability of each token but the first, given those before it."""
        if len(token_ids) < 2:
            return []
        row = Row(np.array(token_ids, np.int32), np.arange(1, len(token_ids)))
        return self(module, collate([row], self._device)).logprobs_N.tolist()

    @functools.cached_property
    def can_pack(self) -> bool:
        """Whether rows can be packed into a prefix tree: a test forward pass gives the same log-probabilities."""
        if _depends_on_lengths(self._module) or stateful_layers(self._module):
            return False
        tokens = (np.arange(24, dtype=np.int32) * 7 + 3) % self._vocab_size
        ends = (tokens[:2], tokens[:7], np.concatenate([tokens[:7], tokens[:4]]), tokens[5:14])
        rows = [Row(np.concatenate([tokens[:12], end]), np.arange(10, 12 + len(end))) for end in ends]
        return self.packs_alike([*rows, Row(tokens[9:], np.arange(1, 9))])

    @torch.no_grad()
    def packs_alike(self, rows: list[Row]) -> bool:
        """Whether packed rows have the log-probabilities of padded ones, and `attend` those of `sdpa`, up to noise."""
        expected_BK = self._row_logprobs(rows)
        tolerance = FLOAT32_TOLERANCE if self._dtype == torch.float32 else NOISE_FACTOR * self._noise(rows, expected_BK)
        try:
            computed = (self._row_logprobs(rows, packed=packed) for packed in (True, False))
            alike = all(torch.allclose(each_BK, expected_BK, rtol=0, atol=tolerance) for each_BK in computed)
        except Exception as error:  # models that call attention functions otherwise fail in their own ways
            logger.info("rows are padded: %s: %s", type(error).__name__, error)
            alike = False
        if not alike:
            attend_as_before(_parts(self._module)[0])
        return alike

    def _row_logprobs(self, rows: Sequence[Row], *, packed: bool = False) -> Tensor:
        batch = collate(rows, self._device, packed=packed)
        return batch.to_rows(self(self._module, batch).logprobs_N)

    def _noise(self, rows: Sequence[Row], expected_BK: Tensor) -> float:
        """How much the dtype changes the log-probabilities of rows: with other padding, and by rounding logits."""
        shorter = sorted(range(len(rows)), key=lambda index: rows[index].input_length)[: max(1, len(rows) // 2)]
        again_BK = self._row_logprobs([rows[index] for index in shorter])
        by_padding = (again_BK - expected_BK[shorter, : again_BK.shape[1]]).abs().max().item()
        return max(by_padding, torch.finfo(self._dtype).eps * expected_BK.abs().max().item())

    @torch.no_grad()
    def _probe_projection(self, module: nn.Module) -> bool:
        body, head = _parts(module)
        input_ids_ST = torch.arange(min(8, self._vocab_size), device=self._device)[None]
        hidden = getattr(body(input_ids=input_ids_ST, use_cache=False), "last_hidden_state", None)
        if hidden is None or head is None:  # another architecture
            return False
        return torch.equal(head(hidden), module(input_ids=input_ids_ST, use_cache=False).logits)


class FixedLogprobs:
    """Log-probabilities of rows under weights that do not change during a job, each computed once."""

    def __init__(self) -> None:
        self._rows: dict[int, np.ndarray] = {}

    def get(self, indices: Sequence[int], device: torch.device) -> Tensor | None:
        """(B, K); None unless those of all rows are known."""
        known = [self._rows[index] for index in indices if index in self._rows]
        return pad(known).to(device) if len(known) == len(indices) else None

    def keep(self, indices: Sequence[int], logprobs_BK: Tensor, mask_BK: Tensor) -> None:
        for index, count, logprobs in zip(indices, mask_BK.sum(1).tolist(), logprobs_BK.cpu().numpy(), strict=True):
            self._rows[index] = logprobs[:count]

    def __contains__(self, index: int) -> bool:
        return index in self._rows

    def adopt(self, other: "FixedLogprobs", first: int) -> None:
        """Takes over the rows of a part of the job, which begins with row `first`."""
        self._rows |= {first + index: logprobs for index, logprobs in other._rows.items()}

    def forget(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._rows.pop(index, None)

    def merge(self, ranks: Ranks) -> None:
        self._rows = ranks.merge(self._rows)


class PolicyForward(nn.Module):
    """The policy's forward pass as one module, in which sharded weights are available."""

    def __init__(self, module: nn.Module, compute: LogprobComputer) -> None:
        super().__init__()
        self.policy = module
        self._compute = compute

    def forward(self, batch: MicroBatch) -> TokenLogprobs:
        logprobs_N, entropy_N = self._compute(self.policy, batch)
        return TokenLogprobs(logprobs_N.clone(), entropy_N)  # FSDP's hooks get lost on a view


def _depends_on_lengths(module: nn.Module) -> bool:
    """Whether results depend on the length of the input or a token's place in it, not only on position ids."""
    config = text_config(module)
    rope = str(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
    return any(kind in rope for kind in LENGTH_DEPENDENT_ROPE) or bool(getattr(config, "attention_chunk_size", None))


def _inputs(batch: MicroBatch) -> dict[str, Any]:
    inputs = {"input_ids": batch.input_ids_ST, "use_cache": False}
    if batch.tree is None:
        return inputs
    # Without a mask, transformers builds one of T x T; a 4-D mask it passes on unchanged, and a tree needs none.
    no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=batch.input_ids_ST.device)
    return inputs | {"position_ids": batch.position_ids_ST, "attention_mask": no_mask, "tree": batch.tree}


def _parts(module: nn.Module) -> tuple[Any, nn.Module | None]:
    """The transformer body, which returns hidden states, and the LM head."""
    if hasattr(module, "get_base_model"):  # PEFT: LoRA adapters live inside the base model's layers
        module = module.get_base_model()  # type: ignore[operator]
    return module.base_model, module.get_output_embeddings()  # type: ignore[operator]


def _token_logprobs(logits_NV: Tensor, targets_N: Tensor, temperature_N: Tensor | None) -> TokenLogprobs:
    """The log-probabilities of the distribution sampled from: the logits are divided by the temperature."""
    logits_NV = logits_NV.float()
    if temperature_N is not None:
        logits_NV = logits_NV / temperature_N[:, None]
    return TokenLogprobs(*_LogprobsAndEntropy.apply(logits_NV, targets_N))  # type: ignore[no-untyped-call]


class _LogprobsAndEntropy(torch.autograd.Function):
    """Saves one N x V tensor for the backward pass, the probabilities."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        logprobs_NV = logits_NV.log_softmax(-1)
        logprobs_N = logprobs_NV.gather(-1, targets_N[:, None]).squeeze(-1)
        probs_NV = logprobs_NV.exp()
        entropy_N = -logprobs_NV.clamp_(min=LEAST_LOGPROB).mul_(probs_NV).sum(-1)
        ctx.save_for_backward(probs_NV, targets_N)
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, gradient_N: Tensor, _: Tensor) -> tuple[Tensor, None]:
        probs_NV, targets_N = ctx.saved_tensors
        gradient_NV = probs_NV * -gradient_N[:, None]
        return gradient_NV.scatter_add_(1, targets_N[:, None], gradient_N[:, None]), None

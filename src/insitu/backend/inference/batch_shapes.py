"""Checks at the start: how a model is computed over stored keys and values, and in which batches.

Matrix kernels choose their blocking by the number of rows, so a row's last bits can depend on the batch size. With
MKL's strict reproducibility, which `insitu backend` asks for, they do not, and in bfloat16 not with packed weights (see
`backend.packed`). `BatchShapes` checks it once on the model itself; where it does not hold, only batch sizes that agree
are used, and if these are not all multiples of the least one, prompts are computed alone. So what a request samples
does not depend on the other requests in its batch.

MKL's kernels for AVX2, by experiment: products of fewer than four rows use another kernel, and so does a product of one
column for the rows after the last four. If a product has more columns than rows, threads split the columns, and one
with fewer than 16 of them uses another kernel; otherwise they split the rows. So results depend neither on other rows
nor on the number of threads if rows are a multiple of four, and each thread has at least 16 columns, or there are as
many rows as columns and four for each thread.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from insitu.backend.attention import stateful_layers, text_config
from insitu.backend.inference.batches import Span
from insitu.backend.inference.kv_pool import BLOCK, Block, Layout, Windows, tensors
from insitu.backend.inference.runner import Runner, next_span
from insitu.errors import BackendError

logger = logging.getLogger(__name__)

_LENGTHS = ("sliding_window", "attention_chunk_size")
_CHECKED_LENGTH = 8
_CHECKED_BYTES = 64 * 2**20
"""Maximum memory of the check's windows and logits."""
_FEW_ROWS = 32
"""The most that a step of a single sequence may have to compute."""
_WIDTH = 64
"""Positions of the windows in the check."""
_PROMPTS, _PART = 4, 5
"""Prompts that are checked, and by how many tokens each is longer than the one before."""
_ENDS = 20, 70
"""Tokens of other ends of two of them, after which attention is computed for more tokens."""

_Outcome = tuple[list[Block], Tensor]
"""The blocks of some prompts, and the logits after each."""


class BatchShapes:
    """How the versions of a model are computed.

    `attends_here` is that of `Runner`. Several prompts are computed in one forward pass if `packs_prompts`, or, in rows
    of the same length, if `pads_prompts`.
    """

    def __init__(self, module: nn.Module, max_rows: int, attends_here: bool, max_length: int) -> None:
        self.max_rows, self._max_length = max_rows, max_length
        self.attends_here = attends_here
        self.layout: Layout = Runner(module).layout(attends_here=attends_here)
        self.vocab_size = int(text_config(module).vocab_size)
        self.any_multiple = False
        weight = next(module.parameters())
        # Kernels of other devices guarantee nothing, nor do those for float16.
        is_exact = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
        self._least = _fewest_rows(module, torch.get_num_threads())  # one of the sizes
        largest = max(max_rows, _PROMPTS, self._least) if is_exact else max_rows
        powers = [1 << power for power in range(largest.bit_length()) if 1 << power < largest]
        self._sizes: Sequence[int] = [*powers, largest]
        self.packs_prompts, self.pads_prompts = self.attends_here, not is_exact
        if is_exact:
            with torch.inference_mode():
                self._check(Runner(module, attends_here=self.attends_here))

    def rows(self, count: int) -> int:
        """The number of rows that a decoding step of `count` sequences computes."""
        if self.any_multiple:
            return count + -count % self.least_rows
        return next(size for size in self._sizes if size >= count)

    @property
    def least_rows(self) -> int:
        """The rows of a forward pass are a multiple of it."""
        return self._sizes[0]

    def _check(self, runner: Runner) -> None:
        """Computes the same requests in batches of several sizes, and keeps the sizes whose results are equal."""
        prompts = [_tokens(self.vocab_size, _PART * (number + 1)) for number in range(_PROMPTS)]
        blocks, _ = self._prefill(runner, prompts)
        windows = Windows(self.layout)
        row_bytes = 4 * self.vocab_size + _WIDTH * self.layout.token_bytes
        most = max(_PROMPTS, self._least, min(self._sizes[-1], _CHECKED_BYTES // row_bytes))
        windows.ensure(most, _PART * _PROMPTS + 1)
        windows.load(0, [blocks[slot % _PROMPTS] for slot in range(most)])
        classes: list[tuple[Tensor, list[int]]] = []
        checked = [size for size in self._sizes if size <= most]
        for size in checked:
            outcome = _by_prompt(self._decode(runner, windows, size))
            number = next((n for n, (other, _) in enumerate(classes) if _alike(other, outcome)), len(classes))
            members = classes.pop(number)[1] if number < len(classes) else []
            classes.append((outcome, [*members, size]))  # a larger batch has more of the prompts
        if len(classes) > 1:
            enough = [(outcome, [size for size in sizes if size >= self._least]) for outcome, sizes in classes]
            classes = [each for each in enough if each[1]]
        outcome, agreeing = max(classes, key=lambda each: (len(each[1]), each[1][-1]))
        self._sizes = [*agreeing, *(size for size in self._sizes if size > most)]
        self.max_rows = min(self.max_rows, self._sizes[-1])
        between = [factor * agreeing[0] for factor in (3, 5, 7) if factor * agreeing[0] <= most]
        depends_on_place = bool(outcome.isnan().any())
        self.any_multiple = (
            not depends_on_place
            and agreeing == checked[-len(agreeing) :]
            and all(_alike(outcome, _by_prompt(self._decode(runner, windows, size))) for size in between)
        )
        if self.attends_here:
            self.packs_prompts = self.any_multiple = self.any_multiple and self._packs(runner, prompts[0], prompts[-1])
        logger.debug("batch sizes %s of %s agree; several prompts at once: %s", agreeing, checked, self.packs_prompts)
        if depends_on_place:
            logger.warning("a row's last bits depend on its place in the batch; samples may differ from run to run")

    def _packs(self, runner: Runner, *prompts: Sequence[int]) -> bool:
        """Whether prompts have the keys, values and logits that each has alone: also those that begin as others do."""
        alone = [self._prefill(runner, [prompt]) for prompt in prompts]
        ends = (_tokens(self.vocab_size, count) for count in _ENDS)
        alike = [[*prompt[:-2], *end][: self._max_length] for prompt, end in zip(prompts, ends, strict=True)]
        packed, logits_NV = self._prefill(runner, [*prompts, *alike])  # what both begin with is that of the last
        pairs = zip((block for (block,), _ in alone), packed[: len(prompts)], strict=True)
        both = (zip(tensors(one.layers), tensors(other.layers), strict=True) for one, other in pairs)
        alone_NV = torch.cat([logits for _, logits in alone])
        same_logits = torch.equal(logits_NV[: len(prompts)], alone_NV)
        return same_logits and all(torch.equal(*each) for pair in both for each in pair)

    def _prefill(self, runner: Runner, prompts: Sequence[Sequence[int]]) -> _Outcome:
        blocks = [Block(self.layout, len(prompt)) for prompt in prompts]
        spans = [Span(prompt, 0, (), block) for prompt, block in zip(prompts, blocks, strict=True)]
        return blocks, runner.prefill(spans, self.least_rows).clone()

    def _decode(self, runner: Runner, windows: Windows, size: int) -> Tensor:
        """Logits (size, V) after one more token of each prompt in turn."""
        position_B = np.array([_PART * (row % _PROMPTS + 1) for row in range(size)])
        return runner.decode(windows, [()] * size, position_B % 7, position_B)


def suitable_threads(module: nn.Module, most: int) -> int:
    """So many threads that a step of few sequences need not compute many rows; see above."""
    return next(threads for threads in range(most, 0, -1) if _fewest_rows(module, threads) <= _FEW_ROWS)


def _fewest_rows(module: nn.Module, threads: int) -> int:
    """A power of two."""
    narrow = [min(each.shape) for each in module.parameters() if each.dim() == 2 and threads > 1]
    fewest = max((max(size, 4 * threads) for size in narrow if size < 16 * threads), default=1)
    return 1 << (fewest - 1).bit_length()


def _by_prompt(outcome_BV: Tensor) -> Tensor:
    """A row for each prompt (fewer in small batches); NaN, which equals nothing, if its repetitions differ."""
    result = outcome_BV[:_PROMPTS].clone()
    for row in range(len(result)):
        repetitions = outcome_BV[row::_PROMPTS]
        if not torch.equal(repetitions, result[row].expand_as(repetitions)):
            result[row] = torch.nan
    return result


def _alike(first: Tensor, second: Tensor) -> bool:
    count = min(len(first), len(second))
    return torch.equal(first[:count], second[:count])


def _tokens(vocabulary: int, length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, vocabulary, length).tolist()


def check_supported(module: nn.Module, max_length: int) -> bool:
    """Returns whether attention is computed by our batches (`Runner.attends_here`).

    Raises BackendError if the model computes other logits over stored keys and values than without. Windows and chunks
    are checked with short ones, since transformers' masks take their length from the configuration.
    """
    config = text_config(module)
    refused = f"{config.model_type} models cannot be served here"
    if kinds := stateful_layers(module):
        problem = f"their {', '.join(kinds)} layers keep a state that a cache of keys and values does not hold"
        raise BackendError(f"{refused}: {problem}")
    allowed = 1e-3 if next(module.parameters()).dtype == torch.float32 else 0.1
    length = min(max_length, BLOCK + 21)
    if Runner(module).can_attend_here:
        try:
            if _cache_error(Runner(module, attends_here=True), length) < allowed:
                return True
        except Exception as failure:  # models that call attention functions otherwise fail in their own ways
            logger.info("attention is the model's own: %s: %s", type(failure).__name__, failure)
    lengths = {name: value for name in _LENGTHS if (value := getattr(config, name, None)) is not None}
    try:
        for name, value in lengths.items():
            setattr(config, name, min(value, _CHECKED_LENGTH))
        error = _cache_error(Runner(module), length)
    except Exception as failure:  # an unsupported model can fail in any way
        raise BackendError(f"{refused}: their forward pass over cached keys and values fails: {failure}") from failure
    finally:
        for name, value in lengths.items():
            setattr(config, name, value)
    if not error < allowed:
        problem = f"with cached keys and values the logits are off by {error:.2g} (allowed {allowed:g})"
        raise BackendError(f"{refused}: {problem}, so they keep state that this cache does not hold")
    return False


@torch.inference_mode()
def _cache_error(runner: Runner, length: int) -> float:
    """Largest difference of logits over the cache from those without one, relative to the largest of these.

    Two sequences with one prompt share its blocks.
    """
    module: Any = runner.module
    prompt = _tokens(text_config(module).vocab_size, length)
    only = {"logits_to_keep": 2} if runner.selects_logits else {}
    input_ids = torch.tensor([prompt], device=runner.device)
    expected_2V = module(input_ids=input_ids, use_cache=False, **only).logits[0, -2:].float()
    layout, blocks, done = Runner(module).layout(attends_here=runner.attends_here), [], 0
    while done < length - 1:
        start, done = next_span(length - 1, done)
        blocks.append(Block(layout, done - start))
        logits_NV = runner.prefill([Span(prompt, start, tuple(blocks[:-1]), blocks[-1])])
    windows = Windows(layout)
    windows.ensure(2, BLOCK)
    if blocks[-1].length < BLOCK:
        windows.load(0, [blocks.pop()] * 2)
    step_BV = runner.decode(windows, [blocks] * 2, np.array([prompt[-1]] * 2), np.array([length - 1] * 2))
    served = torch.cat([logits_NV, step_BV]).float()
    expected = expected_2V[[0, 1, 1]]
    return float((served - expected).abs().max() / expected.abs().max().clamp_min(1e-6))

"""The batch shapes in use: rows of a batch must not affect each other.

Matrix kernels choose their blocking by the number of rows, so a row's last bits can depend on the batch size. In
float32 on a CPU `BatchShapes` probes which batch sizes give bit-identical results, and only those are used: what a
request samples does not depend on the other requests in its batch.
"""

import functools
import logging
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from insitu.backend.inference.runner import MIN_WIDTH, Runner, SlotCache, Span, next_span, width_for
from insitu.backend.model import ATTENTION_LAYERS, layer_types, text_config
from insitu.errors import BackendError

logger = logging.getLogger(__name__)

_WIDEST = 4096
"""Maximum width of a probe, whose cache would fill the memory at 32,768; kernels take far fewer positions at a time."""
_LENGTHS = ("sliding_window", "attention_chunk_size")
_CHECKED_LENGTH = 8


class BatchShapes:
    """The batch sizes in use; probed once per model, valid for all versions of its weights."""

    def __init__(self, module: nn.Module, max_rows: int, prefill_tokens: int, max_length: int) -> None:
        self._module = module
        # Kernels of other devices guarantee nothing, and bfloat16 rounding would hide differences from the probe.
        weight = next(module.parameters())
        self._exact = weight.device.type == "cpu" and weight.dtype == torch.float32
        self._prefill_tokens = prefill_tokens
        self.prefill_rows = functools.cache(self._prefill_rows)
        self._vocabulary = text_config(module).vocab_size
        fill = functools.cache(self._fill_sixteen)  # the same for all probes, and costs more than they do
        probe = functools.partial(self._probe_decode, fill)
        self.decode_rows = self._matching_sizes("decode", probe, max_rows, least=4)
        self.min_width = self._probe_min_width(probe, width_for(max_length))

    def _prefill_rows(self, columns: int) -> tuple[int, ...]:
        """Allowed numbers of prompts per prefill batch, ascending."""
        most = max(1, self._prefill_tokens // columns)
        probe = functools.partial(self._probe_prefill, columns)
        return self._matching_sizes(f"prefill of {columns}", probe, most, least=1)

    def _matching_sizes(
        self, what: str, probe: Callable[[int], torch.Tensor], most: int, least: int
    ) -> tuple[int, ...]:
        """Returns the largest set of batch sizes with identical results, of `most` and the powers of two from `least`.

        `probe` computes the same requests in batches of a given size. Fewer than four rows of one token use another
        kernel on every CPU tested so far, so they are not probed.
        """
        sizes = [*(1 << power for power in range(most.bit_length()) if least <= 1 << power < most), most]
        if not self._exact:
            return tuple(sizes)
        classes: list[tuple[torch.Tensor, list[int]]] = []
        with torch.inference_mode():
            for size in sizes:
                outcome = probe(size)
                members = next((members for other, members in classes if torch.equal(other, outcome)), None)
                if members is None:
                    classes.append((outcome, members := []))
                members.append(size)
        outcome, matching = max(classes, key=lambda each: (len(each[1]), each[1][-1]))
        if outcome.isnan().any():
            logger.warning("%s: a row depends on its position in the batch; sampling is not reproducible", what)
        logger.debug("%s: batch sizes %s of %s agree bit for bit", what, matching, sizes)
        return tuple(matching)

    def _probe_min_width(self, probe: Callable[..., torch.Tensor], most: int) -> int:
        """Minimum attention width: small if additional masked positions leave results unchanged, else the maximum."""
        if not self._exact or most == MIN_WIDTH:
            return MIN_WIDTH
        widths = {width_for(length) for length in (MIN_WIDTH + 1, 3 * MIN_WIDTH, 9 * MIN_WIDTH, min(most, _WIDEST))}
        size = next((rows for rows in self.decode_rows if rows >= 16), self.decode_rows[-1])  # one batch, if possible
        with torch.inference_mode():
            narrow = probe(size)
            same = all(torch.equal(probe(size, width), narrow) for width in widths if width <= most)
        logger.debug("decode: masked positions %s", "change nothing" if same else f"matter; width is always {most}")
        return MIN_WIDTH if same else most

    def _fill_sixteen(self) -> tuple[list[list[int]], SlotCache]:
        """Prompts of different lengths, and their keys and values in the first sixteen slots."""
        prompts = self._probe_prompts(16, longest=48)
        runner = Runner(self._module)
        runner.prefill(prompts, range(16), [Span(0, len(prompt), 48) for prompt in prompts], 16)
        return prompts, runner.cache

    def _probe_decode(
        self, fill: Callable[[], tuple[list[list[int]], SlotCache]], size: int, width: int = MIN_WIDTH
    ) -> torch.Tensor:
        """Next logits of sixteen sequences of different lengths, decoded in batches of `size`."""
        prompts, filled = fill()
        outcome = []
        for rows in _batches(16, size):
            runner = Runner(self._module)
            runner.cache.ensure(size, MIN_WIDTH)
            for layer, source in zip(runner.cache.slot_layers, filled.slot_layers, strict=True):
                layer.keys, layer.values, layer.is_initialized = source.keys[rows], source.values[rows], True
            token_B = np.array([prompts[row][0] for row in rows])
            position_B = np.array([len(prompts[row]) for row in rows])
            outcome.append(runner.decode(token_B, position_B, width))
        return _by_request(torch.cat(outcome), 16)

    def _probe_prefill(self, columns: int, size: int) -> torch.Tensor:
        """Logits, keys and values of four prompts, computed in batches of `size`."""
        prompts = self._probe_prompts(4, longest=columns)
        outcome = []
        for rows in _batches(4, size):
            batch = [prompts[row] for row in rows]
            spans = [Span(0, len(prompt), columns) for prompt in batch]
            for chunk in Runner(self._module).prefill(batch, range(size), spans, size):
                stored = [t[chunk.row].clone() for pair in chunk.layers for t in pair]
                for part in stored:
                    part[:, : columns - chunk.length] = 0
                outcome.append(torch.cat([chunk.logits_V, *(part.flatten() for part in stored)]))
        return _by_request(torch.stack(outcome), 4)

    def _probe_prompts(self, count: int, longest: int) -> list[list[int]]:
        """Prompts of evenly spread lengths, the last of them `longest`."""
        random = np.random.default_rng(0)
        return [random.integers(0, self._vocabulary, longest * (n + 1) // count).tolist() for n in range(count)]


def _batches(count: int, size: int) -> list[list[int]]:
    """Requests 0 to count - 1 in batches of `size`, the last one padded from the beginning."""
    return [[row % count for row in range(start, start + size)] for start in range(0, count, size)]


def _by_request(outcome: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` rows; a request whose repetitions differ becomes NaN, which equals nothing."""
    for row in range(count):
        same = (outcome[row::count] == outcome[row]).all()
        outcome[row] = torch.where(same, outcome[row], torch.nan)
    return outcome[:count]


def check_supported(module: nn.Module) -> None:
    """Raises BackendError if the model computes other logits over this cache than without one.

    Windows and chunks are checked with short ones, since transformers' masks take their length from the configuration.
    """
    config = text_config(module)
    refused = f"{config.model_type} models cannot be served here"
    if kinds := _stateful_layers(module):
        problem = f"their {', '.join(kinds)} layers keep a state that a cache of keys and values does not hold"
        raise BackendError(f"{refused}: {problem}")
    weight = next(module.parameters())
    allowed = 1e-3 if weight.dtype == torch.float32 else 0.1
    lengths = {name: length for name in _LENGTHS if (length := getattr(config, name, None)) is not None}
    try:
        for name, length in lengths.items():
            setattr(config, name, min(length, _CHECKED_LENGTH))
        with torch.inference_mode():
            error = _cache_error(module, config.vocab_size, weight.device)
    except Exception as failure:  # an unsupported model can fail in any way
        raise BackendError(f"{refused}: their forward pass over cached keys and values fails: {failure}") from failure
    finally:
        for name, length in lengths.items():
            setattr(config, name, length)
    if not error < allowed:
        problem = f"with cached keys and values the logits are off by {error:.2g} (allowed {allowed:g})"
        raise BackendError(f"{refused}: {problem}, so they keep state that this cache does not hold")


def _stateful_layers(module: nn.Module) -> list[str]:
    """Types of layers that mix tokens otherwise than by attention."""
    if kinds := layer_types(text_config(module)) - ATTENTION_LAYERS:
        return sorted(kinds)
    layers = (each for each in module.modules() if isinstance(getattr(each, "conv1d", None), nn.Conv1d))
    return sorted({type(each).__name__ for each in layers})


def _cache_error(module: nn.Module, vocabulary: int, device: torch.device) -> float:
    """Largest difference of logits over the cache from those without one, relative to the largest of these."""
    prompt = np.random.default_rng(0).integers(0, vocabulary, 21).tolist()
    expected_TV = module(input_ids=torch.tensor([prompt], device=device)).logits[0].float()
    runner = Runner(module)
    chunk = runner.prefill([prompt[:-1]], [1], [next_span(len(prompt) - 1, 0)], 2)[0]
    token, position = np.array([0, prompt[-1]]), np.array([0, len(prompt) - 1])
    step_V = runner.decode(token, position)[1]
    served_2V = torch.stack([chunk.logits_V, step_V]).float()
    return float((served_2V - expected_TV[-2:]).abs().max() / expected_TV[-2:].abs().max().clamp_min(1e-6))

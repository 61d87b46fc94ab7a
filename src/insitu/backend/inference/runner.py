"""Runs the model's forward pass for prefill and decoding, in batch shapes whose rows do not affect each other.

Matrix kernels choose their blocking by the number of rows, so a row's last bits can depend on the batch size. In
float32 on a CPU `BatchShapes` probes which batch sizes give bit-identical results, and only those are used: what a
request samples does not depend on the other requests in its batch.

Notation: R rows, C columns (tokens per row), T positions attended to, V vocabulary.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from insitu.backend.inference.cache import Chunk, SlotCache, SlotMapping
from insitu.errors import BackendError

logger = logging.getLogger(__name__)

MAX_COLUMNS = 256
COLUMNS = (16, 32, 48, 64, 96, 128, 192, MAX_COLUMNS)
"""A prompt is computed 256 tokens at a time, the remainder in the narrowest of these that fits."""
MIN_WIDTH = 64


class Span(NamedTuple):
    """Part of a prompt computed by one forward pass: tokens [start, end), padded to `columns` columns."""

    start: int
    end: int
    columns: int


def next_span(prompt_length: int, done: int) -> Span:
    """The span after the first `done` tokens; depends on the prompt length only, so equal prompts share spans."""
    end = min(prompt_length, done + MAX_COLUMNS)
    return Span(done, end, next(c for c in COLUMNS if c >= end - done))


def width_for(length: int) -> int:
    """Positions attended to for a longest row of `length`; rounded so that few different shapes occur."""
    width = MIN_WIDTH
    while width < length:
        width *= 2
    return width if width <= 256 else -(-length // 256) * 256


class Runner:
    """A model and its key-value cache."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        weight = next(module.parameters())
        self.device, self._dtype = weight.device, weight.dtype
        self.cache = SlotCache(text_config(module).num_hidden_layers)
        model: Any = module
        if hasattr(module, "get_base_model"):  # a PEFT wrapper
            model = model.get_base_model()
        parameters = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    def prefill(
        self, prompts: Sequence[Sequence[int]], slots: Sequence[int], spans: Sequence[Span], rows: int
    ) -> list[Chunk]:
        """Computes a span of each prompt into its slot, in a batch padded to `rows`; returns a chunk per prompt.

        All spans have the same `start` and `columns`. Rows are left-padded: the last token is in the last column.
        """
        start, columns = spans[0].start, spans[0].columns
        self.cache.ensure(max(slots) + 1, width_for(start + columns))
        tokens_RC = np.zeros((rows, columns), dtype=np.int64)
        position_RC = np.zeros((rows, columns), dtype=np.int64)
        write_RC = np.full((rows, columns), self.cache.length, dtype=np.int64)
        slot_R = np.full(rows, slots[0], dtype=np.int64)
        slot_R[: len(slots)] = slots
        padding_R = np.full(rows, columns - 1, dtype=np.int64)
        for row, (prompt, span) in enumerate(zip(prompts, spans, strict=True)):
            padding_R[row] = first = columns - (span.end - start)
            tokens_RC[row, first:] = prompt[start : span.end]
            position_RC[row, first:] = write_RC[row, first:] = range(start, span.end)
        positions = self._tensor(position_RC)
        if start == 0:  # causal and without padding, which attends to itself only
            column = torch.arange(columns, device=self.device)
            visible = (column <= column[:, None]) & (column >= self._tensor(padding_R)[:, None, None])
            masked = ~(visible | (column == column[:, None]))
        else:
            masked = torch.arange(start + columns, device=self.device) > positions[..., None]
        fresh: list[tuple[torch.Tensor, torch.Tensor]] = []
        rows_R = self._tensor(slot_R)
        self.cache.mapping = SlotMapping(rows_R[:, None], self._tensor(write_RC), rows_R, start + columns, fresh)
        logits_RV = self._forward(self._tensor(tokens_RC), positions, masked)
        return [Chunk(fresh, row, span.end - start, logits_RV[row]) for row, span in enumerate(spans)]

    def decode(
        self, token_B: np.ndarray, position_B: np.ndarray, live_B: np.ndarray, min_width: int = MIN_WIDTH
    ) -> torch.Tensor:
        """Logits (B, V) after one more token in each of the first B slots; rows that are not live are padding."""
        width = max(min_width, width_for(int(position_B.max()) + 1))
        self.cache.ensure(len(token_B), width)
        write_B = np.where(live_B, position_B, self.cache.length)
        positions = self._tensor(position_B)[:, None]
        rows = torch.arange(len(token_B), device=self.device)[:, None]
        self.cache.mapping = SlotMapping(rows, self._tensor(write_B)[:, None], slice(len(token_B)), width)
        masked = torch.arange(width, device=self.device) > positions[..., None]
        return self._forward(self._tensor(token_B)[:, None], positions, masked)

    def _forward(self, tokens_RC: torch.Tensor, position_RC: torch.Tensor, masked_RCT: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(masked_RCT.shape, device=self.device, dtype=self._dtype)
        mask.masked_fill_(masked_RCT, torch.finfo(self._dtype).min)
        output = self.module(
            input_ids=tokens_RC,
            position_ids=position_RC,
            attention_mask=mask[:, None],
            past_key_values=self.cache,
            use_cache=True,
            **self._last_only,
        )
        return output.logits[:, -1]

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


class BatchShapes:
    """The batch sizes in use; probed once per model, valid for all versions of its weights."""

    def __init__(self, module: nn.Module, max_rows: int, prefill_tokens: int, max_length: int) -> None:
        self._module = module
        # Kernels of other devices guarantee nothing, and bfloat16 rounding would hide differences from the probe.
        weight = next(module.parameters())
        self._exact = weight.device.type == "cpu" and weight.dtype == torch.float32
        self._prefill_tokens = prefill_tokens
        self._prefill_rows: dict[int, tuple[int, ...]] = {}
        self._vocabulary = text_config(module).vocab_size
        fill = functools.cache(self._fill_sixteen)  # the same for all probes, and costs more than they do
        probe = functools.partial(self._probe_decode, fill)
        self.decode_rows = self._matching_sizes("decode", probe, max_rows, least=4)
        self.min_width = self._probe_min_width(probe, width_for(max_length))

    def prefill_rows(self, columns: int) -> tuple[int, ...]:
        """Allowed numbers of prompts per prefill batch, ascending."""
        if columns not in self._prefill_rows:
            most = max(1, self._prefill_tokens // columns)
            probe = functools.partial(self._probe_prefill, columns)
            self._prefill_rows[columns] = self._matching_sizes(f"prefill of {columns}", probe, most, least=1)
        return self._prefill_rows[columns]

    def _matching_sizes(
        self, what: str, probe: Callable[[int], torch.Tensor], most: int, least: int
    ) -> tuple[int, ...]:
        """Of `most` and the powers of two from `least`, the largest set with identical results; prefers large sizes.

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
        widths = {width_for(length) for length in (MIN_WIDTH + 1, 3 * MIN_WIDTH, 9 * MIN_WIDTH, most)}
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
            outcome.append(runner.decode(token_B, position_B, np.ones(size, dtype=bool), width))
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
    """Raises BackendError if the model computes other logits over this cache than without one."""
    name = text_config(module).model_type
    prompt = np.random.default_rng(0).integers(0, text_config(module).vocab_size, 21).tolist()
    weight = next(module.parameters())
    try:
        with torch.inference_mode():
            expected_TV = module(input_ids=torch.tensor([prompt], device=weight.device)).logits[0].float()
            runner = Runner(module)
            chunk = runner.prefill([prompt[:-1]], [1], [next_span(len(prompt) - 1, 0)], 2)[0]
            token, position = np.array([0, prompt[-1]]), np.array([0, len(prompt) - 1])
            step_V = runner.decode(token, position, np.array([False, True]))[1]
            served_2V = torch.stack([chunk.logits_V, step_V]).float()
            error = (served_2V - expected_TV[-2:]).abs().max() / expected_TV[-2:].abs().max().clamp_min(1e-6)
    except Exception as failure:  # an unsupported model can fail in any way
        raise BackendError(f"{name} models cannot be served here: {failure}") from failure
    allowed = 1e-3 if weight.dtype == torch.float32 else 0.1
    if not error < allowed:
        raise BackendError(
            f"{name} models cannot be served here: with cached keys and values the logits are off by {error:.2g} "
            f"(allowed {allowed:g}), so the model keeps state that this cache does not hold"
        )


def text_config(module: Any) -> Any:
    """Configuration of the language model, also if it is part of a larger model."""
    return module.config.get_text_config()

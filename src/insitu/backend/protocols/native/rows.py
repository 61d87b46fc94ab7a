"""Validates the rows of an uploaded job and converts them; what the job's method does not allow is refused by name."""

import asyncio
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from insitu.backend.http import StopAtFirstError
from insitu.backend.inference.tokenizer import ChatTokenizer
from insitu.backend.learner.batches import Row
from insitu.backend.protocols.native.dialogues import render_dialogue
from insitu.backend.protocols.openai.chat import Message, Objects
from insitu.errors import RequestRefused

REQUIRED = {"grpo": ("logprobs",), "dpo": ("pair", "preferred"), "kto": ("preferred",), "sft": ()}
UNUSED = {"grpo": ("pair", "preferred", "messages"), "dpo": (), "kto": ("pair",), "sft": ("pair", "preferred")}
"""Keys of a row that a method requires, and those that it has no use for."""
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


class RowLine(BaseModel):
    """A TrainingRow as uploaded; null is allowed where JSON writers emit it for NaN."""

    model_config = ConfigDict(extra="forbid", strict=True)

    token_ids: Annotated[list[int], StopAtFirstError()] | None = None
    loss_mask: Annotated[list[int], StopAtFirstError()] | None = None
    logprobs: Annotated[list[float | None], StopAtFirstError()] | None = None
    advantages: float | Annotated[list[float | None], StopAtFirstError()] | None = 0.0
    episode: str = ""
    calls: Annotated[list[int], StopAtFirstError()] = []
    pair: str = ""
    preferred: bool | None = None
    messages: Annotated[list[Message], StopAtFirstError()] | None = None
    tools: Objects | None = None
    trained_messages: Annotated[list[int], StopAtFirstError()] | None = None


class RowLimits(BaseModel):
    """Limits of a row: token ids are below `vocab_size`, and at most `max_length` of them."""

    vocab_size: int
    max_length: int


class _Side(NamedTuple):
    """The first uploaded row of a side of a pair or of an episode, and whether any of its rows is trained."""

    row: int
    trained: bool


class RowReader:
    """Converts the rows of one job in the order of the upload; `check` then validates them together."""

    def __init__(self, method: str, limits: RowLimits, tokenizer: ChatTokenizer) -> None:
        self._method = method
        self._limits = limits
        self._tokenizer = tokenizer
        self._sides: dict[str, dict[bool, _Side]] = {}  # by pair (dpo) or episode (kto), then `preferred`

    async def read(self, sent: RowLine, number: int) -> list[Row]:
        """The rows with trained tokens. Raises RequestRefused naming the row and the key."""
        try:
            self._check_keys(sent)
            if sent.messages is None:
                row = self._row(sent)
                rows = [] if row is None else [row]
            else:  # may take a while
                rows = await asyncio.to_thread(self._rendered, sent, number)
        except RequestRefused as error:
            raise refused(f"row {number}: {error}", error.param) from None
        group = sent.pair if self._method == "dpo" else sent.episode
        if sent.preferred is not None and group:
            sides = self._sides.setdefault(group, {})
            first = sides.get(sent.preferred, _Side(number, False))
            sides[sent.preferred] = _Side(first.row, first.trained or bool(rows))
        return rows

    def check(self) -> None:
        """Raises RequestRefused for a pair without two trained sides, and for an episode that is on both."""
        for group, sides in self._sides.items():
            first, *further = sorted(side.row for side in sides.values())
            if self._method == "kto":
                if further:
                    where = f"rows {first} and {further[0]}"
                    raise refused(f"{where}: preferred differs within the episode {group!r}", "preferred")
                continue
            for preferred in (True, False):
                where, missing = f"row {first}: pair {group!r}", f"preferred: {str(preferred).lower()}"
                if preferred not in sides:
                    raise refused(f"{where} has no row with {missing}; a pair has two sides", "pair")
                if not sides[preferred].trained:
                    raise refused(f"{where} has no trained token (loss_mask 1) with {missing}", "loss_mask")

    def _check_keys(self, sent: RowLine) -> None:
        if sent.messages is not None:
            for key in ("token_ids", "loss_mask", "logprobs"):
                if getattr(sent, key):
                    raise refused(f"messages and {key} exclude each other: messages are rendered to tokens here", key)
        else:
            for key in ("token_ids", "loss_mask"):
                if getattr(sent, key) is None:
                    instead = "; allowed instead: messages" if self._method != "grpo" else ""
                    raise refused(f"{key} is missing{instead}", key)
            for key in ("tools", "trained_messages"):
                if getattr(sent, key) is not None:
                    raise refused(f"{key} requires messages", key)
        for key in REQUIRED[self._method]:
            if getattr(sent, key) in (None, ""):
                raise refused(f"{key} is missing; method {self._method} requires it", key)
        for key in UNUSED[self._method]:
            if getattr(sent, key) not in (None, ""):
                raise refused(f"{key} cannot be used with method {self._method}", key)

    def _rendered(self, sent: RowLine, number: int) -> list[Row]:
        assert sent.messages is not None
        episode = sent.episode or f"\0row {number}"
        rows = render_dialogue(sent.messages, sent.tools or None, sent.trained_messages, self._tokenizer, episode)
        for row in rows:
            self._check_tokens(row.token_ids, "messages")
        return [self._converted(row.token_ids, np.flatnonzero(row.loss_mask), sent, episode) for row in rows]

    def _row(self, sent: RowLine) -> Row | None:
        """Returns None for a row without trained tokens."""
        assert sent.token_ids is not None
        assert sent.loss_mask is not None
        length = len(sent.token_ids)
        for name in ("loss_mask", "logprobs", "advantages"):
            values = getattr(sent, name)
            absent = name == "logprobs" and not values and self._method != "grpo"
            if isinstance(values, list) and len(values) != length and not absent:
                raise refused(f"{name} has {len(values)} entries, token_ids has {length}", name)
        self._check_tokens(sent.token_ids, "token_ids")
        for index, bit in enumerate(sent.loss_mask):
            if bit not in (0, 1):
                raise refused(f"loss_mask[{index}] is {bit}; allowed: 0, 1", "loss_mask")
        if sent.loss_mask and sent.loss_mask[0]:
            raise refused("loss_mask[0] is 1, but the first token has no context to predict it from", "loss_mask")
        positions = np.flatnonzero(sent.loss_mask)
        return self._converted(sent.token_ids, positions, sent, sent.episode) if len(positions) else None

    def _check_tokens(self, token_ids: Sequence[int], key: str) -> None:
        limit = self._limits.max_length
        if len(token_ids) > limit:
            length = f"{len(token_ids)} {'entries' if key == 'token_ids' else 'tokens'}"
            raise refused(f"{key} has {length}; the model takes {limit}", key)
        for index, token in enumerate(token_ids):
            if not 0 <= token < self._limits.vocab_size:
                raise refused(f"{key}[{index}] is {token}; the vocabulary ends at {self._limits.vocab_size - 1}", key)

    def _converted(self, token_ids: Sequence[int], positions: np.ndarray, sent: RowLine, episode: str) -> Row:
        sampled = {}
        if self._method == "grpo":
            weights = sent.advantages if isinstance(sent.advantages, list) else [sent.advantages] * len(token_ids)
            sampled["rollout_logprobs"] = _finite("logprobs", sent.logprobs or [], positions.tolist())
            sampled["advantages"] = _finite("advantages", weights, positions.tolist())
        return Row(
            token_ids=np.array(token_ids, dtype=np.int32),
            positions=positions.astype(np.int32),
            episode=episode,
            pair=sent.pair,
            preferred=sent.preferred,
            **sampled,
        )


def _finite(name: str, values: Sequence[float | None], positions: Sequence[int]) -> np.ndarray:
    """Values of the trained tokens. Raises RequestRefused unless each is finite in float32."""
    for index in positions:
        value = values[index]
        if value is None or not abs(value) <= _MAX_FLOAT32:
            raise refused(f"{name}[{index}] is {value}, but that token is trained (loss_mask 1)", name)
    return np.array([values[index] for index in positions], dtype=np.float32)


def refused(message: str, param: str | None = None, code: str = "invalid_job", *, status: int = 400) -> RequestRefused:
    return RequestRefused(message, status=status, param=param, code=code)

"""Reads an uploaded job line by line, in bounded memory: its settings, and rows of tokens or of messages.

What the job's method does not allow is refused by name. Messages become the tokens that the model reads and samples in
chat completions.
"""

import asyncio
import hashlib
import itertools
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, Self, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from insitu.advantages.estimator import rows_of
from insitu.backend.http import StopAtFirstError
from insitu.backend.inference.sampler import Temperature
from insitu.backend.inference.tokenizer import ChatTokenizer
from insitu.backend.learner.batches import Row
from insitu.backend.learner.jobs import TrainingJob
from insitu.backend.learner.logit_offsets import shaping_text
from insitu.backend.learner.parts import PartedRows
from insitu.backend.protocols.openai.chat import Message, Objects, template_messages
from insitu.backend.protocols.openai.parameters import RowShaping
from insitu.errors import RequestRefused, key_of
from insitu.schemas.episodes import ModelCall, TrainingRow
from insitu.schemas.training_jobs import Retention, TrainingSettings
from insitu.wire.http_server import decompressed

MAX_BYTES = 1 << 30
"""Maximum size of a job, decompressed."""
MAX_ROWS = 1 << 18
"""Maximum number of rows; short ones take more memory as arrays than as text."""
MAX_PARTS = 1 << 12
_INSTEAD = {
    **dict.fromkeys(("kl_beta", "kl_coef", "kl_penalty_coef"), "kl.beta, the coefficient of the KL penalty"),
    "beta": "kl.beta, the coefficient of the KL penalty (dpo.beta and kto.beta with these methods)",
}
"""What sets here what other trainers call by these names."""
M = TypeVar("M", bound=BaseModel)


class Limits(NamedTuple):
    """Limits of an uploaded job: token ids are below `vocab_size`, and at most `max_length` of them in a row."""

    vocab_size: int
    max_length: int
    max_bytes: int = MAX_BYTES

    @property
    def line(self) -> int:
        """Maximum bytes of a line: about 100 per token (id, mask, logprob, advantage) and 1 MiB for the rest."""
        return 100 * self.max_length + (1 << 20)


class JobHeader(BaseModel):
    """The first line of a job; without `keep` the backend's own retention policy applies.

    With `num_parts` instead of rows, the job is open: its rows come in so many parts, of which each can be computed
    when it has arrived. `parts` has the number of rows in each part of a job that is sent whole. `logprobs_ahead`: of a
    job with several optimizer steps, the log-probabilities under fixed weights are computed by part.
    """

    model_config = ConfigDict(extra="forbid")

    settings: TrainingSettings
    num_rows: int | None = Field(default=None, ge=0, le=MAX_ROWS)
    parts: list[Annotated[int, Field(ge=0)]] | None = Field(default=None, max_length=MAX_PARTS)
    num_parts: int | None = Field(default=None, ge=1, le=MAX_PARTS)
    logprobs_ahead: bool = False
    keep: Retention | None = None

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if (self.num_rows is None) == (self.num_parts is None):
            raise ValueError("num_rows: set either num_rows or, for an open job, num_parts")
        if self.parts is not None and sum(self.parts) != self.num_rows:
            raise ValueError(f"parts: they have {sum(self.parts)} rows, but num_rows is {self.num_rows}")
        if self.num_parts is not None and self.settings.method not in ("grpo", "sft"):
            raise ValueError(f"num_parts: method {self.settings.method} compares all rows; allowed: grpo, sft")
        return self

    def new_digest(self) -> hashlib.blake2b:
        """A digest of the settings, which that of the rows continues.

        Left out are those that do not change the result, and `schedule_range`, because a run may be made longer.
        """
        left_out = {"schedule_range", "micro_batch_tokens", "gradient_checkpointing", "compile", "attention", "kl_rows"}
        settings = self.settings.model_dump_json(exclude_defaults=True, exclude=left_out)
        return hashlib.blake2b(settings.encode(), digest_size=16)


async def read_job(
    chunks: AsyncIterator[bytes], encoding: str, limits: Limits, tokenizer: ChatTokenizer
) -> tuple[JobHeader, PartedRows, str]:
    """Returns the header, the rows with trained tokens, and the digest. Raises RequestRefused naming line and field."""
    lines = _lines(decompressed(chunks, encoding, limits.max_bytes), limits)
    first = await anext(lines, None)
    if first is None:
        raise refused("the job is empty; its first line holds settings and num_rows", "settings")
    header = _parse_line(JobHeader, first, "line 1 (settings)")
    digest = header.new_digest()
    if header.num_parts is not None:
        if await anext(lines, None) is not None:
            raise refused("an open job has no rows (num_parts); they come in parts", "num_parts")
        return header, PartedRows(header.num_parts, digest, logprobs_ahead=header.logprobs_ahead), ""
    reader = RowReader(header.settings.method, limits, tokenizer)
    sizes = header.parts or [header.num_rows or 0]
    part_of = [*itertools.chain(*([part] * size for part, size in enumerate(sizes)))]
    parts: list[list[Row]] = [[] for _ in sizes]
    number = 0
    async for line in lines:
        number += 1
        digest.update(line.strip() + b"\n")
        if number > len(part_of):
            raise refused(f"num_rows is {header.num_rows}, but the upload has more rows", "num_rows")
        parts[part_of[number - 1]] += await reader.read(_parse_line(RowLine, line, f"row {number}"), number)
    if number < len(part_of):
        raise refused(f"the upload ends after {number} of {header.num_rows} rows (num_rows)", "num_rows", "truncated")
    reader.check()
    rows = PartedRows.whole(parts, logprobs_ahead=header.logprobs_ahead)
    check_rows(rows, f"none of the {number} rows has")
    return header, rows, digest.hexdigest()


def check_rows(rows: PartedRows, none_has: str) -> None:
    """Raises RequestRefused if no row is trained, or an episode is in several parts, of a job that is complete."""
    if not len(rows):
        raise refused(f"{none_has} a trained token (loss_mask 1)", "loss_mask", "empty_job")
    if (episode := rows.split_episode) is not None:
        raise refused(f"the rows of episode {episode!r} are in several parts", "parts")


async def read_part(
    chunks: AsyncIterator[bytes], encoding: str, job: TrainingJob, part: int, limits: Limits, tokenizer: ChatTokenizer
) -> tuple[list[Row], bytes, int]:
    """Returns the rows with trained tokens of a part of an open job, and its lines: compressed, and their size before.

    Raises like `read_job`; the limits are those of all parts.
    """
    reader = RowReader(job.method, limits, tokenizer, f"part {part} ")
    rows, text, size, held = list[Row](), list[bytes](), 0, job.rows
    try:
        async for line in _lines(decompressed(chunks, encoding, limits.max_bytes), limits):
            text.append(line.strip() + b"\n")
            size += len(text[-1])
            rows += await reader.read(_parse_line(RowLine, line, f"row {len(text)}"), len(text))
            held.reading[part] = size, len(rows)
            other_bytes, other_rows = held.beside(part)
            if other_bytes + size > limits.max_bytes or other_rows + len(rows) > MAX_ROWS:
                problem = f"the parts of the job have more than {limits.max_bytes} bytes or {MAX_ROWS} rows"
                raise refused(problem, "num_rows", status=413)
        return rows, await asyncio.to_thread(lambda: zlib.compress(b"".join(text), 1)), size
    finally:
        held.reading.pop(part, None)


async def _lines(chunks: AsyncIterator[bytes], limits: Limits) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > limits.line:
            raise refused(f"a line is longer than {limits.line} bytes", status=413)
        for line in lines:
            if line.strip():
                yield line
    if rest.strip():
        yield rest


def _parse_line(model: type[M], line: bytes, where: str) -> M:
    """Raises RequestRefused with pydantic's first error: the key and its value, or the allowed keys."""
    try:
        return model.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    key = key_of(first["loc"])
    problem = first["msg"]
    if first["type"] == "extra_forbidden":
        is_setting = len(first["loc"]) == 2 and first["loc"][0] == "settings"
        instead = _INSTEAD.get(str(first["loc"][-1]))
        hint = f"use {instead}" if instead else f"available: {', '.join(sorted(TrainingSettings.model_fields))}"
        problem = "unknown key" + (f"; {hint}" if is_setting else "")
    elif first["type"] == "json_invalid":
        problem = f"not JSON: {first['ctx']['error']}"
    elif isinstance(first["input"], str | int | float | bool | None):
        problem += f", not {first['input']!r}"
    raise refused(f"{where}: {key + ': ' if key else ''}{problem}", key or None)


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
    temperature: Temperature = 1.0
    shaping: RowShaping | None = None
    episode: str = ""
    calls: Annotated[list[int], StopAtFirstError()] = []
    pair: str = ""
    preferred: bool | None = None
    messages: Annotated[list[Message], StopAtFirstError()] | None = None
    tools: Objects | None = None
    trained_messages: Annotated[list[int], StopAtFirstError()] | None = None


class _Side(NamedTuple):
    """The first uploaded row of a side of a pair or of an episode, and whether any of its rows is trained."""

    row: int
    trained: bool


@dataclass
class RowReader:
    """Converts the rows of one job in the order of the upload; `check` then validates them together."""

    method: str
    limits: Limits
    tokenizer: ChatTokenizer
    prefix: str = ""
    """Before the names of dialogues without an episode."""
    sides: dict[str, dict[bool, _Side]] = field(default_factory=dict, init=False)
    """By pair (dpo) or episode (kto), then `preferred`."""

    async def read(self, sent: RowLine, number: int) -> list[Row]:
        """The rows with trained tokens. Raises RequestRefused naming the row and the key."""
        try:
            self._check_keys(sent)
            # To render messages may take a while.
            rows = self._rows(sent) if sent.messages is None else await asyncio.to_thread(self._rendered, sent, number)
        except RequestRefused as error:
            raise refused(f"row {number}: {error}", error.param) from None
        group = sent.pair if self.method == "dpo" else sent.episode
        if sent.preferred is not None and group:
            sides = self.sides.setdefault(group, {})
            first = sides.get(sent.preferred, _Side(number, False))
            sides[sent.preferred] = _Side(first.row, first.trained or bool(rows))
        return rows

    def check(self) -> None:
        """Raises RequestRefused for a pair without two trained sides, and for an episode that is on both."""
        for group, sides in self.sides.items():
            first, *further = sorted(side.row for side in sides.values())
            if self.method == "kto":
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
                    instead = "; allowed instead: messages" if self.method != "grpo" else ""
                    raise refused(f"{key} is missing{instead}", key)
            for key in ("tools", "trained_messages"):
                if getattr(sent, key) is not None:
                    raise refused(f"{key} requires messages", key)
        for key in REQUIRED[self.method]:
            if getattr(sent, key) in (None, ""):
                raise refused(f"{key} is missing; method {self.method} requires it", key)
        for key in UNUSED[self.method]:
            if getattr(sent, key) not in (None, ""):
                raise refused(f"{key} cannot be used with method {self.method}", key)

    def _rendered(self, sent: RowLine, number: int) -> list[Row]:
        assert sent.messages is not None
        episode = sent.episode or f"\0{self.prefix}row {number}"
        rows = render_dialogue(sent.messages, sent.tools or None, sent.trained_messages, self.tokenizer, episode)
        for row in rows:
            self._check_tokens(row.token_ids, "messages")
        return [self._converted(row.token_ids, np.flatnonzero(row.loss_mask), sent, episode) for row in rows]

    def _rows(self, sent: RowLine) -> list[Row]:
        """The row; none if it has no trained token."""
        assert sent.token_ids is not None
        assert sent.loss_mask is not None
        length = len(sent.token_ids)
        for name in ("loss_mask", "logprobs", "advantages"):
            values = getattr(sent, name)
            absent = name == "logprobs" and not values and self.method != "grpo"
            if isinstance(values, list) and len(values) != length and not absent:
                raise refused(f"{name} has {len(values)} entries, token_ids has {length}", name)
        self._check_tokens(sent.token_ids, "token_ids")
        for index, bit in enumerate(sent.loss_mask):
            if bit not in (0, 1):
                raise refused(f"loss_mask[{index}] is {bit}; allowed: 0, 1", "loss_mask")
        if sent.loss_mask and sent.loss_mask[0]:
            raise refused("loss_mask[0] is 1, but the first token has no context to predict it from", "loss_mask")
        positions = np.flatnonzero(sent.loss_mask)
        return [self._converted(sent.token_ids, positions, sent, sent.episode)] if len(positions) else []

    def _check_tokens(self, token_ids: Sequence[int], key: str) -> None:
        limit = self.limits.max_length
        if len(token_ids) > limit:
            length = f"{len(token_ids)} {'entries' if key == 'token_ids' else 'tokens'}"
            raise refused(f"{key} has {length}; the model takes {limit}", key)
        for index, token in enumerate(token_ids):
            if not 0 <= token < self.limits.vocab_size:
                raise refused(f"{key}[{index}] is {token}; the vocabulary ends at {self.limits.vocab_size - 1}", key)

    def _converted(self, token_ids: Sequence[int], positions: np.ndarray, sent: RowLine, episode: str) -> Row:
        sampled: dict[str, Any] = {}
        if self.method == "grpo":
            weights = sent.advantages if isinstance(sent.advantages, list) else [sent.advantages] * len(token_ids)
            sampled["rollout_logprobs"] = _finite("logprobs", sent.logprobs or [], positions.tolist())
            sampled["advantages"] = _finite("advantages", weights, positions.tolist())
            sampled["temperature"] = sent.temperature
            if sent.shaping is not None:
                params = sent.shaping.shaping_params(self.limits.vocab_size, len(self.tokenizer.eos_token_ids))
                sampled["shaping"] = shaping_text(params)
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


def render_dialogue(
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None,
    trained: Sequence[int] | None,
    tokenizer: ChatTokenizer,
    episode: str,
) -> list[TrainingRow]:
    """The rows of a dialogue: one, or several where the template changes earlier messages later on.

    A trained message is a completion of the prompt that the messages before it are rendered to, up to the token that
    ends its turn. `trained` are positions in `messages`; None: all assistant messages. Raises RequestRefused.
    """
    rendered = template_messages(messages)
    if trained is None:
        trained = [index for index, message in enumerate(messages) if message.role == "assistant"]
    calls = []
    for index in sorted(set(trained)):
        if not 0 <= index < len(messages) or messages[index].role != "assistant":
            role = f" is of role {messages[index].role!r}" if 0 <= index < len(messages) else " does not exist"
            raise refused(f"trained_messages has {index}, but messages[{index}]{role}", "trained_messages")
        prompt = tokenizer.render_prompt(rendered[:index], tools)
        dialogue = tokenizer.render_prompt(rendered[: index + 1], tools, add_generation_prompt=False)
        if dialogue[: len(prompt)] != prompt:
            raise refused(
                f"messages[{index}]: the chat template renders it differently from a completion of the messages before "
                "it, so its tokens are unknown; send token_ids",
                "messages",
            )
        completion = _until_end_of_turn(dialogue[len(prompt) :], tokenizer)
        if not prompt or not completion:
            raise refused(f"messages[{index}]: the chat template renders no tokens for it, or before it", "messages")
        logprobs = [0.0] * len(completion)  # rows_of requires some
        calls.append(ModelCall(index, "", [], prompt_token_ids=prompt, token_ids=completion, logprobs=logprobs))
    return rows_of(calls, dict.fromkeys(range(len(calls)), 1.0), episode)


def _until_end_of_turn(tokens: list[int], tokenizer: ChatTokenizer) -> list[int]:
    """Without what the template adds after the last end-of-turn token, which the model does not sample."""
    ends = [position for position, token in enumerate(tokens) if token in tokenizer.eos_token_ids]
    return tokens[: ends[-1] + 1] if ends else tokens

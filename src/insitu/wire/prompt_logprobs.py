"""Log-probabilities of texts under a served model: the `prompt_logprobs` of vLLM, which `insitu backend` has too."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import orjson

from insitu.errors import BackendError, RequestRefused
from insitu.wire.connection import Connection
from insitu.wire.http_format import load_json

Text = tuple[int, ...]
"""Token ids."""
Logprobs = list[float | None]
"""One per token; None for the first, and for a last one that the model has no room for."""
JSON = {"Content-Type": "application/json"}
_LEAST, _MOST = -1e5, 1e-3
"""What a log-probability may be: some servers have a large negative number for 0, and rounding takes some above 0."""
_REQUEST_TOKENS = 16384
"""Texts of so many tokens are sent together; the entry of a token takes about 100 bytes of the response."""


async def logprobs_of_texts(
    connection: Connection, base_url: str, model: str, texts: Iterable[Text]
) -> dict[Text, Logprobs]:
    """The log-probability of each token, given those before it in its text. Raises BackendError or RequestRefused."""
    found: dict[Text, Logprobs] = {}
    for together in _together(dict.fromkeys(texts)):
        try:
            found |= await _ask(connection, base_url, model, together)
        except RequestRefused as error:
            if not _is_too_long(error):
                raise
            for text in together:
                found[text] = await _ask_alone(connection, base_url, model, text)
    return found


async def _ask_alone(connection: Connection, base_url: str, model: str, text: Text) -> Logprobs:
    """Without the last token, if the text is as long as the limit, which is for prompt and completion together."""
    try:
        return (await _ask(connection, base_url, model, [text]))[text]
    except RequestRefused as error:
        if not _is_too_long(error) or len(text) < 2:
            raise
    shorter = text[:-1]
    return [*(await _ask(connection, base_url, model, [shorter]))[shorter], None]


def _is_too_long(error: RequestRefused) -> bool:
    return error.code == "context_length_exceeded" or "maximum context length" in str(error)


def _together(texts: Iterable[Text]) -> Iterator[list[Text]]:
    together: list[Text] = []
    for text in texts:
        if together and sum(map(len, together)) + len(text) > _REQUEST_TOKENS:
            yield together
            together = []
        together.append(text)
    if together:
        yield together


async def _ask(connection: Connection, base_url: str, model: str, texts: Sequence[Text]) -> dict[Text, Logprobs]:
    body = {"model": model, "prompt": texts, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}

    def parse(content: bytes) -> list[Any]:
        choices = sorted(load_json(content)["choices"], key=lambda choice: choice["index"])
        return [choice.get("prompt_logprobs") for choice in choices]

    url = f"{base_url}/completions"
    answers = await connection.request("POST", url, parse, orjson.dumps(body), JSON)
    if len(answers) != len(texts):
        raise BackendError(f"{connection.server} returned {len(answers)} choices for {len(texts)} prompts")
    return {text: _read(connection, text, answer) for text, answer in zip(texts, answers, strict=True)}


def _read(connection: Connection, text: Text, entries: Any) -> Logprobs:
    if entries is None:
        raise BackendError(f"{connection.server} returned no prompt_logprobs; vLLM and `insitu backend` return them")
    try:
        pairs = zip(text, entries, strict=True)
        logprobs: list[Any] = [None if entry is None else entry[str(token)]["logprob"] for token, entry in pairs]
    except (LookupError, TypeError, ValueError) as error:
        problem = f"returned prompt_logprobs that are not one for each of the {len(text)} tokens: {entries!r:.200}"
        raise BackendError(f"{connection.server} {problem}") from error
    for position, logprob in enumerate(logprobs):
        is_logprob = type(logprob) in (int, float) and _LEAST <= logprob <= _MOST
        if not (logprob is None if position == 0 else is_logprob):
            raise BackendError(
                f"{connection.server} returned the logprob {logprob!r:.40} for token {position} of a text"
            )
    return logprobs


def longest(texts: Iterable[Text]) -> list[Text]:
    """Drops each text that is a prefix of another one, so that a conversation is asked about once, by its last turn.

    The texts are sorted: a prefix stands directly before the texts that begin with it.
    """
    ordered = sorted({*texts})
    return [text for text, following in pairwise(ordered) if following[: len(text)] != text] + ordered[-1:]


def part_of(text: Text, start: int, asked: Sequence[Text], found: dict[Text, Logprobs]) -> Logprobs:
    """What `found` has of the tokens of `text` from `start` on; it may be the beginning of one of the `longest`."""
    return found[asked[bisect_left(asked, text)]][start : len(text)]

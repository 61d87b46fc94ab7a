"""Built-in reward shapes: what a score becomes before it is the reward of an episode."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationInfo

from insitu.errors import ConfigError
from insitu.schemas.episodes import ModelCall


def _check_buffer(buffer: int, most: Any) -> None:
    if isinstance(most, int) and buffer > most:
        raise ConfigError(f"overlong: buffer is {buffer}; allowed: from 1 to max_tokens ({most})")


def _fits(buffer: int, others: ValidationInfo) -> int:
    """Checks it beside the other arguments of a file."""
    _check_buffer(buffer, (others.context or {}).get("max_tokens"))
    return buffer


def overlong(
    score: float,
    calls: Sequence[ModelCall],
    max_tokens: int,
    buffer: Annotated[int, Field(gt=0), AfterValidator(_fits)],
    penalty: Annotated[float, Field(ge=0)] = 1.0,
) -> float:
    """DAPO's soft punishment of overlong completions (arXiv:2503.14476, equation 13), of the longest one of an episode.

    Up to `max_tokens` - `buffer` tokens nothing is taken off, from there linearly more, and the whole `penalty` from
    `max_tokens` on. Calls without token ids, as of other models, are not counted. Raises ConfigError for a larger
    buffer.
    """
    _check_buffer(buffer, max_tokens)
    longest = max((len(call.token_ids or ()) for call in calls), default=0)
    excess = (longest - (max_tokens - buffer)) / buffer
    return score - penalty * min(max(excess, 0.0), 1.0)

"""Built-in reward shapes: what a score becomes before it is the reward of an episode."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from insitu.errors import ConfigError
from insitu.schemas.episodes import ModelCall


def overlong(
    score: float,
    calls: Sequence[ModelCall],
    max_tokens: int,
    buffer: Annotated[int, Field(gt=0)],
    penalty: Annotated[float, Field(ge=0)] = 1.0,
) -> float:
    """DAPO's soft punishment of overlong completions (arXiv:2503.14476, equation 13), of the longest one of an episode.

    Up to `max_tokens` - `buffer` tokens nothing is taken off, from there linearly more, and the whole `penalty` from
    `max_tokens` on. Calls without token ids, as of other models, are not counted. Raises ConfigError for a larger
    buffer.
    """
    if buffer > max_tokens:
        raise ConfigError(f"overlong: buffer is {buffer}; allowed: from 1 to max_tokens ({max_tokens})")
    longest = max((len(call.token_ids or ()) for call in calls), default=0)
    excess = (longest - (max_tokens - buffer)) / buffer
    return score - penalty * min(max(excess, 0.0), 1.0)

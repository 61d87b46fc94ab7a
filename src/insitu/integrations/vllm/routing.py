"""Which server gets a completion: the one that knows the start of its prompt, unless that has much more to do."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

BLOCK = 16
"""Tokens of a prompt that are compared together."""
AFFINITY = 8
"""A server that knows a prompt's start is preferred while it has at most this many more completions."""
_MAX_BLOCKS = 2**18


class PrefixRouter(Generic[T]):
    """Remembers which server last had each start of a prompt, in whole blocks.

    The next call of an episode begins with the prompt of the one before, so it goes to the same server.
    """

    def __init__(self) -> None:
        self._servers: OrderedDict[int, T] = OrderedDict()

    def choose(self, prompt: Sequence[int], loads: dict[T, int]) -> T:
        """`loads` has the servers that can take the completion, with their unfinished ones."""
        keys = _block_keys(prompt)
        server = min(loads, key=lambda each: loads[each])
        known = next((each for key in reversed(keys) if (each := self._servers.get(key)) is not None), None)
        if known is not None and known in loads and loads[known] <= loads[server] + AFFINITY:
            server = known
        for key in keys:
            self._servers[key] = server
            self._servers.move_to_end(key)
        while len(self._servers) > _MAX_BLOCKS:
            self._servers.popitem(last=False)
        return server


def _block_keys(prompt: Sequence[int]) -> list[int]:
    """A key for each whole block, which stands for everything up to its end."""
    keys: list[int] = []
    for end in range(BLOCK, len(prompt) + 1, BLOCK):
        keys.append(hash((keys[-1] if keys else 0, *prompt[end - BLOCK : end])))
    return keys

"""The regions of a completion, whole or in pieces: content, reasoning, and the text of tool calls."""

import re
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, auto
from functools import lru_cache
from typing import NamedTuple

from insitu.formats.registry import NONE, Delimiters, reasoning_format

CONTENT, REASONED = "content", "reasoning"
"""Names of regions. Those of calls are numbers."""
_ANSWER = "answer"
"""Content between delimiters."""
UNDECIDED = "undecided"
"""Reasoning from the beginning of a call on: a mention if the reasoning ends, else perhaps calls."""


class Kind(Enum):
    """What a part of a region is: its delimiters, text, or a token that is not text."""

    START = auto()
    TEXT = auto()
    END = auto()
    SPECIAL = auto()


class Region(NamedTuple):
    """What may follow in a region: by delimiter, the region that it leads to, or None for a special token."""

    following: Mapping[str, str | None]
    pattern: re.Pattern[str]
    """Matches a delimiter, the longest of those that begin at a place."""
    prefixes: frozenset[str]
    """The beginnings of delimiters."""
    longest: int
    """Characters of the longest of these."""

    @classmethod
    def of(cls, delimiters: Iterable[tuple[str, str | None]], special: Iterable[str]) -> "Region":
        following = dict.fromkeys(special) | dict(delimiters)
        words = sorted(following, key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, words)) or "(?!)")
        prefixes = frozenset(word[:end] for word in words for end in range(1, len(word)))
        return cls(following, pattern, prefixes, max(map(len, prefixes), default=0))


@lru_cache
def regions(calls: Delimiters, reasoning: str, special: tuple[str, ...], *, undecided: bool) -> dict[str, Region]:
    """The regions of calls and of a format of reasoning. `special` are tokens that are not text, outside of calls.

    With `undecided`, the beginning of a call in reasoning leads to that region.
    """
    opening: list[tuple[str, str | None]] = []
    undecided_starts = [(start, UNDECIDED) for start, _ in calls if undecided]
    found: dict[str, Region] = {}
    if reasoning != NONE:
        form = reasoning_format(reasoning)
        ending = [(end, CONTENT) for end in form.end]
        answers, ends = form.content or ((), ())
        opening += [(start, REASONED) for start in form.start] + [(start, _ANSWER) for start in answers]
        found[REASONED] = Region.of([*ending, *undecided_starts], special)
        found[UNDECIDED] = Region.of(ending, ())
        found[_ANSWER] = Region.of([(end, CONTENT) for end in ends], special)
    for number, (start, end) in enumerate(calls):
        opening.append((start, f"{number}"))
        found[f"{number}"] = Region.of([(end, CONTENT)] if end else [], ())
    return {CONTENT: Region.of(opening, special), **found}


class RegionScanner:
    """Divides one completion into its regions, in time that is linear in its length."""

    def __init__(self, found: Mapping[str, Region], start: str) -> None:
        self._regions, self._region = found, start
        self._held = ""
        """The end of the text, which may be the beginning of a delimiter."""

    def read(self, text: str, *, final: bool) -> Iterator[tuple[str, Kind, str]]:
        """The parts that are certain, and all that are left if `final`: their region, their kind, and their text."""
        text, at = self._held + text, 0
        while True:
            region = self._regions[self._region]
            match = region.pattern.search(text, at)
            end = len(text) if final else self._certain(region, text, at)
            if match is None or match.start() >= end:
                break
            if match.start() > at:
                yield self._region, Kind.TEXT, text[at : match.start()]
            at, leads_to = match.end(), region.following[match[0]]
            if leads_to is None:
                yield self._region, Kind.SPECIAL, match[0]
            elif leads_to == CONTENT:
                yield self._region, Kind.END, match[0]
            else:
                yield leads_to, Kind.START, match[0]
            self._region = leads_to or self._region
        if end > at:
            yield self._region, Kind.TEXT, text[at:end]
        self._held = text[end:]

    @staticmethod
    def _certain(region: Region, text: str, at: int) -> int:
        """Where a delimiter begins that the text may continue, or its end."""
        places = range(max(at, len(text) - region.longest), len(text))
        return next((place for place in places if text[place:] in region.prefixes), len(text))


class Held:
    """Text without white space at its ends, which is held until more text follows.

    Between two of its parts is the white space of the first, or else of the second.
    """

    def __init__(self, characters: str | None, *, from_start: bool) -> None:
        self._characters = characters
        self.from_start = from_start
        """Whether white space at the beginning of a part is dropped."""
        self.space = self._dropped = ""
        self._has_begun = False

    def add(self, text: str) -> str:
        if self.from_start:
            rest = text.lstrip(self._characters)
            self._dropped += text[: len(text) - len(rest)]
            if not rest:
                return ""
            self.space = (self.space or self._dropped) if self._has_begun else ""
            self.from_start, self._dropped, text = False, "", rest
        text = self.space + text
        kept = text.rstrip(self._characters)
        self.space = text[len(kept) :]
        self._has_begun = self._has_begun or bool(kept)
        return kept

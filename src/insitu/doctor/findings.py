"""What is wrong with a run, where, and what to change."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

_OFTEN = 0.1
"""Share of the episodes from which a failure of some of them harms."""


class Severity(StrEnum):
    """The most severe first."""

    STOPS_LEARNING = "stops_learning"
    HARMS = "harms"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """`where` is the key, row or file; `code` is stable, for programs."""

    code: str
    severity: Severity
    what: str
    where: str
    change: str


def severity_of(count: int, total: int) -> Severity:
    """The severity of a failure of `count` of `total` episodes."""
    if count == total:
        return Severity.STOPS_LEARNING
    return Severity.HARMS if count >= _OFTEN * total else Severity.NOTE


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    order = [*Severity]
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def will_learn(findings: Iterable[Finding]) -> bool:
    return all(finding.severity is not Severity.STOPS_LEARNING for finding in findings)

"""What was seen while the rows were played, and what that says: what is wrong with a run, where, and what to change."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from insitu.schemas.episodes import Episode, ModelCall
from insitu.schemas.finetuning import PolicyEndpoint, Trajectory, TrajectoryCollection
from insitu.training.metrics import trained_calls
from insitu.training.observers import Scored

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
    return sorted(findings, key=lambda finding: [*Severity].index(finding.severity))


def will_learn(findings: Iterable[Finding]) -> bool:
    return all(finding.severity is not Severity.STOPS_LEARNING for finding in findings)


class Rescored(NamedTuple):
    """The scores that an evaluator gave the same output; None: none."""

    episode: str
    first: float | None
    second: float | None


@dataclass
class Evidence:
    """`episodes` are those that ended, `collection` the complete groups, `selected` what a job would train of them.

    `ended_early`: the time was over before they all had ended. `sampled_problem` says that other weights were sampled
    than those served, `job_problem` why a training job on the episodes failed.
    """

    collection: TrajectoryCollection
    selected: TrajectoryCollection
    episodes: list[Episode] = field(default_factory=list)
    served: PolicyEndpoint | None = None
    stray_completions: int = 0
    sampled_problem: str | None = None
    job_problem: str | None = None
    job_kl: float | None = None
    """The KL divergence after that job from the weights before it, in nats per token."""
    job_gap: float | None = None
    """The mean absolute difference of log-probabilities to those before it, in nats per token."""
    rescored: list[Rescored] = field(default_factory=list)
    first: float | None = None
    """The seconds in which one row was played before the others; None: it did not end."""
    ended_early: bool = False
    compares_groups: bool = True
    """Whether the trainer compares the episodes of a row."""
    makes_pairs: bool = False

    @property
    def groups(self) -> Sequence[Sequence[Trajectory]]:
        return self.collection.trajectories

    @property
    def scored(self) -> list[list[Scored]] | None:
        """What the episodes with a reward have scored, by row; None if there is none."""
        rows: dict[str, list[Scored]] = {}
        for episode in self.episodes:
            if episode.reward is not None:
                rows.setdefault(episode.key.row_id, []).append(Scored(episode.reward, episode.scores))
        return [*rows.values()] or None

    @property
    def has_groups(self) -> bool:
        """Whether any group has as many episodes as its trainer needs; the others of each have failed."""
        return self.makes_pairs or any(len(group) > self.compares_groups for group in self.groups)

    @property
    def answers(self) -> list[ModelCall]:
        """The completions that would be trained, whether or not their groups have variance."""
        return [call for group in self.groups for call in trained_calls(group)]


def is_random(groups: Sequence[Sequence[Trajectory]]) -> bool:
    """Whether the environment is random: after the same prompts and answers, episodes of a row got another prompt."""
    for group in groups:
        following: dict[str, str] = {}
        for trajectory in group:
            for history, prompt in _prompts(trajectory.calls):
                if following.setdefault(history, prompt) != prompt:
                    return True
    return False


def _prompts(calls: Sequence[ModelCall]) -> Iterator[tuple[str, str]]:
    """Each prompt, and all prompts and answers of the episode before it."""
    history = ""
    for call in calls:
        prompt = repr(call.messages)
        yield history, prompt
        history += f"{prompt} -> {call.message!r}\n"

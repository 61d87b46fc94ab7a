"""Promotes the best version of a run to a destination if it scores significantly higher than what it would replace.

DESTINATION                 a symbolic link to the version in use, switched atomically
DESTINATION.versions/       000001/, 000002/, ...: exported models with `promotion.json`; the latest two are kept
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from insitu.algorithms.paired_test import PairedComparison, compare_paired, fewest_rows, rows_to_show
from insitu.disk.files import delete_drafts, delete_folder, sync_path, writing
from insitu.disk.folder_lock import FolderLock
from insitu.disk.json_files import dump_json, read_object
from insitu.errors import ConfigError, InsituError
from insitu.release.model_export import Source, export_model, open_source
from insitu.runs.checkpoints import checkpoint_of_run
from insitu.runs.files import BEST, PROMOTION
from insitu.runs.forms import RowScores, checked
from insitu.runs.reader import RunReader

logger = logging.getLogger(__name__)

_SCORED = ("evaluator", "scoring", "dataset")
"""Fields of RowScores: what has scored which rows."""


class Destination:
    """A destination with its versions. Raises ConfigError if something else is at its path."""

    def __init__(self, path: Path) -> None:
        absolute = path.absolute()
        self.path = absolute.parent.resolve() / absolute.name  # the last part is not resolved: it is a link
        linked = self.path.is_symlink()
        if not linked and self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ConfigError(f"DESTINATION: {path} was not made by insitu promote; move it, or name another path")
        self.versions = self.path.with_name(f"{absolute.name}.versions")
        if linked and self.path.parent.joinpath(os.readlink(self.path)).parent != self.versions:
            raise ConfigError(f"DESTINATION: {path} is a link that insitu promote did not make; name another path")

    @property
    def current(self) -> Path | None:
        """The folder of the version in use."""
        return self.versions / Path(os.readlink(self.path)).name if self.path.is_symlink() else None

    def numbered(self) -> list[Path]:
        """All versions, oldest first."""
        return sorted(path for path in self.versions.glob("[0-9]*") if path.is_dir() and path.name.isdecimal())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the folder of the versions if there is none; it is deleted again if the body leaves it empty."""
        with writing(self.versions):
            self.versions.mkdir(parents=True, exist_ok=True)
        try:
            with FolderLock(self.versions, "DESTINATION"):
                yield
        finally:
            with suppress(OSError):
                self.versions.rmdir()

    def switch(self, version: Path) -> None:
        """Makes a version the one in use; at any time the path leads to a complete one."""
        draft = self.path.with_name(f".{self.path.name}.draft")
        draft.unlink(missing_ok=True)
        draft.symlink_to(Path(self.versions.name) / version.name)
        if self.path.is_dir() and not self.path.is_symlink():
            self.path.rmdir()  # it is empty
        draft.replace(self.path)
        sync_path(self.path.parent)


class Promotion(NamedTuple):
    """What a promotion compared, and what it did."""

    candidate: str
    comparison: PairedComparison
    confidence: float
    candidates: int
    unpaired: int
    previous: Path | None = None

    def text(self) -> str:
        """Both means, the difference, its interval and the p-value."""
        c, share = self.comparison, f"{100 * self.confidence:g}"
        adjusted = f", adjusted for the choice among {self.candidates} versions" if self.candidates > 1 else ""
        unpaired = f"; rows that were scored for only one of them: {self.unpaired}" if self.unpaired else ""
        return (
            f"{c.candidate:.4g} against {c.baseline:.4g} on {c.rows} held-out rows, a difference of "
            f"{c.difference:+.4g} ({share} % interval {c.low:+.4g} to {c.high:+.4g}, p = {c.p_value:.3g}{adjusted}"
            f"{unpaired})"
        )


def promote(run: Path, path: Path, confidence: float = 0.95, name: str | None = None, merge: bool = False) -> Promotion:
    """Exports a version of the run to the destination and makes it the one in use; the previous one is kept.

    The baseline is the version in use if it was scored on the same rows by the same evaluator, or else the weights that
    the run started from. Raises InsituError if the version does not score significantly higher.
    """
    destination = Destination(path)
    source, candidate, earlier = _candidate(run, name)
    trained = {each.policy_version for each in earlier} - {earlier[0].policy_version}
    choices = 1 if name == "latest" else max(1, len(trained))  # from which the candidate was selected by its score

    def compared() -> Promotion:
        return _compare(source, candidate, *_baseline(destination, candidate, earlier), confidence, choices)

    promotion = compared() if not destination.versions.exists() else None  # nothing is made if it is refused
    with destination.locked():
        delete_drafts(destination.versions)
        if promotion is None or destination.current is not None:
            promotion = compared()
        previous, numbered = destination.current, destination.numbered()
        number = int(numbered[-1].name) + 1 if numbered else 1
        version = destination.versions / f"{number:06d}"
        record = dump_json(_record(source, candidate, promotion))
        export_model(source, version, merge=merge, name=destination.path.name, extra={PROMOTION: record})
        destination.switch(version)
        for old in numbered:
            if old != previous:
                delete_folder(old)
                logger.info("deleted %s", old)
    return promotion._replace(previous=previous)


def _candidate(run: Path, name: str | None) -> tuple[Source, RowScores, list[RowScores]]:
    """The version to promote with its scores, and all validations of the run, the first of them before training."""
    best = RunReader(run).object(BEST)
    if name in (None, "best") and best is not None and best.get("checkpoint") is None:
        score = best.get("avg_reward")
        score = round(score, 4) if isinstance(score, float) else score
        raise InsituError(f"nothing was promoted: the best weights of {run} are those it started from, {score}")
    source = open_source(run, checkpoint_of_run(run, name or "best", "--checkpoint"))
    scored = RunReader(run).scores()
    if not scored or scored[0].epoch != 0:
        raise ConfigError(f"RUN_DIR: {run} has no scores by row of a validation before training; promote needs them")
    records = [each for each in scored if each.policy_version == source.record.version]
    if not records:
        validated = ", ".join(str(each.epoch) for each in scored)
        raise ConfigError(f"--checkpoint: {source.folder.name} was not validated; validated epochs: {validated}")
    if any(getattr(records[-1], key) != getattr(scored[0], key) for key in _SCORED):
        raise ConfigError(
            f"RUN_DIR: {run}: {source.folder.name} was scored on other held-out rows, or by an evaluator with other "
            "settings or code, than the weights before training; their scores cannot be compared"
        )
    return source, records[-1], scored


def _baseline(destination: Destination, candidate: RowScores, scored: list[RowScores]) -> tuple[str, dict[str, float]]:
    """What the candidate is compared with, and its mean score by row."""
    if destination.current is not None:
        file = destination.current / PROMOTION
        record = checked(file, PROMOTION, read_object(file))
        if all(record.get(key) == getattr(candidate, key) for key in _SCORED):
            return f"what is in use at {destination.path}", record["scores"]
        logger.warning(
            "%s was scored on other rows, or by another evaluator; comparing with the weights before training",
            destination.current,
        )
    return "the weights before training", scored[0].means()


def _compare(
    source: Source, candidate: RowScores, baseline: str, scores: dict[str, float], confidence: float, candidates: int
) -> Promotion:
    means = candidate.means()
    rows = [row for row in scores if row in means]
    needed = fewest_rows(confidence, candidates)
    title = f"{source.folder.name} of {source.run}"
    if len(rows) < needed:
        raise InsituError(
            f"{title} cannot be promoted: {len(rows)} rows were scored for it and for {baseline}, but a confidence of "
            f"{confidence:g} needs at least {needed}"
        )
    differences = [means[row] - scores[row] for row in rows]
    comparison = compare_paired([scores[row] for row in rows], [means[row] for row in rows], confidence, candidates)
    unpaired = len({*means, *scores}) - len(rows)
    promotion = Promotion(title, comparison, confidence, candidates, unpaired)
    if comparison.difference <= 0 or comparison.p_value > 1 - confidence:
        more = ""
        if comparison.difference > 0:
            enough = rows_to_show(differences, confidence, candidates)
            more = f"; the same difference would take about {enough} held-out rows"
        raise InsituError(f"{title} does not beat {baseline}: {promotion.text()}{more}")
    return promotion


def _record(source: Source, candidate: RowScores, promotion: Promotion) -> dict[str, Any]:
    """`promotion.json`: the scores by row, with which the next version is compared."""
    return {
        "run_id": RunReader(source.run).settings(required=True).get("run_id"),
        "checkpoint": source.folder.name,
        "timestamp": datetime.now(UTC).isoformat(),
        "confidence": promotion.confidence,
        "candidates": promotion.candidates,
        "comparison": promotion.comparison._asdict(),
        **{key: getattr(candidate, key) for key in _SCORED},
        "scores": candidate.means(),
    }

"""The held-out scores that a run has recorded: a mean per validation, and the scores of each row."""

from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from insitu.disk.files import load_json, numbered_records
from insitu.errors import InsituError
from insitu.runs.files import VALIDATION_SCORES, VALIDATIONS


class RowScores(NamedTuple):
    """A line of `validation_scores.jsonl`: the scores of one version by row id, one per repetition.

    `dataset` is the SHA-256 of the file with the rows.
    """

    epoch: int
    policy_version: int | None
    evaluator: str
    dataset: str
    scores: dict[str, list[float]]

    def means(self) -> dict[str, float]:
        """The mean score of each row."""
        return {row: fmean(scores) for row, scores in self.scores.items()}


def read_validations(run: Path) -> list[dict[str, Any]]:
    """The records of `validation_history.json`; none if the run was never validated."""
    path = run / VALIDATIONS
    try:
        return list(load_json(path.read_bytes())) if path.exists() else []
    except (ValueError, TypeError) as error:
        raise InsituError(f"{path} is not a list of validations: {error}") from None


def read_scores(run: Path) -> list[RowScores]:
    """The validations whose row scores were recorded, in the order they were made."""
    path = run / VALIDATION_SCORES
    found = []
    for number, record in numbered_records(path):
        try:
            found.append(RowScores(**record))
        except TypeError:
            keys = ", ".join(RowScores._fields)
            raise InsituError(f"{path}, line {number} does not have the keys {keys}") from None
    return found

"""Every two features meet in some run, and the same holds after each: `make test WITH=pairs`."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from equal_runs import differences
from invariants import check_run, check_same_training
from matrix import Case, cases, name, refused_cases, uncovered
from projects import Project

CASES = cases()
REFUSED = refused_cases()
ADDRESSES = {"url", "address", "base_url", "entity_host", "datastore_host", "port"}
NOT_COMPARED = frozenset({"events.jsonl", "recording.jsonl", "trackers", "output_model", "digest", *ADDRESSES})
"""What tells of the interruption, the names of a job and the digest of its rows, which name the run, and a number that
is null for an epoch with an outage."""


def test_every_two_values_that_go_together_meet() -> None:
    assert not uncovered(CASES)


@pytest.fixture
def servers() -> Iterator[ExitStack]:
    with ExitStack() as servers:
        yield servers


@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_run_with_these_features(case: Case, tmp_path: Path, servers: ExitStack) -> None:
    project = Project(tmp_path / "project", case, servers)
    project.train()
    for folder in project.runs:
        check_run(project, folder)
    if case["front"] == "resumed":
        undisturbed = Project(tmp_path / "undisturbed", case | {"front": "file"}, servers)
        undisturbed.train()
        assert not differences(undisturbed.run, project.run, NOT_COMPARED)
    elif case["front"] == "forked":
        check_same_training(project.run, project.runs[-1])


@pytest.mark.parametrize(("case", "key"), REFUSED, ids=[name(case) for case, _ in REFUSED])
def test_features_that_do_not_go_together_are_refused(case: Case, key: str, tmp_path: Path, servers: ExitStack) -> None:
    project = Project(tmp_path / "project", case, servers)
    done = project.finetune()
    assert done.returncode == 2, done.stderr
    assert key in done.stderr
    assert [*project.run.glob("*")] == []  # some are refused once the backend has started

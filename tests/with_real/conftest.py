"""Recorded runs of a real model, one for each method, of which many tests ask."""

import pytest
from processes import run_project
from real_project import Recorded, Runs, project


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Trains a method when it is first asked for."""
    made: dict[str, Recorded] = {}

    def run_of(method: str) -> Recorded:
        if method not in made:
            folder = project(tmp_path_factory.mktemp("project"), method)
            code, _, err = run_project(folder)
            assert code == 0, err
            made[method] = Recorded(method, folder)
        return made[method]

    return run_of

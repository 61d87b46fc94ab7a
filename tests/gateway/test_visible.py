"""Which of this machine's files programs in workspaces need."""

import subprocess
import sys
from pathlib import Path

import pytest

from insitu.gateway.visible import named, own_python, searched


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "environment"], check=True)
    return tmp_path / "environment"


def test_programs_come_with_their_installation(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "tools/shims").mkdir(parents=True)
    path = f"{environment}/bin:{tmp_path}/tools/shims:relative:{tmp_path}/other::/"
    libraries = {"PYTHONPATH": f"{tmp_path}/modules:", "LD_LIBRARY_PATH": f"{tmp_path}/lib"}
    python = Path(sys.base_prefix).resolve()
    found = {*searched({"PATH": path, **libraries}, [tmp_path / "home"])}
    assert found == {environment, python, *(tmp_path / name for name in ("tools", "other", "modules", "lib"))}
    assert {*named([str(environment / "bin/python"), "-c", "/"], tmp_path, [])} == {
        *(environment, python, environment / "bin/python")
    }


def test_no_installation_has_the_project(environment: Path, tmp_path: Path) -> None:
    assert [*searched({"PATH": f"{environment}/bin:{tmp_path}"}, [environment / "project"])] == [
        *(environment / "bin", Path(sys.base_prefix).resolve())
    ]
    assert [*named(["./bin/agent", "x"], tmp_path, [tmp_path])] == [tmp_path / "bin/agent", tmp_path / "bin"]


def test_files_that_a_command_names(tmp_path: Path) -> None:
    (tmp_path / "settings.json").touch()
    command = ["agent", str(tmp_path / "settings.json"), str(tmp_path), "settings.json", str(tmp_path / "none")]
    assert [*named(command, tmp_path, [])] == [tmp_path / "settings.json"]
    assert [*named(["./agent"], tmp_path, [])] == [tmp_path / "agent"]


def test_what_this_python_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "project"), str(tmp_path / "editable")])
    expected = [Path(sys.prefix), Path(sys.base_prefix), tmp_path / "editable"]
    assert [*own_python([tmp_path / "project"])] == expected

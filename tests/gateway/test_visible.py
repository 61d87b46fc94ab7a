"""Which of this machine's files programs in workspaces need."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from insitu.gateway.visible import named, own_python, searched, with_targets

PYTHON = Path(sys.base_prefix).resolve()


def program(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "environment"], check=True)
    return tmp_path / "environment"


def folders(paths: set[Path]) -> set[Path]:
    return {path.resolve() for path in paths if path.is_dir()}


def test_programs_come_with_their_installation(environment: Path, tmp_path: Path) -> None:
    path = f"{environment}/bin:{tmp_path}/tools/shims:relative:{tmp_path}/other::/"
    others = {"PYTHONPATH": f"{tmp_path}/modules:", "LD_LIBRARY_PATH": f"{tmp_path}/lib", "SSL_CERT_FILE": "/x/cert"}
    for name in ("tools/shims", "other", "modules", "lib"):
        (tmp_path / name).mkdir(parents=True)
    found = folders(with_targets(searched({"PATH": path, **others}, [Path("/tmp"), Path("/run")])))
    assert found == {environment, PYTHON, *(tmp_path / name for name in ("tools", "other", "modules", "lib"))}
    assert Path("/x/cert") in searched(others, [])
    assert folders(named([str(environment / "bin/python"), "-c", "/"], tmp_path, None, [])) == {environment, PYTHON}


def test_no_installation_has_the_project(environment: Path, tmp_path: Path) -> None:
    found = folders({*searched({"PATH": f"{environment}/bin:{tmp_path}"}, [environment / "project"])})
    assert found == {environment / "bin", PYTHON}
    agent = program(tmp_path / "home/bin/agent")
    (tmp_path / "link").symlink_to(tmp_path / "home")
    for path in ("home/bin/agent", "home/x/../bin/agent", "link/bin/agent"):
        assert folders(named([f"./{path}"], tmp_path, None, [tmp_path / "home"])) == set()
    assert agent in with_targets(named(["./link/bin/agent"], tmp_path, None, [tmp_path / "home"]))


def test_links_lead_step_by_step_to_an_installation(tmp_path: Path) -> None:
    """As those of uv, whose environments have links to a link of the Python that they are made with."""
    program(tmp_path / "uv/python-3.11.7/bin/python3.11")
    (tmp_path / "uv/python-3.11").symlink_to("python-3.11.7")
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").symlink_to(tmp_path / "uv/python-3.11/bin/python3.11")
    (tmp_path / "venv/bin/python3").symlink_to("python")
    program(tmp_path / "venv/bin/agent", f"#!{tmp_path}/venv/bin/python3 -I\n")
    (tmp_path / "agent").symlink_to("venv/bin/agent")
    found = named(["./agent"], tmp_path, None, [])
    assert {tmp_path / "venv", tmp_path / "uv/python-3.11", tmp_path / "agent"} <= found
    assert tmp_path / "uv/python-3.11.7" in with_targets(found)
    assert named(["agent"], tmp_path, str(tmp_path), []) == found
    (tmp_path / "round").symlink_to("round")
    program(tmp_path / "itself", f"#!{tmp_path}/itself")
    assert named(["./round"], tmp_path, None, []) == set()
    assert named(["./itself"], tmp_path, None, []) == {tmp_path / "itself"}


def test_files_that_a_command_names(tmp_path: Path) -> None:
    (tmp_path / "settings.json").touch()
    command = ["agent", str(tmp_path / "settings.json"), str(tmp_path), "settings.json", str(tmp_path / "none")]
    assert named(command, tmp_path, "", []) == {tmp_path / "settings.json"}
    assert named(["./agent"], tmp_path, None, []) == set()


def test_what_this_python_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "project"), str(tmp_path / "editable")])
    found = {*own_python([tmp_path / "project"])}
    assert {Path(sys.prefix), Path(sys.base_prefix), tmp_path / "editable"} <= found
    assert tmp_path / "project" not in found


def test_private_folders_are_not_covered(tmp_path: Path) -> None:
    os.symlink("/run", tmp_path / "link")
    assert with_targets([Path("/"), Path("/tmp"), tmp_path / "link", tmp_path / "none", tmp_path]) == {
        *(tmp_path / "link", tmp_path)
    }

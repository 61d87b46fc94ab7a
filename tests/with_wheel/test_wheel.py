"""The wheel in new environments: in an empty folder, a project is written, checked, trained and listed."""

import json
import os
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".environments/wheel"
LOCAL = ENVIRONMENTS / "local"
CORES = sorted(path.name for path in ENVIRONMENTS.glob("core-*") if (path / ".installed").exists())
TOKEN = "of-the-backend"


def run(*command: str | Path, folder: Path) -> str:
    """What a program prints, which finds neither our sources nor our variables."""
    outside = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "INSITU", "VIRTUAL"))}
    done = subprocess.run(command, cwd=folder, env=outside, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, as that of a release is."""
    folder = tmp_path_factory.mktemp("dist")
    run(LOCAL / "bin/python", "-m", "build", "--outdir", folder, ROOT, folder=folder)
    (built,) = folder.glob("*.whl")
    for name in ("local", *CORES):
        pip = (ENVIRONMENTS / name / "bin/python", "-m", "pip", "install", "--quiet")
        run(*pip, "--force-reinstall", "--no-deps", built, folder=folder)
        pinned = ("-c", ROOT / "constraints.txt", f"{built}[local]") if name == "local" else (built,)
        run(*pip, *pinned, folder=folder)  # what it needs and the environment does not have yet
    return built


def test_the_wheel_has_the_files_of_the_sources(wheel: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = {line.removeprefix("src/") for line in tracked.splitlines()}
    assert sources - names == set()
    assert {name.partition("/")[0] for name in names - sources} == {"nat-stubs"}


def test_a_project_of_the_wheel_trains(wheel: Path, tmp_path: Path) -> None:
    insitu = LOCAL / "bin/insitu"
    assert "Usage: insitu" in run(insitu, "--help", folder=tmp_path)
    assert "transformers: " in run(insitu, "env", folder=tmp_path)
    assert "next: cd desk" in run(insitu, "init", "desk", folder=tmp_path)
    project = tmp_path / "desk"
    assert "config.yml is valid" in run(insitu, "validate", "config.yml", folder=project)
    run(insitu, "finetune", "config.yml", "-o", "finetuning.num_epochs", "1", folder=project)
    assert (project / "runs/desk/reward_plot.png").exists()
    (listed,) = run(insitu, "runs", "list", "--json", folder=project).splitlines()
    assert json.loads(listed)["run_dir"] == "runs/desk"


@pytest.fixture(scope="module")
def backend(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a backend for the model of a new project."""
    folder = tmp_path_factory.mktemp("backend")
    run(LOCAL / "bin/insitu", "init", "desk", folder=folder)
    command = [LOCAL / "bin/insitu", "backend", "--model", "desk/model", "--port", "0", "--token", TOKEN]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " ready at http://" in line, line
        yield line.split()[-1]
        process.terminate()


@pytest.mark.parametrize("core", CORES)
def test_a_core_trains_with_a_backend_at_a_url(backend: str, core: str, tmp_path: Path) -> None:
    insitu = ENVIRONMENTS / core / "bin/insitu"
    assert "Usage: insitu" in run(insitu, "--help", folder=tmp_path)
    run(insitu, "init", "desk", folder=tmp_path)
    project = tmp_path / "desk"
    config = project / "config.yml"
    text = config.read_text()
    assert "model: model\n" in text
    config.write_text(text.replace("model: model\n", f"url: {backend}\n    api_key: {TOKEN}\n"))
    assert "config.yml is valid" in run(insitu, "validate", "config.yml", folder=project)
    run(insitu, "finetune", "config.yml", "-o", "finetuning.num_epochs", "1", folder=project)
    (listed,) = run(insitu, "runs", "list", "--json", folder=project).splitlines()
    assert json.loads(listed)["run_dir"] == "runs/desk"

"""What installs with insitu, and what does without the packages of the extra `local`."""

import os
import re
import subprocess
import sys
import threading
import tomllib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path

import pytest
from factories import MODEL, digits_project, read_lines
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from processes import forked_python, serving

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {name: [*map(Requirement, listed)] for name, listed in PROJECT["optional-dependencies"].items()}


def installed_with(requirements: list[Requirement]) -> set[str]:
    """All packages that these need on this platform, according to the metadata of the installed ones."""
    found: set[str] = set()
    wanted = [(each, frozenset(each.extras)) for each in requirements]
    seen = set()
    while wanted:
        requirement, extras = wanted.pop()
        name = canonicalize_name(requirement.name)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        found.add(name)
        for line in metadata.requires(name) or []:
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                wanted.append((needed, frozenset(needed.extras)))
    return found


def test_the_core_is_34_packages_at_most() -> None:
    packages = {"insitu"} | installed_with([*map(Requirement, PROJECT["dependencies"])])
    assert len(packages) <= 34, sorted(packages)
    assert not packages & {"numpy", "matplotlib", "torch", "transformers", "tokenizers", "huggingface-hub"}


@pytest.mark.parametrize("extra", ["local", "art", "customizer"])
def test_extras_whose_documents_promise_the_plot_have_matplotlib(extra: str) -> None:
    assert "insitu[plots]" in map(str, EXTRAS[extra])
    assert [each.name for each in EXTRAS["plots"]] == ["matplotlib"]


def test_only_the_backend_imports_numpy() -> None:
    files = [path for path in (ROOT / "src/insitu").rglob("*.py") if "import numpy" in path.read_text()]
    folders = {path.relative_to(ROOT / "src/insitu").parts[:3] for path in files}
    assert {each for each in folders if each[0] != "backend"} == {("integrations", "art", "server")}


def test_import_insitu_imports_nothing_else() -> None:
    code = "import sys; before = {*sys.modules}; import insitu; print(*sorted({*sys.modules} - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["insitu"]


def test_a_project_is_written_without_the_libraries_that_it_needs_later() -> None:
    """Its schema is of all built-in components; to import openai takes longer than everything else together."""
    code = "import sys; from insitu.config.json_schema import json_schema; json_schema(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"openai", "torch", "transformers", "numpy"} & {*done.stdout.split()}


WITHOUT = """
import sys
from insitu.cli import main
missing = ("torch", "transformers", "peft", "safetensors", "tokenizers", "llguidance", "numpy", "matplotlib")
for name in [*sys.modules]:
    if name.partition(".")[0] in missing or name.startswith("insitu.backend"):
        del sys.modules[name]
sys.modules.update(dict.fromkeys(missing))  # importing them fails
sys.argv[0] = "insitu"
main()
"""


def test_a_run_against_a_backend_at_a_url_needs_the_core_only(tmp_path: Path) -> None:
    """And says once that there is no plot."""
    with serving("backend", "--model", MODEL, "--port", 0, "--token", "secret") as (_, url):
        digits_project(tmp_path, rows=3, url=url, api_key="secret")

        def insitu(*arguments: str) -> str:
            command = [forked_python(), "-c", WITHOUT, *arguments]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        shown = insitu("finetune", "config.yml")
        note = "no reward_plot.png: matplotlib is not installed (pip install -e '.[plots]')"
        assert re.sub(r"\s+", " ", shown).count(note) == 1
        assert [line["epoch"] for line in read_lines(tmp_path / "run/training_metrics.jsonl")] == [1, 2]
        assert not (tmp_path / "run/reward_plot.png").exists()
        assert "run" in insitu("runs", "show", "run")
        insitu("eval", "config.yml")


@pytest.mark.parametrize(
    ("driver", "index", "chosen", "said"),
    [
        (False, "here", "here", "torch's CPU build, about 0.2 GB, from"),
        (False, "gone", "", "as pip finds it, up to 2.8 GB"),
        (True, "here", "", "with CUDA's libraries, up to 2.8 GB"),
        (False, "own", "", "from the index that pip is configured with"),
    ],
)
def test_torch_is_the_build_for_this_machine(tmp_path: Path, driver: bool, index: str, chosen: str, said: str) -> None:
    """The real script and an index on a port; a Python that only says what pip would get."""
    programs = tmp_path / "bin"
    programs.mkdir()
    python = programs / "python"
    configured = "echo global.index-url=own" if index == "own" else "true"
    installing = 'echo "extra $PIP_EXTRA_INDEX_URL $*"'
    cases = f'*config*) {configured};; *pip*) {installing};; *) exec {sys.executable} "$@";;'
    python.write_text(f"#!/bin/sh\ncase $* in {cases} esac\n")
    if driver:
        (programs / "nvidia-smi").write_text("#!/bin/sh\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    (tmp_path / "torch").mkdir()
    serve = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        variables = {"PATH": f"{programs}:{os.environ['PATH']}"}
        variables["TORCH_CPU_INDEX"] = address if index != "gone" else f"{address}/gone"
        try:
            script = [str(ROOT / "scripts/install_torch.sh"), str(python)]
            done = subprocess.run(script, capture_output=True, text=True, check=True, env=variables)
        finally:
            server.shutdown()
            thread.join()
    first, last = done.stdout.splitlines()
    assert said in first
    arguments = "-m pip install --quiet --disable-pip-version-check -c constraints.txt torch"
    assert last == f"extra {address if chosen else ''} {arguments}"

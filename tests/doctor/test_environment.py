"""`insitu env`: what a bug report needs."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from processes import run

from insitu import __version__


def test_it_prints_versions_and_the_machine() -> None:
    shown = json.loads(run("env", "--json").stdout)
    assert shown["insitu"] == __version__
    assert shown["python"].endswith(platform.python_version())
    assert shown["cores"] == len(os.sched_getaffinity(0))
    assert shown["packages"]["torch"].startswith("2.")
    assert "pytest" not in shown["packages"]
    assert shown["programs"].keys() == {"bwrap", "docker", "podman", "node"}
    lines = run("env").stdout.splitlines()
    assert lines[0] == f"insitu: {__version__}"
    assert f"transformers: {shown['packages']['transformers']}" in lines


def test_it_works_without_torch_and_with_one_that_is_broken(tmp_path: Path) -> None:
    missing = "import sys; sys.modules['torch'] = None; from insitu.cli import main; sys.argv[1:] = ['env']; main()"
    shown = subprocess.run([sys.executable, "-c", missing], capture_output=True, text=True, check=True).stdout
    assert "gpus: none that torch sees" in shown
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so: cannot open shared object file')")
    command = [sys.executable, "-m", "insitu", "env"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert "gpus: unknown, torch cannot be used: OSError: libcudart.so" in shown


def test_it_prints_no_secret(tmp_path: Path) -> None:
    secret = "sk-0123456789abcdef0123456789abcdef"
    done = run("env", OPENAI_API_KEY=secret, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert secret not in done.stdout + done.stderr
    assert str(tmp_path) not in done.stdout

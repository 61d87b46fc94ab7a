"""The notebook of the examples, executed by a Jupyter kernel."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from factories import ROOT
from processes import HANGS, forked_python, install_forked_command

EXECUTE = """
import nbformat, sys
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=None, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[1])
"""


@pytest.mark.slow
def test_the_notebook_trains(tmp_path: Path) -> None:
    notebook = Path(shutil.copy(ROOT / "examples/notebook.ipynb", tmp_path))
    (startup := tmp_path / "ipython/profile_default/startup").mkdir(parents=True)
    (startup / "forks.py").write_text(f"import sys\nsys.executable = {forked_python()!r}  # the backends are forked\n")
    (programs := tmp_path / "programs").mkdir()
    install_forked_command(programs / "insitu")
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "JUPYTER_CONFIG_DIR": str(tmp_path),
    }
    command = [sys.executable, "-c", EXECUTE, str(notebook)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr
    outputs = [
        output
        for cell in json.loads(notebook.read_text())["cells"]
        for output in cell.get("outputs", ())
        if output.get("name") != "stderr"
    ]
    shown = "".join("".join(output.get("data", {}).get("text/plain", "")) for output in outputs)
    tables = ["".join(html) for output in outputs if (html := output.get("data", {}).get("text/html"))]
    assert any("epoch 4/4  reward" in text for text in tables)  # rich prints in a notebook by HTML
    assert "completed, epoch 4 of 4, held out 0." in shown
    assert any("<th>avg_reward</th>" in table for table in tables)
    assert any("<th>answer</th>" in table for table in tables)
    assert "session:answer" in (tmp_path / "runs/notebook/config.yml").read_text()
    scores = json.loads((tmp_path / "runs/notebook/validation_history.json").read_text())
    assert scores[-1]["avg_reward"] > scores[0]["avg_reward"]

"""What `address: auto` says on a machine that belongs to no Ray cluster: the one of the other tests has ended."""

import os
import re
import subprocess
from pathlib import Path

from conftest import PYTHON
from factories import digits_project, write_rows


def test_auto_without_a_cluster(tmp_path: Path) -> None:
    write_rows(digits_project(tmp_path), [{"say": "Row"}])
    command = [PYTHON, "-m", "insitu", "finetune", "--config_file", "config.yml"]
    command += ["-o", "general.executor", "{_type: ray, workers: 2}"]
    environment = {**os.environ, "RAY_TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    said = "general.executor.address is 'auto', but no Ray cluster can be reached there ("
    assert re.search(re.escape(said), done.stderr), done.stderr
    assert "start a Ray cluster (ray start --head)" in done.stderr
    assert not (tmp_path / "run").exists()

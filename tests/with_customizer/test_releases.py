"""The NeMo Customizer plugin with each supported pair of client libraries, in an environment of its own."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from factories import customizer_project
from fake_nemo import FakeNeMo
from processes import wait_until

ROOT = Path(__file__).parents[2]
RELEASES = ("1.4.0", "1.5.0")
each_release = pytest.mark.parametrize("release", RELEASES)


@pytest.fixture
def nemo() -> Iterator[FakeNeMo]:
    with FakeNeMo(lfs_bytes=600) as nemo:  # of the two files, the larger one is kept in LFS
        yield nemo


def start(release: str, folder: Path, *options: str) -> subprocess.Popen[str]:
    nat = ROOT / ".environments/customizer" / release / "bin" / "nat"
    command = [nat, "finetune", "--config_file", "config.yml", *options]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


@each_release
def test_a_run_trains_and_deploys(release: str, tmp_path: Path, nemo: FakeNeMo) -> None:
    nemo.token = "hf_secret"
    customizer_project(tmp_path, nemo, rows=12, adapter={"deploy_on_completion": True, "hf_token": "hf_secret"})
    code, out, err = finish(start(release, tmp_path))
    assert code == 0, err
    assert "Traceback" not in out + err
    [dataset] = nemo.repositories
    assert len(nemo.records(dataset, "training")) + len(nemo.records(dataset, "validation")) == 36
    assert len(nemo.objects) == 1
    assert [job["problem"] for job in nemo.jobs.values()] == [None]
    assert len(nemo.deployments) == 1
    assert json.loads((tmp_path / "run/final_metrics.json").read_text())["status"] == "completed"


@each_release
def test_transient_failures_are_survived(release: str, tmp_path: Path, nemo: FakeNeMo) -> None:
    for pattern in ("POST /v1/namespaces", "repos/create", "preupload", "info/lfs", "commit", "GET .*jobs/"):
        nemo.fail(pattern, 503)
    for pattern in ("POST /v1/datasets", "POST .*jobs$", "PUT .*lfs"):
        nemo.fail(pattern, lost=True)
    customizer_project(tmp_path, nemo, rows=12)
    code, _, err = finish(start(release, tmp_path))
    assert code == 0, err
    assert all(fault.times == 0 for fault in nemo.faults)
    assert len(nemo.jobs) == len(nemo.datasets) == 1


@each_release
def test_an_expired_token_and_a_wrong_address_are_named(release: str, tmp_path: Path, nemo: FakeNeMo) -> None:
    nemo.token = "another"
    customizer_project(tmp_path, nemo, adapter={"hf_token": "hf_secret"})
    code, out, err = finish(start(release, tmp_path))
    assert (code, err.count("\n")) == (1, 1)
    assert "the token has expired (status 401); check hf_token" in err
    customizer_project(tmp_path, nemo, adapter={"entity_host": "http://127.0.0.1:1"})
    code, out, err = finish(start(release, tmp_path))
    assert (code, err.count("\n")) == (1, 1)
    assert "namespace games at http://127.0.0.1:1: ConnectError: [Errno 111] Connection refused" in err
    assert "hf_secret" not in out + err


@each_release
def test_a_refused_upload_is_named(release: str, tmp_path: Path, nemo: FakeNeMo) -> None:
    nemo.fail("repos/create", 403)
    customizer_project(tmp_path, nemo)
    code, _, err = finish(start(release, tmp_path))
    assert code == 1
    assert "made to fail with 403 (status 403); check hf_token" in err


@each_release
def test_ctrl_c_cancels_the_job(release: str, tmp_path: Path, nemo: FakeNeMo) -> None:
    nemo.script = ["running"]
    customizer_project(tmp_path, nemo)
    process = start(release, tmp_path)
    wait_until(lambda: nemo.requested("GET .*jobs/cust-0") or process.poll() is not None)
    assert process.poll() is None, finish(process)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert (code, nemo.jobs["cust-0"]["script"][-1]) == (130, "cancelled"), err


@each_release
def test_a_run_that_was_killed_goes_on_with_the_same_job(release: str, tmp_path: Path, nemo: FakeNeMo) -> None:
    nemo.hold("POST .*jobs$")
    customizer_project(tmp_path, nemo)
    process = start(release, tmp_path)
    wait_until(lambda: nemo.held or process.poll() is not None)
    assert process.poll() is None, finish(process)
    process.kill()
    finish(process)
    nemo.release()
    assert len(nemo.jobs) == 1
    code, out, err = finish(start(release, tmp_path, "--resume"))
    assert code == 0, err
    assert "continues: its pairs have been collected" in out
    assert len(nemo.jobs) == 1


@each_release
def test_the_libraries_are_those_that_are_claimed(release: str) -> None:
    python = ROOT / ".environments/customizer" / release / "bin" / "python"
    code = "import huggingface_hub as h, nemo_microservices as n; print(n.__version__, h.__version__)"
    versions = subprocess.check_output([python, "-c", code], text=True, env={**os.environ}).split()
    assert versions[0] == release
    assert versions[1].startswith("0.34." if release == "1.4.0" else "2.")

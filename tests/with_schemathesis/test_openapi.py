"""Requests that schemathesis generates from the backend's OpenAPI document: no 5xx, no hang.

`make test WITH=hostile` sends 10,000 over all protocols; INSITU_FUZZ_REQUESTS sets the number, INSITU_FUZZ_SEED the
first seed. schemathesis has its own environment: it pins libraries that ours need in other releases.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import httpx
from processes import HANGS, fork_server, serving
from tiny_models import save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
REQUESTS = int(os.environ.get("INSITU_FUZZ_REQUESTS", "10000"))
SEED = int(os.environ.get("INSITU_FUZZ_SEED", "1"))
PER_OPERATION = 40
TOKEN = "fuzzing-token"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


def fuzz(address: str, report: Path, seed: int, *options: str) -> tuple[int, list[Any]]:
    """Number of requests sent, and what went wrong."""
    model = {"entity": "insitu", "project": "p", "name": "fuzzed", "base_model": "model"}  # earlier ones deleted it
    made = httpx.post(f"{address}/v1/preview/models", json=model, headers=HEADERS, timeout=HANGS).json()
    command = [
        ROOT / ".environments/schemathesis/bin/schemathesis",
        "run",
        f"{address}/openapi.json",
        "--seed",
        str(seed),
    ]
    command += ["--header", f"Authorization: Bearer {TOKEN}", "--checks", "not_a_server_error"]
    command += ["--max-examples", str(PER_OPERATION), "--request-timeout", "60", "--continue-on-failure"]
    command += ["--suppress-health-check", "too_slow,data_too_large"]  # of what it generates
    command += ["--warnings", "off", "--report", "json", "--report-json-path", str(report), *options]
    variables = {"SCHEMATHESIS_HOOKS": "openapi_hooks", "PYTHONPATH": str(ROOT / "tests/with_schemathesis")}
    variables |= {"INSITU_FUZZ_MODEL_ID": made["id"], "INSITU_FUZZ_SEED": str(seed)}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables, cwd=report.parent)
    assert report.exists(), done.stdout + done.stderr
    found = json.loads(report.read_text())
    problems = found["failures"] + found["errors"]
    assert bool(problems) == bool(done.returncode), done.stdout
    return found["test_cases"]["generated"], [*problems, done.stdout] if problems else []


def test_the_backend(tmp_path: Path) -> None:
    options = {"model": save_tiny_model(tmp_path / "model"), "port": 0, "token": TOKEN, "output_dir": tmp_path / "out"}
    sent, seed = 0, SEED
    arguments = [part for key, value in options.items() for part in (f"--{key}", value)]
    with fork_server(), serving("backend", *arguments) as (_, address):
        while sent < REQUESTS:
            phases = "coverage,fuzzing" if seed == SEED else "fuzzing"  # the same in each run
            count, problems = fuzz(address, tmp_path / "report.json", seed, "--phases", phases)
            sent, seed = sent + count, seed + 1
            print(f"seed {seed - 1}: {sent} requests of {REQUESTS}")
            assert not problems, f"INSITU_FUZZ_SEED={seed - 1}: {problems[:-1]}\n{problems[-1]}"
        assert httpx.get(f"{address}/health", timeout=HANGS).json()["status"] == "ok"
        completion = {"model": "policy", "prompt": "Hi", "max_tokens": 2}
        answer = httpx.post(f"{address}/v1/completions", json=completion, headers=HEADERS, timeout=HANGS)
        assert answer.json()["usage"]["completion_tokens"] > 0

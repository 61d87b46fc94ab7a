"""Whole runs whose batches are ahead, with the other features of a run: services, commands, vLLM, failures."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from anyio.from_thread import start_blocking_portal
from equal_runs import differences
from factories import MODEL, digits_project, read_lines, write_rows
from fake_vllm import FakeVllm
from processes import serving
from test_staleness import EPOCHS, project, stale, whole_run

from insitu.backend.model import load_model

COMMAND = """
import json, os, random, select, sys, urllib.request
question = json.load(sys.stdin)
select.select([], [], [], random.expovariate(1 / question["pause"]))
body = {"model": "policy", "messages": [{"role": "user", "content": question["say"]}], "max_tokens": 6}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
print("|" + json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


def versions_by_epoch(folder: Path) -> dict[int, set[int]]:
    """The policy versions that the calls of each epoch were sampled from."""
    versions: dict[int, set[int]] = {}
    for call in read_lines(folder / "calls.jsonl.gz")[1:]:
        versions.setdefault(int(call["episode"].split("/")[1]), set()).add(call["policy_version"])
    return versions


def planned(staleness: int, epochs: int = EPOCHS) -> dict[int, set[int]]:
    return {epoch: {max(epoch - 1 - staleness, 0)} for epoch in range(1, epochs + 1)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("block", marks=pytest.mark.slow), "--endpoint"])
def test_episodes_in_a_service_are_those_of_this_process(tmp_path: Path, kind: str) -> None:
    here = whole_run(project(tmp_path / "here"), *stale(1))
    folder = project(tmp_path / "there")
    with serving("serve", "--config_file", "config.yml", "--port", "0", folder=folder) as (_, address):
        block = ("-o", "general.executor", json.dumps({"_type": "service", "url": address}))
        there = whole_run(folder, *stale(1), *(block if kind == "block" else ("--endpoint", address)))
    lines = differences(here, there, {"digest", "executor", "endpoint", "--endpoint"})
    assert [line for line in lines if "executor" not in line] == []


@pytest.mark.slow
def test_commands_are_sampled_from_planned_versions(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    block = {"_type": "command", "command": [sys.executable, "agent.py"], "stdin": "input"}
    digits_project(folder, workflow=block)
    (folder / "agent.py").write_text(COMMAND)
    write_rows(folder, [{"say": f"Row {number}", "pause": 0.05} for number in range(3)])
    assert versions_by_epoch(whole_run(folder, *stale(1, epochs=3))) == planned(1, epochs=3)


@pytest.mark.slow
def test_adapters_on_vllm_are_sampled_from_planned_versions(tmp_path: Path) -> None:
    with start_blocking_portal() as portal:
        module = load_model(str(MODEL), "cpu").module
        with portal.wrap_async_context_manager(FakeVllm(module)) as vllm:
            folder = project(tmp_path / "project")
            config = yaml.safe_load((folder / "config.yml").read_text())
            config["trainers"]["grpo"] = {"_type": "insitu_sft_trainer", "staleness": 1}
            config["trainer_adapters"]["backend"] |= {
                "training": {"method": "sft", "learning_rate": 1e-9, "lora": {"rank": 4}},
                "sampler": {"_type": "vllm", "addresses": [vllm.address]},
            }
            (folder / "config.yml").write_text(yaml.safe_dump(config))
            run = whole_run(folder, "-o", "finetuning.num_epochs", "4")
            asked = [*vllm.asked]
    assert versions_by_epoch(run) == planned(1, epochs=4)
    assert len({*asked}) == 3, asked


@pytest.mark.slow
def test_failures_of_batches_ahead_are_counted_in_their_epochs(tmp_path: Path) -> None:
    folder = project(tmp_path / "project")
    rows: list[dict[str, Any]] = [{"say": f"Row {number}", "pause": 0.05} for number in range(4)]
    write_rows(folder, [*rows, {"say": "slow", "hang": True}, {"say": "bad", "raise": "on purpose"}])
    limits = ("-o", "eval.general.episode_timeout", "1.5", "-o", "eval.general.retries", "0")
    first = whole_run(folder, *stale(1, epochs=3), *limits, "-o", "finetuning.reward_function.on_failure", "0")
    groups = read_lines(first / "groups.jsonl")[1:]
    assert [group["epoch"] for group in groups] == [epoch for epoch in (1, 2, 3) for _ in range(6)]
    reasons = {(e["epoch"], e["row_id"]): e["reason"] for e in read_lines(first / "episodes.jsonl.gz")[1:]}
    assert [reasons[epoch, "4"] for epoch in (1, 2, 3)] == ["timeout"] * 3
    assert [reasons[epoch, "5"] for epoch in (1, 2, 3)] == ["workflow_error"] * 3

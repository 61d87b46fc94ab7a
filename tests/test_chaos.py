"""Whole runs whose connection to the backend is damaged at random: they end, and train every call once at most."""

import json
import os
import re
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from chaos_proxy import ChaosProxy, Training
from factories import digits_project, read_lines, write_rows
from processes import run_project, wait_until
from tiny_backend import Served

EPOCHS = 2
FULL = "CHAOS_SEEDS" in os.environ
"""As by `make test-chaos`: 50 seeds, 200 episodes a run."""
ROWS, GENERATIONS = (10, 10) if FULL else (4, 4)


@pytest.mark.parametrize("seed", range(int(os.environ.get("CHAOS_SEEDS", "2"))))
def test_a_run_ends_and_trains_only_what_was_sampled_once(served: Served, tmp_path: Path, seed: int) -> None:
    before = len(served.samples())
    with ChaosProxy(served.address, seed) as proxy:
        digits_project(tmp_path, url=proxy.address, api_key=served.token, read_timeout=1, retry_timeout=20)
        write_rows(tmp_path, [{"say": f"Row {i}", "stream": bool(i % 2)} for i in range(ROWS)])
        limits = {"eval.general.retries": 2, "llms.player.max_retries": 3, "llms.player.timeout": 2}
        sizes = {"trajectory_builders.episodes.num_generations": GENERATIONS, "finetuning.num_epochs": EPOCHS}
        overrides = [text for key, value in (limits | sizes).items() for text in ("-o", key, str(value))]
        code, _, err = run_project(tmp_path, *overrides)
    reason = err.strip().splitlines()[-1] if err.strip() else ""
    assert "Traceback" not in err, err
    if code:
        assert code == 1, err
        assert re.fullmatch(r"failed: .+", reason), err
    else:
        check_sums(tmp_path / "run")
    trained = completed_jobs(served, proxy.trainings)
    assert len({training.key for _, training in trained}) == len(trained), "a job was trained twice"
    calls = tmp_path / "run/calls.jsonl"
    check_sampled(trained, read_lines(calls)[1:] if calls.exists() else [], served.samples()[before:])
    print(f"seed {seed}: exit code {code}, {len(trained)} jobs, faults {dict(sorted(proxy.faults.items()))} {reason}")


def check_sums(run: Path) -> None:
    """Every planned episode has an outcome; those that were scored are trained or dropped for a reason."""
    planned = {(str(row), generation) for row in range(ROWS) for generation in range(GENERATIONS)}
    episodes = read_lines(run / "episodes.jsonl")[1:]
    weighed = read_lines(run / "advantages.jsonl")[1:]
    metrics = read_lines(run / "training_metrics.jsonl")
    assert [m["epoch"] for m in metrics] == [*range(1, EPOCHS + 1)]
    for m in metrics:
        of_epoch = [e for e in episodes if e["epoch"] == m["epoch"]]
        assert sorted((e["row_id"], e["generation"]) for e in of_epoch) == sorted(planned)
        scored = [e for e in of_epoch if e["reward"] is not None and e["reason"] is None]
        assert len(scored) == m["num_trajectories"]
        assert all(e["reason"] for e in of_epoch if e not in scored)
        dropped = [w for w in weighed if w["epoch"] == m["epoch"] and w["dropped"]]
        assert m["filtered_trajectories"] == len(scored) - len(dropped)
        assert sum(m["dropped"].values()) == len(of_epoch) - m["filtered_trajectories"]


def completed_jobs(served: Served, trainings: list[Training]) -> list[tuple[int, Training]]:
    """The completed jobs with the version that each produced."""
    jobs = {training.job_id: training for training in trainings}
    states = {job_id: final_state(served, job_id) for job_id in jobs}
    completed = [jobs[job_id] for job_id, state in states.items() if state["status"] == "completed"]
    return [(states[training.job_id]["policy_version"], training) for training in completed]


def final_state(served: Served, job_id: str) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{served.address}/v1/train/jobs/{job_id}", headers={"Authorization": f"Bearer {served.token}"}
    )
    states: list[dict[str, Any]] = []

    def ended() -> bool:
        with urllib.request.urlopen(request) as answer:
            states.append(json.load(answer))
        return states[-1]["status"] not in ("pending", "running")

    wait_until(ended)
    return states[-1]


def check_sampled(
    trained: list[tuple[int, Training]], calls: list[dict[str, Any]], samples: list[dict[str, Any]]
) -> None:
    """Each trained token is one that the backend sampled, by the version before the job, in a call trained once."""
    known = {(c["episode"], c["index"]): c for c in calls}
    sampled = {(s["version"], *map(tuple, (s["prompt_token_ids"], s["token_ids"], s["logprobs"]))) for s in samples}
    used: Counter[tuple[str, int]] = Counter()
    for version, training in trained:
        for row in training.rows:
            (index,) = row["calls"]
            call = known[row["episode"], index]
            used[row["episode"], index] += 1
            start = row["loss_mask"].index(1)
            assert all(row["loss_mask"][start:])
            assert call["error"] is None
            assert call["policy_version"] == version - 1
            tokens = tuple(row["token_ids"][:start]), tuple(row["token_ids"][start:]), tuple(row["logprobs"][start:])
            assert (version - 1, *tokens) in sampled
    assert not [call for call, times in used.items() if times > 1]

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
"""As by `make test WITH=chaos`: 50 seeds, 200 episodes a run."""
ROWS, GENERATIONS = (10, 10) if FULL else (4, 4)


@pytest.mark.parametrize("seed", range(int(os.environ.get("CHAOS_SEEDS", "1"))))
def test_a_run_ends_and_trains_only_what_was_sampled_once(served: Served, tmp_path: Path, seed: int) -> None:
    before = len(served.samples())
    with ChaosProxy(served.address, seed) as proxy:
        digits_project(tmp_path, url=proxy.address, api_key=served.token, read_timeout=1, retry_timeout=20)
        write_rows(tmp_path, [{"say": f"Row {i}", "stream": bool(i % 2)} for i in range(ROWS)])
        limits = {"eval.general.retries": 2, "llms.player.max_retries": 3, "llms.player.timeout": 2}
        sizes = {"trajectory_builders.episodes.num_generations": GENERATIONS, "finetuning.num_epochs": EPOCHS}
        slow = {"trainer_adapters.backend.training.learning_rate": 1e-6}  # or the backend of all seeds learns the task
        overrides = [text for key, value in (limits | sizes | slow).items() for text in ("-o", key, str(value))]
        code, _, err = run_project(tmp_path, *overrides)
    summary = check_run(tmp_path / "run", code, err, served, proxy, before)
    print(f"seed {seed}: {summary}")


def check_run(run: Path, code: int, err: str, served: Served, proxy: ChaosProxy, before: int) -> str:
    """Describes a run that ended as it should; `before` it, the backend had sampled that many completions."""
    reason = err.strip().splitlines()[-1] if err.strip() else ""
    assert "Traceback" not in err, err
    if code:
        assert code == 1, err
        assert re.fullmatch(r"failed: .+", reason), err
    else:
        check_sums(run)
    trained = completed_jobs(served, proxy.trainings)
    assert len({training.key for _, training in trained}) == len(trained), "a job was trained twice"
    assert code or len(trained) == EPOCHS
    calls = run / "calls.jsonl.gz"
    check_sampled(trained, read_lines(calls)[1:] if calls.exists() else [], served.samples()[before:])
    return f"exit code {code}, {len(trained)} jobs, faults {dict(sorted(proxy.faults.items()))} {reason}"


def check_sums(run: Path) -> None:
    """Every planned episode has an outcome; those that were scored are trained or dropped for a reason."""
    planned = {(str(row), generation) for row in range(ROWS) for generation in range(GENERATIONS)}
    episodes = read_lines(run / "episodes.jsonl.gz")[1:]
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
    jobs = {training.job_id: training for training in trainings if training.job_id is not None}
    by_key = {training.key: training for training in trainings if training.job_id is None}
    for job in ask(served, "/art/jobs")["jobs"] if by_key else ():
        (*_, run_id, epoch, step) = job["key"].split("/")
        if training := by_key.get(f"{run_id}/{epoch}/{step}"):
            jobs[job["id"]] = training
    states = {job_id: final_state(served, job_id) for job_id in jobs}
    completed = [job_id for job_id, state in states.items() if state["status"] == "completed"]
    return [(states[job_id]["policy_version"], jobs[job_id]) for job_id in completed]


def ask(served: Served, path: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {served.token}"}
    with urllib.request.urlopen(urllib.request.Request(served.address + path, headers=headers)) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def final_state(served: Served, job_id: str) -> dict[str, Any]:
    states: list[dict[str, Any]] = []

    def ended() -> bool:
        states.append(ask(served, f"/v1/train/jobs/{job_id}"))
        return states[-1]["status"] not in ("pending", "running")

    wait_until(ended)
    return states[-1]


def check_sampled(
    trained: list[tuple[int, Training]], calls: list[dict[str, Any]], samples: list[dict[str, Any]]
) -> None:
    """Each trained token is one that the backend sampled, by the version before the job, in a call trained once."""
    known: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for call in (call for call in calls if call["error"] is None):
        tokens = map(tuple, (call["prompt_token_ids"], call["token_ids"]))
        known.setdefault((call["episode"], *tokens), []).append(call)
    sampled = {(s["version"], *map(tuple, (s["prompt_token_ids"], s["token_ids"], s["logprobs"]))) for s in samples}
    used: Counter[tuple[str, int]] = Counter()
    for version, training in trained:
        for sample in training.samples:
            (call,) = known[sample.episode, sample.prompt, sample.tokens]
            used[call["episode"], call["index"]] += 1
            assert call["policy_version"] == version - 1
            assert (version - 1, *sample[1:]) in sampled
    assert not [call for call, times in used.items() if times > 1]

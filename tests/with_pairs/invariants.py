"""What holds of every run, whatever its features: `check_run`."""

import gzip
import hashlib
import json
import os
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import polars
from factories import read_lines
from processes import run, serving
from projects import FAILURE, GENERATIONS, SECRETS, Project, metrics_of

GAP = 1e-4
"""Nats by which a log-probability of the learner may differ from that of the sampler, in float32."""


def check_run(project: Project, folder: Path) -> None:
    """The run in `folder` has lost nothing and says the same everywhere."""
    check_secrets(folder)
    check_accounting(project, folder)
    if project.nemo is not None:
        return
    check_trackers(project, folder)
    if not project.trains_here:
        check_what_was_sent(folder)
        return
    check_what_was_trained(project, folder)
    check_gap(folder)
    check_weights(project, folder)


def check_secrets(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            text = gzip.decompress(data) if path.suffix == ".gz" else data
            assert not [secret for secret in SECRETS if secret.encode() in text], path


def check_accounting(project: Project, folder: Path) -> None:
    """Each planned episode is recorded once, and is in its group or in a pair, or dropped there for a reason."""
    recorded = read_lines(folder / "episodes.jsonl.gz")[1:]
    episodes = Counter((e["epoch"], e["row_id"]) for e in recorded)
    groups = read_lines(folder / "groups.jsonl")[1:]
    errors = [e["error"] for e in recorded if e["outcome"] != "ok" and FAILURE not in e["error"]]
    assert not errors, "only what the agent does by itself fails"
    assert {(g["epoch"], g["row_id"]): g["num_episodes"] for g in groups} == episodes
    assert set(episodes.values()) == {GENERATIONS}
    assert set(Counter(epoch for epoch, _ in episodes).values()) == {project.rows}
    for group in groups:
        if project.makes_pairs:
            of_row = [e for e in recorded if (e["epoch"], e["row_id"]) == (group["epoch"], group["row_id"])]
            left_out = [e for e in of_row if e["episode"] not in group.get("paired", ())]
            assert all(e["reason"] for e in left_out), group
        else:
            assert len(group["episodes"]) + sum(group["dropped"].values()) == GENERATIONS, group


def check_what_was_trained(project: Project, folder: Path) -> None:
    """Page, `trajectories show`, the table and the metrics call the same episodes trained, with the same advantages.

    Without advantages they call them the same sides of the same pairs, or desirable, undesirable or the best.
    """
    recorded = {e["episode"]: e for e in read_lines(folder / "episodes.jsonl.gz")[1:]}
    trained = {name for name, status in shown_statuses(folder).items() if status == "trained"}
    page, advantages, sides = page_statuses(folder)
    assert {name for name, status in page.items() if status == "trained"} == trained
    table = table_of(folder)
    in_table = {row["episode"]: json.loads(row["advantages"]) for row in table if row["dropped"] is None}
    sides_in_table = {row["episode"]: [s for s in json.loads(row["sides"]) if not s["dropped"]] for row in table}
    if project.is_group_relative:
        assert {name: values for name, values in in_table.items() if values} == advantages
    else:
        assert not any(advantages.values())
        assert {name: found for name, found in sides_in_table.items() if found} == sides
        assert sides.keys() == trained
    for metrics in metrics_of(folder):
        of_epoch = {name for name in trained if recorded[name]["epoch"] == metrics["epoch"]}
        if metrics["job"] is None:
            assert not of_epoch, metrics
            continue
        if project.makes_pairs:
            assert len({side["pair"] for name in of_epoch for side in sides[name]}) == metrics["pairs"], metrics
        else:
            assert len(of_epoch) == metrics["episodes"], metrics
        assert sum(tokens_of(folder, of_epoch, advantages, sides)) == metrics["tokens"], metrics


def check_what_was_sent(folder: Path) -> None:
    """Page and `trajectories show` call the same episodes sent, which the server has trained as it thinks best."""
    sent = {name for name, status in shown_statuses(folder).items() if status == "sent"}
    page, _, _ = page_statuses(folder)
    assert {name for name, status in page.items() if status == "sent"} == sent
    assert len(sent) == sum(metrics["filtered_trajectories"] for metrics in metrics_of(folder) if metrics["job"])


def shown_statuses(folder: Path) -> dict[str, str]:
    done = run("trajectories", "show", folder)
    assert done.returncode == 0, done.stderr
    lines = [line.split("  ") for line in done.stdout.splitlines()]
    return {parts[0]: "trained" if "trained" in map(str.strip, parts) else parts[-1].strip() for parts in lines}


def page_statuses(folder: Path) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
    """The status of each episode on the page; of the trained ones the advantages by call, or the sides."""
    with serving("view", folder, "--port", "0") as (_, address):

        def ask(path: str) -> Any:
            with urllib.request.urlopen(f"{address}{path}") as response:
                return json.load(response)

        episodes = ask("/api/episodes?limit=1000")["episodes"]
        statuses = {episode["episode"]: episode["status"] for episode in episodes}
        details = {e: ask(f"/api/episode?episode={quote(e)}") for e, s in statuses.items() if s == "trained"}
    return (
        statuses,
        {
            name: {
                str(call["index"]): call["advantage"] for call in detail["calls"] if call.get("advantage") is not None
            }
            for name, detail in details.items()
        },
        {name: kept for name, detail in details.items() if (kept := [s for s in detail["sides"] if not s["dropped"]])},
    )


def table_of(folder: Path) -> list[dict[str, Any]]:
    file = folder.parent / f"{folder.name}.parquet"
    done = run("trajectories", "export", folder, "--format", "parquet", "--output", file, "--force")
    assert done.returncode == 0, done.stderr
    return polars.read_parquet(file).to_dicts()


def tokens_of(
    folder: Path, episodes: set[str], advantages: dict[str, Any], sides: dict[str, list[dict[str, Any]]]
) -> Iterator[int]:
    """The number of sampled tokens of each trained call, once for each pair that it is in."""
    calls = {(c["episode"], c["index"]): len(c["token_ids"] or ()) for c in read_lines(folder / "calls.jsonl.gz")[1:]}
    for name in episodes:
        trained = [int(index) for index in advantages[name]]
        trained += [index for side in sides.get(name, ()) for index in side["calls"]]
        yield from (calls[name, index] for index in trained)


def check_gap(folder: Path) -> None:
    for metrics in metrics_of(folder):
        if (metrics.get("sampled_version") or 0) + 1 < (metrics["policy_version"] or 0):  # sampled from earlier weights
            continue
        assert metrics.get("logprob_gap") is None or metrics["logprob_gap"] < GAP, metrics


def check_weights(project: Project, folder: Path) -> None:
    """`best.json`, `export` and the checkpoint on disk are the same weights, and `eval` scores them."""
    if project.case["validation"] == "none":
        return
    best = json.loads((folder / "best.json").read_text())
    target = folder.parent / f"{folder.name}-exported"
    done = run("export", folder, target, "--checkpoint", "best", folder=project.folder)
    if best["checkpoint"] is None:
        assert best["policy_version"] == 0, "only the initial weights have no checkpoint"
        assert done.returncode != 0, "the initial weights are not a version of the run"
        return
    assert done.returncode == 0, done.stderr
    checkpoint = Path(folder / best["checkpoint"])
    if project.case["weights"] == "all":
        assert digest(target) == digest(checkpoint)
    training = json.loads((checkpoint / "training.json").read_text())
    assert training["version"] == best["policy_version"]
    if project.case["adapter"] == "child":  # else no backend of the run's own could serve them
        done = run("eval", "--config_file", "config.yml", "--checkpoint", f"{folder}/best", folder=project.folder)
        assert str(checkpoint.resolve()) in done.stderr.replace("\n", ""), (done.stdout, done.stderr)


def digest(folder: Path) -> set[str]:
    files = [path for path in folder.glob("*.safetensors") if path.name != "optimizer.safetensors"]
    assert files, os.listdir(folder)
    return {hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def check_trackers(project: Project, folder: Path) -> None:
    """The tracker was given the numbers of the metrics, once each epoch."""
    if project.case["report_to"] == "none":
        return
    logged = [line for line in read_lines(folder / "trackers/recording.jsonl") if line["epoch"]]
    assert [line["epoch"] for line in logged] == [metrics["epoch"] for metrics in metrics_of(folder)]
    for line, metrics in zip(logged, metrics_of(folder), strict=True):
        assert line["metrics"].get("train/reward") == metrics["avg_reward"], line


def check_same_training(one: Path, fork: Path) -> None:
    """The fork has gone on as the other run has: the same numbers and the same weights."""
    changing = ("run_id", "timestamp", "seconds")
    first, second = (
        [{k: v for k, v in m.items() if k not in changing} for m in metrics_of(run)] for run in (one, fork)
    )
    assert first == second
    last = [max((run / "backend/checkpoints").iterdir()) for run in (one, fork)]
    assert digest(last[0]) == digest(last[1])

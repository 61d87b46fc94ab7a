"""What `insitu view` costs on a long run: time to the first page and to an episode, and memory.

    python benchmarks/view.py               the table
    python benchmarks/view.py FOLDER        keeps the run that is measured in this folder, and uses it if it exists
    python benchmarks/run.py view           the same into RESULTS.md

A run of 100,000 episodes of three calls, written by the store of real runs: 25 epochs of 500 rows with 8 generations.
The server is started anew, so that its index is built while the first pages are answered.
"""

import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode
from urllib.request import urlopen

import memory
import psutil

if TYPE_CHECKING:
    from insitu.schemas.episodes import Episode
    from insitu.schemas.finetuning import Trajectory

EPOCHS, ROWS, GENERATIONS, CALLS = 25, 500, 8, 3
PROMPT, SAMPLED = 20, 16
"""Words and tokens that each call adds to the prompt, and that it samples."""
LIMITS = "first page under 2 s, an episode under 0.2 s, memory under 300 MB"
RUN_ID = "insitu_run_0benchma"


def write_run(folder: Path, epochs: int = EPOCHS, rows: int = ROWS, generations: int = GENERATIONS) -> None:
    """A run's directory as the training loop writes it."""
    from insitu.runs.files import ADVANTAGES
    from insitu.runs.records import RunProgress, training_records
    from insitu.runs.store import RunStore
    from insitu.schemas.groups import GroupRecord

    store = RunStore(folder)
    settings = {"run_id": RUN_ID, "epochs": epochs, "seed": 0, "credit": "episode", "discount": 1.0}
    targets = {"functions": ["<workflow>"], "model": None, "llms": ["player"]}
    advantages = {"baseline": "mean", "scale": "sample_std", "epsilon": 1e-6}
    store.write("run.json", {**settings, "targets": targets, "advantages": advantages, "config": {}})
    store.record_event("started", insitu="benchmark")
    chance = random.Random(0)
    for epoch in range(1, epochs + 1):
        trajectories, of_calls = [], []
        for row in range(rows):
            episodes = [make_episode(chance, epoch, f"row-{row:04d}", each) for each in range(generations)]
            members = [as_trajectory(episode) for episode in episodes if episode.reward is not None]
            dropped = Counter({"timeout": generations - len(members)} if len(members) < generations else {})
            store.append_group(GroupRecord(f"row-{row:04d}", episodes, members, dropped), epoch)
            trajectories += members
        for trajectory in trajectories:
            of_calls.append((trajectory, {position: chance.gauss(0, 1) for position in range(CALLS)}))
        store.append(ADVANTAGES, training_records(epoch, trajectories, {}, of_calls))
        rewards = [trajectory.reward for trajectory in trajectories]
        metrics = {"epoch": epoch, "run_id": RUN_ID, "avg_reward": statistics.fmean(rewards), "job": "completed"}
        others = {"dropped": {}, "seconds": {"collect": 60.0, "train": 30.0, "validate": 0.0}, "tokens": 500_000}
        store.append("training_metrics.jsonl", [{**metrics, **others, "loss": chance.random(), "kl": chance.random()}])
    store.write("progress.json", RunProgress(run_id=RUN_ID, status="completed", epoch=epochs).model_dump(mode="json"))
    store.record_event("completed", epoch=epochs, error=None)
    store.close()


def make_episode(chance: random.Random, epoch: int, row: str, generation: int) -> "Episode":
    """Three turns; the texts and tokens are random. One of 100 fails."""
    from insitu.schemas.episodes import DropReason, Episode, EpisodeKey, EpisodeStatus, ModelCall

    started = 1.8e9 + epoch * 100 + chance.random()
    messages: list[dict[str, Any]] = []
    prompt: list[int] = []
    calls = []
    for index in range(CALLS):
        messages = [*messages, {"role": "user", "content": _words(chance, PROMPT)}]
        prompt = [*prompt, *chance.choices(range(30_000), k=PROMPT)]
        sampled = chance.choices(range(30_000), k=SAMPLED)
        answer = {"role": "assistant", "content": _words(chance, SAMPLED)}
        times = {"started": started + index, "ended": started + index + chance.random()}
        known = {"llm": "player", "finish_reason": "stop", "policy_version": epoch - 1, "functions": ("<workflow>",)}
        logprobs = [-chance.random() for _ in sampled]
        tokens = {"prompt_token_ids": prompt, "token_ids": sampled, "logprobs": logprobs}
        calls.append(ModelCall(index, "policy", messages, message=answer, **tokens, **known, **times))
        messages, prompt = [*messages, answer], [*prompt, *sampled]
    values: dict[str, Any] = {"output": _words(chance, SAMPLED), "reward": round(chance.random(), 2)}
    outcome = EpisodeStatus.OK
    if chance.random() < 0.01:
        values = {"reward": None, "reason": DropReason.TIMEOUT, "error": "EpisodeTimeout: no answer for 60 s"}
        outcome = EpisodeStatus.FAILED
    return Episode(EpisodeKey(RUN_ID, epoch, row, generation), outcome, calls=calls, seconds=float(CALLS), **values)


_VOCABULARY = [f"word{number:03d}" for number in range(500)]


def _words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(_VOCABULARY, k=count))


def as_trajectory(episode: "Episode") -> "Trajectory":
    from insitu.schemas.finetuning import Trajectory

    return Trajectory.model_construct(id=episode.key.text(), reward=episode.reward, calls=episode.calls, metadata={})


@contextmanager
def view_server(folder: Path) -> Iterator[tuple[str, int]]:
    """`insitu view`, its URL and process."""
    command = [sys.executable, "-m", "insitu", "view", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1], process.pid
        finally:
            process.terminate()


class Client:
    """Requests to a server, timed."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, **query: Any) -> tuple[float, Any]:
        """Seconds and the JSON of an answer."""
        started = time.perf_counter()
        with urlopen(f"{self._url}{path}?{urlencode(query)}") as answer:
            body = answer.read()
        seconds = time.perf_counter() - started
        return seconds, json.loads(body) if path.startswith("/api/") else None


def measure(folder: Path) -> dict[str, Any]:
    """Seconds of each page of a fresh server, and its peak memory in bytes."""
    chance = random.Random(1)
    (folder / ".index.sqlite").unlink(missing_ok=True)
    started = time.perf_counter()
    with view_server(folder) as (url, process):
        client = Client(url)
        ready = time.perf_counter() - started
        figures: dict[str, Any] = {"ready": ready, "ready_cpu": cpu_seconds(process)}
        figures["runs"] = client.get("/")[0] + client.get("/api/runs")[0]
        figures["run"] = client.get("/api/run", run=".")[0]
        figures["groups"], groups = client.get("/api/groups", run=".", limit=100)
        name = f"{RUN_ID}/{EPOCHS}/row-0499/7/0"
        figures["early_episode"] = client.get("/api/episode", run=".", episode=name)[0]
        figures["early_list"], listed = client.get("/api/episodes", run=".", limit=100)
        figures["indexed_first"] = listed["indexed"]["groups"]
        while listed["indexed"]["groups"] < groups["total"]:
            time.sleep(0.5)  # as the page does
            _, listed = client.get("/api/episodes", run=".", limit=1)
        figures["indexed"] = time.perf_counter() - started - ready
        figures["indexed_cpu"] = cpu_seconds(process) - figures["ready_cpu"]
        figures["episodes"] = listed["total"]
        figures["episode"] = [client.get("/api/episode", run=".", episode=_name(chance))[0] for _ in range(100)]
        figures["group"] = [
            client.get("/api/group", run=".", epoch=chance.randint(1, EPOCHS), row=_row(chance))[0] for _ in range(50)
        ]
        figures["sort"] = client.get("/api/episodes", run=".", sort="reward", descending=1)[0]
        figures["pages"] = [_page(client, chance) for _ in range(100)]
        figures["filter"] = client.get("/api/episodes", run=".", outcome="timeout", sort="seconds")[0]
        figures["memory"] = memory.peak(process)
    return figures


def cpu_seconds(process: int) -> float:
    times = psutil.Process(process).cpu_times()
    return times.user + times.system


def _row(chance: random.Random) -> str:
    return f"row-{chance.randrange(ROWS):04d}"


def _name(chance: random.Random) -> str:
    return f"{RUN_ID}/{chance.randint(1, EPOCHS)}/{_row(chance)}/{chance.randrange(GENERATIONS)}/0"


def _page(client: Client, chance: random.Random) -> float:
    """A page anywhere in the list of all episodes, as while scrolling."""
    offset = chance.randrange(EPOCHS * ROWS * GENERATIONS)
    return client.get("/api/episodes", run=".", sort="reward", descending=1, offset=offset, limit=100)[0]


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def median_and_slowest(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} s, {max(seconds):.3f} s"


def table(folder: Path) -> str:
    f = measure(folder)
    first = max(f[page] for page in ("runs", "run", "groups", "early_list"))
    lines = [
        ("the command until it serves", f"{f['ready']:.2f} s, processor time {f['ready_cpu']:.2f} s"),
        ("first page: the list of runs", f"{f['runs']:.2f} s"),
        (
            "first page: the run, its groups, its episodes",
            " s, ".join(f"{f[page]:.2f}" for page in ("run", "groups", "early_list")) + " s",
        ),
        ("an episode before the index is complete", f"{f['early_episode']:.3f} s"),
        ("until all episodes are indexed", f"{f['indexed']:.1f} s, processor time {f['indexed_cpu']:.1f} s"),
        (
            "an episode, median and slowest of 100",
            f"{statistics.median(f['episode']):.3f} s, {max(f['episode']):.3f} s",
        ),
        ("a group, median and slowest of 50", f"{statistics.median(f['group']):.3f} s, {max(f['group']):.3f} s"),
        ("episodes by reward, the first time", f"{f['sort']:.3f} s"),
        ("100 lines anywhere in it, median and slowest of 100", median_and_slowest(f["pages"])),
        ("episodes that timed out", f"{f['filter']:.3f} s"),
        ("peak memory of the server", f"{f['memory'] / 1e6:.0f} MB"),
    ]
    slowest = max(*f["episode"], f["early_episode"])
    verdict = "kept" if first < 2 and slowest < 0.2 and f["memory"] < 300e6 else "NOT kept"
    rows = "\n".join(f"| {what} | {value} |" for what, value in lines)
    return f"""## A long run in the browser

`insitu view` on a run of {f["episodes"]:,} episodes of {CALLS} calls ({size(folder) / 1e6:.0f} MB), whose
index is built while the first pages are answered. Asked for: {LIMITS}: {verdict}.

| what | measured |
|---|---|
{rows}
"""


def report() -> str:
    with TemporaryDirectory() as folder:
        write_run(Path(folder) / "run")
        return table(Path(folder) / "run")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        kept = Path(sys.argv[1])
        if not kept.exists():
            write_run(kept)
        print(table(kept))
    else:
        print(report())

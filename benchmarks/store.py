"""What a run's files cost: memory of a long run, bytes per episode, time to continue, and time spent on writing.

    python benchmarks/store.py              the table
    python benchmarks/run.py store          the same into RESULTS.md

Runs of `insitu finetune` against an endpoint that answers immediately, with a job that does nothing: of 1,000 and of
12,000 episodes of three turns, 500 an epoch. The long one is killed in an epoch and continued. The time spent on
writing is that of the quickstart's run.
"""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import collect
import memory

HERE = Path(__file__).parent
ROWS, GENERATIONS, LATENCY = 50, 10, 0.001
SHORT, LONG = 2, 24
LIMITS = "at most 50 MB more memory, half the bytes, 5 s to continue, 5 % of the time"

CONFIG = """
general: {{seed: 0, plugins: [store_plugin]}}
llms: {{model: {{_type: policy, temperature: 1.0}}}}
workflow: {{_type: store_agent, llm: model}}
eval:
  general: {{max_concurrency: 64, dataset: {{_type: jsonl, file_path: rows.jsonl}}}}
  evaluators: {{score: {{_type: store_score}}}}
trajectory_builders: {{episodes: {{_type: insitu_traj_builder, num_generations: {generations}}}}}
trainer_adapters: {{none: {{_type: store_adapter, url: "{url}"}}}}
trainers: {{trainer: {{_type: insitu_trainer}}}}
finetuning:
  enabled: true
  trainer: trainer
  trajectory_builder: episodes
  trainer_adapter: none
  reward_function: {{name: score}}
  num_epochs: {epochs}
  output_dir: run
"""


def write_project(folder: Path, url: str, epochs: int) -> None:
    (folder / "config.yml").write_text(CONFIG.format(url=url, epochs=epochs, generations=GENERATIONS))
    rows = (json.dumps({"id": row, "question": f"Game {row}.", "answer": ""}) for row in range(ROWS))
    (folder / "rows.jsonl").write_text("\n".join(rows))


def start(folder: Path, *options: str) -> "subprocess.Popen[str]":
    """`insitu finetune` in a process that leaves its figures in `figures.json` when it ends."""
    arguments = [sys.executable, __file__, "child", "finetune", "--config_file", "config.yml", *options]
    with (folder / "output.txt").open("w") as out:
        return subprocess.Popen(arguments, cwd=folder, stdout=out, stderr=subprocess.STDOUT, text=True)


def finished(folder: Path, process: "subprocess.Popen[str]") -> dict[str, float]:
    if process.wait() != 0:
        raise SystemExit((folder / "output.txt").read_text()[-3000:])
    figures: dict[str, float] = json.loads((folder / "figures.json").read_text())
    return figures


def child(arguments: list[str]) -> None:
    """Runs the command in this process, and measures what is spent in the methods that write files."""
    from insitu.cli import main
    from insitu.runs.resume import ResumableRun
    from insitu.runs.store import RunStore
    from insitu.training import observers

    spent = [0.0]
    for owner, names in ((RunStore, ("append", "append_group", "sync", "write")), (observers, ("journal_record",))):
        for name in names:
            setattr(owner, name, timed(getattr(owner, name), spent))
    opened = ResumableRun.open_folder
    began, wall = time.time(), time.perf_counter()

    def open_run(*given: Any) -> list[str]:
        started = time.perf_counter()
        notes = opened(*given)
        figures["open"] = time.perf_counter() - started
        return notes

    figures: dict[str, float] = {}
    ResumableRun.open_folder = open_run  # type: ignore[method-assign]
    sys.argv = ["insitu", *arguments]
    try:
        main()
    finally:
        figures |= {"began": began, "wall": time.perf_counter() - wall, "writing": spent[0], "peak": memory.peak()}
        Path("figures.json").write_text(json.dumps(figures))


def timed(method: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """Adds up the time of outermost calls; those that run in a thread do not hold up the event loop, but count."""
    inside = [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        inside[0] += 1
        started = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            inside[0] -= 1
            if not inside[0]:
                spent[0] += time.perf_counter() - started

    return call


def run_short(folder: Path, url: str) -> dict[str, float]:
    write_project(folder, url, SHORT)
    started = time.time()
    figures = finished(folder, start(folder))
    return {**figures, "first": collect.stats(url)["first"] - started}


def run_long(folder: Path, url: str) -> dict[str, float]:
    """Killed in its last epoch with 300 finished episodes, continued, and measured over again from nothing."""
    write_project(folder, url, LONG)
    peak = finished(folder, start(folder))["peak"]
    stored = bytes_per_episode(folder / "run")
    write_project(folder, url, LONG + 1)
    process = start(folder, "--resume")
    journal = folder / "run/journal.jsonl"
    while not journal.exists() or journal.read_bytes().count(b"\n") < 300:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    collect.stats(url)
    started = time.time()
    figures = finished(folder, start(folder, "--resume"))
    return {"peak": peak, "open": figures["open"], "first": collect.stats(url)["first"] - started, **stored}


def bytes_per_episode(run: Path) -> dict[str, float]:
    """As stored, and as the same lines would be without compression; without the index."""
    sizes = {path: path.stat().st_size for path in run.glob("[!.]*") if path.is_file()}
    plain = {path: len(gzip.decompress(path.read_bytes())) if path.suffix == ".gz" else n for path, n in sizes.items()}
    episodes = LONG * ROWS * GENERATIONS
    return {"stored": sum(sizes.values()) / episodes, "plain": sum(plain.values()) / episodes}


def quickstart(folder: Path) -> dict[str, float]:
    example = HERE.parent / "examples/tic_tac_toe/grpo.yml"
    options = ("-o", "finetuning.output_dir", str(folder / "run"))
    arguments = [sys.executable, __file__, "child", "finetune", "--config_file", str(example), *options]
    with (folder / "output.txt").open("w") as out:
        environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
        process = subprocess.Popen(
            arguments, cwd=folder, stdout=out, stderr=subprocess.STDOUT, text=True, env=environment
        )
    return finished(folder, process)


def report() -> str:
    """The table for RESULTS.md."""
    folders = [TemporaryDirectory() for _ in range(3)]
    with collect.stub_endpoint(LATENCY) as url:
        short, long = run_short(Path(folders[0].name), url), run_long(Path(folders[1].name), url)
    played = quickstart(Path(folders[2].name))
    for folder in folders:
        folder.cleanup()
    few, many = (epochs * ROWS * GENERATIONS for epochs in (SHORT, LONG))
    writing, wall = played["writing"], played["wall"]
    more = (long["peak"] - short["peak"]) / 1e6
    return f"""## The files of a run

Runs of {few:,} and {many:,} episodes of three calls, {ROWS * GENERATIONS} an epoch, against an endpoint that answers
immediately. The long run is killed in one more epoch with 300 finished episodes, and continued. Asked for: {LIMITS}.

| what | measured |
|---|---|
| peak memory of {few:,} episodes | {short["peak"] / 1e6:.0f} MB |
| peak memory of {many:,} episodes | {long["peak"] / 1e6:.0f} MB, {more:+.0f} MB |
| bytes per episode | {long["stored"]:,.0f} |
| the same lines without compression | {long["plain"]:,.0f}; ratio {long["stored"] / long["plain"]:.2f} |
| `--resume`: reading the files | {long["open"]:.2f} s |
| `--resume`: from the command to the first call | {long["first"]:.2f} s; of a new run {short["first"]:.2f} s |
| quickstart: time spent on writing, of its wall time | {writing:.2f} of {wall:.1f} s, {writing / wall:.1%} |"""


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2:])
    else:
        print(report())

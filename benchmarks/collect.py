"""What collecting episodes costs beside a bare loop of the same calls: time, CPU, memory, start and exit.

    python benchmarks/collect.py            all variants in turn, in separate processes, and a table
    python benchmarks/run.py collect        the same into RESULTS.md

The endpoint answers after 20 ms. A bare loop keeps 128 calls in flight and keeps nothing of the answers; insitu runs
its own trajectory builder with token ids, logprobs, an evaluator, and every episode written to disk.
"""

import asyncio
import gzip
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import memory

HERE = Path(__file__).parent
ROWS, GENERATIONS, CONCURRENCY, LATENCY = 500, 8, 128, 0.02
ROUNDS = 3
VARIANTS = ("bare openai", "insitu openai", "bare langchain", "insitu langchain")
LIMITS = "wall and CPU at most 1.15 x the bare loop, below 20 KB an episode, first call 1.5 s, exit 1 s"

CONFIG = """
general: {{seed: 0, plugins: [collect_agent]}}
llms:
  model: {{_type: openai, model_name: stub, base_url: "{url}", api_key: none, temperature: 1.0, max_tokens: 16}}
workflow: {{_type: collect_agent, llm: model, through: {through}}}
eval:
  general: {{max_concurrency: {concurrency}, dataset: {{_type: jsonl, file_path: rows.jsonl}}}}
  evaluators: {{length: {{_type: collect_length}}}}
trajectory_builders: {{episodes: {{_type: insitu_traj_builder, num_generations: {generations}}}}}
finetuning: {{reward_function: {{name: length}}}}
"""


def question(row: int) -> str:
    return f"Game {row}. The board is\n. X .\nO . .\n. . .\nYour move, as <move>N</move>?"


class Meter:
    """Wall-clock, CPU and memory between its creation and `read`."""

    def __init__(self) -> None:
        self.memory = memory.resident()
        self.cpu = time.process_time()
        self.wall = time.perf_counter()

    def read(self) -> dict[str, float]:
        return {
            "wall": time.perf_counter() - self.wall,
            "cpu": time.process_time() - self.cpu,
            "kb_per_episode": (memory.peak() - self.memory) / 1024 / (ROWS * GENERATIONS),
        }


async def bare_loop(call: Callable[[int], Awaitable[Any]]) -> dict[str, float]:
    """All calls, 128 at a time."""
    rows = (row for row in range(ROWS) for _ in range(GENERATIONS))

    async def work() -> None:
        for row in rows:
            await call(row)

    meter = Meter()
    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(work())
    return meter.read()


async def bare_openai(url: str) -> dict[str, float]:
    from collect_agent import PARAMS, prompt
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=url, api_key="none") as client:
        create: Any = client.chat.completions.create
        return await bare_loop(lambda row: create(model="stub", messages=prompt(question(row)), **PARAMS))


async def bare_langchain(url: str) -> dict[str, float]:
    from collect_agent import PARAMS, prompt
    from langchain_openai import ChatOpenAI

    model: Any = ChatOpenAI(model="stub", base_url=url, api_key="none", **PARAMS)  # type: ignore[arg-type]
    return await bare_loop(lambda row: model.ainvoke(prompt(question(row))))


async def insitu(url: str, through: str, folder: Path) -> dict[str, float]:
    """A whole collection by the built-in trajectory builder, stored as in a training run."""
    from insitu.builder import Builder
    from insitu.collect.collector import collect
    from insitu.collect.shared_run import RunState
    from insitu.config import load_config
    from insitu.runs.store import RunStore
    from insitu.schemas.finetuning import FinetuneRunConfig

    file = folder / "config.yml"
    names = {"url": url, "through": through, "concurrency": CONCURRENCY, "generations": GENERATIONS}
    file.write_text(CONFIG.format(**names))
    rows = (json.dumps({"id": row, "question": question(row), "answer": ""}) for row in range(ROWS))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    config = load_config(file)
    request = FinetuneRunConfig(config_file=file)
    store = RunStore(folder / "run")
    async with Builder(config, request=request) as builder:
        episodes = await builder.get_trajectory_builder("episodes")
        await episodes.initialize(config.finetuning)
        await builder.get_workflow()  # imports the client, as the bare loops have before they are measured
        meter = Meter()
        groups = []
        async for group in collect(episodes.plan("bench", 1), builder, RunState.of(builder)):
            store.append_group(group, 1)
            groups.append(group)
        figures = meter.read()
    store.close()
    calls = sum(len(t.calls) for group in groups for t in group.trajectories)
    lines = gzip.decompress((folder / "run" / "calls.jsonl.gz").read_bytes()).count(b"\n") - 1
    if (calls, lines) != (ROWS * GENERATIONS, ROWS * GENERATIONS):
        raise SystemExit(f"{calls} calls collected and {lines} stored; expected {ROWS * GENERATIONS}")
    return figures


def child(variant: str, url: str) -> None:
    """Run one variant in this process and print its figures."""
    who, through = variant.split()
    if who == "bare":
        figures = asyncio.run(bare_openai(url) if through == "openai" else bare_langchain(url))
    else:
        from insitu.training.runtime import run_async

        with TemporaryDirectory() as folder:
            figures = run_async(insitu(url, through, Path(folder)))
    print(json.dumps(figures), flush=True)


def measure_once(variant: str, url: str) -> dict[str, float]:
    """One process for one variant; `first` seconds to its first call, `exit` from its last answer to its end."""
    stats(url)
    started = time.time()
    done = subprocess.run([sys.executable, __file__, variant, url], stdout=subprocess.PIPE, check=True)
    ended = time.time()
    seen = stats(url)
    if seen["calls"] != ROWS * GENERATIONS:
        raise SystemExit(f"{variant}: {seen['calls']} calls; expected {ROWS * GENERATIONS}")
    return {**json.loads(done.stdout), "first": seen["first"] - started, "exit": ended - seen["last"]}


def stats(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url.removesuffix("/v1") + "/stats") as answer:
        return json.load(answer)


@contextmanager
def stub_endpoint(latency: float) -> Iterator[str]:
    """The address of an endpoint that answers after `latency` seconds."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / "stub_endpoint.py"), "--latency", str(latency)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


def measure() -> dict[str, dict[str, float]]:
    """Medians of each variant; the variants take turns, so that a busy machine slows all of them."""
    with stub_endpoint(LATENCY) as url:
        seen: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
        for _ in range(ROUNDS):
            for variant in VARIANTS:
                seen[variant].append(measure_once(variant, url))
    return {v: {name: statistics.median(f[name] for f in runs) for name in runs[0]} for v, runs in seen.items()}


def report() -> str:
    """The table for RESULTS.md."""
    figures = measure()
    calls = ROWS * GENERATIONS
    lines = [
        "## Collecting",
        "",
        f"{ROWS} rows x {GENERATIONS} generations of one call each, {CONCURRENCY} in flight, endpoint latency "
        f"{LATENCY * 1000:.0f} ms; medians of {ROUNDS} runs in turn. Asked for: {LIMITS}.",
        "",
        "| | wall | CPU a call | KB an episode | start to first call | last answer to exit |",
        "|---|---|---|---|---|---|",
    ]
    for variant, f in figures.items():
        lines.append(
            f"| {variant} | {f['wall']:.2f} s | {f['cpu'] / calls * 1e3:.2f} ms | {f['kb_per_episode']:.1f} "
            f"| {f['first']:.2f} s | {f['exit']:.2f} s |"
        )
    for through in ("openai", "langchain"):
        ours, bare = figures[f"insitu {through}"], figures[f"bare {through}"]
        ratios = f"wall {ours['wall'] / bare['wall']:.2f}, CPU {ours['cpu'] / bare['cpu']:.2f}"
        lines.append(f"\ninsitu beside the bare loop, {through}: {ratios}")
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        child(sys.argv[1], sys.argv[2])
    else:
        print(report())

"""What an episode that runs on a Ray cluster costs the process that trains.

    python benchmarks/ray_driver.py ADDRESS        prints figures as JSON, in an environment with the extra `ray`

2,000 episodes of one call each to an endpoint that answers after 50 ms; two workers on the cluster at ADDRESS, 128
episodes in flight. The driver's own part is everything but the agent: sending rows, reading episodes, an evaluator, and
every episode written to disk. Its CPU time is `time.process_time()`, which includes the threads of Ray's client, beside
that of the same episodes without the cluster; on a quiet machine it is below 1.0 ms an episode.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from collect import CONFIG, question, stub_endpoint

ROWS, GENERATIONS, CONCURRENCY, LATENCY, WORKERS = 250, 8, 128, 0.05, 2


async def measured(url: str, executor: dict[str, Any] | None, folder: Path) -> dict[str, float]:
    """A whole collection, after a first one that starts the workers of the executor, if there is one."""
    from insitu.builder import Builder
    from insitu.collect.collector import collect
    from insitu.collect.shared_run import RunState
    from insitu.config import load_config
    from insitu.runs.store import RunStore
    from insitu.schemas.finetuning import FinetuneRunConfig

    file = folder / "config.yml"
    names = {"url": url, "through": "openai", "concurrency": CONCURRENCY, "generations": GENERATIONS}
    file.write_text(CONFIG.format(**names))
    (folder / "collect_agent.py").write_text(Path(__file__).with_name("collect_agent.py").read_text())
    rows = (json.dumps({"id": row, "question": question(row), "answer": ""}) for row in range(ROWS))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    config = load_config(file, [("general.executor", json.dumps(executor))] if executor else [])
    request = FinetuneRunConfig(config_file=file)
    store = RunStore(folder / "run")
    async with Builder(config, request=request) as builder:
        episodes = await builder.get_trajectory_builder("episodes")
        await episodes.initialize(config.finetuning)
        await episodes.rehearse("bench")
        await asyncio.sleep(1)  # what Ray does at the start
        cpu, wall = time.process_time(), time.perf_counter()
        groups = []
        async for group in collect(episodes.plan("bench", 1), builder, RunState.of(builder)):
            store.append_group(group, 1)
            groups.append(group)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    store.close()
    count = sum(len(group.trajectories) for group in groups)
    if count != ROWS * GENERATIONS:
        raise SystemExit(f"{count} episodes; expected {ROWS * GENERATIONS}: {[group.dropped for group in groups]}")
    return {"episodes": count, "wall_s": wall, "cpu_ms_per_episode": cpu / count * 1e3}


def main() -> None:
    from insitu.workflow.event_loop import run_async

    figures = {}
    ray = {"_type": "ray", "address": sys.argv[1], "workers": WORKERS}
    for name, executor in {"ray": ray, "alone": None}.items():
        with stub_endpoint(LATENCY) as url, TemporaryDirectory() as folder:
            figures[name] = run_async(measured(url, executor, Path(folder)))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

"""verifiers' own evaluation of a taskset with our harness: prints rewards by task, and CPU seconds.

own_evaluation.py TASKSET_SETTINGS URL EPISODES AT_ONCE
"""

import asyncio
import json
import sys
import time

from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from insitu.integrations.environments.verifiers.harness import HARNESS_ID


async def main(settings: str, url: str, episodes: int, at_once: int) -> None:
    agent = {"harness": {"id": HARNESS_ID}, "runtime": {"type": "subprocess"}, "max_turns": 16}
    environment = load_environment(resolve_env_config({"taskset": json.loads(settings), "agent": agent}))
    tasks = [*environment.taskset.take(episodes)]
    context = ModelContext(
        "policy", EvalClientConfig(base_url=url, api_key_var="X"), SamplingConfig(temperature=0, max_tokens=24)
    )
    limit = asyncio.Semaphore(at_once)

    async def run(task):
        async with limit:
            return await environment.run_episode(task, context)

    async with environment.serving():
        await run(tasks[0])  # what is made once
        began = time.process_time()
        done = await asyncio.gather(*map(run, tasks))
        seconds = time.process_time() - began
    assert all(episode.ok for episode in done), [e.message for x in done for t in x.traces for e in t.errors][:1]
    rewards = {episode.task.data.name or str(episode.task.data.idx): episode.traces[0].reward for episode in done}
    print(json.dumps({"rewards": rewards, "cpu": seconds / len(tasks)}))


asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))

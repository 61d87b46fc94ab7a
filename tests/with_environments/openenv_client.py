"""Plays episodes on a server with OpenEnv's own client: `openenv_client.py URL ANSWER ...`, one episode an answer."""

import asyncio
import json
import sys

from openenv.core import GenericEnvClient


async def main(url: str, answers: list[str]) -> None:
    played = []
    async with GenericEnvClient(base_url=url) as client:
        for seed, answer in enumerate(answers):
            first = await client.reset(seed=seed)
            last = await client.step({"answer": answer})
            state = await client.state()
            shown = [first.observation["question"], first.metadata, first.done]
            played.append([*shown, last.reward, last.done, state["step_count"]])
    print(json.dumps(played))


asyncio.run(main(sys.argv[1], sys.argv[2:]))

"""A gateway in front of a model server, for requests of attackers: `python hostile_gateway.py BASE_URL TOKEN`.

It prints its pid and the address of an episode, and those of a new one for every line that it reads; the old one has
ended then.
"""

import asyncio
import os
import sys

from insitu.gateway.server import Gateway
from insitu.workflow.context import EpisodeScope
from insitu.workflow.llms import OpenAIConfig, connect


async def main(base_url: str, token: str) -> None:
    config = OpenAIConfig(model_name="policy", base_url=base_url, max_tokens=2, max_retries=0)
    llm = connect("player", config, "policy", base_url, token)
    async with Gateway([llm]) as gateway:
        while True:
            with EpisodeScope(training=True) as scope, gateway.endpoint(scope) as endpoint:
                print(os.getpid(), endpoint.anthropic_url, flush=True)
                if not await asyncio.to_thread(sys.stdin.readline):
                    break
    await llm.aclose()


asyncio.run(main(*sys.argv[1:]))

"""A harness that starts a program in verifiers' runtime, as those of coding agents do."""

import sys

from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ProgramHarness"]

PROGRAM = """
import sys, openai
url, key, model, prompt = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key=key)
client.chat.completions.create(model=model, messages=[{"role": "user", "content": prompt}])
"""


class ProgramHarness(Harness[HarnessConfig]):
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> ProgramResult:
        return await runtime.run_program([sys.executable, "-c", PROGRAM, endpoint, secret, ctx.model, data.prompt], {})

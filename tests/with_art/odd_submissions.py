"""Submissions at once, again and from elsewhere; `odd_submissions.py PORT NAME BASE_MODEL` tells their ends."""

import asyncio
import sys

from by_hand import adapter_of, group, tell

from insitu.errors import TrajectoryError
from insitu.schemas.finetuning import FinetuneConfig, TrajectoryCollection

TOKEN = "token_id:70"


async def main(port: str, name: str, base_model: str) -> None:
    for _ in range(2):  # a run of the same id in another adapter is another training
        adapter = adapter_of(port, name, base_model)
        await adapter.initialize(FinetuneConfig())
        twice = await asyncio.gather(adapter.submit(group(TOKEN, 1)), adapter.submit(group(TOKEN, 1)))
        assert twice[0] == twice[1]
        tell(await adapter.wait_until_complete(twice[0], 0.1))
        try:
            await adapter.submit(odd())
        except TrajectoryError as error:
            print(f"refused: {error}")
        await adapter.close()
        await adapter.close()
    adapter = adapter_of(port, f"{name}-best", base_model, delete_old_checkpoints=True)
    await adapter.initialize(FinetuneConfig())
    for epoch, mean in enumerate((0.1, 0.2, 0.9, 0.3, 0.2, 0.1), 1):  # the submitted ones are alike: so are their means
        tell(await adapter.wait_until_complete(await adapter.submit(group(TOKEN, epoch, "best", mean)), 0.1))
    await adapter.close()


def odd() -> TrajectoryCollection:
    """A tool call without its arguments."""
    given = group(TOKEN, 2)
    call = {"id": "c", "type": "function", "function": {"name": "look"}}
    given.trajectories[0][1].episode[-1].metadata = {"tool_calls": [call]}
    return given


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

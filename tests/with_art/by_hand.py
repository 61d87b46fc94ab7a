"""Trains through an ARTTrainerAdapter made in Python: `by_hand.py PORT NAME BASE_MODEL` tells each job's end."""

import asyncio
import json
import sys

from nat.data_models.finetuning import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryCollection
from nat.plugins.openpipe.config import ARTBackendConfig, ARTTrainerAdapterConfig
from nat.plugins.openpipe.trainer_adapter import ARTTrainerAdapter

from insitu.schemas.finetuning import FinetuneConfig, TrainingJobRef, TrainingJobStatus


def trajectory(reward: float, token: str) -> Trajectory:
    content = [{"token": token, "logprob": -0.5, "bytes": None, "top_logprobs": []}]
    asked = EpisodeItem(role=EpisodeItemRole.USER, content="well?")
    answer = EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="so", logprobs={"content": content})
    return Trajectory(episode=[asked, answer], reward=reward)


def group(token: str, epoch: int | None, run_id: str = "by hand", mean: float | None = None) -> TrajectoryCollection:
    both = [trajectory(1.0, token), trajectory(0.0, token)]
    return TrajectoryCollection(trajectories=[both], run_id=run_id, epoch=epoch, mean_reward=mean)


def adapter_of(
    port: str, name: str, base_model: str, training: dict | None = None, **more: object
) -> ARTTrainerAdapter:
    backend = ARTBackendConfig(ip="127.0.0.1", port=int(port), name=name, base_model=base_model, **more)
    return ARTTrainerAdapter(adapter_config=ARTTrainerAdapterConfig(backend=backend, training=training or {}))


def tell(status: TrainingJobStatus) -> None:
    step = (status.metadata or {}).get("step")
    print(json.dumps({"status": status.status.value, "message": status.message, "step": step}))


async def main(port: str, name: str, base_model: str) -> None:
    adapter = adapter_of(port, name, base_model)
    await adapter.initialize(FinetuneConfig())
    assert await adapter.is_healthy()
    for epoch in (1, 1, None):  # the second is the first again
        tell(await adapter.wait_until_complete(await adapter.submit(group("token_id:70", epoch)), 0.1))
    untrained = await adapter.submit(group("text", None, "no ids"))
    tell(await adapter.wait_until_complete(untrained, 0.1))
    await adapter.submit(group("token_id:999999", None, "nobody asks"))
    await asyncio.wait(adapter.training_jobs.values())
    tell(await adapter.status(TrainingJobRef(run_id="by hand", backend="openpipe-art")))
    await adapter.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

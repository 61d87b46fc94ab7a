"""Trains a model to prefer one word, as ART's own examples are written, with the clients from 0.5.18 on.

    python preference_0_5_18.py http://HOST:PORT BASE_MODEL RELEASE

Prints the mean reward of each step as a JSON line, and the steps that are left in the end.
"""

import asyncio
import json
import sys

import art

WORD = "maybe"
PROMPTS = ["say yes or no", "say yes no or maybe"]


async def rollout(model: art.TrainableModel, prompt: str) -> art.Trajectory:
    messages = [{"role": "user", "content": prompt}]
    client = model.openai_client()
    completion = await client.chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=2, temperature=1.0
    )
    choice = completion.choices[0]
    reward = 1.0 if choice.message.content == WORD else 0.0
    return art.Trajectory(messages_and_choices=[*messages, choice], reward=reward, metrics={"correct": reward})


async def main() -> None:
    backend = art.ServerlessBackend(api_key="key", base_url=f"{sys.argv[1]}/v1")
    name = f"words-{sys.argv[3].replace('.', '')}"
    run_name = {"run_name": name} if "run_name" in art.TrainableModel.model_fields else {}
    model = art.TrainableModel(name=name, project="preference", base_model=sys.argv[2], report_metrics=[], **run_name)
    await model.register(backend)
    for step in range(await model.get_step(), 30):
        groups = await art.gather_trajectory_groups(
            (art.TrajectoryGroup(rollout(model, prompt) for _ in range(24)) for prompt in PROMPTS), pbar_desc=None
        )
        rewards = [trajectory.reward for group in groups for trajectory in group]
        print(json.dumps({"step": step, "reward": sum(rewards) / len(rewards)}), flush=True)
        if sum(rewards) > 0.95 * len(rewards):
            break
        result = await backend.train(model, groups, learning_rate=1e-2)
        await model.log(groups, metrics=result.metrics, step=result.step, split="train")
        await model.delete_checkpoints("train/reward")
    print(json.dumps({"steps": await model.get_step()}))


asyncio.run(main())

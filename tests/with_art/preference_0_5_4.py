"""Trains a model to prefer one word, as ART's own examples are written, with the client of 0.5.4.

    python preference_0_5_4.py http://HOST:PORT BASE_MODEL

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
    backend = art.Backend(base_url=sys.argv[1])
    model = art.TrainableModel(name="words-054", project="preference", base_model=sys.argv[2])
    await model.register(backend)
    for step in range(await model.get_step(), 30):
        groups = await art.gather_trajectory_groups(
            (art.TrajectoryGroup(rollout(model, prompt) for _ in range(24)) for prompt in PROMPTS), pbar_desc=None
        )
        rewards = [trajectory.reward for group in groups for trajectory in group]
        print(json.dumps({"step": step, "reward": sum(rewards) / len(rewards)}), flush=True)
        if sum(rewards) > 0.95 * len(rewards):
            break
        await model.log(groups)
        await model.delete_checkpoints()
        await model.train(groups, config=art.TrainConfig(learning_rate=1e-2))
    print(json.dumps({"steps": await model.get_step()}))


asyncio.run(main())

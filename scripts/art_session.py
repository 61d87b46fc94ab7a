"""A session of an official ART client with everything training has to cope with; run by record_art.py.

python art_session.py RELEASE ADDRESS
"""

import asyncio
import sys
from typing import Any

import art

BASE_MODEL = "tiny/llama"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


async def sample(model: art.TrainableModel, messages: list, seed: int, **more):
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=4, seed=seed, **more
    )
    return completion.choices[0]


async def plain(model: art.TrainableModel, seed: int, reward: float) -> art.Trajectory:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "yes or no"}]
    choice = await sample(model, messages, seed)
    return art.Trajectory(messages_and_choices=[*messages, choice], reward=reward, metrics={"correct": reward > 0})


async def with_tools(model: art.TrainableModel, seed: int, reward: float) -> art.Trajectory:
    """A choice, a tool call by somebody else and its result, a second choice; and a second history."""
    messages = [{"role": "user", "content": "Rome?"}]
    first = await sample(model, messages, seed, tools=[WEATHER])
    spoken = {"role": "assistant", "content": first.message.content}
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
    further = [{"role": "user", "content": "and?"}, called, result]
    second = await sample(model, [*messages, spoken, *further], seed + 1, tools=[WEATHER])
    asked = [{"role": "user", "content": "sum up"}]
    third = await sample(model, asked, seed + 2)
    return art.Trajectory(
        messages_and_choices=[*messages, first, *further, second],
        tools=[WEATHER],
        additional_histories=[art.trajectories.History(messages_and_choices=[*asked, third])],
        reward=reward,
        metadata={"city": "Rome"},
    )


async def main(release: str, address: str) -> None:
    old = release == "0.5.4"
    backend = art.Backend(base_url=address) if old else art.ServerlessBackend(api_key="key", base_url=f"{address}/v1")
    config = {
        "init_args": {"max_seq_length": 900},
        "engine_args": {"gpu_memory_utilization": 0.5},
        "trainer_args": None,
    }
    more: dict[str, Any] = {} if old else {"report_metrics": []}
    model = art.TrainableModel(
        name=f"recorded-{release}", project="tests", base_model=BASE_MODEL, _internal_config=config, **more
    )
    await model.register(backend)
    groups = [
        art.TrajectoryGroup(
            [await plain(model, seed, float(seed % 2)) for seed in range(4)],
            exceptions=[ValueError("the fifth failed")],
        ),
        art.TrajectoryGroup([await with_tools(model, seed, seed / 10) for seed in (10, 20)]),
        art.TrajectoryGroup([await plain(model, seed, 1.0) for seed in (30, 31)]),
    ]
    equal = groups[2:]
    if old:
        await model.train(
            groups,
            config=art.TrainConfig(learning_rate=1e-3, beta=0.1),
            _config={"importance_sampling_level": "sequence", "advantage_balance": 0.2},
        )
        await model.train(equal)
        await model.log(groups)
    else:
        await backend.train(model, groups, learning_rate=1e-3, ppo=True, epsilon=0.1, scale_rewards=False)
        await backend.train(model, equal)
    await sample(model, [{"role": "user", "content": "yes or no"}], 40)
    await model.get_step()
    await model.delete_checkpoints()
    await backend.close()


asyncio.run(main(*sys.argv[1:]))

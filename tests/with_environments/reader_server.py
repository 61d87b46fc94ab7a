"""Environments for verifiers' reader of OpenEnv, served by OpenEnv's package: `reader_server.py CLASS LOG SESSIONS`.

The log gets a line for each reset and each step, with the reward that the environment gave.
"""

import asyncio
import json
import os
import socket
import sys
from typing import Any
from uuid import uuid4

import openenv_games
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

LOG = sys.argv[2]


def log(episode: str, seed: int, reward: float) -> None:
    with open(LOG, "a") as file:
        file.write(json.dumps({"episode": episode, "seed": seed, "reward": reward}) + "\n")


class Say(Action):
    text: Any
    """The reader makes a number of a text that is one."""


class Heard(Observation):
    prompt: str


class Twice(Environment[Say, Heard, State]):
    """Likes digits; an episode is two steps. `fault` of the reset: what happens at the second."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._episode, self._seed, self._steps, self._fault = "", 0, 0, ""

    def reset(self, seed: int | None = None, episode_id: str | None = None, fault: str = "", **others: Any) -> Heard:
        self._episode, self._seed, self._steps, self._fault = uuid4().hex, seed or 0, 0, fault
        log(self._episode, self._seed, 0.0)
        return Heard(prompt=f"Row {self._seed}")

    def step(self, action: Say, timeout_s: float | None = None, **others: Any) -> Heard:
        raise NotImplementedError

    async def step_async(self, action: Say, timeout_s: float | None = None, **others: Any) -> Heard:
        self._steps += 1
        if self._steps == 2 and self._fault == "dies":
            os._exit(1)
        if self._steps == 2 and self._fault == "hangs":
            await asyncio.Event().wait()
        if self._steps == 2 and self._fault == "raises":
            raise ValueError("out of paper")
        text = str(action.text)
        reward = sum(letter.isdigit() for letter in text) / max(len(text), 1)
        log(self._episode, self._seed, reward)
        return Heard(prompt="More", reward=reward, done=self._steps == 2)

    @property
    def state(self) -> State:
        return State(episode_id=self._episode, step_count=self._steps)


class Look(openenv_games.Window):
    """Is done after a look."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **others: Any) -> Observation:
        self._episode, self._seed = uuid4().hex, seed or 0
        log(self._episode, self._seed, 0.0)
        return super().reset(seed, episode_id)

    async def step_async(self, action: Action, timeout_s: float | None = None, **others: Any) -> Observation:
        observation = await super().step_async(action, timeout_s, **others)
        if getattr(action, "tool_name", None) == "look":
            observation.done = True
            log(self._episode, self._seed, observation.reward)
        return observation


if __name__ == "__main__":
    kinds = {"Twice": (Twice, Say, Heard), "Look": (Look, Action, Observation)}
    app = create_fastapi_app(*kinds[sys.argv[1]], max_concurrent_envs=int(sys.argv[3]))
    listener = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listener])

"""Environments of our own for OpenEnv: one whose actions are texts, one that fails, and one with MCP tools."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, MCPEnvironment, Observation, State, create_fastapi_app


class Say(Action):
    text: str


class Heard(Observation):
    prompt: str = ""
    seed: int = 0


class Digits(Environment[Say, Heard, State]):
    """Likes large digits; an episode is one step."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._seed, self._state = 0, State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Heard:
        self._seed, self._state = seed or 0, State(episode_id=episode_id, step_count=0)
        return Heard(prompt=f"Row {self._seed % 10}", metadata={"seed": self._seed})

    def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Heard:
        self._state.step_count += 1
        digits = [int(character) for character in action.text if character.isdigit()]
        return Heard(prompt="", done=True, reward=sum(digits) / len(digits) / 9 if digits else 0.0)

    @property
    def state(self) -> State:
        return self._state


class Faulty(Digits):
    """Fails in the first `times` steps of episodes with this seed: `do` is kill (SIGKILL), stop (SIGSTOP) or sleep."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Heard:
        self._told = kwargs
        return super().reset(seed, episode_id)

    def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Heard:
        for number in range(self._told.get("times") or 0):
            try:
                Path(f"failed-{self._seed}-{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            if self._told["do"] != "sleep":
                os.kill(os.getpid(), signal.SIGKILL if self._told["do"] == "kill" else signal.SIGSTOP)
            threading.Event().wait()
        return super().step(action)


class FaultyOne(Faulty):
    """Has one session."""

    SUPPORTS_CONCURRENT_SESSIONS = False


def app() -> Any:
    """Has as many sessions as the variable SESSIONS says."""
    return create_fastapi_app(Faulty, Say, Heard, max_concurrent_envs=int(os.environ["SESSIONS"]))


COLOURS = {"sky": "blue", "grass": "green"}


class Window(MCPEnvironment):
    """Rewards a look at something that has a colour, with a tool; the question is the row's."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        tools = FastMCP("window")

        @tools.tool
        def look(at: str) -> str:
            """The colour of a thing."""
            return COLOURS[at]

        super().__init__(tools)
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self._state = State(episode_id=episode_id, step_count=0)
        return Observation(metadata={"status": "ready"})

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        observation = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if getattr(action, "tool_name", None) == "look":
            observation.reward = 0.0 if observation.error else 1.0
        return observation

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation(metadata={"error": "call a tool"})

    @property
    def state(self) -> State:
        return self._state

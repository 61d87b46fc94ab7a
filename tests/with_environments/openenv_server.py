"""An OpenEnv server of two steps: prints its URL; an answer earns its share of digits."""

import socket

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Say(Action):
    text: str


class Asked(Observation):
    question: str


class Digits(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.seed = 0, 0

    def reset(self, seed=None, episode_id=None, **kwargs) -> Asked:
        self.steps, self.seed = 0, seed or 0
        return Asked(question=f"first {self.seed}", done=False, reward=0.0)

    def step(self, action: Say, timeout_s=None, **kwargs) -> Asked:
        self.steps += 1
        share = sum(letter.isdigit() for letter in action.text) / max(len(action.text), 1)
        return Asked(question=f"second {self.seed}", done=self.steps == 2, reward=share)

    @property
    def state(self) -> State:
        return State(step_count=self.steps)


app = create_fastapi_app(Digits, Say, Asked, max_concurrent_envs=8)
with socket.socket() as listening:
    listening.bind(("127.0.0.1", 0))
    print("http://127.0.0.1:%d" % listening.getsockname()[1], flush=True)  # noqa: UP031
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])

"""Serves a file of insitu as an OpenEnv environment: `insitu serve FILE --as openenv`.

A session is one row of the dataset: `reset` returns its question, `step` takes the answer and returns the reward.

    WS   /ws         {"type": "reset", "data": {"seed": 7}} -> {"type": "observation", "data": {"observation": ...}}
    GET  /schema     the JSON schemas of action, observation and state
    GET  /metadata, /health
"""

import asyncio
import secrets
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import WSMsgType, web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from insitu.builder import Builder
from insitu.collect.datasets import load_dataset
from insitu.collect.episodes import own_copy
from insitu.collect.evaluators import as_reward, parse_score, score, unshaped_reward_of
from insitu.config import Config
from insitu.errors import InsituError, WorkflowError, first_problem
from insitu.schemas.evaluation import EvalInputItem, EvaluatorInfo
from insitu.wire.addresses import http_url
from insitu.wire.http_access import AccessPolicy
from insitu.wire.http_server import guard, json_response, listening, parse_json
from insitu.wire.redaction import redact
from insitu.workflow.functions import convert


class Message(BaseModel):
    type: str
    data: dict[str, Any] = {}


class Reset(BaseModel):
    """Other arguments are ignored, as they are by OpenEnv's servers."""

    seed: int | None = Field(default=None, ge=0)
    row_id: str | None = None


class AnswerAction(BaseModel):
    model_config = ConfigDict(extra="forbid")

    answer: str
    metadata: dict[str, Any] = {}


class Observation(BaseModel):
    """`metadata` has the `row_id`."""

    question: str
    metadata: dict[str, Any] = {}


class State(BaseModel):
    episode_id: str | None = None
    step_count: int = 0


class FileServer:
    """Rows and the evaluator that gives the reward."""

    def __init__(self, config: Config, rows: list[EvalInputItem], name: str, evaluator: EvaluatorInfo) -> None:
        self._config, self._rows, self._name, self._evaluator = config, rows, name, evaluator
        self._by_id = {str(row.id): row for row in rows}
        self._scoring = asyncio.Semaphore(config.max_concurrency)

    def routes(self) -> list[web.RouteDef]:
        about = {"name": self._config.source, "description": f"Rows scored by {self._name}", "version": "1"}
        kinds: dict[str, type[BaseModel]] = {"action": AnswerAction, "observation": Observation, "state": State}
        answers = {
            "/health": {"status": "healthy"},
            "/metadata": about,
            "/schema": {name: kind.model_json_schema() for name, kind in kinds.items()},
        }

        async def answer(request: web.Request) -> web.Response:
            return json_response(answers[request.path])

        return [web.get("/ws", self._session), *(web.get(path, answer) for path in answers)]

    async def _session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=2**22, heartbeat=20)
        await socket.prepare(request)
        row: EvalInputItem | None = None
        state, data = State(), dict[str, Any]()
        async for received in socket:
            if received.type is not WSMsgType.TEXT:
                break
            kind, code = "observation", "EXECUTION_ERROR"
            try:
                message = Message.model_validate(parse_json(received.data.encode()))
                if message.type == "close":
                    break
                if message.type == "reset":
                    row, state = self._row(Reset.model_validate(message.data)), State(episode_id=uuid.uuid4().hex)
                    data = self._observed(row)
                elif message.type == "step":
                    action = AnswerAction.model_validate(message.data)
                    if row is None or state.step_count:
                        raise WorkflowError("the episode is done, or has not begun: send reset")
                    data = {**self._observed(row), "reward": await self._reward(row, action.answer), "done": True}
                    state = state.model_copy(update={"step_count": 1})
                elif message.type == "state":
                    kind, data = "state", state.model_dump()
                else:
                    code = "UNKNOWN_TYPE"
                    raise WorkflowError(f"unknown message type {message.type!r:.80}; known: reset, step, state, close")
            except ValidationError as error:
                kind, data = "error", {"message": first_problem(error), "code": "VALIDATION_ERROR"}
            except InsituError as error:
                kind, data = "error", {"message": redact(str(error)), "code": code}
            await socket.send_json({"type": kind, "data": data})
        await socket.close()
        return socket

    def _row(self, reset: Reset) -> EvalInputItem:
        if reset.row_id is not None:
            if reset.row_id not in self._by_id:
                raise WorkflowError(f"there is no row {reset.row_id!r:.80}")
            return self._by_id[reset.row_id]
        return self._rows[(secrets.randbits(31) if reset.seed is None else reset.seed) % len(self._rows)]

    @staticmethod
    def _observed(row: EvalInputItem) -> dict[str, Any]:
        metadata = {"row_id": str(row.id)}
        observation = Observation(question=convert(row.input_obj, str), metadata=metadata)
        return {"observation": observation.model_dump(), "reward": None, "done": False, "metadata": metadata}

    async def _reward(self, row: EvalInputItem, answer: str) -> float:
        """Raises WorkflowError if the evaluator gives no score."""
        item = own_copy(row)
        item.output_obj = answer
        async with self._scoring:
            output = await score(self._evaluator, self._name, [item], self._config.eval.evaluator_timeout)
        _, sign = unshaped_reward_of(self._config)
        value, _, problem = parse_score(as_reward(output.eval_output_items[0], sign))
        if value is None:
            raise WorkflowError(f"the evaluator {self._name} gave no score: {problem}")
        return value


@asynccontextmanager
async def serve_file(config: Config, access: AccessPolicy, host: str, port: int) -> AsyncIterator[str]:
    """Serves the rows and the reward of a file while the context is open; yields the URL.

    Raises ConfigError if the file does not say which evaluator gives the reward, or has a shape for it.
    """
    name, _ = unshaped_reward_of(config)
    rows = load_dataset(config)
    async with Builder(config) as builder:
        server = FileServer(config, rows, name, await builder.get_evaluator(name))
        app = web.Application(middlewares=[guard(access, lambda path: path == "/health")])
        app.router.add_routes(server.routes())
        async with listening(app, (host, port)) as (_, bound):
            yield http_url(host, bound)

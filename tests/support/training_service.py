"""A policy that is a table, behind a chat server and a training service: `with TrainingService(key) as service`.

The model looks at the animal with the tool it is given, then says a digit, sampled with the request's seed from the
question's own row of logits. A job moves these logits by the policy gradient of its episodes' rewards.
"""

import asyncio
import json
import math
import random
from collections import defaultdict
from statistics import fmean
from typing import Any

from aiohttp import web
from fake_openai import FakeOpenAI

UNIT = 3e5
"""A table learns much faster than a network: logits move by learning rate x UNIT x advantage."""


class TrainingService(FakeOpenAI):
    """`jobs` holds what was posted, `refused` the keys that were wrong; the job numbered `fails` (0 first) fails.

    Each job is reported as running once before it has ended. `most` chat requests were in flight at once.
    """

    def __init__(self, api_key: str, fails: int | None = None) -> None:
        super().__init__(token_ids=False, policy_version=None)
        self.api_key, self.fails = api_key, fails
        self.jobs: list[dict[str, Any]] = []
        self.refused: list[str | None] = []
        self.in_flight = self.most = 0
        self._logits: dict[str, list[float]] = defaultdict(lambda: [0.0] * 10)
        self._asked: set[int] = set()

    def add_routes(self, router: web.UrlDispatcher) -> None:
        super().add_routes(router)
        router.add_get("/health", self._health)
        router.add_post("/jobs", self._submit)
        router.add_get("/jobs/{job_id}", self._status)

    def start_with(self, question: str, logits: list[float]) -> None:
        self._logits[question] = list(logits)

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            await asyncio.sleep(0.01 if body["messages"][-1]["role"] == "user" else 0)
            return web.json_response(self._reply(body))
        finally:
            self.in_flight -= 1

    def _reply(self, body: dict[str, Any]) -> dict[str, Any]:
        messages = body["messages"]
        question = next(m["content"] for m in messages if m["role"] == "user")
        if messages[-1]["role"] == "user":
            animal = question.removesuffix("?").split()[-1]
            function = {"name": "look", "arguments": json.dumps({"animal": animal})}
            tool_call = {"id": "call_1", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [tool_call]}
            token, logprob, reason = function["arguments"], 0.0, "tool_calls"
        else:
            weights = softmax(self._logits[question])
            digit = random.Random(body["seed"]).choices(range(10), weights)[0]
            message = {"role": "assistant", "content": str(digit)}
            token, logprob, reason = str(digit), math.log(weights[digit]), "stop"
        entry = {"token": token, "logprob": logprob, "bytes": None, "top_logprobs": []}
        logprobs = {"content": [entry]} if body.get("logprobs") else None
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": reason, "logprobs": logprobs}
        if body.get("return_token_ids") and self.token_ids:
            choice["token_ids"] = [ord(token[-1])]
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return {**self._head(body, "chat.completion"), "choices": [choice], "usage": usage}

    def _authorized(self, request: web.Request) -> None:
        given = request.headers.get("Authorization")
        if given != f"Bearer {self.api_key}":
            self.refused.append(given)
            raise web.HTTPUnauthorized

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _submit(self, request: web.Request) -> web.Response:
        self._authorized(request)
        self.jobs.append(await request.json())
        return web.json_response({"job_id": len(self.jobs) - 1})

    async def _status(self, request: web.Request) -> web.Response:
        self._authorized(request)
        job_id = int(request.match_info["job_id"])
        if job_id not in self._asked:
            self._asked.add(job_id)
            return web.json_response({"status": "running", "progress": 50.0})
        if job_id == self.fails:
            return web.json_response({"status": "failed", "progress": 50.0, "message": "out of memory"})
        metrics = {"loss": self._train(self.jobs[job_id])}
        return web.json_response({"status": "completed", "progress": 100.0, "metrics": metrics})

    def _train(self, job: dict[str, Any]) -> float:
        """One policy gradient step for each episode, with the logprobs it was sampled at; gives the mean loss."""
        losses = []
        for group in job["groups"]:
            mean = fmean(episode["reward"] for episode in group["episodes"])
            for episode in group["episodes"]:
                question = next(m["content"] for m in episode["messages"] if m["role"] == "user")
                answer, advantage = episode["messages"][-1], episode["reward"] - mean
                logits = self._logits[question]
                for digit, weight in enumerate(softmax(logits)):
                    slope = float(digit == int(answer["content"])) - weight
                    logits[digit] += job["learning_rate"] * UNIT * advantage * slope
                losses.append(-advantage * sum(entry["logprob"] for entry in answer["logprobs"]["content"]))
        return fmean(losses)


def softmax(logits: list[float]) -> list[float]:
    powers = [math.exp(x - max(logits)) for x in logits]
    return [p / sum(powers) for p in powers]

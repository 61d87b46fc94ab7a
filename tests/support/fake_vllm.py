"""The routes of a vLLM server, which fails on demand: `async with FakeVllm(module) as vllm: vllm.address`.

It answers every prompt with the most likely tokens of one module, whatever weights it is said to have: tests look at
which weights it was given and asked for. `vllm.faults` holds what the next completions get instead of an answer.
"""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch
from aiohttp import web
from processes import HANGS
from waiting import turns

from insitu.backend.compute import ComputeThread
from insitu.backend.inference.sampler import WeightVersion
from insitu.backend.model import LoadedModel, load_model
from insitu.integrations.vllm.fleet import Waits
from insitu.integrations.vllm.sampler import VllmSampler
from insitu.schemas.backend_processes import SamplerOptions


@asynccontextmanager
async def sampling(
    loaded: LoadedModel, folder: Path, servers: int = 1, for_a_server: float = HANGS
) -> AsyncIterator[Any]:
    """A sampler by `servers`; `make(version, kind)` makes the files of a version of adapters or of all weights.

    It waits `for_a_server`. `folder_of` and `load_version` may be replaced.
    """
    compute = ComputeThread()
    compute.start()

    def make(version: int, kind: str) -> WeightVersion:
        (folder / str(version)).mkdir()
        (folder / str(version) / kind).touch()
        return WeightVersion(version)

    def folder_of(weights: WeightVersion) -> Path:
        return folder / str(weights.version) if weights.version else Path(loaded.source)

    parts = SimpleNamespace(
        waits=Waits(between_checks=0.02, longest_delay=0.02, for_a_server=for_a_server),
        compute=compute,
        make=make,
        folder=folder,
        folder_of=folder_of,
        load_version=lambda weights: loaded.module,
    )

    async with AsyncExitStack() as stack:
        vllms = [await stack.enter_async_context(FakeVllm(loaded.module)) for _ in range(servers)]
        options = SamplerOptions.model_validate({"_type": "vllm", "addresses": [vllm.address for vllm in vllms]})
        files, load = lambda weights: parts.folder_of(weights), lambda weights: parts.load_version(weights)
        sampler = VllmSampler(options, loaded, compute, files, load, 256, None, folder, waits=parts.waits)
        parts.sampler, parts.vllms, parts.vllm = sampler, vllms, vllms[0]
        await sampler.start()
        for vllm in vllms:
            vllm.asked.clear()
        try:
            yield parts
        finally:
            await sampler.close()
            compute.close()


class FakeVllm:
    """`asked` are the models of the completions that it was asked for, `loaded` the folders that it has loaded."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.faults: deque[dict[str, Any]] = deque()
        """{"status": N, "after": seconds}, {"body": ...}, {"tags": versions of the weights}, {"cut": N}: ends a stream
        after N tokens."""
        self.asked: list[str] = []
        self.loaded: list[str] = []
        self.refuses_weights = False
        self.lists_no_models = False
        self.reads_weights = False
        """Whether it answers by the full weights that it was last given."""
        self.samples = False
        """Whether it samples, by the seed of the request, instead of answering the most likely tokens."""
        self.wrong = 1.0
        """What log-probabilities of prompts are multiplied by."""
        self.gate = asyncio.Event()
        """Completions wait while it is not set."""
        self.health_gate = asyncio.Event()
        """Health checks wait while it is not set."""
        for gate in (self.gate, self.health_gate):
            gate.set()
        self.num_health_checks = 0
        self._port = 0
        self._runner: web.AppRunner | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """With the weights that it has at every start."""
        self.tag, self.adapters = "default", {}  # type: dict[str, str]
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/weight_info", self._weight_info)
        app.router.add_post("/v1/load_lora_adapter", self._load)
        app.router.add_post("/v1/unload_lora_adapter", self._unload)
        app.router.add_post("/collective_rpc", self._reload)
        app.router.add_post("/update_weight_version", self._name_weights)
        for path in ("/pause", "/resume", "/reset_prefix_cache"):
            app.router.add_post(path, self._nothing)
        app.router.add_post("/inference/v1/generate", self._generate)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            for site in self._runner.sites:
                await site.stop()
            await turns(20)  # connections that have just been accepted are known then, and closed
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def _nothing(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _health(self, request: web.Request) -> web.Response:
        self.num_health_checks += 1
        await self.health_gate.wait()
        return web.json_response({})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _models(self, request: web.Request) -> web.Response:
        if self.lists_no_models:
            self.asked.append("models")
            return web.json_response({"data": []})
        data = [{"id": "base", "root": "base", "parent": None, "max_model_len": 10_000}]
        data += [{"id": i, "root": root, "parent": "base", "max_model_len": None} for i, root in self.adapters.items()]
        return web.json_response({"data": data})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.tag})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["lora_path"].startswith("/nonexistent"):
            return _error(404, f"No adapter found for {body['lora_path']}")
        if self.refuses_weights:
            return _error(500, "LoRA rank 4 is greater than max_lora_rank 1")
        self.adapters[body["lora_name"]] = body["lora_path"]
        self.loaded.append(body["lora_path"])
        return web.Response(text="Success")

    async def _unload(self, request: web.Request) -> web.Response:
        del self.adapters[(await request.json())["lora_name"]]
        return web.Response(text="Success")

    async def _reload(self, request: web.Request) -> web.Response:
        self.loaded.append((await request.json())["kwargs"]["weights_path"])
        if self.reads_weights:
            self.module = load_model(self.loaded[-1], "cpu").module
        return web.json_response({"results": [None]})

    async def _name_weights(self, request: web.Request) -> web.Response:
        self.tag = (await request.json())["new_version"]
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body or "prompt_logprobs" in body["sampling_params"]:
            return self._score(body.get("token_ids") or [0])
        self.asked.append(body["model"])
        fault = self.faults.popleft() if self.faults else {}
        await self.gate.wait()
        if "status" in fault:
            return _error(fault["status"], "a fault", {"Retry-After": fault.get("after", "0.01")})
        if "body" in fault:
            return web.json_response(fault["body"])
        if body["model"] not in ("base", *self.adapters):
            return _error(404, f"The model `{body['model']}` does not exist")
        params = body["sampling_params"]
        seed = params["seed"] if self.samples else None
        entries = self._sample(body["token_ids"], params["max_tokens"], params.get("temperature") or 1.0, seed)
        tags = [{"version": tag, "start": 0, "end": 1} for tag in fault.get("tags", [self.tag])]
        if not body["stream"]:
            choice = {**_choice(entries), "finish_reason": "length", "weight_versions": tags}
            return web.json_response({"model": body["model"], "choices": [choice]})
        response = web.StreamResponse()
        await response.prepare(request)
        for index, entry in enumerate(entries):
            if fault.get("cut") == index:
                assert request.transport is not None
                request.transport.abort()
                return response
            last = {"finish_reason": "length", "weight_versions": tags} if index == len(entries) - 1 else {}
            event = {"choices": [{**_choice([entry]), **last}]}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _score(self, ids: list[int]) -> web.Response:
        with torch.inference_mode():
            logprobs = torch.log_softmax(self.module(input_ids=torch.tensor([ids])).logits[0].float(), -1) * self.wrong
        scores = [None, *({str(ids[i + 1]): {"logprob": float(logprobs[i, ids[i + 1]])}} for i in range(len(ids) - 1))]
        return web.json_response({"prompt_logprobs": scores})

    def _sample(self, prompt: list[int], count: int, temperature: float, seed: int | None) -> list[dict[str, Any]]:
        ids, entries = list(prompt), []
        random = torch.Generator().manual_seed(seed or 0)
        with torch.inference_mode():
            for _ in range(count):
                logits = self.module(input_ids=torch.tensor([ids])).logits[0, -1].float()
                logprobs = torch.log_softmax(logits / temperature, -1)
                chosen = logprobs.argmax() if seed is None else torch.multinomial(logprobs.exp(), 1, generator=random)
                ids.append(int(chosen))
                entry = {"token_id": ids[-1], "logprob": float(logprobs[ids[-1]]), "rank": 1, "top_logprobs": []}
                entries.append(entry)
        return entries


def _choice(entries: list[dict[str, Any]]) -> dict[str, Any]:
    ids = [entry["token_id"] for entry in entries]
    return {"index": 0, "token_ids": ids, "finish_reason": None, "logprobs": {"content": entries}}


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status, headers=headers)

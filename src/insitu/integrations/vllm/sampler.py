"""The sampler that asks vLLM servers.

A completion is given to the caller only if the server says that all its tokens are by the weights that were asked for.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from insitu.backend.compute import ComputeThread
from insitu.backend.inference.sampler import (
    LATEST,
    Completion,
    Deliver,
    GenerationRequest,
    OutputDelta,
    Sampler,
    WeightVersion,
)
from insitu.backend.model import LoadedModel
from insitu.errors import BackendUnavailable, RequestRefused
from insitu.integrations.vllm.fleet import Fleet, Replaced, Waits
from insitu.integrations.vllm.probe import Probe
from insitu.integrations.vllm.replica import Overloaded, Replica, request_body, sampled_tokens
from insitu.integrations.vllm.servers import started_servers
from insitu.schemas.backend_processes import SamplerOptions
from insitu.schemas.lora import LoRASettings
from insitu.wire.endings import end_tasks
from insitu.wire.http_format import MALFORMED
from insitu.wire.redaction import remember_secret

MAX_ATTEMPTS = 5
"""How often a completion is asked for before its failure is reported."""
BUSY_SECONDS, MOST_BUSY_SECONDS = 1.0, 10.0
"""Delay after all servers have too much to do, if they name none, and the longest one."""


@dataclass
class _Call:
    """The weights of a request, which all its completions share, and whether one of them has begun."""

    asked: WeightVersion
    weights: WeightVersion
    size: int
    has_begun: bool = False


class VllmSampler(Sampler):
    """`folder_of` gives the files of a version or raises RequestRefused.

    `adapter_rank`: that of the adapters that will be trained, None for all weights. The servers that this process
    starts, with logs in `folder`, are made for it.
    """

    def __init__(
        self,
        options: SamplerOptions,
        loaded: LoadedModel,
        compute: ComputeThread,
        folder_of: Callable[[WeightVersion], Path],
        load_version: Callable[[WeightVersion], nn.Module],
        max_length: int,
        adapter_rank: int | None,
        folder: Path,
        threads: int | None = None,
        waits: Waits | None = None,
    ) -> None:
        """Raises BackendError if vLLM is to be started and is not installed."""
        super().__init__(loaded, compute, load_version, max_length)
        self._in_flight: Counter[WeightVersion] = Counter()
        self._started_rank = None if options.addresses else adapter_rank or 0
        if threads is not None:
            torch.set_num_threads(threads)
        if options.addresses:
            key = options.api_key.get_secret_value() if options.api_key is not None else None
            remember_secret(key)
            replicas = [Replica(f"the server at {address}", address, key) for address in options.addresses]
        else:
            servers = started_servers(options, loaded, max_length, adapter_rank, folder)
            replicas = [Replica(server.name, "http://localhost", server=server) for server in servers]
        self._probe = Probe(loaded, compute)
        self.fleet = Fleet(
            replicas, self._versions, self._probe, max_length, folder_of, folder / "vllm", waits or Waits()
        )

    async def start(self) -> None:
        await self.fleet.start()

    async def close(self) -> None:
        await self.fleet.close()

    @property
    def num_requests(self) -> tuple[int, int]:
        running = sum(replica.load for replica in self.fleet.replicas)
        return running, self._in_flight.total() - running

    def check(self, lora: LoRASettings | None) -> None:
        loaded = self._loaded
        is_tied = getattr(loaded.module.config, "tie_word_embeddings", False)
        if lora is None and is_tied and loaded.dtype != torch.float32:
            problem = "all weights are trained, and this model's embeddings are tied"
            kept = "vLLM may keep the old output layer, which cannot be seen in"
            dtype = str(loaded.dtype).removeprefix("torch.")
            raise RequestRefused(f"sampler: {problem}: {kept} {dtype}: train with lora, or set dtype: float32")
        for replica in self.fleet.replicas:
            if lora is None and not replica.can_reload:
                problem = f"all weights are trained, but {replica.name} cannot load new ones"
                raise RequestRefused(f"sampler: {problem}: start it with VLLM_SERVER_DEV_MODE=1, or train with lora")
            if lora is not None and self._started_rank is None and not replica.can_load_adapters:
                problem = f"lora is set, but {replica.name} cannot load adapters"
                flags = "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
                raise RequestRefused(f"sampler: {problem}: start it with {flags}", param="settings.lora")
        if lora is not None and lora.modules_to_save:
            raise RequestRefused("lora.modules_to_save: vLLM loads adapters only", param="settings.lora")
        if lora is not None and self._started_rank is not None and lora.rank > self._started_rank:
            problem = f"lora.rank is {lora.rank}, but vLLM was started for adapters of rank {self._started_rank}"
            raise RequestRefused(f"{problem}: start the backend with --lora_rank {lora.rank}", param="settings.lora")

    async def publish(self, weights: WeightVersion, module: nn.Module | None = None) -> None:
        load: Callable[[], nn.Module] = (lambda: module) if module is not None else partial(self._load_version, weights)
        await self.fleet.publish(weights, await self._probe.fingerprint(load))

    async def versions_in_use(self, policy: str) -> set[int]:
        used = (weights for weights, count in self._in_flight.items() if count)
        return {w.version for w in used if w.policy == policy and w.version is not None}

    async def retire(self, weights: WeightVersion) -> None:
        await self.fleet.retire(weights)

    async def prompt_logprobs(self, prompt: Sequence[int], weights: WeightVersion = LATEST) -> list[float]:
        problem = "prompt_logprobs is not supported with --sampler vllm; ask vLLM for them"
        raise RequestRefused(problem, param="prompt_logprobs", code="unsupported")

    @asynccontextmanager
    async def _sampling(
        self, requests: Sequence[GenerationRequest], weights: WeightVersion, streamed: bool, deliver: Deliver
    ) -> AsyncIterator[None]:
        call = _Call(weights, self.fleet.resolve(weights), len(requests))
        self._check_in_flight(self._in_flight.total())

        async def forward(index: int, request: GenerationRequest) -> None:
            try:
                async with aclosing(self._deltas(request, call, streamed=streamed)) as deltas:
                    async for delta in deltas:
                        deliver(index, delta)
            except Exception as error:  # raised again where the stream is read
                deliver(index, error)

        self._in_flight[call.weights] += call.size
        tasks = [asyncio.create_task(forward(index, request)) for index, request in enumerate(requests)]
        try:
            yield
        finally:
            try:
                await end_tasks(*tasks)
            finally:
                self._in_flight[call.weights] -= call.size
                self._in_flight += Counter()  # forgets versions without completions

    async def _acquire(self, call: _Call, prompt: list[int], busy: Collection[Replica]) -> Replica:
        """A server that has the weights. A request for the latest gets newer ones if none of its completions began."""
        while True:
            weights = call.weights
            try:
                replica = await self.fleet.acquire(weights, prompt, busy)
            except Replaced:
                if weights != call.weights:  # another completion of the request was first
                    continue
                if call.has_begun or call.asked.version is not None:
                    raise
                self._in_flight[weights] -= call.size
                call.weights = self.fleet.resolve(call.asked)
                self._in_flight[call.weights] += call.size
                continue
            if weights == call.weights:
                call.has_begun = True
                return replica

    async def _deltas(
        self, request: GenerationRequest, call: _Call, *, streamed: bool
    ) -> AsyncGenerator[OutputDelta, None]:
        """Asks another server if one fails before the first delta, which is the only one if not `streamed`."""
        attempts, busy = 0, set[Replica]()
        while True:
            replica = await self._acquire(call, request.prompt, busy)
            weights, first, attempts = call.weights, True, attempts + 1
            outputs = self._outputs_of(replica, Completion(*request), weights, streamed=streamed)
            try:
                with replica.serving(weights):
                    async with aclosing(outputs) as deltas:
                        async for delta in deltas:
                            first = False
                            yield delta
                return
            except MALFORMED as error:
                raise BackendUnavailable(f"{replica.name} returned unexpected data: {error!r}") from error
            except Overloaded as error:
                if attempts == MAX_ATTEMPTS or not first:
                    raise
                busy.add(replica)
                if self.fleet.are_busy(busy):
                    await asyncio.sleep(min(error.retry_after or BUSY_SECONDS, MOST_BUSY_SECONDS))
                    busy.clear()
            except (BackendUnavailable, RequestRefused) as error:
                if isinstance(error, RequestRefused) and error.status != 404:  # an adapter may have been lost
                    raise
                await self.fleet.failed(replica, error)
                if attempts == MAX_ATTEMPTS or not first:
                    raise BackendUnavailable(str(error)) from error

    async def _outputs_of(
        self, replica: Replica, completion: Completion, weights: WeightVersion, *, streamed: bool
    ) -> AsyncGenerator[OutputDelta, None]:
        """The tokens as they come, if `streamed`; the last ones once the weights are known to be the right ones."""
        incremental = streamed or bool(completion.params.stop)  # which only we look for
        if incremental:
            completion.detokenize(self.tokenizer)
        model, tag = self.fleet.model_name(replica, weights), replica.tag
        body = request_body(model, completion, self.tokenizer.eos_token_ids, stream=incremental)
        text, sent, reason = "", 0, None
        async with aclosing(replica.generate_events(body)) as events:
            async for event in events:
                for choice in event["choices"]:
                    new, finish_reason = self._append(completion, choice)
                    text, reason = text + new, choice.get("finish_reason")
                    replica.check_weights(event, choice, model, tag, is_named=not incremental)
                    if finish_reason is not None:
                        await replica.check_unnamed_weights(choice, tag)
                    if finish_reason is not None or (streamed and len(completion.tokens) > sent):
                        tokens = completion.tokens[sent:]
                        yield OutputDelta(weights.version or 0, text, tokens, finish_reason, completion.stop_reason)
                        text, sent = "", len(completion.tokens)
                    if finish_reason is not None:
                        return
        raise BackendUnavailable(f"{replica.name} ended a completion early ({reason})")

    def _append(self, completion: Completion, choice: dict[str, Any]) -> tuple[str, str | None]:
        """Adds the tokens of a choice up to the end of the completion; returns their text and the finish reason."""
        tokens = sampled_tokens(choice, completion.params.top_logprobs)
        if (largest := max(tokens.ids, default=0)) >= self.vocab_size:
            raise BackendUnavailable(f"vLLM returned the token {largest}; the vocabulary ends at {self.vocab_size - 1}")
        return completion.extend(tokens, self.tokenizer, self.max_length)

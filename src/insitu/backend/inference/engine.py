"""The embedded sampler: continuous batching over every weight version in use.

    await engine.complete(requests)  ->  inbox  ->  step(): admit, prefill, decode  ->  OutputDelta on the event loop

Each version has a scheduler. Publishing weights opens one for them; idle ones are dropped with their weights unless the
version is the latest of its policy or among the few older ones that were requested recently.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from insitu.algorithms.memory_budget import KV_SHARE, SMALL_MODEL
from insitu.backend.compute import ComputeThread, call_in_loop
from insitu.backend.inference.batch_shapes import BatchShapes, check_supported, suitable_threads
from insitu.backend.inference.kv_pool import BLOCK, BlockStore, KVPool, Layout
from insitu.backend.inference.sampler import LATEST, Deliver, GenerationRequest, Sampler, WeightVersion, canonical
from insitu.backend.inference.scheduler import Delivery, EngineOptions, Scheduler, SequenceState
from insitu.backend.inference.structured import SharedCompiler
from insitu.backend.learner.logprobs import LogprobComputer
from insitu.backend.model import LoadedModel, free_memory
from insitu.disk.files import readable_bytes
from insitu.disk.processor import usable_cores
from insitu.errors import BackendError

logger = logging.getLogger(__name__)

LARGE_MODEL, MAX_THREADS = 1_000_000_000, 4
"""Threads of a CPU within an operation wait for each other: at most so many sample from models of fewer parameters."""
TRAINED_COPIES = 5
"""Copies of all weights in float32 that training takes: weights, gradients, the optimizer's two, the served version."""
STORE_TOKENS = 2**18
"""Tokens for which a GPU's memory is taken at the start; blocks beyond them are read one by one."""
DEFAULT_KV_BYTES = 2**31
"""Where the system does not say what is free."""


class Engine(Sampler):
    """Samples completions in this process."""

    def __init__(
        self,
        loaded: LoadedModel,
        compute: ComputeThread,
        load_version: Callable[[WeightVersion], nn.Module],
        options: EngineOptions | None = None,
    ) -> None:
        self.options = options or EngineOptions(max_length=loaded.max_length)
        super().__init__(loaded, compute, load_version, self.options.max_length, self.options.kept_versions)
        self._inbox: deque[tuple[list[SequenceState], WeightVersion]] = deque()
        self._in_flight: dict[SequenceState, None] = {}
        self._has_aborted = False
        """Whether the schedulers may hold sequences that were aborted."""
        self.schedulers: dict[WeightVersion, Scheduler] = {}
        self._busy: dict[Scheduler, None] = {}
        """The schedulers with sequences."""
        self._shapes: BatchShapes | None = None
        self.pool = KVPool(0, 0)
        self._arrived = itertools.count()
        self._grammars = SharedCompiler(loaded.tokenizer, self.tokenizer.eos_token_ids, self.vocab_size)

    async def start(self) -> None:
        """Checks the model and starts sampling; `compute` must be running."""
        self._loop = asyncio.get_running_loop()
        self._compute.on_failure = self._fail_all
        await self._compute.call(self._prepare)
        self._compute.sampling_step = self.step

    def _prepare(self) -> None:
        module = self._loaded.module
        count = sum(parameter.numel() for parameter in module.parameters())
        cores = usable_cores()
        options, is_small = self.options, count < SMALL_MODEL or self._loaded.device.type != "cpu"
        torch.set_num_threads(options.threads or cores)
        attends_here = check_supported(module, options.max_length)
        most = cores if count >= LARGE_MODEL else 1 if is_small else MAX_THREADS
        torch.set_num_threads(options.threads or suitable_threads(module, min(cores, most)))
        self._shapes = BatchShapes(module, options.max_batch, attends_here, self.max_length)
        self._open_pool(count)
        self._publish(WeightVersion(0), module)
        if self._loaded.device.type == "cuda":
            self._compute.synchronize = functools.partial(torch.cuda.synchronize, self._loaded.device)

    def _open_pool(self, parameters: int) -> None:
        """Raises BackendError if `kv_bytes` is too little for any sequence."""
        assert self._shapes is not None
        options, token = self.options, self._shapes.layout.token_bytes
        limit = options.kv_bytes
        if limit is None:
            free = free_memory(self._loaded.device) or 0
            limit = int(max(free - TRAINED_COPIES * parameters * 4, free / 4) * KV_SHARE) or DEFAULT_KV_BYTES
        overhead = 2 * BLOCK * token + self._shapes.vocab_size * self._shapes.layout.dtype.itemsize
        room = (limit - overhead) // token
        if room < 2:
            least, each = readable_bytes(overhead + 2 * token), readable_bytes(token)
            problem = f"a sequence needs {least}, and {each} for each further token"
            raise BackendError(f"kv_memory is {readable_bytes(limit)}, but {problem}")
        if room < self.max_length:
            self.max_length = room
            self.length_limit = f"kv_memory is {readable_bytes(limit)}, and a token takes {readable_bytes(token)}"
        if self._loaded.device.type != "cpu":
            self._shapes.layout = self._with_store(self._shapes.layout, limit)
        self.pool = KVPool(limit, min(options.prefix_bytes, limit))
        size = readable_bytes(limit)
        logger.info("keys and values: %s, %d tokens; at most %d in a sequence", size, limit // token, self.max_length)

    def _with_store(self, layout: Layout, limit: int) -> Layout:
        """A store for the blocks of as many sequences as run together, and of earlier prompts, beside all windows."""
        block_bytes = BLOCK * layout.token_bytes
        most = self.options.max_batch * (self.max_length // BLOCK) + self.options.prefix_bytes // block_bytes
        beside_windows = limit // block_bytes - self.options.max_batch
        count = min(most, max(beside_windows, limit // block_bytes // 2), STORE_TOKENS // BLOCK)
        return replace(layout, store=BlockStore(layout, count))

    @property
    def num_requests(self) -> tuple[int, int]:
        """Running and waiting completions; approximate, because the compute thread keeps working."""
        busy, new = tuple(self._busy), sum(len(sequences) for sequences, _ in tuple(self._inbox))
        waiting = sum(len(scheduler.waiting) for scheduler in busy)
        return sum(len(scheduler.sequences) for scheduler in busy) - waiting, new + waiting

    async def publish(self, weights: WeightVersion, module: nn.Module | None = None) -> None:
        """Serves these weights from the next request on; in-flight requests keep theirs."""
        await self._compute.call(self._publish, weights, module)

    def _publish(self, weights: WeightVersion, module: nn.Module | None) -> None:
        assert weights.version is not None
        module = module if module is not None else self._load_version(weights)
        self._open(module, canonical(weights.version, weights.policy))
        self._versions.publish(weights)
        self._drop_idle()

    async def versions_in_use(self, policy: str) -> set[int]:
        def read() -> set[int]:
            running = [weights for weights, scheduler in self.schedulers.items() if scheduler in self._busy]
            waiting = [weights for _, weights in tuple(self._inbox)]
            return {w.version for w in (*running, *waiting) if w.policy == policy and w.version is not None}

        return await self._compute.call(read)

    async def retire(self, weights: WeightVersion) -> None:
        def forget() -> None:
            self._versions.retire(weights)
            self._drop_idle()

        await self._compute.call(forget)

    async def prompt_logprobs(self, prompt: Sequence[int], weights: WeightVersion = LATEST) -> list[float]:
        return await self._compute.call(lambda: self._logprobs.of_text(self._scheduler_of(weights).module, prompt))

    @functools.cached_property
    def _logprobs(self) -> LogprobComputer:
        return LogprobComputer(self._loaded)

    @contextlib.asynccontextmanager
    async def _sampling(
        self, requests: Sequence[GenerationRequest], weights: WeightVersion, streamed: bool, deliver: Deliver
    ) -> AsyncIterator[None]:
        """Hands sequences to the compute thread; leaving the block early aborts them and frees their slots.

        Raises RequestRefused (429) if too many sequences are waiting already, and for a grammar that is not supported.
        """
        matchers = await self._grammars.matchers([request.params.grammar for request in requests])
        self._check_in_flight(len(self._in_flight), self.options.max_in_flight)
        sequences = [
            SequenceState(*request, functools.partial(deliver, index), streamed, matcher)
            for index, (request, matcher) in enumerate(zip(requests, matchers, strict=True))
        ]
        for sequence in sequences:
            if streamed or sequence.params.stop:
                sequence.detokenize(self.tokenizer)
        self._in_flight.update(dict.fromkeys(sequences))
        self._inbox.append((sequences, weights))
        self._compute.wake()
        have_ended = False
        try:
            self._compute.check_alive()  # after the sequences are known: a failure from now on reaches them
            yield
            have_ended = True
        finally:
            for sequence in sequences:
                sequence.aborted = True
                del self._in_flight[sequence]
            if not have_ended:  # the caller no longer waits for them
                self._has_aborted = True

    def _fail_all(self, error: BaseException) -> None:
        """Ends all completions with this error."""
        self._deliver([(sequence, error) for sequence in tuple(self._in_flight)])

    def step(self) -> bool:
        """Admits sequences, advances every scheduler, delivers the outputs; returns whether work remains."""
        self._take_in()
        if self._has_aborted:
            self._has_aborted = False
            with torch.inference_mode():
                for scheduler in self._busy:
                    scheduler.drop_aborted()
        busy = list(self._busy)
        self._admit(busy)
        results: list[Delivery] = []
        for scheduler in busy:
            self._advance(scheduler, results)
        if results:
            self._deliver(results)
        for scheduler in busy:
            if scheduler.idle:
                del self._busy[scheduler]
                if scheduler not in self.schedulers.values():  # replaced meanwhile
                    self.pool.forget(scheduler)
        if len(self._busy) < len(busy):
            self._drop_idle()
        return bool(self._inbox or self._busy)

    def _take_in(self) -> None:
        """Gives new sequences to the schedulers of their versions."""
        while self._inbox:
            sequences, weights = self._inbox.popleft()
            try:
                scheduler = self._scheduler_of(weights)
            except Exception as error:  # a missing or changed checkpoint must not end the compute thread
                self._deliver([(sequence, error) for sequence in sequences])
                continue
            for sequence in sequences:
                sequence.number = next(self._arrived)
                scheduler.add(sequence)
                self._busy[scheduler] = None

    def _admit(self, busy: Sequence[Scheduler]) -> None:
        """Admits waiting sequences in their order, whatever their versions, while there is room for them."""
        while heads := [(head.number, each) for each in busy if (head := each.first_waiting) is not None]:
            if not min(heads, key=lambda head: head[0])[1].admit():
                return

    def _scheduler_of(self, weights: WeightVersion) -> Scheduler:
        by_number, weights = weights.version is not None, self._versions.resolve(weights)
        self._versions.request(weights, by_number=by_number)
        if weights not in self.schedulers:
            self._drop_idle()
            self._open(self._load_version(weights), weights)
        return self.schedulers[weights]

    def _open(self, module: nn.Module, weights: WeightVersion) -> None:
        if self._shapes is None:
            raise BackendError("weights were published before the engine was started")
        assert weights.version is not None  # see `canonical`
        if (replaced := self.schedulers.get(weights)) is not None and replaced not in self._busy:
            self.pool.forget(replaced)
        parts = module, weights.version, self._shapes, self.tokenizer, self.max_length, self.options, self.pool
        self.schedulers[weights] = Scheduler(*parts, self._make_room)

    def _make_room(self) -> None:
        admitted = [(each, one) for each in self._busy for one in (*each.prefilling, *each.running)]
        scheduler, youngest = max(admitted, key=lambda pair: pair[1].number)
        scheduler.preempt(youngest)

    def _advance(self, scheduler: Scheduler, results: list[Delivery]) -> None:
        """One step of a scheduler; if it fails, its sequences get the error and the scheduler is reset."""
        try:
            with torch.inference_mode():
                scheduler.step(results)
        except Exception as error:  # no error of a forward pass may end the thread that serves the other requests
            logger.exception("version %d: a sampling step failed", scheduler.version)
            results += [(sequence, error) for sequence in scheduler.sequences]
            scheduler.reset()

    def _drop_idle(self) -> None:
        for weights, scheduler in list(self.schedulers.items()):
            if scheduler not in self._busy and not self._versions.stays(weights):
                self.pool.forget(scheduler)
                del self.schedulers[weights]

    def _deliver(self, results: Sequence[Delivery]) -> None:
        """Passes all outputs of a step to the event loop in one call."""
        call_in_loop(self._loop, _notify_all, [(sequence.notify, output) for sequence, output in results])


def _notify_all(batch: list[tuple[Callable[[Any], None], Any]]) -> None:
    for notify, output in batch:
        notify(output)

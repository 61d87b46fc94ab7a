"""Continuous batching over every version of the weights that somebody asks for.

    await engine.complete(asks)  ->  inbox  ->  step(): admit, prefill, decode  ->  Piece, on the event loop

Weights are known by lineage and version: "" is the backend's own lineage, others go their own way from the same start,
so that version 0 of each is the loaded model. Each version has its lanes, one for each core that samples. Published
weights open new ones; lanes whose requests have all finished are dropped with their weights, unless these are the
newest of their lineage, or of the few older ones kept because they were asked for by number.
"""

import asyncio
import logging
import os
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from insitu.backend.compute import Compute
from insitu.backend.inference.lane import EngineOptions, Lane, Piece, Request
from insitu.backend.inference.runner import Shapes, check_fits
from insitu.backend.inference.sampling import Ask
from insitu.backend.inference.tokens import ChatTokenizer, StopFinder, TextStream
from insitu.backend.model import LoadedModel
from insitu.errors import BackendError

logger = logging.getLogger(__name__)

ONE_LANE = 5_000_000
"""Parameters below which one core samples: a step is so short that a second core would mostly wait for the first."""
ONE_THREAD = 100_000_000
"""Parameters below which a CPU computes each lane with one thread, and uses its cores by several lanes: products split
over threads made a row depend on its place in the batch."""
MOST_LANES = 4
"""More than these would wait for the interpreter's lock."""
SAME_PROMPT = 8
"""A lane that has computed a prompt already may be this much fuller than another and still gets the request."""


class Weights(NamedTuple):
    """Those of a version; none: the newest of the lineage."""

    version: int | None = None
    lineage: str = ""


NEWEST = Weights()


class Engine:
    """Samples completions. `module_at(weights)` gives older ones, or raises RequestRefused where there are none."""

    def __init__(
        self,
        loaded: LoadedModel,
        compute: Compute,
        module_at: Callable[[Weights], nn.Module],
        options: EngineOptions | None = None,
    ) -> None:
        self.options = options or EngineOptions(max_length=loaded.max_length)
        self.tokens = ChatTokenizer(loaded.tokenizer, eos_token_ids(loaded.module))
        self.vocabulary = loaded.vocabulary
        self._newest: dict[str, int] = {"": 0}
        self._loaded = loaded
        self._compute = compute
        self._module_at = module_at
        self._inbox: deque[tuple[asyncio.AbstractEventLoop, list[Request], Weights]] = deque()
        self._lanes: dict[Weights, list[Lane]] = {}
        self._lane_count = 1
        self._pool: ThreadPoolExecutor | None = None
        self._asked: OrderedDict[Weights, None] = OrderedDict()
        self._shapes: Shapes | None = None

    async def start(self) -> None:
        """Check that the model can be served, find its batch sizes, and begin. `compute` must have been started."""
        await self._compute.call(self._prepare)
        self._compute.sampler = self.step

    def _prepare(self) -> None:
        module = self._loaded.module
        count = sum(parameter.numel() for parameter in module.parameters())
        cores = os.cpu_count() or 1
        options = self.options
        torch.set_num_threads(options.threads or (1 if count < ONE_THREAD else cores))
        if options.lanes is not None:
            self._lane_count = options.lanes
        elif self._loaded.device.type == "cpu" and options.threads is None and ONE_LANE <= count < ONE_THREAD:
            self._lane_count = min(cores, MOST_LANES)
        if self._lane_count > 1:
            self._pool = ThreadPoolExecutor(self._lane_count, "insitu-sampling", torch.set_num_threads, (1,))
        check_fits(module)
        self._shapes = Shapes(module, options.max_batch, options.prefill_tokens, options.max_length)
        self.publish(module, 0)

    @property
    def version(self) -> int:
        """The newest of the backend's own lineage."""
        return self._newest[""]

    @property
    def load(self) -> tuple[int, int]:
        """Completions under way and those not yet begun; roughly, as other threads go on."""
        waiting = sum(len(requests) for _, requests, _ in tuple(self._inbox))
        return sum(len(lane.requests) for lanes in tuple(self._lanes.values()) for lane in lanes), waiting

    def publish(self, module: nn.Module, version: int, lineage: str = "") -> None:
        """Serve these weights from the next request on; for the compute thread. Requests under way keep theirs."""
        self._open(module, _known(version, lineage))
        self._newest[lineage] = version
        self._drop_idle()

    def withdraw(self, weights: Weights) -> None:
        """Keep these no longer (no version: the whole lineage), because nobody can ask for them; as `publish`."""
        gone = [
            each for each in self._asked if each.lineage == weights.lineage and weights.version in (None, each.version)
        ]
        for each in gone:
            del self._asked[each]
        if weights.version is None:
            self._newest.pop(weights.lineage, None)
        self._drop_idle()

    async def complete(self, asks: Sequence[Ask], weights: Weights = NEWEST) -> list[Piece]:
        """One completion for each of `asks`, all by the same weights."""
        loop = asyncio.get_running_loop()
        done: list[asyncio.Future[Piece]] = [loop.create_future() for _ in asks]
        requests = [Request(*ask, _resolver(future), False) for ask, future in zip(asks, done, strict=True)]
        with self._submitted(loop, requests, weights):
            pieces = await asyncio.gather(*done)
        for piece, request in zip(pieces, requests, strict=True):
            if request.text is None:
                ids = [token.id for token in piece.tokens]
                ended = piece.finish_reason == "stop"  # by a token which, special or not, is no text
                piece.text = self.tokens.decode(ids[:-1] if ended else ids)
        return pieces

    async def stream(self, asks: Sequence[Ask], weights: Weights = NEWEST) -> AsyncIterator[tuple[int, Piece]]:
        """The same, as (number of the choice, what it grew by) while they are sampled."""
        loop = asyncio.get_running_loop()
        arrivals: asyncio.Queue[tuple[int, Piece | BaseException]] = asyncio.Queue()
        requests = [Request(*ask, _forwarder(arrivals, number), True) for number, ask in enumerate(asks)]
        with self._submitted(loop, requests, weights):
            unfinished = len(requests)
            while unfinished:
                number, piece = await arrivals.get()
                if isinstance(piece, BaseException):
                    raise piece
                unfinished -= piece.finish_reason is not None
                yield number, piece

    @contextmanager
    def _submitted(self, loop: asyncio.AbstractEventLoop, requests: list[Request], weights: Weights):
        """Hand requests to the compute thread; whoever leaves early, by an error or cancelled, frees their slots."""
        for request in requests:
            if request.streamed or request.params.stop:
                request.text, request.stops = TextStream(self.tokens), StopFinder(request.params.stop)
        self._inbox.append((loop, requests, weights))
        self._compute.wake()
        try:
            yield
        finally:
            for request in requests:
                request.cancelled = True

    def step(self) -> bool:
        """One turn of the compute thread: admit, advance every lane, tell; whether there is more to do."""
        self._admit()
        busy = [lane for lanes in self._lanes.values() for lane in lanes if lane.requests]
        if self._pool is None or len(busy) < 2:
            told = [each for lane in busy for each in self._advance(lane)]
        else:
            told = [each for of_lane in self._pool.map(self._advance, busy) for each in of_lane]
        self._deliver(told)
        self._drop_idle()
        return bool(self._inbox) or any(lane.requests for lanes in self._lanes.values() for lane in lanes)

    def _admit(self) -> None:
        while self._inbox:
            loop, requests, weights = self._inbox.popleft()
            for request in requests:
                request.loop = loop
            try:
                lanes = self._lanes_of(weights)
            except Exception as error:  # a checkpoint that has gone or changed must not end the thread either
                self._deliver([(request, error) for request in requests])
                continue
            for request in requests:
                lane = min(lanes, key=lambda lane: lane.load(request, SAME_PROMPT)) if len(lanes) > 1 else lanes[0]
                lane.waiting.append(request)

    def _lanes_of(self, weights: Weights) -> list[Lane]:
        version = self._newest.get(weights.lineage, 0) if weights.version is None else weights.version
        weights = _known(version, weights.lineage)
        if not self._is_newest(weights):
            self._asked[weights] = None
            self._asked.move_to_end(weights)
            while len(self._asked) > self.options.kept_versions:
                self._asked.popitem(last=False)
        if weights not in self._lanes:
            self._open(self._module_at(weights), weights)
        return self._lanes[weights]

    def _is_newest(self, weights: Weights) -> bool:
        return self._newest.get(weights.lineage) == weights.version

    def _open(self, module: nn.Module, weights: Weights) -> None:
        if self._shapes is None:
            raise BackendError("weights were published before the engine was started")
        assert weights.version is not None  # see _known
        parts = module, weights.version, self._shapes, self.tokens, self.options
        self._lanes[weights] = [Lane(*parts) for _ in range(self._lane_count)]

    def _advance(self, lane: Lane) -> Sequence[tuple[Request, Piece | BaseException]]:
        """One step of a lane; when it fails, its requests get the error and the lane begins anew."""
        told: list[tuple[Request, Piece | BaseException]] = []
        try:
            with torch.inference_mode():
                lane.step(told)
        except Exception as error:  # whatever a forward pass raises must not end the thread that serves the others
            logger.exception("version %d: a sampling step failed", lane.version)
            told += [(request, error) for request in lane.requests]
            lane.reset()
        return told

    def _drop_idle(self) -> None:
        for weights, lanes in list(self._lanes.items()):
            idle = not any(lane.requests for lane in lanes)
            if idle and not self._is_newest(weights) and weights not in self._asked:
                del self._lanes[weights]

    def _deliver(self, told: Sequence[tuple[Request, Piece | BaseException]]) -> None:
        """Everything one step has to tell crosses to the event loop at once."""
        for loop in {request.loop for request, _ in told}:
            assert loop is not None  # set when it was admitted
            batch = [(request.notify, what) for request, what in told if request.loop is loop]
            try:
                loop.call_soon_threadsafe(_notify_all, batch)
            except RuntimeError:
                logger.debug("the event loop closed before %d results reached it", len(batch))


def _known(version: int, lineage: str) -> Weights:
    """What they are known by: every lineage begins with the loaded model."""
    return Weights(version, lineage if version else "")


def eos_token_ids(module: nn.Module) -> set[int]:
    """The tokens that end a turn, as the model's own files state them."""
    stated: set[int] = set()
    for source in (getattr(module, "generation_config", None), module.config):
        value = getattr(source, "eos_token_id", None)
        stated.update(value if isinstance(value, list) else [] if value is None else [value])
    return stated


def _notify_all(batch: list[tuple[Callable[[Any], None], Any]]) -> None:
    for notify, what in batch:
        notify(what)


def _resolver(future: asyncio.Future[Piece]) -> Callable[[Piece | BaseException], None]:
    def notify(what: Piece | BaseException) -> None:
        if future.done():
            return
        if isinstance(what, BaseException):
            future.set_exception(what)
        else:
            future.set_result(what)

    return notify


def _forwarder(queue: asyncio.Queue, number: int) -> Callable[[Piece | BaseException], None]:
    return lambda what: queue.put_nowait((number, what))

"""The vLLM servers together: which weights they have, which of them are used, and when they are taken back.

A server is `ready` if it responds and has the weights to serve. One that fails is left out, and `_watch` takes it back
once it has them again. Adapters of several versions are served together, of full weights only one version is.
"""

import asyncio
import contextlib
import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from insitu.backend.inference.sampler import WeightVersion, canonical
from insitu.errors import BackendError, BackendUnavailable, InsituError, RequestRefused, format_error
from insitu.integrations.vllm.replica import STARTED_WITH, Replica, WrongWeights
from insitu.integrations.vllm.routing import PrefixRouter
from insitu.integrations.vllm.servers import StartedServer, model_files

logger = logging.getLogger(__name__)

WATCH_SECONDS = 2.0
"""Interval of the health checks."""
LONGEST_DELAY = 60.0
"""Between attempts to use a server that responds, but cannot be used."""
_MOST_DOUBLINGS = 32
"""Of that delay: more would be too large for a float."""
WAIT_SECONDS = 600.0
"""How long completions and new versions wait for a server."""
MAX_STARTS = 3
"""How often a server is started before it is ready again."""
_KEPT_ADAPTERS = 2
"""Older versions whose adapters stay loaded, of those that were requested."""
_UNKNOWN = WeightVersion(-1)


class Place(NamedTuple):
    """Where a version is: in full weights (None: those that servers were started with), or in an adapter on them."""

    base: WeightVersion | None
    folder: Path
    is_adapter: bool


class Fleet:
    """`servers` are those that this process starts, in the order of `replicas`; it has none at given addresses.

    `folder_of` gives the files of a version or raises RequestRefused. `scratch` gets files for the servers to read.
    `probe` raises BackendError if the model of that name on a server is not the loaded one, and `compare_weights` if it
    has other weights than those of a fingerprint.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        servers: Sequence[StartedServer],
        max_length: int,
        folder_of: Callable[[WeightVersion], Path],
        scratch: Path,
        probe: Callable[[Replica, str], Awaitable[None]],
        compare_weights: Callable[[Replica, str, list[float]], Awaitable[None]],
    ) -> None:
        self.replicas = list(replicas)
        self.latest: dict[str, int] = {"": 0}
        self._servers = list(servers)
        self._max_length = max_length
        self._folder_of = folder_of
        self._scratch = scratch
        self._probe = probe
        self._compare_weights = compare_weights
        self._fingerprints: dict[str, list[float]] = {}
        """Of the latest versions, by policy."""
        self._base: WeightVersion | None = None
        """The full weights that every server must have."""
        self._recent: OrderedDict[WeightVersion, None] = OrderedDict()
        self._router: PrefixRouter[Replica] = PrefixRouter()
        self._starts: Counter[Replica] = Counter()
        self._failures: Counter[Replica] = Counter()
        self._retry_at: dict[Replica, float] = {}
        self._changed = asyncio.Event()
        self._watching: list[asyncio.Task[None]] = []
        self._publishing = asyncio.Lock()
        self._session = secrets.token_hex(4)
        self._num_names = 0

    async def start(self) -> None:
        """Returns when all servers are ready. Raises BackendError if one cannot be used."""
        for server in self._servers:
            await asyncio.to_thread(server.start)
        checks = [asyncio.create_task(self._first_check(index)) for index in range(len(self.replicas))]
        try:
            await asyncio.gather(*checks)
        finally:
            await cancelled(checks)
        for index, replica in enumerate(self.replicas):
            self._watching.append(asyncio.create_task(self._watch(index), name=f"watch {replica.name}"))

    async def _first_check(self, index: int) -> None:
        replica = self.replicas[index]
        try:
            while self._servers:
                if report := await asyncio.to_thread(self._servers[index].exit_report):
                    raise BackendError(report)
                with contextlib.suppress(BackendUnavailable):
                    await replica.check_health()
                    break
                await asyncio.sleep(WATCH_SECONDS / 4)
            await self._prepare(replica)
        except InsituError as error:
            raise BackendError(f"sampler: {error}") from error

    async def close(self) -> None:
        await cancelled(self._watching)
        for replica in self.replicas:
            await replica.close()
        for server in self._servers:
            await asyncio.to_thread(server.close)

    def resolve(self, weights: WeightVersion) -> WeightVersion:
        """The version to sample from. Raises RequestRefused if it is not served."""
        version = self.latest.get(weights.policy, 0) if weights.version is None else weights.version
        weights = canonical(version, weights.policy)
        if (place := self._place(weights)).base != self._base:
            problem = f"version {version} is not served: vLLM has one version of all weights"
            raise RequestRefused(f"{problem}, the latest", status=409, param="model", code="version_not_served")
        if place.is_adapter and not self._is_latest(weights):
            self._recent[weights] = None
            self._recent.move_to_end(weights)
            while len(self._recent) > _KEPT_ADAPTERS:
                self._recent.popitem(last=False)
        return weights

    async def acquire(self, weights: WeightVersion, prompt: Sequence[int]) -> Replica:
        """A server that has the weights. Raises BackendUnavailable if there is none for `WAIT_SECONDS`."""
        deadline = asyncio.get_running_loop().time() + WAIT_SECONDS
        while True:
            place = self._place(weights)
            if place.base != self._base:
                raise BackendUnavailable(f"version {weights.version} was replaced before the completion began")
            loads = {each: each.load for each in self.replicas if each.ready and each.base == self._base}
            if not loads:
                await self._wait_for_change(deadline)
                continue
            replica = self._router.choose(prompt, loads)
            if not place.is_adapter or weights in replica.adapters:
                return replica
            if self._is_latest(weights):
                await self._change(replica, lambda replica: self._load_adapter(replica, weights))
            else:
                await self._load_older(replica, weights)

    async def failed(self, replica: Replica, error: BackendError) -> None:
        """A completion has failed: leaves the server out, unless it responds and the reason may have been transient."""
        may_be_transient = isinstance(error, BackendUnavailable) and not isinstance(error, WrongWeights)
        if may_be_transient and await replica.responds():
            return
        await replica.leave_out(str(error))
        self._notify()

    def model_name(self, replica: Replica, weights: WeightVersion) -> str:
        return replica.adapters.get(weights, replica.model)

    async def publish(self, weights: WeightVersion, fingerprint: list[float]) -> None:
        """Returns when a server has the weights: the others get them when they can.

        Raises BackendError if all servers refuse them, or none responds for `WAIT_SECONDS`. Versions of all weights,
        and those that no server has responded to, are the latest even so: calls wait for them.
        """
        assert weights.version is not None

        async def load_adapter(replica: Replica) -> None:
            await self._load_adapter(replica, weights)
            await self._compare_weights(replica, self.model_name(replica, weights), fingerprint)

        async with self._publishing:
            place = self._place(weights)
            if place.is_adapter:
                errors = await self._on_each(load_adapter)
                await self._raise_if_refused(weights, errors)
            self.latest[weights.policy] = weights.version
            self._fingerprints[weights.policy] = fingerprint
            if not place.is_adapter:
                self._base = place.base
                await self._raise_if_refused(weights, await self._on_each(self._replace_base))
            await self._on_each(self._unload_adapters)
            try:
                await self.acquire(canonical(weights.version, weights.policy), ())
            except BackendUnavailable as error:
                raise BackendError(f"no vLLM server takes version {weights.version}: {error}") from error

    async def retire(self, weights: WeightVersion) -> None:
        if weights.version is None:
            self.latest.pop(weights.policy, None)
            self._fingerprints.pop(weights.policy, None)
            if self._base is not None and self._base.policy == weights.policy:
                self._base = None
                await self._on_each(self._replace_base)
        for each in list(self._recent):
            if each.policy == weights.policy and weights.version in (None, each.version):
                del self._recent[each]
        await self._on_each(self._unload_adapters)

    def _is_latest(self, weights: WeightVersion) -> bool:
        return weights == canonical(self.latest.get(weights.policy, 0), weights.policy)

    def _place(self, weights: WeightVersion) -> Place:
        folder = self._folder_of(weights)
        if (folder / "adapter_config.json").is_file():
            return Place(None, folder.resolve(), True)
        return Place(weights if weights.version else None, folder.resolve() if folder.exists() else folder, False)

    async def _raise_if_refused(self, weights: WeightVersion, errors: Sequence[InsituError | None]) -> None:
        """Raises BackendError if none of the servers took a version, although one responds."""
        if errors and None not in errors and any([await each.responds() for each in self.replicas]):
            raise BackendError(f"no vLLM server takes version {weights.version}: {errors[0]}")

    async def _on_each(self, change: Callable[[Replica], Awaitable[None]]) -> list[InsituError | None]:
        return await asyncio.gather(*(self._change(replica, change) for replica in self.replicas if replica.ready))

    async def _change(self, replica: Replica, change: Callable[[Replica], Awaitable[None]]) -> InsituError | None:
        """Changes the weights of a server; one that fails is left out, and its error is returned."""
        try:
            async with replica.lock:
                await change(replica)
        except Exception as error:  # also an answer of another shape: it must not end what waits for other servers
            failure = _failure(replica, error)
            await replica.leave_out(str(failure))
            return failure
        finally:
            self._notify()
        return None

    async def _load_older(self, replica: Replica, weights: WeightVersion) -> None:
        """Raises the error of a server that responds: it still serves the latest version, so it is not left out."""
        try:
            async with replica.lock:
                await self._load_adapter(replica, weights)
        except InsituError as error:
            if isinstance(error, RequestRefused) or await replica.responds():
                raise
            await replica.leave_out(str(error))
        finally:
            self._notify()

    async def _load_adapter(self, replica: Replica, weights: WeightVersion) -> None:
        if weights not in replica.adapters:
            await replica.load_adapter(weights, self._place(weights).folder, self._new_name(weights))

    async def _unload_adapters(self, replica: Replica) -> None:
        """Unloads those that nobody asks for."""
        for weights in list(replica.adapters):
            if not (self._is_latest(weights) or weights in self._recent or replica.in_flight[weights]):
                await replica.unload_adapter(weights)

    async def _load_base(self, replica: Replica) -> None:
        """Gives a server the full weights to serve, unless it has them."""
        if replica.base == self._base:
            return
        if not replica.can_reload:
            raise BackendError(f"{replica.name} cannot load weights: start it with VLLM_SERVER_DEV_MODE=1")
        weights = self._base or WeightVersion(0)
        name = self._new_name(weights)
        with model_files(self._place(weights).folder, self._scratch / name) as folder:
            await replica.reload(self._base, folder, name)

    async def _replace_base(self, replica: Replica) -> None:
        await self._load_base(replica)
        if self._base is not None:
            await self._compare_weights(replica, replica.model, self._fingerprints[self._base.policy])
        replica.take_back()

    def _new_name(self, weights: WeightVersion) -> str:
        """A name of weights that vLLM has never had."""
        self._num_names += 1
        return f"insitu-{self._session}-{self._num_names}-v{weights.version}"

    async def _prepare(self, replica: Replica) -> None:
        """Gives a server the weights to serve, and makes it ready. Raises InsituError if it cannot be used."""
        async with replica.lock:
            await replica.inspect(self._max_length)
            tag = await replica.weight_tag()
            if tag in (None, STARTED_WITH):
                replica.base = None
            elif tag != replica.tag:
                replica.base = _UNKNOWN
            replica.tag = tag
            await self._load_base(replica)
            await replica.forget_adapters(f"insitu-{self._session}-")
            for policy, version in list(self.latest.items()):
                weights = canonical(version, policy)
                if self._place(weights).is_adapter:
                    await self._load_adapter(replica, weights)
                if weights.version and self._place(weights).base == self._base:
                    name = self.model_name(replica, weights)
                    await self._compare_weights(replica, name, self._fingerprints[policy])
            if replica.base is None:
                if self._place(WeightVersion(0)).is_adapter:
                    await self._load_adapter(replica, WeightVersion(0))
                await self._probe(replica, self.model_name(replica, WeightVersion(0)))
            replica.take_back()
            self._starts[replica] = self._failures[replica] = 0
            self._retry_at.pop(replica, None)
        self._notify()

    async def _watch(self, index: int) -> None:
        """Checks a server's health; takes it back after it was left out, when it can be used again."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            await self._check(index)

    async def _check(self, index: int) -> None:
        replica = self.replicas[index]
        try:
            if self._servers and (report := await asyncio.to_thread(self._servers[index].exit_report)):
                await replica.leave_out(report)
                if self._starts[replica] >= MAX_STARTS:
                    return
                self._starts[replica] += 1
                logger.error("%s\nstarting it again (%d of %d)", report, self._starts[replica], MAX_STARTS)
                await asyncio.to_thread(self._servers[index].start)
            await replica.check_health()
            now = asyncio.get_running_loop().time()
            waits = now < self._retry_at.get(replica, now) or replica.lock.locked()
            if (not replica.ready or replica.base != self._base) and not waits:
                self._failures[replica] = min(self._failures[replica] + 1, _MOST_DOUBLINGS)
                self._retry_at[replica] = now + min(LONGEST_DELAY, 2.0 ** self._failures[replica])
                await self._prepare(replica)
        except Exception as error:  # also an answer of another shape: the server must be checked again
            failure = _failure(replica, error)
            if not isinstance(failure, BackendUnavailable) and str(failure) != replica.problem:
                logger.warning("%s cannot be used: %s", replica.name, failure)
            await replica.leave_out(str(failure))
        finally:
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_for_change(self, deadline: float) -> None:
        """Raises BackendUnavailable if no server can become ready, or none has until the deadline."""
        pairs = [*zip(self.replicas, self._servers, strict=False)]
        given_up = bool(pairs) and all(server.ended and self._starts[each] >= MAX_STARTS for each, server in pairs)
        try:
            if given_up:
                raise TimeoutError
            async with asyncio.timeout_at(deadline):
                await self._changed.wait()
        except TimeoutError:
            problems = "; ".join(each.problem for each in self.replicas if each.problem)
            within = "" if given_up else f" within {WAIT_SECONDS:g} s"
            raise BackendUnavailable(f"no vLLM server is ready{within}: {problems}") from None


async def cancelled(tasks: Sequence["asyncio.Task[Any]"]) -> None:
    """Cancels tasks, and returns when they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _failure(replica: Replica, error: Exception) -> InsituError:
    if isinstance(error, InsituError):
        return error
    return BackendError(f"{replica.name} cannot be used: {format_error(error)}")

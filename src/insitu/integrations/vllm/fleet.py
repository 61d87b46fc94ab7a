"""The vLLM servers together: which weights they have, which of them get completions, and when they are taken back.

A server is `ready` if it responds and has the weights to serve. One that fails is left out, and `_watch` takes it back
once it has them again. Adapters of several versions are served together, of full weights only one version is.
"""

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from insitu.backend.inference.sampler import ServedVersions, WeightVersion, canonical
from insitu.errors import BackendError, BackendUnavailable, InsituError, RequestRefused, format_error
from insitu.integrations.vllm.probe import Probe
from insitu.integrations.vllm.replica import STARTED_WITH, Replica, WrongWeights
from insitu.integrations.vllm.servers import model_files
from insitu.wire.endings import end_tasks

logger = logging.getLogger(__name__)

_MOST_DOUBLINGS = 32
"""The delay doubles at most so often: a longer one would be too large for a float."""
MAX_STARTS = 3
"""How often a server is started before it is ready again."""
_UNKNOWN = WeightVersion(-1)
BLOCK = 16
"""Tokens of a prompt that are compared together."""
AFFINITY = 8
"""A server that knows a prompt's start is preferred while it has at most this many more completions."""
_MAX_BLOCKS = 2**18
T = TypeVar("T")


@dataclass
class Waits:
    """Seconds that a fleet waits."""

    between_checks: float = 2.0
    """Interval of the health checks."""
    longest_delay: float = 60.0
    """Between attempts to use a server that responds, but cannot be used."""
    for_a_server: float = 600.0
    """Time for which completions and new versions wait for a server."""


Change = Callable[[Replica], Awaitable[None]]
"""Changes the weights of a server."""


class Replaced(BackendUnavailable):
    """The weights of a completion were replaced before it began."""


class Place(NamedTuple):
    """Where a version is: in full weights (None: those that servers were started with), or in an adapter on them."""

    base: WeightVersion | None
    folder: Path
    is_adapter: bool


class PrefixRouter(Generic[T]):
    """Remembers which server last had each start of a prompt, in whole blocks.

    The next call of an episode begins with the prompt of the one before, so it goes to the same server.
    """

    def __init__(self) -> None:
        self._servers: OrderedDict[int, T] = OrderedDict()

    def choose(self, prompt: Sequence[int], loads: dict[T, int]) -> T:
        """`loads` has the servers that can take the completion, with their unfinished ones."""
        keys = _block_keys(prompt)
        server = min(loads, key=lambda each: loads[each])
        match = next((each for key in reversed(keys) if (each := self._servers.get(key)) is not None), None)
        if match is not None and match in loads and loads[match] <= loads[server] + AFFINITY:
            server = match
        for key in keys:
            self._servers[key] = server
            self._servers.move_to_end(key)
        while len(self._servers) > _MAX_BLOCKS:
            self._servers.popitem(last=False)
        return server


def _block_keys(prompt: Sequence[int]) -> list[int]:
    """A key for each whole block, which stands for everything up to its end."""
    keys: list[int] = []
    for end in range(BLOCK, len(prompt) + 1, BLOCK):
        keys.append(hash((keys[-1] if keys else 0, *prompt[end - BLOCK : end])))
    return keys


@dataclass(eq=False)
class Fleet:
    """`folder_of` gives the files of a version or raises RequestRefused; `scratch` gets files for servers to read."""

    replicas: list[Replica]
    versions: ServedVersions
    probe: Probe
    max_length: int
    folder_of: Callable[[WeightVersion], Path]
    scratch: Path
    waits: Waits

    def __post_init__(self) -> None:
        self._fingerprints: dict[str, list[float]] = {}
        """The fingerprints of the latest versions, by policy."""
        self._base: WeightVersion | None = None
        """The full weights that every server must have."""
        self._router: PrefixRouter[Replica] = PrefixRouter()
        self._changed = asyncio.Event()
        self._watching: list[asyncio.Task[None]] = []
        self._publishing = asyncio.Lock()
        self._session = secrets.token_hex(4)
        self._num_names = 0

    async def start(self) -> None:
        """Returns when all servers are ready. Raises BackendError if one cannot be used."""
        for replica in self.replicas:
            if replica.server is not None:
                await asyncio.to_thread(replica.server.start)
        checks = [asyncio.create_task(self._first_check(replica)) for replica in self.replicas]
        try:
            await asyncio.gather(*checks)
        finally:
            await end_tasks(*checks)
        for replica in self.replicas:
            self._watching.append(asyncio.create_task(self._watch(replica), name=f"watch {replica.name}"))

    async def _first_check(self, replica: Replica) -> None:
        try:
            while replica.server is not None:
                if report := await asyncio.to_thread(replica.server.exit_report):
                    raise BackendError(report)
                if await replica.responds():
                    break
                await asyncio.sleep(self.waits.between_checks / 4)
            await self._prepare(replica)
        except InsituError as error:
            raise BackendError(f"sampler: {error}") from error

    async def close(self) -> None:
        await end_tasks(*self._watching)
        for replica in self.replicas:
            await replica.close()

    def resolve(self, weights: WeightVersion) -> WeightVersion:
        """The version to sample from. Raises RequestRefused if it is not served."""
        by_number, weights = weights.version is not None, self.versions.resolve(weights)
        if (place := self._place(weights)).base != self._base:
            problem = f"version {weights.version} is not served: vLLM has one version of all weights"
            raise RequestRefused(f"{problem}, the latest", status=409, param="model", code="version_not_served")
        if place.is_adapter:
            self.versions.request(weights, by_number=by_number)
        return weights

    def are_busy(self, replicas: Collection[Replica]) -> bool:
        """Whether no other server can be asked."""
        return all(each in replicas for each in self.replicas if each.ready and each.base == self._base)

    async def acquire(self, weights: WeightVersion, prompt: Sequence[int], busy: Collection[Replica] = ()) -> Replica:
        """A server that has the weights, not one of the `busy` ones if there is another.

        Raises BackendUnavailable if there is none in time.
        """
        deadline = asyncio.get_running_loop().time() + self.waits.for_a_server
        while True:
            place = self._place(weights)
            if place.base != self._base:
                raise Replaced(f"version {weights.version} was replaced before the completion began")
            loads = {each: each.load for each in self.replicas if each.ready and each.base == self._base}
            if not loads:
                await self._wait_for_change(deadline)
                continue
            idle = {each: load for each, load in loads.items() if each not in busy}
            replica = self._router.choose(prompt, idle or loads)
            if not place.is_adapter or weights in replica.adapters:
                return replica
            is_older = not self.versions.is_latest(weights)
            await self._change(replica, lambda replica: self._load_adapter(replica, weights), optional=is_older)

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

        Raises BackendError if all servers refuse them, or none responds in time. Versions of all weights,
        and those that no server has responded to, are the latest even so: calls wait for them.
        """
        assert weights.version is not None

        async def load_adapter(replica: Replica) -> None:
            await self._load_adapter(replica, weights)
            await self.probe.compare_weights(replica, self.model_name(replica, weights), fingerprint)

        async with self._publishing:
            place = self._place(weights)
            if place.is_adapter:
                await self._raise_if_refused(weights, await self._on_each(load_adapter))
            self.versions.publish(weights)
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
        self.versions.retire(weights)
        if weights.version is None:
            self._fingerprints.pop(weights.policy, None)
            if self._base is not None and self._base.policy == weights.policy:
                self._base = None
                await self._on_each(self._replace_base)
        await self._on_each(self._unload_adapters)

    def _place(self, weights: WeightVersion) -> Place:
        folder = self.folder_of(weights)
        if (folder / "adapter_config.json").is_file():
            return Place(None, folder, True)
        return Place(weights if weights.version else None, folder, False)

    async def _raise_if_refused(self, weights: WeightVersion, errors: Sequence[InsituError | None]) -> None:
        """Raises BackendError if none of the servers took a version, although one responds."""
        if errors and None not in errors and any([await each.responds() for each in self.replicas]):
            raise BackendError(f"no vLLM server takes version {weights.version}: {errors[0]}")

    async def _on_each(self, change: Change) -> list[InsituError | None]:
        return await asyncio.gather(*(self._change(replica, change) for replica in self.replicas if replica.ready))

    async def _change(self, replica: Replica, change: Change, *, optional: bool = False) -> InsituError | None:
        """Changes the weights of a server; one that fails is left out, and its error is returned.

        If the change is `optional` and the server responds, which still serves the latest version, raises the error.
        """
        try:
            async with replica.lock:
                await change(replica)
        except Exception as error:  # also an answer of another shape: it must not end what waits for other servers
            failure = _failure(replica, error)
            if optional and (isinstance(failure, RequestRefused) or await replica.responds()):
                raise failure from error
            await replica.leave_out(str(failure))
            return failure
        finally:
            self._notify()
        return None

    async def _load_adapter(self, replica: Replica, weights: WeightVersion) -> None:
        if weights not in replica.adapters:
            await replica.load_adapter(weights, self._place(weights).folder.resolve(), self._new_name(weights))

    async def _unload_adapters(self, replica: Replica) -> None:
        """Unloads those that nobody asks for."""
        for weights in list(replica.adapters):
            if not (self.versions.stays(weights) or replica.in_flight[weights]):
                await replica.unload_adapter(weights)

    async def _load_base(self, replica: Replica) -> None:
        """Gives a server the full weights to serve, unless it has them."""
        if replica.base == self._base:
            return
        if not replica.can_reload:
            raise BackendError(f"{replica.name} cannot load weights: start it with VLLM_SERVER_DEV_MODE=1")
        weights = self._base or WeightVersion(0)
        name = self._new_name(weights)
        with model_files(self._place(weights).folder, self.scratch / name) as folder:
            await replica.reload(self._base, folder, name)

    async def _replace_base(self, replica: Replica) -> None:
        await self._load_base(replica)
        if self._base is not None:
            await self.probe.compare_weights(replica, replica.model, self._fingerprints[self._base.policy])
        replica.take_back()

    def _new_name(self, weights: WeightVersion) -> str:
        """A name of weights that vLLM has never had."""
        self._num_names += 1
        return f"insitu-{self._session}-{self._num_names}-v{weights.version}"

    async def _prepare(self, replica: Replica) -> None:
        """Gives a server the weights to serve, and makes it ready. Raises InsituError if it cannot be used."""
        async with replica.lock:
            await replica.inspect(self.max_length)
            tag = await replica.weight_tag()
            if tag in (None, STARTED_WITH):
                replica.base = None
            elif tag != replica.tag:
                replica.base = _UNKNOWN
            replica.tag = tag
            await self._load_base(replica)
            await replica.forget_adapters(f"insitu-{self._session}-")
            for policy, version in list(self.versions.latest.items()):
                weights = canonical(version, policy)
                if self._place(weights).is_adapter:
                    await self._load_adapter(replica, weights)
                if weights.version and self._place(weights).base == self._base:
                    name = self.model_name(replica, weights)
                    await self.probe.compare_weights(replica, name, self._fingerprints[policy])
            if replica.base is None:
                if self._place(WeightVersion(0)).is_adapter:
                    await self._load_adapter(replica, WeightVersion(0))
                await self.probe.check_answers(replica, self.model_name(replica, WeightVersion(0)))
            replica.take_back()
            replica.starts, replica.failures, replica.retry_at = 0, 0, 0.0
        self._notify()

    async def _watch(self, replica: Replica) -> None:
        """Checks a server's health; takes it back after it was left out, when it can be used again."""
        while True:
            await asyncio.sleep(self.waits.between_checks)
            await self._check(replica)

    async def _check(self, replica: Replica) -> None:
        try:
            if (server := replica.server) and (report := await asyncio.to_thread(server.exit_report)):
                await replica.leave_out(report)
                if replica.starts >= MAX_STARTS:
                    return
                replica.starts += 1
                logger.error("%s\nstarting it again (%d of %d)", report, replica.starts, MAX_STARTS)
                await asyncio.to_thread(server.start)
            await replica.check_health()
            now = asyncio.get_running_loop().time()
            waits = now < replica.retry_at or replica.lock.locked()
            if (not replica.ready or replica.base != self._base) and not waits:
                replica.failures = min(replica.failures + 1, _MOST_DOUBLINGS)
                replica.retry_at = now + min(self.waits.longest_delay, 2.0**replica.failures)
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
        given_up = all(each.server and each.server.ended and each.starts >= MAX_STARTS for each in self.replicas)
        try:
            if given_up:
                raise TimeoutError
            async with asyncio.timeout_at(deadline):
                await self._changed.wait()
        except TimeoutError:
            problems = "; ".join(each.problem for each in self.replicas if each.problem)
            within = "" if given_up else f" within {self.waits.for_a_server:g} s"
            raise BackendUnavailable(f"no vLLM server is ready{within}: {problems}") from None


def _failure(replica: Replica, error: Exception) -> InsituError:
    if isinstance(error, InsituError):
        return error
    return BackendError(f"{replica.name} cannot be used: {format_error(error)}")

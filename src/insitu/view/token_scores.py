"""Log-probabilities of recorded tokens under the newest weights of a run.

They come over the wire from an `insitu backend` that is started for the newest checkpoint, on the CPU, so that it takes
nothing from a run that trains on a GPU. It ends when it has not been used for a while, or with this process.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from insitu.builder import Builder
from insitu.config import Config, check_config
from insitu.disk.files import available_memory
from insitu.disk.model_files import OPTIMIZER_FILE
from insitu.errors import BackendUnavailable, InsituError, RequestRefused, describe_error
from insitu.runs.reader import RunReader
from insitu.schemas.episodes import ModelCall
from insitu.schemas.finetuning import PolicyEndpoint
from insitu.wire.connection import Connection
from insitu.wire.prompt_logprobs import Logprobs, Text, logprobs_of_texts, longest, part_of

logger = logging.getLogger(__name__)

IDLE_SECONDS = 300.0
"""How long the backend is kept for the next episode."""
_READ_SECONDS = 600.0
_ADAPTER = {"_type": "insitu_trainer_adapter", "device": "cpu", "max_restarts": 0}


_FLOAT32 = 2
"""What float32 weights need in memory for each byte of a checkpoint with 16 bits a weight."""


class Newest(NamedTuple):
    """The weights that scored."""

    checkpoint: str
    step: int


class _Server(NamedTuple):
    """A backend that runs until `stop` is set, in `task`."""

    folder: Path
    endpoint: "asyncio.Future[PolicyEndpoint]"
    stop: asyncio.Event
    task: "asyncio.Task[None]"


class Scorer:
    """Scores texts by the newest checkpoint of a run; one backend at a time."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._server: _Server | None = None
        self._idle: asyncio.TimerHandle | None = None

    async def score(self, run: Path, calls: Sequence[ModelCall]) -> tuple[Newest, dict[int, list[float | None]]]:
        """The log-probabilities of the sampled tokens of calls, by the calls' index. Raises InsituError."""
        checkpoints = await asyncio.to_thread(RunReader(run).checkpoints)
        if not checkpoints:
            raise InsituError(f"{run} has no checkpoint: its backend was not a part of it, or has not trained yet")
        folder, record = checkpoints[-1]
        await asyncio.to_thread(_check_memory, folder, Path(record.started_from))
        async with self._lock:
            try:
                endpoint = await self._endpoint(folder)
                texts = {call.index: (*call.all_token_ids,) for call in calls}
                scores = await _ask(endpoint, longest(texts.values()))
            finally:
                self._stop_later()
        return Newest(folder.name, record.step), {
            call.index: part_of(texts[call.index], len(call.prompt_token_ids or ()), scores) for call in calls
        }

    async def close(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        server, self._server = self._server, None
        if server is not None:
            server.stop.set()
            await asyncio.gather(server.task, return_exceptions=True)

    async def _endpoint(self, folder: Path) -> PolicyEndpoint:
        """Where the weights in `folder` are served; starts the backend, which a client that leaves does not stop."""
        if self._idle is not None:
            self._idle.cancel()
        server = self._server
        if server is None or server.folder != folder or server.stop.is_set() or server.task.done():
            await self.close()
            endpoint = asyncio.get_running_loop().create_future()
            endpoint.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may wait for it
            stop = asyncio.Event()
            task = asyncio.create_task(_serve(folder, endpoint, stop), name="backend for scores")
            self._server = server = _Server(folder, endpoint, stop, task)
        return await asyncio.shield(server.endpoint)

    def _stop_later(self) -> None:
        def stop() -> None:
            if self._server is not None and not self._lock.locked():
                self._server.stop.set()

        self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, stop)


def _check_memory(folder: Path, base: Path) -> None:
    """Raises InsituError if the weights would not leave half of the free memory to others, such as the run.

    `base` is the model that adapters belong to.
    """
    of_base = () if any(folder.glob("model*.safetensors")) else base.glob("*.safetensors")
    files = [path for path in (*folder.glob("*.safetensors"), *of_base) if path.name != OPTIMIZER_FILE]
    needed = _FLOAT32 * sum(path.stat().st_size for path in files)
    free = available_memory()
    if free is not None and needed > free / 2:
        raise InsituError(
            f"{folder} would need about {needed / 1e9:.1f} GB of memory to score this episode, and {free / 1e9:.1f} GB "
            "are free, half of which are left to others"
        )


async def _serve(folder: Path, endpoint: "asyncio.Future[PolicyEndpoint]", stop: asyncio.Event) -> None:
    """Serves weights until `stop` is set; `endpoint` gets the address, or the error if they cannot be served."""
    try:
        config: Config = check_config({"trainer_adapters": {"scores": _ADAPTER | {"model": str(folder)}}}, Path("view"))
        with TemporaryDirectory(prefix="insitu-view-") as scratch:
            async with Builder(config) as builder:
                adapter = await builder.get_trainer_adapter("scores")
                await adapter.initialize(config.finetuning.model_copy(update={"output_dir": Path(scratch)}))
                endpoint.set_result(await adapter.policy_endpoint())
                await stop.wait()
    except Exception as error:  # whatever it is, it is the answer to who waits for the endpoint
        if endpoint.done():
            logger.warning("the backend for scores: %s", describe_error(error))
            return
        known = isinstance(error, InsituError)
        endpoint.set_exception(error if known else InsituError(f"{folder}: {describe_error(error)}"))


async def _ask(endpoint: PolicyEndpoint, texts: Iterable[Text]) -> dict[Text, Logprobs]:
    """Raises BackendUnavailable."""
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    connection = Connection("the backend for scores", headers, _READ_SECONDS, 0.0)
    try:
        return await logprobs_of_texts(connection, endpoint.base_url, endpoint.model, texts, retried=False)
    except RequestRefused as error:
        raise BackendUnavailable(f"the newest weights cannot score this episode: {error}") from error
    finally:
        await connection.close()

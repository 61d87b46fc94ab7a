"""A trained model, served by a backend process for as long as it is used."""

import asyncio
import atexit
import threading
from concurrent.futures import Future
from contextlib import AbstractContextManager, AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from insitu.agents.python import BlockingModel
from insitu.builder import Builder
from insitu.collect.event_loop import run_async
from insitu.config import check_config
from insitu.errors import ConfigError
from insitu.runs.checkpoints import checkpoint_of_run
from insitu.runs.files import RUN
from insitu.runs.reader import RunReader
from insitu.training.runtime import serve_policy

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.chat import ChatCompletion

_NAME = "model"


class TrainedModel(AbstractContextManager["TrainedModel"]):
    """A client of a run's trained model. Close it, or use it in a `with` statement, to end its backend process.

    `ask` returns the text of an answer and `complete` a whole completion; `client` is the official OpenAI client. Any
    other client can use it at `base_url`, under the name `model`.
    """

    def __init__(self, run: Path, checkpoint: str | None = None, device: str | None = None) -> None:
        settings = RunReader(run).settings(required=True)["config"]
        adapter = settings["finetuning"]["trainer_adapter"]
        block = dict(settings["trainer_adapters"][adapter])
        if block.get("model") is None:
            raise ConfigError(f"{run}: trainer_adapters.{adapter} trains on a server, which keeps the trained weights")
        folder = checkpoint_of_run(run, checkpoint, "checkpoint")
        served = {"_type": block["_type"], "model": str(folder), "device": device or block.get("device", "auto")}
        llms = [dict(each) for each in settings.get("llms", {}).values() if each.get("_type") == "policy"]
        llm = {**(llms[0] if llms else {"_type": "policy"}), "seed": None}
        data = {"llms": {_NAME: llm}, "trainer_adapters": {adapter: served}, "finetuning": {"trainer_adapter": adapter}}
        self._config = check_config(data, run / RUN)
        self.checkpoint = folder
        """The folder of its weights."""
        self._ended: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        ready: Future[BlockingModel] = Future()
        self._thread = threading.Thread(target=self._serve, args=(ready,), name="serve the trained model", daemon=True)
        self._thread.start()
        self._model = ready.result()
        self.base_url = str(self._model.client.base_url)
        self.model = self._model.model
        atexit.register(self.close)

    def _serve(self, ready: "Future[BlockingModel]") -> None:
        async def serve() -> None:
            self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
            async with AsyncExitStack() as stack:
                builder = await stack.enter_async_context(Builder(self._config))
                await stack.enter_async_context(serve_policy(builder))
                ready.set_result(BlockingModel(await builder.get_llm(_NAME)))
                await self._ended.wait()

        try:
            run_async(serve())
        except BaseException as error:  # raised where the model was asked for
            if not ready.done():
                ready.set_exception(error)

    @property
    def client(self) -> "OpenAI":
        """The official client."""
        return self._model.client

    def complete(self, messages: str | list[dict[str, Any]], **overrides: Any) -> "ChatCompletion":
        """One chat completion with the sampling parameters of the run; `overrides` take precedence."""
        return self._model.complete(messages, **overrides)

    def ask(self, messages: str | list[dict[str, Any]], **overrides: Any) -> str:
        """The text of one completion."""
        return self._model.ask(messages, **overrides)

    def close(self) -> None:
        """Ends its backend process."""
        atexit.unregister(self.close)
        if self._loop is not None and self._ended is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join()

    def __exit__(self, *exception: object) -> None:
        self.close()

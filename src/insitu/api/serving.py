"""A trained model, and the agent with it, served by a backend process for as long as they are used."""

import asyncio
import copy
import logging
import secrets
import threading
import weakref
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from insitu.agents.frameworks import with_defaults
from insitu.agents.python import BlockingModel
from insitu.builder import Builder
from insitu.collect.datasets import question_columns
from insitu.config import check_config, load_config
from insitu.config.resolved import differences, resolved_config
from insitu.errors import ConfigError, InsituError
from insitu.runs.checkpoints import checkpoint_of_run
from insitu.runs.files import RUN
from insitu.runs.reader import RunReader
from insitu.runs.replay import config_of_run
from insitu.training.runtime import serve_policy
from insitu.workflow.context import EpisodeScope
from insitu.workflow.event_loop import run_async, run_in_loop
from insitu.workflow.llms import ModelClient, connect

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.chat import ChatCompletion

logger = logging.getLogger(__name__)

T = TypeVar("T")
_NAME = "model"
_OF_AGENT = ("llms.", "functions.")
"""How the keys begin that say what the agent is."""
_NOT_SERVED = ("url", "api_key", "chat_template", "learner", "sampler", "training", "keep")
"""Keys of the adapter's block that say how a run trains; a checkpoint has its chat template."""


class _Served(AbstractContextManager["_Served[Any]"], Generic[T]):
    """What `_build` makes of `data`, the contents of a file, with the weights of a run's checkpoint.

    It lives in the event loop of a separate thread, with its backend process, until it is closed or Python exits. The
    first use waits until it is ready.
    """

    def __init__(self, run: Path, data: dict[str, Any], file: Path, weights: Path, device: str | None = None) -> None:
        settings = RunReader(run).config()
        adapter = settings["finetuning"]["trainer_adapter"]
        block = settings["trainer_adapters"][adapter]
        if block.get("model") is None:
            raise ConfigError(f"{run}: trainer_adapters.{adapter} trains on a server, which keeps the trained weights")
        self.checkpoint = weights
        """The folder of its weights."""
        served = {key: value for key, value in block.items() if value is not None and key not in _NOT_SERVED}
        served |= {"model": str(weights), "device": device or block.get("device", "auto")}
        if lora := (block.get("training") or {}).get("lora"):
            served["training"] = {"lora": lora}
        self._config = check_config(data | {"trainer_adapters": {adapter: served}}, file)
        if not self._config.serves_policy:
            raise ConfigError(f"{file}: none of the llms is of _type policy, so none has the trained weights")
        self._main: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = Future()
        self._ready: Future[T] = Future()
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="serve the trained model", daemon=True)
        self._thread.start()

    async def _build(self, builder: Builder) -> T:
        raise NotImplementedError

    def _serve(self) -> None:
        async def serve() -> None:
            self._main.set_result((asyncio.get_running_loop(), asyncio.current_task()))
            async with Builder(self._config) as builder, serve_policy(builder):
                built = await self._build(builder)
                # Functions of `atexit` come too late: closing starts threads, which is not possible any more then.
                threading._register_atexit(_close, weakref.ref(self))  # type: ignore[attr-defined]
                self._ready.set_result(built)
                await asyncio.Event().wait()

        try:
            run_async(serve())
        except BaseException as error:  # raised where it is used
            if not self._ready.done():
                self._ready.set_exception(
                    InsituError("it was closed before it was used") if self._is_closing else error
                )
            elif not self._is_closing:
                logger.warning("the trained model is no longer served: %s", error)

    @property
    def has_ended(self) -> bool:
        """Whether it was closed, could not be started, or has lost its backend."""
        return not self._thread.is_alive()

    def close(self) -> None:
        """Ends its backend process."""
        self._is_closing = True
        loop, task = self._main.result()
        if task is not None and not self.has_ended:
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(task.cancel)
            self._thread.join()

    def __exit__(self, *exception: object) -> None:
        self.close()


class TrainedModel(_Served[ModelClient]):
    """A client of a run's trained model. Close it, or use it in a `with` statement, to end its backend process.

    `ask` returns the text of an answer and `complete` a whole completion; `client` is the official OpenAI client. Any
    other client can use it at `base_url`, under the name `model`. `async with` gives an `insitu.Model`, which has the
    same methods to be awaited, and is what an asynchronous agent gets.
    """

    def __init__(self, run: Path, checkpoint: str | None = None, device: str | None = None) -> None:
        settings = RunReader(run).config()
        llms = [dict(each) for each in settings.get("llms", {}).values() if each.get("_type") == "policy"]
        llm = {**(llms[0] if llms else {"_type": "policy"}), "seed": None}
        adapter = settings["finetuning"]["trainer_adapter"]
        data = {"llms": {_NAME: llm}, "finetuning": {"trainer_adapter": adapter}}
        super().__init__(run, data, run / RUN, checkpoint_of_run(run, checkpoint, "checkpoint"), device)
        self._llm: ModelClient | None = None

    async def _build(self, builder: Builder) -> ModelClient:
        return await builder.get_llm(_NAME)  # type: ignore[no-any-return]

    @cached_property
    def _model(self) -> BlockingModel:
        return BlockingModel(self._ready.result())

    def __enter__(self) -> Self:
        self._ready.result()
        self._check_open()
        return self

    def _check_open(self) -> None:
        """Raises InsituError once it is closed."""
        if self.has_ended:
            raise InsituError("the model is no longer served: it was closed, or has lost its backend")

    async def __aenter__(self) -> ModelClient:
        served = await asyncio.shield(asyncio.wrap_future(self._ready))
        self._check_open()
        client = served.client
        self._llm = connect(_NAME, served.config, served.model, str(client.base_url), client.api_key)
        return with_defaults(self._llm)

    async def __aexit__(self, *exception: object) -> None:
        if self._llm is not None:
            await self._llm.aclose()
        await asyncio.to_thread(self.close)

    @property
    def base_url(self) -> str:
        return str(self.client.base_url)

    @property
    def model(self) -> str:
        return self._model.model

    @property
    def params(self) -> dict[str, Any]:
        """The sampling parameters of the run."""
        return self._model.params

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


def _close(served: "weakref.ref[_Served[Any]]") -> None:
    if (found := served()) is not None:
        found.close()


class TrainedAgent(_Served[Any]):
    """A run's workflow with its trained `weights`. `file` is a YAML file, checked or not; none: that of the run."""

    def __init__(self, run: Path, weights: Path, file: Any = None) -> None:
        config = config_of_run(run, "with config=") if file is None else load_config(file)
        recorded = RunReader(run).config()
        for key, (before, now) in differences(recorded, resolved_config(config)).items():
            if key.startswith(_OF_AGENT):
                logger.warning("%s: %s was %.100r and is %.100r in %s", run, key, before, now, config.source)
        self._question_columns = [*question_columns(config)]
        super().__init__(run, copy.deepcopy(dict(config.data or {})), Path(config.source), weights)

    async def _build(self, builder: Builder) -> Any:
        return await builder.get_workflow()

    def ask(self, question: Any, row: Any = None, temperature: float | None = None) -> Any:
        """The answer to a question. Raises what the agent raises."""
        if threading.current_thread() is self._thread:
            raise InsituError("this would wait for itself: code of the agent must await run.agent(question)")
        self._ready.result()
        answer = asyncio.run_coroutine_threadsafe(self._answer(question, row, temperature), self._main.result()[0])
        try:
            return answer.result()
        finally:
            answer.cancel()  # when interrupted

    async def agent(self, question: Any, row: Any = None, temperature: float | None = None) -> Any:
        """`ask`, without waiting in the event loop of the caller."""
        await asyncio.shield(asyncio.wrap_future(self._ready))
        return await run_in_loop(self._main.result()[0], self._answer(question, row, temperature))

    async def _answer(self, question: Any, row: Any, temperature: float | None) -> Any:
        if temperature is not None and not temperature >= 0:
            raise ConfigError(f"temperature is {temperature}; allowed: at least 0")
        row = dict.fromkeys(self._question_columns, question) if row is None else row
        seed = secrets.randbits(63)
        try:
            with EpisodeScope(seed=seed, input_message=question, row=row, temperature=temperature):
                return await self._ready.result().ainvoke(question)
        except asyncio.CancelledError:
            if (main := self._main.result()[1]) is None or not main.done():
                raise  # by the caller
            raise InsituError("the agent was closed, or has lost its backend, before it had answered") from None

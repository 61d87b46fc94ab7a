"""Agents we did not build, as workflows: a program run for each episode, or a service asked for each.

    workflow: {_type: command, command: [node, agent.js], llm: player}
    workflow: {_type: http, url: "http://127.0.0.1:9000/run", llm: player}

Both get the address of a gateway that is theirs for one episode, so that their model calls are recorded and trained.
"""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import aiohttp
import orjson
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from insitu.errors import BackendUnavailable, WorkflowError
from insitu.registry import Builder, register_function
from insitu.schemas.components import FunctionBaseConfig, LLMRef
from insitu.workflow.context import Context, EpisodeScope, current_scope
from insitu.workflow.conversion import convert
from insitu.workflow.functions import FunctionInfo
from insitu.workflow.gateway import Door, Elsewhere, Gateway

logger = logging.getLogger(__name__)

_GRACE = 2.0
"""Seconds between asking a program to end and making it."""
_TAIL = 2000
"""Characters of a program's standard error that a failure shows."""


class ElsewhereConfig(BaseModel):
    """An OpenAI-compatible server for requests that name no model of this file, embeddings among them."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    base_url: str
    """Up to and including `/v1`."""
    api_key: SecretStr | None = None
    """Its key."""


class ExternalConfig(FunctionBaseConfig):
    """What both kinds of external agent have in common."""

    llm: LLMRef
    """The model the agent talks to. It stands for every model name that is not known otherwise."""
    models: dict[str, LLMRef] = Field(default_factory=dict)
    """Further models, by the names the agent calls them."""
    elsewhere: ElsewhereConfig | None = None
    """Where requests go that name no known model; none: to `llm`."""


class CommandConfig(ExternalConfig, name="command"):
    """A program run once for each episode; what it prints is the answer."""

    command: list[str] = Field(min_length=1)
    """The program and its arguments; `{input}`, `{row_id}` and `{column}` are replaced by those of the row."""
    stdin: Literal["row", "input", "none"] = "row"
    """What it reads: the whole row as a JSON object, the input as text, or nothing."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further environment variables."""
    cwd: Path | None = None
    """Its working directory; none: the folder of the YAML file."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds it may take; none: as long as the episode may."""
    max_output: int = Field(default=2**20, ge=1)
    """Most bytes of its standard output."""
    answer: Literal["text", "json"] = "text"
    """How its standard output is read."""


class HttpConfig(ExternalConfig, name="http"):
    """A service that is posted each row, and told where its model is for this episode."""

    url: str
    """Where to post."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Further headers."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds an answer may take; none: as long as the episode may."""
    max_output: int = Field(default=2**20, ge=1)
    """Most bytes of an answer."""
    answer_key: str | None = "output"
    """The key of the answer's JSON object that holds the workflow's answer; none: the whole of it."""


@contextmanager
def _door(gateway: Gateway) -> Iterator[Door]:
    """The door of the episode that is going on; outside an episode, of one that nobody reads."""
    scope = current_scope()
    if scope is not None:
        with gateway.admit(scope) as door:
            yield door
    else:
        with EpisodeScope() as scope, gateway.admit(scope) as door:
            yield door


async def _gateway(config: ExternalConfig, builder: Builder) -> Gateway:
    names = list(dict.fromkeys((config.llm, *config.models.values())))
    elsewhere = config.elsewhere
    return Gateway(
        [await builder.get_llm(name) for name in names],
        config.models,
        elsewhere and Elsewhere(elsewhere.base_url, elsewhere.api_key.get_secret_value() if elsewhere.api_key else "none"),
    )


def environment(door: Door, given: Mapping[str, str]) -> dict[str, str]:
    """Ours, with the addresses of this episode in the variables that the official clients read."""
    return {
        **os.environ,
        "OPENAI_BASE_URL": door.openai_url,
        "OPENAI_API_KEY": door.key,
        "ANTHROPIC_BASE_URL": door.anthropic_url,
        "ANTHROPIC_API_KEY": door.key,
        "INSITU_ROW_ID": Context.get().row_id or "",
        **given,
    }


class _Command:
    def __init__(self, config: CommandConfig, gateway: Gateway, folder: Path) -> None:
        self._config = config
        self._gateway = gateway
        self._cwd = config.cwd or folder

    async def run(self, value: Any) -> Any:
        config, row = self._config, Context.get().row or {}
        names = {**row, "input": value, "row_id": Context.get().row_id}
        command = [_filled(part, names) for part in config.command]
        given = {"row": orjson.dumps(row or {"question": value}), "input": convert(value, str).encode(), "none": b""}
        with _door(self._gateway) as door:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    cwd=self._cwd,
                    env=environment(door, config.env),
                    start_new_session=True,  # a process group of its own, so that all of it can be ended
                )
            except OSError as error:
                raise WorkflowError(f"workflow command {command[0]!r} cannot be started: {error}") from error
            try:
                async with asyncio.timeout(config.timeout) as limit:
                    output, errors = await self._talk(process, given[config.stdin])
            except TimeoutError:
                if not limit.expired():
                    raise
                raise WorkflowError(f"{command[0]} took longer than {config.timeout:g} s") from None
            finally:
                await _end(process)
        if process.returncode:
            raise WorkflowError(f"{command[0]} ended with exit code {process.returncode}: {errors}")
        return _answer(output, config.answer, command[0])

    async def _talk(self, process: asyncio.subprocess.Process, given: bytes) -> tuple[bytes, str]:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        tail = asyncio.create_task(_tail(process.stderr))
        writing = asyncio.create_task(_write(process.stdin, given))
        try:
            output = bytearray()
            while piece := await process.stdout.read(65536):
                output += piece
                if len(output) > self._config.max_output:
                    raise WorkflowError(f"the program printed more than max_output: {self._config.max_output} bytes")
            await process.wait()
            return bytes(output), await tail
        finally:
            tail.cancel()
            writing.cancel()
            await asyncio.gather(tail, writing, return_exceptions=True)


async def _write(stdin: asyncio.StreamWriter, given: bytes) -> None:
    try:
        stdin.write(given)
        await stdin.drain()
        stdin.close()
    except ConnectionError:
        pass  # a program need not read what it is given


async def _tail(stream: asyncio.StreamReader) -> str:
    end = b""
    while piece := await stream.read(65536):
        end = (end + piece)[-_TAIL:]
    return end.decode(errors="replace").strip()


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the whole process group: what the program has left running is not to live longer than the episode."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            break
        try:
            await asyncio.wait_for(process.wait(), _GRACE)
        except TimeoutError:
            continue
        if number is signal.SIGTERM and not _group_lives(process.pid):
            break


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _filled(part: str, names: Mapping[str, Any]) -> str:
    for name, value in names.items():
        if f"{{{name}}}" in part:
            part = part.replace(f"{{{name}}}", convert(value, str))
    return part


def _answer(output: bytes, kind: str, program: str) -> Any:
    if kind == "text":
        return output.decode(errors="replace").strip()
    try:
        return orjson.loads(output)
    except orjson.JSONDecodeError as error:
        raise WorkflowError(f"{program} printed no JSON ({error}): {output[:200].decode(errors='replace')!r}") from None


class _Http:
    def __init__(self, config: HttpConfig, gateway: Gateway, session: aiohttp.ClientSession) -> None:
        self._config = config
        self._gateway = gateway
        self._session = session

    async def run(self, value: Any) -> Any:
        config, context = self._config, Context.get()
        limit = aiohttp.ClientTimeout(total=config.timeout)
        with _door(self._gateway) as door:
            model = {"openai_base_url": door.openai_url, "anthropic_base_url": door.anthropic_url, "api_key": door.key}
            body = {"input": value, "row_id": context.row_id, "row": context.row, "model": model}
            headers = {"Content-Type": "application/json", **config.headers}
            data = dump_json(body)
            try:
                async with self._session.post(config.url, data=data, headers=headers, timeout=limit) as answer:
                    text = await self._read(answer)
            except TimeoutError as error:
                raise WorkflowError(f"{config.url} took longer than {config.timeout:g} s") from error
            except aiohttp.ClientError as error:
                raise BackendUnavailable(f"no answer from {config.url}: {type(error).__name__}: {error}") from error
        if answer.status >= 400:
            raise WorkflowError(f"{config.url} answered {answer.status}: {text[:_TAIL].decode(errors='replace')}")
        if answer.content_type != "application/json":
            return text.decode(errors="replace")
        given = _answer(text, "json", config.url)
        if config.answer_key is None:
            return given
        if not isinstance(given, dict) or config.answer_key not in given:
            found = ", ".join(given) if isinstance(given, dict) else type(given).__name__
            raise WorkflowError(f"{config.url} answered without the key {config.answer_key!r}; there is: {found}")
        return given[config.answer_key]

    async def _read(self, answer: aiohttp.ClientResponse) -> bytes:
        text = bytearray()
        async for piece in answer.content.iter_any():
            text += piece
            if len(text) > self._config.max_output:
                answer.close()
                raise WorkflowError(f"{self._config.url} answered more than max_output: {self._config.max_output} bytes")
        return bytes(text)


@register_function(config_type=CommandConfig)
async def command_agent(config: CommandConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    folder = getattr(builder.config, "folder", Path.cwd())
    async with await _gateway(config, builder) as gateway:
        yield FunctionInfo.from_fn(_Command(config, gateway, folder).run, description=f"Runs {config.command[0]}")


@register_function(config_type=HttpConfig)
async def http_agent(config: HttpConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
    async with await _gateway(config, builder) as gateway, aiohttp.ClientSession(timeout=timeout) as session:
        yield FunctionInfo.from_fn(_Http(config, gateway, session).run, description=f"Asks {config.url}")

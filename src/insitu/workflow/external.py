"""Agents we did not build, as workflows: a program run for each episode, or a service asked for each.

    workflow: {_type: command, command: [node, agent.js], llm: player}
    workflow: {_type: http, url: "http://127.0.0.1:9000/run", llm: player}

Both get the address of a gateway that is theirs for one episode, so that their model calls are recorded and trained.
"""

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import aiohttp
import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator
from yarl import URL

from insitu.builder import Builder
from insitu.errors import BackendUnavailable, EpisodeTimeout, WorkflowError
from insitu.schemas.components import FunctionBaseConfig, LLMRef
from insitu.workflow.context import Context, EpisodeScope, current_scope
from insitu.workflow.conversion import convert, json_form
from insitu.workflow.functions import FunctionInfo, register_function
from insitu.workflow.gateway import Door, Elsewhere, Gateway, Listen
from insitu.workflow.programs import GRACE, end_group, running

_TAIL = 2000
"""Bytes of a program's standard error, or of a service's answer, that a failure shows."""
_PASSING = (429, 502, 503, 504)
"""Statuses of a service that another attempt may not meet."""


def _address(value: str) -> str:
    """Checks that a client can go there."""
    url = URL(value.replace("{port}", "1"))  # ValueError: a port that is no number, say
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"{value!r} is no address; expected one like http://host:port/path")
    return value


Address = Annotated[str, AfterValidator(_address)]


class ElsewhereConfig(BaseModel):
    """An OpenAI-compatible server for unrecognised model names, and for other requests such as embeddings."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    base_url: Address
    """URL up to and including `/v1`."""
    api_key: SecretStr | None = None
    """API key."""


class GatewayConfig(BaseModel):
    """Bind address and public URL of the gateway; by default, only this machine can reach it."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to bind; `0.0.0.0` binds all interfaces."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to bind; 0 picks a free one."""
    address: Address | None = None
    """Public URL given to agents in a container or on another machine; `{port}` is replaced by the port."""

    @model_validator(mode="after")
    def _can_be_told(self) -> Self:
        if self.address is None and self.host in ("0.0.0.0", "::"):
            raise ValueError(f"host {self.host} is no address to go to: give `address`, what agents are told")
        if self.address is not None and self.port == 0 and "{port}" not in self.address:
            raise ValueError("port 0 is another one each time: give `port`, or write {port} into `address`")
        return self


class ExternalConfig(FunctionBaseConfig):
    """What both kinds of external agent have in common."""

    llm: LLMRef
    """Model for the agent's requests; the default for unrecognised model names."""
    models: dict[str, LLMRef] = Field(default_factory=dict)
    """Further models, by the names that the agent requests."""
    elsewhere: ElsewhereConfig | None = None
    """Server for unrecognised model names; none: `llm` answers them."""
    gateway: GatewayConfig = Field(default_factory=GatewayConfig)
    """The gateway that agents call instead of their model server."""


class CommandConfig(ExternalConfig, name="command"):
    """A program that runs once per episode and prints the answer."""

    command: list[str] = Field(min_length=1)
    """The program and its arguments; `{input}`, `{row_id}` and `{column}` are replaced by the row's values."""
    stdin: Literal["row", "input", "none"] = "row"
    """What to write to standard input: the row as a JSON object (without a dataset: `{"question": ...}`), the input, or
    nothing."""
    env: dict[str, str] = Field(default_factory=dict)
    """Additional environment variables."""
    cwd: Path | None = None
    """Working directory, relative to the folder of the YAML file; none: that folder."""
    timeout: float | None = Field(default=None, gt=0)
    """Time limit in seconds; none: that of the episode."""
    max_output: int = Field(default=2**20, ge=1)
    """Maximum size of the standard output, in bytes."""
    answer: Literal["text", "json"] = "text"
    """How to parse the standard output."""


class HttpConfig(ExternalConfig, name="http"):
    """A service that receives each row by POST, with the model's URL for this episode."""

    url: Address
    """URL to post to."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Additional headers."""
    timeout: float | None = Field(default=None, gt=0)
    """Time limit for a response in seconds; none: that of the episode."""
    max_output: int = Field(default=2**20, ge=1)
    """Maximum size of a response, in bytes."""
    answer_key: str | None = "output"
    """Key of the workflow's answer in the JSON response; none: the response is the answer."""


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
    elsewhere = None
    if (other := config.elsewhere) is not None:
        elsewhere = Elsewhere(other.base_url, other.api_key.get_secret_value() if other.api_key else "none")
    listen = Listen(config.gateway.host, config.gateway.port, config.gateway.address)
    return Gateway([await builder.get_llm(name) for name in names], config.models, elsewhere, listen)


def environment(door: Door, given: Mapping[str, str]) -> dict[str, str]:
    """Ours, with the addresses of this episode in the variables that the official clients read."""
    direct = ",".join(filter(None, (os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), URL(door.address).host)))
    return {
        **os.environ,
        "OPENAI_BASE_URL": door.openai_url,
        "OPENAI_API_BASE": door.openai_url,
        "OPENAI_API_KEY": door.key,
        "ANTHROPIC_BASE_URL": door.anthropic_url,
        "ANTHROPIC_API_KEY": door.key,
        "INSITU_ROW_ID": Context.get().row_id or "",
        "NO_PROXY": direct,
        "no_proxy": direct,
        **given,
    }


def _json(value: Any) -> bytes:
    """JSON of whatever a row may hold, lone surrogates escaped."""
    return json.dumps(value, default=json_form).encode()


class _Talk(asyncio.SubprocessProtocol):
    """What a running program says: `exited` is done when it has ended or said too much, `closed` at its last word."""

    def __init__(self, max_output: int) -> None:
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.output = bytearray()
        self._errors = b""
        self._max_output = max_output

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self._errors = (self._errors + data)[-_TAIL:]
            return
        self.output += data[: self._max_output + 1 - len(self.output)]
        if self.too_long:
            self._done(self.exited)

    def process_exited(self) -> None:
        self._done(self.exited)

    def connection_lost(self, error: Exception | None) -> None:
        self._done(self.closed)

    @staticmethod
    def _done(future: asyncio.Future[None]) -> None:
        if not future.done():
            future.set_result(None)

    @property
    def too_long(self) -> bool:
        return len(self.output) > self._max_output

    @property
    def errors(self) -> str:
        return self._errors.decode(errors="replace").strip() or "it said nothing on its standard error"


class _Command:
    def __init__(self, config: CommandConfig, gateway: Gateway, folder: Path) -> None:
        self._config = config
        self._gateway = gateway
        self._cwd = folder / (config.cwd or "")
        program = config.command[0]
        self._program = str(folder / program) if os.sep in program else program  # an absolute one stays as it is

    async def run(self, value: Any) -> Any:
        config, context = self._config, Context.get()
        row = context.row if context.row is not None else {"question": value}
        names = {**(row if isinstance(row, dict) else {}), "input": value, "row_id": context.row_id or ""}
        arguments = [_filled(part, names) for part in config.command[1:]]
        given = {"row": _json(row), "input": convert(value, str).encode(errors="replace"), "none": b""}[config.stdin]
        with ExitStack() as until_exit:
            door = until_exit.enter_context(_door(self._gateway))
            env = environment(door, config.env)
            talk, status = await self._finished(arguments, given, env, until_exit.close)
        if talk.too_long:
            raise WorkflowError(f"{config.command[0]} printed more than max_output: {config.max_output} bytes")
        if status != 0:
            how = f"ended with exit code {status}" if status > 0 else f"was ended by {_signal(-status)}"
            said = f"{config.command[0]} {how}: {talk.errors}"
            raise BackendUnavailable(f"{said} (its model: {door.failure})") if door.failure else WorkflowError(said)
        return _answer(bytes(talk.output), config.answer, config.command[0])

    async def _finished(
        self, arguments: list[str], given: bytes, env: dict[str, str], shut: Callable[[], None]
    ) -> tuple[_Talk, int]:
        """Run the program to its end, and `shut` its door. However that comes, nothing of its process group is left."""
        loop, limit = asyncio.get_running_loop(), self._config.timeout
        try:
            transport, talk = await loop.subprocess_exec(
                lambda: _Talk(self._config.max_output),
                self._program,
                *arguments,
                cwd=self._cwd,
                env=env,
                start_new_session=True,  # a process group of its own
            )
        except (OSError, ValueError) as error:  # ValueError: text that no argument can hold
            raise WorkflowError(f"workflow command {self._program!r} cannot be started: {error}") from error
        group = transport.get_pid()
        running.add(group)
        try:
            stdin: Any = transport.get_pipe_transport(0)
            stdin.write(given)
            stdin.close()
            async with asyncio.timeout(limit) as timer:
                await talk.exited
        except TimeoutError:
            if not timer.expired():
                raise
            raise EpisodeTimeout(f"{self._config.command[0]} took longer than timeout: {limit:g} s") from None
        finally:
            shut()
            await end_group(group)
            if not talk.closed.done():
                await asyncio.wait([talk.closed], timeout=GRACE)  # the last of what was printed
            transport.close()
        return talk, transport.get_returncode() or 0


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _filled(part: str, names: Mapping[str, Any]) -> str:
    """`part` with each `{name}` replaced, once: what a row holds is not looked at again."""
    slots = "|".join(re.escape(name) for name in names)
    return re.sub(rf"\{{({slots})\}}", lambda slot: convert(names[slot[1]], str), part)


def _answer(output: bytes, kind: str, program: str) -> Any:
    if kind == "text":
        return output.decode(errors="replace").strip()
    try:
        return orjson.loads(output)
    except orjson.JSONDecodeError as error:
        shown = output[:200].decode(errors="replace")
        raise WorkflowError(f"{program} answered with what is no JSON ({error}): {shown!r}") from None


class _Http:
    def __init__(self, config: HttpConfig, gateway: Gateway, session: aiohttp.ClientSession) -> None:
        self._config = config
        self._gateway = gateway
        self._session = session

    async def run(self, value: Any) -> Any:
        config, context = self._config, Context.get()
        headers = {"Content-Type": "application/json", **config.headers}
        with _door(self._gateway) as door:
            model = {"openai_base_url": door.openai_url, "anthropic_base_url": door.anthropic_url, "api_key": door.key}
            data = _json({"input": value, "row_id": context.row_id, "row": context.row, "model": model})
            try:
                async with self._session.post(config.url, data=data, headers=headers) as answer:
                    text = await self._read(answer)
            except aiohttp.ClientError as error:
                raise BackendUnavailable(f"no answer from {config.url}: {type(error).__name__}: {error}") from error
            except TimeoutError as error:
                raise EpisodeTimeout(f"{config.url} took longer than timeout: {config.timeout} s") from error
        if answer.status >= 400:
            said = f"{config.url} answered {answer.status}: {text[:_TAIL].decode(errors='replace')}"
            raise BackendUnavailable(said) if answer.status in _PASSING or door.failure else WorkflowError(said)
        if answer.content_type != "application/json":
            return text.decode(errors="replace")
        given = _answer(text, "json", config.url)
        if config.answer_key is None:
            return given
        if not isinstance(given, dict) or config.answer_key not in given:
            found = ", ".join(given) if isinstance(given, dict) else type(given).__name__
            raise WorkflowError(f"{config.url} answered without the key {config.answer_key!r}; available: {found}")
        return given[config.answer_key]

    async def _read(self, answer: aiohttp.ClientResponse) -> bytes:
        text = bytearray()
        async for piece in answer.content.iter_any():
            text += piece
            if len(text) > self._config.max_output:
                answer.close()
                raise WorkflowError(
                    f"{self._config.url} answered more than max_output: {self._config.max_output} bytes"
                )
        return bytes(text)


@register_function(config_type=CommandConfig)
async def command_agent(config: CommandConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    file = builder.config
    async with await _gateway(config, builder) as gateway:
        yield FunctionInfo.from_fn(_Command(config, gateway, file.folder).run, description=f"Runs {config.command[0]}")


@register_function(config_type=HttpConfig)
async def http_agent(config: HttpConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    timeout = aiohttp.ClientTimeout(total=config.timeout, sock_connect=30)
    connector = aiohttp.TCPConnector(limit=0)  # the number of episodes in flight is limited elsewhere
    async with (
        await _gateway(config, builder) as gateway,
        aiohttp.ClientSession(timeout=timeout, connector=connector) as s,
    ):
        yield FunctionInfo.from_fn(_Http(config, gateway, s).run, description=f"Asks {config.url}")

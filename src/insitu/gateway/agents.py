"""Workflows that run an external agent: a program per episode, or a request to a service.

    workflow: {_type: command, command: [node, agent.js], llm: player}
    workflow: {_type: http, url: "http://127.0.0.1:9000/run", llm: player}
    workflow: {_type: http, url: ..., body: {text: "{question}"}, model_url: {header: X-Model}, answer: $.reply, ...}

Both get an endpoint of a gateway for each episode, through which their model calls are recorded and trained.
"""

import copy
import json
import os
import re
import shutil
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlsplit

import aiohttp
import orjson
from pydantic import AfterValidator, Field, model_validator
from yarl import URL

from insitu.builder import Builder
from insitu.errors import BackendUnavailable, ConfigError, EpisodeTimeout, WorkflowError
from insitu.gateway.bubblewrap import find_bubblewrap
from insitu.gateway.cgroups import Cgroup
from insitu.gateway.endpoint import EpisodeEndpoint
from insitu.gateway.server import Address, Gateway, GatewayConfig, Upstream
from insitu.gateway.templates import (
    check_command,
    check_placeholders,
    filled,
    filled_text,
    set_nested,
    template_texts,
    with_values,
)
from insitu.gateway.visible import misses_file, missing_note
from insitu.gateway.workspace_config import WorkspaceKeys
from insitu.gateway.workspaces import Workspace, Workspaces
from insitu.schemas.components import Block, FunctionBaseConfig, LLMRef, MayChange
from insitu.wire.child_process import describe_exit
from insitu.wire.connection import read_at_most
from insitu.wire.json_values import json_form, json_path, value_at
from insitu.workflow.context import Context, EpisodeScope, current_scope
from insitu.workflow.functions import FunctionInfo, convert, register_function
from insitu.workflow.programs import Program, inherited_environment, run_program

_SHOWN_BYTES = 2000
"""How much of a service's response an error message quotes."""
_TRANSIENT = (429, 502, 503, 504)
"""Statuses of a service after which the episode is retried."""
_HEADER = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
_LINE_BREAK = re.compile(r"[\r\n\0]")


def _check_path(text: str) -> str:
    json_path(text, "answer")  # raises ConfigError, which is a ValueError
    return text


class ExternalConfig(FunctionBaseConfig):
    """Settings of both kinds of external agent."""

    llm: LLMRef
    """Model for the agent's requests; the default for unrecognised model names."""
    models: dict[str, LLMRef] = Field(default_factory=dict)
    """Further models, by the names that the agent requests."""
    elsewhere: Upstream | None = None
    """Server for unrecognised model names; none: `llm` answers them."""
    gateway: GatewayConfig = Field(default_factory=GatewayConfig)
    """The gateway that agents call instead of their model server."""


class ProgramConfig(ExternalConfig):
    """Settings of an agent that is a program."""

    command: list[str] = Field(min_length=1)
    """The program and its arguments; `{input}`, `{row_id}` and `{column}` are replaced by the row's values. Other names
    in braces are refused, except in code after `-c` or `-e`; other text in braces, such as `{ name }` and `${NAME}`,
    stays."""
    stdin: Literal["row", "input", "none"] = "row"
    """What to write to standard input: the row as a JSON object (without a dataset: `{"question": ...}`), the input, or
    nothing."""
    env: dict[str, str] = Field(default_factory=dict)
    """Additional environment variables."""
    pass_env: list[str] = Field(default_factory=list)
    """Environment variables that the program gets besides those that every program needs, such as PATH and LANG."""
    max_output: int = Field(default=2**20, ge=1)
    """Maximum size of the standard output, in bytes."""

    def check_variables(self) -> None:
        """Raises ConfigError if `pass_env` names a variable that does not exist."""
        if missing := [name for name in self.pass_env if name not in os.environ]:
            raise ConfigError(f"pass_env names {', '.join(missing)}: no such environment variable")

    def input_of(self, value: Any, row: Any) -> bytes:
        """The program's standard input."""
        if self.stdin == "row":
            return _json(row)
        return b"" if self.stdin == "none" else str(convert(value, str)).encode(errors="replace")


def _check_program(name: str, key: str, folder: Path, search: str | None) -> None:
    path = str(folder / name) if os.sep in name else name
    if shutil.which(path, path=search) is not None:
        return
    if path == name:
        raise ConfigError(f"{key}: there is no program {name!r} in the folders of PATH")
    raise ConfigError(f"{key}: {path} {'is not executable' if os.path.exists(path) else 'does not exist'}")


class CommandConfig(WorkspaceKeys, ProgramConfig, name="command"):
    """A program that runs once per episode and prints the answer."""

    cwd: Path | None = None
    """Working directory, relative to the workspace or, without one, to the folder of the YAML file; none: that
    folder."""
    timeout: MayChange[float | None] = Field(default=None, gt=0)
    """Time limit in seconds, also of `verify`; none: that of the episode."""
    answer: Literal["text", "json"] = "text"
    """How to parse the standard output."""

    def check_code(self, where: str, folder: Path, llms: Collection[str]) -> None:
        if self.workspace is not None and self.network != "host":
            find_bubblewrap()
        search = self.env.get("PATH")
        _check_program(self.command[0], f"{where}.command", folder, search)
        if self.verify is not None:
            _check_program(self.verify[0], f"{where}.verify", folder, search)

    def check_columns(self, columns: Collection[str]) -> None:
        super().check_columns(columns)
        names = [*dict.fromkeys((*columns, "input", "row_id"))]
        check_command(self.command, "command", names)
        check_command(self.verify or (), "verify", [*names, *["verify_files"] * (self.verify_files is not None)])

    def run_settings(self) -> dict[str, Any]:
        if self.workspace is None:
            return {}
        if Cgroup.own() is None:
            return {"limits": "of each process alone: this account cannot make control groups here"}
        return {"limits": "of all processes of an episode"}


class ModelUrl(Block):
    """The places of a request in which the service expects its model's URL."""

    body: str | None = None
    """A key of `body`, such as `url`, `options.model.url` or `items[0].url`."""
    header: str | None = None
    """A header."""
    query: str | None = None
    """A parameter of the query."""
    api: Literal["openai", "anthropic"] = "openai"
    """The clients that use the URL: `openai`, which ends with `/v1`, or `anthropic`."""


class HttpConfig(ExternalConfig, name="http"):
    """A service that receives each row by POST, with the model's URL for this episode."""

    url: Address
    """URL to post to; after the host, `{input}`, `{row_id}` and `{column}` are replaced by the row's values,
    percent-encoded."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Additional headers, with placeholders as in `url`."""
    timeout: MayChange[float | None] = Field(default=None, gt=0)
    """Time limit for a response in seconds; none: that of the episode."""
    max_output: int = Field(default=2**20, ge=1)
    """Maximum size of a response, in bytes."""
    answer: Annotated[str, AfterValidator(_check_path)] | None = None
    """JSONPath of the answer in the JSON response, such as `$.choices[0].text`; `$` is all of it. Default:
    `$.output` of a JSON response, all of another one."""
    body: dict[str, Any] | None = None
    """The JSON body of a request, in place of insitu's own. In its texts, `{input}`, `{row_id}` and `{column}` are
    replaced by the row's values, and `{{` by a brace; a text that is only `{column}` becomes the value, whatever its
    type, and a longer text of a row in which it is null fails the episode."""
    model_url: ModelUrl | None = None
    """Where the request has the model's URL; required with `body`."""

    @model_validator(mode="after")
    def _request_is_complete(self) -> "HttpConfig":
        places = self.model_url and (self.model_url.body or self.model_url.header or self.model_url.query)
        if not places and (self.body is not None or self.model_url is not None):
            raise ValueError("model_url must say where the service expects its model's URL: body, header or query")
        if self.model_url is not None and self.model_url.body is not None:
            try:
                set_nested(copy.deepcopy(self.body or {}), self.model_url.body, "")
            except (LookupError, TypeError, ValueError):
                problem = "which is in no mapping or list of body"
                raise ValueError(f"model_url.body is {self.model_url.body!r}, {problem}") from None
        if "{" in urlsplit(self.url).netloc:
            raise ValueError("url has a placeholder in its host; allowed: after it")
        for name, value in {(self.model_url and self.model_url.header) or "Accept": "", **self.headers}.items():
            if not _HEADER.fullmatch(name):
                raise ValueError(f"{name!r} cannot be the name of a header")
            if _LINE_BREAK.search(value):
                raise ValueError(f"headers.{name} has a line break")
        self._texts()
        return self

    def _texts(self) -> list[tuple[str, str]]:
        """The texts that may have placeholders, each after its key."""
        parts = {"url": self.url, "headers": self.headers, "body": self.body or {}}
        return [each for name, part in parts.items() for each in template_texts(part, name)]

    def check_columns(self, columns: Collection[str]) -> None:
        for where, text in self._texts():
            check_placeholders(text, where, [*dict.fromkeys((*columns, "input", "row_id"))])


@contextmanager
def episode_endpoint(gateway: Gateway, address: str | None = None) -> Iterator[EpisodeEndpoint]:
    """An endpoint for the current episode, or for a new scope outside any episode."""
    with ExitStack() as stack:
        scope = current_scope() or stack.enter_context(EpisodeScope())
        yield stack.enter_context(gateway.endpoint(scope, address))


async def new_gateway(config: ExternalConfig, builder: Builder) -> Gateway:
    names = dict.fromkeys((config.llm, *config.models.values()))
    return Gateway([await builder.get_llm(name) for name in names], config.models, config.elsewhere, config.gateway)


def environment(endpoint: EpisodeEndpoint, config: ProgramConfig) -> dict[str, str]:
    """The variables of the verifier, and those of the official clients' endpoint."""
    without_proxy = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
    no_proxy = ",".join(filter(None, (without_proxy, URL(endpoint.address).host)))
    return {
        "OPENAI_BASE_URL": endpoint.openai_url,
        "OPENAI_API_BASE": endpoint.openai_url,
        "OPENAI_API_KEY": endpoint.key,
        "ANTHROPIC_BASE_URL": endpoint.anthropic_url,
        "ANTHROPIC_API_KEY": endpoint.key,
        **_common_environment(config),
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        **config.env,
    }


def _common_environment(config: ProgramConfig) -> dict[str, str]:
    """Variables that every program needs, those in `pass_env`, the row's id, and `env`."""
    return {**inherited_environment(config.pass_env), "INSITU_ROW_ID": Context.get().row_id or "", **config.env}


def _json(value: Any) -> bytes:
    """JSON of any value of a row; lone surrogates are escaped."""
    return json.dumps(value, default=json_form).encode()


def _parse_json_answer(output: bytes, source: str) -> Any:
    try:
        return orjson.loads(output)
    except orjson.JSONDecodeError as error:
        start = output[:200].decode(errors="replace")
        raise WorkflowError(f"{source}: the answer is not JSON ({error}): {start!r}") from None


def row_values(value: Any) -> tuple[Any, dict[str, Any]]:
    """The current row, without a dataset one of the question alone, and its values by placeholder."""
    context = Context.get()
    row = context.row if context.row is not None else {"question": value}
    return row, {**(row if isinstance(row, dict) else {}), "input": value, "row_id": context.row_id or ""}


@register_function(config_type=CommandConfig)
async def command_agent(config: CommandConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    name, folder = config.command[0], builder.config.folder
    config.check_variables()

    async def start(values: dict[str, Any], stdin: bytes, workspace: Workspace | None) -> Program:
        address = None if workspace is None else workspace.address
        with ExitStack() as until_exit:
            endpoint = until_exit.enter_context(episode_endpoint(gateway, address))
            variables = environment(endpoint, config)
            run_in, base = (run_program, folder) if workspace is None else (workspace.run_agent, Path())
            done = await run_in(
                with_values(config.command, values, folder),
                stdin,
                cwd=base / (config.cwd or ""),
                env=variables,
                time_limit=config.timeout,
                max_output=config.max_output,
                on_exit=until_exit.close,
            )
        if done.output_too_long:
            raise WorkflowError(f"{name} printed more than max_output: {config.max_output} bytes")
        if code := done.exit_code:
            message = f"{name} {describe_exit(code)}: {done.stderr_tail}"
            if address is not None and misses_file(done.stderr_tail):  # it is confined
                message += f"\n({missing_note(done.stderr_tail, folder)})"
            elif withheld := sorted(os.environ.keys() - variables.keys()):
                message += f"\n(it did not get these variables, which pass_env can name: {', '.join(withheld)})"
            raise endpoint.error(message)
        return done

    async def run(value: Any) -> Any:
        row, values = row_values(value)
        async with AsyncExitStack() as stack:
            workspace = None if workspaces is None else await stack.enter_async_context(workspaces.episode(values))
            done = await start(values, config.input_of(value, row), workspace)
            answer: Any = done.stdout.decode(errors="replace").strip()
            if config.answer == "json":
                answer = _parse_json_answer(bytes(done.stdout), name)
            if workspace is None or config.verify is None:
                return answer
            verify = with_values(config.verify, values | workspace.verifier_files(), folder)
            return await workspace.judge(verify, answer, _json(row), _common_environment(config), config.timeout)

    async with AsyncExitStack() as stack:
        gateway, workspaces = await stack.enter_async_context(await new_gateway(config, builder)), None
        if config.workspace is not None:
            loaded = builder.config
            run_dir = loaded.run_dir if builder.request is not None else loaded.working_dir / loaded.eval.folder
            workspaces = Workspaces(config, config.command, gateway, loaded, run_dir, config.env)
            await stack.enter_async_context(workspaces.open())
        yield FunctionInfo.from_fn(run, description=f"Runs {name}")


def _request(config: HttpConfig, endpoint: EpisodeEndpoint, value: Any) -> tuple[URL, dict[str, str], dict[str, Any]]:
    """URL, headers and body of the request for the current row."""
    values, place = row_values(value)[1], config.model_url
    address = filled_text(config.url, values, "workflow.url", partial(quote, safe="", errors="replace"))
    if address != config.url and not {".", ".."}.isdisjoint(urlsplit(address).path.split("/")):
        raise WorkflowError(f"workflow.url: row {values['row_id']!r}: a value would lead to another path: {address}")
    url, headers = URL(address), {"Content-Type": "application/json"}
    for name, template in config.headers.items():
        headers[name] = filled_text(template, values, f"workflow.headers.{name}")
        if _LINE_BREAK.search(headers[name]):
            raise WorkflowError(f"workflow.headers.{name}: row {values['row_id']!r}: a value has a line break")
    openai, anthropic = endpoint.openai_url, endpoint.anthropic_url
    if config.body is None:
        context = Context.get()
        model = {"openai_base_url": openai, "anthropic_base_url": anthropic, "api_key": endpoint.key}
        body = {"input": value, "row_id": context.row_id, "row": context.row, "model": model}
    else:
        body = filled(config.body, values, "workflow.body")
    if place is not None:
        model_url = openai if place.api == "openai" else anthropic
        if place.body is not None:
            set_nested(body, place.body, model_url)
        if place.header is not None:
            headers[place.header] = model_url
        if place.query is not None:
            url = url.update_query({place.query: model_url})
    return url, headers, body


@register_function(config_type=HttpConfig)
async def http_agent(config: HttpConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    async def run(value: Any) -> Any:
        source = f"{config.url}, row {Context.get().row_id!r}"
        with episode_endpoint(gateway) as endpoint:
            url, headers, body = _request(config, endpoint, value)
            try:
                async with session.post(url, data=_json(body), headers=headers, allow_redirects=False) as response:
                    content = await read_at_most(response, config.max_output)
            except aiohttp.ClientError as error:
                raise BackendUnavailable(f"no answer from {config.url}: {type(error).__name__}: {error}") from error
            except TimeoutError as error:
                raise EpisodeTimeout(f"{config.url} did not finish within timeout: {config.timeout:g} s") from error
        if content is None:
            raise WorkflowError(f"{config.url} answered more than max_output: {config.max_output} bytes")
        if 300 <= response.status < 400:  # the row and the model's address would go where the file does not say
            target = response.headers.get("Location", "nowhere")
            raise WorkflowError(f"{config.url} redirects to {target}, which is not followed: set it as url")
        if response.status >= 400:
            message = f"{config.url} answered {response.status}: {content[:_SHOWN_BYTES].decode(errors='replace')}"
            is_transient = response.status in _TRANSIENT or endpoint.failure
            raise BackendUnavailable(message) if is_transient else WorkflowError(message)
        if config.answer is None and response.content_type != "application/json":
            return content.decode(errors="replace")
        return value_at(config.answer or "$.output", _parse_json_answer(content, source), f"{source}: answer")

    timeout = aiohttp.ClientTimeout(total=config.timeout, sock_connect=30)
    connector = aiohttp.TCPConnector(limit=0)  # the number of concurrent episodes is limited elsewhere
    async with (
        await new_gateway(config, builder) as gateway,
        aiohttp.ClientSession(timeout=timeout, connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session,
    ):
        yield FunctionInfo.from_fn(run, description=f"Asks {config.url}")

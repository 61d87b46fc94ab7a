"""The models of a workflow: OpenAI-compatible servers, and the model under training.

player = await builder.get_llm("player")
answer = await player.complete([{"role": "user", "content": "Your move?"}])
answer.choices[0].message.content

Hand-written llms mean the model under training too, by its own name or by that of the model it started from:

    llms:
      player: {_type: openai, model_name: Qwen/Qwen2.5-3B-Instruct, base_url: "http://localhost:8000/v1"}
    trainer_adapters:
      art: {_type: openpipe_art_trainer_adapter, backend: {base_model: Qwen/Qwen2.5-3B-Instruct, name: my_run, ...}}

`player` is trained. If its calls went to the base model, training would have no effect: they go to `my_run`.
"""

import asyncio
import importlib
import inspect
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Annotated, Any, Self

import orjson
from pydantic import AliasChoices, Field, SecretStr, model_validator

from insitu.builder import Builder, name_being_built
from insitu.errors import CaptureError, ConfigError
from insitu.formats.parser import ReasoningFormatName, ToolFormatName
from insitu.registry import register_llm_provider
from insitu.schemas.components import LLMBaseConfig, MayChange
from insitu.schemas.finetuning import PolicyEndpoint
from insitu.wire.addresses import is_same_server

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletion


logger = logging.getLogger(__name__)

_FOR_THE_CLIENT = frozenset(("stream", "timeout", "extra_headers", "extra_query"))
_EXTRA = (
    *("top_k", "min_p", "repetition_penalty", "bad_words", "stop_token_ids", "structured_outputs"),
    *("chat_template_kwargs", "tool_format", "reasoning_format"),
)
"""Parameters of chat completions that OpenAI's API does not have."""
_SHAPING = ("presence_penalty", "frequency_penalty", "logit_bias", "response_format")
"""Parameters of OpenAI's API that change the distribution sampled from, beside temperature and top_p."""


class SamplingConfig(LLMBaseConfig):
    """Sampling parameters; unset ones are left to the server."""

    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling: sample among the most likely tokens with this total probability."""
    top_k: int | None = Field(default=None, ge=-1)
    """Sample among so many of the most likely tokens; 0 and -1: all. For vLLM and `insitu backend`, as are `min_p`,
    `repetition_penalty`, `bad_words`, `stop_token_ids` and `structured_outputs`."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Sample among the tokens with at least this share of the probability of the most likely one."""
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    """Subtracted from the logits of tokens that the completion has."""
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    """Subtracted from the logits of tokens for each time that the completion has them."""
    repetition_penalty: float | None = Field(default=None, gt=0)
    """Divides positive logits of tokens that prompt or completion have, and multiplies negative ones."""
    logit_bias: dict[str, float] | None = None
    """Added to the logits, by token id: `{"42": -100}`."""
    bad_words: list[str] | None = None
    """Texts that are not sampled."""
    stop_token_ids: list[int] | None = None
    """Tokens that end a completion, beside the model's own."""
    response_format: dict[str, Any] | None = None
    """[Structured output](backend.md#structured-output): `{type: json_object}`, or `{type: json_schema, json_schema:
    {name: answer, schema: {...}}}`."""
    structured_outputs: dict[str, Any] | None = None
    """Structured output in vLLM's form, one of `json` (a schema), `json_object`, `regex`, `choice` and
    `grammar`."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of a completion."""
    stop: str | list[str] | None = None
    """Stop sequences."""
    seed: int | None = None
    """Leave empty for training: seeds are then derived from `general.seed` for each episode."""
    logprobs: bool | None = None
    """Request logprobs for the workflow; training requests them in any case."""
    top_logprobs: int | None = Field(default=None, ge=0)
    """Number of most likely alternatives to return per token, if the workflow needs them."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the server's chat template, such as `enable_thinking: false`; for vLLM and `insitu backend`."""
    thinking: bool | None = None
    """Whether the model reasons before it answers: the variable `enable_thinking` of the server's chat template."""
    override_sampling: bool = False
    """`temperature`, `top_p`, `max_tokens` and `stop` of this block replace those that the agent sends. Otherwise the
    agent's take precedence, and these are used for what it does not send."""
    timeout: MayChange[float | None] = Field(
        default=None, gt=0, validation_alias=AliasChoices("timeout", "request_timeout")
    )
    """Request timeout in seconds (or `request_timeout`); none: the OpenAI client's default of 600."""
    max_retries: MayChange[int] = Field(default=2, ge=0, validation_alias=AliasChoices("max_retries", "num_retries"))
    """Retries of a request after a transient error (or `num_retries`)."""
    retry_on_status_codes: list[Annotated[int, Field(ge=400, le=599)]] | None = None
    """Statuses of responses after which a request is retried; none: 408, 409, 429, and 500 and above."""

    @model_validator(mode="before")
    @classmethod
    def _one_spelling(cls, values: Any) -> Any:
        for name, other in (("max_retries", "num_retries"), ("timeout", "request_timeout")):
            if isinstance(values, dict) and name in values and other in values:
                raise ValueError(f"{name} and {other} are the same: give one of them")
        return values

    @model_validator(mode="after")
    def _thinking_once(self) -> Self:
        if self.thinking is not None and "enable_thinking" in (self.chat_template_kwargs or {}):
            raise ValueError("thinking and chat_template_kwargs.enable_thinking are the same: give one of them")
        return self

    def params(self) -> dict[str, Any]:
        """The request's parameters; those that the OpenAI client does not know are in `extra_body`."""
        names = ("temperature", "top_p", "max_tokens", "stop", "seed", "logprobs", "top_logprobs", *_SHAPING)
        params = {name: value for name in names if (value := getattr(self, name)) is not None}
        further = {name: value for name in _EXTRA if (value := getattr(self, name, None)) is not None}
        if self.thinking is not None:
            variables = further.get("chat_template_kwargs", {})
            further["chat_template_kwargs"] = {**variables, "enable_thinking": self.thinking}
        return params | ({"extra_body": further} if further else {})

    def forced_params(self) -> dict[str, Any]:
        """The parameters that replace those of each request."""
        params = self.params() if self.override_sampling else {}
        return {name: params[name] for name in ("temperature", "top_p", "max_tokens", "stop") if name in params}


class OpenAIConfig(SamplingConfig, name="openai"):
    """A model served by an OpenAI-compatible API."""

    model_name: str
    """The model's name on the server."""
    base_url: str | None = None
    """URL up to and including `/v1`; none: the environment variable OPENAI_BASE_URL, or OpenAI's API."""
    api_key: SecretStr | None = None
    """API key; none: the environment variable OPENAI_API_KEY."""


class NIMConfig(OpenAIConfig, name="nim"):
    """A model served by NVIDIA NIM."""

    base_url: str | None = "https://integrate.api.nvidia.com/v1"
    """URL up to and including `/v1`."""
    api_key: SecretStr | None = None
    """API key; none: the environment variable NVIDIA_API_KEY."""


class PolicyConfig(SamplingConfig, name="policy"):
    """The model under training, wherever the trainer adapter serves it."""

    tool_format: ToolFormatName | None = None
    """How the model writes [tool calls](models.md#tool-calls-and-reasoning), instead of what the backend says."""
    reasoning_format: ReasoningFormatName | None = None
    """How the model writes [reasoning](models.md#tool-calls-and-reasoning), instead of what the backend says."""
    token_bridge: bool = False
    """Continues a conversation from the tokens that were sampled in it, also where the chat template drops or rewrites
    earlier turns, so that it is trained as [one row](models.md#the-token-bridge). For calls that are trained, on
    `insitu backend`."""


@dataclass
class ModelClient:
    """The official `client` of a model, the `model` name to request, and the configured sampling `params`.

    `name` is its key under `llms`. `closers` run when the builder closes.
    """

    client: "AsyncOpenAI"
    model: str
    params: dict[str, Any]
    name: str
    config: SamplingConfig
    http_client: Any
    recorder: Any
    closers: list[Callable[[], Any]] = field(default_factory=list)
    sender: Any = None
    """The client that `complete` uses, which adds nothing to requests; by default `client`."""

    def __post_init__(self) -> None:
        self.sender = self.sender or self.client

    async def complete(self, messages: str | list[dict[str, Any]], **overrides: Any) -> "ChatCompletion":
        """One chat completion with the configured parameters; `overrides` take precedence. Text is a user's message."""
        request: dict[str, Any] = {"model": self.model, "messages": as_messages(messages), **self.params, **overrides}
        if _is_plain_json(request):
            # `create` walks the request for objects that are not JSON, which takes a quarter of the client's CPU time
            from openai.types.chat import ChatCompletion

            request |= request.pop("extra_body", None) or {}
            return await self.sender.post("/chat/completions", cast_to=ChatCompletion, body=request)
        return await self.sender.chat.completions.create(**request)

    async def ask(self, messages: str | list[dict[str, Any]], **overrides: Any) -> str:
        """The text of one completion."""
        return text_of(await self.complete(messages, **overrides))

    async def aclose(self) -> None:
        for close in self.closers:
            closing = close()
            if inspect.isawaitable(closing):
                await closing


def as_messages(messages: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Text as the message of a user."""
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def text_of(completion: "ChatCompletion") -> str:
    """Empty if the message has tool calls only."""
    return completion.choices[0].message.content or ""


def _is_plain_json(request: dict[str, Any]) -> bool:
    """Whether a request can be sent as it is: it has no client options (timeout, streaming) and no other objects."""
    if not _FOR_THE_CLIENT.isdisjoint(request):
        return False
    try:
        orjson.dumps(request)
    except TypeError:
        return False
    return True


def http_library(sdk: Any = None) -> Any:
    """The module `httpx` or `httpx2`, whichever an SDK uses; by default that of `openai` (2: httpx, 3: httpx2)."""
    if sdk is None:
        import openai as sdk

    base = next(cls for cls in sdk.DefaultAsyncHttpxClient.__mro__ if cls.__module__.startswith("httpx"))
    return importlib.import_module(base.__module__.partition(".")[0])


async def import_client() -> None:
    """Imports what `connect` needs, while something else is waited for: it takes a second."""
    with suppress(Exception):  # which `connect` meets again
        await asyncio.to_thread(http_library)


@cache
def _capture_error_type() -> type[CaptureError]:
    """A CaptureError that the client re-raises: release 2 treats foreign errors as lost connections."""
    from openai import OpenAIError

    return type("CaptureError", (CaptureError, OpenAIError), {})


@cache
def _lasting(client: type) -> type:
    async def keep_async(_: Any) -> None: ...

    def keep(_: Any) -> None: ...

    methods = {"aclose": keep_async} if hasattr(client, "aclose") else {"close": keep}
    return type(client.__name__, (client,), methods)


def lasting(client: Any, transport: Any, closers: list[Callable[[], Any]]) -> Any:
    """An HTTP client of all episodes, which none of them can close: the builder does, with its `closers`."""
    no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))  # an episode would send those of another
    made = _lasting(client)(transport=transport, follow_redirects=True, cookies=no_cookies)
    closers.append(partial(client.aclose if hasattr(client, "aclose") else client.close, made))
    return made


def connect(
    name: str,
    config: SamplingConfig,
    model: str,
    base_url: str | None,
    api_key: str,
    current_model: Callable[[], str] | None = None,
) -> ModelClient:
    """A model client on a recording transport; `current_model` returns the name to request, if it changes."""
    from openai import AsyncOpenAI

    from insitu.capture.recorder import Recorder
    from insitu.capture.transport import recording_transport

    http = http_library()
    server = base_url or os.environ.get("OPENAI_BASE_URL", "api.openai.com")
    bridges = isinstance(config, PolicyConfig) and config.token_bridge
    retried = config.retry_on_status_codes
    recorder = Recorder(server, name, _capture_error_type(), current_model, config.forced_params(), bridges, retried)
    closers = list[Callable[[], Any]]()
    http_client = lasting(http.AsyncClient, recording_transport(http)(recorder), closers)
    options: dict[str, Any] = {} if config.timeout is None else {"timeout": config.timeout}
    client = AsyncOpenAI(
        base_url=base_url, api_key=api_key, max_retries=config.max_retries, http_client=http_client, **options
    )
    return ModelClient(client, model, config.params(), name, config, http_client, recorder, closers)


def connect_policy(config: SamplingConfig, policy: PolicyEndpoint) -> ModelClient:
    """A client of the model under training, for the block being built."""
    return connect(name_being_built(), config, policy.model, policy.base_url, policy.api_key, policy.current_model)


@register_llm_provider(config_type=NIMConfig)
@register_llm_provider(config_type=OpenAIConfig)
async def openai_llm(config: OpenAIConfig, builder: Builder) -> AsyncIterator[ModelClient]:
    variable = "NVIDIA_API_KEY" if isinstance(config, NIMConfig) else "OPENAI_API_KEY"
    key = os.environ.get(variable) if config.api_key is None else config.api_key.get_secret_value()
    name = name_being_built()
    policy = policy_named_by(name, config, builder)
    if policy is not None:
        llm = connect_policy(config, policy)
    elif key is None and config.base_url in (None, NIMConfig.model_fields["base_url"].default):
        raise ConfigError(f"llms: model {config.model_name!r} needs a key: set api_key, or the variable {variable}")
    else:  # a self-hosted server may need no key
        llm = connect(name, config, config.model_name, config.base_url, key or "none")
    async with aclosing(llm):
        yield llm


@register_llm_provider(config_type=PolicyConfig)
async def policy_llm(config: PolicyConfig, builder: Builder) -> AsyncIterator[ModelClient]:
    async with aclosing(connect_policy(config, await builder.policy_endpoint())) as llm:
        yield llm


def check_model_names(builder: Builder) -> None:
    """Raises ConfigError if a trained llm names a model that is not the one being trained."""
    for name in sorted(builder.trained_llms):
        block = builder.config.llm(name)
        policy = policy_named_by(name, block, builder)
        if policy is None:
            continue
        where = f"llms.{name}.model_name is {block.model_name!r}"  # type: ignore[attr-defined]
        if block.model_name != policy.model:  # type: ignore[attr-defined]
            logger.warning("%s: its requests go to %r at %s, which is trained", where, policy.model, policy.base_url)


def policy_named_by(name: str, block: LLMBaseConfig, builder: Builder) -> PolicyEndpoint | None:
    """The model under training if `block`, a trained llm, must be sent there rather than where it says.

    Raises ConfigError if it names another model on the server of the model under training.
    """
    policy, config = builder.trained_policy, builder.config
    model = _model_of(block)
    if policy is None or model is None or name not in builder.trained_llms:
        return None
    names = {policy.model, policy.model.rpartition("@")[0] if policy.current_model is not None else policy.model}
    beside = is_same_server(block.request_settings().get("base_url"), policy.base_url)
    if model in names:
        return policy if beside and policy.current_model is not None else None
    problem = f"llms.{name}.model_name is {model!r}, but {policy.model!r} at {policy.base_url} is trained"
    if model != policy.base_model:
        if beside:
            raise ConfigError(f"{problem}: name that model, or use _type: policy")
        return None
    others = [other for other in builder.trained_llms - {name} if _model_of(config.llm(other)) in names]
    if others:
        raise ConfigError(f"{problem}: set finetuning.target_model to {others[0]!r} if {name} is not to be trained")
    return policy


def _model_of(block: LLMBaseConfig) -> str | None:
    return block.request_settings().get("model_name")

"""What a chat completion request may say, what it means for sampling, and how the answer is spelt."""

import secrets
from collections.abc import Sequence
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from insitu.backend.inference.sampling import HOTTEST, TOP_LOGPROBS, SamplingParams, choice_seed
from insitu.errors import RequestRefused

_LENIENT = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

MOST_STOPS = 64
"""Stop strings of a request: all are looked for after every token, in the thread that samples for everybody."""
HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
)
"""Keys that change nothing about the completion, and are taken without effect."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_k": (0, -1),
    "min_p": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "best_of": (1,),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "echo": (False,),
}
"""Keys that are not supported, with the values that ask for nothing."""


class Message(BaseModel):
    """One message; further keys reach the chat template as they are."""

    model_config = _LENIENT

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class StreamOptions(BaseModel):
    model_config = _LENIENT

    include_usage: bool = False


class ChatRequest(BaseModel):
    """The body of `POST /v1/chat/completions`."""

    model_config = _LENIENT

    model: str
    """`NAME` for the newest weights, `NAME@K` for those of version K."""
    messages: list[Message] = Field(min_length=1)
    temperature: float | None = Field(default=1.0, ge=0, le=HOTTEST)
    top_p: float | None = Field(default=1.0, gt=0, le=1)
    n: int | None = Field(default=1, ge=1, le=128)
    seed: int | None = None
    """The same seed, prompt and weights give the same completion; choice i draws from a seed derived from it."""
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int | None = Field(default=0, ge=0)
    ignore_eos: bool | None = False
    logprobs: bool | None = False
    """Natural logarithms of the model's own distribution, before temperature and top_p."""
    top_logprobs: int | None = Field(default=0, ge=0, le=TOP_LOGPROBS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = None
    """Tokens in logprobs are spelt `token_id:N`; unset: for models that are trained on their returned answers."""
    chat_template_kwargs: dict[str, Any] | None = None
    _taken_back: bool = PrivateAttr(default=False)

    def ask_for_ids(self) -> None:
        """As for a model that is trained on the choices its clients send back."""
        self.logprobs = self._taken_back = True
        if self.return_tokens_as_token_ids is None:
            self.return_tokens_as_token_ids = True

    @property
    def choices_carry_prompt(self) -> bool:
        """Whether each choice has `prompt_token_ids`, which survive where a client keeps choices alone."""
        return self._taken_back

    def sampling(self, room: int) -> list[SamplingParams]:
        """The parameters of each choice; `room` is how many tokens fit behind the prompt."""
        seed = secrets.randbits(63) if self.seed is None else self.seed
        asked = self.max_completion_tokens or self.max_tokens or room
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [
            SamplingParams(
                seed=choice_seed(seed, choice),
                max_tokens=min(asked, room),
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                stop=tuple(text for text in stop if text),
                ignore_eos=bool(self.ignore_eos),
                min_tokens=self.min_tokens or 0,
                top_logprobs=(self.top_logprobs or 0) if self.logprobs else 0,
            )
            for choice in range(self.n or 1)
        ]

    @property
    def usable_tools(self) -> list[dict[str, Any]] | None:
        return None if self.tool_choice == "none" else self.tools or None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def parse_request(body: bytes) -> ChatRequest:
    """The request in a body. Raises RequestRefused (400) naming the field that is wrong or not supported."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestRefused(f"the body is not JSON: {error}", code="malformed_json") from error
    if not isinstance(data, dict):
        raise RequestRefused(f"the body is a JSON {type(data).__name__}; expected an object", code="malformed_json")
    try:
        request = ChatRequest.model_validate(data)
    except ValidationError as error:
        raise refusal(error) from error
    for key, value in (request.model_extra or {}).items():
        if key not in HARMLESS and value is not None and value not in NEUTRAL.get(key, ()):
            allowed = f"; allowed: {NEUTRAL[key][0]!r}, which asks for nothing" if key in NEUTRAL else ""
            raise RequestRefused(f"{key} is not supported by this server{allowed}", param=key, code="unsupported")
    if isinstance(request.stop, list) and len(request.stop) > MOST_STOPS:
        raise RequestRefused(f"stop has {len(request.stop)} entries; allowed: {MOST_STOPS}", param="stop")
    if request.top_logprobs and not request.logprobs:
        raise RequestRefused("top_logprobs needs logprobs: true", param="top_logprobs")
    if request.tool_choice not in (None, "auto", "none"):
        raise RequestRefused("tool_choice can be auto or none here", param="tool_choice", code="unsupported")
    return request


def refusal(error: ValidationError) -> RequestRefused:
    """The first thing pydantic found, as a sentence that names the field and the value."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("list[", "function-")))
    shown = "" if first["type"] == "missing" else f" (it is {str(first['input'])[:80]!r})"
    return RequestRefused(f"{where or 'the body'}: {first['msg']}{shown}", param=where or None, code=first["type"])


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: content as text, the arguments of tool calls as objects."""
    return [_template_message(message, number) for number, message in enumerate(messages)]


def _template_message(message: Message, number: int) -> dict[str, Any]:
    plain = {"role": message.role, "content": _text(message.content, number), **(message.model_extra or {})}
    if message.tool_calls:
        plain["tool_calls"] = [_template_tool_call(call) for call in message.tool_calls]
    return plain


def _text(content: str | list[dict[str, Any]] | None, number: int) -> str:
    if isinstance(content, str):
        return content
    for part in content or []:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestRefused(
                f"messages.{number}.content has a part of type {part.get('type')!r}; only text is supported",
                param=f"messages.{number}.content",
                code="unsupported",
            )
    return "".join(part["text"] for part in content or [])


def _template_tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = orjson.loads(function["arguments"] or b"{}")
    except orjson.JSONDecodeError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


FinishReason = Literal["stop", "length", "tool_calls"]

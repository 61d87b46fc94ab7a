"""What requests for completions have in common, of chats and of texts alike, and what it means for sampling."""

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from insitu.backend.inference.sampling import HOTTEST, Ask, SamplingParams, choice_seed
from insitu.backend.inference.tokens import ChatTokenizer
from insitu.errors import RequestRefused

if TYPE_CHECKING:
    from insitu.backend.inference.answers import Answer

LENIENT = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

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
    "suffix": ("",),
}
"""Keys that are not supported, with the values that ask for nothing."""

FinishReason = Literal["stop", "length", "tool_calls"]


class StreamOptions(BaseModel):
    model_config = LENIENT

    include_usage: bool = False


class SamplingRequest(BaseModel):
    """What is asked of every completion."""

    model_config = LENIENT
    prompt_key: ClassVar[str]
    """The key that holds what is to be completed."""

    model: str
    """`NAME` for the newest weights, `NAME@K` for those of version K."""
    temperature: float | None = Field(default=1.0, ge=0, le=HOTTEST)
    top_p: float | None = Field(default=1.0, gt=0, le=1)
    n: int | None = Field(default=1, ge=1, le=128)
    """Choices for each prompt."""
    seed: int | None = None
    """The same seed, prompt and weights give the same completion; choice i draws from a seed derived from it."""
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int | None = Field(default=0, ge=0)
    ignore_eos: bool | None = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = None
    """Tokens in logprobs are spelt `token_id:N`; unset: for models that are trained on their returned answers."""

    def check(self) -> None:
        """Raise RequestRefused for what does not go together, or is not supported."""
        for key, value in (self.model_extra or {}).items():
            if key not in HARMLESS and value is not None and value not in NEUTRAL.get(key, ()):
                allowed = f"; allowed: {NEUTRAL[key][0]!r}, which asks for nothing" if key in NEUTRAL else ""
                raise RequestRefused(f"{key} is not supported by this server{allowed}", param=key, code="unsupported")
        if isinstance(self.stop, list) and len(self.stop) > MOST_STOPS:
            raise RequestRefused(f"stop has {len(self.stop)} entries; allowed: {MOST_STOPS}", param="stop")

    def prompts(self, tokens: ChatTokenizer) -> list[list[int]]:
        """The token ids of what is to be completed, one list a prompt."""
        raise NotImplementedError

    def answer(self, prompts: Sequence[list[int]], tokens: ChatTokenizer) -> "Answer":
        """What spells the answer; `prompts` holds one for each choice."""
        raise NotImplementedError

    def ask_for_ids(self) -> None:
        """As for a model that is trained on the choices its clients send back, where such choices can be sent."""

    @property
    def longest(self) -> int | None:
        """Most tokens of a completion; none: what fits."""
        return self.max_tokens

    @property
    def alternatives(self) -> int:
        """How many of the likeliest tokens are reported along with each."""
        raise NotImplementedError

    def asks(self, prompts: Sequence[list[int]], max_length: int) -> list[Ask]:
        """What each choice is sampled from and how; `max_length` is that of a prompt and its completion together."""
        seed = secrets.randbits(63) if self.seed is None else self.seed
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        common: dict[str, Any] = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "stop": tuple(text for text in stop if text),
            "ignore_eos": bool(self.ignore_eos),
            "min_tokens": self.min_tokens or 0,
            "top_logprobs": self.alternatives,
        }
        asks: list[Ask] = []
        for prompt in prompts:
            room = max_length - len(prompt)
            for _ in range(self.n or 1):
                of_choice = choice_seed(seed, len(asks))
                asks.append(Ask(prompt, SamplingParams(of_choice, min(self.longest or room, room), **common)))
        return asks

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


R = TypeVar("R", bound=SamplingRequest)


def parse_request(kind: type[R], body: bytes) -> R:
    """The request in a body. Raises RequestRefused (400) naming the field that is wrong or not supported."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestRefused(f"the body is not JSON: {error}", code="malformed_json") from error
    if not isinstance(data, dict):
        raise RequestRefused(f"the body is a JSON {type(data).__name__}; expected an object", code="malformed_json")
    try:
        request = kind.model_validate(data)
    except ValidationError as error:
        raise refusal(error) from error
    request.check()
    return request


def refusal(error: ValidationError) -> RequestRefused:
    """The first thing pydantic found, as a sentence that names the field and the value."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("list[", "function-")))
    shown = "" if first["type"] == "missing" else f" (it is {str(first['input'])[:80]!r})"
    return RequestRefused(f"{where or 'the body'}: {first['msg']}{shown}", param=where or None, code=first["type"])

"""What ART clients of any release send: models, trajectory groups and their choices, and the bodies that carry them.

Releases differ in the keys they send. Null means absent, keys that this backend does not need are ignored, and a value
of the wrong type is refused with its path in the body.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from insitu.backend.http import StopAtFirstError
from insitu.backend.inference.sampler import Temperature
from insitu.backend.protocols.openai.chat import Message, template_messages
from insitu.errors import RequestRefused
from insitu.schemas.finetuning import MAX_REWARD
from insitu.wire.http_format import parse_token_ids
from insitu.wire.http_server import validation_refusal

FUNCTION_KEYS = ("name", "description", "parameters", "strict")

T = TypeVar("T", bound=BaseModel)


def parse(kind: type[T], data: Any) -> T:
    """Raises RequestRefused (422) for data of another type, with its path."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        refusal = validation_refusal(error)
        raise RequestRefused(str(refusal), status=422, param=refusal.param, code="invalid_request") from None


def drop_nulls(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if value is not None}


class _Body(BaseModel):
    """An object without its nulls."""

    model_config = ConfigDict(strict=True, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return drop_nulls(data) if isinstance(data, dict) else data


Settings = Annotated[dict[str, Any], AfterValidator(drop_nulls)]


class ArtModel(_Body):
    """A model in training, and how."""

    name: str
    project: str
    entity: str = "insitu"
    base_model: str | None = None
    trainable: bool = True
    config: Settings = Field(default={}, alias="_internal_config")
    base_path: Any = None

    @property
    def legacy(self) -> bool:
        """Clients up to 0.5.7, which send no base_path, have their own defaults."""
        return self.base_path is None

    @property
    def base(self) -> str | None:
        """The model it starts from."""
        args = self.config.get("init_args")
        name = args.get("model_name") if isinstance(args, dict) else None
        return self.base_model if name is None else str(name)

    @property
    def key(self) -> str:
        """Not unique if names contain slashes."""
        return "/".join(self.identity)

    @property
    def identity(self) -> tuple[str, str, str]:
        return self.entity, self.project, self.name


@dataclass(frozen=True)
class ArtMessage:
    """A message in the chat template's format; for a choice also its sampled token ids, their logprobs, its prompt."""

    message: dict[str, Any]
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs_temperature: float | None = None


def _template_message(data: dict[str, Any]) -> dict[str, Any]:
    try:
        return template_messages([Message.model_validate(drop_nulls(data))])[0]
    except ValidationError as error:
        raise ValueError(f"it is not a message: {validation_refusal(error)}") from None
    except RequestRefused as error:
        raise ValueError(f"it cannot be rendered: {error}") from None


_Message = Annotated[dict[str, Any], AfterValidator(_template_message)]


class _Call(_Body):
    prompt_token_ids: list[Any] | None = None


class _Logprobs(_Body):
    content: list[Any] | None = None
    refusal: list[Any] | None = None
    token_ids: list[Any] | None = None
    call: _Call = _Call()
    """Where insitu's parser keeps the tokens and the prompt."""


class _Choice(_Body):
    message: _Message
    logprobs: _Logprobs = _Logprobs()
    token_ids: list[Any] | None = None
    prompt_token_ids: list[Any] | None = None
    logprobs_temperature: Temperature | None = None
    logprobs_processed: bool | None = None


def _sampled_message(choice: _Choice) -> ArtMessage:
    """Tokens written as text are not used: the same text may be tokenized in several ways."""
    entries = choice.logprobs.content or choice.logprobs.refusal or []
    tokens = (each.get("token") if isinstance(each, dict) else None for each in entries)
    ids = choice.token_ids or choice.logprobs.token_ids or parse_token_ids(tokens)
    if not entries or not ids:
        return ArtMessage(choice.message)
    logprobs: list[Any] = [each.get("logprob") if isinstance(each, dict) else None for each in entries]
    for index, logprob in enumerate(logprobs):
        if not isinstance(logprob, int | float) or isinstance(logprob, bool):
            raise ValueError(f"token {index} has no logprob, which is a number")
    if len(ids) != len(logprobs):
        raise ValueError(f"it has {len(ids)} token_ids and {len(logprobs)} logprobs")
    if choice.logprobs_processed:
        raise ValueError("it was sampled with structured output, penalties or biases, which ART has no way to train")
    prompt = choice.prompt_token_ids
    prompt = choice.logprobs.call.prompt_token_ids if prompt is None else prompt
    return ArtMessage(choice.message, ids, logprobs, prompt, choice.logprobs_temperature)


def _tag(turn: Any) -> str:
    """Choices contain a message, and say why they ended."""
    is_choice = isinstance(turn, dict) and turn.get("message") is not None and turn.get("finish_reason") is not None
    return "<choice>" if is_choice else "<message>"


_Turn = Annotated[
    Annotated[_Choice, AfterValidator(_sampled_message), Tag("<choice>")]
    | Annotated[_Message, AfterValidator(ArtMessage), Tag("<message>")],
    Discriminator(_tag),
    WithJsonSchema({"type": "object"}),
]


def _ordered_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in the format of chat requests.

    ART also keeps bare functions, and its clients change the order of the keys, which templates print.
    """
    if "function" not in tool:
        return tool if "type" in tool else {"type": "function", "function": _order_keys(tool, FUNCTION_KEYS)}
    if not isinstance(tool["function"], dict):
        raise ValueError("its function is not an object")
    return _order_keys(tool | {"function": _order_keys(tool["function"], FUNCTION_KEYS)}, ("type", "function"))


def _order_keys(keys: Mapping[str, Any], first: tuple[str, ...]) -> dict[str, Any]:
    return {key: keys[key] for key in (*first, *keys) if key in keys}


_Number = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)]


def _numbers(metrics: Any) -> Any:
    if not isinstance(metrics, dict):
        return metrics
    # A plus makes a number of a bool.
    return {key: +value for key, value in metrics.items() if isinstance(value, int | float)}


class ArtHistory(_Body):
    """A conversation: messages, and choices as they were sampled."""

    turns: Annotated[list[_Turn], StopAtFirstError()] = Field(default=[], alias="messages_and_choices")
    tools: Annotated[list[Annotated[dict[str, Any], AfterValidator(_ordered_tool)]], StopAtFirstError()] | None = None

    @property
    def messages(self) -> list[ArtMessage]:
        return cast(list[ArtMessage], self.turns)  # what their validators return


class ArtTrajectory(ArtHistory):
    """A conversation with its reward, and those that belong to it."""

    reward: _Number = 0.0
    metrics: Annotated[dict[str, _Number], BeforeValidator(_numbers)] = {}
    additional_histories: Annotated[list[ArtHistory], StopAtFirstError()] = []

    @property
    def histories(self) -> list[ArtHistory]:
        return [self, *self.additional_histories]


class ArtGroup(_Body):
    """Trajectories that are compared with one another; `exceptions` are those of failed rollouts."""

    trajectories: Annotated[list[ArtTrajectory], StopAtFirstError()]
    exceptions: list[Any] = []


class ArtGroups(_Body):
    trajectory_groups: Annotated[list[ArtGroup], StopAtFirstError()]


class ArtModelRequest(_Body):
    model: ArtModel


class _ServerArgs(_Body):
    api_key: str | None = None


class _ServerConfig(_Body):
    server_args: _ServerArgs = _ServerArgs()


class ArtPrepareRequest(ArtModelRequest):
    config: _ServerConfig = _ServerConfig()


class TrainingBody(ArtGroups):
    config: dict[str, Any] = {}
    dev_config: dict[str, Any] = {}


class ArtTrainRequest(ArtModelRequest, TrainingBody):
    pass


class ServerlessLogRequest(ArtGroups):
    split: str = "val"


class ArtLogRequest(ArtModelRequest, ServerlessLogRequest):
    pass


class ArtKeepRequest(ArtModelRequest):
    steps_to_keep: Annotated[list[int], StopAtFirstError()] = []


class ServerlessStepsRequest(_Body):
    steps: Annotated[list[int], StopAtFirstError()] = []


class ServerlessTrainRequest(TrainingBody):
    model_id: str
    dev_config: Settings = Field(default={}, alias="experimental_config")

"""Helpers shared by the parsers: reading step payloads, building messages, and the OpenAI format.

Python objects are converted to JSON first, so a step has the same meaning before and after serialization.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from insitu.collect.conversations import call_logprobs
from insitu.errors import TrajectoryError
from insitu.schemas.episodes import ModelCall
from insitu.schemas.steps import IntermediateStep, IntermediateStepPayload, IntermediateStepType
from insitu.wire.connection import sampled_tokens
from insitu.wire.http_format import MALFORMED, parse_token_ids
from insitu.wire.json_values import to_jsonable

JsonObject = dict[str, Any]
Message = JsonObject
T = TypeVar("T")
Reader = Callable[[JsonObject, Sequence[Message]], list[T] | None]
"""Reads a JSON object that comes after these messages; None for objects of other frameworks."""

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MESSAGE_KEYS = {"content", "tool_calls", "function_call", "refusal", "audio"}
_URLSAFE_TO_STANDARD_BASE64 = str.maketrans("-_", "+/")
_AUDIO_FORMATS = {"mpeg": "mp3", "x-wav": "wav", "wave": "wav", "vnd.wave": "wav"}
"""Subtypes of audio media types -> OpenAI's formats. Others are kept."""
_FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    **dict.fromkeys(("safety", "recitation", "blocklist", "prohibited_content", "spii"), "content_filter"),
    "image_safety": "content_filter",
}
"""Other providers' finish reasons -> OpenAI's. Reasons without an equivalent are only lower-cased."""


@dataclass(slots=True)
class Completion(ModelCall):
    """A model call with the texts of its sampled tokens; a framework's format sets `message` and how it was sampled."""

    index: int = 0
    model: str = ""
    messages: list[Message] = field(default_factory=list)
    tokens: list[str] | None = None


_RECORDED = (
    *("finish_reason", "logprobs", "token_ids", "prompt_token_ids"),
    *("policy_version", "sampling", "logprobs_temperature", "sent_logprobs"),
)
"""Fields of a Completion that the metadata of a recorded call has."""


class StepFormat(NamedTuple):
    """How one framework represents prompts, completions and tool results.

    `is_tool_message` is whether a tool's output, a JSON object, is the framework's own representation of a tool result;
    any other output is sent to the model as JSON.
    """

    read_messages: Reader[Message]
    read_completions: Reader[Completion]
    is_tool_message: Callable[[JsonObject], bool]


def parse_prompt(value: Any, formats: Sequence[StepFormat]) -> list[Message]:
    """The messages of a prompt, which is a list of messages, a request, or text."""
    prompt: list[Message] = []
    for item in _json_items(value):
        if isinstance(item, str):
            prompt.append({"role": "user", "content": item})
        else:
            prompt += _first_reading("message", item, [f.read_messages for f in formats], prompt)
    return prompt


def parse_completions(value: Any, prompt: Sequence[Message], formats: Sequence[StepFormat]) -> list[Completion]:
    """The completions of one prompt, each a message, a response, or text."""
    completions: list[Completion] = []
    for item in _json_items(value):
        if isinstance(item, str):
            completions.append(Completion(message={"role": "assistant", "content": item}))
        else:
            completions += _first_reading("completion", item, [f.read_completions for f in formats], prompt)
    return completions


def _first_reading(what: str, item: Any, readers: list[Reader[T]], before: Sequence[Message]) -> list[T]:
    for read in readers if isinstance(item, dict) else ():
        if (parsed := read(item, before)) is not None:
            return parsed
    raise TrajectoryError(f"{_describe(item)} is not a {what} of a known framework")


def _json_items(value: Any) -> list[Any]:
    converted = []
    for item in value if isinstance(value, list | tuple) else [value]:
        converted.append(to_jsonable(item))
        if isinstance(converted[-1], str) and not isinstance(item, str):  # what is not JSON-serializable becomes text
            raise TrajectoryError(f"{_describe(item)} is neither text nor a message or completion of a known framework")
    return converted


def step_metadata(step: IntermediateStep) -> dict[str, Any]:
    """A step's metadata as a dict, including extra fields; values are not converted to JSON."""
    metadata = step.metadata
    if metadata is None or isinstance(metadata, dict):
        return metadata or {}
    return {**metadata.__dict__, **(metadata.model_extra or {})}


def step_prompt(step: IntermediateStep) -> Any:
    """The unparsed prompt of an LLM step, None if the step has none."""
    chat_inputs = step_metadata(step).get("chat_inputs")
    return chat_inputs if chat_inputs is not None or step.data is None else step.data.input


def step_completions(
    step: IntermediateStep, prompt: Sequence[Message], formats: Sequence[StepFormat]
) -> list[Completion]:
    """The completions of an LLM_END step, as far as they are known.

    What insitu recorded of each one in the metadata overrides what the framework reported.
    """
    metadata = step_metadata(step)
    responses = metadata.get("chat_responses")
    if responses is None:
        responses = step.data.output if step.data is not None and step.data.output is not None else []
    completions = parse_completions(responses, prompt, formats)
    for completion in completions:
        completion.messages = [*prompt]
        completion.model, completion.llm = metadata.get("model") or step.name or "", metadata.get("llm")
    for completion, recorded in zip(completions, metadata.get("choices") or [metadata], strict=False):
        values = {name: to_jsonable(recorded.get(name)) for name in _RECORDED}
        values["logprobs"] = parse_logprobs(values["logprobs"])
        for name, value in values.items():
            if value is not None:
                setattr(completion, name, value)
    return completions


def assistant_message(message: Message, call: ModelCall | None) -> Message:
    """The message with its `logprobs` (see `call_logprobs`), and `token_ids` and `finish_reason` if known."""
    sampling = {} if call is None else {"token_ids": call.token_ids, "finish_reason": call.finish_reason}
    options = {name: value for name, value in sampling.items() if value is not None}
    tokens = call.tokens if isinstance(call, Completion) else None
    return {**message, "logprobs": call_logprobs(call, tokens), **options}


def step_parser(*formats: StepFormat) -> Callable[..., Message]:
    """Creates the `parse_to_openai_message` function of a framework."""

    def parse_to_openai_message(step: Any, previous_message: Message | None = None, **kwargs: Any) -> Message:
        """Returns the message that one step adds.

        LLM_START: the last message of the prompt. LLM_END: the completion with `logprobs` (those of an OpenAI choice,
        empty if unknown), and `finish_reason` and `token_ids` if known. TOOL_END: the tool's result, for the call in
        `previous_message` if the tool's output does not name one. Raises TrajectoryError if the step has no message or
        cannot be parsed.
        """
        step, before = parse_step(step), [] if previous_message is None else [previous_message]
        with naming_step(step):
            match step.event_type:
                case IntermediateStepType.LLM_START if prompt := parse_prompt(step_prompt(step), formats):
                    return prompt[-1]
                case IntermediateStepType.LLM_END if completions := step_completions(step, before, formats):
                    return assistant_message(completions[0].message or {}, completions[0])
                case IntermediateStepType.TOOL_END:
                    return _tool_message(step, before, formats)
            problem = "not an LLM_START, LLM_END or TOOL_END step, or its prompt or completion is empty"
            raise TrajectoryError(f"the step has no message: {problem}")

    return parse_to_openai_message


def _tool_message(step: IntermediateStep, before: Sequence[Message], formats: Sequence[StepFormat]) -> Message:
    output = step_metadata(step).get("tool_outputs")
    if output is None and step.data is not None:
        output = step.data.output
    output = to_jsonable(output)
    content = output if isinstance(output, str) else to_json(output)
    readable = [f for f in formats if isinstance(output, dict) and f.is_tool_message(output)]
    parsed = [m for f in readable for m in f.read_messages(output, before) or ()]
    message = next((m for m in parsed if m["role"] == "tool"), {"role": "tool", "content": content})
    if "tool_call_id" in message:
        return message
    calls = [call for earlier in before for call in earlier.get("tool_calls") or ()]
    calls = [call for call in calls if call["function"]["name"] == step.name] or calls
    if len(calls) != 1:
        problem = f"previous_message has {len(calls)} matching tool calls, expected one"
        raise TrajectoryError(f"cannot match the tool result to a call: {problem}")
    return {**message, "tool_call_id": calls[0]["id"], "name": calls[0]["function"]["name"]}


def parse_step(step: Any) -> IntermediateStep:
    """Returns an IntermediateStep given one, its JSON, or an IntermediateStepPayload object."""
    if isinstance(step, IntermediateStep):
        return step
    if isinstance(step, IntermediateStepPayload):
        return IntermediateStep(payload=step)
    try:
        return IntermediateStep.model_validate(step)
    except ValidationError as error:
        raise TrajectoryError(f"{_describe(step)} is not an intermediate step: {error.errors()[0]['msg']}") from error


@contextmanager
def naming_step(step: IntermediateStep) -> Iterator[None]:
    """Prefixes TrajectoryErrors with the step, and converts errors from a malformed payload to TrajectoryError."""
    where = f"step {step.UUID} ({step.event_type})"
    try:
        yield
    except TrajectoryError as error:
        raise TrajectoryError(f"{where}: {error}") from error
    except MALFORMED as error:
        raise TrajectoryError(f"{where}: malformed payload: {error!r}") from error


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def openai_finish_reason(reason: Any) -> str | None:
    return None if reason is None else _FINISH_REASONS.get(str(reason).lower(), str(reason).lower())


def parse_logprobs(logprobs: Any) -> list[float] | None:
    """The logprobs of the sampled tokens, from a list of numbers or from OpenAI's `logprobs` object."""
    try:
        entries = sampled_tokens(logprobs)[1] if isinstance(logprobs, dict) else logprobs
        if entries is None:
            return None
        return [float(entry["logprob"] if isinstance(entry, dict) else entry) for entry in entries]
    except MALFORMED:
        problem = "are neither a list of numbers nor an OpenAI logprobs object"
        raise TrajectoryError(f"logprobs {_describe(logprobs)} {problem}") from None


def make_completion(message: Message, finish_reason: Any, logprobs: Any) -> Completion:
    """`logprobs` is a list of numbers or OpenAI's object, whose tokens may be written as `token_id:123`."""
    tokens = [str(token) for token in sampled_tokens(logprobs)[0]]
    reason, numbers = openai_finish_reason(finish_reason), parse_logprobs(logprobs)
    ids = parse_token_ids(tokens)
    return Completion(message=message, finish_reason=reason, logprobs=numbers, token_ids=ids, tokens=tokens or None)


def tool_call(name: Any, arguments: Any, call_id: Any) -> JsonObject:
    """A tool call whose arguments are JSON text; text is passed through unchanged, as the model wrote it."""
    text = arguments if isinstance(arguments, str) else to_json(arguments or {})
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def openai_tool_calls(message: JsonObject) -> list[JsonObject]:
    """The tool calls of a message of the OpenAI API."""
    calls = message.get("tool_calls") or ()
    return [tool_call(call["function"]["name"], call["function"]["arguments"], call.get("id")) for call in calls]


def make_message(
    role: str, content: Any, position: int, calls: Sequence[JsonObject] = (), reasoning: str = "", **others: Any
) -> Message:
    """The message at this position of a prompt, with those of the other keys that are not None.

    Tool calls without an id get one from their position, so every prompt that repeats the message has the same ids.
    """
    message: Message = {"role": role, "content": content}
    if calls:
        numbered = enumerate(calls)
        message["tool_calls"] = [{**call, "id": call["id"] or f"call_{position}_{number}"} for number, call in numbered]
    if reasoning:
        message["reasoning_content"] = reasoning
    return message | {key: value for key, value in others.items() if value is not None}


def message_content(parts: list[JsonObject], *, join_text: bool = False) -> str | list[JsonObject] | None:
    """Text if there is a single text part (any number with `join_text`), None without parts, else the parts."""
    texts = [part["text"] for part in parts if part["type"] == "text"]
    if len(texts) == len(parts) and (join_text or len(parts) == 1):
        return "".join(texts) if texts else None
    return parts or None


def media_part(mime: str, data: str | None, url: str | None = None, **fields: Any) -> JsonObject:
    """A content part with base64 data, or with a URL or file id; `fields` are added to the part's inner object."""
    kind, _, subtype = mime.partition("/")
    encoded = (data or "").translate(_URLSAFE_TO_STANDARD_BASE64)
    if kind == "audio" and url is None:
        return {"type": "input_audio", "input_audio": {"data": encoded, "format": _AUDIO_FORMATS.get(subtype, subtype)}}
    target = f"data:{mime};base64,{encoded}" if url is None else url
    if kind in ("image", "video"):
        return {"type": f"{kind}_url", f"{kind}_url": {"url": target, **fields}}
    return {"type": "file", "file": {"file_data" if url is None else "file_id": target, **fields}}


def _openai_messages(item: Any, before: Sequence[Message]) -> list[Message] | None:
    if not isinstance(item, dict) or item.get("role") not in _ROLES or _MESSAGE_KEYS.isdisjoint(item):
        return None
    return [{key: value for key, value in item.items() if value is not None or key == "content"}]


def _openai_completions(item: JsonObject, before: Sequence[Message]) -> list[Completion] | None:
    if isinstance(choices := item.get("choices"), list):  # a complete response
        return parse_completions(choices, before, (OPENAI,))
    choice = item if "message" in item else {"message": item}
    messages = _openai_messages(choice["message"], before)
    if not messages or messages[0]["role"] != "assistant":
        return None
    return [make_completion(messages[0], choice.get("finish_reason"), choice.get("logprobs"))]


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 200 else text[:200] + '...'}"


OPENAI = StepFormat(_openai_messages, _openai_completions, lambda output: output.get("role") == "tool")

"""Shared by the parsers: payloads of steps, the pieces of a message, and OpenAI's own format.

Live objects are converted to JSON first, so a step has the same meaning before and after serialization.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from pydantic import ValidationError

from insitu.errors import TrajectoryError
from insitu.evaluation.remote import plain
from insitu.http_format import parse_token_ids
from insitu.schemas.episodes import ModelCall
from insitu.schemas.steps import IntermediateStep, IntermediateStepPayload, IntermediateStepType
from insitu.trajectories.conversations import call_logprobs

Message = dict[str, Any]

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_CONTENT = {"content", "tool_calls", "function_call", "refusal", "audio"}
_STANDARD_BASE64 = str.maketrans("-_", "+/")
_FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    **dict.fromkeys(("safety", "recitation", "blocklist", "prohibited_content", "spii"), "content_filter"),
    "image_safety": "content_filter",
}
"""Other providers' finish reasons -> OpenAI's. Reasons without an equivalent are kept."""


class SampledMessage(NamedTuple):
    """An assistant message and how it was sampled.

    `logprobs`, `token_ids` and `tokens` (their texts) have one entry per token.
    """

    message: Message
    finish_reason: str | None = None
    logprobs: list[float] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    policy_version: int | None = None
    tokens: list[str] | None = None


_CAPTURED = ("finish_reason", "logprobs", "token_ids", "prompt_token_ids", "policy_version")
"""Fields of a SampledMessage that the metadata of a captured call has."""


class StepFormat(NamedTuple):
    """How one framework represents prompts and completions.

    Both functions take a JSON value and the messages before it, and return None for values of other frameworks.
    """

    parse_messages: Callable[[Any, Sequence[Message]], list[Message] | None]
    parse_samples: Callable[[Any, Sequence[Message]], list[SampledMessage] | None]


def parse_prompt(value: Any, formats: Sequence[StepFormat]) -> list[Message]:
    """The messages of a prompt, which is a list of messages, a request, or text."""
    prompt: list[Message] = []
    for item in _json_items(value):
        parsed = next((m for f in formats if (m := f.parse_messages(item, prompt)) is not None), None)
        if parsed is None:
            raise TrajectoryError(f"{_describe(item)} is not a message of a known framework")
        prompt.extend(parsed)
    return prompt


def parse_samples(value: Any, prompt: Sequence[Message], formats: Sequence[StepFormat]) -> list[SampledMessage]:
    """The candidates sampled for one prompt."""
    samples: list[SampledMessage] = []
    for item in _json_items(value):
        parsed = next((s for f in formats if (s := f.parse_samples(item, prompt)) is not None), None)
        if parsed is None:
            raise TrajectoryError(f"{_describe(item)} is not a completion of a known framework")
        samples.extend(parsed)
    return samples


def _json_items(value: Any) -> list[Any]:
    items = value if isinstance(value, list | tuple) else [value]
    converted = [plain(item) for item in items]
    for item, result in zip(items, converted, strict=True):
        if isinstance(result, str) and not isinstance(item, str):  # an object without a JSON form becomes its repr
            raise TrajectoryError(f"{_describe(item)} is neither text nor a message or completion of a known framework")
    return converted


def step_metadata(step: IntermediateStep) -> dict[str, Any]:
    """A step's metadata by name, extra fields included, values unconverted."""
    metadata = step.metadata
    if metadata is None or isinstance(metadata, dict):
        return metadata or {}
    return {**metadata.__dict__, **(metadata.model_extra or {})}


def step_prompt(step: IntermediateStep) -> Any:
    """The unparsed prompt of an LLM step, None if the step has none."""
    chat_inputs = step_metadata(step).get("chat_inputs")
    return chat_inputs if chat_inputs is not None or step.data is None else step.data.input


def step_samples(
    step: IntermediateStep, prompt: Sequence[Message], formats: Sequence[StepFormat]
) -> list[SampledMessage]:
    """The candidates of an LLM_END. What was captured of each one overrides what its framework reported."""
    metadata = step_metadata(step)
    responses = metadata.get("chat_responses")
    if responses is None:
        responses = step.data.output if step.data is not None and step.data.output is not None else []
    samples = parse_samples(responses, prompt, formats)
    for position, captured in enumerate((metadata.get("choices") or [metadata])[: len(samples)]):
        values = {name: plain(captured.get(name)) for name in _CAPTURED}
        values["logprobs"] = parse_logprobs(values["logprobs"])
        known = {name: value for name, value in values.items() if value is not None}
        samples[position] = samples[position]._replace(**known)
    return samples


def sampled_call(step: IntermediateStep, sample: SampledMessage, prompt: Sequence[Message] = ()) -> ModelCall:
    """The model call of an LLM_END, as far as it is known."""
    metadata = step_metadata(step)
    return ModelCall(
        index=0,
        model=metadata.get("model") or step.name or "",
        messages=[*prompt],
        llm=metadata.get("llm"),
        tools=plain(metadata.get("tools_schema")),
        message=sample.message,
        prompt_token_ids=sample.prompt_token_ids,
        token_ids=sample.token_ids,
        logprobs=sample.logprobs,
        finish_reason=sample.finish_reason,
        policy_version=sample.policy_version,
        functions=(step.function_ancestry.function_name,),
    )


def assistant_message(message: Message, call: ModelCall | None, tokens: list[str] | None = None) -> Message:
    """The message with its `logprobs` (see `call_logprobs`), and `token_ids` and `finish_reason` if known."""
    sampling = {} if call is None else {"token_ids": call.token_ids, "finish_reason": call.finish_reason}
    known = {name: value for name, value in sampling.items() if value is not None}
    return {**message, "logprobs": call_logprobs(call, tokens), **known}


class StepParser(Protocol):
    """A framework's `parse_to_openai_message`."""

    def __call__(self, step: Any, previous_message: Message | None = None, **kwargs: Any) -> Message: ...


def step_parser(*formats: StepFormat) -> StepParser:
    """The `parse_to_openai_message` of a framework."""

    def parse_to_openai_message(step: Any, previous_message: Message | None = None, **kwargs: Any) -> Message:
        """Returns the message that one step adds.

        LLM_START: the last message of the prompt. LLM_END: the completion with `logprobs` (those of an OpenAI choice,
        empty if unknown), and `finish_reason` and `token_ids` if known. TOOL_END: the tool's result, for the call in
        `previous_message` if the tool's output does not name one. Raises TrajectoryError, naming the step, if it has no
        message or cannot be parsed.
        """
        step, before = parse_step(step), [] if previous_message is None else [previous_message]
        with step_errors(step):
            match step.event_type:
                case IntermediateStepType.LLM_START if prompt := parse_prompt(step_prompt(step), formats):
                    return prompt[-1]
                case IntermediateStepType.LLM_END if samples := step_samples(step, before, formats):
                    sample = samples[0]
                    return assistant_message(sample.message, sampled_call(step, sample), sample.tokens)
                case IntermediateStepType.TOOL_END:
                    return _tool_message(step, before, formats)
            raise TrajectoryError("no message in it; LLM_START, LLM_END and TOOL_END steps have one")

    return parse_to_openai_message


def _tool_message(step: IntermediateStep, before: Sequence[Message], formats: Sequence[StepFormat]) -> Message:
    output = step_metadata(step).get("tool_outputs")
    if output is None and step.data is not None:
        output = step.data.output
    output = plain(output)
    content = output if isinstance(output, str) else to_json(output)
    parsed = [m for f in formats for m in f.parse_messages(output, before) or ()] if isinstance(output, dict) else []
    message = next((m for m in parsed if m["role"] == "tool"), {"role": "tool", "content": content})
    if "tool_call_id" in message:
        return message
    calls = [call for earlier in before for call in earlier.get("tool_calls") or ()]
    calls = [call for call in calls if call["function"]["name"] == step.name] or calls
    if len(calls) != 1:
        raise TrajectoryError(f"ambiguous tool call: previous_message has {len(calls)} candidates, expected one")
    return {**message, "tool_call_id": calls[0]["id"], "name": calls[0]["function"]["name"]}


def parse_step(step: Any) -> IntermediateStep:
    """A step from a live step, its JSON, or its payload alone."""
    if isinstance(step, IntermediateStep):
        return step
    if isinstance(step, IntermediateStepPayload):
        return IntermediateStep(payload=step)
    try:
        return IntermediateStep.model_validate(step)
    except ValidationError as error:
        raise TrajectoryError(f"{_describe(step)} is not an intermediate step: {error.errors()[0]['msg']}") from error


@contextmanager
def step_errors(step: IntermediateStep) -> Iterator[None]:
    """Adds the step to every TrajectoryError, and raises one for a payload of an unexpected shape."""
    where = f"step {step.UUID} ({step.event_type})"
    try:
        yield
    except TrajectoryError as error:
        raise TrajectoryError(f"{where}: {error}") from error
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # a missing field, or one of another type
        raise TrajectoryError(f"{where}: unexpected payload for its framework: {error!r}") from error


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def openai_finish_reason(reason: Any) -> str | None:
    return None if reason is None else _FINISH_REASONS.get(str(reason).lower(), str(reason).lower())


def parse_logprobs(logprobs: Any) -> list[float] | None:
    """The logprobs of the sampled tokens, from a list of numbers or from OpenAI's `logprobs` object."""
    entries = logprobs.get("content") if isinstance(logprobs, dict) else logprobs
    if entries is None:
        return None
    try:
        return [float(entry["logprob"] if isinstance(entry, dict) else entry) for entry in entries]
    except (KeyError, TypeError, ValueError):
        raise TrajectoryError(f"logprobs {_describe(logprobs)} are neither numbers nor OpenAI's") from None


def sampled_message(message: Message, finish_reason: Any, logprobs: Any) -> SampledMessage:
    """`logprobs` is a list of numbers or OpenAI's object, whose tokens may be written as `token_id:123`."""
    entries = logprobs.get("content") if isinstance(logprobs, dict) else None
    tokens = [str(entry.get("token", "")) for entry in entries or ()]
    return SampledMessage(
        message,
        openai_finish_reason(finish_reason),
        parse_logprobs(logprobs),
        parse_token_ids(tokens),
        tokens=tokens or None,
    )


def tool_call(name: Any, arguments: Any, call_id: Any) -> Message:
    """A tool call whose arguments are JSON text; text is passed through unchanged, as the model wrote it."""
    text = arguments if isinstance(arguments, str) else to_json(arguments or {})
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def raw_tool_calls(fields: dict[str, Any]) -> list[Message]:
    """The tool calls of a message of the OpenAI API."""
    raw = fields.get("tool_calls") or ()
    return [tool_call(call["function"]["name"], call["function"]["arguments"], call.get("id")) for call in raw]


def with_call_ids(calls: list[Message], message_index: int) -> list[Message]:
    """Gives calls without an id one made of their position, stable across the prompts that repeat them."""
    return [{**call, "id": call["id"] or f"call_{message_index}_{k}"} for k, call in enumerate(calls)]


def message_content(parts: list[Message], *, join_text: bool = False) -> str | list[Message] | None:
    """Text if there is a single text part (any number with `join_text`), None without parts, else the parts."""
    texts = [part["text"] for part in parts if part["type"] == "text"]
    if len(texts) == len(parts) and (join_text or len(parts) == 1):
        return "".join(texts) if texts else None
    return parts or None


def media_part(mime: str, data: str | None, url: str | None = None, **extra: Any) -> Message:
    """A content part with base64 data, or with a URL or file id."""
    kind, _, subtype = mime.partition("/")
    encoded = (data or "").translate(_STANDARD_BASE64)
    if kind == "audio" and url is None:
        return {"type": "input_audio", "input_audio": {"data": encoded, "format": subtype}}
    target = f"data:{mime};base64,{encoded}" if url is None else url
    if kind in ("image", "video"):
        return {"type": f"{kind}_url", f"{kind}_url": {"url": target, **extra}}
    return {"type": "file", "file": {"file_data" if url is None else "file_id": target, **extra}}


def _openai_messages(item: Any, before: Sequence[Message]) -> list[Message] | None:
    if isinstance(item, str):
        return [{"role": "user", "content": item}]
    if not isinstance(item, dict) or item.get("role") not in _ROLES or _CONTENT.isdisjoint(item):
        return None
    return [{key: value for key, value in item.items() if value is not None or key == "content"}]


def _openai_samples(item: Any, before: Sequence[Message]) -> list[SampledMessage] | None:
    if isinstance(item, str):
        return [SampledMessage({"role": "assistant", "content": item})]
    if not isinstance(item, dict):
        return None
    if isinstance(choices := item.get("choices"), list):  # a complete response
        return parse_samples(choices, before, (OPENAI,))
    choice = item if "message" in item else {"message": item}
    messages = _openai_messages(choice["message"], before)
    if not messages or messages[0]["role"] != "assistant":
        return None
    return [sampled_message(messages[0], choice.get("finish_reason"), choice.get("logprobs"))]


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 200 else text[:200] + '...'}"


OPENAI = StepFormat(_openai_messages, _openai_samples)

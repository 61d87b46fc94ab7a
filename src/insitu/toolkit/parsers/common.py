"""What the parsers share: how a step's payload is read, whatever the framework, and the dialect that OpenAI speaks.

Live objects are read in their JSON form, so a step means the same before and after it has been written down.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from pydantic import ValidationError

from insitu.errors import TrajectoryError
from insitu.evaluation.episode_protocol import plain
from insitu.schemas.steps import IntermediateStep, IntermediateStepPayload, IntermediateStepType

Message = dict[str, Any]

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_CONTENT = {"content", "tool_calls", "function_call", "refusal", "audio"}
_STANDARD_BASE64 = str.maketrans("-_", "+/")
_FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    "safety": "content_filter",
    "recitation": "content_filter",
    "blocklist": "content_filter",
    "prohibited_content": "content_filter",
    "spii": "content_filter",
    "image_safety": "content_filter",
}
"""What others call the reasons of OpenAI; those that it has no word for keep their own."""


class Answer(NamedTuple):
    """An assistant's message and how it was sampled: `logprobs` and `token_ids` have one entry for each token."""

    message: Message
    finish_reason: str | None = None
    logprobs: list[float] | None = None
    token_ids: list[int] | None = None


class Dialect(NamedTuple):
    """How one framework spells a conversation. Both functions take a JSON value, and the messages that stand before
    it, and return None for what is not of this framework."""

    messages: Callable[[Any, Sequence[Message]], list[Message] | None]
    answers: Callable[[Any, Sequence[Message]], list[Answer] | None]


def read_prompt(value: Any, dialects: Sequence[Dialect]) -> list[Message]:
    """The messages of a prompt, given as a list of messages, as a request, or as text."""
    prompt: list[Message] = []
    for item in items_of(value):
        found = next((m for d in dialects if (m := d.messages(item, prompt)) is not None), None)
        if found is None:
            raise TrajectoryError(f"{_shape(item)} is no message of a known framework")
        prompt.extend(found)
    return prompt


def read_answers(value: Any, prompt: Sequence[Message], dialects: Sequence[Dialect]) -> list[Answer]:
    """The candidates that were sampled for one prompt."""
    answers: list[Answer] = []
    for item in items_of(value):
        found = next((a for d in dialects if (a := d.answers(item, prompt)) is not None), None)
        if found is None:
            raise TrajectoryError(f"{_shape(item)} is no answer of a known framework")
        answers.extend(found)
    return answers


def items_of(value: Any) -> list[Any]:
    """The JSON of each item of a list, or of a single one. Objects that JSON only has a name for are refused."""
    items = value if isinstance(value, list | tuple) else [value]
    read = [plain(item) for item in items]
    for item, found in zip(items, read, strict=True):
        if isinstance(found, str) and not isinstance(item, str):
            raise TrajectoryError(f"{_shape(item)} is neither text nor a message or answer of a known framework")
    return read


def metadata_of(step: IntermediateStep) -> dict[str, Any]:
    """A step's metadata by name, extras included, with values as they are."""
    metadata = step.metadata
    if metadata is None or isinstance(metadata, dict):
        return metadata or {}
    return {**metadata.__dict__, **(metadata.model_extra or {})}


def prompt_of(step: IntermediateStep) -> Any:
    """What the model was asked, as the step has it; None if it does not say."""
    given = metadata_of(step).get("chat_inputs")
    return given if given is not None or step.data is None else step.data.input


def answers_of(step: IntermediateStep, prompt: Sequence[Message], dialects: Sequence[Dialect]) -> list[Answer]:
    """The answers of an LLM_END; what the wire told of the first of them counts more than what the framework says."""
    known = metadata_of(step)
    given = known.get("chat_responses")
    if given is None:
        given = step.data.output if step.data is not None and step.data.output is not None else []
    answers = read_answers(given, prompt, dialects)
    if answers:
        told, first = {name: plain(known.get(name)) for name in Answer._fields[1:]}, answers[0]
        told["logprobs"] = logprob_values(told["logprobs"])
        answers[0] = first._replace(**{name: value for name, value in told.items() if value is not None})
    return answers


def message_of_answer(answer: Answer) -> Message:
    """An assistant's message with how it was sampled beside it; `logprobs` is empty where it is not known."""
    others = {"token_ids": answer.token_ids, "finish_reason": answer.finish_reason}
    given = {name: value for name, value in others.items() if value is not None}
    return {**answer.message, "logprobs": answer.logprobs or [], **given}


def message_of_step(given: Any, previous: Message | None, dialects: Sequence[Dialect]) -> Message:
    """The message that one step adds; TrajectoryError if it adds none.

    LLM_START: the last message of the prompt. LLM_END: the answer. TOOL_END: the tool's message, which answers the
    call in `previous` where the tool's output does not name it.
    """
    step, before = as_step(given), [] if previous is None else [previous]
    with naming(step):
        match step.event_type:
            case IntermediateStepType.LLM_START if prompt := read_prompt(prompt_of(step), dialects):
                return prompt[-1]
            case IntermediateStepType.LLM_END if answers := answers_of(step, before, dialects):
                return message_of_answer(answers[0])
            case IntermediateStepType.TOOL_END:
                return _tool_message(step, before, dialects)
        raise TrajectoryError("it holds no message; those of LLM_START, LLM_END and TOOL_END do")


def _tool_message(step: IntermediateStep, before: Sequence[Message], dialects: Sequence[Dialect]) -> Message:
    output = metadata_of(step).get("tool_outputs")
    if output is None and step.data is not None:
        output = step.data.output
    output = plain(output)
    content = output if isinstance(output, str) else json_text(output)
    read = [m for d in dialects for m in d.messages(output, before) or ()] if isinstance(output, dict) else []
    said = next((message for message in read if message["role"] == "tool"), {"role": "tool", "content": content})
    if "tool_call_id" in said:
        return said
    asked = [call for message in before for call in message.get("tool_calls") or ()]
    asked = [call for call in asked if call["function"]["name"] == step.name] or asked
    if len(asked) != 1:
        raise TrajectoryError(f"which call does it answer? previous_message holds {len(asked)} that it may be")
    return {**said, "tool_call_id": asked[0]["id"], "name": asked[0]["function"]["name"]}


def as_step(given: Any) -> IntermediateStep:
    """A step as it is, of its JSON, or of its payload alone."""
    if isinstance(given, IntermediateStep):
        return given
    if isinstance(given, IntermediateStepPayload):
        return IntermediateStep(payload=given)
    try:
        return IntermediateStep.model_validate(given)
    except ValidationError as error:
        raise TrajectoryError(f"{_shape(given)} is no intermediate step: {error.errors()[0]['msg']}") from error


@contextmanager
def naming(step: IntermediateStep) -> Iterator[None]:
    """Says in every TrajectoryError which step it is about, and raises one for what lies in an unknown form there."""
    where = f"step {step.UUID} ({step.event_type})"
    try:
        yield
    except TrajectoryError as error:
        raise TrajectoryError(f"{where}: {error}") from error
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # a field lacks, or is of another type
        raise TrajectoryError(f"{where}: it does not have the form its framework gives it: {error!r}") from error


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def finish_reason(given: Any) -> str | None:
    """In OpenAI's words, where it has one."""
    return None if given is None else _FINISH_REASONS.get(str(given).lower(), str(given).lower())


def logprob_values(given: Any) -> list[float] | None:
    """The logprobs of the sampled tokens, from a list of numbers or from what OpenAI's dialect calls `logprobs`."""
    entries = given.get("content") if isinstance(given, dict) else given
    if entries is None:
        return None
    try:
        return [float(entry["logprob"] if isinstance(entry, dict) else entry) for entry in entries]
    except (KeyError, TypeError, ValueError):
        raise TrajectoryError(f"logprobs {_shape(given)} are neither numbers nor OpenAI's") from None


def token_ids_of(given: Any) -> list[int] | None:
    """The ids of the sampled tokens, where a server spells its tokens `token_id:123`."""
    entries = given.get("content") if isinstance(given, dict) else None
    spelt = [str(entry.get("token")).partition("token_id:") for entry in entries or ()]
    known = spelt and all(not before and number.isdecimal() for before, _, number in spelt)
    return [int(number) for _, _, number in spelt] if known else None


def tool_call(name: Any, arguments: Any, call_id: Any) -> Message:
    """`arguments` as JSON text: of a model's own text the text itself."""
    text = arguments if isinstance(arguments, str) else json_text(arguments or {})
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def numbered(calls: list[Message], place: int) -> list[Message]:
    """Calls without an id get one from their place in the dialogue, the same in each prompt that repeats them."""
    return [{**call, "id": call["id"] or f"call_{place}_{k}"} for k, call in enumerate(calls)]


def content_of(parts: list[Message], *, as_text: bool = False) -> str | list[Message] | None:
    """A message's content: text if it is only one part of text (with `as_text` any number), None if there is none."""
    texts = [part["text"] for part in parts if part["type"] == "text"]
    if len(texts) == len(parts) and (as_text or len(parts) == 1):
        return "".join(texts) if texts else None
    return parts or None


def media_part(mime: str, data: str | None, url: str | None = None, **others: Any) -> Message:
    """Data (base64) or an address as a part of a message's content."""
    kind, _, form = mime.partition("/")
    encoded = (data or "").translate(_STANDARD_BASE64)
    if kind == "audio" and url is None:
        return {"type": "input_audio", "input_audio": {"data": encoded, "format": form}}
    address = f"data:{mime};base64,{encoded}" if url is None else url
    if kind in ("image", "video"):
        return {"type": f"{kind}_url", f"{kind}_url": {"url": address, **others}}
    return {"type": "file", "file": {"file_data" if url is None else "file_id": address, **others}}


def _openai_messages(item: Any, before: Sequence[Message]) -> list[Message] | None:
    if isinstance(item, str):
        return [{"role": "user", "content": item}]
    if not isinstance(item, dict) or item.get("role") not in _ROLES or _CONTENT.isdisjoint(item):
        return None
    return [{key: value for key, value in item.items() if value is not None or key == "content"}]


def _openai_answers(item: Any, before: Sequence[Message]) -> list[Answer] | None:
    if isinstance(item, str):
        return [Answer({"role": "assistant", "content": item})]
    if not isinstance(item, dict):
        return None
    if isinstance(choices := item.get("choices"), list):  # a whole completion
        return read_answers(choices, before, (OPENAI,))
    choice = item if "message" in item else {"message": item}
    messages = _openai_messages(choice["message"], before)
    if not messages or messages[0]["role"] != "assistant":
        return None
    reason, logprobs = finish_reason(choice.get("finish_reason")), choice.get("logprobs")
    return [Answer(messages[0], reason, logprob_values(logprobs), token_ids_of(logprobs))]


def _shape(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 200 else text[:200] + '...'}"


OPENAI = Dialect(_openai_messages, _openai_answers)

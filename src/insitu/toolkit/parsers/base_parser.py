"""From the intermediate steps of an episode to OpenAI messages, whichever framework reported them.

A model call is an LLM_START and an LLM_END that share a UUID; what each framework puts there is told by the parsers
beside this one. A captured call carries `logprobs`, `token_ids`, `finish_reason`, `model` and `llm` in its LLM_END's
metadata, and these count more than what the framework knows. TOOL_ steps are not read: what the model was told of a
tool stands in the next prompt.
"""

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

from insitu.errors import TrajectoryError
from insitu.schemas.episodes import ModelCall
from insitu.schemas.steps import IntermediateStep, IntermediateStepType
from insitu.toolkit.parsers.adk_parser import ADK
from insitu.toolkit.parsers.common import (
    OPENAI,
    Answer,
    Message,
    answers_of,
    as_step,
    message_of_answer,
    metadata_of,
    naming,
    plain,
    prompt_of,
    read_prompt,
)
from insitu.toolkit.parsers.langchain_parser import LANGCHAIN
from insitu.toolkit.parsers.llama_index_parser import LLAMA_INDEX
from insitu.trajectories.conversations import Turn, conversations

logger = logging.getLogger(__name__)

DIALECTS = (LANGCHAIN, LLAMA_INDEX, ADK, OPENAI)


def parse_to_openai_messages(steps: Iterable[Any], **others: Any) -> list[Message]:
    """The main dialogue of an episode: that of the last model call that continues the first; [] without calls.

    `steps` are those of EvalInputItem.trajectory, or their JSON. Each message is as the model was sent it, or answered
    it: role, content (text or a list of parts), tool_calls, tool_call_id, name, reasoning_content. An assistant's has
    `logprobs` too, one number for each token sampled, and `finish_reason` and `token_ids` where they are known; its
    logprobs are empty if they are unknown, or if no call of this episode gave this answer to what stands before it.

    TrajectoryError names the step that cannot be read.
    """
    return next(iter(parse_to_dialogues(steps)), [])


def parse_to_dialogues(steps: Iterable[Any]) -> list[list[Message]]:
    """All dialogues of an episode, the main one first, in the form of `parse_to_openai_messages`.

    The logprobs of each answer stand in exactly one of them.
    """
    calls = calls_of(steps)
    without = [call for call in calls if call.message is None]
    if without:
        reasons = ", ".join(sorted({str(call.error) for call in without}))
        logger.warning(
            "%d of %d model calls have no answer and are in no dialogue: %s", len(without), len(calls), reasons
        )
    return [[_message(turn) for turn in turns] for turns in conversations(calls)]


def _message(turn: Turn) -> Message:
    message, call = turn
    if message.get("role") != "assistant":
        return message
    if call is None:
        return message_of_answer(Answer(message))
    return message_of_answer(Answer(message, call.finish_reason, call.logprobs, call.token_ids))


class _Steps(NamedTuple):
    """A model call as far as it is reported."""

    position: int
    start: IntermediateStep | None
    end: IntermediateStep | None = None

    @property
    def first(self) -> IntermediateStep:
        step = self.start or self.end
        assert step is not None
        return step


def calls_of(steps: Iterable[Any]) -> list[ModelCall]:
    """The model calls that steps report, in the order they began; `index` is the place in this list.

    Several candidates for one prompt are a call each. A call without an answer has `message` None and says why in
    `error`. TrajectoryError names the step that cannot be read.
    """
    calls: list[ModelCall] = []
    for pair in sorted(_pairs(steps), key=lambda pair: (pair.first.event_timestamp, pair.position)):
        calls.extend(_calls(pair, len(calls)))
    return calls


def _pairs(steps: Iterable[Any]) -> list[_Steps]:
    """Each LLM_START with the next LLM_END of its UUID."""
    found: list[_Steps] = []
    opened: dict[str, list[int]] = {}
    for position, given in enumerate(steps):
        step = as_step(given)
        if step.event_type is IntermediateStepType.LLM_START:
            opened.setdefault(step.UUID, []).append(len(found))
            found.append(_Steps(position, step))
        elif step.event_type is IntermediateStepType.LLM_END:
            if places := opened.get(step.UUID):
                place = places.pop(0)
                found[place] = found[place]._replace(end=step)
            else:
                found.append(_Steps(position, None, step))
    return found


def _calls(pair: _Steps, index: int) -> list[ModelCall]:
    answers, known, error = [], {}, "its LLM_END is missing"
    prompt = _prompt(pair)
    if pair.end is not None:
        with naming(pair.end):
            known = metadata_of(pair.end)
            answers = answers_of(pair.end, prompt, DIALECTS)
            error = str(known.get("error") or "it ended without an answer")
    seen = [metadata_of(step) for step in (pair.end, pair.start) if step is not None]
    tools = next((plain(m["tools_schema"]) for m in seen if m.get("tools_schema") is not None), None)

    def call(place: int, answer: Answer | None) -> ModelCall:
        return ModelCall(
            index=index + place,
            model=known.get("model") or pair.first.name or "",
            messages=prompt,
            llm=known.get("llm"),
            tools=tools,
            message=answer and answer.message,
            choice=place,
            token_ids=answer and answer.token_ids,
            logprobs=answer and answer.logprobs,
            finish_reason=answer and answer.finish_reason,
            functions=(pair.first.function_ancestry.function_name,),
            started=pair.first.event_timestamp,
            ended=(pair.end or pair.first).event_timestamp,
            error=error if answer is None else None,
        )

    return [call(place, answer) for place, answer in enumerate(answers)] or [call(0, None)]


def _prompt(pair: _Steps) -> list[Message]:
    for step in (pair.start, pair.end):
        if step is not None and (told := prompt_of(step)) is not None:
            with naming(step):
                return read_prompt(told, DIALECTS)
    with naming(pair.end or pair.first):
        raise TrajectoryError("what the model was asked is neither in it nor in an LLM_START of its UUID")

"""Converts the intermediate steps of an episode to OpenAI messages, for any framework.

An LLM_START and an LLM_END with the same UUID are one model call; the parsers of the frameworks describe the payloads.
A captured call has `logprobs`, `token_ids`, `prompt_token_ids`, `finish_reason`, `model`, `llm` and `policy_version` in
the metadata of its LLM_END, which override what the framework reports. TOOL_ steps are skipped: the next prompt has the
tool's result as the model saw it.
"""

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

from insitu.collect.conversations import Turn, conversations
from insitu.errors import TrajectoryError
from insitu.integrations.nat import parser_common as common
from insitu.integrations.nat.adk_parser import ADK
from insitu.integrations.nat.langchain_parser import LANGCHAIN
from insitu.integrations.nat.llama_index_parser import LLAMA_INDEX
from insitu.integrations.nat.parser_common import Completion, Message
from insitu.schemas.steps import IntermediateStep, IntermediateStepType
from insitu.wire.http_format import to_jsonable

logger = logging.getLogger(__name__)

FORMATS = (LANGCHAIN, LLAMA_INDEX, ADK, common.OPENAI)


def parse_to_openai_messages(steps: Iterable[Any], **kwargs: Any) -> list[Message]:
    """The main conversation of an episode: the last model call that continues the first one. Empty without calls.

    `steps` are those of `EvalInputItem.trajectory`, or their JSON. Messages have `role`, `content` (text or a list of
    parts), and `tool_calls`, `tool_call_id`, `name` and `reasoning_content` where set. Assistant messages also have
    `logprobs`, as `openai.types.chat.chat_completion.Choice` takes them, and `token_ids` and `finish_reason` if known.
    Their logprobs are empty if unknown, or if no call of this episode sampled this message after exactly the messages
    before it. An EpisodeItem with these logprobs can be trained by every trainer adapter.

    Raises TrajectoryError, naming the step, if a step cannot be parsed.
    """
    return next(iter(parse_to_conversations(steps)), [])


def parse_to_conversations(steps: Iterable[Any]) -> list[list[Message]]:
    """All conversations of an episode, the main one first, as in `parse_to_openai_messages`.

    The logprobs of a completion appear in exactly one of them.
    """
    calls = parse_calls(steps)
    unanswered = [call for call in calls if call.message is None]
    if unanswered:
        reasons = ", ".join(sorted({str(call.error) for call in unanswered}))
        logger.warning("skipped %d of %d model calls without a completion: %s", len(unanswered), len(calls), reasons)
    return [[_with_sampling(turn) for turn in turns] for turns in conversations(calls)]


def _with_sampling(turn: Turn) -> Message:
    return (
        common.assistant_message(turn.message, turn.call) if turn.message.get("role") == "assistant" else turn.message
    )


class _CallSteps(NamedTuple):
    """The steps of one model call. One of them may be missing."""

    position: int
    start: IntermediateStep | None
    end: IntermediateStep | None = None

    @property
    def first(self) -> IntermediateStep:
        step = self.start or self.end
        assert step is not None
        return step


def parse_calls(steps: Iterable[Any]) -> list[Completion]:
    """The model calls in the order they began. Several completions of one prompt are separate calls.

    A call without a completion has `message` None, and the reason in `error`. Raises TrajectoryError, naming the step,
    if a step cannot be parsed.
    """
    calls: list[Completion] = []
    for pair in sorted(_pair_steps(steps), key=lambda pair: (pair.first.event_timestamp, pair.position)):
        calls.extend(_pair_calls(pair, len(calls)))
    return calls


def _pair_steps(steps: Iterable[Any]) -> list[_CallSteps]:
    """Matches each LLM_START with the next LLM_END of its UUID."""
    pairs: list[_CallSteps] = []
    open_pairs: dict[str, list[int]] = {}
    for position, item in enumerate(steps):
        step = common.parse_step(item)
        if step.event_type is IntermediateStepType.LLM_START:
            open_pairs.setdefault(step.UUID, []).append(len(pairs))
            pairs.append(_CallSteps(position, step))
        elif step.event_type is IntermediateStepType.LLM_END:
            if indices := open_pairs.get(step.UUID):
                index = indices.pop(0)
                pairs[index] = pairs[index]._replace(end=step)
            else:
                pairs.append(_CallSteps(position, None, step))
    return pairs


def _pair_calls(pair: _CallSteps, index: int) -> list[Completion]:
    """A call per completion, with the completion; a single one without, if there is none."""
    completions: list[Completion] = []
    error, prompt = "its LLM_END is missing", _pair_prompt(pair)
    if pair.end is not None:
        with common.naming_step(pair.end):
            completions = common.step_completions(pair.end, prompt, FORMATS)
            error = str(common.step_metadata(pair.end).get("error") or "it ended without a completion")
    metadata = [common.step_metadata(step) for step in (pair.end, pair.start) if step is not None]
    if not completions:
        model, llm = metadata[0].get("model") or pair.first.name or "", metadata[0].get("llm")
        completions = [Completion(model=model, llm=llm, messages=prompt, error=error)]
    tools = next((to_jsonable(m["tools_schema"]) for m in metadata if m.get("tools_schema") is not None), None)
    for choice, call in enumerate(completions):
        call.index, call.choice, call.tools = index + choice, choice, tools
        call.functions = (pair.first.function_ancestry.function_name,)
        call.started, call.ended = pair.first.event_timestamp, (pair.end or pair.first).event_timestamp
    return completions


def _pair_prompt(pair: _CallSteps) -> list[Message]:
    for step in (pair.start, pair.end):
        if step is not None and (prompt := common.step_prompt(step)) is not None:
            with common.naming_step(step):
                return common.parse_prompt(prompt, FORMATS)
    with common.naming_step(pair.end or pair.first):
        raise TrajectoryError("no prompt in it, nor in an LLM_START of its UUID")

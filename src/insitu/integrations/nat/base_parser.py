"""Converts the intermediate steps of an episode to OpenAI messages, for any framework.

An LLM_START and an LLM_END with the same UUID are one model call; the parsers of the frameworks describe the payloads.
A captured call has `logprobs`, `token_ids`, `prompt_token_ids`, `finish_reason`, `model`, `llm` and `policy_version` in
the metadata of its LLM_END, which override what the framework reports. TOOL_ steps are skipped: the next prompt has the
tool's result as the model saw it.
"""

import logging
from collections.abc import Iterable
from typing import Any

from insitu.collect.conversations import Turn, conversations
from insitu.errors import TrajectoryError
from insitu.integrations.nat import parser_common as common
from insitu.integrations.nat.adk_parser import ADK
from insitu.integrations.nat.langchain_parser import LANGCHAIN
from insitu.integrations.nat.llama_index_parser import LLAMA_INDEX
from insitu.integrations.nat.parser_common import Completion, Message
from insitu.schemas.steps import IntermediateStep, IntermediateStepType
from insitu.wire.json_values import to_jsonable

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
    is_assistant = turn.message.get("role") == "assistant"
    return common.assistant_message(turn.message, turn.call) if is_assistant else turn.message


def parse_calls(steps: Iterable[Any]) -> list[Completion]:
    """The model calls in the order they began. Several completions of one prompt are separate calls.

    A call without a completion has `message` None, and the reason in `error`. Raises TrajectoryError, naming the step,
    if a step cannot be parsed.
    """
    calls: list[Completion] = []
    for pair in sorted(_pair_steps(steps), key=lambda pair: pair[0].event_timestamp):
        calls.extend(_pair_calls(pair, len(calls)))
    return calls


def _pair_steps(steps: Iterable[Any]) -> list[list[IntermediateStep]]:
    """Matches each LLM_START with the next LLM_END of its UUID. One of the two may be missing."""
    pairs: list[list[IntermediateStep]] = []
    unfinished: dict[str, list[list[IntermediateStep]]] = {}
    for item in steps:
        step = common.parse_step(item)
        if step.event_type is IntermediateStepType.LLM_END and unfinished.get(step.UUID):
            unfinished[step.UUID].pop(0).append(step)
        elif step.event_type in (IntermediateStepType.LLM_START, IntermediateStepType.LLM_END):
            pairs.append([step])
            if step.event_type is IntermediateStepType.LLM_START:
                unfinished.setdefault(step.UUID, []).append(pairs[-1])
    return pairs


def _pair_calls(pair: list[IntermediateStep], index: int) -> list[Completion]:
    """A call per completion, with the completion; a single one without, if there is none."""
    first, last = pair[0], pair[-1]
    completions: list[Completion] = []
    error, prompt = "its LLM_END is missing", _pair_prompt(pair)
    if last.event_type is IntermediateStepType.LLM_END:
        with common.naming_step(last):
            completions = common.step_completions(last, prompt, FORMATS)
            error = str(common.step_metadata(last).get("error") or "it ended without a completion")
    metadata = [common.step_metadata(step) for step in reversed(pair)]
    tools = next((to_jsonable(m["tools_schema"]) for m in metadata if m.get("tools_schema") is not None), None)
    if not completions:
        model, llm = metadata[0].get("model") or first.name or "", metadata[0].get("llm")
        completions = [Completion(model=model, llm=llm, messages=prompt, error=error)]
    for choice, call in enumerate(completions):
        call.index, call.choice, call.tools = index + choice, choice, tools
        call.functions = (first.function_ancestry.function_name,)
        call.started, call.ended = first.event_timestamp, last.event_timestamp
    return completions


def _pair_prompt(pair: list[IntermediateStep]) -> list[Message]:
    for step in pair:
        if (prompt := common.step_prompt(step)) is not None:
            with common.naming_step(step):
                return common.parse_prompt(prompt, FORMATS)
    with common.naming_step(pair[-1]):
        raise TrajectoryError("no prompt in it, nor in an LLM_START of its UUID")


parse_to_openai_message = common.step_parser(*FORMATS)
"""The message that one step of any framework adds."""

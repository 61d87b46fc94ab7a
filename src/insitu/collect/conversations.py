"""The conversations of an episode: chains of prompts that extend one another, each answer with its call.

Trajectories hold the main one, groups the trajectories of a row. Dialogues are conversations as messages for other
tools: what a trained model was shown, and what followed.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, NamedTuple

from insitu.advantages.credit import TrainedCalls
from insitu.schemas.episodes import GROUP_KEY, DropReason, Episode, EpisodeStatus, ModelCall
from insitu.schemas.finetuning import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryCollection, text_content
from insitu.schemas.groups import GroupRecord
from insitu.wire.connection import chat_entries
from insitu.wire.http_format import format_token_id

Messages = list[dict[str, Any]]
_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")
_OPENAI_KEYS = (*_KEYS, "refusal", "function_call")
_ROLES = {role.value: role for role in EpisodeItemRole} | {"developer": EpisodeItemRole.SYSTEM}


class Turn(NamedTuple):
    """A message of a conversation, and the call that sampled it if it was not changed afterwards."""

    message: dict[str, Any]
    call: ModelCall | None = None


def main_conversation(calls: Sequence[ModelCall]) -> list[EpisodeItem]:
    """The readable form of the conversation that extends the first call."""
    return [_item(turn) for turn in next(conversations(calls), [])]


def _item(turn: Turn) -> EpisodeItem:
    message, call = turn
    role = _ROLES.get(str(message.get("role")), EpisodeItemRole.OTHER)
    metadata = {key: value for key, value in message.items() if key not in ("role", "content")}
    if call is not None:
        metadata |= {"call": call.index, "finish_reason": call.finish_reason}
    logprobs = call_logprobs(call) if role is EpisodeItemRole.ASSISTANT else None
    return EpisodeItem(
        role=role, content=text_content(message.get("content")), logprobs=logprobs, metadata=metadata or None
    )


_CALL_FIELDS = (
    *("message", "model", "llm", "functions", "tools", "sampling", "finish_reason", "policy_version"),
    *("prompt_token_ids", "logprobs_temperature"),
)
"""Fields of a call that `call_logprobs` keeps beside its tokens."""


def call_logprobs(call: ModelCall | None, tokens: Iterable[str] | None = None) -> dict[str, Any]:
    """A message's `logprobs` as OpenAI's API returns them, with the call that sampled it; empty if they are unknown.

    The entries are those that the server sent if the call has them, with `token_ids` beside them if they are known.
    `tokens` are the texts of the sampled tokens, used if there are neither such entries nor ids.

        {"content": [{"token": "token_id:7", "logprob": -0.1, "bytes": None, "top_logprobs": []}], "refusal": None,
         "call": {"model": "policy", "prompt_token_ids": [1, 5, 9], "policy_version": 3, ...}}

    Components that build trajectories from messages pass the logprobs on, and with them the call
    (see `insitu.collect.recovery`).
    """
    if call is None or not call.logprobs:
        return {}
    fields = {name: value for name in _CALL_FIELDS if (value := getattr(call, name)) is not None}
    if call.sent_logprobs is not None:
        ids = {} if call.token_ids is None else {"token_ids": call.token_ids}
        return {"content": call.sent_logprobs, "refusal": None, **ids, "call": fields}
    texts = [""] * len(call.logprobs) if tokens is None else [*tokens]
    if call.token_ids is not None:
        texts = [*map(format_token_id, call.token_ids)]
    if len(texts) != len(call.logprobs):
        return {}
    return {"content": chat_entries(texts, call.logprobs), "refusal": None, "call": fields}


def conversations(calls: Sequence[ModelCall]) -> Iterator[list[Turn]]:
    """All conversations of an episode; the first is that of the last call that extends the first call.

    A conversation is the prompt and the completion of one call. An assistant message in the prompt was sampled by the
    call whose whole prompt precedes it and whose completion it repeats; any other is context. Every completion has its
    call in exactly one conversation: one that was edited before it was sent again (stripped thinking, a trimmed
    history), or never sent again, ends its own conversation. Calls without a completion are in none.
    """
    completed = [call for call in calls if call.message is not None]
    if not completed:
        return
    paths = _prefix_ids(completed)
    by_prompt: dict[int, list[int]] = {}
    for index, path in enumerate(paths):
        by_prompt.setdefault(path[-1], []).append(index)
    claimed: set[int] = set()

    def ending_with(end: int) -> list[Turn]:
        claimed.add(end)
        turns = []
        for message, before in zip(completed[end].messages, paths[end], strict=False):
            sampler = None
            if message.get("role") == "assistant":
                free = (k for k in by_prompt.get(before, ()) if k not in claimed)
                sampler = next((k for k in free if same_message(completed[k].message, message)), None)
            if sampler is None:
                turns.append(Turn(message))
            else:
                claimed.add(sampler)
                turns.append(_completion(completed[sampler]))
        return [*turns, _completion(completed[end])]

    yield ending_with(_end_of_main(paths))
    others = {}
    for end in sorted(range(len(completed)), key=lambda k: -len(paths[k])):  # what repeats a completion is longer
        if end not in claimed:
            others[end] = ending_with(end)
    for end in sorted(others):
        yield others[end]


def _prefix_ids(calls: Sequence[ModelCall]) -> list[list[int]]:
    """For each prompt an id per prefix, the empty one first: ids are equal if and only if the prefixes are."""
    ids: dict[tuple[int, str], int] = {}
    paths = []
    for call in calls:
        path = [0]
        for message in call.messages:
            longer = (path[-1], json.dumps(message, sort_keys=True))
            path.append(ids.setdefault(longer, len(ids) + 1))
        paths.append(path)
    return paths


def _end_of_main(paths: Sequence[list[int]]) -> int:
    end = 0
    for index, path in enumerate(paths):
        n = len(paths[end])
        if len(path) > n and path[n - 1] == paths[end][-1]:
            end = index
    return end


def _completion(call: ModelCall) -> Turn:
    """Drops the fields that a server sends as null."""
    message = call.message or {}
    return Turn({key: value for key, value in message.items() if value is not None or key == "content"}, call)


def same_message(one: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    """Whether two messages differ at most in how frameworks rewrite a completion for the next prompt."""
    return _normalized(one) == _normalized(other)


def _normalized(message: dict[str, Any] | None) -> tuple[Any, ...]:
    """A message in a form that does not depend on how frameworks rewrite it between completion and next prompt."""
    message = message or {}
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        content = "".join(str(p.get("text")) for p in content)
    tool_calls = [_normalized_tool_call(call) for call in message.get("tool_calls") or ()]
    others = (message.get(key) for key in ("function_call", "refusal", "audio"))
    return (content or "", tool_calls, message.get("reasoning_content") or message.get("reasoning"), *others)


def _normalized_tool_call(call: dict[str, Any]) -> tuple[Any, ...]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    with suppress(json.JSONDecodeError):  # a model may write anything
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return call.get("id"), function.get("name"), arguments


def scored_group(
    episodes: Sequence[Episode], trained: TrainedCalls, *, rewarded: bool = True, shared: str | None = None
) -> GroupRecord:
    """The group of a row's episodes. Each has a trajectory, or is counted in `dropped` by its reason.

    Without rewards there are no trajectories, and only failed episodes are counted. `shared` is the id of a group that
    may have several rows.
    """
    row_id = shared or episodes[0].key.row_id
    group = GroupRecord(row_id, sorted(episodes, key=attrgetter("key.member")), [], Counter())
    about = {GROUP_KEY: shared} if shared is not None else {}
    for episode in group.episodes:
        trajectory = _trajectory(episode, trained, about) if rewarded and episode.reward is not None else None
        if trajectory is not None:
            group.trajectories.append(trajectory)
        elif rewarded or episode.outcome is not EpisodeStatus.OK:
            group.dropped[str(episode.reason or DropReason.NO_SCORE)] += 1
    return group


def _trajectory(episode: Episode, trained: TrainedCalls, about: Mapping[str, str]) -> Trajectory | None:
    """An episode with a reward as a trajectory; None, with the reason set, if it has no trained call.

    `about` is added to its metadata.
    """
    positions = trained.of(episode)
    if not positions:
        if episode.reason is None:
            episode.reason = DropReason.NO_TARGET_CALLS if episode.calls else DropReason.NO_CALLS
            episode.error = trained.why_none(episode.calls)
        return None
    steps = episode.step_rewards
    if steps is not None and len(steps) == len(episode.calls):
        steps = [steps[index] for index in positions]
    return Trajectory.model_construct(
        episode=main_conversation(episode.calls),
        reward=episode.reward,
        shaped_rewards=steps,
        metadata={
            "row_id": episode.key.row_id,
            **about,
            "generation": episode.key.generation,
            "rewarded_functions": episode.rewarded_functions,
            "scores": episode.scores,
        },
        id=episode.key.text(),
        calls=episode.calls,
        trained_calls=positions,
        rows=[],
    )


def collection_of(groups: Iterable[GroupRecord], run_id: str, epoch: int) -> TrajectoryCollection:
    """The trajectories of an epoch, ordered by row: the order of completion differs between runs."""
    ordered = sorted(groups, key=attrgetter("row_id"))
    rewards = [trajectory.reward for group in ordered for trajectory in group.trajectories]
    return TrajectoryCollection(
        trajectories=[group.trajectories for group in ordered if group.trajectories],
        run_id=run_id,
        epoch=epoch,
        dropped=dict(sum((group.dropped for group in ordered), Counter[str]())),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
    )


class Dialogue(NamedTuple):
    """A conversation with trained calls: `prompt` is that of the first, `completion` the rest of the conversation.

    `trained` are the positions, in both together, of messages that trained calls have sampled.
    """

    prompt: Messages
    completion: Messages
    trained: list[int]
    calls: list[ModelCall]

    @property
    def messages(self) -> Messages:
        return self.prompt + self.completion

    @property
    def tools(self) -> Messages | None:
        """The tools of the last call."""
        return self.calls[-1].tools


def dialogues(calls: Sequence[ModelCall], trained: Collection[int]) -> list[Dialogue]:
    """The conversations of an episode in which a call at one of the positions `trained` sampled a message."""
    targets = {id(calls[position]) for position in trained}
    parts = []
    for turns in conversations(calls):
        sampled = [k for k, turn in enumerate(turns) if turn.call is not None and id(turn.call) in targets]
        if sampled:
            messages = [turn.message for turn in turns]
            own = [turn.call for turn in turns if turn.call is not None]
            parts.append(Dialogue(messages[: sampled[0]], messages[sampled[0] :], sampled, own))
    return parts


def is_text(messages: Iterable[Mapping[str, Any]]) -> bool:
    """Whether no message has images or other parts that are not text."""
    parts = (part for message in messages if isinstance(message.get("content"), list) for part in message["content"])
    return all(isinstance(part, dict) and part.get("type") == "text" for part in parts)


def template_messages(messages: Iterable[Mapping[str, Any]]) -> Messages:
    """Messages for a chat template, as TRL expects them: contents as text, arguments of tools as objects."""
    return [_template_message(message) for message in messages]


def _template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: message[key] for key in _KEYS if message.get(key) is not None}
    kept["content"] = text_content(message.get("content"))
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        kept["reasoning_content"] = reasoning
    if "tool_calls" in kept:
        kept["tool_calls"] = [_template_call(call) for call in kept["tool_calls"]]
    return kept


def _template_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    with suppress(json.JSONDecodeError, TypeError):  # a model may write anything
        function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}


def openai_messages(dialogue: Dialogue) -> Messages:
    """Messages for OpenAI's finetuning API, which trains assistant messages unless their weight is 0."""
    messages = []
    for position, message in enumerate(dialogue.messages):
        kept = {key: message[key] for key in _OPENAI_KEYS if message.get(key) is not None}
        if message.get("role") == "assistant" and position not in dialogue.trained:
            kept["weight"] = 0
        messages.append(kept)
    return messages

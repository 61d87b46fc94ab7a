"""Pages of a group and of an episode: what was said, sampled and trained."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import orjson

from insitu.collect.conversations import Turn, conversations
from insitu.errors import RequestRefused
from insitu.runs.episodes import RecordedEpisode, RecordedGroup, RecordedGroups, load_decoder, token_texts
from insitu.runs.index import RunIndex
from insitu.schemas.episodes import ModelCall

_OF_CALL = (
    *("index", "llm", "model", "functions", "policy_version", "finish_reason", "choice", "usage", "error", "sampling"),
)
Decode = Callable[[Sequence[int]], str]
Dialogue = list[dict[str, Any]]
"""Messages, each with its `call`."""


class EpisodePages:
    """The groups and episodes of a run."""

    def __init__(self, index: RunIndex) -> None:
        self._groups = RecordedGroups(index)
        self._decoder = lru_cache(1)(_decoder)

    def group(self, epoch: int, row_id: str) -> dict[str, Any]:
        """The answer of `/api/group`. Raises RequestRefused (404)."""
        group = self._groups.read(self._groups.find(epoch, row_id))
        attempt = group.problems.attempt
        dialogues: list[Dialogue] = [attempt(partial(_dialogue, each), []) for each in group.episodes]
        neighbours = [self._groups.neighbour(group.row, step) for step in (-1, 1)]
        previous, following = [row and {"epoch": row["epoch"], "row_id": row["row_id"]} for row in neighbours]
        return {
            "epoch": epoch,
            "row_id": row_id,
            "row": group.about_row,
            "pairs": attempt(lambda: _pairs(group), []),
            "dropped": orjson.loads(group.row["dropped"]),
            "episodes": [
                {**each.record, **attempt(partial(_training, each), {}), "dialogue": dialogue}
                for each, dialogue in zip(group.episodes, dialogues, strict=True)
            ],
            "epochs": [
                {"epoch": row["epoch"], "rewards": orjson.loads(row["rewards"]), "mean": row["mean"]}
                for row in self._groups.same_row(row_id)
            ],
            "previous": previous,
            "next": following,
            "problems": group.problems,
        }

    def episode(self, name: str) -> dict[str, Any]:
        """The answer of `/api/episode`. Raises RequestRefused (404)."""
        group = self._groups.read(self._groups.find_by_episode(name))
        names = [each.record["episode"] for each in group.episodes]
        if name not in names:
            raise self._groups.unknown_episode(name, names, group.problems)
        place = names.index(name)
        episode = group.episodes[place]
        attempt, decode = group.problems.attempt, self._decode()
        policies: set[str] = attempt(lambda: {*((group.settings.get("targets") or {}).get("llms") or ())}, set())
        found: list[Dialogue] = attempt(lambda: [[*_messages(turns)] for turns in conversations(episode.calls)], [])
        calls: list[dict[str, Any]] = attempt(lambda: [*_calls(episode, policies, decode)], [])
        trained: dict[str, Any] = attempt(partial(_training, episode), {})
        return {
            "episode": name,
            "record": episode.record,
            **trained,
            "training": attempt(lambda: episode.training_summary, None),
            "row": group.about_row,
            "pairs": attempt(lambda: _pairs(group, name), []),
            "rescores": list(episode.rescores),
            "group": {
                "episodes": [
                    {
                        "episode": each.record["episode"],
                        "reward": each.record.get("reward"),
                        "status": attempt(partial(getattr, each, "status"), None),
                    }
                    for each in group.episodes
                ],
                "dropped": orjson.loads(group.row["dropped"]),
            },
            "conversations": found,
            "calls": calls,
            **self._links(group.row, names, place, episode.record.get("generation")),
            "problems": group.problems,
        }

    def request(self, name: str, index: int) -> dict[str, Any]:
        """The answer of `/api/request`. Raises RequestRefused (404)."""
        group = self._groups.read(self._groups.find_by_episode(name))
        calls = [c for each in group.episodes if each.record["episode"] == name for c in each.calls if c.index == index]
        if not calls:
            problem = f"episode {name!r:.200} has no call {index}"
            raise RequestRefused(problem, status=404, param="call", code="unknown_call")
        tools = {"tools": calls[0].tools} if calls[0].tools else {}
        return {"model": calls[0].model, "messages": calls[0].messages, **tools, **(calls[0].sampling or {})}

    def _links(self, row: Any, names: Sequence[str], place: int, generation: int | None) -> dict[str, str | None]:
        """Episodes to go to from one. Before the first of a group is the last of the group before it."""
        before, after = (self._groups.neighbour(row, step) for step in (-1, 1))
        epochs = self._groups.same_row(row["row_id"])
        here = next((number for number, each in enumerate(epochs) if each["epoch"] == row["epoch"]), 0)
        return {
            "previous": names[place - 1] if place else self._member(before, None, -1),
            "next": names[place + 1] if place + 1 < len(names) else self._member(after, None, 0),
            "previous_group": self._member(before, generation),
            "next_group": self._member(after, generation),
            "previous_epoch": self._member(epochs[here - 1] if here else None, generation),
            "next_epoch": self._member(epochs[here + 1] if here + 1 < len(epochs) else None, generation),
        }

    def _member(self, row: Any, generation: int | None, place: int = 0) -> str | None:
        """An episode of a group: the one of a generation if there is one, or else that at a place."""
        if row is None or not (members := self._groups.members(row)):
            return None
        same = (str(each["episode"]) for each in members if each["generation"] == generation)
        return next(same, str(members[place]["episode"]))

    def _decode(self) -> Decode | None:
        """The decoder of the run's tokenizer; None if there is none that can be used."""
        folder = self._groups.files.tokenizer()
        return self._decoder(folder) if folder is not None else None


def _decoder(folder: Path) -> Decode | None:
    try:
        return load_decoder(folder)
    except Exception:  # tokenizers is not installed; a file that it cannot read raises any exception
        return None


def _training(episode: RecordedEpisode) -> dict[str, Any]:
    """How an episode was trained; `advantage` is the mean over its trained tokens."""
    known = {index: advantage for index, advantage in episode.advantages.items() if advantage is not None}
    weights = [(known[call.index], len(call.token_ids or ())) for call in episode.calls if call.index in known]
    tokens = sum(count for _, count in weights)
    status = episode.status
    return {
        "status": status,
        "reason": episode.reason,
        "dropped": episode.reason if status == "dropped" else None,
        "advantage": sum(advantage * count for advantage, count in weights) / tokens if tokens else None,
        "sides": episode.sides,
    }


def _pairs(group: RecordedGroup, name: str | None = None) -> list[Any]:
    """The preference pairs of a group, or of one of its episodes, with the completions of both sides."""
    calls = {each.record["episode"]: {call.index: call for call in each.calls} for each in group.episodes}
    chosen = [(e.record["episode"], side) for e in group.episodes for side in e.sides if side["side"] == "chosen"]
    return [
        {
            **{key: side[key] for key in ("pair", "margin", "dropped")},
            "chosen": _side(own, side["calls"], side["score"], calls),
            "rejected": _side(side["other"], side["other_calls"], side["other_score"], calls),
        }
        for own, side in chosen
        if name in (None, own, side["other"])
    ]


def _side(
    episode: str, indices: Sequence[int], score: float, calls: Mapping[str, Mapping[int, ModelCall]]
) -> dict[str, Any]:
    messages = [calls.get(episode, {})[index].message for index in indices]
    return {"episode": episode, "calls": indices, "score": score, "messages": messages}


def _messages(turns: Iterable[Turn]) -> Iterator[dict[str, Any]]:
    return ({**turn.message, "call": None if turn.call is None else turn.call.index} for turn in turns)


def _dialogue(episode: RecordedEpisode) -> Dialogue:
    """The messages of all conversations, each without those it has in common with the one before it."""
    dialogue: Dialogue = []
    before: Dialogue = []
    for number, turns in enumerate(conversations(episode.calls), 1):
        messages = [turn.message for turn in turns]
        common = [*takewhile(lambda pair: pair[0] == pair[1], zip(before, messages, strict=False))]
        dialogue += ({**message, "conversation": number} for message in _messages(turns[len(common) :]))
        before = messages
    return dialogue


def _is_policy(call: ModelCall, episode: RecordedEpisode, policies: set[str]) -> bool:
    """Whether the run's tokenizer is that of the call's model."""
    return call.policy_version is not None or call.llm in policies or call.index in episode.advantages


def _calls(episode: RecordedEpisode, policies: set[str], decode: Decode | None) -> Iterator[dict[str, Any]]:
    start = min((call.started for call in episode.calls), default=0.0)
    sides = episode.sides_by_call
    trained = episode.advantages.keys() | sides.keys()
    for position, call in enumerate(episode.calls):
        ids, logprobs, texts = call.token_ids or [], call.logprobs or [], list[str]()
        if decode is not None and _is_policy(call, episode, policies):
            texts = token_texts(decode, ids)
        unknown = [None] * len(ids)
        tokens = zip(texts or unknown, ids, logprobs if len(logprobs) == len(ids) else unknown, strict=True)
        yield {
            **{name: getattr(call, name) for name in _OF_CALL},
            "started": call.started - start,
            "ended": call.ended - start,
            "prompt_tokens": None if call.prompt_token_ids is None else len(call.prompt_token_ids),
            "sampled_tokens": None if call.token_ids is None else len(ids),
            "trained": call.index in trained,
            "sides": sorted(sides.get(call.index, ())),
            "advantage": episode.advantages.get(call.index),
            "step_reward": episode.step_reward(position),
            "tools": [(tool.get("function") or {}).get("name") for tool in call.tools or ()],
            "tokens": [{"text": text, "id": token, "logprob": logprob} for text, token, logprob in tokens],
        }

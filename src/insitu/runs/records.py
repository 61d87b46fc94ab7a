"""Episodes and model calls as records of a run's files, and back."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from insitu.schemas.episodes import CandidateStep, DropReason, Episode, EpisodeKey, ModelCall, Outcome


def episode_record(episode: Episode) -> dict[str, Any]:
    """The record of one episode, from which every table, plot and total is derived."""
    calls = episode.calls
    versions = {call.policy_version for call in calls if call.policy_version is not None}
    return {
        "episode": episode.key.text(),
        "epoch": episode.key.epoch,
        "row_id": episode.key.row_id,
        "generation": episode.key.generation,
        "attempt": episode.key.attempt,
        "outcome": episode.outcome,
        "reason": episode.reason,
        "error": episode.error,
        "output": episode.output,
        "reward": episode.reward,
        "step_rewards": episode.step_rewards,
        "rewarded_functions": episode.rewarded_functions,
        "scores": episode.scores,
        "reasoning": episode.reasoning,
        "policy_versions": sorted(versions),
        "calls": len(calls),
        "failed_requests": episode.failed_requests,
        "prompt_tokens": sum([len(call.prompt_token_ids or ()) for call in calls]),
        "sampled_tokens": sum([len(call.token_ids or ()) for call in calls]),
        "seconds": round(episode.seconds, 4),
        **({"candidates": [*map(_candidate_record, episode.candidates)]} if episode.candidates else {}),
        **({"source": episode.source} if episode.source else {}),
    }


def restore_episode(record: Mapping[str, Any], calls: list[ModelCall]) -> Episode:
    """The episode of a line of `episodes.jsonl.gz`, without its steps and costs, which are not recorded."""
    own = (record["epoch"], record["row_id"], record["generation"], record["attempt"])
    run_id = record["episode"].removesuffix("/" + "/".join(map(str, own)))
    return Episode(
        EpisodeKey(run_id, *own),
        Outcome(record["outcome"]),
        output=record["output"],
        calls=calls,
        reason=DropReason(record["reason"]) if record["reason"] else None,
        error=record["error"],
        seconds=record["seconds"],
        reward=record["reward"],
        reasoning=record["reasoning"],
        scores=record["scores"],
        step_rewards=record["step_rewards"],
        rewarded_functions=record["rewarded_functions"],
        failed_requests=record["failed_requests"],
        candidates=[_restore_candidate(candidate, calls) for candidate in record.get("candidates", ())],
        source=record.get("source"),
    )


_CANDIDATE_FIELDS = tuple(f.name for f in fields(CandidateStep))


def _candidate_record(candidate: CandidateStep) -> dict[str, Any]:
    """Without the prompt if a call has it."""
    record = {name: getattr(candidate, name) for name in _CANDIDATE_FIELDS}
    if candidate.call is not None:
        del record["prompt"]
    return record


def _restore_candidate(record: Mapping[str, Any], calls: Sequence[ModelCall]) -> CandidateStep:
    prompt = record["prompt"] if record["call"] is None else calls[record["call"]].messages
    return CandidateStep(**{**record, "prompt": prompt})


_CALL_FIELDS = tuple(f.name for f in fields(ModelCall))


def call_records(episode: str, calls: Sequence[ModelCall]) -> list[dict[str, Any]]:
    """Calls as stored: `continues` is the index of an earlier call whose messages and tokens are a prefix of this.

    `messages` and `prompt_token_ids` then hold only the rest, so that the size of a conversation is linear in its
    length, not quadratic. `continues_prompt` is the same for text completions, of whose prompt the rest is stored.
    `restore_calls` is the inverse.
    """
    records = []
    for index, call in enumerate(calls):
        record = {"episode": episode, **{name: getattr(call, name) for name in _CALL_FIELDS}}
        for earlier in range(index - 1, -1, -1):
            before = calls[earlier]
            if (rest := _rest_of_messages(before, call)) is not None and _tokens_continue(before, call):
                key, record["messages"] = rest
                record[key] = earlier
                if call.prompt_token_ids is not None:
                    record["prompt_token_ids"] = call.prompt_token_ids[len(_tokens(before)) :]
                break
        records.append(record)
    return records


def restore_calls(records: Iterable[dict[str, Any]]) -> list[ModelCall]:
    """The calls of one episode from its lines of `calls.jsonl.gz`."""
    calls: list[ModelCall] = []
    for record in records:
        values = {name: record[name] for name in _CALL_FIELDS}
        key = next((key for key in ("continues", "continues_prompt") if key in record), None)
        if key is not None:
            before = calls[record[key]]
            if key == "continues":
                values["messages"] = before.messages + values["messages"]
            else:
                [rest] = values["messages"]
                values["messages"] = [{**rest, "content": before.messages[0]["content"] + rest["content"]}]
            if values["prompt_token_ids"] is not None:
                values["prompt_token_ids"] = _tokens(before) + values["prompt_token_ids"]
        values["functions"] = tuple(values["functions"])
        calls.append(ModelCall(**values))
    return calls


def _tokens(call: ModelCall) -> list[int]:
    return (call.prompt_token_ids or []) + (call.token_ids or [])


def _tokens_continue(before: ModelCall, call: ModelCall) -> bool:
    """Whether the tokens of a call, if they are known, begin with those of an earlier one."""
    if call.prompt_token_ids is None:
        return True
    tokens = _tokens(before)
    return before.token_ids is not None and call.prompt_token_ids[: len(tokens)] == tokens


def _rest_of_messages(before: ModelCall, call: ModelCall) -> tuple[str, list[dict[str, Any]]] | None:
    """The key that names the earlier call, and what a call adds to its messages; None if it does not continue them."""
    n = len(before.messages)
    if len(call.messages) > n and call.messages[:n] == before.messages:
        return "continues", call.messages[n:]
    if n == len(call.messages) == 1:
        old, new = before.messages[0].get("content"), call.messages[0].get("content")
        if isinstance(old, str) and isinstance(new, str) and len(new) > len(old) > 0 and new.startswith(old):
            return "continues_prompt", [{**call.messages[0], "content": new[len(old) :]}]
    return None

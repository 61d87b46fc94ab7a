"""Prints recorded episodes for `insitu trajectories show`."""

import sys
import unicodedata
from collections.abc import Callable, Container, Iterator, Sequence
from sqlite3 import Row
from typing import Any, NamedTuple

import click

from insitu.collect.conversations import conversations
from insitu.runs.episodes import RecordedEpisode, token_texts
from insitu.runs.index_database import TrainingStatus
from insitu.runs.records import SIDES
from insitu.schemas.episodes import ModelCall, TrainingRow
from insitu.schemas.finetuning import tool_call_lines

_TRAINED = (TrainingStatus.TRAINED, TrainingStatus.SENT)


_LISTED = 60
"""Characters of an answer in a list."""


class View(NamedTuple):
    """What to print of an episode."""

    tokens: bool
    max_characters: int | None
    """Longer messages are cut."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Token ids to text; None: unknown."""


def print_list(episodes: list[Row], matching: int, *, answers: bool) -> None:
    """Prints rows of a run's index."""
    width = max(len(escape(record["episode"])) for record in episodes)
    for record in episodes:
        status, reason = record["status"], record["dropped"] or record["reason"]
        if status == TrainingStatus.DROPPED:
            status = f"dropped: {reason}"
        elif record["sides"] and status in _TRAINED:
            status = f"{status}  {record['sides']}"
        elif reason:
            status = f"{status}  {record['outcome']}: {reason}"
        columns = [
            escape(record["episode"]).ljust(width),
            f"reward {_format_number(record['reward'])}".ljust(13),
            f"{record['calls']} call{'s' * (record['calls'] != 1)}".ljust(8),
            status,
            *([repr(record["answer"][:_LISTED])] if answers and record["answer"] is not None else []),
        ]
        click.echo("  ".join(columns))
    if sys.stdout.isatty():
        shown = f"{len(episodes)} of {matching}" if len(episodes) < matching else str(matching)
        click.echo(f"{shown} episodes; choose one with --epoch, --row and --generation, or --episode")


def print_episode(episode: RecordedEpisode, view: View) -> None:
    for section in (_header, _calls, _conversations, _rows):
        for line in section(episode, view):
            click.echo(line)


def _format_number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _header(episode: RecordedEpisode, view: View) -> Iterator[str]:
    record = episode.record
    yield click.style(f"episode {escape(record['episode'])}", bold=True)
    columns = [
        record["outcome"] + (f": {record['reason']}" if record["reason"] else ""),
        f"reward {_format_number(record['reward'])}",
        f"{record['prompt_tokens']} prompt + {record['sampled_tokens']} sampled tokens",
        f"policy version {', '.join(map(str, record['policy_versions'])) or 'unknown'}",
        f"{record['seconds']:.2f} s",
    ]
    yield f"  {'  '.join(columns)}"
    if record["error"]:
        yield click.style(f"  {_format_text(record['error'], view)}", fg="red")
    if record["attempt"]:
        yield f"  attempt {record['attempt'] + 1}; earlier attempts failed"
    if failed := record.get("failed_requests"):
        yield f"  failed requests: {', '.join(f'{n} {escape(reason)}' for reason, n in failed.items())}"
    if (group := episode.group) is not None and "paired" not in group:
        members = zip(group["episodes"], group["rewards"], strict=True)
        rewards = ((name == record["episode"], _format_number(reward)) for name, reward in members)
        text = ", ".join(f"[{reward}]" if own else reward for own, reward in rewards)
        dropped = ", ".join(f"{n} {reason}" for reason, n in group["dropped"].items())
        yield f"  group rewards: {text or 'none'}{dropped and f'; dropped: {dropped}'}"
    colour = None if episode.status in _TRAINED else "yellow"
    yield f"  {click.style(episode.training_summary, fg=colour)}"
    yield from _pairs(episode)
    for scored in episode.rescores:
        value = _format_number(scored["score"]) + (f": {scored['error']}" if scored["error"] else "")
        text = f"{scored['evaluator']} {value}" + (f" ({scored['reasoning']})" if scored["reasoning"] else "")
        yield f"  scored later, {scored['timestamp'][:16]}: {_format_text(text, view)}"
    if record["outcome"] == "ok" or record["output"] is not None:
        yield f"  answer: {_format_text(record['output'], view)}"
    if expected := ((episode.group or {}).get("row") or {}).get("expected"):
        yield f"  expected: {_format_text(expected, view)}"


def _pairs(episode: RecordedEpisode) -> Iterator[str]:
    """The preference pairs of an episode, each once."""
    own = episode.record["episode"]
    pairs = [side for side in episode.sides if "pair" in side and (side["side"] == SIDES[0] or side["other"] != own)]
    for side in pairs:
        this = (own, side["calls"], side["score"])
        opposite = (side["other"], side["other_calls"], side["other_score"])
        texts = []
        for name in SIDES:
            of, calls, score = this if name == side["side"] else opposite
            where = "this episode" if of == own else escape(of)
            where = f"call {calls[0]}" if side["other"] == own and calls else where
            texts.append(f"{name} {where} ({_format_number(score)})")
        dropped = f", dropped: {side['dropped']}" if side["dropped"] else ""
        number = str(side["pair"]).rpartition("/pair ")[2]
        yield f"  pair {number}: {', '.join(texts)}, margin {_format_number(side['margin'])}{dropped}"


def _calls(episode: RecordedEpisode, view: View) -> Iterator[str]:
    yield from ("", click.style("calls", bold=True))
    row_numbers = {index: number for number, row in enumerate(episode.rows, 1) for index in row.calls}
    start = min((call.started for call in episode.calls), default=0.0)
    for position, call in enumerate(episode.calls):
        functions = " > ".join(call.functions) or "no function"
        tools = [str((tool.get("function") or tool).get("name")) for tool in call.tools or ()]
        reward = episode.step_reward(position)
        columns = [
            f"{call.index:>4}",
            escape(f"{call.llm or call.model} in {functions}"),
            f"{call.started - start:.2f}-{call.ended - start:.2f} s",
            f"{_token_count(call, 'prompt')} + {_token_count(call, 'completion')} tokens",
            escape(call.finish_reason or ""),
            f"choice {call.choice}" if call.choice else "",
            escape(f"tools {', '.join(tools)}") if tools else "",
            click.style(escape(call.error), fg="red") if call.error else "",
            "" if reward is None else f"reward {_format_number(reward)}",
            _format_advantage(episode, call, row_numbers),
            f"row {row_numbers[call.index]}" if call.index in row_numbers else "",
        ]
        yield "  ".join(column for column in columns if column)


def _format_advantage(episode: RecordedEpisode, call: ModelCall, in_rows: Container[int]) -> str:
    if not (trained := episode.advantages or episode.sides_by_call):
        return ""
    if call.index not in trained:
        return "context" if call.index in in_rows else "not trained"
    if not episode.advantages:
        return click.style(", ".join(sorted(episode.sides_by_call[call.index])), fg="green")
    advantage = episode.advantages[call.index]
    return click.style("sent" if advantage is None else f"advantage {advantage:+.4g}", fg="green")


def _token_count(call: ModelCall, kind: str) -> Any:
    """From the token ids if captured, or else from the server's `usage`."""
    ids = call.prompt_token_ids if kind == "prompt" else call.token_ids
    return (call.usage or {}).get(f"{kind}_tokens", "?") if ids is None else len(ids)


def _conversations(episode: RecordedEpisode, view: View) -> Iterator[str]:
    for number, turns in enumerate(conversations(episode.calls), 1):
        yield from ("", click.style(f"conversation {number}", bold=True))
        for message, call in turns:
            role = f"{message.get('role')}" if call is None else f"{message.get('role')} [call {call.index}]"
            text = _format_text(_message_text(message), view, indent=4)
            yield f"  {click.style(escape(role), fg=None if call is None else 'green')}: {text}"


def _message_text(message: dict[str, Any]) -> str:
    content = message.get("content")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    lines = [f"[reasoning] {reasoning}"] if reasoning else []
    for part in content if isinstance(content, list) else [content]:
        if part is not None:
            lines.append(str(part.get("text", f"[{part.get('type')}]") if isinstance(part, dict) else part))
    lines += [f"-> {line}" for line in tool_call_lines(message)]
    return "\n".join(line for line in lines if line)


def _rows(episode: RecordedEpisode, view: View) -> Iterator[str]:
    weighed = episode.advantages or episode.sides_by_call
    note = "" if weighed else " if all calls were trained"
    if None in episode.advantages.values():
        note = " by exact prefix; the server builds its own"
    verb = "trained" if episode.status in _TRAINED else "to train" if weighed else "sampled"
    yield from ("", click.style(f"rows{note}", bold=True))
    calls = {call.index: call for call in episode.calls}
    rows = episode.rows
    for number, row in enumerate(rows, 1):
        indices = ", ".join(map(str, row.calls))
        yield f"  row {number}: calls {indices}; {len(row.token_ids)} tokens, {sum(row.loss_mask)} of them {verb}"
        if view.tokens:
            yield from _tokens(row, [calls[index] for index in row.calls], view)
    if not rows:
        yield "  none: the token ids of these calls are unknown"
    elif view.tokens and view.decode is None:
        yield "  the texts of the tokens are unknown: name the folder of the model with --tokenizer"


def _tokens(row: TrainingRow, calls: list[ModelCall], view: View) -> Iterator[str]:
    """The tokens of a row: for each call the context since the previous one, then the sampled tokens."""

    def text(ids: Sequence[int]) -> str:
        return " ".join(map(str, ids)) if view.decode is None else repr(view.decode(ids))

    printed = 0
    for call in calls:
        start = len(call.prompt_token_ids or ())
        end = start + len(call.token_ids or ())
        context, printed = row.token_ids[printed:start], end
        if context:
            yield f"    context, {len(context)} token{'s' * (len(context) > 1)}: {escape(text(context))}"
        sampled = row.token_ids[start:end]
        if any(row.loss_mask[start:end]):
            texts = [*map(str, sampled)] if view.decode is None else [*map(repr, token_texts(view.decode, sampled))]
            pairs = zip(texts, row.logprobs[start:end], strict=True)
            tokens = " ".join(f"{escape(token)} ({logprob:.3f})" for token, logprob in pairs)
            yield click.style(f"    call {call.index}: {tokens}", fg="green")
        else:
            yield f"    call {call.index}, context: {escape(text(sampled))}"


def _format_text(value: Any, view: View, indent: int = 2) -> str:
    """A text with its further lines indented, cut without --full."""
    text = value if isinstance(value, str) else repr(value)
    omitted = max(len(text) - view.max_characters, 0) if view.max_characters is not None else 0
    more = f" ... {omitted} more characters (--full)" if omitted else ""
    lines = text[: len(text) - omitted].split("\n")
    return ("\n" + " " * indent).join(map(escape, lines)) + more


def escape(value: str) -> str:
    """Escapes control characters, but neither spaces nor the joiner of emoji."""
    kept = (c.isprintable() or c == "\u200d" or unicodedata.category(c) == "Zs" for c in value)
    return "".join(c if keep else c.encode("unicode_escape").decode() for c, keep in zip(value, kept, strict=True))

"""The command `trajectories`: what a run has recorded, for people."""

import re
import sys
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

if TYPE_CHECKING:
    from insitu.schemas.episodes import ModelCall, TrainingRow
    from insitu.training.inspection import ReadEpisode, RunFiles

_CUT = 2000
"""Characters of a message that are shown without --full."""


class View(NamedTuple):
    """What of an episode is shown."""

    calls: Container[int]
    tokens: bool
    full: bool


@click.group("trajectories")
def command() -> None:
    """Look at what a run has recorded."""


def _range(context: click.Context, option: click.Parameter, given: str | None) -> range | None:
    if given is None:
        return None
    match = re.fullmatch(r"(\d+)(-(\d*))?", given)
    if match is None:
        raise click.BadParameter(f"{given!r} is no call and no range of calls; as in 4, 4-7 or 4-")
    first, several, last = match.groups()
    return range(int(first), int(last) + 1 if last else sys.maxsize if several else int(first) + 1)


@command.command("show", short_help="An episode as its calls, conversations and rows.")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--epoch", type=click.IntRange(min=1), help="Only of this epoch.")
@click.option("--row", help="Only of the dataset row with this id.")
@click.option("--generation", type=click.IntRange(min=0), help="Only the one of its group with this number.")
@click.option("--episode", help="The one of this name, as it is listed.")
@click.option("--calls", callback=_range, help="Only these calls of it, as in 4, 4-7 or 4-.")
@click.option("--tokens", is_flag=True, help="Every token of the rows, sampled ones with their log-probabilities.")
@click.option("--full", is_flag=True, help=f"Messages of more than {_CUT} characters to their end.")
def show(
    run_dir: Path,
    epoch: int | None,
    row: str | None,
    generation: int | None,
    episode: str | None,
    calls: range | None,
    tokens: bool,
    full: bool,
) -> None:
    """Print an episode as its calls, conversations and rows; where several are meant, list them."""
    from insitu.errors import ConfigError
    from insitu.training.inspection import RunFiles

    files = RunFiles(run_dir)
    found = files.episodes(episode=episode, epoch=epoch, row_id=row, generation=generation)
    if len(found) > 1:
        _list(files, found)
        return
    read = files.read(found[0])
    there = [call.index for call in read.calls]
    if calls is not None and not any(index in calls for index in there):
        raise ConfigError(f"--calls: the episode has {f'calls {there[0]} to {there[-1]}' if there else 'no calls'}")
    view = View(range(sys.maxsize) if calls is None else calls, tokens, full)
    for line in (*_head(read, view), *_calls(read, view), *_dialogues(read, view), *_rows(read, view)):
        click.echo(line)


def _list(files: "RunFiles", records: list[dict[str, Any]]) -> None:
    width = max(len(_text(record["episode"])) for record in records)
    for read in files.outlines(records):
        record = read.record
        parts = [
            _text(record["episode"]).ljust(width),
            f"reward {_number(record['reward'])}".ljust(13),
            f"{record['calls']} call{'s' * (record['calls'] != 1)}".ljust(8),
            _fate(read),
        ]
        click.echo("  ".join(parts))
    if sys.stdout.isatty():
        click.echo(f"{len(records)} episodes; choose one with --epoch, --row and --generation, or --episode")


def _fate(read: "ReadEpisode") -> str:
    from insitu.training.inspection import Fate

    if read.fate is Fate.LEFT_OUT:
        return f"left out: {read.reason}"
    return f"{read.fate}  {read.record['outcome']}: {read.reason}" if read.reason else read.fate


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _head(read: "ReadEpisode", view: View) -> Iterator[str]:
    record = read.record
    yield click.style(f"episode {_text(record['episode'])}", bold=True)
    versions = ", ".join(map(str, record["policy_versions"])) or "unknown"
    cost = f"{record['prompt_tokens']} prompt + {record['sampled_tokens']} sampled tokens"
    outcome = record["outcome"] + (f": {record['reason']}" if record["reason"] else "")
    yield (
        f"  {outcome}  reward {_number(record['reward'])}  {cost}  policy version {versions}  {record['seconds']:.2f} s"
    )
    if record["error"]:
        yield click.style(f"  {_shown(record['error'], view)}", fg="red")
    if record["attempt"]:
        yield f"  attempt {record['attempt'] + 1}; those before it failed"
    if failed := record.get("failed_requests"):
        yield f"  requests without an answer: {', '.join(f'{n} {_text(reason)}' for reason, n in failed.items())}"
    if read.group is not None:
        yield f"  {_group(read.group, record['episode'])}"
    yield f"  {_training(read)}"
    if record["outcome"] == "ok" or record["output"] is not None:
        yield f"  answer: {_shown(record['output'], view)}"


def _group(group: Mapping[str, Any], episode: str) -> str:
    """The rewards that its own is compared with, itself in brackets."""
    members = zip(group["episodes"], group["rewards"], strict=True)
    rewards = [f"[{_number(r)}]" if name == episode else _number(r) for name, r in members]
    dropped = ", ".join(f"{n} {reason}" for reason, n in group["dropped"].items())
    return f"rewards of its group: {', '.join(rewards) or 'none'}{dropped and f'; not in it: {dropped}'}"


def _training(read: "ReadEpisode") -> str:
    """How the episode was trained, or why not."""
    from insitu.training.inspection import Fate

    of_calls = f"trained with {len(read.advantages)} of {len(read.calls)} calls"
    if read.fate is Fate.TRAINED:
        return "; ".join(filter(None, (of_calls, _conventions(read.settings))))
    if read.fate is Fate.SENT:
        return f"{of_calls}, sent with the episode's reward; the server made their advantages"
    job = (read.epoch or {}).get("job")
    why = {
        Fate.LEFT_OUT: f"left out of training: {read.reason}",
        Fate.WAITING: "not trained yet: its epoch goes on, or the run was cut off in it",
        Fate.JOB_FAILED: f"not trained: the job of epoch {read.record['epoch']} is {job}",
        Fate.UNKNOWN: "trained or not: this run keeps no record of its trained calls",
    }
    return click.style(why[read.fate], fg="yellow")


def _conventions(settings: Mapping[str, Any]) -> str:
    """How its rewards have become advantages."""
    credit, advantages = settings.get("credit"), settings.get("advantages")
    if not isinstance(advantages, dict):
        return ""
    discount = "" if credit == "episode" else f"discount {settings['discount']:g}, "
    return f"credit {credit}, {discount}baseline {advantages['baseline']}, scale {advantages['scale']}"


def _calls(read: "ReadEpisode", view: View) -> Iterator[str]:
    yield from ("", click.style("calls", bold=True))
    rows = {index: number for number, row in enumerate(read.rows, 1) for index in row.calls}
    began = min((call.started for call in read.calls), default=0.0)
    for place, call in enumerate(read.calls):
        if call.index not in view.calls:
            continue
        functions = " > ".join(call.functions) or "no function"
        tools = [str((tool.get("function") or tool).get("name")) for tool in call.tools or ()]
        parts = [
            f"{call.index:>4}",
            _text(f"{call.llm or call.model} in {functions}"),
            f"{call.started - began:.2f}-{call.ended - began:.2f} s",
            f"{_count(call, 'prompt')} + {_count(call, 'completion')} tokens",
            _text(call.finish_reason or ""),
            f"choice {call.choice}" if call.choice else "",
            _text(f"tools {', '.join(tools)}") if tools else "",
            click.style(_text(call.error), fg="red") if call.error else "",
        ]
        if (reward := read.reward_of(place)) is not None:
            parts.append(f"reward {_number(reward)}")
        parts += [_part(read, call, rows), f"row {rows[call.index]}" if call.index in rows else ""]
        yield "  ".join(part for part in parts if part)


def _part(read: "ReadEpisode", call: "ModelCall", rows: Container[int]) -> str:
    """A call's part in training."""
    if not read.advantages:
        return ""
    if call.index not in read.advantages:
        return "context" if call.index in rows else "not trained"
    advantage = read.advantages[call.index]
    return click.style("sent" if advantage is None else f"advantage {advantage:+.4g}", fg="green")


def _count(call: "ModelCall", kind: str) -> Any:
    """How many tokens: those that are known, or else what the server has counted."""
    ids = call.prompt_token_ids if kind == "prompt" else call.token_ids
    return (call.usage or {}).get(f"{kind}_tokens", "?") if ids is None else len(ids)


def _dialogues(read: "ReadEpisode", view: View) -> Iterator[str]:
    from insitu.trajectories.conversations import conversations

    for number, turns in enumerate(conversations(read.calls), 1):
        ends = [place for place, turn in enumerate(turns) if turn.call is not None]
        begins = [0, *(end + 1 for end in ends)]
        chosen = [
            (b, e) for b, e in zip(begins, ends, strict=False) if getattr(turns[e].call, "index", None) in view.calls
        ]
        if chosen:
            yield from ("", click.style(f"dialogue {number}", bold=True))
        shown = 0
        for begin, end in chosen:
            if begin > shown:
                yield f"  ... {begin - shown} messages"
            shown = end + 1
            for message, call in turns[begin:shown]:
                who = str(message.get("role")) if call is None else f"{message.get('role')} [call {call.index}]"
                text = _shown(_message(message), view, 4)
                yield f"  {click.style(_text(who), fg=None if call is None else 'green')}: {text}"


def _message(message: dict[str, Any]) -> str:
    content = message.get("content")
    thought = message.get("reasoning_content") or message.get("reasoning")
    parts = [f"[reasoning] {thought}"] if thought else []
    parts += [_piece(piece) for piece in (content if isinstance(content, list) else [content])]
    for called in message.get("tool_calls") or ():
        function = called.get("function") or {}
        parts.append(f"-> {function.get('name')}({function.get('arguments')})")
    return "\n".join(part for part in parts if part)


def _piece(piece: Any) -> str:
    """A part of a message's content: its text, or what it is instead."""
    if isinstance(piece, dict):
        return str(piece.get("text", f"[{piece.get('type')}]"))
    return "" if piece is None else str(piece)


def _rows(read: "ReadEpisode", view: View) -> Iterator[str]:
    from insitu.training.inspection import Fate

    kind = "" if read.advantages else ", as they would be with all calls"
    if None in read.advantages.values():
        kind = ", by exact prefix; the server makes its own of what it is sent"
    verb = "trained" if read.fate in (Fate.TRAINED, Fate.SENT) else "to train" if read.advantages else "sampled"
    yield from ("", click.style(f"rows{kind}", bold=True))
    calls = {call.index: call for call in read.calls}
    rows = [(number, row) for number, row in enumerate(read.rows, 1) if any(i in view.calls for i in row.calls)]
    for number, row in rows:
        held = ", ".join(map(str, row.calls))
        yield f"  row {number}: calls {held}; {len(row.token_ids)} tokens, {sum(row.loss_mask)} of them {verb}"
        if view.tokens:
            yield from _tokens(row, [calls[index] for index in row.calls], view.calls)
    if not rows:
        yield "  none: the token ids of these calls are not known"


def _tokens(row: "TrainingRow", calls: list["ModelCall"], shown: Container[int]) -> Iterator[str]:
    """The row from call to call: what came before each of them, and what it sampled."""
    at = 0
    for call in calls:
        begin = len(call.prompt_token_ids or ())
        end = begin + len(call.token_ids or ())
        before, at = row.token_ids[at:begin], end
        if call.index not in shown:
            continue
        if before:
            yield f"    context: {' '.join(map(str, before))}"
        sampled = zip(row.token_ids[begin:end], row.logprobs[begin:end], strict=True)
        if any(row.loss_mask[begin:end]):
            spelt = " ".join(f"{token} ({logprob:.3f})" for token, logprob in sampled)
            yield click.style(f"    call {call.index}: {spelt}", fg="green")
        else:
            yield f"    call {call.index}, context: {' '.join(str(token) for token, _ in sampled)}"


def _shown(value: Any, view: View, indent: int = 2) -> str:
    """A text of any length: cut, unless all of it was asked for, and its further lines indented."""
    text = value if isinstance(value, str) else repr(value)
    left = 0 if view.full else max(len(text) - _CUT, 0)
    more = f" ... {left} more characters (--full)" if left else ""
    lines = text[: len(text) - left].split("\n")
    return ("\n" + " " * indent).join(map(_text, lines)) + more


def _text(value: str) -> str:
    """As a console may show it: control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)

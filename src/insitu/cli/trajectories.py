"""The command `trajectories`: what a run has recorded, for people."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from insitu.schemas.episodes import ModelCall, TrainingRow
    from insitu.training.inspection import ReadEpisode


@click.group("trajectories")
def command() -> None:
    """Look at what a run has recorded."""


@command.command("show")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--epoch", type=click.IntRange(min=1), help="Only of this epoch.")
@click.option("--row", help="Only of the dataset row with this id.")
@click.option("--generation", type=click.IntRange(min=0), help="Only the one of its group with this number.")
@click.option("--episode", help="The one of this name, as it stands in episodes.jsonl.")
@click.option("--tokens", is_flag=True, help="Every token of the rows, sampled ones with their log-probabilities.")
def show(
    run_dir: Path, epoch: int | None, row: str | None, generation: int | None, episode: str | None, tokens: bool
) -> None:
    """Print an episode as its calls, dialogues and rows; where several are meant, list them."""
    from insitu.training.inspection import RunFiles

    files = RunFiles(run_dir)
    found = files.episodes(epoch=epoch, row_id=row, generation=generation, episode=episode)
    if len(found) > 1:
        for record in found:
            click.echo(f"{record['episode']}  {_outcome(record)}  {record['calls']} calls")
        return
    read = files.read(found[0])
    for line in (*_head(read), *_calls(read), *_dialogues(read), *_rows(read, tokens)):
        click.echo(line)


def _outcome(record: dict[str, Any] | Any) -> str:
    reward = record["reward"]
    told = f"{record['outcome']}  reward {'none' if reward is None else f'{reward:g}'}"
    return f"{told}  {record['reason']}" if record["reason"] else told


def _head(read: "ReadEpisode") -> Iterator[str]:
    record = read.record
    yield click.style(f"episode {record['episode']}", bold=True)
    versions = ", ".join(map(str, record["policy_versions"])) or "unknown"
    cost = f"{record['prompt_tokens']} prompt + {record['sampled_tokens']} sampled tokens"
    yield f"  {_outcome(record)}  {cost}  policy version {versions}  {record['seconds']:.2f} s"
    if record["error"]:
        yield click.style(f"  {_text(record['error'])}", fg="red")
    if failed := record["failed_requests"]:
        yield f"  requests without an answer: {', '.join(f'{n} {reason}' for reason, n in failed.items())}"
    if read.dropped:
        yield click.style(f"  left out of training: {read.dropped}", fg="yellow")
    elif record["reward"] is not None and not record["reason"] and read.advantages is None:
        yield click.style("  its epoch has not been weighed", fg="yellow")
    yield f"  answer: {_text(record['output'], 4)}"


def _calls(read: "ReadEpisode") -> Iterator[str]:
    yield from ("", click.style("calls", bold=True))
    held = {index: number for number, row in enumerate(read.rows, 1) for index in row.calls}
    began = min((call.started for call in read.calls), default=0.0)
    for place, call in enumerate(read.calls):
        parts = [
            f"{call.index:>4}",
            f"{call.llm or call.model} in {' > '.join(call.functions) or 'no function'}",
            f"{call.started - began:.2f}-{call.ended - began:.2f} s",
            f"{len(call.prompt_token_ids or ())} + {len(call.token_ids or ())} tokens",
            call.error or call.finish_reason or "",
            f"choice {call.choice}" if call.choice else "",
        ]
        if (reward := read.reward_of(place)) is not None:
            parts.append(f"reward {reward:g}")
        if read.advantages and call.index in read.advantages:
            parts.append(click.style(f"advantage {read.advantages[call.index]:+.4g}", fg="green"))
        elif read.advantages:
            parts.append("context" if call.index in held else "not trained")
        if call.index in held:
            parts.append(f"row {held[call.index]}")
        yield "  ".join(part for part in parts if part)


def _dialogues(read: "ReadEpisode") -> Iterator[str]:
    from insitu.trajectories.dialogues import dialogues

    for number, turns in enumerate(dialogues(read.calls), 1):
        yield from ("", click.style(f"dialogue {number}", bold=True))
        for message, call in turns:
            who = str(message.get("role")) if call is None else f"{message.get('role')} [call {call.index}]"
            yield f"  {click.style(who, fg=None if call is None else 'green')}: {_message(message)}"


def _message(message: dict[str, Any]) -> str:
    from insitu.trajectories.groups import text_of

    parts = [text_of(message.get("content"))]
    for called in message.get("tool_calls") or ():
        function = called.get("function") or {}
        parts.append(f"-> {function.get('name')}({function.get('arguments')})")
    return _text("\n".join(part for part in parts if part), 4)


def _rows(read: "ReadEpisode", tokens: bool) -> Iterator[str]:
    calls = {call.index: call for call in read.calls}
    title = "rows" if read.advantages else "rows, if all calls were trained"
    yield from ("", click.style(title, bold=True))
    for number, row in enumerate(read.rows, 1):
        trained = sum(row.loss_mask)
        held = ", ".join(map(str, row.calls))
        yield f"  row {number}: calls {held}; {len(row.token_ids)} tokens, {trained} of them trained"
        if tokens:
            yield from _tokens(row, [calls[index] for index in row.calls])


def _tokens(row: "TrainingRow", calls: list["ModelCall"]) -> Iterator[str]:
    """The row from call to call: what came before each of them, and what it sampled."""
    at = 0
    for call in calls:
        begin = len(call.prompt_token_ids or ())
        end = begin + len(call.token_ids or ())
        if begin > at:
            yield f"    context: {' '.join(map(str, row.token_ids[at:begin]))}"
        sampled = zip(row.token_ids[begin:end], row.logprobs[begin:end], strict=True)
        if any(row.loss_mask[begin:end]):
            spelt = " ".join(f"{token} ({logprob:.3f})" for token, logprob in sampled)
            yield click.style(f"    call {call.index}: {spelt}", fg="green")
        else:
            yield f"    call {call.index}, context: {' '.join(str(token) for token, _ in sampled)}"
        at = end


def _text(value: Any, indent: int = 2) -> str:
    """On a console: control characters escaped, further lines indented."""
    text = value if isinstance(value, str) else repr(value)
    shown = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    return shown.replace("\n", "\n" + " " * indent)

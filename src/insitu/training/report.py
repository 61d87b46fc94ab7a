"""The console output of a run."""

import asyncio
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from insitu.algorithms.paired_test import compare_paired, fewest_rows
from insitu.algorithms.statistics import rows_ci95
from insitu.collect.evaluators import parse_score, scores_by_row
from insitu.config.resolved import leaves
from insitu.disk.files import readable_seconds
from insitu.runs.files import EPISODES, METRICS, PLOT, VALIDATIONS
from insitu.runs.reader import RunReader
from insitu.runs.store import RunStore
from insitu.schemas.evaluation import EvaluationRunOutput

_CONFIDENCE = 0.95
_LONG = 120.0
"""Seconds that a phase takes, from which it says how to make it shorter."""
_SILENCE = 30.0
"""Seconds between the lines about a phase in progress, where there is no terminal for a bar."""


class Report:
    """The console of a run: a header, progress bars, a line per epoch, and a table at the end.

    There are bars for the run and for the phase in progress on a terminal, and elsewhere a line about the phase every
    `interval` seconds.
    """

    def __init__(self, console: Console, interval: float = _SILENCE) -> None:
        self.console = console
        self._interval = interval
        self._progress = Progress(
            TextColumn("{task.description}{task.fields[rewards]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            refresh_per_second=4,
            disable=not self.console.is_terminal,
        )
        self._task: TaskID | None = None
        self._rewards = (0, 0.0)
        """How many the phase in progress has, and their sum."""
        self._run: TaskID | None = None
        self._run_started = 0.0
        self._completed_before = 0
        self._shorter: str | None = None
        self._line: asyncio.TimerHandle | None = None
        """Prints the next line about the phase in progress."""

    def header(self, run_id: str, settings: Mapping[str, Any]) -> None:
        self.console.print(f"[bold]run {run_id}[/bold]")
        for name, value in settings.items():
            parts = leaves(value) if isinstance(value, Mapping) else [("", value)]
            self.note(f"  {name}: {', '.join(f'{key} {part}'.strip() for key, part in parts if part != {})}")

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def notes(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.note(text)

    def begin_run(self, epochs: int, completed: int = 0) -> None:
        """Starts the bar and the clock of a run, of which `completed` epochs are complete already."""
        self._run_started, self._completed_before = time.monotonic(), completed
        self._progress.start()
        self._run = self._progress.add_task("run", total=epochs, completed=completed, rewards="")

    def end_run(self) -> None:
        if self._run is not None:
            self._progress.remove_task(self._run)
            self._progress.stop()
            self._run = None

    @contextmanager
    def phase(self, what: str, total: int | None = None, shorter: str | None = None) -> Iterator[None]:
        """Shows a bar or lines while the body runs; `total` is its number of episodes.

        `shorter` says how to make a long one shorter.
        """
        self._shorter, self._given = shorter, 0
        self._progress.start()
        self._task, self._rewards = self._progress.add_task(what, total=total, rewards=""), (0, 0.0)
        self._schedule_line()
        try:
            yield
        finally:
            if self._line is not None:
                self._line.cancel()
                self._line = None
            self._progress.remove_task(self._task)
            self._task = None
            if self._run is None:
                self._progress.stop()

    def advance(self, reward: float | None = None) -> None:
        """An episode of the phase has ended, with this reward."""
        if self._task is None:
            return
        count, total = self._rewards
        if reward is not None:
            count, total = self._rewards = count + 1, total + reward
        mean = f", mean reward {total / count:.3g}" if count else ""
        self._progress.update(self._task, advance=1, rewards=mean)

    def expect_given(self, count: int) -> None:
        """So many episodes of the phase in progress have ended before it began."""
        self._given = count

    def expect(self, total: int) -> None:
        """Changes the number of episodes of the phase in progress."""
        if self._task is not None:
            self._progress.update(self._task, total=total)

    def _schedule_line(self) -> None:
        if not self.console.is_terminal:
            self._line = asyncio.get_running_loop().call_later(self._interval, self._print_line)

    def _print_line(self) -> None:
        task = next(task for task in self._progress.tasks if task.id == self._task)
        elapsed, done = task.elapsed or 0.0, ""
        if task.total is not None:
            done = f" {task.completed:.0f} of {task.total:.0f} episodes{task.fields['rewards']},"
        left = ""
        if task.total is not None and self._given < task.completed < task.total:
            remaining = elapsed / (task.completed - self._given) * (task.total - task.completed)
            left = f", about {readable_seconds(remaining)} left"
            if remaining > _LONG and self._shorter is not None:
                left, self._shorter = f"{left} ({self._shorter})", None
        self.note(f"{task.description}:{done} {elapsed:.0f} s{left}")
        self._schedule_line()

    def validation(self, record: Mapping[str, Any]) -> None:
        if "error" in record:
            self.note(f"validation at epoch {record['epoch']} FAILED: {record['error']}")
            return
        details = f"95 % CI {_interval(*record['ci95'])}, n = {_rows(record)}"
        if record["dropped"]:
            details += f", dropped: {counts(record['dropped'])}"
        self.note(f"validation at epoch {record['epoch']}: {record['avg_reward']:.3f} ({details})")

    def epoch(self, number: int, last: int, m: Mapping[str, Any], trained: str, *, ends: bool = False) -> None:
        """Prints the line of an epoch; `trained` is what was collected for training: episodes, say.

        `ends`: the run ends after it, even if that is not the `last` epoch.
        """
        if self._run is not None:
            self._progress.advance(self._run)
        seconds = m.get("seconds", {})
        reward = f"reward {_number(m.get('avg_reward'))}"
        if m.get("reward_std") is not None:
            reward += f" std {m['reward_std']:.2g}"
        parts = [f"epoch {number}/{last}", reward, f"{m['num_trajectories']} {trained}"]
        if (zero := m.get("frac_reward_zero_std")) is not None:
            parts.append(f"variance in {100 * (1 - zero):.0f} % of groups")
        if (length := m.get("completions_mean_length")) is not None:
            clipped = m["completions_clipped_ratio"]
            parts.append(f"length {length:.3g}" + (f" ({_percent(clipped)} cut off)" if clipped else ""))
        if greedy := m.get("greedy_groups"):
            parts.append(f"GREEDY: {greedy} of {m['num_groups']} groups at temperature 0")
        preferences, divergences = ("rewards/accuracies", "rewards/margins"), ("teacher_kl", "kl", "reference_gap")
        training = ("loss", *preferences, *divergences, "entropy", "grad_norm", "clip_fraction")
        parts += [f"{name} {_number(m[name])}" for name in training if m.get(name) is not None]
        if m.get("tokens"):
            parts.append(f"{m['tokens']} tokens")
        if (state := m.get("curriculum_state")) is not None:
            share = f"{len(state['included_groups'])} of {state['total_groups']} examples"
            parts.append(f"curriculum {100 * state['current_percentile']:.0f} % ({share})")
        spent = ("saved_episodes", "extra_episodes", "replaced_groups", "skipped_rows")
        if budget := [f"{m[name]} {name.replace('_', ' ')}" for name in spent if m.get(name)]:
            parts.append(", ".join(budget))
        if m["dropped"]:
            parts.append(f"dropped: {counts(m['dropped'])}")
        phases = {name: seconds.get(name, 0.0) for name in ("collect", "train", "validate")}
        parts.append(", ".join(f"{name} {taken:.1f} s" for name, taken in phases.items() if taken))
        parts += _overlap(m.get("age") or {}, seconds)
        if self._run is not None and number < last and not ends:
            # if the other epochs take as long as those of this process
            left = (time.monotonic() - self._run_started) / (number - self._completed_before) * (last - number)
            parts.append(f"run: about {readable_seconds(left)} left")
        self.note("  ".join(filter(None, parts)))
        if len(scores := m.get("scores") or {}) > 1:
            self.note(f"  scores: {', '.join(f'{name} {_number(mean)}' for name, mean in scores.items())}")
        if len(functions := m["credit_by_function"]) > 1:
            shares = (
                f"{name} {100 * of['share']:.0f} % ({of['calls']} calls, mean |A| {of['mean_abs_advantage']:.3g})"
                for name, of in functions.items()
            )
            self.note(f"  credit: {', '.join(shares)}")

    def summary(
        self, validations: Sequence[Mapping[str, Any]], best: Mapping[str, Any] | None, store: RunStore
    ) -> None:
        """The scores before, after and of the best version, and the files."""
        scored = [v for v in validations if "error" not in v]
        table = Table("held out", "epoch", "version", "score", "95 % CI", "n", "dropped")
        first = "first" if scored and scored[0]["epoch"] else "before"  # validation may be added to a run
        rows = [(first, scored[0]), ("after", scored[-1])] if scored else []
        if best is not None:
            rows.append(("best", best))
        for name, record in rows:
            version = record.get("policy_version")
            label = "?" if version is None else str(version)
            score, interval = f"{record['avg_reward']:.3f}", _interval(*record["ci95"])
            dropped = counts(record["dropped"]) or "none"
            table.add_row(name, str(record["epoch"]), label, score, interval, str(_rows(record)), dropped)
        if rows:
            self.console.print(table)
        if len(scored) > 1 and (difference := _difference(scored[0], scored[-1], store)) is not None:
            self.note(difference)
        names = (VALIDATIONS, METRICS, PLOT, EPISODES)
        written = ", ".join(name for name in names if (store.path / name).exists())
        self.note(f"files: {store.folder}/  ({written} ...)")


def _rows(validation: Mapping[str, Any]) -> int:
    """The number of rows of which its interval is."""
    return int(validation.get("num_rows", validation["num_examples"]))


def _difference(before: Mapping[str, Any], after: Mapping[str, Any], store: RunStore) -> str | None:
    """How much the score has changed from one validation to another; None of too few rows that both scored."""
    lines = {line.epoch: line for line in RunReader(store.path).scores()}
    first, last = (lines.get(record["epoch"]) for record in (before, after))
    if first is None or last is None:
        return None
    if (first.dataset, first.scoring) != (last.dataset, last.scoring):
        return "these scores are of other rows, or by other settings or code: they cannot be compared"
    means, later = first.means(), last.means()
    rows = [row for row in means if row in later]
    if len(rows) < fewest_rows(_CONFIDENCE):
        return None
    found = compare_paired([means[row] for row in rows], [later[row] for row in rows], _CONFIDENCE)
    interval = f"95 % CI {found.low:+.3f} to {found.high:+.3f}, paired by {found.rows} rows"
    unclear = "; this may be chance" * (found.difference != 0 and found.low <= 0 <= found.high)
    return f"changed by {found.difference:+.3f} ({interval}){unclear}"


def _overlap(age: Mapping[str, int], seconds: Mapping[str, Any]) -> list[str]:
    """How much older than the newest the sampled weights were, and which side had nothing to do."""
    parts = []
    if ages := sorted(map(int, age)):
        parts.append(f"age {ages[0]}" if len(ages) == 1 else f"age {ages[0]} to {ages[-1]}")
    if idle := seconds.get("idle"):
        parts.append(f"idle: sampler {idle['sampler']:.1f} s, learner {idle['learner']:.1f} s")
    if (groups := seconds.get("groups_in_flight")) is not None:
        parts.append(f"{groups} groups in flight")
    return parts


def evaluation_table(output: EvaluationRunOutput, dataset: str) -> Table:
    """A row per evaluator: mean and 95 % confidence interval over the rows of `dataset`, and missing scores."""
    items = output.eval_input.eval_input_items
    failed = sum(item.error is not None for item in items)
    title = f"{dataset}, {len({str(item.id) for item in items})} rows"
    columns = ("evaluator", "mean", "95 % CI", "rows", "episodes", "failed", "unscored")
    table = Table(*columns, title=title, title_justify="left")
    for name, result in output.evaluation_results:
        rows = scores_by_row(result)
        scored = sum(map(len, rows.values()))
        mean, interval = "-", "-"
        if rows:
            estimate = rows_ci95(rows.values())
            mean, interval = f"{estimate.mean:.4f}", _interval(estimate.low, estimate.high, 4)
        unscored = len(result.eval_output_items) - scored
        table.add_row(name, mean, interval, str(len(rows)), str(len(items)), str(failed), str(unscored))
    return table


def evaluation_problems(output: EvaluationRunOutput) -> list[str]:
    """How many episodes failed and how many scores are missing, with the first of each."""
    problems, items = [], output.eval_input.eval_input_items
    if errors := [item for item in items if item.error is not None]:
        first = f"the first, of row {errors[0].id!r}: {errors[0].error}"
        problems.append(f"{len(errors)} of {len(items)} episodes failed; {first}")
    answered = [item for item in items if item.error is None]
    if answered and all(item.output_obj is None for item in answered):
        problems.append("the workflow returned None for every row; is a `return` missing?")
    scores = [item for _, result in output.evaluation_results for item in result.eval_output_items]
    if missing := [(item.id, message) for item in scores if (message := parse_score(item)[2]) is not None]:
        row_id, message = missing[0]
        problems.append(f"{len(missing)} scores are missing; the first, of row {row_id!r}: {message}")
    return problems


def _interval(low: float, high: float, digits: int = 3) -> str:
    return f"{low:.{digits}f} to {high:.{digits}f}" if math.isfinite(low) else "none of one row"


def counts(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in sorted(dropped.items()))


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}"


def _percent(share: float) -> str:
    """With two digits below 10 %, and whole numbers above."""
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"

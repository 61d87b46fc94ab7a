"""The console output of a run."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from insitu.algorithms.statistics import mean_ci95
from insitu.evaluation.evaluators import scores_by_row
from insitu.schemas.evaluation import EvaluationRunOutput


class Report:
    """The console of a run: a header, a progress bar, a line per epoch, and a table at the end."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=False, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            refresh_per_second=4,
            disable=not self.console.is_terminal,
        )
        self._task: TaskID | None = None

    def header(self, run_id: str, settings: Mapping[str, Any]) -> None:
        self.console.print(f"[bold]run {run_id}[/bold]")
        for name, value in settings.items():
            self.note(f"  {name}: {', '.join(_flat(value))}")

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def begin(self, what: str, total: int | None) -> None:
        """Replaces the progress bar."""
        self.end()
        self._progress.start()
        self._task = self._progress.add_task(what, total=total)

    def advance(self) -> None:
        if self._task is not None:
            self._progress.advance(self._task)

    def end(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._progress.stop()
            self._task = None

    def validation(self, record: Mapping[str, Any]) -> None:
        if "error" in record:
            self.note(f"validation at epoch {record['epoch']} FAILED: {record['error']}")
            return
        dropped = f", dropped: {counts(record['dropped'])}" if record["dropped"] else ""
        self.note(
            f"validation at epoch {record['epoch']}: {record['avg_reward']:.3f} "
            f"(95 % CI {_interval(*record['ci95'])}, n = {record['num_examples']}{dropped})"
        )

    def epoch(self, number: int, last: int, m: Mapping[str, Any]) -> None:
        seconds = m.get("seconds", {})
        reward = f"reward {_number(m.get('avg_reward'))}"
        parts = [f"epoch {number}/{last}", reward, f"{m['num_trajectories']} episodes"]
        training = ("loss", "kl", "entropy", "grad_norm", "clip_fraction")
        parts += [f"{name} {_number(m[name])}" for name in training if name in m]
        if m.get("tokens"):
            parts.append(f"{m['tokens']} tokens")
        if (state := m.get("curriculum_state")) is not None:
            share = f"{len(state['included_groups'])} of {state['total_groups']} examples"
            parts.append(f"curriculum {100 * state['current_percentile']:.0f} % ({share})")
        if m["dropped"]:
            parts.append(f"dropped: {counts(m['dropped'])}")
        parts.append("+".join(f"{seconds.get(k, 0.0):.1f}" for k in ("collect", "train", "validate")) + " s")
        self.note("  ".join(parts))
        if len(functions := m["credit_by_function"]) > 1:
            shares = (
                f"{name} {100 * of['share']:.0f} % ({of['calls']} calls, mean |A| {of['mean_abs_advantage']:.3g})"
                for name, of in functions.items()
            )
            self.note(f"  credit: {', '.join(shares)}")

    def summary(self, validations: Sequence[Mapping[str, Any]], best: Mapping[str, Any] | None, folder: Path) -> None:
        """The scores before, after and of the best version, and the files."""
        scored = [v for v in validations if "error" not in v]
        table = Table("held out", "epoch", "version", "score", "95 % CI", "n", "dropped")
        rows = [("before", scored[0]), ("after", scored[-1])] if scored else []
        if best is not None:
            rows.append(("best", best))
        for name, record in rows:
            version = record.get("policy_version")
            label = "?" if version is None else str(version)
            score, interval = f"{record['avg_reward']:.3f}", _interval(*record["ci95"])
            dropped = counts(record["dropped"]) or "none"
            table.add_row(name, str(record["epoch"]), label, score, interval, str(record["num_examples"]), dropped)
        if rows:
            self.console.print(table)
        names = ("validation_history.json", "training_metrics.jsonl", "reward_plot.png", "episodes.jsonl")
        self.note(f"files: {folder}/  ({', '.join(name for name in names if (folder / name).exists())} ...)")


def evaluation_table(output: EvaluationRunOutput) -> Table:
    """A row per evaluator: mean and 95 % confidence interval over dataset rows, and missing scores."""
    items = output.eval_input.eval_input_items
    failed = sum(item.error is not None for item in items)
    table = Table("evaluator", "mean", "95 % CI", "rows", "episodes", "failed", "unscored")
    for name, result in output.evaluation_results:
        rows = scores_by_row(result)
        scored = sum(map(len, rows.values()))
        mean, interval = "-", "-"
        if rows:
            estimate = mean_ci95([sum(scores) / len(scores) for scores in rows.values()])
            mean, interval = f"{estimate.mean:.4f}", _interval(estimate.low, estimate.high, 4)
        unscored = len(result.eval_output_items) - scored
        table.add_row(name, mean, interval, str(len(rows)), str(len(items)), str(failed), str(unscored))
    return table


def _interval(low: float, high: float, digits: int = 3) -> str:
    return f"{low:.{digits}f} to {high:.{digits}f}" if math.isfinite(low) else "none of one row"


def counts(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in sorted(dropped.items()))


def _flat(value: Any, prefix: str = "") -> Iterator[str]:
    """The leaves of nested settings with their dotted names."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield f"{prefix} {value}".strip()


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}"

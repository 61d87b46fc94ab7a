"""What the pages of all runs and of one run show, from the small files of each run."""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from insitu.disk.folder_lock import LOCK_FILE, locked_by
from insitu.errors import ConfigError, RequestRefused
from insitu.runs.files import COLLECTIONS, EVENTS, FINAL_METRICS, METRICS
from insitu.runs.reader import Problems, RunReader
from insitu.runs.summary import RunSummary, read_details, read_summary
from insitu.view.opened import OpenedFolder

RECORDED = ("advantages", "credit", "discount", "on_failure", "targets", "training", "episodes_from", "dataset", "seed")
"""Keys of `run.json` on the page of a run, beside the settings of its file."""

Signature = dict[str, tuple[int, int, int] | str | None]
"""What changes when files of a run do: inode, size and time of each, and the process that has locked it."""


def signature(run: Path) -> Signature:
    """Sizes and times of the files in the directory itself; empty if it is gone."""
    found: Signature = {}
    try:
        for path in run.iterdir():
            if not path.name.startswith(".") and path.is_file():
                stat = path.stat()
                found[path.name] = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    except OSError:  # deleted or renamed meanwhile
        return {}
    found[LOCK_FILE] = locked_by(run)
    return found


class Overview:
    """The lines of the list of runs, read again when files of a run have changed."""

    def __init__(self, opened: OpenedFolder) -> None:
        self._opened = opened
        self._lines: dict[str, tuple[Signature, dict[str, Any]]] = {}

    def all_runs(self) -> dict[str, Any]:
        """The answer of `/api/runs`."""
        runs = self._opened.runs()
        self._lines = {name: self._line(name, path) for name, path in runs.items()}
        lines = [line for _, line in self._lines.values()]
        return {"folder": str(self._opened.base), "runs": lines, "note": None if lines else self._opened.note()}

    def _line(self, name: str, path: Path) -> tuple[Signature, dict[str, Any]]:
        now = signature(path)
        known = self._lines.get(name)
        return known if known is not None and known[0] == now else (now, _run_line(name, path))


def _run_line(name: str, path: Path) -> dict[str, Any]:
    summary, files = read_summary(path), RunReader(path)
    problems = summary.problems
    epochs = files.readable(METRICS, problems)
    validations: list[dict[str, Any]] = problems.attempt(files.validations, [])
    events = files.readable(EVENTS, problems)
    totals: dict[str, Any] = problems.attempt(lambda: _totals(epochs, validations, events), {})
    return {"run": name, "name": path.name, **summary.as_json(), **totals}


def _totals(
    epochs: list[dict[str, Any]], validations: list[dict[str, Any]], events: list[dict[str, Any]]
) -> dict[str, Any]:
    """Each value is None if it is unknown; `seconds` are those of complete epochs and of the first validation."""
    scores = [[each["epoch"], each["avg_reward"]] for each in validations if "error" not in each]
    tokens = [epoch["tokens"] for epoch in epochs if epoch.get("tokens") is not None]
    phases = [seconds for epoch in epochs for seconds in (epoch.get("seconds") or {}).values()]
    phases += [each["seconds"] for each in validations if each["epoch"] == 0 and "seconds" in each]
    return {
        "last_score": scores[-1][1] if scores else None,
        "tokens": sum(tokens) if tokens else None,
        "seconds": sum(phases) if phases else None,
        "started": events[0].get("time") if events else None,
        "scores": scores,
        "rewards": [[epoch.get("epoch"), epoch.get("avg_reward")] for epoch in epochs],
    }


def one_run(name: str, path: Path) -> dict[str, Any]:
    """The answer of `/api/run`. Raises RequestRefused (404) if the directory has gone meanwhile."""
    try:
        details = read_details(path)
    except ConfigError as error:
        raise RequestRefused(str(error), status=404, param="run", code="unknown_run") from None
    summary = details.summary
    recorded: dict[str, Any] = Problems().attempt(RunReader(path).settings, {})
    totals: dict[str, Any] = summary.problems.attempt(
        lambda: _totals(details.epochs, details.validations, details.events), {}
    )
    dropped: dict[str, int] = summary.problems.attempt(lambda: _count_dropped(details.epochs), {})
    content = details.as_json()
    content["summary"] = {"run": name, "name": path.name, **summary.as_json(), **totals}
    return {
        "run": name,
        **content,
        **{key: recorded.get(key) for key in RECORDED},
        "source": recorded.get("source"),
        "insitu": recorded.get("insitu"),
        "config": recorded.get("config"),
        "dropped": dropped,
        **_customizer(path, summary),
        "problems": summary.problems,
    }


def _customizer(path: Path, summary: RunSummary) -> dict[str, Any]:
    """What a run on NeMo Customizer has instead of epochs."""
    files = RunReader(path)
    final: dict[str, Any] | None = summary.problems.attempt(lambda: files.object(FINAL_METRICS), None)
    return {"collections": files.readable(COLLECTIONS, summary.problems), "final_metrics": final}


def _count_dropped(epochs: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    dropped: Counter[str] = Counter()
    for reason, count in chain.from_iterable((epoch.get("dropped") or {}).items() for epoch in epochs):
        dropped[reason] += count
    return dict(dropped.most_common())

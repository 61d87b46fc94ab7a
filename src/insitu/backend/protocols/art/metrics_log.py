"""Metrics that clients logged per step; they determine the best checkpoint."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from insitu.backend.protocols.art.trajectories import ArtGroup


class MetricsLog:
    """`history.jsonl` in the model's folder: a line per log request, with metrics named `SPLIT/METRIC`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "history.jsonl"
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self._records: list[dict[str, Any]] = [json.loads(record) for record in lines]

    def log(self, step: int, split: str, groups: Sequence[ArtGroup]) -> None:
        """Logs the means over all trajectories of `groups`."""
        record = {"step": step, **{f"{split}/{name}": value for name, value in _means(groups).items()}}
        self._records.append(record)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def metrics(self, step: int) -> dict[str, float]:
        """Means of the metrics logged at this step."""
        values: dict[str, list[float]] = defaultdict(list)
        for record in self._records:
            if record["step"] == step:
                for name, value in record.items():
                    if name != "step":
                        values[name].append(value)
        return {name: fmean(each) for name, each in values.items()}

    def best(self, metric: str, smoothing: float, steps: Iterable[int]) -> int | None:
        """Returns the step with the highest metric, the later one of equals; None if the metric was never logged.

        `smoothing` is the weight of each step relative to the average of earlier steps; 1 disables smoothing.
        """
        weighted = total = 0.0
        best: tuple[float, int] | None = None
        for step in sorted(steps):
            value = self.metrics(step).get(metric)
            if value is None:
                continue
            weighted, total = weighted * (1 - smoothing) + value, total * (1 - smoothing) + 1
            best = max(best or (-math.inf, step), (weighted / total, step))
        return best[1] if best else None


def _means(groups: Sequence[ArtGroup]) -> dict[str, float]:
    """ART's metrics: reward, exception_rate, the trajectories' own metrics, reward_std_dev within groups."""
    values: dict[str, list[float]] = defaultdict(list)
    deviations = []
    for group in groups:
        values["exception_rate"] += [0.0] * len(group.trajectories) + [1.0] * group.exceptions
        for trajectory in group.trajectories:
            values["reward"].append(trajectory.reward)
            for name, value in trajectory.metrics.items():
                values[name].append(value)
        if len(group.trajectories) > 1:
            deviations.append(pstdev([trajectory.reward for trajectory in group.trajectories]))
    means = {name: fmean(each) for name, each in values.items() if each}
    return means | ({"reward_std_dev": fmean(deviations)} if deviations else {})

"""What is known of a model's steps: means of what clients logged, which decide the checkpoint that is best."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from insitu.backend.art.messages import Group


class History:
    """`history.jsonl` in the model's folder: a line for each logging, its metrics named `SPLIT/METRIC`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "history.jsonl"
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self._lines: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def log(self, step: int, split: str, groups: Sequence[Group]) -> None:
        """The means over all trajectories of `groups`."""
        line = {"step": step, **{f"{split}/{name}": value for name, value in _means(groups).items()}}
        self._lines.append(line)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def metrics(self, step: int) -> dict[str, float]:
        """The means of what was logged at this step."""
        values: dict[str, list[float]] = defaultdict(list)
        for line in self._lines:
            if line["step"] == step:
                for name, value in line.items():
                    if name != "step":
                        values[name].append(value)
        return {name: fmean(each) for name, each in values.items()}

    def best(self, metric: str, smoothing: float, steps: Iterable[int]) -> int | None:
        """Of these, the step whose metric is highest, the later of equals; none where none has it.

        `smoothing` is the weight of each step against the average of those before it: 1 for none.
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


def _means(groups: Sequence[Group]) -> dict[str, float]:
    """As ART has them: reward, exception_rate, each metric of the trajectories, reward_std_dev within groups."""
    values: dict[str, list[float]] = defaultdict(list)
    spreads = []
    for group in groups:
        values["exception_rate"] += [0.0] * len(group.trajectories) + [1.0] * group.exceptions
        for trajectory in group.trajectories:
            values["reward"].append(trajectory.reward)
            for name, value in trajectory.metrics.items():
                values[name].append(value)
        if len(group.trajectories) > 1:
            spreads.append(pstdev([trajectory.reward for trajectory in group.trajectories]))
    means = {name: fmean(each) for name, each in values.items() if each}
    return means | ({"reward_std_dev": fmean(spreads)} if spreads else {})

"""Draws the held-out score of several runs over their epochs: plot_curves.py PICTURE TITLE=RUN [TITLE=RUN ...]

Runs with the same title share a panel; a band is the 95 % confidence interval.
"""

import json
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def draw(picture: Path, runs: list[tuple[str, Path]]) -> None:
    titles = list(dict.fromkeys(title for title, _ in runs))
    figure = Figure(figsize=(5 * len(titles), 3.6), layout="constrained")
    for axes, title in zip(figure.subplots(1, len(titles), squeeze=False)[0], titles, strict=True):
        for run in (run for its, run in runs if its == title):
            history = json.loads((run / "validation_history.json").read_text())
            epochs = [point["epoch"] for point in history]
            axes.plot(epochs, [point["avg_reward"] for point in history], "o-", ms=3, label=run.name)
            axes.fill_between(epochs, *zip(*(point["ci95"] for point in history), strict=True), alpha=0.2)
        axes.set(title=title, xlabel="epoch", ylabel="held-out score", ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    FigureCanvasAgg(figure).print_figure(str(picture), dpi=110)


if __name__ == "__main__":
    pairs = (argument.split("=", 1) for argument in sys.argv[2:])
    draw(Path(sys.argv[1]), [(title, Path(run)) for title, run in pairs])

"""The plot of a run, redrawn after its epochs."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from insitu.disk.files import cannot_write

Records = Sequence[Mapping[str, Any]]

_SHARE_OF_TIME = 0.02
"""Drawing takes at most this share of a run's time."""
_AXES = (0.1, 0.115, 0.88, 0.815)
"""Left, bottom, width, height; a layout computed from the labels would double the time of drawing."""


class RewardPlot:
    """`reward_plot.png`, of training and held-out reward over the epochs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._drawn = (0, 0)
        self._due = 0.0
        self._drawing: asyncio.Future[None] | None = None

    async def update(self, rewards: Records, validations: Records) -> None:
        """Draws the plot, unless that was done a moment ago; `finish` then draws what is missing."""
        if time.monotonic() >= self._due:
            await self.finish(rewards, validations)

    async def finish(self, rewards: Records, validations: Records) -> None:
        """Draws the plot if there is anything new. Raises InsituError if it cannot be written."""
        if self._drawing is not None:  # a run that is interrupted meanwhile does not end its thread
            await asyncio.gather(self._drawing, return_exceptions=True)
        given = (len(rewards), len(validations))
        if given == self._drawn:
            return
        started = time.monotonic()
        self._drawing = asyncio.ensure_future(asyncio.to_thread(_draw, self._path, [*rewards], [*validations]))
        try:
            await asyncio.shield(self._drawing)
        finally:
            if self._drawing.done():
                self._drawing = None
        ended = time.monotonic()
        self._drawn, self._due = given, ended + (ended - started) / _SHARE_OF_TIME


def _draw(path: Path, rewards: Records, validations: Records) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5))
    axes = figure.add_axes(_AXES)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    trained = [(r["epoch"], r["avg_reward"]) for r in rewards if r["avg_reward"] is not None]
    if trained:
        axes.plot(*zip(*trained, strict=True), ".-", color="0.6", label="training")
    scored = [v for v in validations if "error" not in v]
    if scored:
        means = [v["avg_reward"] for v in scored]
        errors = [[abs(m - v["ci95"][side]) for m, v in zip(means, scored, strict=True)] for side in (0, 1)]
        axes.errorbar([v["epoch"] for v in scored], means, errors, fmt="o-", capsize=3, label="held out, 95 % CI")
    axes.set(xlabel="epoch", ylabel="mean reward")
    axes.grid(alpha=0.3)
    if trained or scored:
        axes.legend(loc="lower right")
    temporary = path.with_name(f".{path.name}")
    try:
        FigureCanvasAgg(figure).print_figure(str(temporary), format="png", dpi=110)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise cannot_write(path, error) from error

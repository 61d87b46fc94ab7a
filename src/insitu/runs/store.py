"""Writes the files of a run in progress (see `files`), its plot included."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from insitu.disk.files import new_file, writable_folder, writing
from insitu.disk.folder_lock import LOCK_FILE, FolderLock
from insitu.disk.json_files import Block, LineFile, dump_lines, shorter_than_written, write_json
from insitu.errors import ConfigError, InsituError
from insitu.runs import files
from insitu.runs.records import call_records, comparable_validations, episode_record, row_record, sides_of
from insitu.schemas.episodes import FORMAT_VERSION
from insitu.schemas.evaluation import EvalInputItem
from insitu.schemas.groups import GroupRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

OUTPUT_DIR = "finetuning.output_dir"
ORPHAN_SECONDS = 60.0
"""Time for the backend of a run that was killed to notice that and to end."""
_SHARE_OF_TIME = 0.02
"""Drawing the plot takes at most this share of a run's time."""
_FIRST_PLOT_SECONDS = 5.0
"""A shorter run draws its plot once, at its end."""
_AXES = (0.1, 0.115, 0.88, 0.815)
"""Left, bottom, width, height; a layout computed from the labels would double the time of drawing."""

Records = Sequence[Mapping[str, Any]]


def set_aside(folder: Path, wait: float = ORPHAN_SECONDS) -> Path | None:
    """Moves an earlier run in `folder` to `<folder>.1` (or .2, ...) and returns the new path; None if there is none.

    Raises ConfigError if that run has not ended, or its backend not within `wait` seconds.
    """
    folder = folder.resolve()
    if not folder.is_dir():
        return None
    with FolderLock(folder, OUTPUT_DIR):
        if (folder / files.BACKEND_FOLDER / LOCK_FILE).exists():
            FolderLock(folder / files.BACKEND_FOLDER, OUTPUT_DIR, wait=wait).release()
        if not files.holds_run(folder):
            return None
        if Path.cwd().is_relative_to(folder):
            raise ConfigError(f"{OUTPUT_DIR}: {folder} holds an earlier run and the working directory: cannot move it")
        target = move_aside(folder, OUTPUT_DIR)
    (target / LOCK_FILE).unlink(missing_ok=True)
    return target


def move_aside(folder: Path, key: str) -> Path:
    """Renames a folder to the first free of `<folder>.1`, `.2`, ...; raises ConfigError naming `key`."""
    number = 1
    while (target := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    try:
        folder.rename(target)
    except OSError as error:
        raise ConfigError(f"{key}: {folder} cannot be moved to {target}: {error.strerror}") from error
    return target


class RunStore:
    """Writes the files of a run in progress, whose directory it locks until `close`.

    Replaced files survive a power failure immediately, appended lines after `sync`.
    """

    def __init__(self, folder: Path, key: str = OUTPUT_DIR) -> None:
        self.folder = folder
        self.path = writable_folder(folder, key)
        """The folder wherever the process is: the workflow may change the working directory."""
        self._lock = FolderLock(folder, key)
        self._files: dict[str, LineFile] = {}
        self._is_closed = False
        self.keeps_token_ids = True
        """Whether calls are recorded with the ids of their tokens."""

    def close(self) -> None:
        """Unlocks the folder. Episodes that still run are not written: another process may continue the run."""
        self._is_closed = True
        while self._files:
            _, file = self._files.popitem()
            try:
                file.close()
            except InsituError as error:  # closes the others, and does not mask what ended the run
                logger.error("%s", error)
        self._lock.release()

    def append(self, name: str, records: Iterable[Any]) -> Block:
        """Appends whole lines to a file, after a first line with the format's version; returns where they are."""
        file, compressed = self._open(name), name in files.BLOCKS
        if file.size == 0 and name not in files.PLAIN_LINES:
            file.append(dump_lines([{"format": FORMAT_VERSION}]), compressed=compressed)
        return file.append(dump_lines(records), compressed=compressed)

    def _open(self, name: str, size: int | None = None) -> LineFile:
        """Blocks are appended to a new file, or to one of known `size`. Raises InsituError after `close`."""
        if self._is_closed:
            raise InsituError(f"{self.path / name} is not written: the run has ended")
        if name not in self._files:
            path = self.path / name
            if name in files.BLOCKS and size is None and path.exists():
                raise InsituError(f"{path} exists already; it is not overwritten")
            self._files[name] = LineFile(path, size if name in files.BLOCKS else None)
        return self._files[name]

    def sizes(self) -> dict[str, int]:
        """Bytes of the files with lines of each epoch."""
        return {name: self._files[name].size for name in files.BY_EPOCH if name in self._files}

    def cut_to(self, sizes: Mapping[str, int]) -> None:
        """Removes the lines that were written after the files had these sizes. Raises InsituError if one is shorter."""
        before = {name: (self.path / name).stat().st_size for name in files.BY_EPOCH if (self.path / name).exists()}
        for name, size in sizes.items():
            if before.get(name, 0) < size:  # before any of them is changed
                raise InsituError(shorter_than_written(self.path / name, before.get(name, 0), size))
        for name in files.BY_EPOCH:
            if name in sizes or name in before:
                self._open(name, sizes.get(name, 0)).truncate(sizes.get(name, 0))
        if before != self.sizes():
            with suppress(OSError):
                (self.path / files.INDEX).unlink()

    def clear(self, name: str) -> None:
        """Removes all lines of a file."""
        if name in self._files or (self.path / name).exists():
            self._open(name).truncate(0)

    def record_event(self, event: str, **details: Any) -> None:
        self.append(files.EVENTS, [{"time": datetime.now(UTC).isoformat(), "event": event, **details}])

    def sync(self) -> None:
        """Makes all lines appended so far survive a power failure."""
        for file in [*self._files.values()]:  # in a thread, while episodes of batches ahead open others
            file.sync()

    def write(self, name: str, data: Any) -> Path:
        """Replaces a JSON file atomically."""
        return write_json(self.path / name, data)

    def relative(self, path: str | None) -> str | None:
        """A path in the directory, such as a checkpoint's, relative to it, so that it stays right when a run is moved.

        So is that of a checkpoint of which the directory has its own, as a copy of the run it was written for. Other
        paths, such as those on another machine, are returned as they are.
        """
        if path is not None and (self.path / (own := f"{files.CHECKPOINTS}/{Path(path).name}")).is_dir():
            return own
        inside = path is not None and Path(path).is_relative_to(self.path)
        return str(Path(path).relative_to(self.path)) if path is not None and inside else path

    def append_group(self, record: GroupRecord, epoch: int, row: EvalInputItem | None = None) -> None:
        calls = [line for e in record.episodes for line in call_records(e.key.text(), e.calls)]
        if not self.keeps_token_ids:
            calls = [{**line, "prompt_token_ids": None, "token_ids": None} for line in calls]
            for line in calls:
                line.pop("sent_logprobs", None)
        blocks = {
            files.CALLS: self.append(files.CALLS, calls),
            files.EPISODES: self.append(files.EPISODES, map(episode_record, record.episodes)),
        }
        rows = {episode.key.row_id: None for episode in record.episodes}
        paired = {name for pair in record.trajectories for _, name, _ in sides_of(pair)}
        group = {
            "epoch": epoch,
            "row_id": record.row_id,
            **({"rows": [*rows]} if rows != {record.row_id: None} else {}),
            "num_episodes": len(record.episodes),
            "episodes": [t.id for t in record.trajectories],
            "rewards": [t.reward for t in record.trajectories],
            **({"paired": sorted(paired)} if paired else {}),
            "dropped": dict(record.dropped),
            **({"saved": record.saved} if record.saved else {}),
            **({"replaced_by": record.replaced_by} if record.replaced_by is not None else {}),
            **({"row": row_record(row)} if row is not None else {}),
            "blocks": blocks,
        }
        self.append(files.GROUPS, [group])


class RewardPlot:
    """`reward_plot.png`, of training and held-out reward over the epochs."""

    def __init__(
        self,
        path: Path,
        draw: Callable[[Path, Records, Records], None] | None = None,
        delay: float = _FIRST_PLOT_SECONDS,
    ) -> None:
        self._path = path
        self._draw = draw or draw_rewards
        self._drawn = (0, 0)
        self._due = time.monotonic() + delay
        self._drawing: asyncio.Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "insitu plot")
        """One, as matplotlib opens its fonts again for each thread that draws."""

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    async def update(self, rewards: Records, validations: Records) -> None:
        """Draws the plot, unless that was done a moment ago; `finish` then draws what is missing."""
        if time.monotonic() >= self._due:
            await self.finish(rewards, validations)

    async def finish(self, rewards: Records, validations: Records) -> None:
        """Draws the plot if there is anything new. Raises InsituError if it cannot be written."""
        if self._drawing is not None:  # a run that is interrupted meanwhile does not end its thread
            await asyncio.gather(self._drawing, return_exceptions=True)
        counts = (len(rewards), len(validations))
        if counts == self._drawn:
            return
        started = time.monotonic()
        loop, given = asyncio.get_running_loop(), (self._path, [*rewards], [*validations])
        self._drawing = asyncio.ensure_future(loop.run_in_executor(self._thread, self._draw, *given))
        try:
            await asyncio.shield(self._drawing)
        finally:
            if self._drawing.done():
                self._drawing = None
        ended = time.monotonic()
        self._drawn, self._due = counts, ended + (ended - started) / _SHARE_OF_TIME


def draw_rewards(path: Path, rewards: Records, validations: Records) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = reward_figure(rewards, validations)
    with writing(path), new_file(path, overwrite=True) as draft:
        FigureCanvasAgg(figure).print_figure(str(draft), format="png", dpi=110)


def reward_figure(rewards: Records, validations: Records) -> "Figure":
    """Rewards and held-out scores by epoch; scores on other rows or by another evaluator than the latest are apart."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5))
    axes = figure.add_axes(_AXES)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    trained = [(r["epoch"], r["avg_reward"]) for r in rewards if r["avg_reward"] is not None]
    if trained:
        axes.plot(*zip(*trained, strict=True), ".-", color="0.6", label="training")
    scored = comparable_validations(validations)
    shown = set(map(id, scored))
    others: dict[str, list[tuple[int, float]]] = {}
    for each in validations:
        if "error" not in each and id(each) not in shown:
            others.setdefault(each["scored_by"], []).append((each["epoch"], each["avg_reward"]))
    for number, curve in enumerate(others.values()):
        label = "_" * (number > 0) + "held out, other rows or evaluator"  # matplotlib lists none that begin with _
        axes.plot(*zip(*curve, strict=True), "o:", color="C0", fillstyle="none", label=label)
    if scored:
        means = [v["avg_reward"] for v in scored]
        errors = [[abs(m - v["ci95"][side]) for m, v in zip(means, scored, strict=True)] for side in (0, 1)]
        axes.errorbar([v["epoch"] for v in scored], means, errors, fmt="o-", capsize=3, label="held out, 95 % CI")
    axes.set(xlabel="epoch", ylabel="mean reward")
    axes.grid(alpha=0.3)
    if trained or scored:
        axes.legend(loc="lower right")
    return figure

"""What `insitu.finetune` and `insitu.evaluate` return: views of the files that they have written."""

import html
import os
import sys
import threading
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from insitu.algorithms.statistics import Estimate, rows_ci95
from insitu.collect.evaluators import parse_score, scores_by_row
from insitu.config import Config
from insitu.config.code import stop_import
from insitu.errors import ConfigError, InsituError, a_type
from insitu.runs.checkpoints import checkpoint_of_run
from insitu.runs.files import BEST, METRICS, holds_run
from insitu.runs.reader import RunReader
from insitu.runs.records import StoredGroup, natural
from insitu.runs.summary import RunSummary, read_summary
from insitu.schemas.episodes import Episode
from insitu.schemas.evaluation import EvaluationRunOutput
from insitu.training.report import evaluation_problems

if TYPE_CHECKING:
    from insitu.api.serving import TrainedAgent, TrainedModel
    from insitu.runs.replay import StoredRun

_SHOWN = 20
"""Rows of a table that a notebook shows."""
_NAMED = 8
"""Columns that a table's `repr` names."""
_OF_EPISODE = ("id", "rep", "question", "expected", "answer", "error")
"""Columns of a table of an evaluation that are no scores."""


class Table(list[dict[str, Any]]):
    """Records as rows, which a notebook shows as a table; `Table(...).to_pandas()` and `to_polars()` convert it."""

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(key for row in self for key in row))

    def column(self, name: str) -> list[Any]:
        """The values of a column, None in rows without it. Raises KeyError if no row has it."""
        if name not in self.columns:
            raise KeyError(f"{name!r}; available: {', '.join(self.columns)}")
        return [row.get(name) for row in self]

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame`; needs pandas."""
        import pandas

        return pandas.DataFrame(list(self))

    def to_polars(self) -> Any:
        """A `polars.DataFrame`; needs polars."""
        import polars

        return polars.DataFrame(list(self), infer_schema_length=None, strict=False)

    def __repr__(self) -> str:
        names = ", ".join(self.columns[:_NAMED]) + ", ..." * (len(self.columns) > _NAMED)
        reward = self[-1].get("avg_reward") if self else None
        last = f"; last avg_reward {reward:.4g}" if isinstance(reward, float) else ""
        return f"Table({len(self)} rows: {names}{last})"

    def _repr_html_(self) -> str:
        columns = self.columns
        head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
        rows = ("".join(f"<td>{_cell(row.get(name))}</td>" for name in columns) for row in self[:_SHOWN])
        more = f"<p>{len(self) - _SHOWN} more rows</p>" if len(self) > _SHOWN else ""
        return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>{more}"


def _cell(value: Any) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return html.escape(text[:200])


class Episodes(Sequence[Episode]):
    """Recorded episodes, or those of a row, in the order of their groups; read from the files when they are used."""

    def __init__(self, stored: "StoredRun", groups: Sequence[StoredGroup], row: str | None = None) -> None:
        self._stored, self._groups, self._row = stored, groups, row

    def __len__(self) -> int:
        return sum(map(self._size, self._groups))

    def __iter__(self) -> Iterator[Episode]:
        return (episode for group in self._groups for episode in self._load(group))

    def _load(self, group: StoredGroup) -> list[Episode]:
        return [episode for episode in self._stored.load(group) if self._row in (None, episode.key.row_id)]

    def _size(self, group: StoredGroup) -> int:
        return group.size if self._row is None or len(group.rows) == 1 else len(self._load(group))

    @overload
    def __getitem__(self, index: int) -> Episode: ...
    @overload
    def __getitem__(self, index: slice) -> list[Episode]: ...
    def __getitem__(self, index: int | slice) -> Episode | list[Episode]:
        positions = range(len(self))
        if isinstance(index, slice):
            return self._read(positions[index])
        return self._read([positions[index]])[0]

    def _read(self, positions: Sequence[int]) -> list[Episode]:
        wanted, start, found = set(positions), 0, dict[int, Episode]()
        for group in self._groups:
            numbers = range(start, start + self._size(group))
            if not wanted.isdisjoint(numbers):
                loaded = zip(numbers, self._load(group), strict=True)
                found |= {number: episode for number, episode in loaded if number in wanted}
            start = numbers.stop
        return [found[position] for position in positions]

    def __repr__(self) -> str:
        return f"Episodes({len(self)} of {self._stored.folder})"


class Run(AbstractContextManager["Run"]):
    """A run, by its folder. Its properties are read from the files, so they are those of a run in progress as well.

    `config` is the YAML file that `ask` and `agent` use in place of the run's. They start a backend process when they
    are first called, which `close`, the end of a `with` statement, or the end of the program ends.
    """

    def __init__(self, folder: str | Path, config: str | os.PathLike[str] | Config | None = None) -> None:
        if not isinstance(config, str | os.PathLike | Config | None):
            raise TypeError(f"config is {a_type(config)}; it must be the path of a file, as str or Path, or None")
        self.folder = Path(folder).resolve()
        self._config = config
        self._agents: dict[Path, TrainedAgent] = {}
        self._lock = threading.Lock()
        self._files = RunReader(self.folder)
        if not holds_run(self.folder):
            raise ConfigError(f"{folder} holds no run of insitu finetune")

    @property
    def summary(self) -> RunSummary:
        """The state of the run, and its first and best held-out score."""
        return read_summary(self.folder)

    @property
    def settings(self) -> dict[str, Any]:
        """The content of `run.json`."""
        return self._files.settings(required=True)

    @property
    def best(self) -> dict[str, Any] | None:
        """The validation with the highest score and its checkpoint; None if there was no validation."""
        return self._files.object(BEST)

    @property
    def metrics(self) -> Table:
        """A row per epoch: reward, loss, KL and so on, as in `training_metrics.jsonl`."""
        return Table(self._files.records(METRICS))

    @property
    def validations(self) -> Table:
        """A row per validation, as in `validation_history.json`."""
        return Table(self._files.validations())

    def episodes(self, epoch: int | None = None, row: Any = None) -> Episodes:
        """The recorded episodes with their model calls, group by group; of one epoch or dataset row, if it is given.

        Raises ConfigError for a row without any in the whole run, and an epoch that is none of it.
        """
        from insitu.runs.replay import StoredRun

        if not isinstance(epoch, int | None):
            raise ConfigError(f"epoch is {epoch!r}; it must be a number")
        stored = StoredRun(self.folder, epochs=None if epoch is None else [epoch])
        groups = [group for group in stored.selected if row is None or str(row) in group.rows]
        if not groups and row is not None:
            played = sorted({name for group in self._files.groups() for name in group.rows}, key=natural)
            if str(row) not in played:
                known = f"{len(played)} rows have some, such as {', '.join(played[:3])}" if played else "no row has any"
                raise ConfigError(f"row: {self.folder} has no episodes of row {row!r}; {known}")
        return Episodes(stored, groups, None if row is None else str(row))

    def ask(
        self, question: Any, *, row: Any = None, checkpoint: str | None = None, temperature: float | None = None
    ) -> Any:
        """The answer of the trained agent, in a script or a notebook. Raises what the agent raises.

        `row` is what the agent gets as its row, by default the question alone; `checkpoint` as in `model`. All its
        model calls have this `temperature` (0 is greedy), by default those of training: that of the run's settings, or
        else what the agent sends, or else 1.
        """
        stop_import(str(sys._getframe(1).f_globals.get("__name__")))
        return self._agent(checkpoint).ask(question, row, temperature)

    def agent(
        self, question: Any, *, row: Any = None, checkpoint: str | None = None, temperature: float | None = None
    ) -> Awaitable[Any]:
        """`ask` for asynchronous code, which goes on meanwhile: `await run.agent(question)`."""
        stop_import(str(sys._getframe(1).f_globals.get("__name__")))
        return self._agent(checkpoint).agent(question, row, temperature)

    def _agent(self, checkpoint: str | None) -> "TrainedAgent":
        """The agent with these weights, which is started anew if it has lost its backend."""
        from insitu.api.serving import TrainedAgent

        weights = checkpoint_of_run(self.folder, checkpoint, "checkpoint")
        with self._lock:
            if (agent := self._agents.get(weights)) is None or agent.has_ended:
                agent = self._agents[weights] = TrainedAgent(self.folder, weights, self._config)
            return agent

    def close(self) -> None:
        """Ends the backend processes of `ask` and `agent`, if any."""
        with self._lock:
            while self._agents:
                self._agents.popitem()[1].close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def model(self, checkpoint: str | None = None, device: str | None = None) -> "TrainedModel":
        """Serves the trained model on this machine until it is closed; `async with` gives an `insitu.Model`.

        `checkpoint` is `best` (the default, if there was a validation), `latest`, or `step_N`.
        """
        from insitu.api.serving import TrainedModel

        return TrainedModel(self.folder, checkpoint, device)

    def __repr__(self) -> str:
        about = self.summary
        scores = ""
        if about.first_score is not None and about.best_score is not None:
            scores = f", held out {about.first_score:.3f}, best {about.best_score:.3f}"
        return f"Run({str(self.folder)!r}: {about.status}, epoch {about.epoch} of {about.epochs}{scores})"


class Evaluation:
    """The scores of an agent on rows; `output` is what the evaluators returned, `folder` has it as files."""

    def __init__(self, folder: Path, output: EvaluationRunOutput) -> None:
        self.folder = folder
        self.output = output
        self.problems = evaluation_problems(output)
        """Failed episodes and missing scores: how many, and the first of each."""
        if not self.scores:
            raise InsituError("; ".join(["nothing could be scored", *self.problems]))

    @property
    def scores(self) -> dict[str, Estimate]:
        """By evaluator: the mean over rows, and the ends of its 95 % confidence interval."""
        by_row = {name: scores_by_row(result) for name, result in self.output.evaluation_results}
        return {name: rows_ci95(rows.values()) for name, rows in by_row.items() if rows}

    @property
    def score(self) -> float:
        """The mean of the first evaluator that scored anything."""
        return next(iter(self.scores.values())).mean

    @property
    def table(self) -> Table:
        """A row per episode: question, expected answer, answer, error, and the score of each evaluator.

        The score of an evaluator that is called like another column is in `score of NAME`.
        """
        scores: dict[tuple[str, int], dict[str, Any]] = {}
        for name, result in self.output.evaluation_results:
            column = f"score of {name}" if name in _OF_EPISODE else name
            for item in result.eval_output_items:
                scores.setdefault((str(item.id), item.rep), {})[column] = parse_score(item)[0]
        return Table(
            {
                "id": item.id,
                "rep": item.rep,
                "question": item.input_obj,
                "expected": item.expected_output_obj,
                "answer": item.output_obj,
                "error": item.error,
                **scores.get((str(item.id), item.rep), {}),
            }
            for item in self.output.eval_input.eval_input_items
        )

    def __repr__(self) -> str:
        scores = ", ".join(
            f"{name} {e.mean:.4f} (95 % CI {e.low:.4f} to {e.high:.4f})" for name, e in self.scores.items()
        )
        return f"Evaluation({'; '.join([scores, *self.problems])})"

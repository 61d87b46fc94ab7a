"""`insitu train`: from the names of functions, a file of rows and a model to a run.

    insitu train agent.py:answer --score exact_match --rows rows.jsonl --model my_model

The options become the settings of `insitu.finetune`, which are checked and run in the same way.
"""

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError
from rich.console import Console

from insitu.api.calls import (
    CONFIG,
    agent_block,
    checked_settings,
    errors_in_words,
    set_output,
    set_tiny_training,
    start_request,
)
from insitu.api.results import Run
from insitu.api.settings import STUDENT, Project, Settings, is_written, saved_rows, short_settings
from insitu.collect.datasets import load_dataset, question_key
from insitu.config import Config, check_config
from insitu.config.code import load_code, takes
from insitu.config.yaml_loader import override, parse_override
from insitu.disk.files import writable_folder
from insitu.errors import ConfigError, not_found
from insitu.registry import registry
from insitu.schemas.kinds import EVALUATOR
from insitu.training.report import Report
from insitu.training.runtime import finetuning_main
from insitu.wire.json_values import json_form
from insitu.workflow.event_loop import run_anywhere

T = TypeVar("T")
ROWS_PER_EPOCH = "trajectory_builders.episodes.rows_per_epoch"
_FEW = 30
"""Rows below which the interval of a score is wide: 0.3 and more for 0.5."""
_OPTIONS = {
    "trainer_adapters.backend.model": "--model",
    "the trainer adapter's model": "--model",
    "finetuning.num_epochs": "--epochs",
    ROWS_PER_EPOCH: "--rows_per_epoch",
    "finetuning.output_dir": "--output_dir",
    "eval.general.dataset.file_path": "--rows",
    "workflow.function": "AGENT",
    **dict.fromkeys(
        ("give --force to continue with these", "give --force to continue with this"),
        "start another run with another --output_dir",
    ),
}
"""What the command line calls the keys of a file."""


class Trained(NamedTuple):
    """A run, and a row to ask its agent; `row` is None if the agent does not take the row."""

    run: Run
    question: Any
    row: dict[str, Any] | None

    def next_steps(self) -> list[list[str]]:
        """Commands that look at the run, export its model and ask its agent."""
        folder = os.path.relpath(self.run.folder)
        best = self.run.best
        untrained = ["--checkpoint", "latest"] if best is not None and best.get("checkpoint") is None else []
        name = f"exported/{self.run.folder.name}"
        out = next(free for free in (name, *(f"{name}.{n}" for n in range(1, 1000))) if not os.path.lexists(free))
        question = self.question if isinstance(self.question, str) else _json(self.question)
        row = ["--row", _json(self.row)] if self.row is not None else []
        asked = ["--", question] if question.startswith("-") else [question]
        return [
            ["insitu", "view", folder],
            ["insitu", "export", folder, out, *untrained],
            ["insitu", "ask", *row, *untrained, folder, *asked],
        ]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=json_form)


def train(
    agent: str,
    score: str,
    rows: Path,
    model: str,
    *,
    epochs: int | None = None,
    held_out: str = "0.2",
    overrides: Sequence[tuple[str, str]] = (),
    output_dir: Path | None = None,
    save: Path | None = None,
    resume: bool = False,
    console: Console,
) -> Trained:
    """Trains the model behind a function, whose score on rows that are held out is printed before and after.

    `agent` is FILE.py:FUNCTION or MODULE:FUNCTION, and so is `score`, or the `_type` of an evaluator that needs no
    settings. `held_out` is a fraction of the rows, which the seed chooses, or a file of others. `overrides` are keys of
    a file. `save` is a file that is written with the settings, beside the rows. `resume` continues the run in
    `output_dir`. Raises ConfigError before anything is started.
    """
    here = Path.cwd()
    share = _share(held_out)
    _check_free(save)
    function = load_code(agent, "AGENT", here)
    settings = short_settings(model)
    settings["finetuning"]["num_epochs"] = epochs or 1
    settings["workflow"] = agent_block(function, agent, dict(overrides).get("workflow.framework"), STUDENT)
    settings["eval"]["evaluators"] = _evaluators(score, here)
    for key, text in overrides:
        override(settings, key, parse_override(key, text))
    project = Project.of(settings, {})
    set_tiny_training(project, None, {})
    name = getattr(function, "__name__", type(function).__name__)
    output = set_output(project, "finetuning.output_dir", output_dir, f"runs/{name}")
    with errors_in_words(project, _OPTIONS):
        config, all_rows = _rows(project, rows)
        left, held = split(all_rows, 0.0 if isinstance(share, Path) else share, config.general.seed)
        training: Any = left if held else rows
        validation: Any = held or (share if isinstance(share, Path) else None)
        checked = partial(checked_settings, project, ("--rows", training), validation, {})
        request = start_request(checked, output, resume)
        if save is not None:
            project.save(save)
        is_repeated = project.get("finetuning.validation.reps") is not None
        Report(console).note(f"{rows}: {_about(len(left), len(held), share, is_repeated=is_repeated)}")
        run_anywhere(lambda: finetuning_main(request, console))
    example = (held or left)[0]
    question = example[question_key(config, example)]
    return Trained(Run(output), question, example if callable(function) and takes(function, "row") else None)


def _share(held_out: str) -> float | Path:
    """The fraction of rows that is held out, or the file of those that are."""
    try:
        share = float(held_out)
    except ValueError:
        if not Path(held_out).is_file():
            raise ConfigError(
                f"--held_out is {held_out!r}; it must be a fraction, from 0 to below 1, or a file of rows"
            ) from None
        return Path(held_out)
    if not 0 <= share < 1:
        raise ConfigError(f"--held_out is {held_out}; a fraction must be at least 0 and below 1")
    return share


def split(rows: Sequence[T], share: float, seed: int) -> tuple[list[T], list[T]]:
    """The rows to train on, and those that are held out: at least one of each, or none held out of a single row."""
    count = min(max(1, round(share * len(rows))), len(rows) - 1) if share else 0
    held = {*Random(seed).sample(range(len(rows)), count)}
    return [row for n, row in enumerate(rows) if n not in held], [row for n, row in enumerate(rows) if n in held]


def _about(left: int, held: int, share: float | Path, *, is_repeated: bool) -> str:
    rows = f"{left} row{'s' if left != 1 else ''} to train on"
    if isinstance(share, Path):
        return f"{rows}; held out: {share}"
    if not held:
        return f"{rows}, none held out" + ", because one row is too few" * bool(share)
    few = "; few: hold out more, or repeat them (-o finetuning.validation.reps 4)"
    return f"{rows}, {held} held out" + few * (held < _FEW and not is_repeated)


def _rows(project: Project, rows: Path) -> tuple[Config, list[dict[str, Any]]]:
    """The checked settings, without validation, which lacks its rows, and the rows of the file."""
    project.output = project.folder
    project.dataset("--rows", rows)
    finetuning = {key: value for key, value in project.settings["finetuning"].items() if key != "validation"}
    config = check_config({**project.settings, "finetuning": finetuning}, project.output / CONFIG)
    return config, [dict(item.full_dataset_entry) for item in load_dataset(config)]


def _evaluators(score: str, folder: Path) -> Settings:
    """The section `eval.evaluators` for a function, or for an evaluator that needs no settings."""
    if ":" in score:
        load_code(score, "--score", folder)
        return {score.rpartition(":")[2].replace(".", "_"): {"_type": "python", "function": score}}
    ready = [name for name in registry.names(EVALUATOR) if _needs_no_settings(name)]
    if score not in ready:
        raise ConfigError(f"{not_found('--score:', score, ready)}, or FILE.py:FUNCTION")
    return {score: {"_type": score}}


def _needs_no_settings(name: str) -> bool:
    registration = registry.find(EVALUATOR, name)
    try:
        return registration is not None and bool(registration.config_type())
    except ValidationError:
        return False


def _check_free(save: Path | None) -> None:
    """Raises ConfigError if `insitu train` cannot write this file, or would replace one that it has not written."""
    if save is None or is_written(save):
        return
    writable_folder(save.parent, "--save")
    for path in (save, *(saved_rows(save, f"{name}.jsonl") for name in ("rows", "held_out"))):
        if path.exists() or path.is_symlink():
            raise ConfigError(f"--save: {path} exists already and is not overwritten; give another name")

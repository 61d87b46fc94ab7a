"""One evaluation: the workflow on every row x repetition, every evaluator on the answers, the documented files."""

import asyncio
import json
import logging
import os
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import orjson
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from insitu.builder import Builder
from insitu.config import Config
from insitu.errors import ConfigError
from insitu.evaluation.datasets import FileDatasetConfig, load_dataset, shape_of
from insitu.evaluation.episodes import Attempt, EpisodeRules, run_episode, run_limited
from insitu.evaluation.evaluators import score
from insitu.evaluation.remote import open_workflow
from insitu.evaluation.result_path import ResultPath
from insitu.evaluation.shared import Generations, components, current_run, episode_slot
from insitu.registry import EVALUATOR
from insitu.schemas.episodes import DropReason, Episode, EpisodeKey
from insitu.schemas.evaluation import (
    EvalInput,
    EvalInputItem,
    EvaluationRunOutput,
)
from insitu.schemas.evaluation import EvaluationRunConfig as EvaluationRunConfig  # documented in this place too
from insitu.workflow.conversion import json_form

logger = logging.getLogger(__name__)

_generations = Generations()  # of evaluations that gather for training outside a finetuning run


class EvaluationRun:
    """Runs an evaluation; with a `builder`, or inside a finetuning run of the same file, on components that exist
    already (they are left alive).

    `on_episode` is called with each episode as it ends, for progress. `training`: the answers are to be trained on.
    Then each evaluation samples anew, asks the trained llms for logprobs and token ids, and writes into a folder of its
    own; else it samples the same each time. None: as inside a finetuning run on all but its held-out dataset.
    """

    def __init__(
        self,
        config: EvaluationRunConfig,
        builder: Builder | None = None,
        on_episode: Callable[[Episode], None] | None = None,
        training: bool | None = None,
    ) -> None:
        self.config = config
        self._builder = builder
        self._on_episode = on_episode
        self._training = training
        self._first_generation = 0
        self._result = ResultPath.parse(config.result_json_path)
        self._answered = config.skip_workflow or config.skip_completed_entries
        if self._answered and config.reps != 1:
            raise ConfigError(
                f"reps is {config.reps}, but answers that stand in the dataset are those of one repetition"
            )
        if config.skip_workflow and (config.endpoint or self._result):
            raise ConfigError("skip_workflow runs nothing: endpoint and result_json_path have no meaning with it")

    async def run_and_evaluate(self) -> EvaluationRunOutput:
        """Run and score everything; a row that fails is an item with `error`, never the end of the run."""
        self._take_generations()
        async with components(self.config, self._builder) as (loaded, builder):
            return await self._run(loaded, load_dataset(loaded, self.config.dataset, self._answered), builder)

    def _take_generations(self) -> None:
        """Before anything is awaited: evaluations started one after the other are numbered in that order."""
        run = current_run()
        if self._training is None:
            self._training = run is not None and not run.holds_out(self.config.dataset)
        if self._training:
            self._first_generation = (run.generations if run else _generations).take(self.config.reps)
        elif run is not None:
            run.validations += 1

    async def _run(self, loaded: Config, rows: list[EvalInputItem], builder: Builder) -> EvaluationRunOutput:
        names = loaded.names(EVALUATOR)
        if not names:
            raise ConfigError(f"{loaded.source} has no evaluators: nothing would be scored")
        folder = loaded.eval.folder
        if self._training:
            folder /= f"generation_{self._first_generation}"
        if self.config.write_output:
            writable_folder(folder, "eval.general.output_dir")
        evaluators = {name: await builder.get_evaluator(name) for name in names}
        items = rows
        if not self._answered:
            items = [row.model_copy(update={"rep": rep}) for row in rows for rep in range(self.config.reps)]
        missing = [item for item in items if item.output_obj is None]
        if self.config.skip_workflow:
            _tell_missing(missing, shape_of(loaded).structure.generated_answer_key)
        elif missing:
            await self._run_workflow(loaded, builder, missing)
        done = [item for item in items if item.error is None]
        results = []
        for name, info in evaluators.items():
            output = await score(info, name, done)
            results.append((name, output))
        run_output = EvaluationRunOutput(eval_input=EvalInput(eval_input_items=items), evaluation_results=results)
        if self.config.write_output:
            await asyncio.to_thread(write_files, run_output, folder, shape_of(loaded))
        return run_output

    async def _run_workflow(self, loaded: Config, builder: Builder, items: list[EvalInputItem]) -> None:
        trained = loaded.trained_llms() if self._training else frozenset()
        limits = loaded.eval
        rules = EpisodeRules(
            loaded.general.seed,
            limits.episode_timeout,
            limits.retries,
            trained,
            self._result,
            needs_token_ids=False,  # plugins are promised logprobs; some train on the text
            target_functions=tuple(loaded.finetuning.target_functions),
        )
        epoch = 1 if self._training else 0  # a held-out row and a row to train on never sample with the same seed

        async def run(attempt: Attempt, item: EvalInputItem) -> Episode:
            key = EpisodeKey("eval", epoch, str(item.id), self._first_generation + item.rep)
            async with episode_slot():
                episode = await run_episode(attempt, item, key, rules)
            item.output_obj, item.trajectory = episode.output, episode.steps
            item.error, item.reason = episode.error, episode.reason
            return episode

        async with open_workflow(builder, self.config, trained) as attempt:
            run_one = partial(run, attempt)
            async with aclosing(run_limited(items, run_one, loaded.max_concurrency)) as episodes:
                async for episode in episodes:
                    if self._on_episode is not None:
                        self._on_episode(episode)


def _tell_missing(items: list[EvalInputItem], key: str) -> None:
    """The rows without an answer are told as episodes that failed, with the error they failed with before."""
    for item in items:
        earlier = item.full_dataset_entry.get("error")
        item.error = f"row {item.id!r} has no {key}" + (f": {earlier}" if earlier else "")
        item.reason = DropReason.NO_ANSWER


def writable_folder(folder: Path, key: str) -> None:
    """Make `folder`, and raise ConfigError, naming its key, if nothing can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{key}: cannot write to {folder}: {error.strerror}") from error


def write_files(output: EvaluationRunOutput, folder: Path, shape: FileDatasetConfig) -> None:
    """`workflow_output.json` and a file for each evaluator, each whole or not there; their paths go into `output`.

    The former is a dataset again, with the columns of the one it comes from.
    """
    records = [_workflow_record(item, shape) for item in output.eval_input.eval_input_items]
    output.workflow_output_file = write_json(folder / "workflow_output.json", records)
    output.evaluator_output_files = [
        write_json(folder / f"{name}_output.json", to_json(result)) for name, result in output.evaluation_results
    ]


def _workflow_record(item: EvalInputItem, shape: FileDatasetConfig) -> dict[str, Any]:
    row = item.full_dataset_entry if isinstance(item.full_dataset_entry, dict) else {}
    return row | {
        shape.id_key: item.id,
        "id": item.id,
        "rep": item.rep,
        "question": item.input_obj,
        "answer": item.expected_output_obj,
        shape.structure.generated_answer_key: item.output_obj,
        shape.structure.trajectory_key: to_json(item.trajectory),
        shape.structure.expected_trajectory_key: to_json(item.expected_trajectory),
        "error": item.error,
    }


def to_json(value: Any, depth: int = 4) -> Any:
    """What JSON has no form for: models and dataclasses as objects, bytes in base64, anything unknown as text.

    So is what contains itself, and what a model cannot write; of the containers around that, `depth` are kept.
    """
    try:
        return to_jsonable_python(value, fallback=json_form, bytes_mode="base64", inf_nan_mode="null")
    except ValueError:
        if depth and isinstance(value, BaseModel):
            value = dict(value)
        if depth and isinstance(value, dict):
            return {str(key): to_json(part, depth - 1) for key, part in value.items()}
        if depth and isinstance(value, list):
            return [to_json(part, depth - 1) for part in value]
        return json_form(value)


def dump_json(data: Any, option: int = 0) -> bytes:
    """JSON of anything a workflow may answer."""
    try:
        return orjson.dumps(data, default=to_json, option=option | orjson.OPT_NON_STR_KEYS)
    except TypeError:  # big integers, lone surrogates, keys that are tuples, circles: slower, but it must be kept
        ending = "\n" if option & orjson.OPT_APPEND_NEWLINE else ""
        return (json.dumps(to_json(data)) + ending).encode()


def write_json(path: Path, data: Any) -> Path:
    """Write `data` beside `path` and move it there, so that a reader never sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(dump_json(data, orjson.OPT_INDENT_2))
    temporary.replace(path)
    return path

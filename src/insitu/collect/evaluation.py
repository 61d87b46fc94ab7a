"""An evaluation: the workflow on every row x repetition, every evaluator on the outputs, the documented files.

Validation is that of the held-out dataset with the current model, the same episodes each time.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

from insitu.algorithms.statistics import rows_ci95
from insitu.builder import Builder
from insitu.collect.collector import Observer, Plan, collect_epoch
from insitu.collect.datasets import DatasetConfig, dataset_config, find_dataset, load_dataset
from insitu.collect.episodes import EpisodeOptions
from insitu.collect.evaluators import parse_score, score, scores_by_row
from insitu.collect.shared_run import RunState, config_and_builder, current_run, run_of, share
from insitu.config import Config, Moved, changed_config, check_config, load_config, read_settings
from insitu.config.resolved import block_digest
from insitu.config.yaml_loader import parse_override
from insitu.disk.files import writable_folder
from insitu.disk.json_files import to_json, write_json
from insitu.errors import ConfigError, not_found
from insitu.schemas.episodes import DropReason, Episode, Needs
from insitu.schemas.evaluation import (
    WORKFLOW_OUTPUT,
    EvalInput,
    EvalInputItem,
    EvaluationRunOutput,
    RunRequest,
    TaskEvaluation,
)
from insitu.schemas.evaluation import EvaluationRunConfig as EvaluationRunConfig  # documented under this path too
from insitu.schemas.finetuning import FinetuneConfig, FinetuneRunConfig
from insitu.schemas.kinds import EVALUATOR, LLM
from insitu.schemas.parts import load_named, names
from insitu.wire.json_values import json_path

_generations = count()
"""Numbers the evaluations for training outside a finetuning run."""


@dataclass(eq=False)
class EvaluationRun:
    """Runs an evaluation, on the components of `builder` or of the current finetuning run if there is one.

    `on_episode` is called with each finished episode. `sampled_from` is the URL of the policy's server and the version
    to evaluate, such as `policy@3`; None: the newest one.
    """

    config: EvaluationRunConfig
    builder: Builder | None = None
    on_episode: Callable[[Episode], None] | None = None
    sampled_from: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        config = self.config
        self._training = config.training
        self._first_generation = 0
        result = json_path(config.result_json_path, "result_json_path")
        self._precomputed = config.skip_workflow or config.skip_completed_entries
        if self._precomputed and config.reps != 1:
            raise ConfigError(f"reps is {config.reps}, but precomputed answers require reps=1")
        if config.skip_workflow and (config.endpoint or result):
            raise ConfigError("endpoint and result_json_path have no effect with skip_workflow")

    async def run_and_evaluate(self) -> EvaluationRunOutput:
        """Runs and scores every row; a row that fails becomes an item with `error`."""
        self._take_generations()
        async with config_and_builder(self.config, self.builder) as (loaded, builder):
            rows = load_dataset(loaded, self.config.dataset, self._precomputed, builder.moved)
            run = run_of(builder)
            return await run.watchdog.watch(lambda: self._run(loaded, rows, builder, run))

    def _take_generations(self) -> None:
        """Runs before the first await, so that evaluations are numbered in the order they are started."""
        run = current_run()
        if self._training is None:
            self._training = run is not None and not run.is_held_out(self.config.dataset)
        if self._training:
            self._first_generation, *_ = islice(run.generations if run else _generations, self.config.reps)
        elif run is not None:
            run.validations += 1

    async def _run(
        self, loaded: Config, rows: list[EvalInputItem], builder: Builder, run: RunState
    ) -> EvaluationRunOutput:
        names = loaded.names(EVALUATOR)
        if not names:
            raise ConfigError(f"{loaded.source} has no evaluators: nothing would be scored")
        folder = loaded.eval.folder
        if self._training:
            folder /= f"generation_{self._first_generation}"
        if self.config.write_output:
            writable_folder(loaded.working_dir / folder, "eval.general.output_dir")
        evaluators = {name: await builder.get_evaluator(name) for name in names}
        items = rows
        if not self._precomputed:
            items = [row.model_copy(update={"rep": rep}) for row in rows for rep in range(self.config.reps)]
        missing = [item for item in items if item.output_obj is None]
        if self.config.skip_workflow:
            _mark_missing(missing, dataset_config(loaded).structure.generated_answer_key)
        elif missing:
            await self._collect(loaded, builder, missing, run)
        done = [item for item in items if item.error is None]
        limit = loaded.eval.scoring_limit(len(done))
        results = []
        for name, info in evaluators.items():
            with run.watchdog.waiting(f"the scores of {len(done)} answers", lambda: "they are complete"):
                results.append((name, await score(info, name, done, limit)))
        output = EvaluationRunOutput(eval_input=EvalInput(eval_input_items=items), evaluation_results=results)
        if self.config.write_output:
            await asyncio.to_thread(write_files, output, folder, loaded)
        return output

    async def _collect(self, loaded: Config, builder: Builder, items: list[EvalInputItem], run: RunState) -> None:
        """Runs the workflow on `items` and fills them in."""
        plan = Plan(
            run_id="eval",
            epoch=1 if self._training else 0,  # a held-out row never samples with the seed of a training row
            members=[(item, self._first_generation + item.rep) for item in items],
            options=EpisodeOptions.of(
                loaded,
                training=loaded.trained_llms() if self._training else frozenset(),
                result=self.config.result_json_path,
                needs=min(run.needs, Needs.LOGPROBS),  # plugins may lack token ids
                target_functions=tuple(loaded.finetuning.target_functions),
                sampled_from=self.sampled_from,
            ),
            limit=loaded.max_concurrency,
            service=self.config,
        )
        await collect_epoch(plan, builder, run, [_Answers(plan, self.on_episode)])


class _Answers(Observer):
    """Fills the items of a plan in."""

    def __init__(self, plan: Plan, on_episode: Callable[[Episode], None] | None) -> None:
        self._items = {(str(item.id), generation): item for item, generation in plan.members}
        self._on_episode = on_episode

    def on_episode(self, episode: Episode) -> None:
        episode.fill(self._items[episode.key.member])
        if self._on_episode is not None:
            self._on_episode(episode)


def _mark_missing(items: list[EvalInputItem], key: str) -> None:
    """Marks rows without a precomputed answer as failed, with the error recorded in the dataset if any."""
    for item in items:
        earlier = item.full_dataset_entry.get("error")
        item.error = f"row {item.id!r} has no {key}" + (f": {earlier}" if earlier else "")
        item.reason = DropReason.NO_ANSWER


def write_files(output: EvaluationRunOutput, folder: Path, config: Config) -> None:
    """Writes `workflow_output.json` and a file per evaluator atomically, and sets their paths in `output`.

    `workflow_output.json` is a dataset with the columns of the one it came from.
    """
    records = [_workflow_record(item, dataset_config(config)) for item in output.eval_input.eval_input_items]
    contents = {f"{name}_output.json": to_json(result) for name, result in output.evaluation_results}
    for name, content in {WORKFLOW_OUTPUT: records, **contents}.items():
        write_json(config.working_dir / folder / name, content)
    output.workflow_output_file = folder / WORKFLOW_OUTPUT
    output.evaluator_output_files = [folder / name for name in contents]


def _workflow_record(item: EvalInputItem, columns: DatasetConfig) -> dict[str, Any]:
    row = item.full_dataset_entry if isinstance(item.full_dataset_entry, dict) else {}
    return {
        "question": item.input_obj,
        "answer": item.expected_output_obj,
        **row,  # which may have columns of these names that are neither
        columns.id_key: item.id,
        "id": item.id,
        "rep": item.rep,
        columns.structure.generated_answer_key: item.output_obj,
        columns.structure.trajectory_key: to_json(item.trajectory),
        columns.structure.expected_trajectory_key: to_json(item.expected_trajectory),
        "error": item.error,
    }


def evaluation_of_task(
    request: EvaluationRunConfig, task: str, arguments: Iterable[tuple[str, str]] = (), llm: str | None = None
) -> tuple[EvaluationRunConfig, Path]:
    """The evaluation of an llm of the file on a task that others publish, and the folder of its logs.

    `task` is `KIND:TASK`, or a task of the first kind that is installed; without `llm` the file's policy is evaluated.
    """
    if request.dataset is not None or request.skip_workflow or request.skip_completed_entries:
        raise ConfigError("--task brings its rows: leave out --dataset, --skip_workflow and --skip_completed_entries")
    config = load_config(request.config_file, request.override)
    if llm is None:
        llms = config.names(LLM)
        policies = config.policy_llms() or llms
        if len(policies) != 1:
            raise ConfigError(
                f"--llm must say which model the task evaluates: {', '.join(policies) or 'the file has none'}"
            )
        llm = policies[0]
    elif llm not in config.names(LLM):
        raise ConfigError(not_found("--llm:", llm, config.names(LLM)))
    kinds = names("tasks")
    kind, _, rest = task.partition(":")
    if not kinds:
        raise ConfigError(f"--task: no installed package evaluates {task!r}")
    kind, task = (kind, rest) if kind in kinds else (kinds[0], task)
    values = {key: parse_override(key, text) for key, text in arguments}
    evaluation: TaskEvaluation = load_named("tasks", kind)(config, task, llm, values)
    reps = request.reps if "reps" in request.model_fields_set else evaluation.reps
    changed = {"config_file": changed_config(config, evaluation.values), "override": (), "reps": reps}
    return request.model_copy(update=changed), evaluation.logs


def held_out_config(config: Config, moved: Moved | None = None) -> Config:
    """The file that validation runs: `finetuning.validation.config_file`, or the run's own."""
    validation = config.finetuning.validation
    if validation is None or validation.config_file is None:
        return config
    path = config.find_path(validation.config_file, "finetuning.validation.config_file", moved)
    return check_config(read_settings(path), path, config.working_dir)


def held_out_record(config: Config, moved: Moved | None = None) -> dict[str, Any] | None:
    """The dataset that validation scores, if any."""
    if (validation := config.finetuning.validation) is None:
        return None
    return find_dataset(held_out_config(config, moved), validation.dataset, moved).record()


def held_out_scoring(config: Config, moved: Moved | None = None) -> dict[str, Any] | None:
    """Digests of the evaluators in `finetuning.validation.config_file`; None without such a file."""
    held_out = held_out_config(config, moved)
    if held_out is config:
        return None
    digests = {name: block_digest(held_out, EVALUATOR.section, name) for name in held_out.names(EVALUATOR)}
    return {"file": held_out.source, "evaluators": digests}


async def validate(
    run_config: FinetuneConfig,
    request: FinetuneRunConfig | None,
    epoch: int,
    builder: Builder | None = None,
    on_episode: Callable[[Episode], None] | None = None,
    on_scores: Callable[[dict[str, list[float]]], None] | None = None,
    sampled_from: tuple[str, str] | None = None,
) -> dict[str, Any]:
    """Scores the held-out dataset in the run of `builder`, or in the current finetuning run.

    Returns a record of `validation_history.json`, with `error` and no reward if nothing could be scored. `on_scores`
    gets the valid scores of each row, as rewards. `sampled_from` is as for EvaluationRun.
    """
    with nullcontext() if builder is None else share(builder):
        evaluation = EvaluationRun(validation_request(run_config, request))  # a plugin's may take nothing else
        evaluation.on_episode, evaluation.sampled_from = on_episode, sampled_from
        output = await evaluation.run_and_evaluate()
    record = validation_record(output, run_config, epoch)
    if on_scores is not None and run_config.reward_function is not None:
        reward = run_config.reward_function
        on_scores(scores_by_row(dict(output.evaluation_results)[reward.evaluator], reward.sign))
    return record


def validation_request(run_config: FinetuneConfig, request: FinetuneRunConfig | None) -> EvaluationRunConfig:
    """The evaluation of the held-out dataset; raises ConfigError if none is configured."""
    validation, run = run_config.validation, current_run()
    options: dict[str, Any] = {"reps": 1 if validation is None else validation.reps}
    options["dataset"] = validation.dataset if validation is not None else request and request.validation_dataset
    has_rows = options["dataset"] or validation or (request and request.validation_config_file)
    if not has_rows or (run is None and request is None):
        raise ConfigError("validation needs a dataset: finetuning.validation.dataset or --validation_dataset")
    file: Any = request and request.validation_config_file
    if run is not None:
        file = held_out_config(run.builder.config, run.builder.moved)
    if file is not None:
        options |= {"config_file": file, "override": ()}
    return (request or RunRequest(config_file=file)).evaluation(write_output=False, training=False, **options)


def validation_record(output: EvaluationRunOutput, run_config: FinetuneConfig, epoch: int) -> dict[str, Any]:
    """A record of `validation_history.json` from an evaluation's output."""
    reward = run_config.reward_function
    results = dict(output.evaluation_results)
    if reward is None or reward.evaluator not in results:
        raise ConfigError(f"validation has no evaluator {reward and reward.evaluator!r}; it has: {[*results]}")
    dropped: Counter[str] = Counter()
    for failed in (item for item in output.eval_input.eval_input_items if item.error is not None):
        dropped[failed.reason or "workflow_error"] += 1
    first = ""
    for item in results[reward.evaluator].eval_output_items:
        _, reason, problem = parse_score(item)
        if reason is not None:
            dropped[str(reason)] += 1
            first = first or f"; row {item.id}: {problem}"
    scores = scores_by_row(results[reward.evaluator], reward.sign)
    if not scores:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        return {"epoch": epoch, "error": f"no example could be scored: {reasons}{first}", "dropped": dict(dropped)}
    estimate = rows_ci95([reward.sign * score for score in of_row] for of_row in scores.values())
    estimate = estimate if reward.sign > 0 else estimate.negated()
    return {
        "epoch": epoch,
        "avg_reward": estimate.mean,
        "min_reward": min(min(s) for s in scores.values()),
        "max_reward": max(max(s) for s in scores.values()),
        "num_rows": estimate.n,
        "num_examples": sum(len(s) for s in scores.values()),
        "ci95": [estimate.low, estimate.high],
        "dropped": dict(dropped),
    }

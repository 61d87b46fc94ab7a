"""Validation: the held-out dataset scored with the current model, the same episodes each time."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from insitu.algorithms.statistics import mean_ci95
from insitu.builder import Builder
from insitu.collect import evaluation as evaluation_runs  # EvaluationRun may be patched: it is looked up when called
from insitu.collect.evaluators import parse_score, scores_by_row
from insitu.collect.shared_run import current_run, share
from insitu.config import Config, Moved, load_config
from insitu.errors import ConfigError
from insitu.schemas.episodes import Episode
from insitu.schemas.evaluation import EvaluationRunConfig, EvaluationRunOutput, RunRequest
from insitu.schemas.finetuning import FinetuneConfig, FinetuneRunConfig


def held_out_config(config: Config, moved: Moved | None = None) -> Config:
    """The file that validation runs: `finetuning.validation.config_file`, or the run's own."""
    validation = config.finetuning.validation
    if validation is None or validation.config_file is None:
        return config
    return load_config(config.find_path(validation.config_file, "finetuning.validation.config_file", moved))


async def validate(
    run_config: FinetuneConfig,
    request: FinetuneRunConfig | None,
    epoch: int,
    builder: Builder | None = None,
    on_episode: Callable[[Episode], None] | None = None,
    on_scores: Callable[[dict[str, list[float]]], None] | None = None,
) -> dict[str, Any]:
    """Scores the held-out dataset in the run of `builder`, or in the current finetuning run.

    Returns a record of `validation_history.json`, with `error` and no reward if nothing could be scored. `on_scores`
    gets the valid scores of each row.
    """
    with nullcontext() if builder is None else share(builder):
        evaluation = evaluation_runs.EvaluationRun(validation_request(run_config, request))
        evaluation.on_episode = on_episode
        output = await evaluation.run_and_evaluate()
    record = validation_record(output, run_config, epoch)
    if on_scores is not None and run_config.reward_function is not None:
        on_scores(scores_by_row(dict(output.evaluation_results)[run_config.reward_function.name]))
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
    if reward is None or reward.name not in results:
        raise ConfigError(f"validation has no evaluator {reward.name if reward else None!r}; it has: {[*results]}")
    dropped: Counter[str] = Counter()
    for failed in (item for item in output.eval_input.eval_input_items if item.error is not None):
        dropped[failed.reason or "workflow_error"] += 1
    for item in results[reward.name].eval_output_items:
        _, reason, _ = parse_score(item)
        if reason is not None:
            dropped[str(reason)] += 1
    scores = scores_by_row(results[reward.name])
    if not scores:
        return {"epoch": epoch, "error": f"no example could be scored: {dict(dropped)}", "dropped": dict(dropped)}
    means = [sum(of_row) / len(of_row) for of_row in scores.values()]
    estimate = mean_ci95(means)
    return {
        "epoch": epoch,
        "avg_reward": estimate.mean,
        "min_reward": min(min(s) for s in scores.values()),
        "max_reward": max(max(s) for s in scores.values()),
        "num_examples": sum(len(s) for s in scores.values()),
        "ci95": [estimate.low, estimate.high],
        "dropped": dict(dropped),
    }

"""What the file says that a run does, and the findings that need no episode."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from insitu.collect.datasets import load_dataset
from insitu.collect.evaluation import held_out_config
from insitu.config import Config
from insitu.doctor.findings import Finding, Severity
from insitu.schemas.evaluation import EvalInputItem
from insitu.schemas.finetuning import CurriculumLearningConfig, TrainerConfig
from insitu.schemas.kinds import LLM, TRAJECTORY_BUILDER
from insitu.training.episodes_builder import CollectingBuilderConfig
from insitu.training.metrics import share_of
from insitu.workflow.llms import SamplingConfig

_MANY = 0.5
"""Share of the rows from which repeated ones harm."""
_HIGHEST_RATES = {"lora": 5e-2, "all weights": 1e-2}
"""Above these learning rates AdamW changes weights by about as much as they are in a few steps."""
_LOWEST_RATE = 1e-8


@dataclass(frozen=True)
class Plan:
    """A run as its file describes it. `training` are the settings of a training job, empty if they are unknown."""

    rows: Sequence[EvalInputItem]
    held_out: Sequence[EvalInputItem]
    rows_per_epoch: int
    generations: int
    epochs: int
    validations: int
    validation_reps: int
    concurrency: int
    curriculum: CurriculumLearningConfig
    trainer: str
    builder: str
    adapter: str
    reward: str | None
    llms: tuple[str, ...]
    target_functions: tuple[str, ...]
    dataset: str
    held_out_name: str
    training: Mapping[str, Any] = field(default_factory=dict)
    warms_up: bool = False
    staleness: int = 0
    is_limited: bool = True
    """Whether each of the llms has `max_tokens`."""
    replays: bool = False
    """Whether it trains on the recorded episodes of another run."""

    @property
    def episodes_per_epoch(self) -> int:
        return self.rows_per_epoch * self.generations

    @property
    def evaluator(self) -> str:
        """The key of the evaluator that gives the reward."""
        return f"eval.evaluators.{self.reward}" if self.reward is not None else "eval.evaluators"

    def llm(self, key: str) -> str:
        """A key of the trained llms."""
        return ", ".join(f"llms.{name}.{key}" for name in self.llms) or f"llms: {key}"

    @classmethod
    def of(cls, config: Config, dataset: str | Path | None) -> "Plan":
        """The plan of a prepared file, with the rows of `dataset` instead of the file's if it is given."""
        finetuning, validation = config.finetuning, config.finetuning.validation
        block = config.blocks.get((TRAJECTORY_BUILDER.section, str(finetuning.trajectory_builder)))
        collecting = block if isinstance(block, CollectingBuilderConfig) else None
        stored = collecting is not None and collecting.episodes_from is not None
        rows = [] if stored else load_dataset(config, dataset)
        held_out = load_dataset(held_out_config(config), validation.dataset) if validation is not None else []
        limit = collecting.rows_per_epoch if collecting is not None else None
        epochs, trainer = finetuning.num_epochs, config.trainer or TrainerConfig()
        llms = {name: config.block(LLM, name) for name in sorted(config.trained_llms())}
        return cls(
            rows=rows,
            held_out=held_out,
            rows_per_epoch=min(limit or len(rows), len(rows)),
            generations=collecting.num_generations if collecting is not None else 1,
            epochs=epochs,
            validations=1 + math.ceil(epochs / validation.interval) if validation is not None else 0,
            validation_reps=validation.reps if validation is not None else 1,
            concurrency=config.max_concurrency,
            curriculum=finetuning.curriculum_learning,
            trainer=f"trainers.{finetuning.trainer}",
            builder=f"trajectory_builders.{finetuning.trajectory_builder}",
            adapter=f"trainer_adapters.{finetuning.trainer_adapter}",
            reward=finetuning.reward_function.evaluator if finetuning.reward_function is not None else None,
            llms=tuple(llms),
            is_limited=all(llm.max_tokens is not None for llm in llms.values() if isinstance(llm, SamplingConfig)),
            target_functions=tuple(finetuning.target_functions),
            dataset=str((config.eval.dataset and config.eval.dataset.rows_file) or "eval.general.dataset"),
            held_out_name=str(validation.dataset or validation.config_file) if validation is not None else "",
            warms_up=trainer.warms_up,
            staleness=trainer.epochs_ahead,
            replays=stored,
        )


def about_settings(plan: Plan) -> Iterator[Finding]:
    """A learning rate that trains nothing or destroys the model, and a warm-up that was not played."""
    rate, where = plan.training.get("learning_rate"), f"{plan.adapter}.training.learning_rate"
    kind = "lora" if plan.training.get("lora") else "all weights"
    usual = f"usual for {kind}: {'1e-4' if kind == 'lora' else '1e-6 to 1e-5, and 1e-3 for tiny models'}"
    if rate == 0:
        what = "the learning rate is 0"
        yield Finding("learning_rate_zero", Severity.STOPS_LEARNING, what, where, f"raise it; {usual}")
    elif isinstance(rate, float) and rate > _HIGHEST_RATES[kind]:
        severity = Severity.STOPS_LEARNING if rate >= 10 * _HIGHEST_RATES[kind] else Severity.HARMS
        what = f"the learning rate is {rate:g}: the first steps destroy what the model has learned"
        yield Finding("learning_rate_high", severity, what, where, f"lower it; {usual}")
    elif isinstance(rate, float) and rate < _LOWEST_RATE:
        what = f"the learning rate is {rate:g}: the weights hardly change"
        yield Finding("learning_rate_low", Severity.HARMS, what, where, f"raise it; {usual}")
    if plan.warms_up:
        what = "the episodes were played by the weights before the warm-up, which takes more time than is estimated"
        change = "judge the other findings with that in mind, or train the warm-up alone first (num_epochs: 1)"
        yield Finding("before_warm_up", Severity.NOTE, what, f"{plan.trainer}.sft", change)


def about_rows(plan: Plan, *, random_environment: bool) -> Iterator[Finding]:
    """Rows that repeat, and rows that are held out and trained.

    In a `random_environment` rows with the same question are different tasks: the question only sets the scene. One
    that is an object often does, so that it is only noted.
    """
    if random_environment:
        return
    harms = Severity.NOTE if any(isinstance(row.input_obj, Mapping) for row in plan.rows) else Severity.HARMS
    by_question: dict[str, list[str]] = {}
    for row in plan.rows:
        by_question.setdefault(_text(row.input_obj), []).append(str(row.id))
    repeated = [ids for ids in by_question.values() if len(ids) > 1]
    if extra := sum(len(ids) - 1 for ids in repeated):
        share, example = share_of(extra, len(plan.rows), "rows"), ", ".join(repr(each) for each in repeated[0][:3])
        severity = harms if extra >= _MANY * len(plan.rows) else Severity.NOTE
        what = f"{share} ask what another row asks, such as the rows {example}"
        change = f"remove the repetitions; {plan.builder}.num_generations plays a row several times"
        yield Finding("repeated_rows", severity, what, plan.dataset, change)
    held_out = [str(row.id) for row in plan.held_out if _text(row.input_obj) in by_question]
    if held_out:
        share = share_of(len(held_out), len(plan.held_out), "held-out rows")
        what = f"{share} are trained too, such as the row {held_out[0]!r}"
        where = f"finetuning.validation.dataset ({plan.held_out_name})"
        change = f"remove them from {plan.dataset} or from the held-out rows"
        what += ": the held-out score says little about other rows"
        yield Finding("held_out_rows_trained", harms, what, where, change)


def _text(question: Any) -> str:
    return json.dumps(question, sort_keys=True, default=str)

"""Dataset items, scores, evaluator configuration, and the options and result of an evaluation run.

EvalInputItem(id="7", input_obj="2 + 2", expected_output_obj="4", output_obj="4", trajectory=[...])
EvalOutputItem(id="7", score=1.0, reasoning="exact match")
EvalOutputItem(id="8", score=None, error="ValueError: no number in the answer")     # unscored is not zero
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from insitu.schemas.components import BaseModelRegistryTag, TypedBaseModel, WritableModel
from insitu.schemas.steps import IntermediateStep

Row = dict[str, Any]
"""A row of a dataset, by column."""
WORKFLOW_OUTPUT = "workflow_output.json"
"""The file that an evaluation writes; it can be read as a dataset."""


class EvaluatorBaseConfig(TypedBaseModel, BaseModelRegistryTag):
    """A block of the section `eval.evaluators`."""

    def check_code(self, where: str, folder: Path) -> None:
        """Raises ConfigError if the code that the block names cannot score; `folder` is that of the file."""

    def check_trained(self, where: str, trained: Collection[str]) -> None:
        """Raises ConfigError if it cannot score what a run trains, the models of these keys of `llms`."""

    def check_rows(self, where: str, rows: Sequence["EvalInputItem"]) -> None:
        """Raises ConfigError if none of the rows of a run can be scored."""


class EvalInputItem(BaseModel):
    """A dataset row and, after the workflow has run, its answer and steps.

    `rep` counts the repetitions of a row from 0; `error` says why there is no output, `reason` is its code.
    """

    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True, ser_json_bytes="base64")

    id: Any
    input_obj: Any = None
    expected_output_obj: Any = None
    output_obj: Any = None
    expected_trajectory: list[IntermediateStep] = Field(default_factory=list)
    trajectory: list[IntermediateStep] = Field(default_factory=list)
    full_dataset_entry: Any = None
    rep: int = 0
    error: str | None = None
    reason: str | None = None

    _steps: Sequence[IntermediateStep] = ()
    """The steps of an episode, of which `trajectory` is made when it is first read: that is expensive."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name == "trajectory":
                self.__dict__[name] = [*self._steps]
                return self.__dict__[name]
            return super().__getattr__(name)

    @model_serializer(mode="wrap")
    def _serialize(self, handler: SerializerFunctionWrapHandler) -> Any:
        self.trajectory  # noqa: B018 - made
        return handler(self)


class EvalInput(BaseModel):
    eval_input_items: list[EvalInputItem]


class EvalOutputItem(BaseModel):
    """A score, or an `error`; the optional `step_scores` score the item's model calls in order."""

    model_config = ConfigDict(extra="allow", ser_json_bytes="base64")

    id: Any
    score: Any = None
    reasoning: Any = None
    error: str | None = None
    rep: int = 0
    step_scores: list[float] | None = None


class EvalOutput(BaseModel):
    average_score: Any = None
    eval_output_items: list[EvalOutputItem] = Field(default_factory=list)


class RunRequest(WritableModel):
    """What a command, a call from Python or a plugin asks of a file. It stays beside the checked `Config`."""

    model_config = ConfigDict(extra="ignore", arbitrary_types_allowed=True)

    config_file: Path | BaseModel | Any = None
    dataset: str | Path | None = None
    result_json_path: str = "$"
    endpoint: str | None = None
    endpoint_timeout: int = 300
    override: tuple[tuple[str, str], ...] = ()

    @property
    def values(self) -> dict[str, Any]:
        """The values that its options give to keys of the file, besides `override`."""
        return {}

    def evaluation(self, **options: Any) -> "EvaluationRunConfig":
        """An evaluation of the same file by the same service, with these `options`."""
        shared = {name: getattr(self, name) for name in RunRequest.model_fields}
        return EvaluationRunConfig(**(shared | options))


class EvaluationRunConfig(RunRequest):
    """Options of an evaluation run, from the command line or a plugin."""

    config_file: Path | BaseModel | Any
    skip_workflow: bool = False
    skip_completed_entries: bool = False
    reps: int = Field(default=1, ge=1)
    write_output: bool = True
    training: bool | None = None
    """Whether the episodes are for training. Then every evaluation samples anew, requests logprobs and token ids from
    the trained llms, and writes into its own folder; otherwise it samples the same every time. None: true inside a
    finetuning run, but for its validation dataset."""


class TaskEvaluation(NamedTuple):
    """How a model of a file is evaluated on a task that others publish (`insitu eval --task`)."""

    values: dict[str, Any]
    """Settings by their dotted key; they replace those of the file."""
    reps: int
    """Repetitions of each row that the task asks for."""
    logs: Path
    """The folder of the logs of the package behind the task."""


class EvaluationRunOutput(BaseModel):
    """`evaluation_results` holds (evaluator name, output) in the order of the file."""

    model_config = ConfigDict(extra="ignore", arbitrary_types_allowed=True)

    workflow_output_file: Path | None = None
    evaluator_output_files: list[Path] = Field(default_factory=list)
    workflow_interrupted: bool = False
    eval_input: EvalInput
    evaluation_results: list[tuple[str, EvalOutput]] = Field(default_factory=list)
    usage_stats: Any = None
    profiler_results: Any = None


@dataclass(frozen=True)
class EvaluatorInfo:
    """What an evaluator's factory yields; `evaluate_fn` scores every item of its input."""

    config: EvaluatorBaseConfig
    evaluate_fn: Callable[[EvalInput], Awaitable[EvalOutput]]
    description: str = ""


Number = Annotated[float, Field(allow_inf_nan=False)]


class Outcome(BaseModel):
    """What an environment says of a finished episode. A failed episode has none: its workflow raises."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    answer: Any = None
    """The agent's last words, or the state that it leaves."""
    reward: Number
    rewards: dict[str, Number] = Field(default_factory=dict)
    """The parts of the reward, by name."""
    metrics: dict[str, Number] = Field(default_factory=dict)
    """Other numbers, by name."""
    step_rewards: list[Number] | None = None
    """The reward of each answer of the model under training, in order."""

"""What readers rely on in the JSON files of a run: a file of another form is refused where it is read.

The models check records, which stay plain JSON with all of their keys.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from insitu.errors import InsituError
from insitu.runs import files
from insitu.schemas.evaluation import Number

_Block = Annotated[list[int], Field(min_length=2, max_length=2)]
_Values = dict[str, Any]


class RowScores(NamedTuple):
    """A line of `validation_scores.jsonl`: the scores of one version by row id, one per repetition.

    `dataset` is the SHA-256 of the file with the rows, `scoring` a digest of the evaluator's settings and code.
    """

    epoch: int
    policy_version: int | None
    evaluator: str
    dataset: str
    scores: dict[str, list[float]]
    scoring: str = ""

    def means(self) -> dict[str, float]:
        """The mean score of each row."""
        return {row: fmean(scores) for row, scores in self.scores.items()}


class _Form(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Epoch(_Form):
    epoch: int


class _Validation(_Epoch):
    policy_version: int | None
    avg_reward: Number
    num_examples: int
    ci95: Annotated[list[float | None], Field(min_length=2, max_length=2)]


class _FailedValidation(_Epoch):
    policy_version: int | None
    error: str


class _Checkpoint(_Form):
    checkpoint: str | None = None
    policy_version: int | None = None


class _Best(_Epoch, _Checkpoint):
    avg_reward: Number


class _Model(_Form):
    file: str = ""
    sha256: str | None = None
    commit: str | None = None


class _Dataset(_Form):
    file: str = ""
    sha256: str


class _Config(_Form):
    finetuning: _Values = {}
    llms: dict[str, _Values] = {}
    trainers: dict[str, _Values] = {}
    trainer_adapters: dict[str, _Values] = {}


class _Settings(_Form):
    run_id: str | None = None
    source: str | None = None
    epochs: int | None = None
    staleness: int = 0
    dataset: _Dataset | None = None
    held_out: _Dataset | None = None
    starting_model: _Model | None = None
    training: _Values | None = None
    targets: _Values | None = None
    code: dict[str, str] | None = None
    override: dict[str, str] | None = None
    options: dict[str, str] | None = None
    given: _Values = {}
    config: _Config = _Config()


class _Event(_Form):
    event: str
    time: str
    epochs: int | None = None
    changes: list[str] = []


class _Metrics(_Epoch):
    avg_reward: Number | None = None
    seconds: dict[str, Number | dict[str, Number]] = {}
    dropped: dict[str, int] = {}
    tokens: Number | None = None


def _has_files(blocks: dict[str, Any]) -> dict[str, Any]:
    if missing := [name for name in (files.EPISODES, files.CALLS) if name not in blocks]:
        raise PydanticCustomError("blocks", f"{missing[0]} is missing")
    return blocks


class _Group(_Epoch):
    row_id: str
    num_episodes: int
    blocks: Annotated[dict[str, _Block], AfterValidator(_has_files)]


class _Advantages(_Epoch):
    episode: str
    dropped: str | None
    advantages: dict[str, Any]


class _Rescore(_Form):
    episode: Annotated[str, Field(pattern=r"^[^/]*/\d+/")]
    evaluator: str
    score: Any = None


class _Journaled(_Form):
    episode: _Epoch
    calls: list[_Values]
    steps: list[_Values]


class _Started(_Form):
    model: str


class _Promotion(_Form):
    scores: dict[str, Number]


def _validation_kind(record: Any) -> str:
    return "_failed" if isinstance(record, dict) and "error" in record else "_scored"


_AnyValidation = Annotated[
    Annotated[_FailedValidation, Tag("_failed")] | Annotated[_Validation, Tag("_scored")],
    Discriminator(_validation_kind),
]

FORMS: Mapping[str, Any] = {
    files.RUN: _Settings,
    files.VALIDATIONS: list[_AnyValidation],
    files.REWARDS: list[_Epoch],
    files.BEST: _Best,
    files.WARM_UP: _Checkpoint,
    files.VALIDATION_SCORES: RowScores,
    files.EVENTS: _Event,
    files.METRICS: _Metrics,
    files.GROUPS: _Group,
    files.ADVANTAGES: _Advantages,
    files.RESCORES: _Rescore,
    files.JOURNAL: _Journaled,
    files.STARTED_FILE: _Started,
    files.JOBS: _Checkpoint,
    files.PROMOTION: _Promotion,
}
"""The form of a file's value, or of each of its lines. `files.JOBS`: of each job."""


_OBJECTS = ("model_type", "dict_type", "named_tuple_type")
"""Problems of pydantic that name a type of Python."""


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(FORMS[name])


def checked(where: Path | str, name: str, value: Any) -> Any:
    """The value of the file `name`, or a line of it. Raises InsituError naming where it is and what is wrong."""
    if name in FORMS:
        try:
            _adapter(name).validate_python(value, strict=True)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in problem["loc"] if not str(part).startswith("_")) or "its content"
            is_missing, is_object = problem["type"].startswith("missing"), problem["type"] in _OBJECTS
            expected = "Input should be a JSON object" if is_object else problem["msg"]
            given = "missing" if is_missing else f"{problem['input']!r:.80}: {expected}"
            raise InsituError(f"{where} is damaged: {key} is {given}") from None
    return value

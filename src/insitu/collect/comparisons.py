"""Scores that compare an answer with the expected one."""

import json
import math
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from insitu.builder import Builder
from insitu.collect.scores import FunctionEvaluator
from insitu.errors import ConfigError, WorkflowError
from insitu.registry import register_evaluator
from insitu.schemas.evaluation import EvalInputItem, EvaluatorBaseConfig, EvaluatorInfo
from insitu.workflow.functions import convert

Score = tuple[float, str]

_NUMBER = re.compile(r"(?:(?<!\w)[-+\u2212])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+)?(?:[eE][-+]?\d+)?")
"""A sign is not one after a letter or digit, as in `5-7`, and a comma only before each three digits."""


def _text(value: Any, what: str) -> str:
    if value is None:
        raise WorkflowError(f"the row has no {what}" if what == "expected answer" else f"there is no {what}")
    text: str = convert(value, str)
    return text


def _alternatives(expected: Any) -> list[Any]:
    if expected == []:
        raise WorkflowError("the row's expected answer is an empty list")
    return expected if isinstance(expected, list) else [expected]


class ComparisonConfig(EvaluatorBaseConfig):
    """What is compared with the row's expected answer."""

    @property
    def needs_expected(self) -> bool:
        return True

    def check_rows(self, where: str, rows: Sequence[EvalInputItem]) -> None:
        if self.needs_expected and rows and all(row.expected_output_obj is None for row in rows):
            columns = dict.fromkeys(column for row in rows for column in row.full_dataset_entry)
            key = "eval.general.dataset.structure.answer_key names its column"
            raise ConfigError(f"{where}: no row has an expected answer; {key}, of {', '.join(columns)}")


class TextConfig(ComparisonConfig):
    """What counts as the same text."""

    ignore_case: bool = False
    """Whether upper and lower case are the same."""
    ignore_space: bool = True
    """Whether space at both ends is dropped, and every run of space counts as one."""

    def normalize(self, text: str) -> str:
        text = " ".join(text.split()) if self.ignore_space else text
        return text.casefold() if self.ignore_case else text


class ExactMatchConfig(TextConfig, name="exact_match"):
    """1 if the answer is the expected one, otherwise 0. Expected answers that are lists hold alternatives."""

    def compare(self, answer: Any, expected: Any) -> Score:
        texts = [self.normalize(_text(each, "expected answer")) for each in _alternatives(expected)]
        return float(self.normalize(_text(answer, "answer")) in texts), f"expected {expected!r:.200}"


class ContainsConfig(TextConfig, name="contains"):
    """1 if the answer contains the expected one, otherwise 0. Of a list of texts, all or any must be in it."""

    require: Literal["all", "any"] = "all"
    """How many of several expected texts the answer must contain."""

    def compare(self, answer: Any, expected: Any) -> Score:
        wanted = [self.normalize(_text(each, "expected answer")) for each in _alternatives(expected)]
        if "" in wanted:
            raise WorkflowError(f"the row's expected answer {expected!r:.80} is empty: every answer contains it")
        text = self.normalize(_text(answer, "answer"))
        missing = [each for each in wanted if each not in text]
        enough = len(missing) < len(wanted) if self.require == "any" else not missing
        return float(enough), f"missing: {', '.join(missing) or 'nothing'}"


class RegexConfig(ComparisonConfig, name="regex"):
    """1 if the answer matches a regular expression, otherwise 0; with `group`, if that part is the expected answer."""

    pattern: str
    """A regular expression of Python, searched for in the answer. Of several matches, the last one counts."""
    group: int | str | None = None
    """Number or name of a group, whose text must be the expected answer."""
    ignore_case: bool = False
    """Whether upper and lower case are the same."""

    @property
    def needs_expected(self) -> bool:
        return self.group is not None

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"it is not a regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _has_group(self) -> "RegexConfig":
        compiled = re.compile(self.pattern)
        groups = [*range(compiled.groups + 1), *compiled.groupindex]
        if self.group is not None and self.group not in groups:
            raise ValueError(f"group is {self.group!r}, but the pattern has the groups {groups}")
        return self

    def compare(self, answer: Any, expected: Any) -> Score:
        flags = re.IGNORECASE if self.ignore_case else re.NOFLAG
        matches = [*re.finditer(self.pattern, _text(answer, "answer"), flags)]
        if not matches:
            return 0.0, "no match"
        if self.group is None:
            return 1.0, f"matched {matches[-1][0]!r:.200}"
        found, wanted = (matches[-1][self.group] or "").strip(), _text(expected, "expected answer").strip()
        same = found.casefold() == wanted.casefold() if self.ignore_case else found == wanted
        return float(same), f"found {found!r:.200}, expected {wanted!r:.200}"


class JsonFieldsConfig(ComparisonConfig, name="json_fields"):
    """The share of fields of a JSON answer that equal those of the expected one; an answer that is not JSON has 0."""

    fields: list[str] | None = None
    """The fields to compare, `a.b` for a nested one; none: all of the expected answer."""

    def compare(self, answer: Any, expected: Any) -> Score:
        wanted = _parsed(expected)
        if not isinstance(wanted, dict):
            raise WorkflowError(f"the row's expected answer {expected!r:.80} is not a JSON object")
        value = _parsed(answer)
        if not isinstance(value, dict):
            return 0.0, "the answer is not a JSON object"
        paths = {name: name.split(".") for name in self.fields} if self.fields is not None else {n: [n] for n in wanted}
        if not paths:
            raise WorkflowError("there is no field to compare: the expected answer is empty")
        if unknown := [name for name, path in paths.items() if _field(wanted, path) is _MISSING]:
            raise WorkflowError(f"the row's expected answer has no field {', '.join(unknown)}")
        wrong = [name for name, path in paths.items() if not _equal(_field(value, path), _field(wanted, path))]
        return 1 - len(wrong) / len(paths), f"different: {', '.join(wrong) or 'nothing'}"


class NumericConfig(ComparisonConfig, name="numeric"):
    """1 if the last number of the answer is close to the expected one, otherwise 0, or less the farther it is."""

    tolerance: float = Field(default=0.0, ge=0)
    """Largest difference that counts as close."""
    relative_tolerance: float = Field(default=1e-6, ge=0)
    """Largest difference, as a share of the expected number, that counts as close."""
    zero_at: float | None = Field(default=None, gt=0)
    """Difference at which the score is 0: it falls linearly from 1. None: every number that is not close has 0."""

    def compare(self, answer: Any, expected: Any) -> Score:
        wanted = _last_number(_text(expected, "expected answer"))
        if wanted is None:
            raise WorkflowError(f"the row's expected answer {expected!r:.80} is not a number")
        number = _last_number(_text(answer, "answer"))
        if number is None:
            return 0.0, "the answer has no number"
        explanation = f"found {number:g}, expected {wanted:g}"
        if math.isclose(number, wanted, rel_tol=self.relative_tolerance, abs_tol=self.tolerance):
            return 1.0, explanation
        return (max(0.0, 1 - abs(number - wanted) / self.zero_at) if self.zero_at is not None else 0.0), explanation


def _register(config_type: type[Any]) -> None:
    """Registers an evaluator that compares the answer with the expected one."""

    @register_evaluator(config_type=config_type)
    async def factory(config: Any, builder: Builder) -> AsyncIterator[EvaluatorInfo]:
        async def score(item: EvalInputItem) -> Score:
            comparison: Score = config.compare(item.output_obj, item.expected_output_obj)
            return comparison

        description = (config_type.__doc__ or "").split(".")[0]
        yield EvaluatorInfo(config=config, evaluate_fn=FunctionEvaluator(score).evaluate, description=description)


for _config in (ExactMatchConfig, ContainsConfig, RegexConfig, JsonFieldsConfig, NumericConfig):
    _register(_config)


def _parsed(value: Any) -> Any:
    """JSON text as a value; other values as they are."""
    if not isinstance(value, str):
        return value
    fenced = re.fullmatch(r"\s*```(?:json)?\s*(.*?)```\s*", value, re.DOTALL)
    try:
        return json.loads(fenced[1] if fenced else value)
    except ValueError:
        return None


_MISSING = object()


def _equal(value: Any, wanted: Any) -> bool:
    return bool(value == wanted) and isinstance(value, bool) is isinstance(wanted, bool)  # 1 is not true


def _field(value: Any, path: Sequence[str]) -> Any:
    for part in path:
        if not isinstance(value, dict) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _last_number(text: str) -> float | None:
    """`1,234.5` is one number."""
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "").replace("\u2212", "-")) if numbers else None

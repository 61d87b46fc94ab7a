"""Functions that a file chooses: built-in and installed ones by name, others as Python code.

    objective: cispo                                          # built in, or of an installed package
    objective: {_type: python, function: "mine:loss"}         # `loss` of mine.py beside the file
    objective: {_type: asymmetric, arguments: {floor: 0.1}}   # of an installed package, with arguments

An installed package declares its functions as entry points of the group `insitu.<kind>`, as insitu does.

`TokenBatch` is what the objective of a policy gradient gets, `TokenLoss` what it returns. Shapes: B rows, T trained
tokens of the longest row. Values where `mask_BT` is not set are 0.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from insitu.errors import PluginError, foreign_errors
from insitu.schemas.components import CodeRef
from insitu.schemas.installed import entry_points

if TYPE_CHECKING:
    from torch import Tensor

PYTHON = "python"


class Part(BaseModel):
    """A function of an installed package, by name, or Python code."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, serialize_by_alias=True)
    kind: ClassVar[str] = ""
    """The kind of part: its entry points are in the group `insitu.<kind>`. "" if its field says so."""

    type: str = Field(alias="_type")
    """`python`, or the name of an entry point."""
    function: str | None = None
    """With `_type: python`, the function as MODULE:NAME or FILE.py:NAME."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Values of further parameters of the function."""
    sha256: str | None = None
    """Digest of the file with the function. A function whose file has another one is refused; none: any."""

    @model_validator(mode="after")
    def _code_has_a_function(self) -> Self:
        if (self.type == PYTHON) != (self.function is not None):
            raise ValueError("function: required with _type: python, and allowed with it only")
        if self.kind:
            check_part(self.kind, self)
        return self


def check_part(kind: str, part: str | Part) -> str | Part:
    """Raises ValueError for a name that no installed package has declared."""
    name = part if isinstance(part, str) else part.type
    if name not in (existing := names(kind)) and (name != PYTHON or isinstance(part, str)):
        available = ", ".join([*existing, "{_type: python, function: MODULE:NAME}"])
        raise ValueError(f"{name!r} does not exist; available: {available}")
    return part


@cache
def names(kind: str) -> list[str]:
    return sorted(entry_points(f"insitu.{kind}").names)


@cache
def load_named(kind: str, name: str) -> Callable[..., Any]:
    """The function that insitu or an installed package has declared. Raises PluginError if it cannot be imported."""
    with foreign_errors(PluginError, f"insitu.{kind}: {name!r} could not be imported"):
        function: Callable[..., Any] = entry_points(f"insitu.{kind}")[name].load()
    return function


def code_file(ref: str, folder: Path) -> tuple[Path, str]:
    """The file in `folder` that MODULE:NAME or FILE.py:NAME stands for, and NAME. Raises ValueError."""
    place, _, name = ref.rpartition(":")
    if not place or not name:
        raise ValueError(f"{ref!r} must be MODULE:NAME or FILE.py:NAME, such as mine:loss")
    file = Path(place) if place.endswith(".py") else Path(*place.split("."))
    choices = [file] if place.endswith(".py") else [file.with_suffix(".py"), file / "__init__.py"]
    for path in ((folder / choice).resolve() for choice in choices):
        if path.is_file() and path.is_relative_to(folder):
            return path, name
    raise ValueError(f"there is no {place} in {folder}")


def with_arguments(function: Callable[..., Any], part: Part) -> Callable[..., Any]:
    return partial(function, **part.arguments) if part.arguments else function


class LocalPart(Part):
    """A part that runs in the process of the command, whose code is checked with the file."""

    model_config = ConfigDict(frozen=True)
    by_position: ClassVar[tuple[str, ...]] = ()
    """What its function gets."""
    by_name: ClassVar[tuple[str, ...]] = ()
    """What it gets if it has such a parameter."""
    may_wait: ClassVar[bool] = False
    """Whether it may be asynchronous."""

    function: CodeRef | None = None
    """With `_type: python`, the function as MODULE:NAME or FILE.py:NAME. Files are relative to the folder of the YAML
    file, modules in which can be imported."""


class AdvantagesPart(LocalPart):
    """A function that computes the advantages of a group."""

    kind = "advantages"
    by_position = ("rewards", "episodes")


class SelectionPart(LocalPart):
    """A function that leaves out groups or episodes."""

    kind = "selections"
    by_position, by_name = ("groups",), ("epoch", "seed")


class ShapePart(LocalPart):
    """A function that turns a score into a reward."""

    kind = "reward_shapes"
    by_position, by_name = ("score",), ("row", "expected", "question", "answer", "scores", "calls")
    may_wait = True


def _tag(value: Any) -> str:
    return "<name>" if isinstance(value, str) else "<part>"


_Any = Annotated[Annotated[str, Tag("<name>")] | Annotated[Part, Tag("<part>")], Discriminator(_tag)]
Objective = Annotated[_Any, AfterValidator(partial(check_part, "objectives"))]
Optimizer = Annotated[_Any, AfterValidator(partial(check_part, "optimizers"))]
Schedule = Annotated[_Any, AfterValidator(partial(check_part, "schedules"))]
Reference = Annotated[_Any, AfterValidator(partial(check_part, "references"))]


class TokenBatch(NamedTuple):
    """Some rows of an optimizer step. Only `new_BT`, and `ratio_BT` through it, carry a gradient.

    All logarithms are natural. `ratio_BT` is exp(new - old), per token or of the whole row, as
    `importance_sampling_level` says.
    """

    new_BT: "Tensor"
    """Log-probabilities under the weights being trained."""
    old_BT: "Tensor"
    """Under the weights at the start of the job, or as sampled (`old_logprobs`)."""
    rollout_BT: "Tensor"
    """As sampled."""
    ref_BT: "Tensor | None"
    """Under the reference weights; None without a KL penalty."""
    ratio_BT: "Tensor"
    advantage_BT: "Tensor"
    mask_BT: "Tensor"
    """Boolean: the trained tokens."""
    weight_B: "Tensor"
    """The weight of one trained token of the row in the loss of the step, as `loss_agg_mode` says."""


class TokenLoss(NamedTuple):
    """The loss of each token (B, T), or a scalar: the share of these rows in the loss of the step.

    The losses of tokens are multiplied by the correction for the sampler, get the KL penalty and are added up with
    `weight_B`; a scalar gets the KL penalty only. `metrics` (each B, T) are averaged over the job's trained tokens.
    """

    loss: "Tensor"
    metrics: "Mapping[str, Tensor]" = MappingProxyType({})

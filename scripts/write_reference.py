"""Writes docs/reference/configuration.md from the configuration models and the strings below their fields.

python scripts/write_reference.py            write the page
python scripts/write_reference.py --check    exit with 1 if it is out of date
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from insitu import registry as reg
from insitu.config import EvalGeneralConfig, GeneralConfig
from insitu.registry import Kind, registry
from insitu.schemas.components import ComponentRef
from insitu.schemas.finetuning import FinetuneConfig

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "configuration.md"
INTRODUCTION = """\
# The configuration file

Written by `scripts/write_reference.py` from the models in `src/insitu`; do not edit it by hand.

One YAML file describes the agent, how it is scored, and how its model is trained. What holds for all of it:

- A component is a block with the key `_type`, under a name of your choice; other blocks refer to it by that name.
- Every key is checked before anything starts. A key, `_type` or name that does not exist is an error that names the
  place and the nearest thing that exists; all problems of a file are told at once, with exit code 2.
- Numbers and truth values follow YAML 1.2: `1e-5` is a number, `on` and `no` are text. A key stands once.
- `${NAME}` is taken from the environment, `${NAME:-default}` too where it is set. One that is not set is an error.
- `-o KEY VALUE` sets a key before the file is checked: `-o finetuning.num_epochs 5`, `-o llms.player.stop '[a, b]'`.
  Numbers lead into lists. The value is read as YAML, and reaches every part that the key in the file would reach.
- A file or folder that is read (datasets, models, checkpoints) is looked up from the working directory, then from the
  folder of the YAML file. What is written (`output_dir`) counts from the working directory.
- Keys whose names speak of keys, tokens or passwords are never printed with their values.

| section | what stands in it |
|---|---|
| `general` | the seed, and modules to import |
| `llms` | the models, by name |
| `functions`, `workflow` | your code: functions by name, and the one that is run on each row |
| `eval` | the dataset, limits, and evaluators by name |
| `ttc_strategies` | strategies that spend test-time compute, by name |
| `trajectory_builders`, `trainer_adapters`, `trainers` | the three replaceable parts of training, by name |
| `finetuning` | which of them a training run uses, and how long |
"""
PLAIN = {str: "text", int: "whole number", float: "number", bool: "true or false", Path: "path", SecretStr: "text"}
BOUNDS = {Ge: "at least {}", Gt: "above {}", Le: "at most {}", Lt: "below {}"}
NOT_FOR_THE_FILE = {"type", "reward", "run_configuration"}


def models_of(annotation: Any) -> list[type[BaseModel]]:
    """The models a field's type mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_of(part)]


def spelt(annotation: Any) -> str:
    """A type in words."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation in PLAIN:
        return PLAIN[annotation]
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(spelt(part) for part in parts if part not in (NoneType, *also_text(parts))))
    if origin is Annotated:
        return spelt(parts[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in parts)
    if origin is list:
        return f"list of {spelt(parts[0])}"
    if origin is tuple:
        return f"list of {len(parts)} of {spelt(parts[0])}"
    if isinstance(annotation, type) and issubclass(annotation, ComponentRef):
        return f"name under `{annotation.section}`"
    return "block" if annotation is Any or origin is dict or models_of(annotation) else str(annotation)


def also_text(parts: tuple[Any, ...]) -> tuple[type, ...]:
    """A path may be written as text; saying both would say nothing."""
    return (str,) if Path in parts else ()


def bounds(field: FieldInfo) -> str:
    """The limits of a number, as `, at least 1`."""
    found = []
    for limit in field.metadata:
        words = BOUNDS.get(type(limit))
        if words is not None:
            found.append(words.format(f"{getattr(limit, type(limit).__name__.lower()):g}"))
    return "".join(f", {words}" for words in found)


def default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "none"
    if isinstance(value, BaseModel):
        return "see below"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`".replace("'", '"')


def table(model: type[BaseModel]) -> Iterator[str]:
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    own = model.__annotations__
    for name, field in sorted(
        model.model_fields.items(), key=lambda item: (not item[1].is_required(), item[0] not in own)
    ):
        if name not in NOT_FOR_THE_FILE:
            meaning = " ".join((field.description or "").split()).replace("|", "\\|")
            yield f"| `{name}` | {spelt(field.annotation)}{bounds(field)} | {default(field)} | {meaning} |"


def section(title: str, model: type[BaseModel], place: str, level: int = 2) -> Iterator[str]:
    """A model's text and table, and those of the models inside it, each under its place in the file."""
    yield f"{'#' * level} {title}\n"
    if own_text(model):
        yield f"{own_text(model)}\n"
    if set(model.model_fields) - NOT_FOR_THE_FILE:
        yield from table(model)
        yield ""
    for name, field in model.model_fields.items():
        for inner in () if name in NOT_FOR_THE_FILE else models_of(field.annotation):
            yield from section(f"`{place}.{name}`", inner, f"{place}.{name}", level + 1)


def own_text(model: type[BaseModel]) -> str:
    """The class's docstring, or that of the nearest parent which has one; none if it only names its place."""
    text = next(" ".join(kind.__doc__.split()) for kind in model.__mro__ if kind.__doc__)
    return "" if text.startswith(("The section", "The block")) else text


def components(kind: Kind) -> Iterator[str]:
    """A section for each `_type` that insitu brings, those with the same keys together."""
    found = {name: registry.find(kind, name).config_type for name in kind.built_in}  # type: ignore[union-attr]
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, model in found.items():
        alike.setdefault((own_text(model), *table(model)), []).append(name)
    for names in alike.values():
        title = ", ".join(f"`{name}`" for name in names)
        yield from section(f"`_type`: {title}", found[names[0]], f"{kind.section}.NAME", 3)


def page() -> str:
    lines = [INTRODUCTION, *section("`general`", GeneralConfig, "general"), "## `llms`\n", *components(reg.LLM)]
    lines += [
        "## `functions` and `workflow`\n",
        "Blocks of `_type`s that your plugins register with `register_function`; their keys are the fields of your",
        "configuration classes. `workflow` is one such block, and is the function that is run on each row.",
        "Two are built in, for agents that are no Python of yours.\n",
        *components(reg.FUNCTION),
        *section("`eval.general`", EvalGeneralConfig, "eval.general"),
        "## `eval.general.dataset`\n",
        *components(reg.DATASET),
        "## `eval.evaluators`\n",
        "Blocks of `_type`s that your plugins register with `register_evaluator`.\n",
    ]
    for kind in (reg.TTC_STRATEGY, reg.TRAJECTORY_BUILDER, reg.TRAINER_ADAPTER, reg.TRAINER):
        lines += [f"## `{kind.section}`\n", *components(kind)]
    lines += section("`finetuning`", FinetuneConfig, "finetuning")
    text = "\n".join(lines).replace("eval.general.dataset.NAME", "eval.general.dataset")
    return text.rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    if parser.parse_args().check:
        return 0 if PAGE.exists() and PAGE.read_text() == page() else 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())

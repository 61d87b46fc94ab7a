"""The docstrings of fields, as descriptions in schemas.

Pydantic would read them as it makes the classes, which takes 0.07 s of the start of a command.
"""

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue


def field_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The docstrings below the fields of a class and its bases, by the fields' names.

    A class whose source cannot be read has none.
    """
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            found |= _docstrings_in(base.__module__).get(base.__qualname__, {})
    return found


@cache
def _docstrings_in(module: str) -> dict[str, dict[str, str]]:
    """The docstrings below the fields of each class of a module, which is parsed once for all of them."""
    try:
        return dict(_classes_in(ast.parse(inspect.getsource(sys.modules[module]))))
    except (KeyError, OSError, SyntaxError, TypeError):
        return {}


def _classes_in(node: ast.AST, inside: str = "") -> Iterator[tuple[str, dict[str, str]]]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.ClassDef(name=name, body=body):
                yield f"{inside}{name}", dict(_documented(body))
                yield from _classes_in(child, f"{inside}{name}.")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield from _classes_in(child, f"{inside}{name}.<locals>.")
            case ast.If() | ast.Try() | ast.With():
                yield from _classes_in(child, inside)


def _documented(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, below in pairwise(body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, inspect.cleandoc(text)


class DocumentedSchema(GenerateJsonSchema):
    """A property has its field's docstring as its description, if the field has no other."""

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        made, model = super().model_schema(schema), schema["cls"]
        texts = field_docstrings(model)
        if properties := made.get("properties"):  # in the order of the fields, by their aliases
            for (name, field), shown in zip(model.model_fields.items(), properties.values(), strict=True):
                if name in texts and field.description is None:
                    shown["description"] = texts[name]
        return made

"""Templates of requests and commands: texts with `{column}`, which a row's values replace; paths in a body."""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from insitu.errors import WorkflowError, not_found
from insitu.workflow.functions import convert

_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")
_WORD = re.compile(r"(?<![{$])\{([^\W\d][\w-]*)\}(?!\})")
_PATH = re.compile(r"[^.\[\]]+(\[\d+\]|\.[^.\[\]]+)*")
_PART = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
_BRACES = "(write {{ for a brace)"


def set_nested(body: Any, path: str, value: Any) -> None:
    """Sets a value at a path such as `items[0].url`; missing mappings are made.

    Raises LookupError or TypeError unless all else is there, ValueError for what is no path.
    """
    if not _PATH.fullmatch(path):
        raise ValueError(path)
    *parents, last = (int(index) if index else name for index, name in _PART.findall(path))
    for part in parents:
        body = body.setdefault(part, {}) if isinstance(body, dict) else body[part]
    body[last] = value


def template_texts(template: Any, where: str) -> Iterator[tuple[str, str]]:
    """The texts of a template by their key. Raises ValueError for a placeholder in a key, and for a single brace."""
    if isinstance(template, str):
        if re.search("[{}]", _PLACEHOLDER.sub("", template)):
            quoted = f": {template!r:.200}" if where.startswith("body") else ""  # others may hold secrets
            raise ValueError(f"{where} has a brace without its counterpart{quoted} {_BRACES}")
        yield where, template
    elif isinstance(template, dict):
        for key, each in template.items():
            if "{" in str(key):
                raise ValueError(f"{where}: the key {key!r} has a placeholder, which only values may have")
            yield from template_texts(each, f"{where}.{key}")
    elif isinstance(template, list):
        for index, each in enumerate(template):
            yield from template_texts(each, f"{where}[{index}]")


def check_placeholders(text: str, where: str, names: Collection[str]) -> None:
    """Raises ValueError for a placeholder that is none of the names."""
    for match in _PLACEHOLDER.finditer(text):
        if match[1] is not None and match[1] not in names:
            raise ValueError(f"{not_found(f'{where}: the placeholder', match[1], names)} {_BRACES}")


def check_command(command: Sequence[str], where: str, names: Collection[str]) -> None:
    """As `check_placeholders`, of a command, in which programs may have other text in braces, such as `{ print $1 }`.

    Code, after `-c` or `-e`, may even have names in braces.
    """
    texts = [text for before, text in pairwise(("", *command)) if before not in ("-c", "-e")]
    for name in (name for text in texts for name in _WORD.findall(text)):
        if name not in names:
            placeholder = not_found(f"{where}: the placeholder", name, names)
            raise ValueError(f"{placeholder} (write {{ {name} }} where it is none)")


def filled(template: Any, values: dict[str, Any], where: str) -> Any:
    """A template with the values of its placeholders; a text that is one of them becomes the value.

    Raises WorkflowError, saying `where`, for a placeholder without a value.
    """
    if isinstance(template, dict):
        return {key: filled(each, values, f"{where}.{key}") for key, each in template.items()}
    if isinstance(template, list):
        return [filled(each, values, f"{where}[{index}]") for index, each in enumerate(template)]
    if not isinstance(template, str):
        return template
    whole = _PLACEHOLDER.fullmatch(template)
    return _value(whole, values, where) if whole and whole[1] else filled_text(template, values, where)


def filled_text(template: str, values: dict[str, Any], where: str, encode: Callable[[str], str] = str) -> str:
    """A text with the encoded values of its placeholders. Raises WorkflowError for one without a value, or null."""

    def text_of(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        return encode(value_text(match[1], _value(match, values, where), values, where))

    return _PLACEHOLDER.sub(text_of, template)


def with_values(command: Sequence[str], values: Mapping[str, Any], folder: Path) -> list[str]:
    """A command with the values of its placeholders; a path of a program, without `..`, is relative to the folder.

    Raises WorkflowError for one without a value.
    """
    field = re.compile(rf"\{{({'|'.join(map(re.escape, values))})\}}")  # one pass: values are not templates
    start = os.path.abspath(folder / command[0]) if os.sep in command[0] else command[0]

    def text_of(match: re.Match[str]) -> str:
        return value_text(match[1], values[match[1]], values, command[0])

    try:
        check_command(command, f"{command[0]}: row {values.get('row_id')!r}", values)
    except ValueError as error:
        raise WorkflowError(str(error)) from None
    return [start, *(field.sub(text_of, part) for part in command[1:])]


def value_text(name: str, value: Any, values: Mapping[str, Any], where: str) -> str:
    """A value of a row as text. Raises WorkflowError, saying `where`, for null."""
    if value is None:
        raise WorkflowError(f"{where}: row {values.get('row_id')!r}: {name} is null, which no text can hold")
    return str(convert(value, str))


def _value(match: re.Match[str], values: dict[str, Any], where: str) -> Any:
    try:
        check_placeholders(match[0], f"{where}: row {values['row_id']!r}", values)
    except ValueError as error:
        raise WorkflowError(str(error)) from None
    return values[match[1]]

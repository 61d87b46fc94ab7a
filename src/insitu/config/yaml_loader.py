"""The dialect of the files: YAML 1.2 numbers and truth values, `-o KEY VALUE`, and `${NAME}` from the environment."""

import copy
import os
import re
from collections.abc import Hashable
from typing import Any

import yaml

from insitu.errors import ConfigError

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core schema: 1e-5 is a number, `on` and `no` are text, a key stands once."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag.rsplit(":", 1)[1] in ("null", "merge")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF")
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^(?:[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))"
        r"|\.(?:nan|NaN|NAN))$"
    ),
    "-+0123456789.",
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), "-+0123456789"
)
_Loader.add_constructor(
    "tag:yaml.org,2002:int", lambda loader, node: int(node.value, 0 if node.value[:2] in ("0o", "0x") else 10)
)


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            raise yaml.constructor.ConstructorError(None, None, "a key must be text", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", key_node.start_mark)
        seen.add(key)
    loader.flatten_mapping(node)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse_yaml(text: str) -> Any:
    """Numbers and truth values as YAML 1.2 has them; ConfigError with the line, but without what stands there."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:  # its own message quotes the file, which may hold a secret
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"not valid YAML{line}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {error}") from None


def override(data: dict[str, Any], key: str, text: str) -> None:
    """Apply `-o KEY VALUE`: KEY with dots into mappings (and numbers into lists), VALUE read as YAML."""
    try:
        value = parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"-o {key}: the value is {error}") from None
    node: Any = data
    *parents, last = key.split(".")
    for depth, part in enumerate([*parents, last]):
        where = ".".join(key.split(".")[:depth]) or "the file"
        if isinstance(node, list):
            if not part.isdigit() or int(part) >= len(node):
                raise ConfigError(f"-o {key}: {where} is a list of {len(node)}; {part!r} is not one of its places")
            index: Any = int(part)
        elif isinstance(node, dict):
            index = part
        else:
            raise ConfigError(f"-o {key}: {where} is no mapping (but {type_name(node)}): it has no keys")
        if depth == len(parents):
            node[index] = value
        else:
            if isinstance(node, dict) and node.get(index) is None:
                node[index] = {}
            node[index] = copy.copy(node[index])  # what a YAML alias shares with other places stays as it is there
            node = node[index]


def expand(node: Any, problems: list[str], taken: dict[str, str], where: str = "") -> Any:
    """`node` with `${NAME}` and `${NAME:-default}` replaced in every text.

    A variable that is not set is added to `problems`; `taken` gets, by key, the variables values came from.
    """
    if isinstance(node, dict):
        return {k: expand(v, problems, taken, f"{where}.{k}" if where else str(k)) for k, v in node.items()}
    if isinstance(node, list):
        return [expand(v, problems, taken, f"{where}.{i}") for i, v in enumerate(node)]
    if not isinstance(node, str):
        return node

    def value(match: re.Match[str]) -> str:
        name, default = match.groups()
        found = os.environ.get(name, default)
        if found is None:
            problems.append(f"{where}: the environment variable {name} is not set (and has no :-default)")
            return ""
        taken[where] = name
        return found

    return _VARIABLE.sub(value, node)


def type_name(value: Any) -> str:
    """What a value of the file is, for messages that must not show it: it may be a secret."""
    names = {str: "text", bool: "a truth value", list: "a list", dict: "a mapping", type(None): "nothing"}
    return names.get(type(value), "a number")

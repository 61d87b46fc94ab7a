"""Parses configuration files: YAML 1.2 scalars, `-o KEY VALUE` overrides, and `${NAME}` from the environment."""

import copy
import os
import re
from collections.abc import Hashable
from pathlib import PurePath
from typing import Any

import yaml

from insitu.errors import ConfigError

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_MAX_DEPTH = 64
_MAX_VALUES = 1_000_000
"""Limits of a file's nesting, and of its size with all aliases expanded."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core schema: 1e-5 is a number, `on` and `no` are strings, duplicate keys are errors."""

    depth = 0
    sizes: dict[int, int]

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.depth == _MAX_DEPTH:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, f"nested deeper than {_MAX_DEPTH} levels", mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError):  # of PyYAML, which checks no text
            problem = f"a value cannot be read as {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            self.sizes = {}
            self._check_size(node)
        return node

    def _check_size(self, node: yaml.Node) -> int:
        """The number of values below a node; a node that several aliases share counts each time."""
        if (count := self.sizes.get(id(node))) is not None:
            return count
        self.sizes[id(node)] = _MAX_VALUES  # until it is known: an alias to a node around it has no end
        parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        size = 1 + sum(map(self._check_size, parts)) if isinstance(node, yaml.CollectionNode) else 1
        if size > _MAX_VALUES:
            problem = f"more than {_MAX_VALUES} values once its aliases are expanded"
            raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
        self.sizes[id(node)] = size
        return size


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
            raise yaml.constructor.ConstructorError(None, None, "a key must be a string", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
        seen.add(key)
    loader.flatten_mapping(node)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse_yaml(text: str) -> Any:
    """Parses YAML 1.2; raises ConfigError with the line number but not its content, which may be a secret."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:  # its own message quotes the file
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"not valid YAML{line}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {error}") from None


class _Dumper(yaml.SafeDumper):
    """Quotes what `parse_yaml` would not read as text; writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers
_Dumper.add_multi_representer(str, lambda dumper, text: dumper.represent_str(str(text)))
_Dumper.add_multi_representer(PurePath, lambda dumper, path: dumper.represent_str(str(path)))


def dump_yaml(data: Any, width: int = 120) -> str:
    """The text that `parse_yaml` reads as `data`. Raises ConfigError if it holds anything but YAML's values."""
    try:
        return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width)
    except yaml.representer.RepresenterError as error:
        raise ConfigError(f"{error.args[-1]!r:.80} is no value of YAML") from None


def parse_override(key: str, text: str) -> Any:
    """The VALUE of `-o KEY VALUE`, which is YAML."""
    try:
        return parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"-o {key}: the value is {error}") from None


def override(data: dict[str, Any], key: str | tuple[str, ...], value: Any) -> None:
    """Sets the value of a dotted key, or of one by its parts, which may have dots; numbers index lists."""
    node: Any = data
    parts = key.split(".") if isinstance(key, str) else [*key]
    for depth, part in enumerate(parts):
        where = ".".join(parts[:depth]) or "the file"
        if isinstance(node, list):
            if not part.isdecimal() or int(part) >= len(node):
                raise ConfigError(f"-o {key}: {where} is a list of {len(node)} items, which has no index {part!r}")
            index: Any = int(part)
        elif isinstance(node, dict):
            index = part
        else:
            raise ConfigError(f"-o {key}: {where} is not a mapping but {value_type(node)}")
        if depth == len(parts) - 1:
            node[index] = value
        else:
            if isinstance(node, dict) and node.get(index) is None:
                node[index] = {}
            node[index] = copy.copy(node[index])  # a YAML alias may share this node
            node = node[index]


def expand(node: Any, problems: list[str], taken: dict[str, str], where: str = "") -> Any:
    """A copy of `node` with `${NAME}` and `${NAME:-default}` expanded in every string.

    Unset variables are appended to `problems`; `taken` receives the variable of each expanded key.
    """
    if isinstance(node, dict):
        return {k: expand(v, problems, taken, f"{where}.{k}" if where else str(k)) for k, v in node.items()}
    if isinstance(node, list):
        return [expand(v, problems, taken, f"{where}.{i}") for i, v in enumerate(node)]
    if type(node) is not str:  # a subclass holds more than its text
        return node

    def value(match: re.Match[str]) -> str:
        name, default = match.groups()
        if default is not None and "${" in default:
            problems.append(f"{where}: the default of ${{{name}}} must not contain another variable: {default}}}")
            return ""
        variable = os.environ.get(name, default)
        if variable is None:
            problems.append(f"{where}: the environment variable {name} is not set (and has no :-default)")
            return ""
        taken[where] = name
        return variable

    return _VARIABLE.sub(value, node)


def value_type(value: Any) -> str:
    """The type of a value, for messages that must not show the value: it may be a secret."""
    names = {str: "text", bool: "a truth value", list: "a list", dict: "a mapping", type(None): "nothing"}
    return names.get(type(value), "a number")

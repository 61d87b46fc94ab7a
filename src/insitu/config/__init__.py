"""A YAML file becomes a frozen `Config`: overrides, environment variables, and a check of every key.

In: a file, or its contents, and what a request overrides. Out: a `Config`, which nothing writes to, or a ConfigError
with all problems. Read this file first, then `schemas/config`, `yaml_loader` (also overrides),
`short_form` and `checking`.
"""

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from insitu.config.checking import SECTIONS, Validator
from insitu.config.yaml_loader import override, parse_override, parse_yaml
from insitu.errors import ConfigError
from insitu.schemas.config import Config, EvalGeneralConfig, GeneralConfig, Moved, moved_path
from insitu.schemas.evaluation import RunRequest

__all__ = ["SECTIONS", "Config", "EvalGeneralConfig", "GeneralConfig", "Moved", "moved_path"]


def load_config(source: Any, overrides: Iterable[tuple[str, str]] = ()) -> Config:
    """Reads, overrides and checks a file; a Config is returned unchanged.

    Raises ConfigError with every problem of the file.
    """
    return requested_config(RunRequest(config_file=source, override=tuple(overrides)))


def requested_config(request: RunRequest) -> Config:
    """The checked file of a request, with the values that its options give. Raises ConfigError with all problems."""
    source = request.config_file
    if isinstance(source, Config):
        if request.override:
            raise ConfigError("overrides apply to a file, not to a loaded configuration")
        return changed_config(source, request.values) if request.values else source
    if source is None:
        raise ConfigError("config_file is missing: name the file, or pass a loaded configuration")
    path = Path(source)  # type: ignore[arg-type]  # documented as open
    data = read_settings(path)
    for key, text in request.override:
        override(data, key, parse_override(key, text))
    for key, value in request.values.items():
        override(data, key, value)
    return check_config(data, path)


def changed_config(
    config: Config, values: Mapping[str, Any] | Mapping[tuple[str, str, str], Any] | Mapping[tuple[str, ...], Any]
) -> Config:
    """Returns the file with other values, by dotted key, or by the parts of one, which may have dots, checked anew."""
    assert config.data is not None, "only what was read can be changed"
    data = copy.deepcopy(dict(config.data))
    for key, value in values.items():
        override(data, key, value)
    return check_config(data, Path(config.source), config.working_dir)


def read_settings(path: Path) -> dict[str, Any]:
    """The contents of a file, unchecked. Raises ConfigError if it cannot be read, or is no mapping of sections."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the configuration file {path} is not UTF-8 text: {error.reason}") from error
    try:
        data = parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{path} is {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping of sections ({', '.join(SECTIONS)})")
    return data


def check_config(data: dict[str, Any], path: Path, working_dir: Path | None = None) -> Config:
    """Checks the contents of the file at `path`; raises ConfigError with all their problems.

    Relative paths are those of this process's working directory, or of `working_dir`.
    """
    return Validator(path, working_dir or Path.cwd()).run(data)

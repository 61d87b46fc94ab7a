"""Python code that a file names: `my_agent:answer`."""

import importlib
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

from insitu.errors import ConfigError, PluginError, describe_error
from insitu.registry import not_found


def make_importable(folder: Path) -> None:
    """Lets modules in a file's folder be imported."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def import_module(name: str, key: str, folder: Path) -> Any:
    """Raises ConfigError if there is no such module, PluginError if it cannot be imported."""
    make_importable(folder)
    try:
        return importlib.import_module(name)
    except Exception as error:  # its code may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == name.partition(".")[0]:
            raise ConfigError(f"{key}: no module named {name!r} (also searched in {folder})") from None
        raise PluginError(f"{key}: {name!r} could not be imported: {describe_error(error)}") from error


def load_code(ref: str, key: str, folder: Path) -> Callable[..., Any]:
    """The function that `MODULE:NAME` stands for. Raises ConfigError or PluginError."""
    module_name, _, name = ref.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{key} is {ref!r}; it must be MODULE:NAME, such as my_agent:answer")
    module = import_module(module_name, key, folder)
    try:
        code = attrgetter(name)(module)
    except AttributeError:
        own = [each for each, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise ConfigError(not_found(f"{key}: in {module_name},", name, own)) from None
    if not callable(code):
        raise ConfigError(f"{key}: {ref} is a {type(code).__name__}; it must be a function")
    function: Callable[..., Any] = code
    return function

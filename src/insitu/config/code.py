"""Python code that a file names, `my_agent:answer` or `agents/my_agent.py:answer`: loaded, checked and called."""

import ast
import asyncio
import hashlib
import importlib
import inspect
import symtable
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import takewhile
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast, get_type_hints

from pydantic import TypeAdapter, ValidationError

from insitu.errors import (
    ConfigError,
    PluginError,
    WorkflowError,
    a_type,
    describe_error,
    did_you_mean,
    first_problem,
    not_found,
)
from insitu.schemas.components import CodeRef
from insitu.schemas.parts import LocalPart, code_file, load_named, with_arguments

_importing: ContextVar[bool] = ContextVar("insitu_importing", default=False)


class ImportStopped(BaseException):
    """A script that is imported for its functions has reached the call that runs it, which ends its import.

    Not an Exception: the script must not catch it.
    """

    def __init__(self, module: ModuleType) -> None:
        super().__init__(module.__name__)
        self.module = module


def stop_import(name: str) -> None:
    """Ends the import of the module called `name` if a file names it; otherwise does nothing."""
    if _importing.get() and name in sys.modules:
        raise ImportStopped(sys.modules[name])


def make_importable(folder: Path) -> None:
    """Lets modules in a file's folder be imported."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def import_module(name: str, key: str, folder: Path) -> Any:
    """Raises ConfigError if there is no such module, or one that it imports, or it is no Python; PluginError if its
    code fails.

    The module may be a script that calls `insitu.finetune`: it is imported as far as to that call.
    """
    make_importable(folder)
    token = _importing.set(True)
    try:
        return importlib.import_module(name)
    except ImportStopped as stopped:
        return _as_far_as_imported(stopped.module, name, key)
    except Exception as error:  # its code may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == name.partition(".")[0]:
            raise ConfigError(f"{key}: no module named {name!r} (also searched in {folder})") from None
        kind = ConfigError if isinstance(error, ImportError | SyntaxError) else PluginError
        raise kind(f"{key}: {name!r} could not be imported: {describe_error(error)}") from error
    finally:
        _importing.reset(token)


def _as_far_as_imported(module: ModuleType, name: str, key: str) -> ModuleType:
    if module.__name__ != name:
        raise PluginError(
            f"{key}: {name!r} could not be imported: {module.__name__!r}, which it imports, starts a run; put its call "
            'of insitu under `if __name__ == "__main__":`'
        )
    sys.modules[name] = module  # Python forgets a module whose import has failed
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


def place_of(file: Path) -> tuple[Path, str]:
    """The folder from which a file is imported, and the name of its module: `pkg.agent` if it is in a package."""
    file = file.resolve()
    folder, name = file.parent, file.stem
    while (folder / "__init__.py").is_file():
        folder, name = folder.parent, f"{folder.name}.{name}"
    return folder, name


def load_code(ref: str, key: str, folder: Path) -> Any:
    """What `MODULE:NAME` or `FILE.py:NAME` stands for, a function or another object; files are relative to `folder`.

    Raises ConfigError or PluginError.
    """
    if isinstance(ref, CodeRef) and ref.code is not None:
        return ref.code
    place, _, name = ref.rpartition(":")
    if not place or not name:
        raise ConfigError(
            f"{key} is {ref!r}; it must be MODULE:NAME or FILE.py:NAME, such as my_agent:answer or my_agent.py:answer"
        )
    module = _import_file(folder / Path(place).expanduser(), key) if place.endswith(".py") else None
    if module is None:
        module = import_module(place, key, folder)
    try:
        code = attrgetter(name)(module)
    except AttributeError:
        own = [each for each, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise ConfigError(not_found(f"{key}: in {place},", name, own)) from None
    if not callable(code) and type(code).__module__ == "builtins":
        raise ConfigError(f"{key}: {ref} is {a_type(code)}; it must be a function")
    return code


def check_defined(ref: str, key: str, folder: Path) -> None:
    """Raises ConfigError unless a file in `folder` gives the name of MODULE:NAME a value; runs none of its code."""
    try:
        file, name = code_file(ref, folder.resolve())
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None
    try:
        source = file.read_bytes()
        symbols = symtable.symtable(source, str(file), "exec").get_symbols()  # type: ignore[arg-type]  # of any coding
    except OSError as error:
        raise ConfigError(f"{key}: {file} cannot be read: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{key}: {file} is not Python: {error}") from None
    own = [each.get_name() for each in symbols if each.is_assigned() or each.is_imported() or each.is_namespace()]
    if name not in own and b"import *" not in source:
        raise ConfigError(not_found(f"{key}: in {file},", name, own))


def code_digest(ref: CodeRef, folder: Path) -> str | None:
    """A digest of the `statements_of` a name. None for code that is in no file."""
    made_of = statements_of(ref, folder)
    return hashlib.sha256("\n".join(map(ast.dump, made_of)).encode()).hexdigest()[:16] if made_of is not None else None


def statements_of(ref: CodeRef, folder: Path) -> list[ast.stmt] | None:
    """What a name of a Python file is made of: its statements, and those of what they use of the file.

    None for code that is in no file.
    """
    place, _, name = ref.rpartition(":")
    file: Any = folder / Path(place).expanduser() if place.endswith(".py") else _file_of(place)
    if ref.code is not None:
        file, name = _file_of(str(getattr(ref.code, "__module__", ""))), getattr(ref.code, "__qualname__", "")
    try:
        module = ast.parse(Path(file).read_bytes())
    except (OSError, TypeError, SyntaxError, ValueError):  # it is in no file, or not in Python
        return None
    return _statements_of(name.partition(".")[0], module) or module.body


def _file_of(module: str) -> str | None:
    return getattr(sys.modules.get(module), "__file__", None)


def _statements_of(name: str, module: ast.Module) -> list[ast.stmt]:
    """The statements of a module that give a name its value, and those that give one to the names in these."""
    binding = {each: {*_bound(each)} for each in module.body}
    wanted, found = {name}, set[ast.stmt]()
    while added := [each for each, names in binding.items() if each not in found and names & wanted]:
        found.update(added)
        wanted.update(*map(_used, added))
    return [each for each in module.body if each in found]


def _used(statement: ast.stmt) -> set[str]:
    """The names in a statement, but those that a function or class gives values itself."""
    used = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        used -= {*_bound(statement), *(node.arg for node in ast.walk(statement) if isinstance(node, ast.arg))}
    return used


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement may give a value; more than that, if it has functions."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]


def load_function(ref: str, key: str, folder: Path) -> Callable[..., Any]:
    """As `load_code`, of what can be called."""
    function = load_code(ref, key, folder)
    if not callable(function):
        raise ConfigError(f"{key}: {ref} is {a_type(function)}; it must be a function")
    return cast(Callable[..., Any], function)


class LoadedPart(NamedTuple):
    """The function of a part, with its arguments, and the part as the run records it."""

    function: Callable[..., Any]
    settings: dict[str, Any]


def load_part(part: LocalPart, key: str, folder: Path) -> LoadedPart:
    """Loads a function, and records the digest of its file if it is Python code.

    Raises ConfigError if `part` has another digest, or it cannot be called with its arguments, and like `load_code`.
    """
    if part.function is None:
        function = load_named(part.kind, part.type)
    else:
        function = load_function(part.function, f"{key}.function", folder)
        file = getattr(sys.modules.get(getattr(function, "__module__", "")), "__file__", None)
        digest = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file is not None else None
        if part.sha256 not in (None, digest):
            raise ConfigError(f"{key}.sha256 is {part.sha256}, but that of {file} is {digest}")
        part = part.model_copy(update={"sha256": digest})
    _check_arguments(function, part, key)
    return LoadedPart(with_arguments(function, part), part.model_dump(mode="json", exclude_defaults=True))


def _check_arguments(function: Callable[..., Any], part: LocalPart, key: str) -> None:
    """Raises ConfigError if a part cannot be called with what it gets, or has an argument out of the declared range."""
    if not part.may_wait and not is_blocking(function):
        raise ConfigError(f"{key}: {name_of(function)} is asynchronous; it must return its result")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions of C have none
        return
    given = {name: None for name in part.by_name if name in signature.parameters} | part.arguments
    try:
        signature.bind(*part.by_position, **given)
    except TypeError as error:
        named = f"{name_of(function)}({', '.join(signature.parameters)})"
        gets = ", ".join([*part.by_position, *(f"{name}=" for name in part.by_name)])
        raise ConfigError(f"{key}: {named}: {error}; it gets {gets}, and what arguments sets") from None
    if part.function is not None:  # what it asks of its values is its own affair
        return
    try:
        kinds = get_type_hints(function, include_extras=True)
    except (NameError, TypeError):  # of a package: names for type checkers only, or an object that is called
        return
    for name, value in part.arguments.items():
        try:
            TypeAdapter(kinds.get(name, Any)).validate_python(value, context=part.arguments)
        except ValidationError as error:
            raise ConfigError(f"{key}.arguments.{name} is {value!r:.80}: {first_problem(error)}") from None


def is_blocking(function: Any) -> bool:
    """Whether calling it waits for its result: it is neither a coroutine function nor an asynchronous generator."""
    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    asynchronous = inspect.iscoroutinefunction, inspect.isasyncgenfunction
    return not any(check(each) for check in asynchronous for each in (function, called))


async def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a function, which runs in a thread unless it is asynchronous.

    Raises WorkflowError if an asynchronous function returns another coroutine.
    """
    result = await asyncio.to_thread(function, *args, **kwargs) if is_blocking(function) else function(*args, **kwargs)
    result = await result if inspect.isawaitable(result) else result
    if inspect.iscoroutine(result):
        result.close()
        raise WorkflowError(f"{name_of(function)} returned a coroutine: write `return await {result.__name__}(...)`")
    return result


def name_of(function: Any) -> str:
    """How an error calls a function or a callable object."""
    function = function.func if isinstance(function, partial) else function
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def call_with(function: Callable[..., Any], *args: Any, **offered: Any) -> Any:
    """Calls a function with those of the `offered` values for which it has a parameter."""
    parameters = inspect.signature(function).parameters
    return function(*args, **{name: value for name, value in offered.items() if name in parameters})


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function can be called with a keyword of this name."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def parameters(
    function: Callable[..., Any], where: str, names: Collection[str], offered: Collection[str], hint: str = ""
) -> tuple[str | None, list[str]]:
    """The parameter for the input, and those of `offered` that the function has.

    Raises ConfigError, which ends with `hint`, if it has none for one of `names`, or needs one that nobody fills.
    """
    signature = inspect.signature(function).parameters
    for name in names:
        if not takes(function, name):
            raise ConfigError(not_found(f"{where}: the parameter", name, signature) + hint)
    positional = [n for n, each in signature.items() if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    first = next((name for name in positional if name not in names and name not in offered), None)
    filled = {first, *names, *offered}
    for name, each in signature.items():
        is_variable = each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        if each.default is each.empty and not is_variable and name not in filled:
            raise ConfigError(f"{where}: nothing is given for the parameter {name}; set arguments.{name}{hint}")
    return first, [name for name in offered if name in signature]


def input_binder(
    function: Callable[..., Any], first: str | None
) -> Callable[[Sequence[Any], dict[str, Any]], tuple[Sequence[Any], dict[str, Any]]]:
    """Makes the arguments of a call, by position and by name, of the input, if one is given, and of others by name.

    `first` is the parameter for the input.
    """
    signature = inspect.signature(function).parameters
    is_first = first == next(iter(signature), None)
    positional = {name: each.default for name, each in signature.items() if each.kind is each.POSITIONAL_ONLY}

    def bind(given: Sequence[Any], named: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        if first is not None and given:
            if is_first and not positional:
                return given, named
            named = named | {first: given[0]}
        values = (named.get(name, default) for name, default in positional.items())
        args = [*takewhile(lambda value: value is not inspect.Parameter.empty, values)]
        return args, {name: value for name, value in named.items() if name not in positional}

    return bind


def _import_file(file: Path, key: str) -> ModuleType:
    if not file.is_file():
        hint = did_you_mean(file.name, (each.name for each in file.parent.glob("*.py")))
        raise ConfigError(f"{key}: {file} does not exist{hint}")
    folder, name = place_of(file)
    module: ModuleType = import_module(name, key, folder)
    origin = getattr(module, "__file__", None)
    if origin is None or not file.samefile(origin):
        raise ConfigError(f"{key}: {file} is the module {name!r}, of which there is another: {origin}; rename the file")
    return module

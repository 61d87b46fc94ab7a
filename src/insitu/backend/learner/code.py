"""Functions that the settings of a job choose: by name, or Python code from the folder that the backend was given.

A client must not choose what this process runs: without `insitu backend --allow_code FOLDER` there is no such folder.
"""

import hashlib
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from insitu.errors import BackendError, RequestRefused, describe_error
from insitu.schemas.parts import PYTHON, Part, code_file, load_named, with_arguments
from insitu.schemas.training_jobs import TrainingOptions


class CodeFolder:
    """The Python files of a folder; none if it is None."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder.resolve() if folder is not None else None
        self._modules: dict[Path, tuple[str, ModuleType]] = {}  # with the digest of the file that was loaded

    def check(self, settings: TrainingOptions) -> None:
        """Adds the digests of the files with the Python code of a job, and loads nothing.

        Raises RequestRefused if there is code that is not allowed, missing, or not that of a digest in the settings.
        """
        for key, part in settings.code.items():
            _, _, part.sha256 = self._read(key, part)

    def function(self, key: str, part: str | Part) -> Callable[..., Any]:
        """The function of a setting, with its arguments. Raises RequestRefused or BackendError."""
        if isinstance(part, str):
            return load_named(f"{key}s", part)
        return with_arguments(self._load(key, part) if part.type == PYTHON else load_named(f"{key}s", part.type), part)

    def _load(self, key: str, part: Part) -> Callable[..., Any]:
        path, source, digest = self._read(key, part)
        name = (part.function or "").rpartition(":")[2]
        function = vars(self._import(key, path, source, digest)).get(name)
        if function is None:
            raise _refused(key, f"{path} has no {name!r}")
        assert self.folder is not None
        home = getattr(sys.modules.get(getattr(function, "__module__", "")), "__file__", None)
        if not callable(function) or home is None or not Path(home).resolve().is_relative_to(self.folder):
            raise _refused(key, f"{part.function} must be a function that is defined in {self.folder}")
        return function

    def _read(self, key: str, part: Part) -> tuple[Path, bytes, str]:
        """The file with the function of a part, its content and digest."""
        if self.folder is None:
            problem = f"{part.function} is Python code, which this backend does not load for its clients"
            raise _refused(key, f"{problem}; start it with --allow_code FOLDER", status=403, code="code_not_allowed")
        try:
            path, _ = code_file(part.function or "", self.folder)
        except ValueError as error:
            raise _refused(key, f"{error}, the folder of --allow_code") from None
        source = path.read_bytes()
        digest = hashlib.sha256(source).hexdigest()
        if part.sha256 not in (None, digest):
            raise _refused(key, f"{path} has changed: its sha256 is {digest}, not {part.sha256}", status=409)
        return path, source, digest

    def _import(self, key: str, path: Path, source: bytes, digest: str) -> ModuleType:
        """Loads a file again if it has changed."""
        assert self.folder is not None
        if self._modules.get(path, ("",))[0] == digest:
            return self._modules[path][1]
        name = ".".join(path.relative_to(self.folder).with_suffix("").parts).removesuffix(".__init__")
        other = getattr(sys.modules.get(name), "__file__", None) if name in sys.modules else str(path)
        if other is None or Path(other).resolve() != path:
            raise _refused(key, f"{path} has the name of another module, {name}; rename the file")
        if str(self.folder) not in sys.path:
            sys.path.append(str(self.folder))
        try:
            if "." in name:
                importlib.import_module(name.rpartition(".")[0])
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            exec(compile(source, str(path), "exec"), vars(module))
        except (Exception, SystemExit) as error:  # code of the user may raise anything
            sys.modules.pop(name, None)
            raise BackendError(f"{key}: {path} could not be imported: {describe_error(error)}") from error
        self._modules[path] = (digest, module)
        return module


def scheduled(schedule: Callable[[float], Any], part: float) -> float:
    """The factor of the learning rate when this part of the training is over. Raises BackendError."""
    try:
        factor = schedule(part)
    except Exception as error:  # code of the user may raise anything
        raise BackendError(f"schedule: for {part:g} it raised {describe_error(error)}") from error
    number = float(factor) if isinstance(factor, Real) else math.nan
    if not (math.isfinite(number) and number >= 0):
        raise BackendError(f"schedule: it returned {factor!r:.80} for {part:g}; allowed: finite numbers from 0")
    return number


def _refused(key: str, problem: str, *, status: int = 400, code: str = "invalid_code") -> RequestRefused:
    return RequestRefused(f"settings.{key}: {problem}", status=status, param=f"settings.{key}", code=code)


NO_CODE = CodeFolder()

"""The exceptions that insitu raises, and the wording of errors: of other code, of pydantic, of failed look-ups.

InsituError
├── ConfigError          the command line or the YAML file is wrong; nothing has been started (exit code 2)
├── PluginError          a plugin's component broke the interface it implements
├── Stalled              nothing has completed for `eval.general.stall_timeout`
├── WorkflowError        the user's workflow failed on a row
│   ├── EpisodeTimeout   it took longer than `eval.general.episode_timeout`
│   ├── InputError       a function got an input that it cannot take
│   └── CaptureError     a model call lacks what training needs (token ids, logprobs)
├── TrajectoryError      captured calls, rewards or rows that cannot be trained on
└── BackendError         a backend failed or could not be reached
    ├── BackendUnavailable   no usable response: wrong address, process gone, connection lost, 429, 5xx
    ├── RequestRefused       a 4xx response; carries `status`, `param` and `code`
    └── JobFailed            the backend accepted the job and could not finish it
        └── JobLost          the backend no longer has the job, which can be submitted again
"""

import difflib
import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from traceback import walk_tb

_LIBRARY = f"{os.sep}lib{os.sep}python"
_PACKAGES = re.compile(r"[/\\](?:site|dist)-packages[/\\]([^/\\]+)")
_NO_MEMORY = re.compile(r"allocate memory|failed to map segment|can't start new thread|out of memory", re.IGNORECASE)
_OURS = os.path.join(os.path.dirname(__file__), "")


def install_command(extra: str) -> str:
    """What installs an extra of insitu; there is no release yet, so it is installed from its clone."""
    return f"pip install -e '.[{extra}]'"


def describe_error(error: BaseException) -> str:
    """One-line summary of an exception and its last user frame.

    A user frame is in neither insitu nor a library. Without any, the frames of the first installed package that
    insitu called count as the user's, but not for an error of insitu, whose message is complete.
    """
    if isinstance(error, SyntaxError) and os.path.isfile(error.filename or ""):  # it was to be imported
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    if isinstance(error, InsituError):
        frames = [frame for frame in frames if not frame[0].startswith(_OURS) and _LIBRARY not in frame[0]]
    place = users_place(frames)
    return format_error(error) + (f" ({place})" if place else "")


def users_place(stack: Iterable[tuple[str, int]]) -> str:
    """File and line of the innermost frame of a stack that is the user's (see `describe_error`)."""
    frames = [*stack]
    foreign = [frame for frame in frames if not frame[0].startswith(_OURS)]
    user = [frame for frame in foreign if _LIBRARY not in frame[0]]
    installed = [(match[1], frame) for frame in foreign if (match := _PACKAGES.search(frame[0]))]
    if not user:
        user = [frame for package, frame in installed if package == installed[0][0]]
    last = (user or foreign or frames)[-1:]
    return "".join(f"{file}, line {line}" for file, line in last)


def format_error(error: BaseException) -> str:
    """The exception's name and message, and for a foreign exception the root cause if the message omits it."""
    text, root = _format(error), exception_chain(error)[-1]
    return text if isinstance(error, InsituError) or _message(root) in text else f"{text}, from {_format(root)}"


def _format(error: BaseException) -> str:
    return f"{type(error).__name__}: {_message(error)}"


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as reason:  # a foreign __str__ may raise anything
        return f"(its message cannot be shown: {type(reason).__name__})"


def memory_problem(error: BaseException) -> str | None:
    """What could not be allocated, in one line, if an exception says that memory has run out."""
    for cause in exception_chain(error):
        lines = [line.strip() for line in _message(cause).splitlines() if _NO_MEMORY.search(line)]
        if lines or isinstance(cause, MemoryError):
            return lines[-1] if lines else _format(cause)
    return None


def exception_chain(error: BaseException) -> list[BaseException]:
    """The exception and its causes, each once: user code may even `raise e from e`."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    return chain


def a_type(value: object) -> str:
    """The type of a value with its article, for messages: `a str`, `an int`."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def key_of(location: Iterable[int | str]) -> str:
    """The key that a pydantic error is about, without the members of unions (the tags of parts begin with "<")."""
    return ".".join(str(part) for part in location if not str(part).startswith(("<", "list[", "function-")))


def first_problem(error: Exception) -> str:
    """What an exception says; of what pydantic has found, the first: the key, and what is wrong with its value."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    key = ".".join(map(str, first["loc"]))
    return f"{key and key + ': '}{first['msg'].removeprefix('Value error, ')}"


def not_found(what: str, name: str, existing: Iterable[str]) -> str:
    """The error message for a failed look-up: what was looked for, the nearest name, and all that exist."""
    existing = list(existing)
    return f"{what} {name!r} does not exist{did_you_mean(name, existing)}; available: {', '.join(existing) or 'none'}"


def did_you_mean(name: str, existing: Iterable[str]) -> str:
    """A hint to the nearest of the existing names; empty if none is near."""
    near = difflib.get_close_matches(name, list(existing), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


@contextmanager
def needing(extra: str, what: str, kind: "type[InsituError] | None" = None) -> Iterator[None]:
    """Says how to install the extra without which the imports of the body fail: a ConfigError, or of this kind."""
    try:
        yield
    except ImportError as error:
        reason = str(error).partition("\n")[0]
        missing = f"{what} needs the extra {extra} ({install_command(extra)} in the clone of insitu): {reason}"
        raise (kind or ConfigError)(missing) from error


class InsituError(Exception):
    """Base class of expected failures, with a message meant for the user."""


class ConfigError(InsituError, ValueError):
    """An invalid key, value, reference or command-line option."""


class PluginError(InsituError):
    """A plugin's component broke the interface it implements."""


class Stalled(InsituError):
    """Nothing has completed for `eval.general.stall_timeout`."""


class WorkflowError(InsituError):
    """The workflow failed on one dataset row."""


class EpisodeTimeout(WorkflowError):
    """An episode ran longer than its limit."""


class InputError(WorkflowError):
    """The input of `function` cannot be converted to the type that it declares."""

    def __init__(self, message: str, function: str) -> None:
        super().__init__(message)
        self.function = function


class CaptureError(WorkflowError):
    """A model call lacks what training needs."""


class TrajectoryError(InsituError, ValueError):
    """Captured calls, rewards or rows that do not match."""


class BackendError(InsituError):
    """A training or inference backend failed."""


class BackendUnavailable(BackendError):
    """The backend did not respond, or asks to be tried again later: in `retry_after` seconds, if it says when."""

    def __init__(self, message: str, *, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestRefused(BackendError):
    """The backend rejected the request.

    `status` is the HTTP status (4xx), `param` the offending field where there is one, `code` a short
    machine-readable reason.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class JobFailed(BackendError):
    """A training job failed or was canceled."""


class UnknownJob(JobFailed, ValueError):
    """No job was submitted under this name."""


class JobLost(JobFailed):
    """The backend no longer has a job, which can be submitted again under its key."""


@contextmanager
def foreign_errors(kind: type[InsituError], what: str, *, pass_os_errors: bool = False) -> Iterator[None]:
    """Turns what a plugin's, user's or third party's code raises, which may be anything, into an error of this kind.

    Errors of insitu pass, and those of the system if `pass_os_errors`. The log has the traceback.
    """
    try:
        yield
    except InsituError:
        raise
    except Exception as error:  # see above
        if pass_os_errors and isinstance(error, OSError) and error.errno is not None:
            raise  # its message is complete
        logging.getLogger(__name__).debug("%s", what, exc_info=error)
        raise kind(f"{what}: {describe_error(error)}") from error

"""Every error insitu raises on purpose, one branch for each boundary that can be crossed wrongly.

InsituError
├── ConfigError          the command line or the YAML file is wrong; nothing has been started (exit code 2)
├── PluginError          a component's own code broke a rule of the interface it implements
├── WorkflowError        the user's workflow could not be run on a row
│   ├── EpisodeTimeout   it took longer than `eval.general.episode_timeout`
│   └── CaptureError     a model call came back without what training needs (token ids, logprobs)
├── TrajectoryError      what was captured cannot be made into something to train on
└── BackendError         a backend refused, failed or could not be reached
    ├── BackendUnavailable   no answer: wrong address, process gone, connection lost
    ├── RequestRefused       an answer in the 4xx range; carries `status`, `param` and `code`
    └── JobFailed            the backend took the job and could not finish it
"""

import os
import re
from traceback import walk_tb

_LIBRARY = f"{os.sep}lib{os.sep}python"
_PACKAGES = re.compile(r"[/\\](?:site|dist)-packages[/\\]([^/\\]+)")
_OURS = os.path.join(os.path.dirname(__file__), "")


def told(error: BaseException) -> str:
    """What somebody else's code raised, in a line: the exception, and where it left the code that is theirs.

    Theirs is neither insitu nor a library; what pip installed is theirs if it is what insitu called first.
    """
    places = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    others = [place for place in places if not place[0].startswith(_OURS)]
    own = [place for place in others if _LIBRARY not in place[0]]
    installed = [(found[1], place) for place in others if (found := _PACKAGES.search(place[0]))]
    if not own:
        own = [place for package, place in installed if package == installed[0][0]]
    place = (own or others or places)[-1:]
    return named(error) + "".join(f" ({file}, line {line})" for file, line in place)


def named(error: BaseException) -> str:
    """An exception by its name and message, and what somebody else's was raised from: which server, say."""
    said, first = _named(error), causes(error)[-1]
    return said if isinstance(error, InsituError) or _message(first) in said else f"{said}, from {_named(first)}"


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {_message(error)}"


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as reason:  # somebody else's __str__
        return f"(its message cannot be shown: {type(reason).__name__})"


def causes(error: BaseException) -> list[BaseException]:
    """The exception, what it was raised from, and so on, each once: user code may even write `raise e from e`."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    return chain


class InsituError(Exception):
    """The root: everything below it is an expected failure with a message meant for the user."""


class ConfigError(InsituError, ValueError):
    """A key, value, reference or command-line option that cannot be used as it stands."""


class PluginError(InsituError):
    """A component registered by a plugin did not keep to the interface it implements."""


class WorkflowError(InsituError):
    """The workflow failed on one dataset row."""


class EpisodeTimeout(WorkflowError):
    """An episode ran longer than its limit."""


class CaptureError(WorkflowError):
    """A model call of a training run lacks what training needs."""


class TrajectoryError(InsituError, ValueError):
    """Captured calls, rewards or rows that do not fit together."""


class BackendError(InsituError):
    """A training or inference backend did not do what it was asked."""


class BackendUnavailable(BackendError):
    """The backend did not answer."""


class RequestRefused(BackendError):
    """The backend answered that the request cannot be served as it is.

    `status` is the HTTP status (4xx), `param` the offending field where there is one, `code` a short
    machine-readable reason.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class JobFailed(BackendError):
    """A training job ended in failure or was cancelled."""

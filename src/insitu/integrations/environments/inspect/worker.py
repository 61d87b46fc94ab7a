"""The program of a worker, in which one evaluation of inspect runs samples as they arrive.

    python worker.py rows SETTINGS     # prints the task's samples and the names of its scores, as JSON
    python worker.py run SETTINGS      # standard input is a socket: a line of JSON per sample in, one per result out

It imports nothing of insitu: the interpreter may be that of another environment, which has inspect_ai and the packages
of the task.
"""

import asyncio
import contextvars
import importlib
import importlib.util
import inspect
import json
import math
import os
import random
import socket
import sys
import threading
import traceback
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

_NEEDED = "inspect_ai>=0.3.280"
_LEFT_SECONDS = 10.0
"""How long samples may go on after the parent has closed the socket."""
_STRINGS = ("yes", "no", "true", "false")


class TaskProblem(Exception):
    """The task cannot be loaded."""


class Episode:
    """A sample that is evaluated: where its model calls go, and whether it is being scored."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.number = request["number"]
        self.url = request["url"]
        self.unscored_llms = request["unscored_llms"]
        self.is_scoring = False
        self.refused: str | None = None


_episode: contextvars.ContextVar[Episode] = contextvars.ContextVar("episode")


def load_task(settings: dict[str, Any]) -> Any:
    """The task at FILE.py@TASK, FILE.py or MODULE_OR_PACKAGE/TASK."""
    try:
        from inspect_ai import Task, enqueue_sample
    except ImportError as error:
        raise TaskProblem(f"{error}; install {_NEEDED} for {sys.executable}") from error
    if "epoch" not in inspect.signature(enqueue_sample).parameters:
        raise TaskProblem(f"inspect_ai is {version('inspect_ai')} in {sys.executable}; needed: {_NEEDED}")
    spec, folder = settings["task"], settings["folder"]
    random.seed(settings["seed"])  # every process shuffles without a seed of the task alike
    sys.path.insert(0, folder)
    if "@" in spec or spec.endswith(".py"):
        source, _, name = spec.partition("@")
        module = _load_file(source, Path(folder))
    else:
        source, _, name = spec.rpartition("/")
        if not source:
            raise TaskProblem(f"task is {spec!r}; expected FILE.py@TASK or MODULE_OR_PACKAGE/TASK")
        try:
            tasks_of = entry_points(group="inspect_ai", name=source)
            module = next(iter(tasks_of)).load() if tasks_of else importlib.import_module(source)
        except ModuleNotFoundError as error:
            raise TaskProblem(f"task {spec!r}: {error}") from error
    tasks = {key: value for key, value in vars(module).items() if _registered(value) == "task"}
    make = tasks.get(name) or (next(iter(tasks.values())) if not name and len(tasks) == 1 else None)
    if make is None:
        raise TaskProblem(f"task {spec!r}: {source} has no task {name!r}; it has: {', '.join(tasks) or 'none'}")
    task = make(**settings["args"])
    if not isinstance(task, Task):
        raise TaskProblem(f"task {spec!r} gives a {type(task).__name__}, not a Task")
    return task


def _load_file(name: str, folder: Path) -> Any:
    path = next((each for each in (Path(name), folder / name) if each.is_file()), None)
    if path is None:
        raise TaskProblem(f"the file {name} of the task exists neither here nor in {folder}")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _registered(value: Any) -> str | None:
    """What inspect has registered a value as."""
    return getattr(getattr(value, "__registry_info__", None), "type", None)


def samples_of(task: Any) -> dict[str, Any]:
    """The task's samples by their id as text; those without an id are numbered from 1, as inspect does."""
    samples = {}
    for number, sample in enumerate(task.dataset, 1):
        if sample.id is None:
            sample.id = number
        samples[str(sample.id)] = sample
    return samples


def described(task: Any) -> dict[str, Any]:
    """The rows of the task, and what else is known of it before it runs."""
    rows = []
    for sample in samples_of(task).values():
        optional = {"choices": sample.choices, "metadata": sample.metadata}
        row = {"id": sample.id, "question": _question(sample), "answer": sample.target}
        rows.append(row | {key: value for key, value in optional.items() if value})
    return {"rows": rows, "scores": score_names(task), "epochs": task.epochs, "inspect_ai": version("inspect_ai")}


def _question(sample: Any) -> Any:
    """The input; a dialogue as messages."""
    if isinstance(sample.input, str):
        return sample.input
    return [{"role": message.role, "content": message.text} for message in sample.input]


def score_names(task: Any) -> list[str]:
    """The names of the task's scores, as in its log; SCORER/KEY for each of several values of one."""
    names: list[str] = []
    for scorer in task.scorer or ():
        info = getattr(scorer, "__registry_info__", None)
        base = name = "score" if info is None else info.name.partition("/")[2] or info.name
        count = 1
        while name in names:
            name, count = f"{base}{count}", count + 1
        metrics = {} if info is None else info.metadata.get("metrics")
        keys = [key for key in metrics if key != "*"] if isinstance(metrics, dict) else []
        names += [f"{name}/{key}" for key in keys] or [name]
    return names


def numbers(scores: dict[str, Any] | None) -> dict[str, float]:
    """The finite numbers among the scores, by name; a text that inspect does not know as a number is none."""
    from inspect_ai.scorer import CORRECT, INCORRECT, NOANSWER, PARTIAL, value_to_float

    convert, words = value_to_float(), (CORRECT, INCORRECT, PARTIAL, NOANSWER)
    values = {}
    for name, score in (scores or {}).items():
        value = score.value
        parts = {f"{name}/{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
        for key, part in parts.items():
            if isinstance(part, str) and part not in words and part.lower() not in _STRINGS and not _is_number(part):
                continue  # inspect takes it for 0, with a warning
            if isinstance(part, str | int | float) and math.isfinite(number := convert(part)):
                values[key] = number
    return values


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _model(llm: str) -> Any:
    """A model whose requests go to the gateway's endpoint for the episode that makes them."""
    from inspect_ai.model import GenerateConfig, get_model
    from openai import DefaultAsyncHttpxClient

    async def send_to_endpoint(request: Any) -> None:
        episode = _episode.get()
        if episode.is_scoring and llm in episode.unscored_llms:
            problem = f"calls {llm}, the model under training, which would then be trained to grade itself"
            advice = "name another llm, such as workflow.roles: {grader: NAME}"
            episode.refused = f"a scorer of the task {problem}: {advice}"
        request.url = type(request.url)(episode.url + request.url.path.removeprefix("/v1"))
        request.headers["Host"] = request.url.netloc.decode()

    return get_model(
        f"openai-api/insitu/{llm}",
        base_url="http://insitu/v1",
        api_key="insitu",
        http_client=DefaultAsyncHttpxClient(event_hooks={"request": [send_to_endpoint]}),
        memoize=False,
        config=GenerateConfig(max_retries=2),  # of the task, if it says so
    )


class Evaluation:
    """One evaluation of the task, whose samples arrive at a socket."""

    def __init__(self, settings: dict[str, Any], connection: socket.socket) -> None:
        self._settings = settings
        self._task = load_task(settings)
        self._samples = samples_of(self._task)
        self._connection = connection
        self._episodes: dict[tuple[str, int], Episode] = {}
        self._entered: dict[str, Episode] = {}
        """By the id of the execution of their sample."""
        self._epochs: dict[str, int] = {}
        self.arrived: asyncio.Event | None = None
        """None until this process has said that it takes samples."""
        self._closed = False

    def run(self) -> Any:
        """Returns the log once the parent has closed the socket and all samples have ended."""
        from inspect_ai import eval as evaluate
        from inspect_ai import task_with

        settings, task = self._settings, self._task
        options = dict(settings["options"])
        limits = [task.time_limit, options.pop("time_limit", None), settings["time_limit"]]
        (log,) = evaluate(
            task_with(task, dataset=self._source(), setup=[self._enter(), *_solvers(task.setup)]),
            model=_model(settings["llm"]),
            model_roles={role: _model(llm) for role, llm in settings["roles"].items()} or None,
            epochs=1,
            fail_on_error=False,
            max_samples=settings["capacity"],
            max_connections=settings["capacity"],
            time_limit=min((limit for limit in limits if limit is not None), default=None),
            log_dir=settings["logs"],
            log_realtime=False,
            log_model_api=False,
            display="none",
            score_display=False,
            ctl_server=False,
            **options,
        )
        return log

    def _enter(self) -> Any:
        """A first solver: what runs after it belongs to its episode."""
        from inspect_ai.hooks import Hooks, hooks
        from inspect_ai.solver import solver

        evaluation = self

        @hooks("insitu", "Notes when a sample is scored.")
        class NoteScoring(Hooks):
            async def on_sample_scoring(self, data: Any) -> None:  # in another context than the solvers
                episode = evaluation._entered[data.sample_id]
                episode.is_scoring = True
                _episode.set(episode)

        @solver
        def enter_episode() -> Any:
            async def solve(state: Any, generate: Any) -> Any:
                episode = self._episodes[str(state.sample_id), state.epoch]
                self._entered[state.uuid] = episode
                _episode.set(episode)
                return state

            return solve

        return enter_episode()

    def _source(self) -> Any:
        from inspect_ai import SampleSource

        evaluation = self

        class Arriving(SampleSource):
            """Samples that are added to the evaluation as they arrive."""

            async def next_samples(self) -> list[Any] | None:
                return await evaluation._wait()

            async def sample_complete(self, sample: Any) -> None:
                evaluation._send_result(sample)

        return Arriving()

    async def _wait(self) -> list[Any] | None:
        """Waits for a sample while none is in flight; None ends the evaluation."""
        if self.arrived is None:
            self.arrived = asyncio.Event()
            start = (asyncio.get_running_loop(), contextvars.copy_context())  # samples are added in this context
            threading.Thread(target=self._receive, args=start, daemon=True).start()
            self._send(number=0)
        await self.arrived.wait()
        self.arrived.clear()
        return None if self._closed else []

    def _receive(self, loop: asyncio.AbstractEventLoop, context: contextvars.Context) -> None:
        """Reads requests until the parent closes the socket or ends."""
        with self._connection.makefile("rb") as lines:
            for line in lines:
                request = json.loads(line)
                loop.call_soon_threadsafe(self._add if "id" in request else self._close, request, context=context)
        threading.Timer(_LEFT_SECONDS, os._exit, (1,)).start()
        loop.call_soon_threadsafe(self._close, {})

    def _close(self, request: dict[str, Any]) -> None:
        """Ends the evaluation when no sample is in flight any more."""
        assert self.arrived is not None
        self._closed = True
        self.arrived.set()

    def _add(self, request: dict[str, Any]) -> None:
        from inspect_ai import enqueue_sample

        assert self.arrived is not None
        key = request["id"]
        sample = self._samples.get(key)
        if sample is None or json.dumps(_question(sample), default=str) != json.dumps(request["question"]):
            problem = f"the task has no sample {key!r} with this input here: it is not the same in each process"
            self._send(number=request["number"], error=problem)
            return
        epoch = self._epochs[key] = self._epochs.get(key, 0) + 1
        self._episodes[key, epoch] = Episode(request)
        enqueue_sample(sample.model_copy(deep=True), epoch=epoch)
        self.arrived.set()

    def _send_result(self, sample: Any) -> None:
        episode = self._episodes.pop((str(sample.id), sample.epoch))
        self._entered.pop(sample.uuid, None)
        self._send(
            number=episode.number,
            error=episode.refused or (None if sample.error is None else sample.error.message),
            limit=None if sample.limit is None else {"type": sample.limit.type, "limit": sample.limit.limit},
            answer=sample.output.completion,
            scores=numbers(sample.scores),
            names=[*(sample.scores or {})],
            messages=len(sample.messages),
        )

    def _send(self, **result: Any) -> None:
        self._connection.sendall(json.dumps(result).encode() + b"\n")


def _solvers(setup: Any) -> list[Any]:
    return [] if setup is None else [*setup] if isinstance(setup, list | tuple) else [setup]


def _describe(error: Exception) -> str:
    """The error, and for one of the task's code the line that raises it."""
    if isinstance(error, TaskProblem):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"the task cannot be loaded: {type(error).__name__}: {error} ({place.filename}, line {place.lineno})"


def print_description(settings: dict[str, Any]) -> None:
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the task's code prints
    try:
        result = described(load_task(settings))
    except Exception as error:  # the task's code may raise anything
        result = {"problem": _describe(error)}
    with output:
        json.dump(result, output, default=str)


def evaluate_arriving(settings: dict[str, Any]) -> None:
    connection, evaluation = socket.socket(fileno=os.dup(0)), None
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # programs that the task starts must not keep the connection
    try:
        evaluation = Evaluation(settings, connection)
        log = evaluation.run()
    except Exception as error:  # the task's code may raise anything
        if evaluation is not None and evaluation.arrived is not None:
            raise
        connection.sendall(json.dumps({"number": 0, "problem": _describe(error)}).encode() + b"\n")
        return
    if log.error is not None:
        sys.exit(f"the evaluation has failed: {log.error.message}")


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file
    {"rows": print_description, "run": evaluate_arriving}[sys.argv[1]](json.loads(sys.argv[2]))

"""Forks Python programs from one process that has imported everything: `python fork_server.py SOCKET PYTHON`.

Importing torch, transformers and the control plane takes several seconds of CPU, and a training run needs two processes
that do, as does each pytest worker. A forked program is still a real process, with its own pid, signals, folder,
environment, input, output and exit code. Programs are the commands of insitu, scripts and code (`-c`).
The server imports nothing before the first program. It kills a program whose client is gone, and ends when its standard
input does. PYTHON replaces `sys.executable` in commands of insitu and in scripts, so that what they start is forked as
well. The clients are in `processes.py`.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import re
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

LIBRARIES = [
    "PIL.PngImagePlugin",
    "anthropic.resources.beta",
    "anyio._backends._asyncio",
    "hypothesis",
    "jsonpath",
    "langchain_core.tracers.event_stream",
    "langchain_openai",
    "langgraph.prebuilt",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "nemo_microservices",
    "numpy.ctypeslib",
    "openai.resources.completions",
    "peft",
    "rich._emoji_codes",
    "rich.table",
    "torch._dynamo",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "uvloop",
]
"""What programs import when they run; a program can import more."""
OPTIONAL = re.compile(r"insitu\.(__main__|integrations\.(art(?!\.server)|frameworks|environments))")
"""Parts of insitu that import a library of an extra."""


def main(address: str, python: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which closes our standard input
    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(address)
        listener.listen(64)
        selector.register(sys.stdin, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if sys.stdin in ready:
                break
            if woken in ready:
                woken.recv(4096)
                for client in report_ended(running):
                    selector.unregister(client)
                    client.close()
            elif listener in ready:
                client, _ = listener.accept()
                request, descriptors = receive(client)
                if request is None:
                    client.close()
                    continue
                preload()
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    run(request, descriptors, python)
                for descriptor in descriptors:
                    os.close(descriptor)
                running[pid] = client
                selector.register(client, selectors.EVENT_READ)
                with contextlib.suppress(OSError):  # it is gone, and then so is what it has started
                    client.sendall(f"{pid}\n".encode())
            else:
                for pid, client in running.items():
                    if client in ready and is_gone(client):
                        os.kill(pid, signal.SIGKILL)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


@functools.cache
def preload() -> None:
    import insitu

    modules = [found.name for found in pkgutil.walk_packages(insitu.__path__, "insitu.")]
    for name in [*(name for name in modules if not OPTIONAL.match(name)), *LIBRARIES]:
        importlib.import_module(name)
    warm_up()
    for library in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        library.atexit = False  # it only returns memory, which the process does by ending
    gc.freeze()  # what no collection visits stays shared with the commands


def warm_up() -> None:
    """Has libraries build what they keep for a process: each command would build it again."""
    from openai._models import construct_type
    from openai.types.chat import ChatCompletion

    from insitu.backend.model import load_model
    from insitu.config.json_schema import json_schema
    from insitu.runs.store import draw_rewards

    example = Path(__file__).parents[2] / "examples/tic_tac_toe/model"
    loaded = load_model(str(example))  # transformers compiles 900 regular expressions of tensors' names
    loaded.tokenizer.apply_chat_template([{"role": "user", "content": ""}])
    message = {"role": "assistant", "content": "", "tool_calls": []}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": {"content": [], "refusal": []}}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    construct_type(type_=ChatCompletion, value={"id": "", "model": "", "choices": [choice], "usage": usage})
    json_schema()  # parses the sources
    with tempfile.TemporaryDirectory() as folder:
        draw_rewards(Path(folder) / "plot.png", [{"epoch": 1, "avg_reward": 0.5}], [])
    assert threading.active_count() == 1, "a program that is forked would wait for threads that it does not have"


def receive(client: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """A program as a line of JSON, with the descriptors of its stdin, stdout and stderr; None if the client is gone."""
    data, descriptors, _, _ = socket.recv_fds(client, 2**20, 3)
    while not data.endswith(b"\n"):
        if not (more := client.recv(2**20)):
            for descriptor in descriptors:
                os.close(descriptor)
            return None, []
        data += more
    return json.loads(data), descriptors


def is_gone(client: socket.socket) -> bool:
    try:
        return not client.recv(1)
    except ConnectionResetError:  # it was killed before it read the number that was sent last
        return True


def report_ended(running: dict[int, socket.socket]) -> Iterator[socket.socket]:
    """Sends their exit codes to the clients of the processes that have ended, and forgets these."""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        client = running.pop(pid)
        with contextlib.suppress(OSError):  # it is gone
            client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        yield client


def run(request: dict[str, Any], descriptors: list[int], python: str) -> NoReturn:
    """Run the program in this process, as Python would in a fresh one."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.closerange(3, 1024)
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        path = os.environ.get("PYTHONPATH")
        sys.path[:1] = [request["folder"], *(path.split(os.pathsep) if path else ())]
        if path and find_spec("sitecustomize") is not None:
            sys.modules.pop("sitecustomize", None)
            importlib.import_module("sitecustomize")
        if action := os.environ.get("PYTHONWARNINGS"):
            warnings.simplefilter(action)  # type: ignore[arg-type]
        code = exit_code(request["arguments"], python)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:  # whatever it is, it ends this process, and is not for the loop of the server
        traceback.print_exc()
    finally:
        os._exit(code)


def exit_code(arguments: list[str], python: str) -> int:
    """Runs `-m insitu ...`, `-c CODE ...` or `SCRIPT ...`."""
    try:
        if arguments[:2] == ["-m", "insitu"]:
            sys.argv, sys.executable = ["insitu", *arguments[2:]], python
            importlib.import_module("insitu.cli").main()
        elif arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            exec(arguments[1], {"__name__": "__main__"})
        else:
            sys.argv, sys.executable = arguments, python
            sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


if __name__ == "__main__":
    main(*sys.argv[1:])

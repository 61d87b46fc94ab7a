"""Measures the road of a rollout: which files of insitu an episode passes, and how many calls of their functions.

python scripts/trace_rollout.py [--repository PATH] [--python PATH] [--functions N] [--json PATH]

The tic-tac-toe example trains for 1 and for 3 epochs, both processes under a profiler. A file with more calls in the
longer run is on the road; the additional calls divided by the additional episodes are its calls per episode. A
resumption of a coroutine or generator counts as a call.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

EPOCHS = (1, 3)
ROWS, GENERATIONS = 2, 4
EPISODES = (EPOCHS[1] - EPOCHS[0]) * ROWS * GENERATIONS
"""By which the runs differ."""
COMMANDS = {"control plane": "finetune", "backend": "backend"}
"""The command that each process runs."""
BEGINS = {"finetune": "collect_epoch"}
"""The function with whose first call a command is counted from: how often it asks before that whether its backend has
started is a matter of the machine."""
BY_THE_CLOCK = {
    *("_hold_team", "is_alive", "_usage", "busy_seconds"),
    *("memory_kills", "kill_counter", "own_cgroups", "numbers"),
    *("BackendProcess._count", "BackendProcess._counted", "BackendProcess.keep_running"),
}
"""What a process does every second or so, or when other programs use the cores, however many episodes there are."""
FOLDER = "INSITU_TRACE_FOLDER"
PACKAGE = "INSITU_TRACE_PACKAGE"

# Python imports `sitecustomize` when it starts. `next` on a counter is atomic, so threads can share the counters.
PROFILER = f"""
import atexit, collections, itertools, json, os, sys, threading

begins = {BEGINS}
package, process = os.environ["{PACKAGE}"], os.getpid()
counters = collections.defaultdict(itertools.count)

def count(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(package):
        code = frame.f_code
        if begins and begins.get(sys.argv[1] if len(sys.argv) > 1 else None, code.co_name) != code.co_name:
            return
        begins.clear()
        next(counters[code.co_filename, code.co_qualname])

def write():
    sys.setprofile(None)
    if os.getpid() == process:  # not in a fork
        calls = [[file[len(package):], name, next(counter)] for (file, name), counter in list(counters.items())]
        with open(os.path.join(os.environ["{FOLDER}"], str(process) + ".json"), "w") as file:
            json.dump({{"arguments": sys.argv, "calls": calls}}, file)

def exit_at_once(code, exit=os._exit):
    write()
    exit(code)

os._exit = exit_at_once
atexit.register(write)
threading.setprofile(count)
sys.setprofile(count)
"""


class Function(NamedTuple):
    """A function of insitu; those of one name in one file, such as lambdas, count as one."""

    file: str
    name: str


class TraceError(Exception):
    """A run that was not measured."""


def trace_run(repository: Path, python: Path, epochs: int) -> dict[str, Counter[Function]]:
    """Trains for some epochs and returns the calls of each function, by process."""
    overrides = {
        "finetuning.num_epochs": epochs,
        "finetuning.validation": "null",
        "eval.general.max_concurrency": 1,
        "trajectory_builders.episodes.rows_per_epoch": ROWS,
        "trajectory_builders.episodes.num_generations": GENERATIONS,
    }
    with tempfile.TemporaryDirectory(prefix="insitu-trace-") as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(PROFILER)
        command = [python, "-m", "insitu", "finetune"]
        command += ["--config_file", "examples/tic_tac_toe/grpo.yml", "-o", "finetuning.output_dir", folder / "run"]
        for key, value in overrides.items():
            command += ["-o", key, str(value)]
        variables = {
            "PYTHONPATH": os.pathsep.join(filter(None, [name, os.environ.get("PYTHONPATH")])),
            PACKAGE: f"{repository / 'src/insitu'}{os.sep}",
            FOLDER: name,
        }
        done = subprocess.run(command, cwd=repository, env=os.environ | variables, capture_output=True, text=True)
        if done.returncode != 0:
            raise TraceError(f"the run of {epochs} epochs ended with exit code {done.returncode}: {done.stderr}")
        traces = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    return {process: _calls_of(traces, process) for process in COMMANDS}


def _calls_of(traces: list[dict[str, Any]], process: str) -> Counter[Function]:
    of_process = [trace["calls"] for trace in traces if trace["arguments"][1:2] == [COMMANDS[process]]]
    if len(of_process) != 1 or not of_process[0]:
        raise TraceError(f"{len(of_process)} processes have reported calls as {process}, expected one with some calls")
    calls_of = {Function(file, name): calls for file, name, calls in of_process[0]}
    return Counter(
        {each: n for each, n in calls_of.items() if BY_THE_CLOCK.isdisjoint({each.name, each.name.split(".")[0]})}
    )


def road(shorter: Counter[Function], longer: Counter[Function]) -> dict[str, Any]:
    """The files on the road, the calls per episode of each and of their functions, most calls first."""
    files: Counter[str] = Counter()
    for function in shorter | longer:
        files[function.file] += longer[function] - shorter[function]
    on_road = {file: calls for file, calls in files.most_common() if calls > 0}
    functions = Counter({function: longer[function] - shorter[function] for function in longer})
    return {
        "calls": sum(on_road.values()) / EPISODES,
        "files": {file: calls / EPISODES for file, calls in on_road.items()},
        "functions": [[*function, calls / EPISODES] for function, calls in functions.most_common() if calls],
    }


def print_road(process: str, measured: dict[str, Any], functions: int) -> None:
    print(f"\n{process}: {len(measured['files'])} files, {measured['calls']:.1f} calls per episode")
    for file, calls in measured["files"].items():
        print(f"{calls:9.2f}  {file}")
    if functions:
        print(f"\n{process}: the {functions} most called functions")
    for file, name, calls in measured["functions"][:functions]:
        print(f"{calls:9.2f}  {file}  {name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).resolve().parent.parent
    parser.add_argument("--repository", type=Path, default=here, help="the checkout to measure, with its .venv if any")
    parser.add_argument("--python", type=Path, help="what runs it, if not its .venv")
    parser.add_argument("--functions", type=int, default=0, metavar="N", help="also list the N most called functions")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures to this file")
    options = parser.parse_args()
    repository = options.repository.resolve()
    own = repository / ".venv/bin/python"
    python = options.python or (own if own.exists() else Path(sys.executable))
    try:
        shorter, longer = (trace_run(repository, python, epochs) for epochs in EPOCHS)
    except TraceError as error:
        print(error, file=sys.stderr)
        return 1
    roads = {process: road(shorter[process], longer[process]) for process in COMMANDS}
    if options.json:
        options.json.write_text(json.dumps(roads, indent=1))
    for process, measured in roads.items():
        print_road(process, measured, options.functions)
    return 0


if __name__ == "__main__":
    sys.exit(main())

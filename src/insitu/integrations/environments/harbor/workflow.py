"""An episode of a task of Harbor, in a container, and the evaluator that reads its reward.

    workflow:
      _type: harbor
      tasks: tasks
      command: [python3, /agent/agent.py]
      run: [docker, run, --rm, -i, -v, "{logs}:/logs", -v, "{tests}:/insitu:ro", --env-file, "{env_file}", "{image}"]
      llm: student
    evaluators: {reward: {_type: harbor}}

The agent is executed in the container, and once it has ended, the tests, which are not there before.
"""

import asyncio
import logging
import math
import os
import re
import secrets
import shlex
import shutil
import stat
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
from pydantic import Field, field_validator

from insitu.builder import Builder
from insitu.collect.outcomes import OutcomeConfig, outcome_score
from insitu.disk.temporary import remove, temporary_folder
from insitu.errors import BackendUnavailable, ConfigError, EpisodeTimeout, InsituError, WorkflowError, not_found
from insitu.gateway.agents import ProgramConfig, environment, episode_endpoint, new_gateway, row_values
from insitu.gateway.endpoint import EpisodeEndpoint
from insitu.gateway.templates import check_command, check_placeholders, template_texts, with_values
from insitu.integrations.environments.harbor.tasks import Task, read_tasks
from insitu.registry import register_evaluator
from insitu.schemas.evaluation import Outcome
from insitu.wire.child_process import describe_exit
from insitu.wire.endings import end_tasks
from insitu.wire.redaction import is_ordinary_variable
from insitu.workflow.functions import FunctionInfo, register_function
from insitu.workflow.programs import Program, inherited_environment, run_program

logger = logging.getLogger(__name__)

_STAYS = """
trap 'exit 143' TERM
: >/logs/agent/started || exit 125
while :; do /bin/sleep 3600 & wait $!; done
"""
"""What the container runs; the agent and the tests are executed in it, so that it is not for the agent to say when it
has ended."""
_AGENT = """
if [ -n "$1" ]; then cd "$1" || exit 125; fi
shift
"$@"
code=$?
cat >/dev/null
exit $code
"""
"""What runs the agent, with the working directory and the agent's command as arguments. podman loses what is printed by
a program that leaves its input unread."""
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""The agent may be able to write to other folders of PATH."""
_KILLS = f"{_PATH} kill -9 -1 2>/dev/null; true"
"""What ends all that the agent has left running, before the tests are there, and after them."""
_TESTS = """
given=$PATH
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
rm -rf /tests /logs/verifier && mkdir -p -m 777 /logs/verifier && cp -R /insitu/tests /tests || exit 125
chmod +x /tests/test.sh
PATH=$given /bin/sh /insitu/verify >&2 </dev/null
code=$?
kill -9 -1 2>/dev/null
chmod -R a+rwX /logs
exit $code
"""
"""What runs the tests."""
_PLACES = ("name", "image", "logs", "tests", "env_file", "model_url", "folder", "cpus", "memory_mb")
_DAEMON_FAILED = 125
"""Exit code by which docker and podman say that it is they who failed."""
_POLL_SECONDS = 0.05
_END_SECONDS = 60.0
_MAX_BYTES = 2**20
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


class HarborConfig(ProgramConfig, name="harbor"):
    """Task folders of Harbor, each run in a container. The tasks are the rows of a dataset of `_type: harbor`."""

    tasks: Path
    """Folder of tasks, or of one, relative to the working directory or the YAML file."""
    run: list[str] = Field(min_length=1)
    """The command that runs a container, such as `docker run`; the program for it to run is appended, and `exec` of the
    same program runs the agent, and then the tests, and `rm` removes it. `{image}` is replaced by the task's image,
    `{name}` by the container's (if there is no `{name}`, `--name` is added after `run`), `{logs}` by the folder to
    mount at `/logs`, `{tests}` by that to mount at `/insitu`, read-only, `{env_file}` by a file with the agent's
    environment variables, `{model_url}` by the model's URL, `{folder}` by the folder of the YAML file, `{cpus}` and
    `{memory_mb}` by what the task asks for. An image that a task does not name is built by `build` of the same
    program."""
    timeout_multiplier: float = Field(default=1.0, gt=0)
    """Factor of the time limits in `task.toml`."""
    reward: str = "reward"
    """The name of the reward if the tests write several."""

    @field_validator("run")
    @classmethod
    def _has_placeholders(cls, run: list[str]) -> list[str]:
        for where, text in template_texts(run, "run"):
            check_placeholders(text, where, _PLACES)
        if missing := [name for name in ("{logs}", "{tests}") if not any(name in part for part in run)]:
            raise ValueError(f"{' and '.join(missing)} must be mounted, at /logs and /insitu")
        if any("{name}" in part for part in run):
            return run
        if "run" not in run:
            raise ValueError("it names no container: give it {name}, such as --name {name}")
        place = run.index("run") + 1
        return [*run[:place], "--name", "{name}", *run[place:]]

    def check_columns(self, columns: Collection[str]) -> None:
        if "task" not in columns:
            raise ValueError("tasks: the rows have no column `task`; use dataset: {_type: harbor}")
        check_command(self.command, "command", [*dict.fromkeys((*columns, "input", "row_id", "model_url"))])

    def program(self, folder: Path) -> str:
        """The program for containers. Raises ConfigError if it is not installed."""
        (program,) = with_values(self.run[:1], {"": ""}, folder)
        if shutil.which(program) is None:
            advice = "install it, or set run to the command of another program for containers, such as podman"
            raise ConfigError(f"workflow.run: {program} is not installed: {advice}")
        return program


class HarborScoreConfig(OutcomeConfig, name="harbor"):
    """The reward that the tests of the task have written, or one of several: `part: NAME`."""


register_evaluator(config_type=HarborScoreConfig)(outcome_score)


def resolved(variables: Mapping[str, str], passed: Collection[str], where: str) -> dict[str, str]:
    """Variables of a task, whose `${NAME}` and `${NAME:-default}` are replaced by those that `pass_env` names.

    Raises ConfigError for another one without default.
    """

    def value_of(match: re.Match[str]) -> str:
        if match[1] in passed:
            return os.environ[match[1]]
        if match[2] is None:
            raise ConfigError(f"{where} needs ${{{match[1]}}}: add it to workflow.pass_env")
        return match[2]

    return {name: _VARIABLE.sub(value_of, value) for name, value in variables.items()}


class Images:
    """The images of tasks, which are built at their first episode."""

    def __init__(self, config: HarborConfig, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._program = config.program(folder)
        self._names: dict[str, str] = {}
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._built: set[str] = set()

    async def of(self, task: Task) -> str:
        """The name of a task's image. Raises WorkflowError if it cannot be built, EpisodeTimeout if not in time."""
        if task.settings.environment.docker_image is not None:
            return task.settings.environment.docker_image
        if task.name not in self._names:
            self._names[task.name] = f"insitu-harbor:{(await asyncio.to_thread(task.digest, 'environment'))[:40]}"
        image = self._names[task.name]
        async with self._locks[image]:
            if image in self._built:
                return image
            done = await run_program(
                [self._program, "build", "-q", "-t", image, str(task.folder / "environment")],
                b"",
                cwd=self._folder,
                env=inherited_environment(self._config.pass_env),
                time_limit=task.settings.environment.build_timeout_sec * self._config.timeout_multiplier,
                max_output=_MAX_BYTES,
            )
            if done.exit_code:
                raise WorkflowError(f"task {task.name}: its image cannot be built: {_how_ended(self._program, done)}")
            self._built.add(image)
        return image


def _how_ended(name: str, program: Program) -> str:
    return f"{name} {describe_exit(program.exit_code)}: {program.stderr_tail}"


def read_rewards(logs: Path) -> dict[str, float] | None:
    """The rewards in `verifier/reward.json` or `verifier/reward.txt`, if these are files; None: neither exists.

    Raises ValueError for one that is malformed, OSError for one that cannot be read.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    folder = os.open(logs / "verifier", flags | os.O_DIRECTORY)
    try:
        for name in ("reward.json", "reward.txt"):
            try:
                if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                    raise ValueError(f"{name} is not a file")
                with open(name, "rb", opener=lambda path, _: os.open(path, flags, dir_fd=folder)) as file:
                    text = file.read(_MAX_BYTES)
            except FileNotFoundError:
                continue
            data = orjson.loads(text) if name == "reward.json" else float(text)
            rewards = data if isinstance(data, dict) else {"reward": data}
            if not rewards or not all(type(each) in (int, float) and math.isfinite(each) for each in rewards.values()):
                shown = text[:200].decode(errors="replace")
                raise ValueError(f"{name} is {shown!r}; allowed: a number, or numbers by name")
            return rewards
    finally:
        os.close(folder)
    return None


class Container:
    """The container of one episode, and the folders of `place` that it sees."""

    def __init__(self, config: HarborConfig, task: Task, endpoint: EpisodeEndpoint, place: Path) -> None:
        self.logs, self.tests, self.env_file = place / "logs", place / "tests", place / "env"
        for folder in (self.logs, self.logs / "agent", self.logs / "verifier", self.tests):
            folder.mkdir()
            folder.chmod(0o777)  # the container's user may be another one
        self._config, self._task, self._endpoint = config, task, endpoint
        self._name, self._where = f"insitu-{secrets.token_hex(8)}", f"task {task.name}"

    def commands(self, image: str, columns: Mapping[str, Any], folder: Path) -> Iterator[list[str]]:
        """The commands that start the container, run the agent, kill its remaining processes, and run the tests."""
        environment, url = self._task.settings.environment, self._endpoint.openai_url
        places = {
            "name": self._name,
            "image": image,
            "logs": str(self.logs),
            "tests": str(self.tests),
            "env_file": str(self.env_file),
            "model_url": url,
            "folder": str(folder.resolve()),
            "cpus": f"{environment.cpus:g}",
            "memory_mb": str(environment.memory_mb),
        }
        agent = with_values(["", *self._config.command], {**columns, "model_url": url}, folder)[1:]
        run = with_values(self._config.run, places, folder)
        execute = [run[0], "exec", "-i", self._name, "/bin/sh", "-c"]
        yield [*run, "/bin/sh", "-c", _STAYS]
        yield [*execute, _AGENT, "insitu", environment.workdir or "", *agent]
        yield [*execute, _KILLS]
        yield [*execute, _TESTS]

    def write_variables(self, variables: Mapping[str, str]) -> None:
        """Writes the agent's variables, without those of this machine, which `run` and the tests may get."""
        of_agent = {
            name: value
            for name, value in variables.items()
            if name in self._config.env
            or name.lower() == "no_proxy"
            or not (name in self._config.pass_env or is_ordinary_variable(name))
        }
        of_task, passed = self._task.settings.environment.env, self._config.pass_env
        of_agent = resolved(of_task, passed, f"{self._where}: environment.env") | of_agent
        if broken := [name for name, value in of_agent.items() if "\n" in value]:
            raise WorkflowError(f"{', '.join(broken)}: a variable of a container cannot have a line break")
        self.env_file.write_text("".join(f"{name}={value}\n" for name, value in of_agent.items()))

    async def run(
        self, commands: Iterator[list[str]], stdin: bytes, until_end: ExitStack, **options: Any
    ) -> tuple[Program, Program]:
        """Runs the agent, closes `until_end`, and runs the tests, with `options` of `run_program`.

        Raises an error if the container or the agent fails, EpisodeTimeout after a time limit of the task.
        """
        settings, where, started = self._task.settings, self._where, self.logs / "agent/started"
        name, program = self._config.command[0], self._config.run[0]

        def limit(seconds: float | None) -> float | None:
            return None if seconds is None else seconds * self._config.timeout_multiplier

        async def execute(command: list[str], stdin: bytes, seconds: float | None, name: str) -> Program:
            try:
                return await run_program(command, stdin, name=name, time_limit=seconds, **options)
            except EpisodeTimeout:
                raise EpisodeTimeout(f"{where}: {name} took more than {seconds:g} s") from None

        container = asyncio.create_task(run_program(next(commands), b"", time_limit=None, **options), name="container")
        try:
            async with asyncio.timeout(limit(settings.environment.build_timeout_sec)) as timer:
                while not container.done() and not started.exists():
                    await asyncio.wait({container}, timeout=_POLL_SECONDS)
            if container.done() and not started.exists():
                ended = await container
                message = f"{where}: the container has not started: {_how_ended(program, ended)}"
                raise BackendUnavailable(message) if ended.exit_code == _DAEMON_FAILED else WorkflowError(message)
            agent = await execute(next(commands), stdin, limit(settings.agent.timeout_sec), name)
            until_end.close()
            if agent.output_too_long:
                raise WorkflowError(f"{name} printed more than max_output: {self._config.max_output} bytes")
            if agent.exit_code:
                raise self._endpoint.error(f"{where}: {_how_ended(name, agent)}")
            killed = await execute(next(commands), b"", _END_SECONDS, "killing the agent's processes")
            if killed.exit_code:
                how = _how_ended(f"{program} exec", killed)
                raise WorkflowError(f"{where}: the agent's processes cannot be killed: {how}")
            await asyncio.to_thread(self._give_tests)
            return agent, await execute(next(commands), b"", limit(settings.verifier.timeout_sec), "tests/test.sh")
        except TimeoutError:
            if not timer.expired():
                raise
            seconds = limit(settings.environment.build_timeout_sec)
            raise EpisodeTimeout(f"{where}: the start of the container took more than {seconds:g} s") from None
        finally:
            await end_tasks(container)
            try:  # it may ignore what ends others
                await run_program([program, "rm", "-f", self._name], b"", time_limit=_END_SECONDS, **options)
            except InsituError as error:
                logger.warning("%s: the container %s cannot be removed: %s", where, self._name, error)

    def _give_tests(self) -> None:
        """Puts the tests where the container finds them."""
        shutil.copytree(self._task.folder / "tests", self.tests / "tests")
        variables = resolved(self._task.settings.verifier.env, self._config.pass_env, self._where)
        lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        lines += ["exec /tests/test.sh", ""]
        (self.tests / "verify").write_text("\n".join(lines))

    def outcome(self, agent: Program, tests: Program) -> Outcome:
        """Raises WorkflowError if the tests have given no reward."""
        try:
            rewards = read_rewards(self.logs)
        except (ValueError, OSError) as error:
            raise WorkflowError(f"{self._where}: the reward of tests/test.sh cannot be read: {error}") from error
        if rewards is None:
            ended = describe_exit(tests.exit_code) if tests.exit_code else "ended"
            message = f"{self._where}: tests/test.sh {ended} without a reward.json or reward.txt"
            raise WorkflowError(f"{message}: {tests.stderr_tail}")
        part = next(iter(rewards)) if len(rewards) == 1 else self._config.reward
        if part not in rewards:
            message = not_found(f"{self._where}: the reward", part, rewards)
            raise WorkflowError(f"{message}; choose one with workflow.reward")
        return Outcome(answer=agent.stdout.decode(errors="replace").strip(), reward=rewards[part], rewards=rewards)


@register_function(config_type=HarborConfig)
async def harbor_workflow(config: HarborConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    folder = builder.config.folder
    config.check_variables()
    root = builder.config.find_path(config.tasks, "workflow.tasks").resolve()
    tasks = {task.name: task for task in await asyncio.to_thread(read_tasks, root, root)}
    for task in tasks.values():
        for part in ("environment", "verifier"):
            resolved(getattr(task.settings, part).env, config.pass_env, f"task {task.name}: {part}.env")
    images, needs_image = Images(config, folder), any("{image}" in part for part in config.run)

    async def play(task: Task, value: Any, place: Path) -> Outcome:
        row, columns = row_values(value)
        image = await images.of(task) if needs_image else ""
        with ExitStack() as until_end:
            endpoint = until_end.enter_context(episode_endpoint(gateway))
            container, variables = Container(config, task, endpoint, place), environment(endpoint, config)
            container.write_variables(variables)
            commands, stdin = container.commands(image, columns, folder), config.input_of(value, row)
            options: dict[str, Any] = {"cwd": folder, "env": variables, "max_output": config.max_output}
            done = await container.run(commands, stdin, until_end, **options)
        return container.outcome(*done)

    async def run(value: Any) -> dict[str, Any]:
        name = row_values(value)[1].get("task")
        if name not in tasks:
            raise WorkflowError(f"{not_found('the task', str(name), tasks)}; use a dataset of _type: harbor")
        place = Path(tempfile.mkdtemp(dir=places))
        try:
            return (await play(tasks[name], value, place)).model_dump()
        finally:
            await asyncio.to_thread(remove, place)

    async with await new_gateway(config, builder) as gateway, temporary_folder() as places:
        yield FunctionInfo.from_fn(run, description=f"Runs the tasks in {config.tasks}")

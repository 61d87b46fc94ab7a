"""Task folders of Harbor, in containers of a small `docker` that runs their commands in namespaces.

`make test WITH=containers` runs the same in containers of podman.
"""

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_openai import FakeOpenAI
from marks import slow_but_at

from insitu.collect.datasets import find_dataset, load_dataset
from insitu.config import load_config
from insitu.errors import BackendUnavailable, ConfigError, EpisodeTimeout, InsituError, WorkflowError
from insitu.plugin_api import Builder
from insitu.schemas.episodes import EpisodeKey
from insitu.workflow.context import EpisodeScope

DOCKER = Path(__file__).parents[2] / "support" / os.environ.get("INSITU_TEST_DOCKER", "fake_docker.py")
MOUNTS = [
    "-v",
    "{logs}:/logs",
    "-v",
    "{tests}:/insitu:ro",
    "-v",
    "{folder}/agent:/agent:ro",
    "--env-file",
    "{env_file}",
]
RUN = ["docker", "run", "--rm", "-i", *MOUNTS, "{image}"]
SECONDS = "60.25"
"""For which programs sleep that must not outlive their episode; nothing else on the machine sleeps for as long."""
ASK = """
import json, os, sys, urllib.request
body = json.dumps({"model": "any", "messages": [{"role": "user", "content": sys.argv[1]}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
with urllib.request.urlopen(request) as answer:
    text = json.load(answer)["choices"][0]["message"]["content"]
print(text)
open("answer.txt", "w").write(text)
"""
TEST = """#!/bin/bash
read expected < /tests/expected.txt
if [ "$(cat answer.txt)" = "$expected" ]; then echo 1 > /logs/verifier/reward.txt
else echo 0.25 > /logs/verifier/reward.txt; exit 1; fi
"""
TOML = 'version = "1.0"\n[metadata]\ndifficulty = "easy"\n'


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an agent, and `docker` on the path."""
    for name in ("bin", "images", "agent", "tasks", "temporary"):
        (tmp_path / name).mkdir()
    docker = tmp_path / "bin/docker"
    interpreter = f"{sys.executable} -S " if DOCKER.suffix == ".py" else ""
    docker.write_text(f'#!/bin/sh\nexec {interpreter}{DOCKER} "$@"\n')
    docker.chmod(0o755)
    (tmp_path / "agent/agent.py").write_text(ASK)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_IMAGES", str(tmp_path / "images"))
    monkeypatch.setenv("FAKE_PYTHON", sys.prefix)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def add_task(project: Path, name: str, *, toml: str = "", test: str = TEST, **files: str) -> Path:
    folder = project / "tasks" / name
    contents = {"task.toml": TOML + toml, "instruction.md": f"say {name}\n", "tests/test.sh": test}
    contents |= {"environment/Dockerfile": "FROM scratch\nWORKDIR /app\n", "tests/expected.txt": f"echo: say {name}\n"}
    contents |= files
    for path, text in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def config(project: Path, server: FakeOpenAI, **block: Any) -> Path:
    model = {"_type": "openai", "model_name": "fake", "base_url": server.base_url}
    workflow = {
        "_type": "harbor",
        "llm": "player",
        "tasks": "tasks",
        "run": RUN,
        "pass_env": ["FAKE_IMAGES", "FAKE_PYTHON"],
        **block,
    }
    workflow.setdefault("command", [sys.executable, "/agent/agent.py", "{input}"])
    dataset = workflow.pop("dataset", {"_type": "harbor"})
    evaluation = {"general": {"dataset": dataset}, "evaluators": {"reward": {"_type": "harbor"}}}
    text = json.dumps({"llms": {"player": model}, "workflow": workflow, "eval": evaluation})
    (project / "config.yml").write_text(text)
    return project / "config.yml"


@asynccontextmanager
async def tasks(project: Path, server: FakeOpenAI, **block: Any) -> AsyncIterator[Any]:
    """A function that plays a task."""
    loaded = load_config(config(project, server, **block))
    rows = {row.id: row for row in load_dataset(loaded)}
    async with Builder(loaded) as builder:
        workflow = await builder.get_workflow()

        async def play(name: str) -> Any:
            with EpisodeScope(key=EpisodeKey("r", 0, name, 0), training=True) as scope:
                scope.row = rows[name].full_dataset_entry
                result = await workflow.ainvoke(rows[name].input_obj)
                return {**result, "calls": len(scope.ledger.calls)}

        yield play
    assert not [*(project / "temporary").glob("insitu-*/run-*")]


async def failure(project: Path, server: FakeOpenAI, *names: str, **block: Any) -> InsituError:
    async with tasks(project, server, **block) as play:
        with pytest.raises(InsituError) as caught:
            await asyncio.gather(*map(play, names or ("one",)))
    return caught.value


async def test_an_agent_works_in_the_container_of_its_task(project: Path, server: FakeOpenAI) -> None:
    """Its calls are the episode's, the tests judge what it leaves, and an image is built once."""
    add_task(project, "one")
    add_task(project, "below/two", **{"tests/expected.txt": "something else\n"})
    async with tasks(project, server) as play:
        one, again, two = await asyncio.gather(play("one"), play("one"), play("below/two"))
    assert one == again
    assert (one["answer"], one["reward"], one["rewards"], one["calls"]) == ("echo: say one", 1.0, {"reward": 1.0}, 1)
    assert (two["answer"], two["reward"]) == ("echo: say below/two", 0.25)
    assert len((project / "images/builds").read_text().split()) == 1  # of both tasks, whose environments are equal


def test_each_task_is_a_row(project: Path, server: FakeOpenAI) -> None:
    canary = "<!-- benchmark canary GUID 1 -->\n# canary too\n\nsay c\n"
    for name in ("b", "a", "more/c"):
        add_task(project, name, **({"instruction.md": canary} if name == "more/c" else {}))
    loaded = load_config(config(project, server))
    rows = [row.full_dataset_entry for row in load_dataset(loaded)]
    assert [(row["id"], row["question"], row["task"]) for row in rows] == [
        ("a", "say a", "a"),
        ("b", "say b", "b"),
        ("more/c", "say c", "more/c"),
    ]
    assert rows[0]["metadata"] == {"difficulty": "easy"}
    before = find_dataset(loaded).record()
    (project / "tasks/a/tests/expected.txt").write_text("other")
    assert before["source"] == "harbor"
    assert find_dataset(loaded).record()["sha256"] != before["sha256"]

    def ids(**dataset: Any) -> list[Any]:
        block = {"_type": "harbor", **dataset}
        return [row.id for row in load_dataset(load_config(config(project, server, dataset=block)))]

    assert (ids(skip=1, limit=1), ids(tasks="tasks/more")) == (["b"], ["more/c"])
    with pytest.raises(ConfigError, match=r"is not in the folder of workflow\.tasks"):
        ids(tasks="agent")


@pytest.mark.parametrize(
    ("file", "text", "rewards", "block"),
    slow_but_at(
        (0, 3, 4),
        [
            ("reward.txt", "0.5", {"reward": 0.5}, {}),
            ("reward.json", "1", {"reward": 1}, {}),
            ("reward.json", '{"solved": 1}', {"solved": 1}, {}),
            ("reward.json", '{"style": 0.5, "reward": 0.25}', {"style": 0.5, "reward": 0.25}, {}),
            ("reward.json", '{"style": 0.25, "speed": 2}', {"style": 0.25, "speed": 2}, {"reward": "style"}),
        ],
    ),
)
async def test_tests_write_rewards(
    project: Path, server: FakeOpenAI, file: str, text: str, rewards: dict[str, float], block: dict[str, Any]
) -> None:
    add_task(
        project, "one", test=f"#!/bin/sh\necho 9 > /logs/verifier/reward.txt; echo '{text}' > /logs/verifier/{file}\n"
    )
    async with tasks(project, server, **block) as play:
        result = await play("one")
    assert result["rewards"] == rewards
    assert result["reward"] == rewards[block.get("reward", "reward" if "reward" in rewards else "solved")]


@pytest.mark.parametrize(
    ("test", "message"),
    slow_but_at(
        (0, 4, 10),
        [
            ("echo no reward >&2; exit 3", "tests/test.sh ended with exit code 3 without a reward.json .*: no reward"),
            ("true", "tests/test.sh ended without a reward.json or reward.txt"),
            ("echo good > /logs/verifier/reward.txt", "cannot be read: .*'good"),
            ("echo nan > /logs/verifier/reward.txt", "cannot be read: reward.txt is 'nan"),
            ("echo '{}' > /logs/verifier/reward.json", r"reward.json is '\{\}.*allowed: a number, or numbers by name"),
            ("echo 1 > /logs/verifier/reward.txt; echo '{' > /logs/verifier/reward.json", "cannot be read"),
            ("echo '{\"a\": true}' > /logs/verifier/reward.json", "allowed: a number, or numbers by name"),
            (
                'echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json',
                "the reward 'reward' does not exist.*: a, b; choose",
            ),
            ("mkdir /logs/verifier/reward.json", "cannot be read: reward.json is not a file"),
            ("ln -s /etc/hostname /logs/verifier/reward.txt", "cannot be read: reward.txt is not a file"),
            ("mkfifo /logs/verifier/reward.txt", "cannot be read: reward.txt is not a file"),
            ("rm -r /logs/verifier; ln -s /tmp /logs/verifier", "cannot be read: .*Not a directory"),
        ],
    ),
)
async def test_a_reward_that_is_missing_or_malformed_is_none(
    project: Path, server: FakeOpenAI, test: str, message: str
) -> None:
    add_task(project, "one", test=f"#!/bin/sh\n{test}\n")
    error = await failure(project, server)
    assert isinstance(error, WorkflowError)
    with pytest.raises(InsituError, match=message):
        raise error


@pytest.mark.parametrize(
    ("block", "task", "kind", "message"),
    [
        ({"run": [*RUN[:-1], "absent"]}, {}, BackendUnavailable, "has not started: docker .*125: .*absent"),
        (
            {"run": [*RUN[:4], *MOUNTS[2:], "-v", "{logs}:/log", "{image}"]},
            {},
            WorkflowError,
            "has not started: .*/logs",
        ),
        (
            {},
            {"environment/Dockerfile": "FAIL"},
            WorkflowError,
            "cannot be built: docker ended with exit code .*: .*(build|FROM)",
        ),
        (
            {"command": ["sh", "-c", "echo oh >&2; exit 5"]},
            {},
            WorkflowError,
            "task one: sh ended with exit code 5: oh",
        ),
        ({"command": ["nothing"]}, {}, WorkflowError, "task one: nothing ended with exit code 127: .*not found"),
        ({"command": ["seq", "100"], "max_output": 9}, {}, WorkflowError, "seq printed more than max_output: 9 bytes"),
        (
            {"command": ["sleep", SECONDS]},
            {"toml": "[agent]\ntimeout_sec = 1"},
            EpisodeTimeout,
            "sleep took more than 1 s",
        ),
        (
            {"timeout_multiplier": 0.5},
            {"test": f"#!/bin/sh\nsleep {SECONDS}\n", "toml": "[verifier]\ntimeout_sec = 2"},
            EpisodeTimeout,
            "tests/test.sh took more than 1 s",
        ),
    ],
)
async def test_what_fails_is_told(
    project: Path, server: FakeOpenAI, block: dict[str, Any], task: dict[str, Any], kind: type, message: str
) -> None:
    add_task(project, "one", **task)
    error = await failure(project, server, **block)
    assert type(error) is kind
    with pytest.raises(InsituError, match=message):
        raise error
    assert not [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", SECONDS]]


async def test_a_model_that_fails_is_named(project: Path, server: FakeOpenAI) -> None:
    add_task(project, "one", **{"instruction.md": "status 500"})
    error = await failure(project, server)
    assert isinstance(error, BackendUnavailable)
    assert "its model: " in str(error)


async def test_it_is_not_for_the_agent_to_say_that_it_has_ended(project: Path, server: FakeOpenAI) -> None:
    """What it leaves running is killed before the tests are there, and what it signals has no effect."""
    daemon = "setsid sh -c 'while :; do cp -R /insitu/. /app; done' & "
    daemon += f"setsid sleep {SECONDS} & touch /logs/agent/ended; sleep 0.3; ls /insitu > /app/seen"
    running = "cat /proc/[0-9]*/cmdline 2>/dev/null | grep -q '60[.]25'"
    stolen = f"[ -s /app/seen ] || [ -e /app/verify ] || [ -e /app/tests ] || {running}"
    add_task(project, "one", test=f"#!/bin/sh\n{stolen}\necho $? > /logs/verifier/reward.txt\n")
    async with tasks(project, server, command=["sh", "-c", daemon]) as play:
        assert (await play("one"))["reward"] == 1.0


async def test_what_the_container_itself_runs_is_not_the_agents(project: Path, server: FakeOpenAI) -> None:
    """Although the agent has a folder of PATH: its `sleep` would not end with what it has left running."""
    fake = "#!/bin/bash\nwhile [ ${0##*/} = sleep ]; do /bin/sleep 0.02; echo 1 > /logs/verifier/reward.json; done\n"
    fake += "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json"
    code = f"mkdir -p /app/bin; cd /app/bin; printf '%s' '{fake}' > sleep; chmod 755 sleep; cp sleep sh; cp sleep chmod"
    toml = '[environment.env]\nPATH = "/app/bin:/usr/sbin:/usr/bin:/sbin:/bin"\n'
    add_task(project, "one", toml=toml, test="#!/bin/sh\n/bin/sleep 0.3\necho 0 > /logs/verifier/reward.txt\n")
    async with tasks(project, server, command=["sh", "-c", code]) as play:
        assert (await play("one"))["reward"] == 0.0


async def test_a_container_ends_with_its_episode(project: Path, server: FakeOpenAI) -> None:
    """Also one whose first process ignores what asks it to."""
    seconds = "60.75"
    first = ["sh", "-c", f"trap '' TERM; \"$@\"; exec sleep {seconds}", "sh"]
    add_task(project, "one")
    async with tasks(project, server, run=[*RUN, *first]) as play:
        assert (await play("one"))["reward"] == 1.0
    assert not [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", seconds]]


@pytest.mark.parametrize(
    ("command", "last", "expected"),
    [("true", "/insitu/verify", 1.0), ("echo oh >&2; exit 5", "exit 5", "sh ended with .* oh")],
)
async def test_a_container_that_cannot_be_removed_changes_nothing(
    project: Path, server: FakeOpenAI, caplog: pytest.LogCaptureFixture, command: str, last: str, expected: float | str
) -> None:
    """`docker` is gone once it has run the `last` command."""
    docker = project / "bin/docker"
    docker.write_text(docker.read_text().replace("\n", f'\ncase "$*" in *"{last}"*) rm "$0";; esac\n', 1))
    add_task(project, "one", test="#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n")
    block = {"command": ["sh", "-c", command], "run": [str(docker), *RUN[1:]]}
    if isinstance(expected, str):
        with pytest.raises(WorkflowError, match=expected):
            raise await failure(project, server, **block)
    else:
        async with tasks(project, server, **block) as play:
            assert (await play("one"))["reward"] == expected
    assert re.search("task one: the container insitu-[0-9a-f]+ cannot be removed: .*No such file", caplog.text)


async def test_only_the_limits_of_a_task_are_multiplied(
    project: Path, server: FakeOpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither that for killing what the agent has left nor that for removing its container."""
    add_task(project, "one", toml="[environment]\nbuild_timeout_sec = 1e8\n")
    async with tasks(project, server, timeout_multiplier=1e-6) as play:
        assert (await play("one"))["reward"] == 1.0
    assert "cannot be removed" not in caplog.text


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (["./container.sh", *MOUNTS, "{image}"], "run: it names no container: give it {name}"),
        (["docker", "run", "{image}"], "{logs} and {tests} must be mounted"),
    ],
)
def test_a_run_that_cannot_be_one_is_told(project: Path, server: FakeOpenAI, run: list[str], message: str) -> None:
    add_task(project, "one")
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(config(project, server, run=run))


async def test_an_agent_does_not_see_the_tests(project: Path, server: FakeOpenAI) -> None:
    """What it has put in their place, and rewards that it has written, are deleted."""
    code = "ls /insitu; ls -d /tests; mkdir /tests; touch /tests/sitecustomize.py; echo 9 >/logs/verifier/reward.json"
    add_task(project, "one", test="#!/bin/sh\nls /tests | grep -c . > /logs/verifier/reward.txt\n")
    async with tasks(project, server, command=["sh", "-c", code]) as play:
        result = await play("one")
    assert (result["answer"], result["reward"]) == ("", 2.0)


async def test_the_tests_cannot_call_the_model(project: Path, server: FakeOpenAI) -> None:
    test = f"#!/bin/sh\n{sys.executable} /agent/agent.py again || echo 1 > /logs/verifier/reward.txt\n"
    add_task(project, "one", test=test)
    async with tasks(project, server) as play:
        result = await play("one")
    assert (result["reward"], result["calls"]) == (1.0, 1)


async def test_variables_and_places_of_a_task(
    project: Path, server: FakeOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests get what `pass_env` names, and the agent nothing of this machine."""
    monkeypatch.setenv("JUDGE_KEY", "k 1")
    toml = '[environment]\nworkdir = "/usr"\nenv = {SIZE = "${SIZE:-3}"}\n[verifier]\nenv = {KEY = "${JUDGE_KEY}"}\n'
    test = '#!/bin/sh\n[ "$KEY" = "k 1" ] && echo 1 > /logs/verifier/reward.txt\n'
    add_task(project, "one", toml=toml, test=test)
    command = ["sh", "-c", 'read row; echo "$PWD $SIZE $INSITU_ROW_ID $MINE $HOME $KEY $1 $row"', "sh", "{metadata}"]
    names = {"pass_env": ["FAKE_IMAGES", "FAKE_PYTHON", "JUDGE_KEY"], "env": {"MINE": "4"}}
    async with tasks(project, server, command=command, **names) as play:
        result = await play("one")
    place, row = result["answer"].split(" {", 1)
    assert (place, result["reward"]) == ("/usr 3 one 4 /root ", 1.0)
    assert '"id": "one"' in row
    assert "task one: verifier.env needs ${JUDGE_KEY}: add it to workflow.pass_env" in str(
        await failure_to_build(project, server, command=command)
    )


async def failure_to_build(project: Path, server: FakeOpenAI, **block: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        async with tasks(project, server, **block):
            pass
    return caught.value


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"toml": "[verifier]\nenvironment_mode = 'separate'"}, "verifier.environment_mode: not supported"),
        ({"toml": "[[steps]]\nname = 'a'"}, "task.toml: steps: not supported"),
        ({"toml": "[agent]\ntimeout_sec = 'long'"}, "cannot be read: agent.timeout_sec: "),
        ({"task.toml": "["}, "cannot be read: "),
        ({"environment/docker-compose.yaml": ""}, "environment/docker-compose.yaml is not supported"),
    ],
)
async def test_a_task_that_cannot_be_run_is_told(
    project: Path, server: FakeOpenAI, files: dict[str, str], message: str
) -> None:
    add_task(project, "one", **files)
    assert message in str(await failure_to_build(project, server))


async def test_a_task_without_its_files_is_told(project: Path, server: FakeOpenAI) -> None:
    folder = add_task(project, "one")
    for file, message in (
        ("tests/test.sh", "has no tests/test.sh"),
        ("environment/Dockerfile", "has no image; expected environment/Dockerfile"),
        ("instruction.md", "cannot be read: "),
        ("task.toml", "no task.toml below "),
    ):
        (folder / file).unlink()
        assert message in str(await failure_to_build(project, server))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (["container-tool", *RUN[1:]], "workflow.run: container-tool is not installed: install it, or set run to "),
        (["docker", "run", "{imag}"], "the placeholder 'imag' does not exist.*did you mean 'image'"),
        (["docker", "run", "{image}"], "{logs} and {tests} must be mounted, at /logs and /insitu"),
    ],
)
async def test_a_wrong_command_is_told(project: Path, server: FakeOpenAI, run: list[str], message: str) -> None:
    add_task(project, "one")
    error = str(await failure_to_build(project, server, run=run))
    assert all(part in error for part in message.split(".*"))

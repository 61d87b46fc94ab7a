"""Coding agents in a folder per episode: what they leave is judged, and none of them harms another one."""

import asyncio
import io
import json
import os
import platform
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from factories import ROOT
from fake_openai import FakeOpenAI
from marks import slow_after, slow_but
from processes import commands_below, run_project, serving, start_project
from refusals import refusal
from waiting import turns, until

from insitu.config import load_config
from insitu.disk.files import read_rows
from insitu.disk.folder_lock import FolderLock
from insitu.errors import ConfigError, EpisodeTimeout, InsituError, WorkflowError
from insitu.gateway import bubblewrap
from insitu.gateway.cgroups import Cgroup
from insitu.gateway.sandbox import unpack
from insitu.plugin_api import Builder
from insitu.schemas.episodes import EpisodeKey
from insitu.workflow.context import EpisodeScope

PYTHON = [sys.executable, "-c"]
NETWORKS = ["model", "host"]
ASK = """
import json, os, urllib.request
body = json.dumps({"model": "any", "messages": [{"role": "user", "content": "hi"}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
with urllib.request.urlopen(request) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"])
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a task to copy; workspaces are made beside it."""
    (tmp_path / "task").mkdir()
    (tmp_path / "task/number.txt").write_text("1")
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@asynccontextmanager
async def agent(project: Path, server: FakeOpenAI, code: str, **block: Any) -> AsyncIterator[Any]:
    """The workflow of an agent that is this Python code."""
    (project / "agent.py").write_text(code)
    model = {"_type": "openai", "model_name": "fake", "base_url": server.base_url}
    workflow = {"_type": "command", "llm": "player", "command": [sys.executable, "agent.py"], **block}
    workflow["command"] = [str(project / part) if part == "agent.py" else part for part in workflow["command"]]
    workflow.setdefault("workspace", {"copy": "task"})
    if workflow["workspace"]:
        workflow["workspace"] = {"folder": str(project / "temporary"), "result": ["."], **workflow["workspace"]}
    text = json.dumps({"llms": {"player": model}, "workflow": workflow, "eval": {"general": {"output_dir": "out"}}})
    (project / "config.yml").write_text(text)
    async with Builder(load_config(project / "config.yml")) as builder:
        yield await builder.get_workflow()


async def episode(workflow: Any, row: Any = 7, **columns: Any) -> Any:
    with EpisodeScope(key=EpisodeKey("r", 0, str(row), 0), training=True) as scope:
        scope.row = {"id": row, "question": "hi", **columns}
        return await workflow.ainvoke("hi")


async def outcome(project: Path, server: FakeOpenAI, code: str, **block: Any) -> Any:
    async with agent(project, server, code, **block) as workflow:
        return await episode(workflow)


def run(command: list[str]) -> None:
    subprocess.run(command, check=True)


def leftovers(project: Path) -> list[Path]:
    """The folders of episodes that still exist."""
    return [*(project / "temporary").glob("insitu-*/run-*")]


def verify(code: str) -> list[str]:
    return [*PYTHON, code]


SOCKETS = "import signal, socket\nkept = [socket.socket() for _ in range(1000)]\nsignal.pause()"
FIXED = verify("import sys; sys.exit(open('number.txt').read() != '2')")
FIX = "open('number.txt', 'w').write('2'); print('done')"
DOES, JUDGES = (f"import json, sys; exec(json.load(sys.stdin)['{column}'])" for column in ("does", "judges"))


@pytest.mark.parametrize("network", slow_after(1, NETWORKS))
async def test_what_an_agent_leaves_is_judged(project: Path, server: FakeOpenAI, network: str) -> None:
    first = await outcome(project, server, FIX + ASK, verify=FIXED, network=network)
    assert (first["answer"], first["reward"]) == ("done\necho: hi", 1.0)
    assert (await outcome(project, server, "print('no')", verify=FIXED, network=network))["reward"] == 0.0
    assert (project / "task/number.txt").read_text() == "1"
    assert await outcome(project, server, ASK, network=network) == "echo: hi"  # without a verifier
    assert not leftovers(project)
    assert not (project / "out").exists()


async def test_a_verifier_writes_the_reward(project: Path, server: FakeOpenAI) -> None:
    full = {"reward": 0.25, "rewards": {"tests": 0.5}, "metrics": {"lines": 3}}
    async with agent(project, server, DOES, verify=verify(JUDGES)) as workflow:
        for written, reward in ((full, 0.25), (0.5, 0.5), (1, 1.0)):
            judges = f"open('reward.json', 'w').write({json.dumps(written)!r}); raise SystemExit(3)"
            given = await episode(workflow, does="", judges=judges)
            assert given["reward"] == reward
        assert given["rewards"] == {}
        # one that the agent has written counts for nothing
        does = "open('reward.json', 'w').write('1')"
        assert (await episode(workflow, does=does, judges="raise SystemExit(1)"))["reward"] == 0.0
        does = "import os; os.symlink('/etc/hostname', 'reward.json')"
        assert (await episode(workflow, does=does, judges="pass"))["reward"] == 1.0


async def test_a_verifier_that_fails_is_no_reward(project: Path, server: FakeOpenAI) -> None:
    async with agent(project, server, DOES, verify=verify(JUDGES)) as workflow:
        for judges, message in {
            "open('reward.json', 'w').write('{\"reward\": \"1\"}')": "reward.json is malformed.*allowed: a number",
            "open('reward.json', 'w').write('NaN')": "reward.json is malformed",
            "open('reward.json', 'w').write('{\"reward\": 1, \"score\": 1}')": "it has the keys score",
            "open('reward.json', 'w').write('{')": "reward.json is malformed",
            "open('reward.json', 'w').write('[' * 100_000)": "reward.json is malformed",
            "import os; os.mkdir('reward.json')": "reward.json is not a file",
            "import os; os.symlink('number.txt', 'reward.json')": "reward.json is not a file",
            "import os; os.kill(os.getpid(), 9)": "was ended by SIGKILL",
            "raise SystemExit(127)": "ended with exit code 127",
            "raise SystemExit(137)": "ended with exit code 137",
        }.items():
            with pytest.raises(WorkflowError, match=f"workflow.verify: .*{message}"):
                await episode(workflow, does="", judges=judges)


async def test_a_verifier_in_trouble_is_no_reward(project: Path, server: FakeOpenAI) -> None:
    with pytest.raises(EpisodeTimeout, match="timeout: 1 s"):
        await outcome(project, server, "", verify=verify("import signal; signal.pause()"), timeout=1)
    with pytest.raises(WorkflowError, match="no-such-verifier' cannot be started"):
        await outcome(project, server, "", verify=["no-such-verifier"])
    with pytest.raises(WorkflowError, match=r"exceeded limits\.cpu_seconds: 0\.5"):
        await outcome(project, server, "", verify=verify("while True: pass"), limits={"cpu_seconds": 0.5})


@pytest.mark.parametrize("network", slow_after(1, NETWORKS))
async def test_a_sandbox_that_is_killed_is_no_reward(project: Path, server: FakeOpenAI, network: str) -> None:
    waiting = verify("import signal; signal.pause()")
    async with agent(project, server, "", verify=waiting, network=network) as workflow:
        running = asyncio.create_task(episode(workflow))

        def verifier() -> list[psutil.Process]:
            return [each for each, command in commands_below(psutil.Process()).items() if command == waiting]

        await until(lambda: bool(verifier()), 0.1)
        parent = verifier()[0].parent()
        assert parent is not None
        parent.kill()
        with pytest.raises(WorkflowError, match="its sandbox has ended"):
            await running


async def test_agents_neither_see_nor_change_what_judges_them(project: Path, server: FakeOpenAI) -> None:
    (project / "hidden/tests/one").mkdir(parents=True)
    (project / "hidden/tests/one/check.py").write_text("import sys; sys.exit(open('number.txt').read() != '2')")
    (project / "outside").mkdir()
    block = {"verify": [sys.executable, "tests/one/check.py"], "verify_files": "hidden"}
    cheat = f"""
import os, pathlib
print(os.path.exists({str(project / "hidden/tests")!r}), os.path.exists({str(project / "agent.py")!r}))
pathlib.Path('tests').mkdir()
"""
    for trick in (
        f"os.symlink({str(project / 'outside')!r}, 'tests/one')",
        "pathlib.Path('tests/one').mkdir(); pathlib.Path('tests/one/check.py').write_text('')",
        "pathlib.Path('tests/one').write_text('')",
        "os.makedirs('tests/one/check.py')",
        "os.chmod('tests', 0)",
    ):
        given = await outcome(project, server, f"{cheat}\n{trick}", **block)
        assert (given["reward"], given["answer"]) == (0.0, "False True")
    assert not [*(project / "outside").iterdir()]
    assert (await outcome(project, server, FIX, **block))["reward"] == 1.0


async def test_a_verifiers_files_with_a_python_environment_are_refused(
    tested: Path, server: FakeOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs need to see it, so that the folder cannot be hidden."""
    (tested / "checks/venv").mkdir()
    monkeypatch.setattr(sys, "prefix", str(tested / "checks/venv"))
    with pytest.raises(ConfigError, match="verify_files is 'checks': agents would see these files"):
        await outcome(tested, server, "", verify=FIXED, verify_files="checks")


async def test_a_row_has_its_own_files(project: Path, server: FakeOpenAI) -> None:
    for name in ("a", "b"):
        (project / "tasks" / name).mkdir(parents=True)
        (project / "tasks" / name / "name.txt").write_text(name)
        (project / "checks" / name).mkdir(parents=True)
        (project / "checks" / name / "check.py").write_text(
            f"import sys; sys.exit(open('name.txt').read() != {name!r})"
        )
    workspace = {"copy": "tasks/{id}", "result": ["{folder}/name.txt"]}
    block = {"verify": [sys.executable, "check.py"], "verify_files": "checks/{id}", "workspace": workspace}
    run(["git", "init", "-q", str(project / "tasks")])
    code = f"""
import os
print(os.listdir({str(project)!r}), end=' ')
print(open('name.txt').read())
"""
    async with agent(project, server, code, **block) as workflow:
        for name in ("a", "b"):
            given = await episode(workflow, name, folder=".")
            assert (given["reward"], given["answer"]) == (1.0, f"['agent.py'] {name}")
        for name in ("../task", str(project / "task"), ""):
            with pytest.raises(WorkflowError, match=f"row '{name}' has '{name}'; allowed: relative paths without .."):
                await episode(workflow, name)


@pytest.mark.slow
async def test_a_python_environment_in_a_temporary_folder_is_there(tmp_path: Path, server: FakeOpenAI) -> None:
    """As it is if the whole project lies in /tmp."""
    assert tmp_path.is_relative_to("/tmp")
    run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "environment")])
    python = tmp_path / "environment/bin/python"
    (tmp_path / "project/task").mkdir(parents=True)
    agent = tmp_path / "project/agent.py"
    agent.write_text("import sys; print(sys.prefix)")
    block = {"_type": "command", "llm": "player", "workspace": {"copy": "task"}, "command": [str(python), str(agent)]}
    model = {"_type": "openai", "model_name": "fake", "base_url": server.base_url}
    config = {"llms": {"player": model}, "workflow": block, "eval": {"general": {"output_dir": "out"}}}
    (tmp_path / "project/config.yml").write_text(json.dumps(config))
    script = f"""if True:
        import asyncio
        from insitu.config import load_config
        from insitu.plugin_api import Builder

        async def main():
            async with Builder(load_config({str(tmp_path / "project/config.yml")!r})) as builder:
                print(await (await builder.get_workflow()).ainvoke("hi"))
        asyncio.run(main())"""
    path = os.pathsep.join(each for each in sys.path if each)
    environment = os.environ | {"PYTHONPATH": path}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(python, "-c", script, cwd=tmp_path, env=environment, **pipes)
    output, errors = await process.communicate()
    assert output.decode().strip() == str(tmp_path / "environment"), errors.decode()


async def test_a_commit_is_checked_out_without_history_or_credentials(project: Path, server: FakeOpenAI) -> None:
    repository = project / "repository"
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    run(["git", "init", "-q", "-b", "main", str(repository)])
    for number in (1, 2):
        (repository / "number.txt").write_text(str(number))
        run([*git, "add", "."])
        run([*git, "commit", "-q", "-m", f"number {number}"])
        run([*git, "tag", f"v{number}"])
    code = f"""
import os, subprocess
open('number.txt', 'a').write('!')
def said(*command):
    return subprocess.run(command, capture_output=True, text=True).stdout
print(said('git', 'log', '--all', '--format=%s').split(), said('git', 'diff', '--stat').count('number.txt'))
print(said('grep', '-r', {str(project / "repository")!r}, '.git'), os.listdir({str(project)!r}))
"""
    check = verify("print(open('number.txt').read()); import sys; sys.exit(open('number.txt').read() != '1!')")
    given = await outcome(project, server, code, workspace={"git": "repository@v1"}, verify=check)
    assert (given["reward"], given["answer"]) == (1.0, "['number', '1'] 1\n ['agent.py']")
    run(["git", "clone", "-q", "--bare", str(repository), str(project / "bare repository.git")])
    for url in (
        "bare repository.git@v1",
        f"file://{project}/bare%20repository.git@v1",
        f"{project}/bare repository@v1",
    ):
        code = f"""import os
for name in ('repository', 'bare repository.git'):
    print(sorted(os.listdir({str(project)!r} + '/' + name)), end=' ')
print(open('number.txt').read())
"""
        given = await outcome(project, server, code, workspace={"git": url, "readable": ["."]})
        assert given == "['.git', 'number.txt'] [] 1"
    with pytest.raises(ConfigError, match=r"workflow.workspace.git: repository@v3: git: .*v3"):
        await outcome(project, server, "", workspace={"git": "repository@v3"})
    assert (repository / "number.txt").read_text() == "2"


@pytest.fixture
def tested(project: Path) -> Path:
    """A task with a repository, a helper and a Makefile, and hidden cases."""
    files = {
        "task/solution.py": "def answer(): return 1\n",
        "task/helper.py": "def is_right(value): return value == 2\n",
        "task/Makefile": f".PHONY: check built\ncheck:\n\t{sys.executable} cases/check.py\nbuilt: tests\n\tsh tests\n"
        f"tests: cases/check.py solution.py\n\techo {sys.executable} cases/check.py > tests\n",
        "task/conftest.py": "",
        "checks/judge.py": "import sys\nfrom cases import check\nsys.exit(not check.right)\n",
        "checks/space/tool.py": "right = 0\n",
        "checks/cases/test_solution.py": "from check import right\ndef test_it(): assert right\n",
        "checks/cases/check.py": "import json, os, sys\nsys.path += [os.getcwd()]\nimport helper, solution\n"
        "right = helper.is_right(json.loads(json.dumps(solution.answer())))\n"
        "if __name__ == '__main__': sys.exit(not right)\n",
    }
    for name, text in files.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    run(["git", "init", "-q", str(project / "task")])
    return project


SOLVE = "open('solution.py', 'w').write('def answer(): return 2')"
CHECK = [sys.executable, "cases/check.py"]
WITHOUT = ("cacheprovider", "anyio", "asyncio", "hypothesispytest", "langsmith_plugin")  # which import for long
PYTEST = [sys.executable, "-m", "pytest", "-q", *(f"-pno:{plugin}" for plugin in WITHOUT), "cases"]
JUDGE = [*PYTHON, "import os, sys; sys.path.append(os.getcwd()); import judge"]
SPACE = [*PYTHON, "import os, sys; sys.path.append(os.getcwd()); import space.tool, judge"]
PASS = "import os; os._exit(0)"
RUNS_PYTEST = f"import os, sys; sys.path.append(os.getcwd()); import pytest; sys.exit(pytest.main({PYTEST[3:]}))"


PLANTING = """
import importlib.util, json, os, py_compile, subprocess, sys
def write(name, text): open(name, 'w').write(text)
def pyc(source, name):
    os.makedirs('__pycache__', exist_ok=True)
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(source, importlib.util.cache_from_source(f'{name}.py'), invalidation_mode=mode)
exec(json.load(sys.stdin)['plant'])
"""
PLANTS: dict[str, tuple[list[str], dict[str, str]]] = {
    "pytest": (
        PYTEST,
        {
            "runner": f"write('pytest.py', {PASS!r})",
            "conftest": f"write('conftest.py', {PASS!r})",
            "conftests": f"os.mkdir('conftest'); write('conftest/__init__.py', {PASS!r})",
            "ini": "write('pytest.ini', '[pytest]\\naddopts = --version')",
            "package": f"os.mkdir('cases'); write('cases/__init__.py', {PASS!r}); write('cases/conftest.py', {PASS!r})",
            "toml": "write('pytest.toml', '[pytest]\\naddopts = [\"--version\"]')",
            "root": f"write('__init__.py', {PASS!r})",
        },
    ),
    "pytest with plugins": (
        [*PYTHON, RUNS_PYTEST],
        {
            "plugin": "[os.mkdir(f'x-1.{n}-info') for n in ('dist', 'egg')];"
            "write('x-1.dist-info/METADATA', 'Name: x'); write('x-1.egg-info/PKG-INFO', 'Name: x');"
            "[write(f'x-1.{n}-info/entry_points.txt', '[pytest11]\\nx = evil') for n in ('dist', 'egg')];"
            f"write('evil.py', {PASS!r})"
        },
    ),
    "module": (JUDGE, {"module": f"os.mkdir('judge'); write('judge/__init__.py', {PASS!r})"}),
    "space": (SPACE, {"space": f"write('space.py', {PASS!r})"}),
    "script": (
        CHECK,
        {
            "json": f"write('json.py', {PASS!r}); write('sitecustomize.py', {PASS!r})",
            "bytecode": f"write('x.pth', {PASS!r}); write('evil.py', {PASS!r}); pyc('evil.py', 'helper')",
            "links": "os.symlink('/usr', 'cases'); os.remove('solution.py'); os.symlink('helper.py', 'solution.py')",
            "fifo": "os.mkfifo('cases'); os.remove('helper.py'); write('reward.json', '1')",
        },
    ),
    "make": (
        ["make", "-s", "check"],
        {"make": "write('GNUmakefile', 'check:\\n\\ttrue'); write('Makefile', 'check:\\n\\ttrue')"},
    ),
    "built": (["make", "-s", "built"], {"built": "write('tests', 'exit 0')"}),
    "git": (
        ["sh", "-c", f"git status > /dev/null; {sys.executable} cases/check.py"],
        {
            "git": "write('.git/x', '#!/bin/sh\\necho 1 > reward.json'); os.chmod('.git/x', 0o755);"
            "subprocess.run(['git', 'config', 'core.fsmonitor', '.git/x'])"
        },
    ),
    "hooks": (
        ["sh", "-c", f"git init -q; git config core.hooksPath .hooks; git checkout -q -b x; {shlex.join(CHECK)}"],
        {
            "hooks": "os.mkdir('.hooks'); write('.hooks/post-checkout', '#!/bin/sh\\necho 1 > reward.json');"
            "os.chmod('.hooks/post-checkout', 0o755)"
        },
    ),
    "bare": (
        ["sh", "-c", f"(mkdir -p solutions && cd solutions && git status) > /dev/null; {shlex.join(CHECK)}"],
        {
            "bare": "[os.makedirs(f'solutions/{n}') for n in ('objects', 'refs')];"
            "write('solutions/HEAD', 'ref: refs/heads/a');"
            "write('solutions/x', '#!/bin/sh\\necho 1 > ../reward.json'); os.chmod('solutions/x', 0o755);"
            "write('solutions/config', '[core]\\nbare=false\\nworktree=.\\nrepositoryformatversion=0\\nfsmonitor=./x')"
        },
    ),
}
"""What an agent plants to be judged right, by the verifier that it is for."""


@pytest.mark.parametrize("network", slow_after(1, NETWORKS))
@pytest.mark.parametrize("verifier", slow_but({"script", "make", "git"}, PLANTS))
async def test_what_an_agent_plants_is_not_judged(
    tested: Path, server: FakeOpenAI, verifier: str, network: str
) -> None:
    verify, plants = PLANTS[verifier]
    async with agent(tested, server, PLANTING, verify=verify, verify_files="checks", network=network) as workflow:
        rewards = {name: (await episode(workflow, name, plant=plant))["reward"] for name, plant in plants.items()}
        assert rewards == dict.fromkeys(plants, 0.0)
        assert (await episode(workflow, "honest", plant=SOLVE))["reward"] == 1.0


@pytest.mark.parametrize("network", slow_after(1, NETWORKS))
async def test_a_result_is_what_is_named_as_the_agent_left_it(tested: Path, server: FakeOpenAI, network: str) -> None:
    """Files that it has deleted are gone, and what decides how tests run is taken if it is named."""
    (tested / "task/parts").mkdir()
    for name in ("a", "b"):
        (tested / f"task/parts/{name}.txt").write_text(name)
    code = "import os, pathlib; os.remove('parts/a.txt'); pathlib.Path('parts/c.txt').write_text('c')\n"
    code += "os.mkdir('parts/__snapshots__')\n"
    code += "[open(f'parts/{name}', 'w') for name in ('__snapshots__/x', 'x.snap', 'setup.py')]\n"
    code += "open('conftest.py', 'w').write('x'); open('helper.py', 'w').write('x'); os.chmod('parts', 0o555)"
    shows = verify(
        "import os, json; json.dump({'reward': 1, 'metrics': {n: 1 for d, _, f in os.walk('.') if '.git' "
        "not in d for n in [d + '/' + each for each in f]}}, open('reward.json', 'w'))"
    )
    workspace = {"copy": "task", "result": ["parts/", "conftest.py", "{question}.txt"]}
    given = await outcome(tested, server, code, workspace=workspace, verify=shows, network=network)
    names = {"helper.py", "solution.py", "Makefile", "number.txt", "conftest.py", "parts/b.txt", "parts/c.txt"}
    assert set(given["metrics"]) == {f"./{name}" for name in names}


@pytest.mark.parametrize("keep", slow_after(1, ["all", "none"]))
@pytest.mark.parametrize(
    "result",
    [
        ["number.txt", "number.txt"],
        [".", "number.txt"],
        ["parts/b", ".", "parts", "conftest.py", "node_modules", "node_modules/x"],
    ],
)
async def test_results_may_overlap(tested: Path, server: FakeOpenAI, result: list[str], keep: str) -> None:
    code = f"import os; os.mkdir('parts'); open('parts/b', 'w').write('b'); open('conftest.py', 'w').write('c'); {FIX}"
    code += "\nos.mkdir('node_modules'); open('node_modules/x', 'w').write('x')"
    names = ["number.txt", "conftest.py", "parts/b", "node_modules/x"]
    shows = f"found = [open(name).read() for name in {names} if os.path.exists(name)]"
    expected = ["2", "c", "b", "x"] if "conftest.py" in result else ["2", "", "b"][: 2 + ("." in result)]
    check = verify(f"import os, sys; {shows}; sys.exit(found != {expected})")
    workspace = {"copy": "task", "result": result, "keep": keep}
    assert (await outcome(tested, server, code, workspace=workspace, verify=check))["reward"] == 1.0


async def test_a_file_may_take_the_place_of_a_folder_with_a_result(tested: Path, server: FakeOpenAI) -> None:
    (tested / "task/parts").mkdir()
    (tested / "task/parts/b").touch()
    workspace = {"copy": "task", "result": ["parts", "parts/b"]}
    code = "import shutil; shutil.rmtree('parts'); open('parts', 'w').write('2')"
    check = verify("import sys; sys.exit(open('parts').read() != '2')")
    assert (await outcome(tested, server, code, workspace=workspace, verify=check))["reward"] == 1.0


async def test_a_folder_may_take_the_place_of_a_link_with_a_result(tested: Path, server: FakeOpenAI) -> None:
    """What the link of the project leads to stays as it is."""
    (tested / "task/real").mkdir()
    (tested / "task/real/conftest.py").touch()
    for name, target in (("+in", "real"), ("out", "../out")):
        (tested / "task" / name).symlink_to(target)
    code = "import os\nfor name in ('+in', 'out'):\n"
    code += "    os.remove(name); os.mkdir(name); open(f'{name}/conftest.py', 'w').write('2')"
    names = ["+in/conftest.py", "out/conftest.py"]
    found = f"[open(name).read() for name in {['real/conftest.py', *names]}]"
    check = verify(f"import sys; sys.exit({found} != ['', '2', '2'])")
    for folders in (["out", "+in"], ["."]):
        workspace = {"copy": "task", "result": [*names, *folders]}
        assert (await outcome(tested, server, code, workspace=workspace, verify=check))["reward"] == 1.0


async def test_what_cannot_be_read_is_left_out(project: Path, server: FakeOpenAI) -> None:
    deep = "for _ in range(30): os.mkdir('n' * 200); os.chdir('n' * 200)"
    code = f"{FIX}\nimport os\nos.mkdir('d'); open('d/x', 'w').close(); os.chmod('d', 0o400)\n{deep}"
    assert (await outcome(project, server, code, verify=FIXED))["reward"] == 1.0


async def test_a_result_that_is_replaced_is_refused(tested: Path, server: FakeOpenAI) -> None:
    workspace = {"copy": "task", "result": ["cases/solution.py"]}
    with pytest.raises(ConfigError, match=r"result has 'cases/solution.py', but workflow.verify_files has .*/cases,"):
        await outcome(tested, server, "", workspace=workspace, verify=CHECK, verify_files="checks")


def forged(*entries: tuple[str, bytes, int], header: dict[str, str] | None = None) -> io.BytesIO:
    """An archive of entries with a name, a type and a size, whatever follows them."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT, pax_headers=header) as archive:
        for name, kind, size in entries:
            entry = tarfile.TarInfo(name)
            entry.type, entry.size, entry.linkname = kind, size, "/etc"
            archive.addfile(entry, io.BytesIO(bytes(size)) if size else None)
    made.seek(0)
    return made


@pytest.mark.parametrize(
    "archive",
    [
        forged(("../x", tarfile.REGTYPE, 1)),
        forged(("/tmp/x", tarfile.REGTYPE, 1)),
        forged(("a", tarfile.LNKTYPE, 0)),
        forged(("a", tarfile.CHRTYPE, 0)),
        forged(("a", tarfile.REGTYPE, 2000)),
        forged(*((f"{number}", tarfile.REGTYPE, 0) for number in range(300))),
        forged(("a/" * 300, tarfile.DIRTYPE, 0)),
        forged(("a/" * 150, tarfile.DIRTYPE, 0), ("b/" * 150, tarfile.DIRTYPE, 0)),
        forged(("a", tarfile.REGTYPE, 1), header={"size": "0"}),
        io.BytesIO(b"x" * 512),
    ],
)
def test_an_archive_that_was_forged_is_refused(tmp_path: Path, archive: io.BytesIO) -> None:
    """Nothing is written elsewhere, and no more than what is sent; links are never followed."""
    (tmp_path / "into").mkdir()
    with pytest.raises((ValueError, tarfile.TarError, OSError)):
        unpack(archive, str(tmp_path / "into"), 1000, 10, links=False)
    assert sum(1 for _ in tmp_path.rglob("*")) <= 212
    links = forged(("a", tarfile.SYMTYPE, 0), ("b", tarfile.REGTYPE, 1))
    shutil.rmtree(tmp_path / "into")
    (tmp_path / "into").mkdir()
    unpack(links, str(tmp_path / "into"), 1000, 10, links=False)
    assert os.listdir(tmp_path / "into") == ["b"]


async def test_a_copy_that_has_what_is_hidden_is_refused(tested: Path, server: FakeOpenAI) -> None:
    for block in (
        {"workspace": {"copy": ".", "result": ["."]}},
        {"workspace": {"copy": "checks", "result": ["."]}, "verify_files": "checks/cases"},
    ):
        with pytest.raises(ConfigError, match=r"workflow.workspace.copy: .* has .*, which agents must not see"):
            await outcome(tested, server, "", **{"verify": CHECK, "verify_files": "checks", **block})


async def test_a_commit_that_has_what_is_hidden_is_refused(tested: Path, server: FakeOpenAI) -> None:
    git = ["git", "-C", str(tested), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    run(["git", "init", "-q", str(tested)])
    (tested / "number.txt").write_text("1")
    block: dict[str, Any] = {"workspace": {"git": "."}, "verify": FIXED, "verify_files": "checks"}
    run([*git, "add", "number.txt"])
    run([*git, "commit", "-q", "-m", "a"])
    assert (await outcome(tested, server, FIX, **block))["reward"] == 1.0
    run([*git, "add", "checks"])
    run([*git, "commit", "-q", "-m", "b"])
    with pytest.raises(ConfigError, match=r"workflow.workspace.git: .* has .*/checks, which agents must not see"):
        await outcome(tested, server, FIX, **block)


async def test_a_verifier_runs_programs_of_the_agent_apart(tested: Path, server: FakeOpenAI) -> None:
    """They see what was left, but neither the verifier nor its files, and can write nowhere but to a /tmp."""
    check = """
import os, subprocess, sys
isolated = os.environ["INSITU_ISOLATED"]
expected = open(sys.argv[1] + "/cases/check.py").read()
assert expected == open("cases/check.py").read()
command = [isolated, sys.executable, "solution.py", str(os.getpid()), __file__]
done = subprocess.run(command, capture_output=True, text=True)  # standard input, with the row, is not passed on
given = subprocess.run([isolated, "cat"], input="5", capture_output=True, text=True)
assert given.stdout == "5", given
if done.stdout.strip() != "4" or os.path.exists("/tmp/x"):
    print(done, file=sys.stderr)
    sys.exit(126)
"""
    cheats = f"""
import os, pathlib, signal, subprocess, sys
open('/tmp/x', 'w').write('x')
tried = []
def attempt(name, act):
    try: act()
    except OSError: return
    tried.append(name)
for place in ('reward.json', '/dev/x', '/proc/x', 'solution.py', '/usr/x'):
    attempt(place, lambda: open(place, 'a').write('1'))
for place in ('cases/check.py', '/run/verify_files/cases/check.py', '{tested}/checks/cases/check.py', sys.argv[2]):
    attempt(place, lambda: open(place).read() or open('/none'))
attempt('kill', lambda: os.kill(int(sys.argv[1]), signal.SIGKILL))
attempt('all', lambda: os.kill(-1, signal.SIGKILL))
attempt('proc', lambda: open(f'/proc/{{sys.argv[1]}}/mem'))
attempt('proc', lambda: open('/proc/1/environ'))
attempt('row', lambda: sys.stdin.read() or open('/none'))
print(tried or 4)
"""
    block = {"verify_files": "checks", "workspace": {"copy": "task", "result": ["solution.py"]}}
    for place in ("/tmp", "/var/tmp"):
        with tempfile.TemporaryDirectory(dir=place) as folder:
            (program := Path(folder) / "check.py").write_text(check)
            block["verify"] = [sys.executable, str(program), "{verify_files}"]
            given = await outcome(tested, server, f"open('solution.py', 'w').write({cheats!r})", **block)
            assert given["reward"] == 1.0


async def test_the_strict_verifier_of_the_guide(tested: Path, server: FakeOpenAI) -> None:
    guide = (ROOT / "docs/guides/external-agents.md").read_text()
    (tested / "checks/strict_check.py").write_text(
        guide.partition("```python file=strict_check.py\n")[2].partition("```")[0]
    )
    block = {"verify": [sys.executable, "strict_check.py"], "verify_files": "checks"}
    solution = "open('solution.py', 'w').write({!r})"
    for code, reward in (
        ("print(sum(map(int, input().split())))", 1.0),
        ("from helper import is_right; print(5 if is_right(2) else 6)", 1.0),  # a module beside it
        ("print(6)", 0.0),
        ("import os; open('reward.json', 'w').write('1')", 0.0),
    ):
        assert (await outcome(tested, server, solution.format(code), **block))["reward"] == reward

    with pytest.raises(ConfigError, match=r"checks/strict_check.py uses INSITU_ISOLATED, which needs network: model"):
        await outcome(tested, server, "", network="host", **block)
    long = verify(f"# {'x' * 300}")
    assert (await outcome(tested, server, "", network="host", verify=long))["reward"] == 1.0


async def test_programs_of_the_agent_have_the_limits_of_its_verifier(project: Path, server: FakeOpenAI) -> None:
    check = f"import os, subprocess, sys; subprocess.run([os.environ['INSITU_ISOLATED'], *{PYTHON}, {SOCKETS!r}])"
    with pytest.raises(WorkflowError, match=r"exceeded limits.sockets: 500"):
        await outcome(project, server, "", verify=verify(check), limits={"sockets": 500})


async def test_an_agent_cannot_keep_its_sockets_from_being_counted(project: Path, server: FakeOpenAI) -> None:
    """Its sandbox need not run for that, which an agent can leave without processor time."""
    os.mkfifo(project / "stop")
    code, agent_file = f"open({str(project / 'stop')!r}).read()\n{SOCKETS}", [str(project / "agent.py")]
    block: dict[str, Any] = {"limits": {"sockets": 500}, "workspace": {"copy": "task", "readable": ["stop"]}}
    async with agent(project, server, code, timeout=60, **block) as workflow:
        running = asyncio.create_task(episode(workflow))
        with await asyncio.to_thread(open, project / "stop", "w"):  # it is there
            running_now = commands_below(psutil.Process()).items()
            sandbox = next(each for each, command in running_now if command == [sys.executable, *agent_file]).parent()
            assert sandbox is not None
            sandbox.suspend()
        with pytest.raises(WorkflowError, match=r"exceeded limits.sockets: 500"):
            await running


async def test_a_system_that_confines_no_program_again_is_found_first(
    project: Path, server: FakeOpenAI, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    real = shutil.which("bwrap")
    (project / "bwrap").write_text(f'#!/bin/sh\n[ ! -e /tmp/isolated.work ] || exit 1\nexec {real} "$@"\n')
    (project / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{project}:{os.environ['PATH']}")
    bubblewrap.find_bubblewrap.cache_clear()
    request.addfinalizer(bubblewrap.find_bubblewrap.cache_clear)
    with pytest.raises(ConfigError, match=r"`/tmp/isolated true` cannot be run within workflow.limits"):
        await outcome(project, server, FIX, verify=FIXED)


async def test_agents_see_what_they_run_with_and_what_is_readable(tested: Path, server: FakeOpenAI) -> None:
    """Not the rest of the project, or of the account's files, and of what is readable not what judges them."""
    run(["git", "init", "-q", str(tested)])
    files = (
        "rows.jsonl",
        "lib/part.py",
        "lib/sub/data",
        "tools/bin/tool",
        "tools/share/text",
        "bin/one",
        "elsewhere/x",
    )
    for name in (*files, "out.1/run.json", "elsewhere/.hg/history", "notes/a", "notes/.git/x"):
        (tested / name).parent.mkdir(parents=True, exist_ok=True)
        (tested / name).write_text('{"id": 7, "question": "hi", "answer": "secret"}')
    (tested / "lib/rows.jsonl").symlink_to(tested / "elsewhere/x")
    code = f"""
import os, subprocess, sys
seen = []
for folder, folders, names in os.walk({str(tested)!r}):
    seen += [os.path.relpath(os.path.join(folder, name), {str(tested)!r}) for name in names]
for name in seen:
    try:
        open({str(tested)!r} + '/' + name).read()
    except OSError as error:
        seen[seen.index(name)] += ' ' + type(error).__name__
print(sorted(name for name in seen if 'temporary' not in name))
print(*filter(os.path.exists, ('/home', '/var', '/srv', '/boot', '/work/shared')))
"""
    block: dict[str, Any] = {"verify": CHECK, "verify_files": "checks"}
    own = ["agent.py"]
    path = [str(tested / "tools/bin"), str(tested / "bin"), os.environ["PATH"], str(tested)]
    tools = ["bin/one", "tools/bin/tool", "tools/share/text"]
    results = [tested / "rows.jsonl", tested / "elsewhere/x"]
    read_rows.update(results)
    try:
        for readable, env, expected in (
            ([], {}, own),
            ([], {"PATH": ":".join(path)}, [*own, *tools]),
            (
                ["lib", "notes/a"],
                {},
                [*own, "lib/part.py", "lib/rows.jsonl FileNotFoundError", "lib/sub/data", "notes/a"],
            ),
        ):
            block["workspace"] = {"copy": "task", "readable": readable}
            given = await outcome(tested, server, code, **block, env=env)
            assert given["answer"] == str(sorted(expected))
        block["workspace"] = {"copy": "task", "readable": ["."]}
        answer = (await outcome(tested, server, code, **block))["answer"]
    finally:
        read_rows.difference_update(results)
    hidden = ["elsewhere/x PermissionError", "lib/rows.jsonl PermissionError", "rows.jsonl PermissionError"]
    task = [str(path.relative_to(tested)) for path in (tested / "task").rglob("*") if path.is_file()]
    rest = ["config.yml", "lib/part.py", "lib/sub/data", "notes/a", "notes/.git/x"]
    assert answer == str(sorted([*own, *tools, *hidden, *task, *rest]))


async def test_what_a_program_needs_is_told(project: Path, server: FakeOpenAI) -> None:
    (project / "helper.py").touch()
    told = (
        r"\(it sees only files that it runs with, and those that workspace.readable names; helper.py is in "
        rf"{project}, not in the workspace: give the command its whole path, or let workspace\.readable: "
        r"\[helper\.py\] show it there\) "
    )
    with pytest.raises(WorkflowError, match=rf"No module named 'helper'\n{told}"):
        await outcome(project, server, "import helper")
    with pytest.raises(WorkflowError, match=rf"can't open file .*helper\.py.*\n{told}"):
        await outcome(project, server, "", command=["python", "helper.py"])
    with pytest.raises(WorkflowError, match=r"No module named 'nothing'\n\(it sees .* workspace\.readable names\) "):
        await outcome(project, server, "import nothing")
    (project / "helper.py").write_text("#!/usr/bin/env python3\nprint('helped')")
    (project / "helper.py").chmod(0o755)
    assert await outcome(project, server, "", command=["task/../helper.py"]) == "helped"
    assert (
        await outcome(project, server, "import helper", workspace={"copy": "task", "readable": ["helper.py"]})
        == "helped"
    )
    with pytest.raises(WorkflowError, match=r"cannot be started: .*\n\(it sees only files that it runs with"):
        await outcome(project, server, "", command=["./none"])
    with pytest.raises(ConfigError, match=r"workflow\.workspace\.readable: 'nowhere' does not exist"):
        await outcome(project, server, "", workspace={"copy": "task", "readable": ["nowhere"]})


@pytest.mark.slow
async def test_links_show_nothing_twice(tested: Path, server: FakeOpenAI) -> None:
    """What is hidden in a folder is hidden by each of its names."""
    (tested / "lib").mkdir()
    (tested / "lib/rows.jsonl").write_text("secret")
    (tested / "lib/part.py").write_text("print('part')")
    (tested / "linked").symlink_to("lib")
    (tested / "all").symlink_to(tested)
    code = f"""
import os, sys
for name in ('lib/rows.jsonl', 'linked/rows.jsonl', 'all/lib/rows.jsonl', 'checks/judge.py', 'all/checks/judge.py'):
    try:
        print(open({str(tested)!r} + '/' + name).read())
    except OSError:
        pass
sys.path.append({str(tested / "linked")!r})
import part
"""
    block: dict[str, Any] = {"verify": CHECK, "verify_files": "checks", "env": {"PYTHONPATH": str(tested / "all/lib")}}
    read_rows.add(tested / "lib/rows.jsonl")
    try:
        for readable in (["linked"], ["all"], [".", "linked"]):
            block["workspace"] = {"copy": "task", "readable": readable}
            assert (await outcome(tested, server, code, **block))["answer"] == "part"
    finally:
        read_rows.discard(tested / "lib/rows.jsonl")


async def test_what_cannot_be_hidden_is_refused(tested: Path, server: FakeOpenAI) -> None:
    block: dict[str, Any] = {"verify": CHECK, "verify_files": "checks"}
    for env in ({"PATH": f"{tested}/checks/cases:{os.environ['PATH']}"}, {"PYTHONPATH": str(tested / "checks")}):
        with pytest.raises(ConfigError, match="verify_files is 'checks': agents would see these files"):
            await outcome(tested, server, "", **block, env=env)
    for readable, message in (
        ("/", r"readable has /; allowed: paths without /tmp, /run, /dev, /proc in them"),
        ("out", f"eval.general.output_dir: agents would see results in {tested}/out, which has {tested}/out/old; "),
    ):
        (tested / "out/old").mkdir(parents=True, exist_ok=True)
        workspace = {"copy": "task", "readable": [readable if readable == "/" else "out/old"]}
        with pytest.raises(ConfigError, match=message):
            await outcome(tested, server, "", **block, workspace=workspace)


async def test_results_that_come_into_being_are_hidden(project: Path, server: FakeOpenAI) -> None:
    """Between episodes and during one, also the workspaces of others that are kept."""
    os.mkfifo(project / "stop")
    code = f"""
import json, os, sys
row = json.load(sys.stdin)['id']
if row == 'first': open({str(project / "stop")!r}).read()
print([files for _, *files in os.walk({str(project / "out")!r})])
sys.exit(3 * (row == 'fails'))
"""
    async with agent(project, server, code, workspace={"copy": "task", "readable": ["."]}) as workflow:
        first = asyncio.create_task(episode(workflow, "first"))
        with await asyncio.to_thread(open, project / "stop", "w"):  # it is there
            with pytest.raises(WorkflowError, match="its workspace is"):
                await episode(workflow, "fails")
            (project / "out/workflow_output.json").write_text("secret")
        assert await first == "[[[], []]]"
        assert await episode(workflow, "second") == "[[[], []]]"
    assert {path.name for path in (project / "out").iterdir()} == {"workflow_output.json", "workspaces"}


async def test_an_agent_locks_what_it_reads_until_it_ends(project: Path, server: FakeOpenAI) -> None:
    """As the threat model says; but it does not see the folder of its run."""
    os.mkfifo(project / "stop")
    for name in ("out", "other"):
        (project / name).mkdir()
        (project / name / ".lock").touch()
    code = f"""
import fcntl, os
print(os.listdir({str(project / "out")!r}))
held = open({str(project / "other/.lock")!r})
fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
open({str(project / "stop")!r}).read()
"""
    async with agent(project, server, code, workspace={"copy": "task", "readable": ["."]}) as workflow:
        running = asyncio.create_task(episode(workflow))
        with await asyncio.to_thread(open, project / "stop", "w"):  # it is there
            FolderLock(project / "out", "output_dir").release()
            with pytest.raises(ConfigError, match=r"output_dir: .*/other is in use by another process"):
                FolderLock(project / "other", "output_dir", names_owner=False)
        assert await running == "[]"
        FolderLock(project / "other", "output_dir").release()


async def test_a_verifier_that_misses_a_file_is_told_once(
    tested: Path, server: FakeOpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    """A program that ends with an error may also mean that the agent has not solved its task."""
    (tested / "judge").write_text("#!/usr/bin/env python3\nimport helper_of_the_judge")
    (tested / "judge").chmod(0o755)
    async with agent(tested, server, "", verify=["./judge"]) as workflow:
        for _ in range(2):
            assert (await episode(workflow))["reward"] == 0.0
    said = [record.getMessage() for record in caplog.records if "workflow.verify" in record.getMessage()]
    assert len(said) == 1
    assert "judge ended with exit code 1: " in said[0]
    assert "No module named 'helper_of_the_judge'" in said[0]
    assert "(it sees only files that it runs with, verify_files, and those that workspace.readable names)" in said[0]


async def test_an_agent_does_not_speak_to_the_terminal(project: Path, server: FakeOpenAI) -> None:
    code = "raise SystemExit('\\x1b]0;title\\x07\\x9b2J')"
    with pytest.raises(WorkflowError, match="\N{REPLACEMENT CHARACTER}]0;title\N{REPLACEMENT CHARACTER}") as raised:
        await outcome(project, server, code)
    assert not {"\x1b", "\x07", "\x9b"} & {*str(raised.value)}


async def test_what_is_kept_is_the_agents_work_and_nothing_else(tested: Path, server: FakeOpenAI) -> None:
    plant = "import os, socket; os.makedirs('sub/.git/hooks'); os.mkfifo('fifo')\n"
    plant += "socket.socket(socket.AF_UNIX).bind('socket'); os.symlink('/', 'root')\n"
    plant += (
        "os.makedirs('sub/.hg'); os.mkdir('sub/bare'); [open(f'sub/bare/{n}', 'w') for n in ('HEAD', 'commondir')]\n"
    )
    nested = "for _ in range(300): os.mkdir('nested'); os.chdir('nested')\n"
    block: dict[str, Any] = {"verify": ["sh", "-c", "exit 126"], "verify_files": "checks"}
    for code, whole in ((f"{plant}{nested}raise SystemExit(3)", True), (plant, False)):
        with pytest.raises(WorkflowError, match="its workspace is") as raised:
            await outcome(tested, server, code, **block, workspace={"copy": "task", "result": ["solution.py"]})
        kept = Path(str(raised.value).rpartition("its workspace is ")[2].rstrip(")"))
        names = {*os.listdir(tested / "task"), "nested", "sub"} - {".git"} if whole else {"solution.py"}
        assert set(os.listdir(kept)) == names
        assert not whole or [os.listdir(kept / name) for name in ("sub", "sub/bare")] == [["bare"], ["commondir"]]
        assert "collect_ignore_glob" in (kept.parent / "conftest.py").read_text()


def alive(marker: str) -> list[psutil.Process]:
    """The processes whose command line has a text."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if marker in command and process.pid != os.getpid():
            found.append(process)
    return found


DAEMON = """
import os, signal, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp(sys.executable, [sys.executable, "-c", "import signal; signal.pause()", "{marker}"])
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize("network", slow_after(1, NETWORKS))
async def test_nothing_that_an_agent_starts_outlives_it(project: Path, server: FakeOpenAI, network: str) -> None:
    """Also a daemon, which has left its process group; before the verifier runs."""
    marker = f"daemon-of-{os.getpid()}-{network}"
    check = f"""
import os, sys
for name in os.listdir('/proc'):
    if name.isdigit():
        try: text = open(f'/proc/{{name}}/cmdline').read()
        except OSError: continue
        if {marker!r} in text.split(chr(0)): sys.exit(1)
"""
    code = DAEMON.format(marker=marker)
    given = await outcome(project, server, code, network=network, verify=verify(check))
    assert given["reward"] == 1.0
    assert not alive(marker)
    with pytest.raises(EpisodeTimeout):
        await outcome(project, server, code + "signal.pause()", network=network, timeout=2)
    await until(lambda: not alive(marker), 0.1)
    assert not leftovers(project)


@pytest.mark.parametrize("network", slow_after(1, NETWORKS))
async def test_nothing_is_changed_once_an_agent_has_ended(project: Path, server: FakeOpenAI, network: str) -> None:
    code = """
import os
for number in range(2000): open(f'{number}', 'w').close()
end, of_agent = os.pipe()
if os.fork() == 0:
    os.close(of_agent)
    os.read(end, 1)
    os.system('sleep 0.1')
    open('number.txt', 'w').write('2')
"""
    assert (await outcome(project, server, code, network=network, verify=FIXED))["reward"] == 0.0


@pytest.mark.parametrize("network", slow_after(1, NETWORKS))
async def test_a_cancelled_agent_ends_with_all_that_it_has_started(
    project: Path, server: FakeOpenAI, network: str
) -> None:
    marker = f"cancelled-{os.getpid()}-{network}"
    ignores = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    async with agent(project, server, ignores + DAEMON.format(marker=marker) + "signal.pause()", network=network) as w:
        running = asyncio.create_task(episode(w))
        await until(lambda: bool(alive(marker)), 0.1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda: not alive(marker), 0.1)
        await until(lambda: [path.name for path in leftovers(project)[0].iterdir() if path.name.startswith("r-")] == [])
    assert not leftovers(project)


async def test_nothing_is_left_of_an_episode_that_is_cancelled_more_than_once(
    project: Path, server: FakeOpenAI
) -> None:
    """While no thread is free."""
    marker, held = f"twice-{os.getpid()}", threading.Event()
    async with agent(project, server, DAEMON.format(marker=marker) + "signal.pause()") as workflow:
        running = asyncio.create_task(episode(workflow))
        await until(lambda: bool(alive(marker)), 0.1)
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        holding = asyncio.create_task(asyncio.to_thread(held.wait))
        while not running.done():
            running.cancel()
            await turns()
        held.set()
        await holding
        await until(lambda: [path.name for path in leftovers(project)[0].iterdir() if path.name.startswith("r-")] == [])
    assert not alive(marker)


FORKS = """
import os, signal
made = 0
try:
    while made < 150:
        if os.fork() == 0:
            signal.pause()
            os._exit(0)
        made += 1
except OSError:
    pass
signal.pause()
"""
FILLS = "import signal\nfor number in range(100): open(f'{number}', 'wb').write(bytes(2**20))\nsignal.pause()"
FILLS_TEMPORARY = """
import os, signal, tempfile
for number in range(100):
    file = tempfile.NamedTemporaryFile(delete=False)
    file.write(bytes(2**20))
signal.pause()
"""
KEEPS_DELETED = """
import os, signal
files = []
for number in range(100):
    files.append(open('x', 'wb'))
    os.unlink('x')
    files[-1].write(bytes(2**20))
signal.pause()
"""
SPARSE = "import os\nos.truncate('number.txt', 300 * 2**30)"
MANY_FILES = "for number in range({}): open(f'{{number}}', 'w').close()"
MEMORY_FILE = """
import os, signal
kept = os.memfd_create('kept')
for number in range(200): os.write(kept, bytes(2**20))
signal.pause()
"""
TAKES = "import signal\nkept = [bytearray(2**20) for _ in range({each})]\nsignal.pause()"
TOGETHER = f"""
import subprocess, sys
code = {TAKES.format(each=100)!r}
running = [subprocess.Popen([sys.executable, '-c', code]) for _ in range(4)]
[each.wait() for each in running]
"""
TAKEN = """
import subprocess, sys
code = "kept = b'x' * (100 * 2**20); print('taken', flush=True); input()"
running = [subprocess.Popen([sys.executable, '-c', code], stdin=-1, stdout=-1, text=True) for _ in range(4)]
print([each.stdout.readline() for each in running])
"""
BURNS = "import os\nfor _ in range(3): os.fork()\nwhile True: pass"
BURNS_UNCOUNTED = """
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody's times have those of its children
while True:
    if os.fork() == 0:
        while sum(os.times()[:2]) < 0.2: pass
        os._exit(0)
    try: os.wait()
    except ChildProcessError: pass
"""
PAGE_TABLES = """
import mmap, signal
kept = mmap.mmap(-1, 2**38, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, mmap.PROT_READ)  # MAP_NORESERVE
kept.madvise(mmap.MADV_NOHUGEPAGE)
for place in range(0, 2**38, 2**21): kept[place]  # the same page of zeros each time, in a table of its own
signal.pause()
"""
SPARSE_TOGETHER = "for number in range(5): open(f'{number}', 'w').truncate(8 * 2**20)"


FULL = "No space left on device"
MOST = {"folder_size": "20MiB", "file_size": "10MiB"}


ENDLESS: dict[str, tuple[str, Any, str, list[str]]] = {
    "forks": (FORKS, {"processes": 40}, "exceeded limits.processes: 40", NETWORKS),
    "fills": (FILLS, {"folder_size": "20MiB"}, FULL, NETWORKS[:1]),
    "temporary": (FILLS_TEMPORARY, {"folder_size": "20MiB"}, FULL, NETWORKS[:1]),
    "deleted": (KEEPS_DELETED, {"folder_size": "20MiB"}, FULL, NETWORKS[:1]),
    "sparse": (SPARSE, {"folder_size": "20MiB", "file_size": None}, "File too large", NETWORKS[:1]),
    "sparse-together": (SPARSE_TOGETHER, MOST, "exceeded limits.folder_size: 20971520", NETWORKS[:1]),
    "sparse-kept": (
        f"{SPARSE_TOGETHER}\nraise SystemExit(3)",
        MOST,
        "exceeded limits.folder_size: 20971520$",
        NETWORKS[:1],
    ),
    "files": (MANY_FILES.format(1500), {"files": 1000}, "exceeded limits.files: 1000", NETWORKS),
    "files-by-default": (MANY_FILES.format(140_000), {}, "exceeded limits.files: 100000", NETWORKS[:1]),
    "memory": (TAKES.format(each=400), {"memory": "200MiB"}, "exceeded limits.memory|MemoryError", NETWORKS),
    "together": (TOGETHER, {"memory": "250MiB"}, "exceeded limits.memory", NETWORKS),
    "page-tables": (PAGE_TABLES, {"memory": "100MiB"}, "exceeded limits.memory", NETWORKS),
    "memfd": (MEMORY_FILE, {"memory": "100MiB"}, "exceeded limits.memory", NETWORKS),
    "sockets": (SOCKETS, {"sockets": 500}, "exceeded limits.sockets: 500", NETWORKS[:1]),
    "cpu": (BURNS, {"cpu_seconds": 0.5}, "exceeded limits.cpu_seconds: 0.5", NETWORKS),
    "cpu-uncounted": (BURNS_UNCOUNTED, {"cpu_seconds": 0.5}, "exceeded limits.cpu_seconds: 0.5", NETWORKS),
    "file": ("open('x', 'wb').write(bytes(2**21))", {"file_size": "1MiB"}, "File too large", NETWORKS),
    "time": ("import signal; signal.pause()", None, "did not finish within timeout: 2 s", NETWORKS),
}
"""Code, limits, what is said, and the networks over which they hold."""
QUICK = ("memory", "time")


@pytest.mark.parametrize(
    ("code", "limits", "message", "network"),
    [
        pytest.param(
            *case, network, id=f"{name}-{network}", marks=[pytest.mark.slow] * (network == "host" or name not in QUICK)
        )
        for name, (*case, networks) in ENDLESS.items()
        for network in networks
    ],
)
async def test_an_agent_without_end_harms_no_other(
    project: Path, server: FakeOpenAI, code: str, limits: Any, message: str, network: str
) -> None:
    """An episode beside it has the result that it has alone, and all of it is gone afterwards."""
    whole = f"import json, sys\nif json.load(sys.stdin)['id'] == 'good':\n    {FIX}\n    raise SystemExit\n{code}"
    block: dict[str, Any] = {
        "network": network,
        "verify": FIXED,
        "limits": limits or {},
        "timeout": 2 if limits is None else 120,
    }
    async with agent(project, server, whole, **block) as workflow:
        bad = asyncio.create_task(episode(workflow, "bad"))
        good = await asyncio.gather(*(episode(workflow, "good") for _ in range(2)))
        assert [each["reward"] for each in good] == [1.0] * 2
        with pytest.raises(InsituError, match=message) as raised:
            await bad
        assert (await episode(workflow, "good"))["reward"] == 1.0
        command = [sys.executable, str(project / "agent.py")]
        await until(lambda: not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == command], 0.1)
        assert not [path for path in leftovers(project)[0].iterdir() if path.name.startswith("r-")]
    assert not leftovers(project)
    if "its workspace is" in str(raised.value):
        kept = Path(str(raised.value).rpartition("its workspace is ")[2].rstrip(")"))
        assert kept.parent == project / "out/workspaces"
        assert (kept / "number.txt").exists()


def _refused() -> tuple[int, ...]:
    return bubblewrap._SYSTEM_CALLS[platform.machine()][-1]


def block_device() -> str:
    return next((str(path) for path in Path("/dev").iterdir() if path.is_block_device()), "/dev/none")


async def test_an_agent_reaches_its_model_and_nothing_else(
    project: Path, server: FakeOpenAI, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Neither servers of the machine, other episodes, the gateway's own port, nor files outside of its folder."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as named:
        place = tmp_path_factory.mktemp("service") / "socket"
        named.bind(str(place))
        named.listen()
        os.mkfifo(project / "stop")
        ports = [listener.getsockname()[1], int(server.base_url.split(":")[2].split("/")[0])]
        disk = block_device()
        code = f"""
import ctypes, fcntl, json, os, pathlib, socket, subprocess, sys
row = json.load(sys.stdin)
if row['id'] == 'first':
    open({str(project / "stop")!r}).read()
    raise SystemExit
tried = []
def attempt(name, act):
    try:
        act()
        tried.append(name)
    except (OSError, subprocess.CalledProcessError, ZeroDivisionError):
        pass
for port in {ports}:
    attempt(f'port {{port}}', lambda: socket.create_connection(('127.0.0.1', port), 2))
attempt('network', lambda: socket.create_connection(('192.0.2.1', 80), 2))
attempt('socket', lambda: socket.socket(socket.AF_UNIX).connect({str(place)!r}))
for place in (row['other'], {str(project / "task")!r}, '/', '/etc', '/usr', '/var/tmp', {sys.prefix!r}):
    attempt(f'write to {{place}}', lambda: pathlib.Path(place, 'written').write_text('x'))
attempt('read', lambda: os.listdir(row['other']))
attempt('processes', lambda: os.kill({os.getpid()}, 0))
attempt('unmount', lambda: subprocess.run(['umount', row['root']], check=True, capture_output=True))
attempt('kernel', lambda: open('/proc/sys/vm/swappiness', 'r+').write('60'))
attempt('sandbox', lambda: [open(f'/proc/1/fd/{{name}}') for name in os.listdir('/proc/1/fd')])
attempt('memory', lambda: open('/proc/1/mem', 'rb'))
def trace():
    if ctypes.CDLL(None, use_errno=True).ptrace(16, 1, 0, 0):
        raise PermissionError
attempt('trace', trace)
attempt('disk', lambda: open({disk!r}, 'rb').read(1) or 1 / 0)
attempt('terminal', lambda: open('/dev/tty') and os.listdir('/dev/pts') != ['ptmx'] or 1 / 0)
attempt('devices', lambda: pathlib.Path('/dev/x').write_text('x'))
for family in (socket.AF_VSOCK, socket.AF_PACKET, socket.AF_ALG, 45):
    attempt(f'family {{family}}', lambda: socket.socket(family, socket.SOCK_DGRAM))
attempt('uevents', lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 15))
attempt('user namespace', lambda: subprocess.run(['unshare', '-U', 'true'], check=True, capture_output=True))
attempt('mounts', lambda: subprocess.run(['unshare', '-Urm', 'true'], check=True, capture_output=True))
libc = ctypes.CDLL(None, use_errno=True)
attempt('memory of its own', lambda: libc.mount(b'x', b'/tmp', b'tmpfs', 0, 0) and 1 / 0)
attempt('mount namespace', lambda: libc.unshare(0x20000) and 1 / 0)
def call(number):
    assert libc.syscall(number, 0, 0, 0, 0, 0) == -1
    if ctypes.get_errno() == 1:
        raise PermissionError
for number in {list(_refused())}:
    attempt(f'system call {{number}}', lambda: call(number))
assert socket.socketpair() and socket.socket(socket.AF_INET6) and socket.if_nameindex()
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as queue:
    size = queue.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    queue.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * size)
    attempt('queue', lambda: queue.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) != size or 1 / 0)
with open('/run/source/number.txt') as file:
    attempt('lease', lambda: fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK))
attempt('score', lambda: open('/proc/self/oom_score_adj', 'w').write('0'))
sent = []
def flood():
    for _ in range(40):
        pair = socket.socketpair()
        sent.append(pair)
        socket.send_fds(pair[0], [b'x'], [0] * 250)
attempt('descriptors in flight', flood)
del sent
os.kill(1, 2)  # SIGINT
attempt('mine', lambda: pathlib.Path('/tmp/x').write_text('x') and pathlib.Path('x').write_text('x'))
print(tried)
{ASK}
"""
        async with agent(project, server, code, workspace={"copy": "task", "readable": ["stop"]}) as workflow:
            root = leftovers(project)[0]
            first = asyncio.create_task(episode(workflow, "first"))
            with await asyncio.to_thread(open, project / "stop", "w"):  # it is there
                (other,) = root.glob("r-*")
                given = await episode(workflow, "second", other=str(other), root=str(root))
            assert given == "['mine']\necho: hi"
            assert not (other / "written").exists()
            await first


@pytest.mark.slow
async def test_many_at_once(project: Path, server: FakeOpenAI) -> None:
    code = f"import json, sys; n = json.load(sys.stdin)['id']; open('number.txt', 'w').write(str(n))\n{ASK}"
    check = "import json, sys; sys.exit(open('number.txt').read() != str(json.load(sys.stdin)['id']))"
    async with agent(project, server, code, verify=verify(check)) as workflow:
        started = time.monotonic()
        given = await asyncio.gather(*(episode(workflow, number) for number in range(6)))
        print(f"6 episodes in {time.monotonic() - started:.1f} s")
    assert [(each["answer"], each["reward"]) for each in given] == [("echo: hi", 1.0)] * 6
    assert not leftovers(project)


async def test_which_workspaces_are_kept(project: Path, server: FakeOpenAI) -> None:
    kept = project / "out/workspaces"
    fails = f"{FIX}; raise SystemExit(3)"
    for keep, code, expected in (("none", fails, 0), ("failed", "", 0), ("all", FIX, 1), ("failed", fails, 2)):
        workspace = {"copy": "task", "keep": keep, "max_kept": 2}
        async with agent(project, server, code, workspace=workspace, verify=FIXED) as workflow:
            if code == fails:
                with pytest.raises(WorkflowError, match="ended with exit code 3"):
                    await episode(workflow)
            else:
                await episode(workflow)
        assert len([*kept.glob("r-0-7-0-0-*")]) == expected
    with pytest.raises(WorkflowError) as raised:
        await outcome(project, server, fails, workspace={"copy": "task", "max_kept": 2})
    assert "workspace is" not in str(raised.value)  # there are enough
    assert [path.read_text() for path in kept.glob("*/number.txt")] == ["2", "2"]


async def test_of_episodes_that_fail_together_no_more_are_kept(project: Path, server: FakeOpenAI) -> None:
    kept, workspace = project / "out/workspaces", {"copy": "task", "max_kept": 2}
    kept.mkdir(parents=True)
    for number in range(10_000):  # so that it takes a while to count the folders
        (kept / f"note-{number}").touch()
    async with agent(project, server, f"{FIX}; raise SystemExit(3)", workspace=workspace) as workflow:
        errors = await asyncio.gather(*(episode(workflow, number) for number in range(6)), return_exceptions=True)
    assert sum("workspace is" in str(error) for error in errors) == len([*kept.glob("r-*")]) == 2


async def test_an_episode_that_cannot_be_kept_has_its_own_error(
    project: Path, server: FakeOpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    (project / "out").mkdir()
    (project / "out/workspaces").touch()
    with pytest.raises(WorkflowError, match="ended with exit code 3"):
        await outcome(project, server, f"{FIX}; raise SystemExit(3)")
    assert "cannot be kept" in caplog.text


def start_python(script: str, folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script], cwd=folder)


async def test_what_a_killed_process_has_left_is_removed(project: Path, server: FakeOpenAI) -> None:
    """Its agents die with it, and the next one that makes workspaces removes the folders."""
    marker = f"orphan-of-{os.getpid()}"
    (project / "agent.py").write_text(DAEMON.format(marker=marker) + "signal.pause()")
    async with agent(project, server, (project / "agent.py").read_text()):
        pass
    script = """
import asyncio
from pathlib import Path
from insitu.config import load_config
from insitu.disk.files import read_rows
from insitu.plugin_api import Builder
async def main():
    async with Builder(load_config(Path("config.yml"))) as builder:
        await (await builder.get_workflow()).ainvoke("hi")
asyncio.run(main())
"""
    with start_python(script, project) as process:
        await until(lambda: bool(alive(marker)), 0.1)
        process.kill()
    await until(lambda: not alive(marker), 0.1)
    (left,) = leftovers(project)
    async with agent(project, server, "print('next')") as workflow:
        assert left not in leftovers(project)
        assert await episode(workflow) == "next"


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"workspace": None, "verify": ["true"]}, "verify needs workspace"),
        ({"workspace": {}}, r"set one of copy \(a folder\) and git"),
        ({"workspace": {"copy": "task", "git": "x"}}, r"set one of copy \(a folder\) and git"),
        ({"workspace": {"copy": "no-such"}}, "workflow.workspace.copy: 'no-such' does not exist"),
        ({"verify_files": "task"}, "verify_files needs verify"),
        ({"verify": ["true"], "verify_files": "no-such"}, "workflow.verify_files: 'no-such' does not exist"),
        ({"workspace": {"copy": "config.yml"}}, "workflow.workspace.copy: .*config.yml is not a folder"),
        ({"verify": ["true"], "verify_files": "config.yml"}, "workflow.verify_files: .*config.yml is not a folder"),
        ({"verify": ["true"], "verify_files": "checks-{id}"}, "workflow.verify_files .*agents would see"),
        ({"verify": ["true"], "verify_files": "."}, "workflow.verify_files .*agents would see"),
        ({"workspace": {"copy": "task", "folder": "/proc/none"}}, "workspace.folder: /proc/none.* cannot be made"),
        ({"workspace": {"copy": "task", "folder": "config.yml"}}, "workspace.folder: .* cannot be made"),
        ({"limits": {"memory": 10_000}}, "`true` cannot be run within workflow.limits"),
        ({"network": "none"}, "network"),
        ({"network": "host", "limits": {"sockets": 9}}, "limits.sockets needs network: model"),
        ({"network": "host", "limits": {"folder_size": "1MiB"}}, "limits.folder_size needs network: model"),
        ({"verify": ["true"], "workspace": {"copy": "task", "result": None}}, r"result: \[solution.py\]"),
        ({"workspace": {"copy": "task", "result": ["../x"]}}, "result has '../x'; allowed: paths in the workspace"),
        ({"workspace": {"copy": "task", "result": [".git/config"]}}, ".git is never taken from an agent"),
        ({"limits": {"memory": "much"}}, "memory"),
        ({"limits": {"memory": 2**64}}, "limits.memory"),
        ({"limits": {"processes": 10**7}}, "limits.processes"),
        ({"limits": {"files": 10**30}}, "limits.files"),
        ({"limits": {"folders": 3}}, "folders"),
    ],
)
async def test_a_wrong_block_is_told(project: Path, server: FakeOpenAI, block: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await outcome(project, server, "", **block)


WITHOUT_CGROUPS = ["unshare", "-Urm", "sh", "-c", 'mount -t tmpfs none /sys/fs/cgroup && exec "$0" "$@"']


def play_under(limit: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Plays an episode of the workflow of a folder, started by a command."""
    script = """
import asyncio
from pathlib import Path
from insitu.config import load_config
from insitu.disk.files import read_rows
from insitu.plugin_api import Builder
async def main():
    async with Builder(load_config(Path("config.yml"))) as builder:
        print(await (await builder.get_workflow()).ainvoke("hi"))
asyncio.run(main())
"""
    return subprocess.run([*limit, sys.executable, "-c", script], cwd=folder, capture_output=True, text=True)


async def test_files_may_be_limited_already(project: Path, server: FakeOpenAI) -> None:
    """As administrators do, below `limits.folder_size`."""
    async with agent(project, server, FIX, verify=FIXED):
        pass
    done = play_under(["sh", "-c", 'ulimit -f 1000000 && exec "$0" "$@"'], project)
    assert done.stdout.startswith("{'answer': 'done', 'reward': 1.0"), done.stderr


@pytest.mark.parametrize(
    ("code", "limits", "said"),
    slow_after(
        1,
        [
            (TAKES.format(each=400), {"memory": "200MiB"}, "MemoryError"),
            (TAKEN, {"memory": "250MiB"}, str(["taken\n"] * 4)),
            (BURNS, {"cpu_seconds": 1}, "SIGKILL"),
        ],
    ),
)
async def test_without_control_groups_each_process_has_the_limits(
    project: Path, server: FakeOpenAI, code: str, limits: dict[str, Any], said: str
) -> None:
    async with agent(project, server, code, limits=limits, timeout=60):
        pass
    done = play_under(WITHOUT_CGROUPS, project)
    assert said in done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_says_whether_limits_are_of_each_process(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    small = ["-o", "finetuning.num_epochs", "1", "-o", "trajectory_builders.episodes.num_generations", "2"]
    command = [sys.executable, "-m", "insitu", "finetune", "grpo.yml", *small, "-o", "finetuning.validation", "null"]
    for start, said in (
        (WITHOUT_CGROUPS, "each process alone: this account cannot make control groups here"),
        ([], "all processes of an episode"),
    ):
        if start or Cgroup.own() is not None:
            done = subprocess.run([*start, *command], cwd=example, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            assert f"  limits: of {said}\n" in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
async def test_a_kernel_that_confines_nothing_is_named(project: Path, server: FakeOpenAI, network: str) -> None:
    async with agent(project, server, FIX, network=network, verify=FIXED):
        pass
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" "$@"'
    done = play_under(["unshare", "-Ur", "sh", "-c", forbid], project)
    if network == "host":
        assert done.stdout.startswith("{'answer': 'done', 'reward': 1.0")
        return
    assert done.stdout == ""
    assert "workflow.network is model, but this system does not let programs be confined" in done.stderr
    assert "(Creating new namespace failed" in done.stderr
    assert "), or set network: host" in done.stderr


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, "needs bubblewrap 0.8 or later, and there is no bwrap on PATH: install it (Debian and Ubuntu: apt-get"),
        ("bubblewrap 0.6.2", "bwrap is bubblewrap 0.6.2: install it (Debian and Ubuntu: apt-get install bubblewrap"),
    ],
)
def test_what_is_missing_is_found_before_anything_is_started(
    example: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, message: str
) -> None:
    (example / "bin").mkdir()
    if version is not None:
        (example / "bin/bwrap").write_text(f"#!/bin/sh\necho {version}\n")
        (example / "bin/bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(example / "bin"))
    for command in ("validate", "finetune"):
        code, _, err = run_project(example, file="grpo.yml", command=command)
        assert code == 2, err
        assert message in err
        assert "set network: host" in err
    assert not (example / "runs").exists()


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("copy: task", "copy: none", "workflow.workspace.copy: 'none' does not exist; looked for {}/none"),
        ("copy: task", "copy: rows.jsonl", "workflow.workspace.copy: {}/rows.jsonl is not a folder"),
        ("copy: task", "copy: task, readable: [lib]", "workflow.workspace.readable: 'lib' does not exist"),
        ("verify_files: checks", "verify_files: x", "workflow.verify_files: 'x' does not exist; looked for {}/x"),
        ("[./agent.py,", "[./agint.py,", "workflow.command: {}/agint.py does not exist"),
        ("[./agent.py,", "[./rows.jsonl,", "workflow.command: {}/rows.jsonl is not executable"),
        ("check.py,", "chek.py,", "workflow.verify: chek.py is not in {}/task or {}/checks"),
        ("[python, -B,", "[pithon, -B,", "workflow.verify: there is no program 'pithon' in the folders of PATH"),
    ],
)
def test_a_path_that_leads_nowhere_is_found_before_anything_is_started(
    example: Path, before: str, after: str, message: str
) -> None:
    text = (example / "grpo.yml").read_text()
    assert before in text
    (example / "grpo.yml").write_text(text.replace(before, after))
    assert refusal(example, file="grpo.yml").startswith(message.replace("{}", str(example)))


async def test_a_service_has_its_own_workspaces(project: Path, server: FakeOpenAI) -> None:
    """On its machine, wherever it was started."""
    async with agent(project, server, FIX + ASK, verify=FIXED):
        pass
    (project / "elsewhere").mkdir()
    served = serving("serve", project / "config.yml", "--port", 0, folder=project / "elsewhere")
    with served as (process, url):
        async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", json={"input": "hi"}) as answer:
            value = (await answer.json())["value"]
        assert (value["answer"], value["reward"]) == ("done\necho: hi", 1.0)
        process.send_signal(signal.SIGTERM)
        process.wait()
    assert not leftovers(project)


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A copy of the example, whose commands find this Python."""
    shutil.copytree(ROOT / "examples/coding", tmp_path / "coding", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "coding"


def history(folder: Path, name: str) -> Any:
    return json.loads((folder / "runs/coding" / name).read_text())


@pytest.mark.slow
def test_the_example_improves(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With half of its episodes."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    fewer = ["-o", "trajectory_builders.episodes.num_generations", "4", "-o", "finetuning.validation.reps", "2"]
    code, out, err = run_project(example, *fewer, file="grpo.yml")
    assert code == 0, out + err
    first, last = history(example, "validation_history.json")
    assert first["avg_reward"] < 0.8
    assert last["avg_reward"] > first["avg_reward"] + 0.1
    assert not first["dropped"]
    assert not last["dropped"]


@pytest.mark.slow
def test_a_killed_run_is_continued_with_the_same_rewards(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    small = ["-o", "workflow.workspace.folder", ".", "-o", "trajectory_builders.episodes.num_generations", "2"]
    small += ["-o", "finetuning.num_epochs", "2"]
    small += ["-o", "finetuning.validation", "null"]
    rewards = []
    for killed in (True, False):
        if killed:
            with start_project(example, *small, file="grpo.yml") as process:
                asyncio.run(until((example / "runs/coding/progress.json").exists, 0.02))
                asyncio.run(until(lambda: [*example.glob("insitu-*/run-*/*[0-9]-*/")], 0.02))
                process.kill()
        code, out, err = run_project(example, *small, *(["--resume"] if killed else []), file="grpo.yml")
        assert code == 0, out + err
        rewards.append([each["avg_reward"] for each in history(example, "reward_history.json")])
        assert not [*example.glob("insitu-*/run-*")]
    assert rewards[0] == rewards[1]
    assert len(rewards[0]) == 2

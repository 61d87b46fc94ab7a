"""OpenEnv's package in its environment: insitu plays and trains on its servers, and its client plays on ours.

The backend, which needs torch, runs in our environment.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import HERE, ROOT, Project, backend, python_of, training
from factories import MODEL, records_of
from processes import ONE_THREAD, wait_until

sys.path.append(str(ROOT / "tests/with_frameworks"))  # has the model that calls a tool

PYTHON = python_of("openenv")
GENERATIONS = 2


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with backend(MODEL, tmp_path_factory.mktemp("backend")) as address:
        yield address


@pytest.fixture
def project(tmp_path: Path) -> Project:
    shutil.copy(HERE / "openenv_games.py", tmp_path)
    return Project("openenv", tmp_path)


def write(project: Project, address: str, workflow: dict[str, Any], rows: list[dict[str, Any]], **general: Any) -> None:
    """Its model hardly changes, as the tests share it."""
    (project.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = {"_type": "jsonl", "file_path": "rows.jsonl"}
    limits = {"max_concurrency": 32, "episode_timeout": 120, "output_dir": "out"}
    file = {
        "general": {"seed": 3},
        "llms": {"student": {"_type": "policy", "max_tokens": 6, "temperature": 1.0}},
        "workflow": {"_type": "openenv", "model": "student", **workflow},
        "eval": {"general": {**limits, "dataset": dataset, **general}, "evaluators": {"reward": {"_type": "openenv"}}},
    }
    project.write(file | training(address, generations=GENERATIONS, learning_rate=1e-9))


def answers_of(project: Project) -> dict[str, Any]:
    """What an evaluation has written, by the id of the row."""
    rows = json.loads((project.folder / "out/workflow_output.json").read_text())
    return {str(row["id"]): row["generated_answer"] for row in rows}


def test_a_class_trains(project: Project) -> None:
    """From the file alone; the reward rises, and each group has one task."""
    rows = [{"question": "", "seed": i} for i in range(8)]
    with backend(MODEL, project.folder) as address:
        write(project, address, {"class": "openenv_games:Digits"}, rows)
        options = ["-o", "finetuning.num_epochs", "6", "-o", "trajectory_builders.episodes.num_generations", "8"]
        options += ["-o", "trainer_adapters.backend.training", "{learning_rate: 1.0e-3, mini_batch_size: 32}"]
        project.run("-m", "insitu", "finetune", "config.yml", *options)
    epochs = records_of(project.folder / "run/training_metrics.jsonl")
    assert epochs[-1]["avg_reward"] > epochs[0]["avg_reward"] + 0.1, [each["avg_reward"] for each in epochs]
    episodes = records_of(project.folder / "run/episodes.jsonl.gz")
    assert Counter(episode["outcome"] for episode in episodes) == {"ok": 6 * 8 * 8}
    asked: dict[str, set[str]] = {}
    for call in records_of(project.folder / "run/calls.jsonl.gz"):
        asked.setdefault(call["episode"].split("/")[2], set()).add(json.dumps(call.get("messages", call)))
    assert len(asked) == 8


def test_many_episodes(address: str, project: Project) -> None:
    """100 episodes at 32 at once: all are counted, with their calls."""
    rows = [{"question": "", "seed": i} for i in range(100)]
    write(project, address, {"class": "openenv_games:Digits"}, rows)
    project.run("-m", "insitu", "eval", "config.yml")
    outcomes = answers_of(project)
    assert len(outcomes) == 100
    assert all(outcome["metrics"] == {"turns": 1.0, "steps": 1.0, "done": 1.0} for outcome in outcomes.values())
    scores = json.loads((project.folder / "out/reward_output.json").read_text())
    rewards = [outcome["reward"] for outcome in outcomes.values()]
    assert [item["score"] for item in scores["eval_output_items"]] == rewards
    assert scores["average_score"] == pytest.approx(sum(rewards) / 100)


def test_tools_of_mcp(project: Project) -> None:
    """A model that has learnt to call a tool looks with that of the environment, and is rewarded for it."""
    from looker import looker

    rows = [{"id": thing, "question": f"What colour is the {thing}?"} for thing in ("sky", "grass", "night")]
    with backend(looker(), project.folder) as address:
        write(project, address, {"class": "openenv_games:Window"}, rows)
        player = "{_type: policy, max_tokens: 100, temperature: 0.01}"
        project.run("-m", "insitu", "eval", "config.yml", "-o", "llms.student", player)
    found = answers_of(project)
    assert found["sky"]["answer"] == "It is blue."
    assert {name: outcome["reward"] for name, outcome in found.items()} == {"sky": 1.0, "grass": 1.0, "night": 0.0}
    assert found["grass"]["step_rewards"] == [1.0, 0.0]


def test_a_server_of_theirs(address: str, project: Project) -> None:
    """What `openenv init` writes: it has one session, an action of one text, and is never done."""
    project.run(PYTHON.with_name("openenv"), "init", "parrot", "--output-dir", project.folder)
    command = [str(PYTHON), "-m", "uvicorn", "parrot.server.app:app", "--port", "{port}"]
    rows = [{"question": "Talk."} for _ in range(6)]
    write(project, address, {"command": command, "max_turns": 3, "reward": "last"}, rows)
    project.run("-m", "insitu", "eval", "config.yml")
    outcomes = answers_of(project).values()
    assert all(outcome["metrics"] == {"turns": 3.0, "steps": 3.0, "done": 0.0} for outcome in outcomes)
    assert all(len(outcome["step_rewards"]) == 3 for outcome in outcomes)
    assert all(outcome["reward"] == min(0.1 * len(outcome["answer"]), 1.0) for outcome in outcomes)


def test_their_client_plays_a_file(tmp_path: Path) -> None:
    rows = [{"id": f"r{i}", "question": f"Say {i}.", "answer": str(i)} for i in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = {"_type": "jsonl", "file_path": "rows.jsonl"}
    config = {"eval": {"general": {"dataset": dataset}, "evaluators": {"right": {"_type": "exact_match"}}}}
    (tmp_path / "config.yml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "insitu", "serve", "config.yml", "--as", "openenv", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            client = [PYTHON, HERE / "openenv_client.py", url, "0", "nothing", "2", "0"]
            done = subprocess.run(client, capture_output=True, text=True, timeout=120)
        finally:
            server.terminate()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        ["Say 0.", {"row_id": "r0"}, False, 1.0, True, 1],
        ["Say 1.", {"row_id": "r1"}, False, 0.0, True, 1],
        ["Say 2.", {"row_id": "r2"}, False, 1.0, True, 1],
        ["Say 0.", {"row_id": "r0"}, False, 1.0, True, 1],
    ]


def test_init_asks_the_server(address: str, project: Project) -> None:
    """What it writes runs as it is; for a class that cannot be served it writes nothing."""

    def init(what: str, code: int = 0) -> str:
        said = project.run("-m", "insitu", "init", "game", "--environment", f"openenv:{what}", code=code)
        return said.replace("\n", " ")

    assert "workflow.class: in openenv_games, 'Dice' does not exist" in init("openenv_games:Dice", 2)
    assert "workflow.class: no module named 'dice'" in init("dice:Dice", 2)
    assert "openenv_games:Say is not an environment class of OpenEnv" in init("openenv_games:Say", 2)
    assert not (project.folder / "game").exists()
    init("openenv_games:Digits")
    adapter = f"{{_type: insitu_trainer_adapter, url: {address}}}"
    changes = ["-o", "trainer_adapters.backend", adapter, "-o", "eval.general.dataset.episodes", "3"]
    project.run("-m", "insitu", "eval", "game/config.yml", *changes, "-o", "eval.general.output_dir", "out")
    assert len(answers_of(project)) == 3


def test_mistakes(address: str, project: Project) -> None:
    """A class that is not there is said by its process, at once."""
    write(project, address, {"class": "openenv_games:Dice"}, [{"question": ""}])
    said = project.run("-m", "insitu", "eval", "config.yml", code=1)
    assert "workflow.class: in openenv_games, 'Dice' does not exist" in said.replace("\n", " ")


# failures

FAULTY = {"class": "openenv_games:Faulty"}
COLUMNS = {name: f"{{{name}}}" for name in ("do", "times")}


def answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=1):
        return True
    return False


@contextmanager
def server_of_others(folder: Path, sessions: int) -> Iterator[str]:
    """The URL of a server that is started again, at the same port, whenever it has ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [PYTHON, "-m", "uvicorn", "openenv_games:app", "--factory", "--port", port]
    variables = os.environ | ONE_THREAD | {"SESSIONS": str(sessions)}
    left = threading.Event()
    started: list[subprocess.Popen[bytes]] = []

    def keep_running() -> None:
        while not left.is_set():
            started.append(subprocess.Popen(command, cwd=folder, env=variables, stderr=subprocess.DEVNULL))
            started[-1].wait()

    keeper = threading.Thread(target=keep_running)
    keeper.start()
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"))
        yield f"http://127.0.0.1:{port}"
    finally:
        left.set()
        while keeper.is_alive():
            started[-1].kill()
            keeper.join(0.1)


@contextmanager
def client_of_others(url: str) -> Iterator[None]:
    """Holds a session of the server."""
    hold = (
        "import asyncio, sys\n"
        "from openenv.core import GenericEnvClient\n"
        "async def hold():\n"
        "    async with GenericEnvClient(base_url=sys.argv[1]) as client:\n"
        "        await client.reset()\n"
        "        print('holds it', flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(hold())\n"
    )
    with subprocess.Popen([PYTHON, "-c", hold, url], stdout=subprocess.PIPE) as client:
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == b"holds it\n"
            yield
        finally:
            client.kill()


def train(project: Project, address: str, workflow: dict[str, Any], *told: str, **general: Any) -> list[dict[str, Any]]:
    """The episodes of an epoch; row n is told the n-th of `told`, DO TIMES. Their counts must add up."""
    rows = []
    for seed, text in enumerate(told):
        do, _, times = text.partition(" ")
        rows.append({"id": seed, "question": "", "seed": seed, "do": do, "times": int(times or 0)})
    write(project, address, {"reset": COLUMNS, **workflow}, rows, **general)
    project.run("-m", "insitu", "finetune", "config.yml")
    episodes = records_of(project.folder / "run/episodes.jsonl.gz")
    assert len({episode["episode"] for episode in episodes}) == len(episodes) == GENERATIONS * len(told)
    (epoch,) = records_of(project.folder / "run/training_metrics.jsonl")
    lost = [episode for episode in episodes if episode["outcome"] != "ok"]
    assert {episode["reward"] for episode in lost} <= {None}
    assert epoch["num_trajectories"] == len(episodes) - len(lost)
    epoch["dropped"].pop("no_variance", None)  # of groups
    assert epoch["dropped"] == Counter(episode["reason"] for episode in lost)
    assert all(each["output"]["metrics"]["done"] == 1 for each in episodes if each not in lost)
    return episodes


def check_lost(episodes: list[dict[str, Any]], rows: set[str], error: str) -> None:
    """Exactly the episodes of these rows have failed."""
    for episode in episodes:
        assert episode["outcome"] == ("failed" if episode["row_id"] in rows else "ok"), episode
        if episode["row_id"] in rows:
            assert episode["reason"] == "backend_error"
            assert error in episode["error"]


def failures(project: Project) -> int:
    return len([*project.folder.glob("failed-*")])


@pytest.mark.parametrize("whose", ["started here", "of others"])
def test_a_server_that_is_killed(whose: str, address: str, project: Project) -> None:
    """In mid-episode: the episode is played again in the server that follows; if that fails as well, it has failed."""
    with server_of_others(project.folder, 2) as url:
        server = FAULTY if whose == "started here" else {"url": url}
        told = ("kill 100", "kill 1", "", "")
        episodes = train(project, address, server, *told, max_concurrency=1, retries=1)
    check_lost(episodes, {"0"}, "the connection was lost in step")
    assert failures(project) == 2 * GENERATIONS + 1


def test_a_server_that_is_killed_under_many_episodes(address: str, project: Project) -> None:
    """Those that it takes along are played again."""
    episodes = train(project, address, FAULTY, *["kill 1", ""] * 2, *[""] * 12, retries=2)
    check_lost(episodes, set(), "")
    assert any(episode["attempt"] for episode in episodes)
    assert failures(project) == 2


@pytest.mark.parametrize("do", ["sleep", "stop"])
def test_a_server_that_hangs(do: str, address: str, project: Project) -> None:
    """It would keep its only session for ever, so it is started again."""
    server = {"class": "openenv_games:FaultyOne", "timeout": 2}
    episodes = train(project, address, server, f"{do} 100", f"{do} 1", "", "", retries=1)
    check_lost(episodes, {"0"}, "no answer to step within timeout: 2 s")
    assert failures(project) == 2 * GENERATIONS + 1


@pytest.mark.parametrize("do", ["sleep", "stop"])
def test_a_server_that_hangs_under_many_episodes(do: str, address: str, project: Project) -> None:
    server = {**FAULTY, "timeout": 2}
    episodes = train(project, address, server, *[f"{do} 1", ""] * 2, *[""] * 12, max_concurrency=8, retries=2)
    check_lost(episodes, set(), "")
    assert failures(project) == 2


def test_a_server_of_others_that_hangs(address: str, project: Project) -> None:
    """It keeps the sessions in which it hangs; the others go on."""
    with server_of_others(project.folder, 2 * GENERATIONS + 1) as url:
        server = {"url": url, "timeout": 2}
        episodes = train(project, address, server, "sleep 100", "", "", "", retries=1)
    check_lost(episodes, {"0"}, "no answer to step within timeout: 2 s")
    assert failures(project) == 2 * GENERATIONS


SLOW = "import threading\n\ndef act(text):\n    threading.Event().wait({})\n    return {{'text': text}}\n"


def test_a_server_that_refuses_sessions(address: str, project: Project) -> None:
    """Another client has one of its two; the episodes take turns, for longer than `patience`."""
    (project.folder / "slow.py").write_text(SLOW.format(0.5))
    with server_of_others(project.folder, 2) as url, client_of_others(url):
        server = {"url": url, "patience": 3, "action": "slow:act"}
        episodes = train(project, address, server, *[""] * 12, max_concurrency=16)
    check_lost(episodes, set(), "")


def test_a_server_without_a_session(address: str, project: Project) -> None:
    """Another client has the only one: every episode fails, and the run says why."""
    with server_of_others(project.folder, 1) as url, client_of_others(url):
        write(project, address, {"url": url, "patience": 1}, [{"question": ""}] * 4, retries=1)
        said = project.run("-m", "insitu", "eval", "config.yml", code=1)
    assert "CAPACITY_REACHED" in said
    assert answers_of(project) == dict.fromkeys("0123")
    scores = json.loads((project.folder / "out/reward_output.json").read_text())
    assert scores["average_score"] is None, scores


def test_a_model_may_be_slower_than_pings(address: str, project: Project) -> None:
    (project.folder / "slow.py").write_text(SLOW.format(4))
    pings = ["--ws-ping-interval", "0.5", "--ws-ping-timeout", "0.5"]
    command = [str(PYTHON), "-m", "uvicorn", "openenv_games:app", "--factory", "--port", "{port}", *pings]
    server = {"command": command, "env": {"SESSIONS": "8"}, "action": "slow:act"}
    check_lost(train(project, address, server, *[""] * 4), set(), "")

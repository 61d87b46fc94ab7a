"""Whole runs with agents that fail, flood, hang, cheat and leave things behind: what is counted, and what is left."""

import json
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml
from factories import digits_project, read_lines, write_rows
from marks import slow_after
from processes import HANGS, run_project, start_project, wait_until
from test_external import running

HOSTILE = """
import http.client, json, os, signal, subprocess, sys, time, urllib.error, urllib.parse, urllib.request

base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
at = urllib.parse.urlsplit(base)
row = json.load(sys.stdin)
asked = {"model": "x", "messages": [{"role": "user", "content": row["question"]["say"]}]}

def status(body, base=base):
    request = urllib.request.Request(base + "/chat/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        return error.code

def refused(code, body, base=base):
    found = status(body, base)
    assert found == code, found

def cut(stream):
    body = json.dumps({**asked, "stream": stream, "max_tokens": 100, "ignore_eos": True})
    connection = http.client.HTTPConnection(at.hostname, at.port)
    connection.request("POST", at.path + "/chat/completions", body)
    if stream:
        connection.getresponse().read(1)
    connection.close()

match row["id"]:
    case 0:
        sys.exit("no")
    case 1:
        sys.stdout.write("x" * 10**7)
    case 2:
        time.sleep(60)
    case 3:
        os.kill(os.getpid(), signal.SIGSEGV)
    case 4:
        refused(400, b"{nope")
        refused(400, b"[]")
    case 5:
        connection = http.client.HTTPConnection(at.hostname, at.port)
        connection.putrequest("POST", at.path + "/chat/completions")
        connection.putheader("Content-Length", "50000000")
        connection.endheaders()
        assert connection.getresponse().status == 413
    case 6:
        refused(401, json.dumps(asked).encode(), base.replace(key, "0" * 24))
    case 7:
        cut(False)
        cut(True)
    case 8:  # it continues in its own session, and asks when the episode has ended
        late = "import os, time, urllib.request\\nwhile os.getppid() == {}: time.sleep(0.1)\\ntime.sleep(1.5)\\n"
        late += "urllib.request.urlopen({!r}, {!r})"
        code = late.format(os.getpid(), base + "/chat/completions", json.dumps(asked).encode())
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=2, stdin=subprocess.DEVNULL)
print("|" + status(json.dumps(asked).encode()))
"""


def test_hostile_episodes_are_told_apart(tmp_path: Path) -> None:
    block = {"_type": "command", "command": [sys.executable, "agent.py"], "timeout": 15, "max_output": 10**6}
    digits_project(tmp_path, workflow=block, rows=12)
    (tmp_path / "agent.py").write_text(HOSTILE)
    twice = ("-o", "trajectory_builders.episodes.num_generations", "2")
    code, _, err = run_project(tmp_path, "--override", "finetuning.num_epochs", "1", *twice)
    assert code == 0, err
    reasons = {0: "exit code 1: no", 1: "printed more than max_output", 2: "within timeout", 3: "by SIGSEGV"}
    episodes = read_lines(tmp_path / "run/episodes.jsonl.gz")[1:]
    assert len(episodes) == 24
    for episode in episodes:
        row = int(episode["row_id"])
        if row in reasons:
            assert episode["outcome"] == "failed"
            assert episode["reason"] == ("timeout" if row == 2 else "workflow_error")
            assert reasons[row] in episode["error"]
            assert episode["calls"] == 0
        else:
            assert episode["outcome"] == "ok"
            cut = 2 if row == 7 else 0  # each is a call, or an attempt if the agent was gone before the answer
            assert episode["calls"] + sum(episode["failed_requests"].values()) == 1 + cut
        assert episode["failed_requests"].keys() <= ({"CancelledError"} if row == 7 else set())
    (metrics,) = read_lines(tmp_path / "run/training_metrics.jsonl")
    dropped = Counter(metrics["dropped"])
    assert (dropped["workflow_error"], dropped["timeout"]) == (6, 2)
    assert metrics["num_trajectories"] == 16
    assert metrics["filtered_trajectories"] + sum(metrics["dropped"].values()) == len(episodes)
    assert metrics["policy_version"] == 1
    calls = read_lines(tmp_path / "run/calls.jsonl.gz")[1:]
    assert {call["messages"][0]["content"] for call in calls if call["error"]} <= {"Row 7"}
    whole = Counter(call["messages"][0]["content"] for call in calls if not call["error"])
    assert {who: n for who, n in whole.items() if who != "Row 7"} == {
        f"Row {row}": 2 for row in (4, 5, 6, 8, 9, 10, 11)
    }
    assert whole["Row 7"] >= 2
    assert "/1/8/" in err  # the late request is told, and was refused
    assert "which has ended" in err


SLEEPER = """
import os, signal, subprocess, sys, time
if not os.path.exists("rehearsed"):  # the row that is played before the first epoch
    open("rehearsed", "w").close()
    sys.exit()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
for pid in (os.getpid(), child.pid):
    open(f"pids/{pid}", "w").write(str(pid))
time.sleep(100)
"""


@pytest.mark.parametrize("signals", slow_after(1, [1, 2]))
def test_an_interrupted_run_leaves_no_program(tmp_path: Path, signals: int) -> None:
    digits_project(tmp_path, workflow={"_type": "command", "command": [sys.executable, "agent.py"]}, rows=2)
    (tmp_path / "agent.py").write_text(SLEEPER)
    (tmp_path / "pids").mkdir()
    programs = tmp_path / "pids"
    with start_project(tmp_path) as process:
        process.wait_until(lambda: len(list(programs.iterdir())) == 16)
        for _ in range(signals):
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        process.communicate(HANGS)
        assert process.wait() == 130
    wait_until(lambda: not any(running(pid) for pid in programs.iterdir()))
    assert len(list(programs.iterdir())) == 16


STUCK = """
import asyncio, contextlib, threading, time
import insitu.collect.episodes, insitu.workflow.event_loop
from insitu.collect.evaluators import BaseEvaluator
from insitu.plugin_api import EvaluatorInfo, register_evaluator, register_function
from insitu.schemas.components import FunctionBaseConfig
from insitu.schemas.evaluation import EvalOutputItem, EvaluatorBaseConfig

insitu.collect.episodes.CANCEL_GRACE_SECONDS = 0.2
insitu.workflow.event_loop.STOP_SECONDS = 2.0
insitu.workflow.event_loop._CLOSE_SECONDS = 0.2


class StuckConfig(FunctionBaseConfig, name="stuck"):
    pass


@register_function(config_type=StuckConfig)
async def stuck(config, builder):
    async def leave(how):
        raise {"exit": SystemExit, "interrupt": KeyboardInterrupt, "generator": GeneratorExit}[how]

    async def run(how: str) -> str:
        open(how, "w").close()
        if how == "block":
            time.sleep(600)
        if how == "sleep":
            await asyncio.to_thread(time.sleep, 600)
        if how == "thread":
            threading.Thread(target=time.sleep, args=(600,)).start()
            await asyncio.sleep(600)
        while how == "swallow":
            with contextlib.suppress(BaseException):
                await asyncio.sleep(600)
        if how != "good":  # in a separate task, as graphs run their nodes
            await asyncio.create_task(leave(how))
        return how

    yield run


class GoodConfig(EvaluatorBaseConfig, name="good"):
    pass


class Good(BaseEvaluator):
    async def evaluate_item(self, item):
        return EvalOutputItem(id=item.id, score=1.0)


@register_evaluator(config_type=GoodConfig)
async def good(config, builder):
    yield EvaluatorInfo(config=config, evaluate_fn=Good().evaluate, description="")
"""


def stuck_project(folder: Path, questions: list[str]) -> None:
    (folder / "stuck_plugin.py").write_text(STUCK)
    write_rows(folder, questions)  # type: ignore[arg-type]
    dataset = {"_type": "jsonl", "file_path": "rows.jsonl"}
    general = {"dataset": dataset, "episode_timeout": 1.0, "output_dir": "out"}
    config = {
        "general": {"plugins": ["stuck_plugin"]},
        "workflow": {"_type": "stuck"},
        "eval": {"general": general, "evaluators": {"good": {"_type": "good"}}},
    }
    (folder / "config.yml").write_text(yaml.safe_dump(config))


def test_agents_that_exit_or_ignore_their_timeout_cost_only_their_episodes(tmp_path: Path) -> None:
    questions = ["good", "exit", "interrupt", "generator", "swallow", "sleep", "good"]
    stuck_project(tmp_path, questions)
    code, _, err = run_project(tmp_path, command="eval")
    assert code == 0, err
    assert "ignores its cancellation; it is left behind" in err
    errors = [record["error"] for record in json.loads((tmp_path / "out/workflow_output.json").read_text())]
    assert [error and error.partition(":")[0] for error in errors] == [
        None,
        "SystemExit",
        "KeyboardInterrupt",
        "GeneratorExit",
        "EpisodeTimeout",
        "EpisodeTimeout",
        None,
    ]


@pytest.mark.parametrize("how", ["swallow", "sleep", "thread", pytest.param("block", marks=pytest.mark.slow)])
def test_one_signal_ends_a_run_whatever_its_agents_do(tmp_path: Path, how: str) -> None:
    stuck_project(tmp_path, [how])
    with start_project(tmp_path, "-o", "eval.general.episode_timeout", "null", command="eval") as process:
        process.wait_until((tmp_path / how).exists)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(HANGS)
        assert process.wait() == 130
    assert err.endswith("interrupted\n")

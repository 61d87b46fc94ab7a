"""Whole runs with programs that fail, flood, hang, cheat and leave things behind: what is counted, and what is left."""

import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from factories import read_lines, write_rows
from processes import HANGS, run_project, start_project, wait_until
from test_external import project, running

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
    case 8:  # it goes on in a session of its own, and asks when the episode has ended
        late = "import time, urllib.request; time.sleep(1.5); urllib.request.urlopen({!r}, {!r})"
        code = late.format(base + "/chat/completions", json.dumps(asked).encode())
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=2, stdin=subprocess.DEVNULL)
print("|" + status(json.dumps(asked).encode()))
"""


def test_hostile_episodes_are_told_apart(tmp_path: Path) -> None:
    block = {"_type": "command", "command": [sys.executable, "agent.py"], "timeout": 15, "max_output": 10**6}
    project(tmp_path, block)
    (tmp_path / "agent.py").write_text(HOSTILE)
    write_rows(tmp_path, [{"say": f"Row {i}"} for i in range(12)])
    code, _, err = run_project(tmp_path, "--override", "finetuning.num_epochs", "1")
    assert code == 0, err
    reasons = {0: "exit code 1: no", 1: "printed more than max_output", 2: "within timeout", 3: "by SIGSEGV"}
    episodes = read_lines(tmp_path / "run/episodes.jsonl")[1:]
    assert len(episodes) == 48
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
    assert (dropped["workflow_error"], dropped["timeout"]) == (12, 4)
    assert metrics["num_trajectories"] == 32
    assert metrics["policy_version"] == 1
    calls = read_lines(tmp_path / "run/calls.jsonl")[1:]
    assert {call["messages"][0]["content"] for call in calls if call["error"]} <= {"Row 7"}
    whole = Counter(call["messages"][0]["content"] for call in calls if not call["error"])
    assert {who: n for who, n in whole.items() if who != "Row 7"} == {
        f"Row {row}": 4 for row in (4, 5, 6, 8, 9, 10, 11)
    }
    assert whole["Row 7"] >= 4
    assert "/1/8/" in err  # the late request is told, and was refused
    assert "which has ended" in err


SLEEPER = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
for pid in (os.getpid(), child.pid):
    open(f"pids/{pid}", "w").write(str(pid))
time.sleep(100)
"""


@pytest.mark.parametrize("signals", [1, 2])
def test_an_interrupted_run_leaves_no_program(tmp_path: Path, signals: int) -> None:
    project(tmp_path, {"_type": "command", "command": [sys.executable, "agent.py"]})
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

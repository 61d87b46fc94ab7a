"""An agent in JavaScript on the official `openai` package of npm, run as a program for each episode, is trained."""

import sys
from pathlib import Path

import pytest
from harness import ROOT, check_answer, check_capture, check_training, train
from looker import COLOURS

AGENT = {"_type": "command", "stdin": "input", "cwd": str(ROOT / "examples/javascript")}


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_in_javascript_is_trained(stream: bool, model: Path, tmp_path: Path) -> None:
    agent = {**AGENT, "command": ["node", "agent.mjs", *["--stream"] * stream]}
    left = train(sys.executable, model, tmp_path, agent, COLOURS, [])
    check_capture(left, stream)
    check_training(left)
    for episode in left.episodes:
        check_answer(left, episode)

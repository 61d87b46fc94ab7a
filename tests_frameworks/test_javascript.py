"""An agent in JavaScript on the official `openai` package of npm, run as a program for each episode, is trained."""

import json
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from looker import COLOURS
from test_frameworks import EPISODES, HERE, ROOT, backend, lines, model, sampled, write_file  # noqa: F401

from insitu.training.store import restore_calls

EXAMPLE = ROOT / "examples/javascript"


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_in_javascript_is_trained(stream: bool, model: Path, tmp_path: Path) -> None:  # noqa: F811
    """Every call is captured as it was sampled, in the episode that made it, and one job moves the version."""
    command = json.dumps(["node", "agent.mjs", *["--stream"] * stream])
    agent = f"{{_type: command, llm: player, stdin: input, cwd: {EXAMPLE}, command: {command}}}"
    with backend(model, tmp_path / "backend") as address:
        file = write_file(tmp_path, "javascript", address, stream)
        text = file.read_text().replace("[witness, javascript_agent]", "[witness]")
        block = f"{{_type: javascript_agent, llm: player, stream: {str(stream).lower()}}}"
        assert block in text
        file.write_text(text.replace(block, agent))
        done = subprocess.run(
            [sys.executable, "-m", "insitu", "finetune", "--config_file", file],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=tmp_path,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": f"{HERE}:{ROOT / 'src'}"},
        )
        assert done.returncode == 0, done.stdout + done.stderr
    (epoch,) = lines(tmp_path / "out/training_metrics.jsonl")
    assert epoch["policy_version"] == 1

    by_episode = defaultdict(list)
    for record in lines(tmp_path / "out/calls.jsonl"):
        by_episode[record["episode"]].append(record)
    calls = {key: restore_calls(records) for key, records in by_episode.items()}
    every = [call for episode in calls.values() for call in episode]
    captured = Counter(sampled(call.prompt_token_ids, call.token_ids, call.logprobs) for call in every)
    log = lines(tmp_path / "backend/samples.jsonl")
    assert captured == Counter(sampled(line["prompt_token_ids"], line["token_ids"], line["logprobs"]) for line in log)

    episodes = lines(tmp_path / "out/episodes.jsonl")
    assert len(episodes) == EPISODES
    for episode in episodes:
        number, _, said = episode["output"].partition(" ")
        assert said == f"It is {COLOURS[episode['row_id']]}."
        first, second = calls[episode["episode"]]
        assert all(number in json.dumps(call.messages) for call in (first, second))
        assert second.messages[1]["tool_calls"] == first.message["tool_calls"]
        assert second.prompt_token_ids[: len(first.prompt_token_ids)] == first.prompt_token_ids

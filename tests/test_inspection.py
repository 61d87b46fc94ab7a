"""`insitu trajectories show`: an episode of a run as its calls, dialogues and rows."""

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from insitu.schemas.episodes import DropReason, Episode, EpisodeKey, ModelCall, Outcome
from insitu.schemas.finetuning import Trajectory
from insitu.training.store import RunStore
from insitu.trajectories.builder import GroupRecord


def call(
    index: int, messages: list[dict[str, Any]], answer: str, tokens: tuple[list[int], list[int]], **other: Any
) -> Any:
    prompt, sampled = tokens
    known = {"functions": ("<workflow>", "play"), "llm": "player", "finish_reason": "stop", "policy_version": 3}
    said = {"role": "assistant", "content": answer}
    logprobs = [-0.5] * len(sampled)
    values = {**known, **other, "message": said, "logprobs": logprobs}
    return ModelCall(index, "m", messages, prompt_token_ids=prompt, token_ids=sampled, **values)


def episode(generation: int, row: str = "r 1", **other: Any) -> Episode:
    first = [{"role": "user", "content": "move?"}]
    second = [*first, {"role": "assistant", "content": "4"}, {"role": "user", "content": "\x1b[31mtaken\nagain"}]
    calls = [
        call(0, first, "4", ([1, 5], [7, 2])),
        call(1, [{"role": "user", "content": "judge"}], "good", ([8], [9]), llm="judge"),
        call(2, second, "5", ([1, 5, 7, 2, 6], [3])),
    ]
    rewards = {"reward": 0.5, "step_rewards": [0.25, 0.0, -1.0]}
    values = {"output": "won", "calls": calls, "seconds": 1.5, **rewards, **other}
    return Episode(EpisodeKey("run_1", 1, row, generation), Outcome.OK, **values)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that goes on: one group is weighed, one was left out, one waits."""
    store = RunStore(tmp_path / "run")
    failed = episode(1)
    failed.outcome, failed.reason, failed.error = Outcome.FAILED, DropReason.TIMEOUT, "EpisodeTimeout: no answer"
    failed.reward, failed.failed_requests = None, {"http 503": 2}
    for row, episodes in (("r 1", [episode(0), failed]), ("r2", [episode(0, "r2")]), ("r3", [episode(0, "r3")])):
        store.append_group(GroupRecord(row, episodes, [], Counter()), 1)
    weighed, left = (
        Trajectory.model_construct(id=e.key.text(), reward=0.5, calls=e.calls, metadata=m)
        for e, m in ((episode(0), {}), (episode(0, "r2"), {"dropped": "no_variance"}))
    )
    store.append_advantages(1, [weighed, left], [(weighed, {0: 0.75, 2: -0.25})])
    store.close()
    return tmp_path / "run"


def show(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "insitu", "trajectories", "show", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_an_episode_that_was_trained(run: Path) -> None:
    shown = show(run, "--row", "r 1", "--generation", 0, "--tokens").stdout
    assert shown.splitlines() == [
        "episode run_1/1/r 1/0/0",
        "  ok  reward 0.5  8 prompt + 4 sampled tokens  policy version 3  1.50 s",
        "  answer: won",
        "",
        "calls",
        "   0  player in <workflow> > play  0.00-0.00 s  2 + 2 tokens  stop  reward 0.25  advantage +0.75  row 1",
        "   1  judge in <workflow> > play  0.00-0.00 s  1 + 1 tokens  stop  reward 0  not trained",
        "   2  player in <workflow> > play  0.00-0.00 s  5 + 1 tokens  stop  reward -1  advantage -0.25  row 1",
        "",
        "dialogue 1",
        "  user: move?",
        "  assistant [call 0]: 4",
        "  user: \\x1b[31mtaken",
        "    again",
        "  assistant [call 2]: 5",
        "",
        "dialogue 2",
        "  user: judge",
        "  assistant [call 1]: good",
        "",
        "rows",
        "  row 1: calls 0, 2; 6 tokens, 3 of them trained",
        "    context: 1 5",
        "    call 0: 7 (-0.500) 2 (-0.500)",
        "    context: 6",
        "    call 2: 3 (-0.500)",
    ]


def test_episodes_that_were_not_trained_say_why(run: Path) -> None:
    failed = show(run, "--episode", "run_1/1/r 1/1/0").stdout
    assert "failed  reward none  timeout" in failed
    assert "EpisodeTimeout: no answer" in failed
    assert "requests without an answer: 2 http 503" in failed
    assert "left out of training: no_variance" in show(run, "--row", "r2").stdout
    waiting = show(run, "--row", "r3").stdout
    assert "its epoch has not been weighed" in waiting
    assert "rows, if all calls were trained\n  row 1: calls 0, 2; 6 tokens, 3 of them trained" in waiting


def test_several_are_listed(run: Path) -> None:
    listed = show(run, "--epoch", 1).stdout.splitlines()
    assert listed[:2] == [
        "run_1/1/r 1/0/0  ok  reward 0.5  3 calls",
        "run_1/1/r 1/1/0  failed  reward none  timeout  3 calls",
    ]
    assert len(listed) == 4


def test_a_line_that_is_being_written_is_not_there_yet(run: Path) -> None:
    for name in ("episodes.jsonl", "calls.jsonl"):
        with (run / name).open("ab") as file:
            file.write(b'{"episode":"run_1/1/r2/0')
    assert len(show(run).stdout.splitlines()) == 4
    assert show(run, "--row", "r2").returncode == 0


def test_a_reader_that_goes_away_is_no_failure(run: Path) -> None:
    command = f"{sys.executable} -m insitu trajectories show '{run}' | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("run_1/1/r 1/0/0  ok  reward 0.5  3 calls\n", "")


def test_what_is_not_there_is_told(run: Path) -> None:
    missing = show(run, "--row", "r9", "--epoch", 1)
    assert missing.returncode == 2
    assert missing.stderr.endswith("has no episode of epoch 1, row_id r9; there is epoch: 1; row_id: r 1, r2, r3\n")
    nothing = show(run / "nowhere")
    assert nothing.returncode == 2
    assert "holds no run: it has no episodes.jsonl" in nothing.stderr
    (run / "episodes.jsonl").write_text('{"format": 99}\n')
    assert "is of format 99; known is 1" in show(run).stderr
    (run / "episodes.jsonl").write_text('{"format":1}\nnonsense\n')
    broken = show(run)
    assert (broken.returncode, "line 2 is no JSON" in broken.stderr) == (1, True)

"""`insitu trajectories export`: the episodes of a run as training data for other tools."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from factories import disk_space, read_lines
from test_inspection import Run, call, episode, failed, show, user

from insitu.schemas.episodes import CandidateStep, Episode

LOOK = {"id": "t", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
TARGETS = {"functions": ["play"], "model": None, "llms": ["player"]}


def play(generation: int, reward: float, answer: str = "5", row: str = "r1") -> Episode:
    """A judge's call, and a conversation with a tool call and an answer of another model in its history."""
    question = [user("help?"), {"role": "assistant", "content": "no", "refusal": None}, user("move?")]
    asked = {"role": "assistant", "content": None, "tool_calls": [LOOK], "refusal": None}
    seen = [*question, asked, {"role": "tool", "content": "blue", "tool_call_id": "t"}]
    judged = {"llm": "judge", "functions": ("<workflow>", "play")}
    calls = [
        call(0, question, asked, ([1, 5], [7, 2]), tools=TOOLS),
        call(1, [user("judge")], "good", ([3], [4]), **judged),
        call(2, seen, answer, ([1, 5, 7, 2, 6], [3]), tools=TOOLS),
    ]
    return episode(generation, row, reward=reward, calls=calls, scores={"score": reward, "other": -reward})


def recorded(folder: Path, *groups: list[Episode]) -> Path:
    made = Run(folder)
    made.store.write("run.json", {"run_id": "run_1", "targets": TARGETS})
    for group in groups:
        made.add(group[0].key.row_id, *group)
        made.weigh({0: 0.5}, *(e for e in group if e.reward is not None))
    made.store.close()
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return recorded(
        tmp_path / "run",
        [play(0, 0.5), play(1, 1.0, "6"), play(2, 0.0, "7"), failed(3, "r1")],
        [play(0, 0.25, row="r2"), play(1, 0.25, row="r2")],
    )


def export(run: Path, kind: str, *options: Any) -> tuple[list[Any], dict[str, int]]:
    """The records written, and the printed counts of what was dropped."""
    target = run.parent / f"{kind}.jsonl"
    done = show(run, "--format", kind, "--output", target, "--force", *options, command="export")
    assert (done.code, done.err) == (0, ""), done.err
    lines = read_lines(target)
    assert done.out.startswith(f"{target}: {len(lines)} records")
    parts = done.out.splitlines()[0].partition("dropped: ")[2].split(", ")
    return lines, {reason: int(number) for part in parts if part for number, reason in [part.split(" ", 1)]}


TEMPLATE_CALL = {**LOOK, "function": {"name": "look", "arguments": {"at": "sky"}}}
PROMPT = [user("help?"), {"role": "assistant", "content": "no"}, user("move?")]
ACTED = [
    {"role": "assistant", "content": "", "tool_calls": [TEMPLATE_CALL]},
    {"role": "tool", "content": "blue", "tool_call_id": "t"},
]


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def origin(generation: int, reward: float, row: str = "r1") -> dict[str, Any]:
    name = f"run_1/1/{row}/{generation}/0"
    return {"run": "run_1", "episode": name, "row_id": row, "reward": reward, "reward_from": None}


def test_preferences_between_episodes(run: Path) -> None:
    """The best with the worst of a row, from the first answer of the trained model on."""
    lines, dropped = export(run, "preferences")
    assert lines == [
        {
            "prompt": PROMPT,
            "chosen": [*ACTED, said("6")],
            "rejected": [*ACTED, said("7")],
            "tools": json.dumps(TOOLS),
            "score_chosen": 1.0,
            "score_rejected": 0.0,
            **origin(1, 1.0),
            "rejected_episode": "run_1/1/r1/2/0",
            "turn": "r1",
        }
    ]
    assert dropped == {"timeout": 1, "equal_scores": 1}
    reversed_, _ = export(run, "preferences", "--reward", "other")
    assert [(e["episode"], e["reward"], e["reward_from"]) for e in reversed_] == [("run_1/1/r1/2/0", 0.0, "other")]


def test_preferences_between_candidates(tmp_path: Path) -> None:
    """What was sampled, not the part of it that was reported; texts if one side was not sampled by a recorded call."""
    calls = [call(k, [user("move?")], f"I move {k}", ([1, 5], [k])) for k in range(3)]
    for each in calls:
        each.tools = TOOLS
    candidates = [CandidateStep("turn 0", k, calls[k].messages, str(k), k / 4, 0, k) for k in range(3)]
    text = [CandidateStep("turn 1", k, "and now?", f"text {k}", float(k), 1) for k in range(2)]
    made = [episode(0, calls=calls, reward=None, candidates=[*candidates, *text]), failed(1, "r 1")]
    made[1].candidates = text
    run = recorded(tmp_path / "run", made)
    lines, dropped = export(run, "preferences")
    assert [(e["chosen"], e["rejected"]) for e in lines] == [
        ([said("I move 2")], [said("I move 0")]),
        ([said("I move 1")], [said("I move 0")]),
        ([said("I move 2")], [said("I move 1")]),
        ([said("text 1")], [said("text 0")]),
    ]
    assert [e["prompt"] for e in lines] == [[user("move?")]] * 3 + [[user("and now?")]]
    assert [e["turn"] for e in lines] == ["turn 0"] * 3 + ["turn 1"]
    assert [("tools" in e, e["reward"]) for e in lines] == [(True, None)] * 3 + [(False, None)]
    assert dropped == {"timeout": 1}
    nothing = show(run, "--format", "preferences", "--pairs", "episodes", "--output", tmp_path / "x", command="export")
    assert nothing.code == 1
    assert nothing.err.startswith(f"failed: nothing of {run} can be written as preferences: ")
    assert not (tmp_path / "x").exists()


def test_kto(run: Path) -> None:
    """Labels by the mean of the row."""
    lines, dropped = export(run, "kto")
    assert [(e["label"], e["completion"][-1]["content"]) for e in lines] == [(True, "6"), (False, "7")]
    assert dropped == {"timeout": 1, "no_variance": 3}
    assert lines[0] == {
        "prompt": PROMPT,
        "completion": [*ACTED, said("6")],
        "label": True,
        "tools": json.dumps(TOOLS),
        **origin(1, 1.0),
    }


def test_sft(run: Path) -> None:
    lines, dropped = export(run, "sft")
    assert [(e["episode"], e["reward"]) for e in lines] == [("run_1/1/r1/1/0", 1.0), ("run_1/1/r2/0/0", 0.25)]
    assert lines[0] == {"messages": [*PROMPT, *ACTED, said("6")], "tools": json.dumps(TOOLS), **origin(1, 1.0)}
    assert dropped == {"timeout": 1, "not_best": 3}
    assert len(export(run, "sft", "--best", 2)[0]) == 4
    assert len(export(run, "sft", "--best", 2, "--min-reward", 0.4)[0]) == 2


def test_the_best_by_a_score_of_which_less_is_better(run: Path) -> None:
    lines, dropped = export(run, "sft", "--reward", "-other", "--best", 1)
    assert [(line["reward"], line["reward_from"]) for line in lines] == [(1.0, "-other"), (0.25, "-other")]
    assert dropped["not_best"] == 3


def test_openai(run: Path) -> None:
    """No keys that the API refuses, arguments as it sends them, and what another model said is not trained."""
    lines, _ = export(run, "openai", "--min_reward", 0.5)
    assert lines == [
        {
            "messages": [
                user("help?"),
                {**said("no"), "weight": 0},
                user("move?"),
                {"role": "assistant", "tool_calls": [LOOK]},
                {"role": "tool", "content": "blue", "tool_call_id": "t"},
                said("6"),
            ],
            "tools": TOOLS,
        }
    ]


def test_parquet(run: Path) -> None:
    """Every episode, with all that its run has recorded."""
    import polars  # the environment with TRL, which uses this file too, has none

    target = run.parent / "episodes.parquet"
    done = show(run, "--format", "parquet", "--output", target, command="export")
    assert done.out == f"{target}: 6 records\n", done.err
    table = polars.read_parquet(target)
    records = read_lines(run / "episodes.jsonl.gz")[1:]
    plain = [c for c in table.columns if c in records[0] and table[c].dtype != polars.String] + ["episode", "reason"]
    assert table.select(plain).to_dicts() == [{c: r[c] for c in plain} for r in records]
    first = table.to_dicts()[0]
    assert json.loads(first["scores"]) == {"score": 0.5, "other": -0.5}
    assert json.loads(first["model_calls"]) == read_lines(run / "calls.jsonl.gz")[1:4]
    assert [m["role"] for m in json.loads(first["conversations"])[0]] == [
        *("user", "assistant", "user", "assistant", "tool", "assistant")
    ]
    assert json.loads(first["advantages"]) == {"0": 0.5}
    assert sorted(p.name for p in run.parent.iterdir()) == ["episodes.parquet", "run"]


def test_a_run_of_an_earlier_release_trains_all_sampled_calls(run: Path) -> None:
    (run / "run.json").write_text("{}")
    lines, _ = export(run, "sft", "--min_reward", 1)
    assert [[m["role"] for m in e["messages"]][-1] for e in lines] == ["assistant", "assistant"]
    assert lines[1]["messages"] == [user("judge"), said("good")]


def test_calls_without_token_ids_are_exported(tmp_path: Path) -> None:
    """A server that sends none is no reason not to train elsewhere."""
    made = play(0, 1.0)
    for each in made.calls:
        each.token_ids = each.prompt_token_ids = each.logprobs = None
    assert len(export(recorded(tmp_path / "run", [made]), "sft")[0]) == 1


def test_images_fit_into_no_text_format(tmp_path: Path) -> None:
    made = play(0, 1.0)
    picture = {"role": "user", "content": [{"type": "text", "text": "this?"}, {"type": "image_url", "image_url": {}}]}
    made.calls = [call(0, [picture], "a cat", ([1], [2]))]
    run = recorded(tmp_path / "run", [made, play(1, 0.5)])
    assert export(run, "sft", "--best", 2)[1] == {"not_text": 1}
    lines, _ = export(run, "openai")
    assert lines[0]["messages"] == [picture, said("a cat")]


def test_equal_pairs_are_written_once(tmp_path: Path) -> None:
    rows = [[play(0, 1.0, "6", row), play(1, 0.0, "7", row)] for row in ("r1", "r2")]
    lines, dropped = export(recorded(tmp_path / "run", *rows), "preferences")
    assert (len(lines), dropped) == (1, {"duplicate_pair": 1})


def refused(run: Path, kind: str, *options: Any, output: Path) -> tuple[Any, str]:
    done = show(run, "--format", kind, "--output", output, *options, command="export")
    assert done.out == ""
    return done.code, done.err


def test_what_cannot_be_written_is_refused_and_leaves_nothing(run: Path) -> None:
    folder = run.parent
    taken, free = folder / "taken.jsonl", folder / "free.jsonl"
    taken.write_text("mine")
    os.mkfifo(pipe := folder / "pipe")
    cases: Iterable[tuple[tuple[Any, ...], Path, str]] = [
        (("sft",), taken, f"error: --output: {taken} exists already; --force replaces it\n"),
        (("sft",), folder, f"error: --output: {folder} is a folder, and is not replaced; give another name\n"),
        (("sft", "--force"), pipe, f"error: --output: {pipe} is no regular file, and is not replaced; give another"),
        (("sft",), folder / "no/x", f"error: --output: the folder {folder / 'no'} does not exist\n"),
        (("kto", "--best", 2), free, "error: --best has no effect with --format kto; it is for sft and openai\n"),
        (("sft", "--epoch", 2), free, f"error: RUN_DIR: {run} has no complete group of epoch 2; available: 1\n"),
        (
            ("sft", "--reward", "taste"),
            free,
            f"error: RUN_DIR: {run} has no scores of 'taste'; available: other, score ",
        ),
        (
            ("sft", "--reward=-taste"),
            free,
            f"error: RUN_DIR: {run} has no scores of '-taste'; available: -other, -score ",
        ),
    ]
    for options, output, problem in cases:
        code, err = refused(run, *options, output=output)
        assert code == 2
        assert err.startswith(problem), err
    before = (run / "episodes.jsonl.gz").read_bytes()
    code, err = refused(run, "sft", "--force", output=run / "episodes.jsonl.gz")
    assert (code, (run / "episodes.jsonl.gz").read_bytes()) == (2, before)
    assert err.startswith(f"error: --output: {run / 'episodes.jsonl.gz'} is a file of a run, which is not replaced")
    code, err = refused(run, "sft", "--min_reward", "nan", output=free)
    assert (code, "'--min_reward': nan cannot be compared; give a number" in err) == (2, True)
    code, err = refused(run, "sft", "--min_reward", 2, output=free)
    assert (code, err) == (
        1,
        f"failed: nothing of {run} can be written as sft: 5 not_best, 1 timeout; the first: run_1/1/r1/3/0: "
        "EpisodeTimeout: no answer\n",
    )
    for kind in ("sft", "parquet"):
        with disk_space(100):
            code, err = refused(run, kind, output=free)
        assert code == 1
        assert "cannot be written: File too large" in err
    assert taken.read_text() == "mine"
    assert pipe.is_fifo()
    assert sorted(p.name for p in folder.iterdir()) == ["pipe", "run", "taken.jsonl"]

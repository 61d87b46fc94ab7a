"""A run's directory: nothing is overwritten, lines are whole, calls come back as they were."""

import asyncio
import dataclasses
import os
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from factories import disk_space, power_failures, read_lines
from hypothesis import given
from hypothesis import strategies as st

from insitu.disk.folder_lock import FolderLock
from insitu.disk.json_files import Block, read_block
from insitu.errors import ConfigError, InsituError
from insitu.runs.files import RUN_FILES
from insitu.runs.records import call_records, episode_record, restore_calls, restore_episode
from insitu.runs.replay import StoredRun
from insitu.runs.store import RewardPlot, RunStore, draw_rewards, reward_figure, set_aside
from insitu.schemas.episodes import CandidateStep, DropReason, Episode, EpisodeKey, EpisodeStatus, ModelCall
from insitu.schemas.finetuning import Trajectory
from insitu.schemas.groups import GroupRecord


def lines(path: Path) -> list[Any]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def call(index: int, messages: list[dict[str, Any]], prompt: list[int], sampled: list[int]) -> ModelCall:
    message = {"role": "assistant", "content": f"answer {index}"}
    logprobs = [-0.5] * len(sampled)
    return ModelCall(
        index, "m", messages, message=message, prompt_token_ids=prompt, token_ids=sampled, logprobs=logprobs
    )


def conversation(turns: int) -> list[ModelCall]:
    calls: list[ModelCall] = []
    messages: list[dict[str, Any]] = []
    tokens: list[int] = []
    for index in range(turns):
        messages = [*messages, {"role": "user", "content": f"question {index}" + "?" * 20}]
        tokens = [*tokens, *range(20)]
        calls.append(call(index, messages, tokens, [7] * 10))
        messages = [*messages, calls[-1].message or {}]
        tokens = tokens + [7] * 10
    return calls


@pytest.mark.parametrize("name", RUN_FILES)
def test_an_earlier_run_is_set_aside_under_the_next_number(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    assert set_aside(folder) is None
    folder.mkdir()
    (folder / "notes.txt").write_text("not a run")
    assert set_aside(folder) is None
    for number in (1, 2, 3):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(f"run {number}")
        assert set_aside(folder) == tmp_path / f"run.{number}"
        assert not folder.exists()
    assert [(tmp_path / f"run.{n}" / name).read_text() for n in (1, 2, 3)] == ["run 1", "run 2", "run 3"]
    assert (tmp_path / "run.1" / "notes.txt").exists()


def test_records_open_with_their_format_and_grow(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "deep" / "run")
    store.append("journal.jsonl", [{"a": 1}])
    store.append("journal.jsonl", [{"a": 2}, {"a": 3}])
    assert lines(store.folder / "journal.jsonl") == [{"format": 2}, {"a": 1}, {"a": 2}, {"a": 3}]
    store.append("training_metrics.jsonl", [{"epoch": 1}])
    assert lines(store.folder / "training_metrics.jsonl") == [{"epoch": 1}]
    store.close()
    with (store.folder / "journal.jsonl").open("ab") as file:
        file.write(b'{"a": 5')  # torn by a crash
    again = RunStore(tmp_path / "deep" / "run")
    again.append("journal.jsonl", [{"a": 4}])
    again.close()
    assert lines(again.folder / "journal.jsonl")[-2:] == [{"a": 3}, {"a": 4}]
    assert len(lines(again.folder / "journal.jsonl")) == 5


def test_whole_files_are_replaced_and_leave_nothing_behind(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.write("best.json", {"epoch": 1, "mean": float("nan")})
    store.write("best.json", {"epoch": 2})
    store.close()
    assert orjson.loads((tmp_path / "best.json").read_bytes()) == {"epoch": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["best.json"]


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.write("best.json", {"epoch": 1})
    with disk_space(1000), pytest.raises(InsituError, match=r"best\.json cannot be written: File too large"):
        store.write("best.json", {"epoch": "2" * 10_000})
    assert orjson.loads((tmp_path / "best.json").read_bytes()) == {"epoch": 1}
    store.close()


def test_a_plot_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    plot = RewardPlot(tmp_path / "reward_plot.png")
    rewards = [{"epoch": 1, "avg_reward": 0.5}]
    with disk_space(100), pytest.raises(InsituError, match=r"reward_plot\.png cannot be written: File too large"):
        asyncio.run(plot.finish(rewards, []))
    assert not [*tmp_path.iterdir()]
    asyncio.run(plot.finish(rewards, []))
    assert (tmp_path / "reward_plot.png").read_bytes().startswith(b"\x89PNG")


def test_scores_of_other_rows_have_a_curve_of_their_own() -> None:
    """As after `--resume` with other held-out rows."""
    scored = [{"epoch": n, "avg_reward": n / 10, "ci95": [0, 1], "scored_by": by} for n, by in enumerate("aabccc")]
    (axes,) = reward_figure([], scored).axes
    curves = [np.asarray(line.get_xydata()).tolist() for line in axes.lines[:3]]
    assert curves == [[[0, 0], [1, 0.1]], [[2, 0.2]], [[3, 0.3], [4, 0.4], [5, 0.5]]]
    assert axes.get_legend_handles_labels()[1] == ["held out, other rows or evaluator", "held out, 95 % CI"]


def test_a_plot_is_drawn_while_a_run_goes_on_unless_it_is_short(tmp_path: Path) -> None:
    path, first, second = tmp_path / "reward_plot.png", {"epoch": 1, "avg_reward": 0.5}, {"epoch": 2, "avg_reward": 0.6}

    async def times_drawn(delay: float) -> list[int]:
        epochs: list[int] = []
        plot = RewardPlot(path, lambda path, rewards, validations: epochs.append(len(rewards)), delay)
        await plot.update([first], [])
        await plot.finish([first, second], [])
        return epochs

    assert asyncio.run(times_drawn(delay=0)) == [1, 2]
    assert asyncio.run(times_drawn(delay=600)) == [2]


def test_a_plot_is_drawn_by_one_thread_which_ends_with_it(tmp_path: Path) -> None:
    """Whatever threads agents block: matplotlib opens its fonts in each that draws."""
    threads, plot = [], RewardPlot(tmp_path / "x.png", lambda *_: threads.append(threading.current_thread()), delay=0)
    may_end = threading.Event()

    async def drawn() -> None:
        for epochs in range(1, 6):
            blocked = asyncio.create_task(asyncio.to_thread(may_end.wait))
            await plot.finish([{"epoch": epoch} for epoch in range(epochs)], [])
        may_end.set()
        await blocked

    asyncio.run(drawn())
    plot.close()
    (thread,) = {*threads}
    thread.join(10)
    assert (len(threads), thread.is_alive()) == (5, False)


def test_a_plot_is_not_drawn_twice_at_the_same_time(tmp_path: Path) -> None:
    """A run that is interrupted while its plot is drawn draws it again at its end."""
    drawing, begun, may_end = [], threading.Event(), threading.Event()

    def watched(path: Path, *records: Any) -> None:
        drawing.append("begin")
        begun.set()
        may_end.wait()
        draw_rewards(path, *records)
        drawing.append("end")

    plot = RewardPlot(tmp_path / "reward_plot.png", watched, delay=0)
    rewards = [{"epoch": 1, "avg_reward": 0.5}]

    async def interrupted() -> None:
        update = asyncio.create_task(plot.update(rewards, []))
        await asyncio.to_thread(begun.wait)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        finish = asyncio.create_task(plot.finish(rewards, []))
        for _ in range(5):  # its thread, if it did not wait, would begin
            await asyncio.to_thread(len, [])
        may_end.set()
        await finish

    asyncio.run(interrupted())
    assert drawing == ["begin", "end"] * 2
    assert [file.name for file in tmp_path.iterdir()] == ["reward_plot.png"]


def test_what_is_written_survives_a_power_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    survives = power_failures(monkeypatch)
    store = RunStore(tmp_path)
    path = store.write("best.json", {"epoch": 1})
    assert survives(path)
    assert survives(tmp_path)
    store.close()


def test_a_run_in_progress_keeps_its_directory(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    store = RunStore(folder)
    used = f"finetuning.output_dir: .*run is in use by process {os.getpid()} on "
    with pytest.raises(ConfigError, match=used):
        RunStore(folder)
    store.write("run.json", {})
    with pytest.raises(ConfigError, match=used):
        set_aside(folder)
    store.close()
    assert set_aside(folder) == tmp_path / "run.1"
    assert [p.name for p in (tmp_path / "run.1").iterdir()] == ["run.json"]


def test_a_run_is_moved_only_after_its_backend_has_ended(tmp_path: Path) -> None:
    """A backend whose run was killed notices it late; until then it writes checkpoints."""
    backend = tmp_path / "run/backend"
    backend.mkdir(parents=True)
    (tmp_path / "run/run.json").write_text("{}")
    lock = FolderLock(backend, "--output_dir")
    with pytest.raises(ConfigError, match=f"run/backend is in use by process {os.getpid()}"):
        set_aside(tmp_path / "run", wait=0.1)
    ending = threading.Timer(0.2, lock.release)
    ending.start()
    assert set_aside(tmp_path / "run") == tmp_path / "run.1"
    ending.join()


def test_a_directory_behind_a_link_can_be_used_again(tmp_path: Path) -> None:
    (tmp_path / "large/disk").mkdir(parents=True)
    link = tmp_path / "run"
    link.symlink_to(tmp_path / "large/disk/run")
    for number in (0, 1, 2):
        moved = set_aside(link)
        assert moved == (tmp_path / f"large/disk/run.{number}" if number else None)
        store = RunStore(link)
        store.write("run.json", {"number": number})
        store.append("journal.jsonl", [{"a": 1}])
        store.close()
        assert link.is_symlink()
        assert lines(link / "journal.jsonl") == [{"format": 2}, {"a": 1}]


def test_a_changed_working_directory_does_not_move_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = RunStore(Path("run"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.append("journal.jsonl", [{"a": 1}])
    store.write("best.json", {})
    store.close()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["best.json", "journal.jsonl"]


def test_paths_in_the_directory_are_kept_relative_to_it(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "run")
    inside = tmp_path / "run/backend/checkpoints/step_000001"
    assert store.relative(str(inside)) == "backend/checkpoints/step_000001"
    for other in (None, "/srv/gpu/step_000001", "relative/step_000001", str(tmp_path / "run.1/step_000001")):
        assert store.relative(other) == other
    store.close()


def test_the_choices_of_a_request_share_its_prompt() -> None:
    """And so do not multiply what it costs; another request with the same prompt is computed again."""
    messages = [{"role": "user", "content": "?"}]
    choices = [call(index, messages, [1, 2, 3], [7] * 2) for index in range(4)]
    choices[1].choice = choices[3].choice = 1
    other = [call(index, messages, tokens, [7]) for index, tokens in ((4, [1]), (5, [1, 2]))]
    other[1].choice = 1  # of the second of two prompts in a request
    record = episode_record(Episode(EpisodeKey("r", 1, "row", 0), EpisodeStatus.OK, calls=[*choices, *other]))
    assert (record["calls"], record["prompt_tokens"], record["sampled_tokens"]) == (6, 2 * 3 + 1 + 2, 10)


def test_a_group_is_written_with_all_its_episodes(tmp_path: Path) -> None:
    good = Episode(
        EpisodeKey("r", 2, "row", 0), EpisodeStatus.OK, output={(1, 2): 2**70}, calls=conversation(3), reward=1.0
    )
    good.calls[0].policy_version = 4
    bad = Episode(
        EpisodeKey("r", 2, "row", 1, 1), EpisodeStatus.FAILED, reason=DropReason.TIMEOUT, error="EpisodeTimeout: 1 s"
    )
    kept = Trajectory(id=good.key.text(), reward=1.0, calls=good.calls, trained_calls=[0, 1, 2])
    store = RunStore(tmp_path)
    store.append_group(GroupRecord("row", [good, bad], [kept], Counter({"timeout": 1})), epoch=2)
    first, second = read_lines(tmp_path / "episodes.jsonl.gz")[1:]
    assert first["output"] == {"1,2": 2**70}
    assert (first["episode"], first["calls"], first["prompt_tokens"], first["sampled_tokens"]) == (
        "r/2/row/0/0",
        3,
        150,
        30,
    )
    assert (first["policy_versions"], first["reward"], first["outcome"]) == ([4], 1.0, "ok")
    assert (second["episode"], second["attempt"], second["reason"], second["reward"]) == (
        "r/2/row/1/1",
        1,
        "timeout",
        None,
    )
    [group] = lines(tmp_path / "groups.jsonl")[1:]
    blocks = {name: Block(*block) for name, block in group.pop("blocks").items()}
    assert group == {
        "epoch": 2,
        "row_id": "row",
        "num_episodes": 2,
        "episodes": ["r/2/row/0/0"],
        "rewards": [1.0],
        "dropped": {"timeout": 1},
    }
    assert read_block(tmp_path / "episodes.jsonl.gz", blocks["episodes.jsonl.gz"]) == [first, second]
    assert blocks["calls.jsonl.gz"].end == (tmp_path / "calls.jsonl.gz").stat().st_size
    assert restore_calls(read_lines(tmp_path / "calls.jsonl.gz")[1:]) == good.calls
    store.close()


def test_a_long_dialogue_takes_space_by_its_length_and_not_its_square() -> None:
    sizes = {n: sum(len(orjson.dumps(r)) for r in call_records("e", conversation(n))) for n in (10, 100)}
    assert sizes[100] < 11 * sizes[10]
    records = call_records("e", conversation(100))
    assert max(len(r["messages"]) for r in records) <= 2
    assert max(len(r["prompt_token_ids"]) for r in records) <= 20


@pytest.mark.parametrize("tokens", [True, False])
def test_a_text_prompt_that_continues_another_is_stored_once(tokens: bool) -> None:
    calls: list[ModelCall] = []
    text, ids = "", list[int]()
    for index in range(100):
        text, ids = text + f"question {index}" + "?" * 20, [*ids, *range(20)]
        calls.append(call(index, [{"role": "user", "content": text}], ids, [7]))
        text, ids = text + f" answer {index}\n", [*ids, 7]
    if not tokens:
        calls = [dataclasses.replace(c, prompt_token_ids=None, token_ids=None, logprobs=None) for c in calls]
    records = call_records("e", calls)
    assert records[3]["continues_prompt"] == 2
    assert max(len(r["messages"][0]["content"]) for r in records) < 60
    assert restore_calls(orjson.loads(orjson.dumps(record)) for record in records) == calls


def group_of(row: str, epoch: int = 1) -> GroupRecord:
    played = Episode(EpisodeKey("r", epoch, row, 0), EpisodeStatus.OK, calls=conversation(2), reward=1.0)
    kept = Trajectory(id=played.key.text(), reward=1.0, calls=played.calls, trained_calls=[0, 1])
    return GroupRecord(row, [played], [kept], Counter())


def test_groups_after_the_point_from_which_a_run_continues_are_written_again(tmp_path: Path) -> None:
    with closing(RunStore(tmp_path)) as store:
        store.append_group(group_of("a"), 1)
        sizes = store.sizes()
        store.append_group(group_of("b"), 1)
    os.truncate(tmp_path / "calls.jsonl.gz", sizes["calls.jsonl.gz"] + 5)  # torn by a crash
    assert [group.row_id for group in StoredRun(tmp_path).groups(1)] == ["a"]
    with closing(RunStore(tmp_path)) as store:
        with pytest.raises(InsituError, match=r"calls\.jsonl\.gz exists already; it is not overwritten"):
            store.append_group(group_of("c"), 1)
        store.cut_to(sizes)
        store.append_group(group_of("c"), 1)
    run = StoredRun(tmp_path)
    assert [(group.row_id, len(run.load(group)[0].calls)) for group in run.groups(1)] == [("a", 2), ("c", 2)]
    assert [line["row_id"] for line in read_lines(tmp_path / "episodes.jsonl.gz")[1:]] == ["a", "c"]


texts = st.sampled_from(["a", "b"])
tokens = st.lists(st.integers(0, 1), max_size=2)


@st.composite
def episodes(draw: st.DrawFn) -> list[ModelCall]:
    """Calls that continue an earlier one in their messages, in their tokens, in both or in neither."""
    calls: list[ModelCall] = []
    for index in range(draw(st.integers(0, 6))):
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": draw(texts)} for _ in range(draw(st.integers(0, 2)))
        ]
        prompt: list[int] = draw(tokens)
        if calls and draw(st.booleans()):
            messages = draw(st.sampled_from(calls)).messages + messages
        if calls and draw(st.booleans()):
            earlier = draw(st.sampled_from(calls))
            prompt = [*(earlier.prompt_token_ids or []), *(earlier.token_ids or []), *prompt]
        made = call(index, messages, prompt, draw(tokens))
        made.prompt_token_ids = draw(st.sampled_from([prompt, prompt, prompt, None]))
        made.token_ids = draw(st.sampled_from([made.token_ids, made.token_ids, made.token_ids, None]))
        made.functions = tuple(draw(st.lists(texts, max_size=2)))
        made.tools = draw(st.sampled_from([None, [], [{"type": "function"}]]))
        calls.append(made)
    return calls


@given(episodes())
def test_calls_come_back_as_they_were(calls: list[ModelCall]) -> None:
    stored = [orjson.loads(orjson.dumps(record)) for record in call_records("e", calls)]
    assert restore_calls(stored) == calls


def test_episodes_come_back_with_their_candidates() -> None:
    """The prompt of a candidate is stored with the call that sampled it, and only there."""
    calls = conversation(3)
    sampled = CandidateStep("t", 0, calls[2].messages, "answer 2", 0.5, turn_index=1, call=2)
    reported = CandidateStep("t", 1, "question", "no", None)
    made = Episode(
        EpisodeKey("run/1", 2, "row/3", 4, 1),
        EpisodeStatus.FAILED,
        output={"a": 1},
        calls=calls,
        reason=DropReason.TIMEOUT,
        error="late",
        seconds=1.5,
        reward=-1.0,
        step_rewards=[0.0, 0.0, -1.0],
        rewarded_functions=["play"],
        scores={"score": None},
        reasoning=["why"],
        failed_requests={"http 503": 1},
        candidates=[sampled, reported],
        source="run/0/1/row/3/4/1",
    )
    record = orjson.loads(orjson.dumps(episode_record(made)))
    assert ["prompt" in candidate for candidate in record["candidates"]] == [False, True]
    assert restore_episode(record, calls) == made
    plain = Episode(EpisodeKey("r", 1, "row", 0), EpisodeStatus.OK)
    assert not episode_record(plain).keys() & {"candidates", "source"}
    assert restore_episode(episode_record(plain), []) == plain


def test_a_full_disk_is_told_by_the_name_of_the_file(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "run")
    (tmp_path / "run" / "journal.jsonl").symlink_to("/dev/full")
    with pytest.raises(InsituError, match=r"run/journal\.jsonl cannot be written: No space left on device"):
        store.append("journal.jsonl", [{"episode": "x"}])
    store.close()

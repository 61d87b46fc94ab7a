"""`insitu view`: the pages of runs as JSON, from real files, while they grow, when they are damaged."""

import asyncio
import gzip
import hashlib
import json
import os
import pty
import random
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import processes
import pytest
from factories import MODEL, recorded_run
from marks import slow_after, slow_but
from test_inspection import Run, call, episode, failed, user
from waiting import until

from insitu.runs.files import INDEX
from insitu.runs.records import RunProgress
from insitu.view.run_pages import OpenedFolder
from insitu.view.server import HEADERS, ViewServer
from insitu.wire.http_access import AccessPolicy

SCRIPT = "<script>alert(1)</script>"


class Page:
    """A client of a server."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def get(self, path: str, /, **query: Any) -> Any:
        """What a path below /api answers, when everything is indexed."""
        body: dict[str, Any] = {}

        async def indexed() -> bool:
            nonlocal body
            answer = await self.client.get(f"/api/{path}", params=query)
            assert answer.status_code == 200, answer.text
            body = answer.json()
            return "indexed" not in body or body["indexed"]["groups"] == body["indexed"]["of"]

        await until(indexed)
        return body

    async def error(self, path: str, /, **query: Any) -> tuple[int, str]:
        answer = await self.client.get(f"/api/{path}", params=query)
        return answer.status_code, answer.json()["error"]["message"]

    async def groups(self, run: str = ".", **query: Any) -> list[tuple[int, str]]:
        return [(each["epoch"], each["row_id"]) for each in (await self.get("groups", run=run, **query))["groups"]]

    async def episodes(self, run: str = ".", **query: Any) -> list[str]:
        """The names after the run's id."""
        found = (await self.get("episodes", run=run, **query))["episodes"]
        return [each["episode"].partition("/")[2] for each in found]


@asynccontextmanager
async def shown(folder: Path, access: AccessPolicy | None = None) -> AsyncIterator[Page]:
    """A server of a folder, on a port."""
    async with (
        ViewServer(OpenedFolder(folder), access).listening("127.0.0.1", 0) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        yield Page(client)


def of_epoch(epoch: int, *episodes: Any) -> list[Any]:
    return [replace(each, key=each.key._replace(epoch=epoch)) for each in episodes]


def write_run(folder: Path) -> Run:
    """Writes epoch 1 (a trained group, one left out, one with a failed member) and part of epoch 2."""
    made = Run(folder, avg_reward=0.25, tokens=12, dropped={"no_variance": 2}, seconds={"collect": 1.5, "train": 0.5})
    settings = {"run_id": "run_1", "credit": "step", "discount": 0.5, "targets": {"llms": ["player"]}}
    made.store.write("run.json", {**settings, "advantages": {"baseline": "mean", "scale": "none", "epsilon": 1e-6}})
    made.add("r 1", episode(0), failed(1, "r 1", -1.0, attempt=2))
    made.add("r2", episode(0, "r2"), episode(1, "r2"))
    made.add("r/10", episode(0, "r/10"), failed(1, "r/10"))
    made.weigh({0: 0.75, 2: -0.25}, episode(0))
    made.weigh({0: -0.75, 2: -0.75}, failed(1, "r 1", -1.0, attempt=2))
    made.weigh({}, episode(0, "r2"), episode(1, "r2"), dropped="no_variance")
    made.weigh({}, episode(0, "r/10"), dropped="single_member")
    made.add("r 1", *of_epoch(2, episode(0), episode(1)))
    return made


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that no test changes."""
    folder = tmp_path_factory.mktemp("view") / "run"
    made = write_run(folder)
    checkpoint = folder / "backend/checkpoints/step_000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    made.store.close()
    return folder


@pytest.fixture
async def page(recorded: Path) -> AsyncIterator[Page]:
    async with shown(recorded) as page:
        yield page


async def test_the_list_of_runs(recorded: Path, tmp_path: Path) -> None:
    recorded_run(tmp_path / "deep/trained", [0.25, 0.75], [1.0, 1.0])
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/run.json").write_text("{")
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation/workflow_output.json").write_text("[]")
    (tmp_path / "linked").symlink_to(recorded)
    async with shown(tmp_path) as page:
        answer = await page.get("runs")
    assert answer["folder"] == str(tmp_path)
    damaged, trained = answer["runs"]
    assert (trained["run"], trained["name"], trained["last_score"]) == ("deep/trained", "trained", 1.0)
    assert (trained["first_score"], trained["best_score"], trained["best_epoch"]) == (0.5, 1.0, 1)
    assert trained["scores"] == [[0, 0.5], [1, 1.0]]
    assert damaged["run"] == "damaged"
    assert "run.json is not JSON" in damaged["problems"][0]
    async with shown(recorded) as page:
        [line] = (await page.get("runs"))["runs"]
    assert (line["run"], line["name"], line["tokens"], line["seconds"]) == (".", "run", 12, 2.0)
    assert line["rewards"] == [[1, 0.25]]


@pytest.mark.parametrize(("beside", "seconds"), [({}, 7.0), ({"beside": True}, 2.0)])
async def test_a_validation_beside_an_epoch_takes_no_time_of_its_own(
    recorded: Path, tmp_path: Path, beside: dict[str, bool], seconds: float
) -> None:
    run = shutil.copytree(recorded, tmp_path / "run")
    validation = {"epoch": 0, "policy_version": 0, "avg_reward": 0.5, "num_examples": 9, "ci95": [0, 1], "seconds": 5.0}
    (run / "validation_history.json").write_text(json.dumps([validation | beside]))
    async with shown(run) as page:
        [line] = (await page.get("runs"))["runs"]
    assert line["seconds"] == seconds


async def test_the_directory_of_an_evaluation_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "workflow_output.json").write_text("[]")
    async with shown(tmp_path) as page:
        answer = await page.get("runs")
        assert (answer["runs"], "is the directory of an evaluation" in answer["note"]) == ([], True)
        assert (await page.error("run"))[0] == 404


async def test_more_runs_than_indexes_are_kept(tmp_path: Path) -> None:
    names = [f"run{number}" for number in range(12)]
    for name in names:
        write_run(tmp_path / name).store.close()
    async with shown(tmp_path) as page:
        found = await asyncio.gather(*(page.get("episodes", run=name) for name in names * 3))
        assert [each["total"] for each in found] == [8] * len(found)


async def test_a_folder_may_be_empty_and_runs_may_come(tmp_path: Path) -> None:
    async with shown(tmp_path) as page:
        assert (await page.get("runs"))["runs"] == []
        assert await page.error("run", run="later") == (404, f"{tmp_path} holds no run 'later'; available: none yet")
        write_run(tmp_path / "later").store.close()
        assert (await page.get("run", run="later"))["summary"]["run_id"] == "run_1"
        assert await page.groups("later")


async def test_a_run(page: Page, recorded: Path) -> None:
    answer = await page.get("run")
    assert answer["summary"]["status"] == "unknown"
    assert answer["epochs"] == [json.loads((recorded / "training_metrics.jsonl").read_text())]
    assert answer["dropped"] == {"no_variance": 2}
    assert (answer["credit"], answer["discount"], answer["config"]) == ("step", 0.5, None)


async def test_the_lists_of_groups_and_episodes(page: Page) -> None:
    assert await page.groups() == [(1, "r 1"), (1, "r2"), (1, "r/10"), (2, "r 1")]
    assert await page.groups(epoch=1, sort="row") == [(1, "r 1"), (1, "r/10"), (1, "r2")]
    assert await page.groups(sort="mean", descending=1, limit=2, offset=1) == [(1, "r/10"), (2, "r 1")]
    assert await page.groups(row="r 1") == [(1, "r 1"), (2, "r 1")]
    first = (await page.get("groups", limit=1))["groups"][0]
    assert first["rewards"] == [0.5, -1.0]
    assert (first["mean"], first["num_episodes"]) == (-0.25, 2)
    assert first["std"] == pytest.approx(1.0606601717798212)  # statistics.stdev
    left_out = {row["row_id"]: row["dropped"] for row in (await page.get("groups", epoch=1))["groups"]}
    assert left_out == {"r 1": {}, "r2": {"no_variance": 2}, "r/10": {"single_member": 1, "timeout": 1}}
    assert (await page.groups(sort="dropped", descending=1))[:2] == [(1, "r2"), (1, "r/10")]
    assert await page.episodes(epoch=1, row="r2") == ["1/r2/0/0", "1/r2/1/0"]
    assert await page.episodes(min_reward=-2, max_reward=0) == ["1/r 1/1/2"]
    assert (await page.episodes(sort="reward"))[0] == "1/r 1/1/2"
    assert (await page.episodes(sort="reward", descending=1))[-1] == "1/r/10/1/0", "absent values come last"
    assert (await page.get("episodes", limit=0))["total"] == 8


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ("failed", ["1/r 1/1/2", "1/r/10/1/0"]),
        ("timeout", ["1/r 1/1/2", "1/r/10/1/0"]),
        ("trained", ["1/r 1/0/0", "1/r 1/1/2"]),
        ("no_variance", ["1/r2/0/0", "1/r2/1/0"]),
        ("dropped", ["1/r2/0/0", "1/r2/1/0", "1/r/10/0/0", "1/r/10/1/0"]),
        ("not trained yet", ["2/r 1/0/0", "2/r 1/1/0"]),
        ("unknown", []),
    ],
)
async def test_episodes_by_outcome(page: Page, outcome: str, expected: list[str]) -> None:
    """As `insitu trajectories show --outcome` selects them."""
    assert await page.episodes(outcome=outcome) == expected


@pytest.mark.parametrize(
    ("path", "query", "status", "message"),
    [
        (
            "groups",
            {"sort": "x; DROP TABLE groups"},
            400,
            "sort is 'x; DROP TABLE groups'; one of recorded, epoch, row",
        ),
        ("groups", {"epoch": "one"}, 400, "epoch is 'one'; expected an integer"),
        ("groups", {"epoch": "9" * 30}, 400, "epoch is '999999999999999999999999999999'; expected an integer"),
        ("groups", {"limit": "-1e3"}, 400, "limit is '-1e3'; expected an integer"),
        ("episodes", {"min_reward": "much"}, 400, "min_reward is 'much'; expected a number"),
        ("group", {"epoch": "1"}, 400, "row is missing"),
        ("group", {"epoch": "1", "row": "r9"}, 404, "has no row 'r9'; available: r 1, r2, r/10"),
        ("group", {"epoch": "7", "row": "r2"}, 404, "has no group of epoch 7; available: 1, 2"),
        ("episode", {}, 400, "episode is missing"),
        ("episode", {"episode": "run_1/1/r2/7/0"}, 404, "has no episode 'run_1/1/r2/7/0'; similar: run_1/1/r2/"),
        ("episode", {"episode": "run_1/1/r9/7/0"}, 404, "has no episode 'run_1/1/r9/7/0'; similar: run_1/1/r"),
        ("run", {"run": "../run"}, 404, "holds no run '../run'; available: ."),
        ("run", {"run": "/etc"}, 404, "holds no run '/etc'; available: ."),
        ("events", {"run": "x"}, 404, "holds no run 'x'; available: ."),
        ("nothing", {}, 404, "GET /api/nothing"),
    ],
)
async def test_what_does_not_exist(page: Page, path: str, query: dict[str, str], status: int, message: str) -> None:
    found, text = await page.error(path, **query)
    assert (found, message in text) == (status, True), text


async def test_a_group(page: Page) -> None:
    answer = await page.get("group", epoch=1, row="r 1")
    first, second = answer["episodes"]
    assert (first["episode"], first["status"], first["advantage"]) == ("run_1/1/r 1/0/0", "trained", 1.25 / 3)
    assert (second["reason"], second["reward"], second["outcome"]) == ("timeout", -1.0, "failed")
    assert [(each["role"], each["call"], each["conversation"]) for each in first["dialogue"]] == [
        *[("user", None, 1), ("assistant", 0, 1), ("user", None, 1), ("assistant", 2, 1)],
        *[("user", None, 2), ("assistant", 1, 2)],
    ]
    assert [each["epoch"] for each in answer["epochs"]] == [1, 2]
    assert (answer["previous"], answer["next"]) == (None, {"epoch": 1, "row_id": "r/10"})
    assert answer["problems"] == []
    dropped = (await page.get("group", epoch=1, row="r/10"))["episodes"]
    assert [each["dropped"] for each in dropped] == ["single_member", "timeout"]


async def test_an_episode(page: Page) -> None:
    answer = await page.get("episode", episode="run_1/1/r 1/0/0")
    assert answer["record"]["output"] == "won"
    assert answer["training"] == "trained with 2 of 3 calls"
    assert [[message["call"] for message in each] for each in answer["conversations"]] == [
        [None, 0, None, 2],
        [None, 1],
    ]
    first, judge, last = answer["calls"]
    assert (first["llm"], first["functions"], first["trained"]) == ("player", ["<workflow>", "play"], True)
    assert (first["advantage"], last["advantage"], judge["advantage"]) == (0.75, -0.25, None)
    assert (first["step_reward"], judge["step_reward"], judge["tokens"]) == (0.25, None, [])
    assert [(token["id"], token["logprob"]) for token in first["tokens"]] == [(7, -0.5), (2, -0.5)]
    assert all(isinstance(token["text"], str) for token in first["tokens"])
    assert (answer["previous"], answer["next"]) == (None, "run_1/1/r 1/1/2")
    assert (answer["next_group"], answer["next_epoch"]) == ("run_1/1/r/10/0/0", "run_1/2/r 1/0/0")
    last_of_group = await page.get("episode", episode="run_1/1/r 1/1/2")
    assert last_of_group["next"] == "run_1/1/r/10/0/0"
    assert (await page.get("episode", episode="run_1/1/r/10/0/0"))["previous"] == "run_1/1/r 1/1/2"
    assert (await page.get("episode", episode="run_1/2/r 1/1/0"))["training"].startswith("not trained yet")


async def test_whatever_texts_and_names_hold_is_shown_as_it_is(tmp_path: Path) -> None:
    odd = [SCRIPT, "../../etc/passwd", "r?a=1&b=2#c", "zwölf 十二 \x00\x1b[31m", "1/2/3/4", "a'b\"c"]
    made = Run(tmp_path)
    for row in odd:
        asked = [{**user(f"{SCRIPT} {row}"), "name": row}]
        made.add(row, episode(0, row, output=SCRIPT, calls=[call(0, asked, SCRIPT, ([1], [2]))]))
    made.store.close()
    async with shown(tmp_path) as page:
        assert sorted(await page.groups()) == sorted((1, row) for row in odd)
        for row in odd:
            answer = await page.get("episode", episode=f"run_1/1/{row}/0/0")
            [[asked, said]] = answer["conversations"]
            assert (asked["content"], asked["name"]) == (f"{SCRIPT} {row}", row)
            assert said["content"] == answer["record"]["output"] == SCRIPT
            assert (await page.get("group", epoch=1, row=row))["episodes"][0]["row_id"] == row


async def test_lines_that_are_appended_are_seen_and_a_run_that_was_cut_is_read_anew(tmp_path: Path) -> None:
    made = write_run(tmp_path / "run")
    sizes = made.store.sizes()
    async with shown(tmp_path) as page:
        assert len(await page.episodes("run")) == 8
        made.add("new", *of_epoch(2, episode(0, "new")))
        with (tmp_path / "run/groups.jsonl").open("ab") as file:
            file.write(b'{"epoch": 2, "torn')
        assert (await page.groups("run"))[-1] == (2, "new")
        assert (await page.get("run", run="run"))["problems"][1:] == []
        made.store.close()
        again = Run(tmp_path / "run", epoch_over=False)
        again.store.cut_to(sizes)  # as --resume does
        assert (await page.groups("run"))[-1] == (2, "r 1")
        again.add("other", *of_epoch(2, episode(0, "other"), episode(1, "other")))
        again.add("another", *of_epoch(2, episode(0, "another"), episode(1, "another")))
        assert (await page.groups("run"))[4:] == [(2, "other"), (2, "another")], "the file is longer than before"
        assert len(await page.episodes("run")) == 12
        again.store.append("training_metrics.jsonl", [{"epoch": 2, "job": "failed"}])
        assert len(await page.episodes("run", outcome="job failed")) == 6
        again.store.close()
        (tmp_path / "run").rename(tmp_path / "run.1")
        write_run(tmp_path / "run").store.close()  # as a new run with the same output_dir does
        assert len(await page.episodes("run")) == 8
        assert len(await page.episodes("run.1")) == 12


def damage_line(path: Path, number: int) -> None:
    lines = path.read_bytes().split(b"\n")
    lines[number] = b"\x00" * len(lines[number])
    path.write_bytes(b"\n".join(lines))


async def test_a_damaged_file_hides_what_is_damaged_only(tmp_path: Path) -> None:
    write_run(tmp_path).store.close()
    groups = [json.loads(line) for line in (tmp_path / "groups.jsonl").read_text().splitlines()[1:]]
    offset, size = groups[1]["blocks"]["episodes.jsonl.gz"]
    episodes = bytearray((tmp_path / "episodes.jsonl.gz").read_bytes())
    episodes[offset : offset + size] = bytes(size)
    (tmp_path / "episodes.jsonl.gz").write_bytes(episodes)
    calls = (tmp_path / "calls.jsonl.gz").read_bytes()
    (tmp_path / "calls.jsonl.gz").write_bytes(calls[:-10])
    damage_line(tmp_path / "advantages.jsonl", 1)
    metrics = (tmp_path / "training_metrics.jsonl").read_text()
    (tmp_path / "training_metrics.jsonl").write_text("[]\n" + metrics + '{"epoch": {}}\n')
    (tmp_path / "validation_history.json").write_text("7")
    damage_line(tmp_path / "groups.jsonl", 3)
    async with shown(tmp_path) as page:
        assert await page.groups() == [(1, "r 1"), (1, "r2"), (2, "r 1")]
        assert await page.episodes() == ["1/r 1/0/0", "1/r 1/1/2", "2/r 1/0/0", "2/r 1/1/0"]
        answer = await page.get("run")
        assert answer["epochs"][0]["avg_reward"] == 0.25
        problems = "\n".join(answer["problems"])
        for name in ("episodes.jsonl.gz, bytes", "advantages.jsonl, line 2", "groups.jsonl, line 4"):
            assert f"{tmp_path / name}" in problems
        for name in ("training_metrics.jsonl, line 1 is not a JSON object", "validation_history.json"):
            assert f"{tmp_path / name}" in problems
        unreadable = await page.get("group", epoch=1, row="r2")
        assert (unreadable["episodes"], "are damaged" in unreadable["problems"][0]) == ([], True)
        status, message = await page.error("episode", episode="run_1/1/r2/0/0")
        assert (status, "are damaged" in message) == (404, True)
        without_calls = await page.get("episode", episode="run_1/2/r 1/0/0")
        assert (without_calls["calls"], without_calls["record"]["reward"]) == ([], 0.5)
        assert "calls.jsonl.gz has" in without_calls["problems"][0]
        assert (await page.get("episode", episode="run_1/1/r 1/0/0"))["problems"] == []
        assert (await page.get("runs"))["runs"][0]["rewards"] == [[1, 0.25]]


@pytest.mark.parametrize(
    "line",
    slow_after(
        7,
        [
            {"epoch": 1},
            {"epoch": 1, "row_id": "x", "num_episodes": 1, "rewards": [10**400], "dropped": {}, "blocks": {}},
            {"rewards": [{}], "blocks": [0, 1]},
            {"rewards": None},
            {"epoch": 2**70},
            {"dropped": ["x"]},
            {"blocks": {"episodes.jsonl.gz": [-5, 10], "calls.jsonl.gz": [0, 1]}},
            {"blocks": {"episodes.jsonl.gz": [10**12, 10**12], "calls.jsonl.gz": [0, 1]}},
            {"blocks": {"episodes.jsonl.gz": [10, 20], "calls.jsonl.gz": [10**15, 10**15]}},
            {"episodes": 7},
        ],
    ),
)
async def test_lines_of_another_form(tmp_path: Path, line: dict[str, Any]) -> None:
    write_run(tmp_path).store.close()
    lines = (tmp_path / "groups.jsonl").read_text().splitlines()
    if line.keys() != {"epoch"} or line["epoch"] > 1:
        line = json.loads(lines[2]) | line
    (tmp_path / "groups.jsonl").write_text("\n".join([*lines[:2], json.dumps(line), *lines[3:], ""]))
    async with shown(tmp_path) as page:
        assert {(1, "r 1"), (1, "r/10"), (2, "r 1")} <= {*await page.groups(limit=1000)}
        for group in await page.groups():
            await page.get("group", epoch=group[0], row=group[1])
        assert "run_1/1/r 1/0/0".partition("/")[2] in await page.episodes()
        assert (await page.get("run"))["problems"][1:] or (await page.get("group", epoch=1, row="r2"))["problems"]


def damage(folder: Path, chance: random.Random) -> None:
    """Cuts a file, changes bytes of it, or replaces a value in one of its lines by one of another type."""
    path = chance.choice([path for path in sorted(folder.iterdir()) if path.stat().st_size])
    content = bytearray(path.read_bytes())
    kind = "cut" if path.suffix == ".gz" else chance.choice(["cut", "bytes", "value", "value"])
    if kind == "cut":
        del content[chance.randrange(len(content)) :]
    elif kind == "bytes":
        for _ in range(5):
            content[chance.randrange(len(content))] = chance.randrange(256)
    else:
        lines = [content.decode()] if path.suffix == ".json" else content.decode().splitlines()
        number = chance.randrange(len(lines))
        record = json.loads(lines[number])
        record[chance.choice([*record])] = chance.choice([None, -1, 1e308, 2**70, "x", [], {}, [[]], {"a": 1}])
        lines[number] = json.dumps(record)
        content = bytearray("\n".join(lines).encode() + b"\n")
    path.write_bytes(content)


@pytest.mark.parametrize("seed", slow_but((0, 2), range(8)))
async def test_whatever_is_damaged_no_page_breaks(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    for number in range(5):
        made = write_run(tmp_path / f"run{number}")
        made.store.write("progress.json", RunProgress(run_id="run_1", epoch=1).model_dump(mode="json"))
        made.store.record_event("started")
        made.store.close()
        for _ in range(chance.choice([1, 3])):
            with suppress(ValueError):  # what is no JSON any more
                damage(tmp_path / f"run{number}", chance)
    async with shown(tmp_path) as page:
        for run in [line["run"] for line in (await page.get("runs"))["runs"]]:
            await page.get("run", run=run)
            for epoch, row in await page.groups(run):
                await page.get("group", run=run, epoch=epoch, row=row)
            await page.episodes(run, sort="status", outcome="dropped")
            for name in [*await page.episodes(run), "1/r 1/0/0"]:
                query = {"run": run, "episode": f"run_1/{name}"}
                assert (await page.client.get("/api/episode", params=query)).status_code in (200, 404)


async def test_a_file_that_is_being_copied_is_read_when_it_is_there(tmp_path: Path) -> None:
    write_run(tmp_path).store.close()
    path = tmp_path / "episodes.jsonl.gz"
    content = path.read_bytes()
    [_, second, *_] = (tmp_path / "groups.jsonl").read_text().splitlines()[1:]
    there = json.loads(second)["blocks"]["episodes.jsonl.gz"][0] + 10
    path.write_bytes(content[:there])
    async with shown(tmp_path) as page:
        assert await page.episodes() == ["1/r 1/0/0", "1/r 1/1/2"]
        assert await page.groups(text="won") == [(1, "r 1")]
        assert "the file is damaged" in (await page.get("run"))["problems"][-1]
        with path.open("r+b") as file:
            file.seek(0, 2)
            file.write(content[there:])
        assert len(await page.episodes()) == 8
        assert await page.episodes(outcome="no_variance") == ["1/r2/0/0", "1/r2/1/0"]
        assert await page.groups(text="won") == await page.groups()
        assert not [problem for problem in (await page.get("run"))["problems"] if "damaged" in problem]


async def test_other_kinds_of_runs(tmp_path: Path) -> None:
    recorded_run(tmp_path / "original", [0.25, 0.75], [1.0, 1.0])
    (tmp_path / "customizer").mkdir()
    (tmp_path / "customizer/run.json").write_text(json.dumps({"run_id": "c", "num_runs": 2, "max_pairs": 5}))
    (tmp_path / "customizer/final_metrics.json").write_text(json.dumps({"status": "completed"}))
    (tmp_path / "early").mkdir()
    (tmp_path / "early/run.json").write_text("{}")
    for name, content in (("groups.jsonl", {"format": 1}), ("advantages.jsonl", {"format": 1})):
        (tmp_path / "early" / name).write_text(json.dumps(content) + "\n{}\n")
    async with shown(tmp_path) as page:
        assert {each["run"] for each in (await page.get("runs"))["runs"]} == {"original", "customizer", "early"}
        for run in ("original", "customizer", "early"):
            assert await page.groups(run) == []
            assert await page.episodes(run) == []
            assert (await page.error("episode", run=run, episode="x"))[0] == 404
        customizer = await page.get("run", run="customizer")
        assert (customizer["summary"]["run_id"], customizer["final_metrics"]) == ("c", {"status": "completed"})
        problems = (await page.get("run", run="early"))["problems"]
        assert f"{tmp_path}/early/groups.jsonl has format 1; supported: 2" in problems


async def test_a_run_received_from_others_reads_nothing_else_and_does_not_stop_the_page(tmp_path: Path) -> None:
    """Links that leave its folder, FIFOs and devices under the names of its files, and a folder named `²`."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "own.json").write_text(json.dumps({"run_id": "private-1", "config": {"key": "private-2"}}))
    (elsewhere / "own.jsonl").write_text(json.dumps({"epoch": 1, "private": "private-3"}) + "\n")
    runs = tmp_path / "runs"
    for name in ("²", "links", "fifos", "devices"):
        recorded_run(runs / name, [0.25, 0.75], [1.0, 1.0])
    for name in ("run.json", "progress.json", "final_metrics.json", "validation_history.json", "best.json"):
        for run in ("links", "fifos", "devices"):
            (runs / run / name).unlink(missing_ok=True)
        (runs / "links" / name).symlink_to("../../elsewhere/own.json")
        os.mkfifo(runs / "fifos" / name)
        (runs / "devices" / name).symlink_to("/dev/zero")
    for name in ("training_metrics.jsonl", "events.jsonl", "groups.jsonl", ".lock"):
        (runs / "links" / name).symlink_to(elsewhere / "own.jsonl")
        os.mkfifo(runs / "fifos" / name)
    (runs / "links" / INDEX).symlink_to(elsewhere / "database")
    done = await asyncio.to_thread(processes.run, "runs", "list", "runs", "--json", folder=tmp_path)
    listed = [json.loads(line)["run_dir"].rpartition("/")[2] for line in done.stdout.splitlines()]
    assert {"²", "links"} <= {*listed}
    async with shown(runs) as page:
        named = {run["run"] for run in (await page.get("runs"))["runs"]}
        assert {"²", "links"} <= named
        answers = [done.stdout + done.stderr]
        for name in named:
            answers += [json.dumps(await page.get(path, run=name)) for path in ("run", "groups", "episodes")]
    assert "private-" not in "".join(answers)
    assert "is a link that leaves its folder" in "".join(answers)
    assert not (elsewhere / "database").exists()


async def test_a_compressed_block_may_not_fill_the_memory(tmp_path: Path) -> None:
    made = write_run(tmp_path)
    made.store.close()
    bomb = gzip.compress(b"[" + b"[]," * 2**25 + b"0]\n")
    assert len(bomb) < 2**18
    lines = [json.loads(line) for line in (tmp_path / "groups.jsonl").read_text().splitlines()]
    lines[-1]["blocks"]["episodes.jsonl.gz"] = [(tmp_path / "episodes.jsonl.gz").stat().st_size, len(bomb)]
    with (tmp_path / "episodes.jsonl.gz").open("ab") as file:
        file.write(bomb)
    (tmp_path / "groups.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    async with shown(tmp_path) as page:
        await page.get("episodes", run=".")
        problems = (await page.get("run", run="."))["problems"]
    assert any("hold more than 67108864 bytes, which insitu does not write" in each for each in problems)


def contents(folder: Path) -> dict[str, tuple[int, str]]:
    """Times and hashes of all files but the index."""
    return {
        str(path): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest())
        for path in sorted(folder.rglob("*"))
        if path.name != INDEX
    }


async def test_only_the_index_is_written_and_no_lock_is_taken(recorded: Path) -> None:
    before = contents(recorded)
    async with shown(recorded) as page:
        for path in ("runs", "run", "groups", "episodes"):
            await page.get(path)
        await page.get("episode", episode="run_1/1/r 1/0/0")
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            answer = await page.client.request(method, "/api/run")
            assert answer.status_code == 405, method
    assert contents(recorded) == before


async def events(client: httpx.AsyncClient, *runs: str) -> AsyncIterator[dict[str, Any]]:
    """The changes that a server reports, after an empty one when it has begun to look."""
    async with client.stream("GET", "/api/events", params=[("run", run) for run in runs]) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        yield {}
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


async def test_a_change_right_after_the_stream_has_begun_is_reported(tmp_path: Path) -> None:
    """The folder is so large that looking at it for the first time takes a while."""
    for number in range(500):
        (tmp_path / f"r{number}").mkdir()
        (tmp_path / f"r{number}" / "run.json").write_text("{}")
    async with shown(tmp_path) as page, asyncio.timeout(processes.HANGS):
        one = events(page.client, "r7")
        for changes, run in ((one, "r7"), (events(page.client), "r9")):  # the second while the first is watched already
            await anext(changes)
            (tmp_path / run / "run.json").write_text('{"run_id": "r"}')
            assert await anext(changes) == {"run": run, "files": ["run.json"]}


async def test_changes_are_reported(tmp_path: Path) -> None:
    made, other = write_run(tmp_path / "run"), write_run(tmp_path / "other")
    async with shown(tmp_path) as page, asyncio.timeout(60):
        everything, one = events(page.client), events(page.client, "run")
        await anext(everything), await anext(one)
        await page.get("runs")
        other.add("new", episode(0, "new"))
        change = await anext(everything)
        assert (change["run"], "groups.jsonl" in change["files"]) == ("other", True)
        made.add("new", episode(0, "new"))
        change = await anext(one)
        assert (change["run"], "groups.jsonl" in change["files"]) == ("run", True)
        made.store.close()
        while ".lock" not in (await anext(one))["files"]:
            pass
        await one.aclose()
        write_run(tmp_path / "third").store.close()
        while await anext(everything) != {"run": None, "files": []}:
            pass
        await everything.aclose()
    other.store.close()


@pytest.mark.parametrize("lock", ['{"pid": "x", "host": "HOST", "since": ""}', "[" * 200_000])
async def test_an_odd_lock_of_a_run_hides_no_other(tmp_path: Path, lock: str) -> None:
    for name in ("odd", "run"):
        write_run(tmp_path / name).store.close()
    async with shown(tmp_path) as page, asyncio.timeout(processes.HANGS):
        changes = events(page.client)
        await anext(changes)
        (tmp_path / "odd/.lock").write_text(lock.replace("HOST", socket.gethostname()))
        assert [run["run"] for run in (await page.get("runs"))["runs"]] == ["odd", "run"]
        assert await anext(changes) == {"run": "odd", "files": [".lock"]}
        (tmp_path / "run/run.json").write_text("{}")
        while await anext(changes) != {"run": "run", "files": ["run.json"]}:
            pass
        await changes.aclose()


async def test_a_file_whose_name_is_not_text_ends_no_stream_of_changes(tmp_path: Path) -> None:
    write_run(tmp_path).store.close()
    async with shown(tmp_path) as page, asyncio.timeout(60):
        changes = events(page.client)
        await anext(changes)
        (tmp_path / os.fsdecode(b"\xff.txt")).touch()
        assert (await anext(changes))["run"] == "."
        (tmp_path / "run.json").write_text("{}")
        while "run.json" not in (await anext(changes))["files"]:
            pass
        await changes.aclose()


async def test_who_may_look(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    access = AccessPolicy.of("0.0.0.0", "correct horse".replace(" ", "-"), variable="INSITU_VIEW_TOKEN")
    async with shown(recorded, access) as page:
        for path in ("/", "/run", "/episode", "/static/index.html"):
            answer = await page.client.get(path)
            assert answer.status_code == 200, path
        for path in ("runs", "run", "groups", "episodes", "events"):
            assert (await page.error(path))[0] == 401, path
        page.client.headers["authorization"] = "Bearer correct-horse"
        assert (await page.get("runs"))["runs"]
    async with shown(recorded) as page:
        page.client.headers["host"] = "rebound.example"
        assert (await page.error("runs"))[0] == 403
        assert (await page.client.get("/")).status_code == 403
        page.client.headers["host"] = "127.0.0.1"
        page.client.headers["origin"] = "https://rebound.example"
        assert (await page.error("runs"))[0] == 403


@pytest.mark.parametrize(
    "path", ["/static/../server.py", "/static/%2e%2e/server.py", "/static//etc/passwd", "/static/..%2fserver.py", "/x"]
)
async def test_only_the_page_is_served(page: Page, path: str) -> None:
    reader, writer = await asyncio.open_connection(page.client.base_url.host, page.client.base_url.port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    assert answer.split()[1] in ("403", "404")
    assert "ViewServer" not in answer


async def test_every_answer_has_the_headers_that_keep_texts_texts(page: Page) -> None:
    for path in ("/", "/static/index.html", "/api/runs", "/api/run?run=x", "/api/nothing", "/nothing", "/static/x"):
        answer = await page.client.get(path)
        assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS, path


async def test_all_that_the_page_loads_is_its_own(page: Page) -> None:
    html = (await page.client.get("/episode")).text
    assert "/static/" in html
    assert "http://" not in html
    assert "https://" not in html
    assert "<script>" not in html


def test_the_command(recorded: Path) -> None:
    with processes.serving("view", recorded) as (process, address):
        found = httpx.get(f"{address}/api/groups", params={"limit": 1}, timeout=60)
        assert found.json()["total"] == 4
        with httpx.stream("GET", f"{address}/api/events", timeout=60) as watched:
            assert watched.status_code == 200
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(processes.HANGS)
        assert (process.wait(), out, err) == (0, "stopped\n", "")


@pytest.mark.parametrize("folder", ["nowhere", "config.yml"])
def test_a_path_that_is_no_folder(tmp_path: Path, folder: str) -> None:
    (tmp_path / "config.yml").touch()
    done = processes.run("view", folder, folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: FOLDER: {folder} is not a folder\n")


def test_without_a_folder_the_usual_ones_are_shown(tmp_path: Path) -> None:
    write_run(tmp_path / "runs/one").store.close()
    write_run(tmp_path / "else/two").store.close()
    with processes.serving("view", folder=tmp_path) as (_, address):
        found = httpx.get(f"{address}/api/runs", timeout=60).json()
        assert (found["folder"], [run["run"] for run in found["runs"]]) == (str(tmp_path), ["runs/one"])


@pytest.mark.parametrize("on_terminal", [True, False])
def test_the_link_has_the_token_on_a_terminal_only(recorded: Path, on_terminal: bool) -> None:
    ours, theirs = pty.openpty() if on_terminal else os.pipe()
    variables = os.environ | {"INSITU_VIEW_TOKEN": "correct&horse#battery"}
    command = ["-m", "insitu", "view", str(recorded)]
    with open(os.devnull, "r+b") as nothing, os.fdopen(ours, "rb", buffering=0) as output:
        process = processes.Command(command, os.getcwd(), variables, [nothing.fileno(), theirs, nothing.fileno()])
        os.close(theirs)
        line = b""
        while not line.endswith(b"\n"):
            line += output.read(1)
        process.close()
    link = line.decode().split()[-1]
    assert link.startswith("http://127.0.0.1:")
    assert link.partition("/#")[2] == ("token=correct%26horse%23battery" if on_terminal else "")


def test_a_run_that_is_running_and_is_then_killed(tmp_path: Path) -> None:
    """The process that has the lock is gone without a word: the page is told, and shows it."""
    code = f"""if True:
        import sys, time
        from pathlib import Path
        from insitu.runs.records import RunProgress
        from insitu.runs.store import RunStore
        store = RunStore(Path({str(tmp_path / "run")!r}))
        store.write("run.json", {{"run_id": "r"}})
        store.write("progress.json", RunProgress(run_id="r").model_dump(mode="json"))
        print("running", flush=True)
        sys.stdin.read()"""

    async def watch() -> None:
        async with shown(tmp_path) as page, asyncio.timeout(processes.HANGS):
            assert (await page.get("runs"))["runs"][0]["status"] == "running"
            changes = events(page.client)
            await anext(changes)
            process.kill()
            process.wait()
            assert await anext(changes) == {"run": "run", "files": [".lock"]}
            assert (await page.get("runs"))["runs"][0]["status"] == "killed"
            assert (await page.get("run", run="run"))["summary"]["status"] == "killed"
            await changes.aclose()

    command = [processes.forked_python(), "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        asyncio.run(watch())


async def test_an_address_of_no_page_is_a_page(page: Page) -> None:
    answer = await page.client.get("/nothing/at/all")
    assert (answer.status_code, answer.headers["content-type"]) == (404, "text/html")
    assert (await page.client.get("/api/nothing")).headers["content-type"].startswith("application/json")


async def test_episodes_are_found_by_what_they_say(page: Page) -> None:
    assert len(await page.episodes(text="TAKEN")) == 8
    assert await page.episodes(text="taken", epoch=2) == ["2/r 1/0/0", "2/r 1/1/0"]
    assert await page.groups(text="judge") == await page.groups()
    assert await page.episodes(text="assistant") == [], "names of roles are said by nobody"
    found = await page.get("episodes", text="taken")
    assert (found["searched"], found["collected"]) == ({"groups": 4, "of": 4}, {"epoch": 2, "episodes": 2})


async def test_a_run_that_was_cut_is_searched_anew(tmp_path: Path) -> None:
    made = write_run(tmp_path)
    sizes = made.store.sizes()
    made.add("new", *of_epoch(2, episode(0, "new", output="found")))
    made.store.close()
    async with shown(tmp_path) as page:
        assert await page.groups(text="found") == [(2, "new")]
        again = Run(tmp_path, epoch_over=False)
        again.store.cut_to(sizes)  # as --resume does
        assert (await page.get("groups", text="found"))["searched"] == {"groups": 4, "of": 4}
        again.add("other", *of_epoch(2, episode(0, "other")))
        again.add("newest", *of_epoch(2, episode(0, "newest", output="found")))
        assert await page.groups(text="found") == [(2, "newest")]
        again.store.close()


async def test_a_request_of_a_call(page: Page) -> None:
    request = await page.get("request", episode="run_1/1/r 1/0/0", call=0)
    assert request == {"model": "m", "messages": [user("move?")]}
    assert await page.error("request", episode="run_1/1/r 1/0/0", call=9) == (
        404,
        "episode 'run_1/1/r 1/0/0' has no call 9",
    )


async def test_a_long_message_is_sent_in_parts(tmp_path: Path) -> None:
    made, text = Run(tmp_path), "0123456789" * 150_000
    made.add("row", episode(0, "row", calls=[call(0, [user(text)], "ok", ([1], [2]))]))
    made.store.close()
    async with shown(tmp_path) as page:
        answer = await page.get("episode", episode="run_1/1/row/0/0")
        message = answer["conversations"][0][0]
        cut = message["$cut"]["content"]
        digest = hashlib.sha256(text.encode()).hexdigest()
        assert cut == {"path": ["conversations", 0, 0, "content"], "length": len(text), "digest": digest}
        parts, path = message["content"], json.dumps(cut["path"])
        while len(parts) < len(text):
            parts += await page.get("part", episode="run_1/1/row/0/0", path=path, offset=len(parts))
        assert parts == text
        of_group = (await page.get("group", epoch=1, row="row"))["episodes"][0]["dialogue"][0]["$cut"]["content"]
        asked = {"epoch": 1, "row": "row", "path": json.dumps(of_group["path"]), "offset": len(text) - 3}
        assert await page.get("part", **asked) == "789"
        assert (await page.error("part", epoch=1, row="row", path='["nothing"]'))[0] == 400

"""The whole project of a package written for the toolkit, with its own training plugin and with the built-in trainer.

The files are as the toolkit's documents write them: an agent of LangGraph with functions and a group as its tools,
telemetry and a front end, an evaluator that reads what happened. The package writes to its configuration.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from factories import pip_install, read_lines
from fake_openai import FakeOpenAI, encode, logprob
from marks import slow_after, slow_but_at
from processes import run
from tiny_models import save_tiny_model
from toolkit_project import OPTIONS, OWN, PROJECT, ROWS

ROOT = Path(__file__).parents[3]
PACKAGE = Path(__file__).parents[2] / "support/toolkit_plugin"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder that pip has installed the package into."""
    return str(pip_install(PACKAGE, tmp_path_factory.mktemp("plugin")))


@pytest.fixture
def nat(tmp_path: Path, site: str, write: Any) -> Any:
    """Runs a command with the project's file, changed by `parts`."""

    def command(server: FakeOpenAI | None, name: str, parts: dict[str, Any], rows: Any = ROWS) -> tuple[int, str, str]:
        clerk = {"_type": "openai", "model_name": "fake", "base_url": server and server.base_url, "num_retries": 0}
        write({"llms": {"clerk": clerk}, **PROJECT, **parts})
        (tmp_path / "rows.json").write_text(json.dumps(rows))
        done = run(name, "--config_file", "config.yml", folder=tmp_path, PYTHONPATH=site, COLUMNS="200")
        return done.returncode, done.stdout, done.stderr

    return command


@pytest.mark.slow
def test_eval(nat: Any, server: FakeOpenAI, tmp_path: Path) -> None:
    code, out, err = nat(server, "eval", {})
    assert code == 0, err + out
    assert err.count("without effect") == 1
    scored = json.loads((tmp_path / "out/use_output.json").read_text())["eval_output_items"]
    assert [item["reasoning"] for item in scored] == [{"tools": ["look"]}, {"tools": []}]
    offered = [tool["function"]["name"] for tool in server.requests[0]["tools"]]
    assert offered == ["look", "words", "tidy", "shop__price", "shop__products"]


def test_what_can_be_honoured_is(nat: Any, server: FakeOpenAI, tmp_path: Path) -> None:
    """A filter of rows, the statuses after which requests are retried, and whether the model reasons."""
    rows = [
        {"id": number, "question": question, "topic": topic}
        for number, (question, topic) in enumerate(
            [("status 418", "tea"), ("status 500", "tea"), ("plain", "tea"), ("left out", "coffee"), ("cold", "tea")]
        )
    ]
    chosen = {"allowlist": {"field": {"topic": ["tea"]}}, "denylist": {"field": {"question": ["cold"]}}}
    dataset = {"_type": "json", "file_path": "rows.json", "filter": chosen}
    general = {**PROJECT["eval"]["general"], "dataset": dataset}
    address = {"_type": "openai", "model_name": "fake", "base_url": server.base_url}
    clerk = {**address, "num_retries": 2, "retry_on_status_codes": [418], "thinking": False}
    evaluation = {"llms": {"clerk": clerk}, "eval": {**PROJECT["eval"], "general": general}}
    code, out, err = nat(server, "eval", evaluation, rows=rows)
    assert code == 0, err + out
    requests = [body for body in server.requests if "chat_template_kwargs" in body]
    assert Counter(str(body["messages"][-1]["content"]) for body in requests) == {
        "status 418": 3,
        "status 500": 1,
        "plain": 1,
    }
    assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in requests)
    items = json.loads((tmp_path / "out/workflow_output.json").read_text())
    assert [item["id"] for item in items] == [0, 1, 2]


@pytest.mark.parametrize(
    "refused",
    [pytest.param((), marks=pytest.mark.slow), pytest.param(OPTIONS[:1], marks=pytest.mark.slow), OPTIONS],
    ids=["everything", "no token ids", "text"],
)
def test_its_own_training_gets_what_the_endpoint_gives(nat: Any, tmp_path: Path, refused: tuple[str, ...]) -> None:
    """Needing text only, it trains at any endpoint; the tokens of one that sends them arrive as they were sent."""
    with FakeOpenAI(refuses=refused) as server:
        code, _, err = nat(server, "finetune", OWN)
        assert code == 0, err
        again = [set(body) & set(refused) for body in server.requests[-6:]]
    assert again == [set()] * 6  # it is not asked again for what it refuses
    warnings = [line for line in err.splitlines() if "training goes on without" in line]
    assert [kind in "\n".join(warnings) for kind in ("no token ids", "no logprobs")] == [
        key in refused for key in OPTIONS
    ]
    assert len(warnings) == len(refused)

    jobs = [json.loads(line) for line in (tmp_path / "jobs/use.jsonl").read_text().splitlines()]
    assert Counter((job["about"]["id"], job["about"]["topic"]) for job in jobs) == {
        ("a", "tools"): 6,
        ("b", "seeds"): 6,
    }
    for job in jobs:
        said = [item for item in job["episode"] if item["role"] == "assistant"]
        assert [item["role"] for item in job["episode"]][:2] == ["user", "assistant"]
        used = float(job["about"]["id"] == "a")
        assert job["reward"] == pytest.approx(used + len(said[-1]["content"]) % 10 / 100)
        for item in said:
            text = item["content"] or "echo: tool"
            entries = [
                {"token": c, "logprob": logprob(c), "bytes": [ord(c)], "top_logprobs": []}
                for c in (text if "logprobs" not in refused else "")
            ]
            assert item["logprobs"].get("content", []) == entries
            assert item["logprobs"].get("token_ids") == (encode(text) if not refused else None)


@pytest.mark.slow
def test_a_plugin_writes_to_what_it_was_given_and_to_nothing_else(nat: Any, server: FakeOpenAI, tmp_path: Path) -> None:
    """The run has the file's two epochs, whatever its trainer makes of its copy."""
    code, _, err = nat(server, "finetune", OWN)
    assert code == 0, err
    seen = {"curriculum": True, "num_epochs": 9, "targets": ["<workflow>"], "reward": "use", "episodes": 6}
    notes = json.loads((tmp_path / "run/desk.json").read_text())
    assert notes == [{"epoch": 1, "patience": 2, **seen}, {"epoch": 2, "patience": 1, **seen}]


@pytest.mark.slow
@pytest.mark.parametrize(
    "server",
    slow_after(
        1,
        [
            FakeOpenAI(refuses=OPTIONS),
            FakeOpenAI(refuses=OPTIONS[1:]),
            FakeOpenAI(logprobs=False),
            FakeOpenAI(token_ids=False, tokens_as_ids=True),
        ],
    ),
    ids=["text", "no logprobs", "logprobs left out", "no prompt"],
)
def test_the_built_in_trainer_with_an_adapter_that_needs_text(nat: Any, tmp_path: Path, server: FakeOpenAI) -> None:
    """Advantages are estimated all the same; an adapter of tokens would have failed at the first call."""
    built_in = {
        "trajectory_builders": {"desk": {"_type": "insitu_traj_builder", "num_generations": 4}},
        "trainers": {"desk": {"_type": "insitu_trainer"}},
    }
    with server as server:
        code, out, err = nat(server, "finetune", {**OWN, **built_in})
        assert code == 0, err + out
    jobs = [json.loads(line) for line in (tmp_path / "jobs/use.jsonl").read_text().splitlines()]
    assert {job["about"]["row_id"] for job in jobs} == {"b"}
    metrics = [json.loads(line) for line in (tmp_path / "run/training_metrics.jsonl").read_text().splitlines()]
    assert [m["num_trajectories"] for m in metrics] == [8, 8]
    assert all(m["min_reward"] < m["max_reward"] for m in metrics)
    lines = [line for line in read_lines(tmp_path / "run/advantages.jsonl") if line.get("advantages")]
    assert {line["episode"].split("/")[2] for line in lines} == {"b"}
    assert all(any(line["advantages"].values()) for line in lines)


@pytest.mark.slow
def test_the_built_in_trainer_on_a_model(nat: Any, tmp_path: Path) -> None:
    """Only the blocks of training and the llm's address are others."""
    model = save_tiny_model(tmp_path / "model", max_position_embeddings=4096)
    built_in = {
        "llms": {"clerk": {"_type": "policy", "max_tokens": 8}},
        "trajectory_builders": {"desk": {"_type": "insitu_traj_builder", "num_generations": 4}},
        "trainer_adapters": {"desk": {"_type": "insitu_trainer_adapter", "model": str(model)}},
        "trainers": {"desk": {"_type": "insitu_trainer"}},
    }
    code, out, err = nat(None, "finetune", {**OWN, **built_in})
    assert code == 0, err + out
    metrics = [json.loads(line) for line in (tmp_path / "run/training_metrics.jsonl").read_text().splitlines()]
    assert [(m["policy_version"], m["num_trajectories"]) for m in metrics] == [(1, 8), (2, 8)]
    assert all(m["tokens"] > 0 and m["logprob_gap"] < 1e-3 for m in metrics)
    [call, *_] = read_lines(tmp_path / "run/calls.jsonl.gz")[1:]
    assert [tool["function"]["name"] for tool in call["tools"]] == [
        "look",
        "words",
        "tidy",
        "shop__price",
        "shop__products",
    ]


@pytest.mark.parametrize("redact", slow_but_at({1}, [[], ["token_ids"]]))
def test_what_was_sent_is_recorded_unless_tokens_are_not(
    nat: Any, server: FakeOpenAI, tmp_path: Path, redact: Any
) -> None:
    """A plugin's adapter gets the same entries from a run that was resumed."""
    built_in = {
        "trajectory_builders": {"desk": {"_type": "insitu_traj_builder", "num_generations": 4}},
        "trainers": {"desk": {"_type": "insitu_trainer"}},
        "finetuning": {**OWN["finetuning"], "num_epochs": 1, "redact": redact},
    }
    code, out, err = nat(server, "finetune", {**OWN, **built_in})
    assert code == 0, err + out
    calls = read_lines(tmp_path / "run/calls.jsonl.gz")[1:]
    texts = ["".join(entry["token"] for entry in call.get("sent_logprobs", [])) for call in calls]
    answers = [call["message"]["content"] or "echo: tool" for call in calls]
    assert texts == ([""] * len(answers) if redact else answers)
    jobs = [json.loads(line) for line in (tmp_path / "jobs/use.jsonl").read_text().splitlines()]
    assert all(item["logprobs"]["content"] for job in jobs for item in job["episode"] if item["role"] == "assistant")


def test_an_adapter_that_is_not_healthy_is_told_before_the_first_epoch(nat: Any, tmp_path: Path) -> None:
    trainer = {"trainers": {"desk": {"_type": "insitu_trainer"}}}
    builder = {"trajectory_builders": {"desk": {"_type": "insitu_traj_builder", "num_generations": 2}}}
    adapter = {"trainer_adapters": {"desk": {"_type": "desk_trainer_adapter", "folder": "jobs", "closed": True}}}
    with FakeOpenAI() as server:
        code, _, err = nat(server, "finetune", {**OWN, **trainer, **builder, **adapter})
        assert server.requests == []
    assert code == 1
    assert "trainer_adapters.desk: the backend is not healthy; is_healthy() returned false" in err


@pytest.mark.slow
def test_the_page_for_those_who_switch_shows_lines_that_are_printed(nat: Any, tmp_path: Path) -> None:
    page = (ROOT / "docs/guides/from-nat.md").read_text()
    rows = [*ROWS, {"id": "c", "question": "status 404", "topic": "none"}]
    built_in = {
        "trajectory_builders": {"desk": {"_type": "insitu_traj_builder", "num_generations": 4}},
        "trainers": {"desk": {"_type": "insitu_trainer"}},
    }

    def adapter(**keys: Any) -> dict[str, Any]:
        desk = {"_type": "desk_trainer_adapter", "folder": "jobs", **keys}
        return {**OWN, **built_in, "trainer_adapters": {"desk": desk}}

    runs = {
        "dropped: 4 backend_error, 4 no_variance": (0, adapter()),
        "ended as failed: the service is full": (1, adapter(fails=True)),
        "did not complete; results so far are in run/ (the same command with --resume": (1, adapter(fails=True)),
        "trainer_adapters.desk: key 'learning_rate' does not exist": (2, adapter(learning_rate=1e-3)),
        "the backend is not healthy; is_healthy() returned false": (1, adapter(closed=True)),
        "gives no token ids": (0, adapter()),
    }
    ended: dict[str, tuple[int, str]] = {}
    with FakeOpenAI(refuses=OPTIONS[:1]) as server:
        for line, (code, parts) in runs.items():
            key = json.dumps(parts)
            if key not in ended:
                done = nat(server, "finetune", parts, rows=rows)
                ended[key] = done[0], done[1] + done[2]
            assert ended[key][0] == code
            assert line in ended[key][1]
            assert f"`{line}`" in page

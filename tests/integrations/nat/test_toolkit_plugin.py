"""A plugin package written for the toolkit, installed with pip and run as it is; and packages that are broken."""

import json
import os
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from factories import pip_install, read_lines
from fake_nemo import CONFIG as CUSTOMIZATION_CONFIG
from fake_nemo import FakeNeMo
from fake_openai import FakeOpenAI
from marks import slow_after
from processes import run, serving

ROOT = Path(__file__).parents[3]
PACKAGE = Path(__file__).parents[2] / "support/toolkit_plugin"
MODEL = str(ROOT / "examples/tic_tac_toe/model")

DESK = {
    "functions": {
        "tidy": {"_type": "desk_tidy", "lower": True},
        "words": {"_type": "desk_words"},
        "drafting": {"_type": "desk_drafting", "search": "search", "scoring": "scoring", "selection": "best"},
    },
    "ttc_strategies": {
        "search": {"_type": "desk_draft_search", "llm_name": "clerk"},
        "scoring": {"_type": "desk_digit_scoring"},
        "best": {"_type": "best_of_n_selection"},
    },
    "workflow": {"_type": "answer_desk", "tidy": "tidy", "words": "words", "answerer": "drafting"},
    "eval": {
        "general": {"output_dir": "out", "dataset": {"_type": "jsonl", "file_path": "rows.jsonl"}},
        "evaluators": {"quality": {"_type": "desk_draft_quality"}, "audit": {"_type": "desk_record_audit"}},
    },
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip has installed the package into."""
    return pip_install(PACKAGE, tmp_path_factory.mktemp("plugin"))


def clerk(server: FakeOpenAI) -> dict[str, Any]:
    return {"clerk": {"_type": "openai", "model_name": "fake", "base_url": server.base_url, "max_retries": 0}}


def nat(folder: Path, *arguments: str, sites: tuple[Path, ...]) -> tuple[int, str, str]:
    path = os.pathsep.join(map(str, sites))
    done = run(*arguments, folder=folder, PYTHONPATH=path, PYTHONWARNINGS="error", COLUMNS="200")
    return done.returncode, done.stdout, done.stderr


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_the_package_knows_nothing_of_insitu() -> None:
    sources = [*PACKAGE.rglob("*.py"), PACKAGE / "pyproject.toml"]
    assert len(sources) > 8
    assert not [path.name for path in sources if "insitu" in path.read_text()]


@pytest.mark.slow
def test_eval(installed: Path, server: FakeOpenAI, write: Any, tmp_path: Path) -> None:
    write({"llms": clerk(server), **DESK})
    rows = [
        {"id": "a", "question": {"text": " Say  9 ", "drafts": 3}, "answer": "9", "topic": "digits"},
        {"id": "b", "question": "say 1 or 2", "topic": "digits"},
        {"id": "c", "question": '{"text": "no number"}', "topic": "unreadable"},
    ]
    write(rows, "rows.jsonl")
    code, out, err = nat(tmp_path, "eval", "--config_file", "config.yml", sites=(installed,))
    assert code == 0, err
    assert "1 scores are missing; the first, of row 'c': ValueError: no audit" in out

    quality, audit = read(tmp_path / "out/quality_output.json"), read(tmp_path / "out/audit_output.json")
    assert [item["score"] for item in quality["eval_output_items"]] == [1.0, pytest.approx(1.5 / 9), 0.0]
    assert quality["average_score"] == pytest.approx((1 + 1.5 / 9) / 3)
    assert [item["reasoning"]["candidates"] for item in quality["eval_output_items"]] == [3, 2, 2]
    first, _, last = audit["eval_output_items"]
    record = {"words": 2, "function": "<workflow>", "caller": "root", "evaluating": True, "tidied_by": "desk_tidy"}
    assert first["reasoning"].pop("function_id")
    assert first["reasoning"] == {
        "topic": "digits",
        "record": record,
        "said": ["say", "9"],
        "expected": "9",
        "answer": "echo: say 9",
    }
    assert last["score"] is None
    assert last["error"].startswith('ValueError: no audit of {"text": "no number"} (')
    assert audit["average_score"] == 1.0

    item = read(tmp_path / "out/workflow_output.json")[0]
    assert item["generated_answer"]["text"] == "echo: say 9"
    assert item["generated_answer"]["asked_by"] == "<workflow>"
    steps = item["intermediate_steps"]
    heard = len(steps) - 4  # all but the starts and ends of the workflow and its function
    assert item["generated_answer"]["steps_heard"] == heard
    by_name = {s["payload"]["name"]: s for s in steps if s["payload"]["event_type"].endswith("START")}
    assert by_name["desk_record"]["parent_id"] == by_name["<workflow>"]["payload"]["UUID"]
    assert by_name["drafting"]["parent_id"] == by_name["desk_record"]["payload"]["UUID"]
    assert by_name["desk_record"]["payload"]["data"]["words"] == ["say", "9"]
    candidates = [s["payload"] for s in steps if s["payload"]["event_type"] == "TTC_END"]
    assert [c["data"]["candidate_index"] for c in candidates] == [0, 1, 2]
    assert candidates[0]["metadata"] == {"chosen": True, "strategy": "search", "pipeline": "agent_execution"}
    assert len({c["data"]["turn_id"] for c in candidates}) == 1


@pytest.mark.slow
def test_an_agent_with_a_tool(installed: Path, server: FakeOpenAI, write: Any, tmp_path: Path) -> None:
    functions = {
        **DESK["functions"],
        "look": {"_type": "desk_look", "weather": "rainy"},
        "agent": {"_type": "desk_agent", "llm_name": "clerk", "tool_names": ["look"]},
    }
    evaluation = {**DESK["eval"], "evaluators": {"audit": {"_type": "desk_record_audit"}}}
    write(
        {
            "llms": clerk(server),
            **DESK,
            "functions": functions,
            "workflow": {**DESK["workflow"], "answerer": "agent"},
            "eval": evaluation,
        }
    )
    write([{"id": 1, "question": "Tool", "topic": "tools"}], "rows.jsonl")
    code, _, err = nat(tmp_path, "eval", "--config_file", "config.yml", sites=(installed,))
    assert code == 0, err
    [item] = read(tmp_path / "out/workflow_output.json")
    assert item["generated_answer"]["text"] == "echo: sky is rainy"
    steps = [(s["payload"]["event_type"], s["payload"]["name"]) for s in item["intermediate_steps"]]
    agent = steps[steps.index(("FUNCTION_START", "agent")) : steps.index(("FUNCTION_END", "agent"))]
    assert [kind for kind, _ in agent[1:]] == [
        *("LLM_START", "LLM_END", "TOOL_START", "FUNCTION_START", "FUNCTION_END", "TOOL_END", "LLM_START", "LLM_END")
    ]
    assert [name for kind, name in agent if kind != "LLM_START"][2:5] == ["look", "look", "look"]
    places = {s["payload"]["event_type"]: s for s in item["intermediate_steps"] if s["payload"]["name"] == "look"}
    assert places["FUNCTION_START"]["parent_id"] == places["TOOL_START"]["payload"]["UUID"]
    assert places["TOOL_START"]["function_ancestry"]["function_name"] == "agent"
    [offered] = server.requests[-2]["tools"]
    assert offered["function"]["description"] == "Looks at a place and says what the weather is there."
    assert offered["function"]["parameters"]["properties"]["at"]["description"] == "The place to look at."
    assert [m["role"] for m in server.requests[-1]["messages"]] == ["user", "assistant", "tool"]


def test_an_agent_with_a_group_of_tools(installed: Path, server: FakeOpenAI, write: Any, tmp_path: Path) -> None:
    """The group's block chooses its functions; a function of it can also be named alone.

    The file has what the toolkit's have: what means nothing here is one warning.
    """
    model = {**clerk(server)["clerk"], "num_retries": 0, "request_timeout": 30}
    del model["max_retries"]
    file = {
        "general": {"use_uvloop": True, "telemetry": {"logging": {"console": {"_type": "console"}}}},
        "embedders": {"small": {"_type": "nim", "model_name": "e5"}},
        "llms": {"clerk": model},
        "functions": {
            "look": {"_type": "desk_look"},
            "agent": {"_type": "desk_agent", "llm_name": "clerk", "tool_names": ["goods", "look", "other.close"]},
            "tidy": {"_type": "desk_tidy"},
            "words": {"_type": "desk_words"},
        },
        "function_groups": {
            "goods": {"_type": "desk_shop", "prices": {"tea": 2.5}, "include": ["products", "price"]},
            "other": {"_type": "desk_shop"},
        },
        "workflow": {"_type": "answer_desk", "tidy": "tidy", "words": "words", "answerer": "agent"},
        "eval": {
            "general": {
                "output": {"dir": "out", "cleanup": True},
                "dataset": {"_type": "jsonl", "file_path": "rows.jsonl"},
                "profiler": {"base_metrics": True},
            },
            "evaluators": {"audit": {"_type": "desk_record_audit"}},
        },
    }
    write(file)
    write([{"id": 1, "question": "Tool", "topic": "tools"}], "rows.jsonl")
    code, _, err = nat(tmp_path, "eval", "--config_file", "config.yml", sites=(installed,))
    assert code == 0, err
    unused = "embedders, general.telemetry, general.use_uvloop, eval.general.profiler, eval.general.output.cleanup"
    assert err.count("without effect") == 1
    assert f"config.yml: {unused}: without effect in insitu" in err
    names = [tool["function"]["name"] for tool in server.requests[-1]["tools"]]
    assert names == ["goods__products", "goods__price", "look", "other__close"]
    price = server.requests[-1]["tools"][1]["function"]
    assert price["description"] == "The price of so many pieces of a product."
    assert price["parameters"]["required"] == ["product"]
    assert price["parameters"]["properties"]["count"]["default"] == 1

    def agent(name: str) -> dict[str, Any]:
        return {"functions": {**file["functions"], "agent": {**file["functions"]["agent"], "tool_names": [name]}}}

    def goods(**keys: list[str]) -> dict[str, Any]:
        return {"function_groups": {**file["function_groups"], "goods": {"_type": "desk_shop", **keys}}}

    problems = {
        "include": goods(include=["x"]),
        "both": goods(include=["price"], exclude=["close"]),
        "member": agent("goods.x"),
        "name": agent("good"),
    }
    expected = {
        "include": "function_groups.goods.include: 'x' does not exist; available: price, products, close",
        "both": "function_groups.goods: include and exclude cannot both be given",
        "member": "the function of group goods 'x' does not exist; available: products, price",
        "name": "'good' does not exist (did you mean 'goods'?)",
    }
    for problem, change in problems.items():
        write({**file, **change})
        code, _, err = nat(tmp_path, "eval", "--config_file", "config.yml", sites=(installed,))
        assert code != 0
        assert expected[problem] in err, err


def training_file(clerk: dict[str, Any], adapter: dict[str, Any]) -> dict[str, Any]:
    return {
        **DESK,
        "general": {"seed": 1},
        "llms": {"clerk": clerk},
        "trajectory_builders": {"episodes": {"_type": "insitu_traj_builder", "num_generations": 4}},
        "trainer_adapters": {
            "backend": {"_type": "insitu_trainer_adapter", "training": {"learning_rate": 1e-3}, **adapter}
        },
        "trainers": {"grpo": {"_type": "insitu_trainer"}},
        "finetuning": {
            "enabled": True,
            "trainer": "grpo",
            "trajectory_builder": "episodes",
            "trainer_adapter": "backend",
            "reward_function": {"name": "quality"},
            "target_functions": ["drafting"],
            "num_epochs": 2,
            "output_dir": "run",
        },
    }


@pytest.mark.slow
@pytest.mark.parametrize("llm", slow_after(1, ["policy", "openai"]))
def test_finetune(installed: Path, write: Any, tmp_path: Path, llm: str) -> None:
    backend = serving("backend", "--model", MODEL, "--port", "0")
    with backend if llm == "openai" else nullcontext((None, "")) as (_, address):
        served = {"model_name": "policy", "base_url": f"{address}/v1", "api_key": "none"} if address else {}
        adapter = {"url": address} if address else {"model": MODEL}
        write(training_file({"_type": llm, "max_tokens": 6, **served}, adapter))
        write([{"question": {"text": f"Row {i}", "drafts": 2}, "topic": "rows"} for i in range(6)], "rows.jsonl")
        code, _, err = nat(tmp_path, "finetune", "--config_file", "config.yml", sites=(installed,))
    assert code == 0, err
    metrics = [json.loads(line) for line in (tmp_path / "run/training_metrics.jsonl").read_text().splitlines()]
    assert [m["policy_version"] for m in metrics] == [1, 2]
    for m in metrics:
        assert m["num_trajectories"] == 24
        assert m["tokens"] > 0
        assert m["grad_norm"] > 0
        assert m["logprob_gap"] < 1e-3
        assert m["min_reward"] < m["max_reward"]
    calls = read_lines(tmp_path / "run/calls.jsonl.gz")[1:]
    assert len(calls) == 2 * 24 * 2
    assert {tuple(c["functions"]) for c in calls} == {("<workflow>", "drafting")}
    assert {c["policy_version"] for c in calls} == {0, 1}


@pytest.mark.slow
def test_preferences_on_customizer(installed: Path, write: Any, tmp_path: Path) -> None:
    """The documented three `_type`s with the package's own steps; `nat eval` runs the same file."""
    with FakeNeMo() as nemo, serving("backend", "--model", MODEL, "--port", "0") as (_, address):
        clerk = {"_type": "openai", "model_name": "policy", "base_url": f"{address}/v1", "api_key": "none"}
        adapter = {"entity_host": nemo.entity_host, "datastore_host": nemo.datastore_host, "namespace": "desk"}
        adapter |= {"customization_config": CUSTOMIZATION_CONFIG, "poll_interval_seconds": 0.02}
        parts = {
            "trajectory_builders": {"pairs": {"_type": "dpo_traj_builder", "ttc_step_name": "desk_candidate"}},
            "trainer_adapters": {"customizer": {"_type": "nemo_customizer_trainer_adapter", **adapter}},
            "trainers": {"dpo": {"_type": "nemo_customizer_trainer"}},
        }
        names = {"trainer": "dpo", "trajectory_builder": "pairs", "trainer_adapter": "customizer"}
        finetuning = {"enabled": True, "reward_function": {"name": "quality"}, "output_dir": "run", **names}
        write({"llms": {"clerk": clerk | {"max_tokens": 6}}, **DESK, **parts, "finetuning": finetuning})
        write([{"question": {"text": f"Row {i}", "drafts": 4}, "topic": "rows"} for i in range(6)], "rows.jsonl")
        code, out, err = nat(tmp_path, "finetune", "--config_file", "config.yml", sites=(installed,))
        assert code == 0, err
        assert "job cust-0 is completed" in out
        code, _, err = nat(tmp_path, "eval", "--config_file", "config.yml", sites=(installed,))
        assert code == 0, err
    files = (tmp_path / "run/dataset").rglob("*.jsonl")
    records = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert len(records) == read(tmp_path / "run/final_metrics.json")["pairs"]["trained"] > 6
    for record in records:
        assert record["prompt"].startswith("row ")
        assert record["chosen_response"] != record["rejected_response"]


FUNCTION = """
from nat.cli.register_workflow import register_function
from nat.data_models.function import FunctionBaseConfig


class {name}Config(FunctionBaseConfig, name="{name}"):
    pass


@register_function(config_type={name}Config)
async def {name}(config, builder):
    async def say(text: str) -> str:
        return "{says}"

    yield {yields}
"""


def distribution(site: Path, name: str, *sources: str) -> None:
    """Lays an installed package out in `site`, as pip does."""
    module = site / f"{name.replace('.', '/')}.py"
    module.parent.mkdir(parents=True, exist_ok=True)
    module.write_text("\n".join(sources))
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[nat.components]\n{name} = {name}\n")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages, most of them broken."""
    site = tmp_path_factory.mktemp("others")
    twin = FUNCTION.format(name="twin", says="I am", yields="say")
    distribution(site, "first", twin, FUNCTION.format(name="elder", says="elder", yields="say"))
    distribution(site, "second", twin, FUNCTION.format(name="younger", says="younger", yields="say"))
    distribution(site, "halved", "import no_such_module_at_all", FUNCTION.format(name="half", says="", yields="say"))
    distribution(site, "leaver", "import sys", "sys.exit('not on this machine')")
    distribution(
        site, "nat.plugins.guest", FUNCTION.format(name="guest", says="a guest in nat's own folder", yields="say")
    )
    distribution(site, "sour", FUNCTION.format(name="sour", says="", yields="1 / 0"))
    return site


def test_broken_packages_break_only_what_needs_them(
    installed: Path, others: Path, server: FakeOpenAI, write: Any, tmp_path: Path
) -> None:
    write({"llms": clerk(server), **DESK, "functions": {**DESK["functions"], "unused": {"_type": "sour"}}})
    sites = (installed, others)
    code, out, err = nat(tmp_path, "run", "--config_file", "config.yml", "--input", " Hello  there", sites=sites)
    assert (code, out) == (0, "echo: hello there\n")
    warnings = err.splitlines()
    assert len(warnings) == 3, err
    assert re.fullmatch(r"plugin 'halved' \(halved\) could not be imported: .*no_such_module_at_all.*", warnings[0])
    assert re.fullmatch(r"plugin 'leaver' \(leaver\) could not be imported: .*not on this machine.*", warnings[1])
    assert re.match(r"two components of functions are called 'twin': .*first\.twin.*second\.twin.*neither", warnings[2])


@pytest.mark.parametrize(
    ("name", "code", "message"),
    slow_after(
        3,
        [
            ("younger", 0, "younger"),  # comes after the clash in its package
            ("guest", 0, "a guest in nat's own folder"),
            ("twin", 1, r"failed: two components of functions are called 'twin': .*; uninstall one of the packages"),
            (
                "half",
                2,
                r"workflow: _type 'half' does not exist.*could not be imported: 'halved' \(halved\): ModuleNotFound",
            ),
            (
                "sour",
                1,
                r"failed: workflow \(_type: sour\) could not be built: ZeroDivisionError: division by zero .*sour\.py",
            ),
        ],
    ),
)
def test_what_needs_a_broken_package_is_told(
    others: Path, write: Any, tmp_path: Path, name: str, code: int, message: str
) -> None:
    write({"workflow": {"_type": name}})
    given, out, err = nat(tmp_path, "run", "--config_file", "config.yml", "--input", "hello", sites=(others,))
    assert given == code, err
    assert re.search(message, err if code else out, re.DOTALL)
    assert "Traceback" not in err

"""Plain Python functions as agents and scores, and the evaluators for common cases."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from factories import digits_project, read_lines
from fake_openai import FakeOpenAI
from marks import slow_after, slow_but_at
from processes import run_project
from refusals import refusal

from insitu.builder import Builder
from insitu.config import load_config
from insitu.schemas.evaluation import EvalInput, EvalInputItem, EvalOutputItem
from insitu.schemas.kinds import EVALUATOR
from insitu.workflow.functions import Arguments

AGENT = """
import insitu
import pydantic
from digits_plugin import mean_digit

async def answer(question: dict, model: insitu.Model) -> str:
    return await model.ask(question["say"])

def answer_in_a_thread(question: dict, model):
    return model.ask(question["say"])

async def pieces(question: dict, model: insitu.Model):
    for piece in await model.ask(question["say"]):
        yield piece

class Agent:
    def __init__(self, prefix):
        self.prefix = prefix

    async def __call__(self, question, model, seed, row, suffix=""):
        assert row["question"] == question and isinstance(seed, int)
        return self.prefix + await model.ask(question["say"]) + suffix

    def greet(self, question):
        return "hello"

agent = Agent("")

def score(answer: str, row: insitu.Row) -> float:
    return mean_digit(answer)

async def score_with_reason(answer, question, expected, weight):
    return mean_digit(answer) * weight, f"{question} {expected}"

def score_in_numpy(answer):
    import numpy
    return numpy.float32(mean_digit(answer))

class Digits(pydantic.BaseModel):
    text: str

async def model_answer(question: dict, model: insitu.Model) -> Digits:
    return Digits(text=await model.ask(question["say"]))

def score_of_model(answer: Digits) -> float:
    return mean_digit(answer.text)

def text_score(answer):
    return "good"

number = 3

def yielding(question: dict, model):
    yield model.ask(question["say"])

def with_llm(question: dict, llm):
    return llm.ask(question["say"])

async def silent(question: dict, model: insitu.Model):
    await model.ask(question["say"])

async def forgetful(question: dict, model: insitu.Model):
    return model.ask(question["say"])

async def forgetful_score(answer):
    async def judge():
        return 1.0
    return judge()

async def raising(question: dict, model: insitu.Model):
    raise KeyError("price")

def score_of_anything(answer):
    return float(len(str(answer)))
"""
ANSWER, SCORE = {"function": "an_agent:answer", "model": "player"}, {"function": "an_agent:score"}


def project(folder: Path, workflow: dict[str, Any], score: dict[str, Any]) -> Path:
    """`digits_project` with an agent and a score of `an_agent`."""
    digits_project(folder, rows=6)
    (folder / "an_agent.py").write_text(AGENT)
    path = folder / "config.yml"
    config = yaml.safe_load(path.read_text())
    del config["general"]["plugins"]
    config["workflow"] = {"_type": "python", **workflow}
    config["eval"]["evaluators"]["score"] = {"_type": "python", **score}
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return folder


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Metrics that do not depend on the machine's speed."""
    code, _, err = run_project(folder)
    assert code == 0, err
    changing = ("seconds", "tokens_per_second", "time_left_seconds")
    lines = read_lines(folder / "run/training_metrics.jsonl")
    return [{k: v for k, v in line.items() if not any(name in k for name in changing)} for line in lines]


@pytest.mark.slow
def test_functions_are_trained_as_registered_components_are(tmp_path: Path) -> None:
    (registered := tmp_path / "registered").mkdir()
    digits_project(registered, rows=6)
    expected = [line["avg_reward"] for line in metrics_of(registered)]
    for name, workflow, score in (
        ("async", {"function": "an_agent:answer", "model": "player"}, {"function": "an_agent:score"}),
        (
            "models and files",
            {"function": "an_agent.py:model_answer", "model": "player"},
            {"function": "an_agent.py:score_of_model"},
        ),
        (
            "thread",
            {"function": "an_agent:answer_in_a_thread", "model": "player"},
            {"function": "an_agent:score_with_reason", "arguments": {"weight": 1}},
        ),
        ("stream", {"function": "an_agent:pieces", "model": "player"}, {"function": "an_agent:score_in_numpy"}),
        ("object", {"function": "an_agent:agent", "models": {"model": "player"}}, {"function": "an_agent:score"}),
    ):
        (folder := tmp_path / name).mkdir()
        got = [line["avg_reward"] for line in metrics_of(project(folder, workflow, score))]
        assert got == pytest.approx(expected, abs=1e-6), name


@pytest.mark.parametrize(
    ("workflow", "score", "problems"),
    [
        ({"function": "an_agent:answr"}, {}, ["in an_agent, 'answr' does not exist (did you mean 'answer'?)"]),
        ({"function": "no_agent:answer"}, {}, ["workflow.function: no module named 'no_agent' (also searched in "]),
        (
            {"function": "answer"},
            {},
            ["workflow.function is 'answer'; it must be MODULE:NAME or FILE.py:NAME, such as "],
        ),
        ({"function": "an_agent:number"}, {}, ["workflow.function: an_agent:number is an int; it must be a function"]),
        (
            {"model": "nobody"},
            {"function": "x"},
            ["workflow.model: 'nobody' does not exist", "eval.evaluators.score.function is 'x'"],
        ),
        ({"function": 3}, {}, ["workflow.function: Input should be a valid string"]),
    ],
)
def test_what_cannot_be_imported_is_refused(
    tmp_path: Path, workflow: dict[str, Any], score: dict[str, Any], problems: list[str]
) -> None:
    """All problems of a file together, before anything is started."""
    project(
        tmp_path, {"function": "an_agent:answer", "model": "player"} | workflow, {"function": "an_agent:score"} | score
    )
    code, _, err = run_project(tmp_path, command="validate")
    assert code == 2
    assert all(problem in err for problem in problems), err


@pytest.mark.parametrize(
    ("workflow", "score", "problem"),
    slow_but_at(
        {0, 3},
        [
            (
                {"model": None},
                {},
                "workflow.model is missing: an_agent:answer takes a model; available under llms: player",
            ),
            ({"arguments": {"size": 3}}, {}, "(an_agent:answer): the parameter 'size' does not exist; available: "),
            (
                {},
                {"function": "an_agent:score_with_reason"},
                "evaluators.score (an_agent:score_with_reason): nothing is given for the parameter weight",
            ),
            ({"framework": "langchains"}, {}, "'langchains' does not exist (did you mean 'langchain'?)"),
        ],
    ),
)
def test_parameters_that_nobody_fills_are_refused(
    tmp_path: Path, workflow: dict[str, Any], score: dict[str, Any], problem: str
) -> None:
    project(
        tmp_path, {"function": "an_agent:answer", "model": "player"} | workflow, {"function": "an_agent:score"} | score
    )
    code, _, err = run_project(tmp_path)
    assert code != 0
    assert problem in err


@pytest.mark.parametrize(
    ("workflow", "problem"),
    slow_after(
        3,
        [
            (
                {"function": "an_agent:yielding"},
                "workflow: an_agent:yielding is a generator; return the answer, or declare",
            ),
            (
                {"function": "an_agent:with_llm"},
                "the parameter 'model' does not exist; available: question, llm; the model is given to the parameter `"
                "mo",
            ),
            (
                {"function": "an_agent:with_llm", "model": None},
                "nothing is given for the parameter llm; set arguments.llm; the model is given to the parameter "
                "`model`",
            ),
            ({"model": None}, "workflow.model is missing: an_agent:answer takes a model"),
        ],
    ),
)
def test_a_function_that_is_no_workflow_is_refused_before_anything_is_started(
    tmp_path: Path, workflow: dict[str, Any], problem: str
) -> None:
    project(tmp_path, ANSWER | workflow, SCORE)
    for command in ("validate", "finetune"):
        code, _, err = run_project(tmp_path, command=command)
        assert code == 2
        assert problem in err
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("function", "problem"),
    slow_but_at(
        {0},
        [
            ("silent", "before the first epoch: the workflow returned None; is a `return` missing?"),
            (
                "forgetful",
                "workflow_error: WorkflowError: forgetful returned a coroutine: write `return await ask(...)`",
            ),
            ("raising", "before the first epoch: workflow_error: KeyError: 'price' ("),
        ],
    ),
)
def test_an_agent_that_fails_says_so_before_the_first_epoch(tmp_path: Path, function: str, problem: str) -> None:
    project(tmp_path, ANSWER | {"function": f"an_agent:{function}"}, {"function": "an_agent:score_of_anything"})
    _, out, _ = run_project(tmp_path, "-o", "finetuning.num_epochs", 1)
    assert problem in " ".join(out.split())
    assert out.index("played once") < out.index("epoch 1")
    if function == "silent":
        _, out, _ = run_project(tmp_path, command="eval")
        assert "\nthe workflow returned None for every row; is a `return` missing?\n" in out


def test_a_score_that_is_no_number_is_the_evaluators_error(tmp_path: Path) -> None:
    project(tmp_path, {"function": "an_agent:answer", "model": "player"}, {"function": "an_agent:text_score"})
    code, _, err = run_project(tmp_path)
    assert code != 0
    assert "the score is 'good'; it must be a number, or a number and a text" in err


def test_a_score_that_was_not_awaited_is_the_evaluators_error(tmp_path: Path) -> None:
    project(tmp_path, {"function": "an_agent:answer", "model": "player"}, {"function": "an_agent:forgetful_score"})
    code, _, err = run_project(tmp_path)
    assert code != 0
    assert "forgetful_score returned a coroutine: write `return await judge(...)`" in err


async def scored(
    folder: Path, evaluators: dict[str, Any], answer: Any, expected: Any = None, **others: Any
) -> EvalOutputItem:
    """By the last of the evaluators."""
    (folder / "c.yml").write_text(yaml.safe_dump({"eval": {"evaluators": evaluators}, **others}))
    config = load_config(folder / "c.yml")
    async with Builder(config) as builder:
        info = await builder.get_evaluator(config.names(EVALUATOR)[-1])
        item = EvalInputItem(id="1", input_obj="q", output_obj=answer, expected_output_obj=expected)
        (result,) = (await info.evaluate_fn(EvalInput(eval_input_items=[item]))).eval_output_items
        return result


async def test_the_question_and_the_answer_need_not_come_first(tmp_path: Path) -> None:
    (tmp_path / "last.py").write_text(
        "async def answer(model, row, word: str):\n    return f'{word} of {row}'\n"
        "def score(expected, question, /, answer):\n    return float(answer == f'{question} {expected}')\n"
        "def build(model, /):\n    return lambda word: f'{word} of {model.model}'\n"
    )
    llms = {"m": {"_type": "openai", "model_name": "m", "base_url": "http://127.0.0.1:1/v1"}}
    workflow = {"_type": "python", "function": "last.py:answer", "model": "m"}
    functions = {"built": {"_type": "python", "function": "last.py:build", "model": "m"}}
    evaluators = {"s": {"_type": "python", "function": "last.py:score"}}
    assert (
        await scored(tmp_path, evaluators, "q e", "e", llms=llms, workflow=workflow, functions=functions)
    ).score == 1.0
    async with Builder(load_config(tmp_path / "c.yml")) as builder:
        assert await (await builder.get_function("built")).ainvoke("w") == "w of m"
        assert await (await builder.get_workflow()).ainvoke("w") == "w of None"


async def test_a_tool_has_the_parameter_of_its_function(tmp_path: Path) -> None:
    (tmp_path / "weather.py").write_text(
        "def at(city: str):\n    return f'rain in {city}'\n"
        "async def here(seed, city: str = 'Rome'):\n    return f'sun in {city}'\n"
        "def anywhere(seed):\n    return 'wind'\n"
        "def near(_city: str, copy=1):\n    return f'hail in {_city}'\n"
        "def by_place(seed, unit, row=0, city: str = 'Rome', /, copy=1):\n    return f'{unit} {row} in {city}'\n"
        "def over(seed, city, /):\n    return f'fog in {city}'\n"
    )
    names = ("at", "here", "anywhere", "near", "by_place", "over")
    functions = {name: {"_type": "python", "function": f"weather.py:{name}"} for name in names}
    functions["by_place"]["arguments"] = {"unit": "20 C"}
    (tmp_path / "c.yml").write_text(yaml.safe_dump({"functions": functions}))
    async with Builder(load_config(tmp_path / "c.yml")) as builder:
        at, here, anywhere, near, by_place, over = await builder.get_functions(names)
        assert at.input_schema.model_json_schema()["required"] == ["city"]
        assert here.input_schema.model_json_schema()["properties"]["city"]["default"] == "Rome"
        assert anywhere.input_schema.model_fields == {}
        assert await at.ainvoke(Arguments(city="Oslo")) == "rain in Oslo"
        assert await here.ainvoke(Arguments()) == "sun in Rome"
        with pytest.raises(TypeError, match=r"at\(\) missing .* 'city'"):
            await at.ainvoke(Arguments())
        assert await anywhere.ainvoke(Arguments()) == "wind"
        assert await near.ainvoke(Arguments(value="Bern")) == "hail in Bern", "_city is no name of a schema's property"
        assert await by_place.ainvoke("Kiel") == "20 C None in Kiel"
        assert await by_place.ainvoke(Arguments()) == "20 C None in Rome"
        assert await over.ainvoke("Bonn") == "fog in Bonn"
        with pytest.raises(TypeError, match=r"over\(\) missing .* 'city'"):
            await over.ainvoke(Arguments())


EXACT, CONTAINS, REGEX = {"_type": "exact_match"}, {"_type": "contains"}, {"_type": "regex", "pattern": r"#+ *(\d+)"}
JSON, NUMERIC = {"_type": "json_fields"}, {"_type": "numeric"}


@pytest.mark.parametrize(
    ("block", "answer", "expected", "score"),
    [
        (EXACT, " a  b ", "a b", 1.0),
        (EXACT, "A b", "a b", 0.0),
        (EXACT | {"ignore_case": True}, "A b", "a b", 1.0),
        (EXACT | {"ignore_space": False}, "a  b", "a b", 0.0),
        (EXACT, "2", ["1", 2], 1.0),
        (EXACT, 3, 3, 1.0),
        (CONTAINS, "it is in Paris, France", ["Paris", "France"], 1.0),
        (CONTAINS, "it is in Paris", ["Paris", "France"], 0.0),
        (CONTAINS | {"require": "any"}, "it is in paris", ["Paris", "France"], 0.0),
        (CONTAINS | {"require": "any", "ignore_case": True}, "it is in paris", ["Paris", "France"], 1.0),
        (REGEX, "no", "42", 0.0),
        (REGEX, "#### 41", "42", 1.0),
        (REGEX | {"group": 1}, "#### 41", "42", 0.0),
        (REGEX | {"group": 1}, "#### 41 or #### 42", 42, 1.0),
        (JSON, '```json\n{"a": 1, "b": {"c": [2]}}\n```', '{"a": 1, "b": {"c": [2]}}', 1.0),
        (JSON, {"a": 1}, {"a": 1, "b": 2}, 0.5),
        (JSON | {"fields": ["b.c", "a"]}, {"a": 1, "b": {"c": 3}}, {"a": 1, "b": {"c": 2}}, 0.5),
        (JSON, {"a.b": 1, "c": True}, {"a.b": 1, "c": 1}, 0.5),
        (JSON, "not JSON", {"a": 1}, 0.0),
        (NUMERIC, "so it is 1,234.50 dollars", "1234.5", 1.0),
        (NUMERIC, "first 3, then 5", 3, 0.0),
        (NUMERIC | {"tolerance": 2}, "5", 3, 1.0),
        (NUMERIC | {"zero_at": 4}, "5", 3, 0.5),
        (NUMERIC | {"zero_at": 1}, "-5", 3, 0.0),
        (NUMERIC, "none", 3, 0.0),
        (NUMERIC, "10-5", 5, 1.0),
        (NUMERIC, "x-1,234,567", 1234567, 1.0),
        (NUMERIC, "it is \u2212.5e1", -5, 1.0),
        (NUMERIC, "1,2", 2, 1.0),
        (NUMERIC, "(-2)", "-2", 1.0),
    ],
)
async def test_comparisons(tmp_path: Path, block: dict[str, Any], answer: Any, expected: Any, score: float) -> None:
    result = await scored(tmp_path, {"score": block}, answer, expected)
    assert (result.score, result.error) == (score, None)
    assert result.reasoning


@pytest.mark.parametrize("block", [EXACT, CONTAINS, JSON, NUMERIC, REGEX | {"group": 1}])
async def test_a_row_without_an_expected_answer_is_an_error(tmp_path: Path, block: dict[str, Any]) -> None:
    result = await scored(tmp_path, {"score": block}, "## 3", None)
    assert result.score is None
    assert "expected answer" in (result.error or "")


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (EXACT, []),
        (CONTAINS, []),
        (CONTAINS, ""),
        (CONTAINS, ["Paris", " "]),
        (JSON | {"fields": ["a", "b"]}, {"a": 1}),
        (JSON, {}),
    ],
)
async def test_nothing_to_compare_with_is_an_error(tmp_path: Path, block: dict[str, Any], expected: Any) -> None:
    """Otherwise every answer would be right, or wrong."""
    result = await scored(
        tmp_path, {"score": block}, {"a": 1} if block["_type"] == "json_fields" else "Paris", expected
    )
    assert result.score is None
    assert "expected answer" in (result.error or "")


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ({"_type": "regex", "pattern": "("}, "it is not a regular expression: missing )"),
        ({"_type": "regex", "pattern": "a", "group": 1}, "group is 1, but the pattern has the groups [0]"),
        ({"_type": "weighted_sum", "weights": {"scor": 1}}, "eval.evaluators.s.weights: 'scor' does not exist"),
        ({"_type": "weighted_sum", "weights": {}}, "at least 1 item"),
        ({"_type": "llm_judge", "llm": "j", "rubric": "r"}, "eval.evaluators.s.llm: 'j' does not exist"),
    ],
)
async def test_settings_that_make_no_sense_are_refused(tmp_path: Path, block: dict[str, Any], problem: str) -> None:
    with pytest.raises(Exception, match=r"c\.yml") as raised:
        await scored(tmp_path, {"s": block}, "a")
    assert problem in str(raised.value)


async def test_a_judge_grades_by_a_rubric(tmp_path: Path, server: FakeOpenAI) -> None:
    llm = {"_type": "openai", "model_name": "judge", "base_url": server.base_url, "api_key": "none-needed"}
    block = {"_type": "llm_judge", "llm": "j", "rubric": "Is it kind?", "scale": [0, 5]}
    asked = len(server.requests)
    for answer, score in (("Score: 4", 0.8), ("Score: 1. No: Score: 0", 0.0), ("Score: 9", None), ("?", None)):
        result = await scored(tmp_path, {"s": block}, answer, "a reference", llms={"j": llm})
        assert result.score == score
        assert (result.error is None) == (score is not None)
    request = server.requests[asked]
    assert request["temperature"] == 0
    assert "Is it kind?" in request["messages"][0]["content"]
    assert "a reference" in request["messages"][1]["content"]


CLIENTS = """
ASKED = [{"role": "user", "content": "hi"}]
MORE = {"extra_headers": {"X-Session": "7"}, "extra_query": {"tenant": "a"}}
async def waits(question, model):
    return (await model.client.chat.completions.create(model=model.model, messages=ASKED, top_p=0.5, **MORE)).choices[0]

def blocks(question, model):
    return model.client.chat.completions.create(model=model.model, messages=ASKED, top_p=0.5, **MORE).choices[0]
"""


@pytest.mark.parametrize("function", ["waits", "blocks"])
async def test_the_official_client_of_an_agent_has_the_parameters_of_the_block(
    tmp_path: Path, server: FakeOpenAI, function: str
) -> None:
    llm = {"_type": "openai", "model_name": "m", "base_url": server.base_url, "max_tokens": 9, "top_p": 0.9}
    workflow = {"_type": "python", "function": f"clients:{function}", "model": "j"}
    (tmp_path / "clients.py").write_text(CLIENTS)
    (tmp_path / "c.yml").write_text(yaml.safe_dump({"llms": {"j": llm}, "workflow": workflow}))
    async with Builder(load_config(tmp_path / "c.yml")) as builder:
        await (await builder.get_workflow()).ainvoke("hi")
    request = server.requests[-1]
    assert (request["max_tokens"], request["top_p"]) == (9, 0.5)
    assert server.latest is not None
    assert (server.latest.headers["X-Session"], server.latest.query["tenant"]) == ("7", "a")
    assert server.latest.headers["Authorization"] == "Bearer none"


def test_a_model_does_not_grade_itself(tmp_path: Path) -> None:
    project(tmp_path, ANSWER, SCORE)
    text = (tmp_path / "config.yml").read_text()
    config = yaml.safe_load(text)
    config["eval"]["evaluators"]["judge"] = {"_type": "llm_judge", "llm": "player", "rubric": "?"}
    (tmp_path / "config.yml").write_text(yaml.safe_dump(config))
    said = refusal(tmp_path)
    assert "eval.evaluators.judge.llm is 'player', which is trained: a model must not grade itself" in said


def test_scores_that_need_each_other(tmp_path: Path) -> None:
    project(tmp_path, ANSWER, SCORE)
    config = yaml.safe_load((tmp_path / "config.yml").read_text())
    config["eval"]["evaluators"] |= {
        name: {"_type": "weighted_sum", "weights": {other: 1}} for name, other in (("one", "two"), ("two", "one"))
    }
    (tmp_path / "config.yml").write_text(yaml.safe_dump(config))
    assert re.search(
        r"eval\.evaluators\.(one|two) -> .* -> eval\.evaluators\.\1: each needs the next", refusal(tmp_path)
    )


async def test_a_weighted_sum_needs_all_its_scores(tmp_path: Path) -> None:
    evaluators = {
        "a": EXACT,
        "b": NUMERIC | {"zero_at": 4},
        "s": {"_type": "weighted_sum", "weights": {"a": 1, "b": 0.5}},
    }
    result = await scored(tmp_path, evaluators, "5", "3")
    assert result.score == pytest.approx(0.25)
    assert result.reasoning == {"a": 0.0, "b": 0.5}
    result = await scored(tmp_path, evaluators, "5", "three")
    assert result.score is None
    assert result.error == "b: WorkflowError: the row's expected answer 'three' is not a number"

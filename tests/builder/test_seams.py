"""The functions of the extending guide, as it prints them: installed as a package, and beside a configuration file."""

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from factories import MODEL, ROOT, digits_project, pip_install, read_lines
from marks import slow_after
from processes import run, serving
from refusals import refusal
from tiny_models import byte_tokenizer, save_tiny_model

from insitu.algorithms.reward_shapes import overlong
from insitu.errors import ConfigError
from insitu.schemas.episodes import ModelCall

PLUGIN = ROOT / "tests/support/seams_plugin"
GUIDE = (ROOT / "docs/guides/extend.md").read_text()
EXAMPLE = ROOT / "examples/tic_tac_toe"
CODE = ("reward_shape", "advantages", "selection.0", "training.objective", "training.optimizer", "training.schedule")


def snippet(info: str, contains: str = "") -> str:
    return next(text for text in re.findall(rf"```{info}\n(.*?)```", GUIDE, re.DOTALL) if contains in text)


def merged(base: Any, change: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(change, dict):
        return change
    return base | {key: merged(base.get(key), value) for key, value in change.items()}


def write_project(folder: Path, change: str, **adapter: Any) -> Path:
    """The tic-tac-toe example for two epochs of a few episodes, changed."""
    config = yaml.safe_load((EXAMPLE / "grpo.yml").read_text())
    config["trainers"]["grpo"] = {"_type": "insitu_trainer"}
    small: dict[str, Any] = {
        "finetuning": {"num_epochs": 2, "output_dir": str(folder / "run"), "validation": None},
        "trajectory_builders": {"episodes": {"num_generations": 4, "rows_per_epoch": 4}},
        "trainer_adapters": {"backend": {"model": str(MODEL), "training": {"schedule": "constant", "warmup": 0.0}}},
    }
    config = merged(merged(config, small), yaml.safe_load(change))
    block = config["trainer_adapters"]["backend"]
    config["trainer_adapters"]["backend"] = {k: v for k, v in (block | adapter).items() if v is not None}
    shutil.copytree(EXAMPLE / "tic_tac_toe", folder / "tic_tac_toe", dirs_exist_ok=True)
    shutil.copy(EXAMPLE / "train.jsonl", folder / "train.jsonl")
    file = folder / "config.yml"
    file.write_text(yaml.safe_dump(config))
    return file


def finetune(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run("finetune", "--config_file", "config.yml", *arguments, folder=folder, **variables)


def check(folder: Path) -> None:
    first, second = read_lines(folder / "run/training_metrics.jsonl")
    assert first["dropped"]["warming_up"] == 4
    assert {"subsample", "warming_up"} <= first["dropped"].keys()
    assert "warming_up" not in second["dropped"]
    for line in (first, second):
        assert line["longest_episode"] >= 1
        assert 0 < line["gate"] < 2
        assert line["kl"] is not None
        assert line["episodes"] == line["filtered_trajectories"]
        assert line["avg_reward"] < line["scores"]["score"]
    assert second["learning_rate"] < first["learning_rate"]


def test_the_package_is_the_guide() -> None:
    for name in ("mine.py", "mine_loss.py", "mine_format.py"):
        assert snippet(f"python file={name}") == (PLUGIN / "src" / name).read_text()
    for group in ("objectives", "tool_formats"):
        assert snippet("text", f'insitu.{group}"').strip() in (PLUGIN / "pyproject.toml").read_text()


def test_guides_import_from_the_plugin_api_only() -> None:
    for page in (ROOT / "docs/guides").glob("*.md"):
        for block in re.findall(r"```python[^\n]*\n(.*?)```", page.read_text(), re.DOTALL):
            for module in re.findall(r"^\s*(?:from|import) (insitu[\w.]*)", block, re.MULTILINE):
                assert module in ("insitu", "insitu.plugin_api"), f"{page.name}: {module}"
            assert not re.search(r"^\s*from [\w.]+ import .*\b_\w+", block, re.MULTILINE), page.name


@pytest.mark.parametrize("continues", slow_after(1, [False, True]))
def test_functions_beside_the_file(tmp_path: Path, continues: bool) -> None:
    for name in ("mine.py", "mine_loss.py"):
        shutil.copy(PLUGIN / "src" / name, tmp_path / name)
    write_project(tmp_path, snippet("yaml fragment", "mine_loss"))
    ended = finetune(tmp_path)
    assert ended.returncode == 0, ended.stderr
    check(tmp_path)
    recorded = json.loads((tmp_path / "run/run.json").read_text())
    for key in CODE:
        value: Any = recorded
        for part in key.split("."):
            value = value[int(part)] if part.isdecimal() else value[part]
        assert len(value["sha256"]) == 64, key

    if not continues:
        return
    more = ("-o", "finetuning.num_epochs", "3", "--resume")
    with (tmp_path / "mine_loss.py").open("a") as file:
        file.write("\nCHANGED = True\n")
    ended = finetune(tmp_path, *more)
    assert ended.returncode == 2
    assert "training.objective" in ended.stderr
    assert "--force" in ended.stderr
    ended = finetune(tmp_path, *more, "--force")
    assert ended.returncode == 0, ended.stderr
    assert len(read_lines(tmp_path / "run/training_metrics.jsonl")) == 3


@pytest.mark.slow
def test_functions_of_an_installed_package(tmp_path: Path) -> None:
    site = pip_install(PLUGIN, tmp_path / "pip")
    names = {
        '{_type: python, function: "mine:advantages"}': "{_type: over_the_best}",
        '{_type: python, function: "mine:shape"}': "{_type: short}",
        '_type: python, function: "mine:selection"': "_type: few_answers",
        '_type: python, function: "mine_loss:loss"': "_type: gated",
        '{_type: python, function: "mine_loss:reference"}': "two_versions_ago",
        '{_type: python, function: "mine_loss:optimizer"}': "momentum",
        '{_type: python, function: "mine_loss:schedule"}': "square",
    }
    change = snippet("yaml fragment", "mine_loss")
    for code, name in names.items():
        assert code in change
        change = change.replace(code, name)
    write_project(tmp_path, change)
    ended = finetune(tmp_path, PYTHONPATH=str(site))
    assert ended.returncode == 0, ended.stderr
    check(tmp_path)


TEMPLATE = (
    "{% if tools %}Call by <<call NAME>>{}<<end>>: {{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{{ m.content }}{% endfor %}<<note>>Answer.<<done>>"
)
PARSE = """
import json
from insitu.formats.parser import MessageFormats, message_parser
tools = [{"type": "function", "function": {"name": "look"}}]
parser = message_parser(MessageFormats.of(input()), "", tools)
text = '<<note>>Why.<<done>>I look.<<call look>>{"at": "ü"}<<end>>'
pieces = [*map(parser.feed, text), parser.finish()]
calls = [call["function"] for piece in pieces for call in piece.calls]
print(json.dumps(["".join(p.reasoning for p in pieces), "".join(p.content for p in pieces), calls]))
"""


@pytest.mark.slow
def test_formats_of_an_installed_package(tmp_path: Path) -> None:
    """Recognized from the template, parsed and streamed, and written by a model that knows nothing."""
    site = pip_install(PLUGIN, tmp_path / "pip")
    model = save_tiny_model(tmp_path / "model", max_position_embeddings=1024)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    place = {"type": "object", "properties": {"at": {"type": "string", "maxLength": 9}}, "required": ["at"]}
    asked: dict[str, Any] = {
        "model": "policy",
        "messages": [{"role": "user", "content": "?"}],
        "tools": [{"type": "function", "function": {"name": "look", "parameters": place}}],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "logit_bias": {str(byte_tokenizer().convert_tokens_to_ids("c")): 9},  # for a call without a note
        "n": 8,
        "seed": 3,
        "max_tokens": 600,
    }
    with serving("backend", "--model", model, "--port", 0, PYTHONPATH=str(site)) as (_, address):
        with urllib.request.urlopen(f"{address}/health") as health:
            formats = json.loads(health.read())
        with openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client:
            choices = client.chat.completions.create(**asked).choices
            streamed: dict[int, list[Any]] = {}
            for chunk in client.chat.completions.create(**asked, stream=True):
                streamed.setdefault(chunk.choices[0].index, []).append(chunk.choices[0])
    assert (formats["tool_format"], formats["reasoning_format"]) == ("angles", "notes")
    for choice in choices:
        (call,) = choice.message.tool_calls or ()
        assert (call.function.name, choice.finish_reason) == ("look", "tool_calls")
        assert json.loads(call.function.arguments).keys() == {"at"}
        assert choice.message.content is None
        assert streamed[choice.index][-1].delta.tool_calls[0].function.arguments == call.function.arguments
    command = [sys.executable, "-c", PARSE]
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(command, input=TEMPLATE, env=env, capture_output=True, encoding="utf-8", check=True)
    assert json.loads(done.stdout) == ["Why.", "I look.", [{"name": "look", "arguments": '{"at": "ü"}'}]]


@pytest.mark.parametrize(
    ("tokens", "reward"), [((), 2), ((50,), 2), ((384,), 2), ((448, 50), 1.75), ((50, 512), 1.5), ((600,), 1.5)]
)
def test_overlong_completions_lose_up_to_the_penalty(tokens: tuple[int, ...], reward: float) -> None:
    calls = [ModelCall(index, "player", [], token_ids=[7] * count) for index, count in enumerate(tokens)]
    calls.append(ModelCall(9, "judge", [], token_ids=None))
    assert overlong(2.0, calls, max_tokens=512, buffer=128, penalty=0.5) == reward
    with pytest.raises(ConfigError, match=r"buffer is 9; allowed: from 1 to max_tokens \(8\)"):
        overlong(2.0, calls, max_tokens=8, buffer=9)


OVERLONG = (
    "finetuning: {reward_function: {name: score, shape: {_type: overlong, arguments: {max_tokens: 8, buffer: %s, "
    "penalty: 0.25}}}}"
)


def test_a_wrong_argument_of_a_shape_is_refused(tmp_path: Path) -> None:
    write_project(tmp_path, OVERLONG % 0)
    assert "reward_function.shape.arguments.buffer is 0: Input should be greater than 0" in refusal(tmp_path)
    write_project(tmp_path, OVERLONG % 9)
    problem = "buffer is 9: overlong: buffer is 9; allowed: from 1 to max_tokens (8)"
    assert f"reward_function.shape.arguments.{problem}" in refusal(tmp_path)


@pytest.mark.slow
def test_a_run_with_overlong_completions(tmp_path: Path) -> None:
    write_project(tmp_path, OVERLONG % 4)
    ended = finetune(tmp_path)
    assert ended.returncode == 0, ended.stderr
    episodes = read_lines(tmp_path / "run/episodes.jsonl.gz")[1:]
    calls = read_lines(tmp_path / "run/calls.jsonl.gz")[1:]
    lost = {each["episode"]: round(each["scores"]["score"] - each["reward"], 9) for each in episodes}
    longest = dict.fromkeys(lost, 0)
    for call in calls:
        longest[call["episode"]] = max(longest[call["episode"]], len(call["token_ids"]))
    assert lost == {each: 0.25 * min(max(length - 4, 0), 4) / 4 for each, length in longest.items()}
    assert len({*lost.values()}) > 1


OBJECTIVE = 'trainer_adapters: {backend: {training: {objective: {_type: python, function: "mine_loss:loss"}}}}'


def test_a_backend_loads_no_code_unless_it_is_allowed(tmp_path: Path) -> None:
    shutil.copy(PLUGIN / "src/mine_loss.py", tmp_path / "mine_loss.py")
    other = tmp_path / "other"
    other.mkdir()
    (other / "outside.py").symlink_to(tmp_path / "mine_loss.py")
    for options, objective, problem in (
        ((), OBJECTIVE, "--allow_code FOLDER"),
        (("--allow_code", other), OBJECTIVE, "there is no mine_loss in"),
        (("--allow_code", other), OBJECTIVE.replace("mine_loss", "outside"), "there is no outside in"),
        (("--allow_code", tmp_path), OBJECTIVE.replace(":loss", ":torch"), "must be a function that is defined in"),
    ):
        with serving("backend", "--model", MODEL, "--port", 0, *options, folder=tmp_path) as (_, url):
            write_project(tmp_path, objective, model=None, url=url)
            ended = finetune(tmp_path)
            assert ended.returncode == 2
            assert problem in ended.stderr
            assert "settings.objective" in ended.stderr


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("absent:loss", "there is no absent in FOLDER"),
        ("../mine_loss.py:loss", "there is no ../mine_loss.py in FOLDER"),
        ("mine_loss", "'mine_loss' must be MODULE:NAME or FILE.py:NAME, such as mine:loss"),
        ("mine_loss:los", "in FOLDER/mine_loss.py, 'los' does not exist (did you mean 'loss'?)"),
        ("broken.py:loss", "FOLDER/broken.py is not Python: "),
        ("old.py:loss", "in FOLDER/old.py, 'loss' does not exist; available: name"),
    ],
)
def test_code_of_a_job_is_looked_for_before_anything_is_started(tmp_path: Path, function: str, problem: str) -> None:
    """And not run: that is the backend's part."""
    write_project(tmp_path, OBJECTIVE)
    code = (PLUGIN / "src/mine_loss.py").read_text()
    (tmp_path / "mine_loss.py").write_text(f"{code}\nraise SystemExit\n")
    (tmp_path.parent / "mine_loss.py").write_text(code)
    (tmp_path / "broken.py").write_text("def loss(:")
    (tmp_path / "old.py").write_bytes("# coding: latin-1\nname = '\xe9'\n".encode("latin-1"))
    key = "trainer_adapters.backend.training.objective.function"
    said = refusal(tmp_path, "-o", key, function)
    assert said.startswith("trainer_adapters: training.objective.function: " + problem.replace("FOLDER", str(tmp_path)))


@pytest.mark.parametrize(
    ("body", "problem"),
    slow_after(
        1,
        [
            ("return batch.new_BT[:, :0]", "allowed: a tensor of shape"),
            ("return None", "NoneType"),
            ("return batch.advantage_BT", "has no gradient"),
            ("return batch.nothing", "AttributeError"),
        ],
    ),
)
def test_a_loss_that_cannot_be_trained_is_refused_before_the_first_episode(
    tmp_path: Path, body: str, problem: str
) -> None:
    (tmp_path / "mine_loss.py").write_text(f"def loss(batch, settings):\n    {body}\n")
    write_project(tmp_path, OBJECTIVE)
    ended = finetune(tmp_path)
    assert ended.returncode == 2
    assert problem in ended.stderr
    assert not (tmp_path / "run/groups.jsonl").exists() or len(read_lines(tmp_path / "run/groups.jsonl")) <= 1


@pytest.mark.parametrize(
    ("key", "body", "problem"),
    [
        ("optimizer", "return None", "optimizer: a NoneType was returned; allowed: a torch.optim.Optimizer"),
        ("optimizer", "import torch; return torch.optim.SGD(given, lr=1)", "optimizer: it cannot be made: "),
        ("schedule", "return None if given else 1", "schedule: it returned None for 0.5; allowed: finite numbers from"),
        ("schedule", "return 0.5 - given", "schedule: it returned -0.5 for 1; allowed: finite numbers from 0"),
        ("schedule", "return given.rate", "schedule: for 0 it raised AttributeError"),
    ],
)
def test_an_optimizer_or_schedule_that_cannot_be_used_is_refused_before_the_first_episode(
    steps_backend: tuple[Path, str], key: str, body: str, problem: str
) -> None:
    folder, url = steps_backend
    (folder / "mine.py").write_text(f"def part(given, settings=None):\n    {body}\n")
    part = "{_type: python, function: 'mine:part'}"
    write_project(folder, f"trainer_adapters: {{backend: {{training: {{{key}: {part}}}}}}}", model=None, url=url)
    ended = finetune(folder)
    assert ended.returncode == 2
    assert problem in ended.stderr
    assert not (folder / "run/groups.jsonl").exists()


@pytest.fixture(scope="module")
def steps_backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    folder = tmp_path_factory.mktemp("steps")
    with serving("backend", "--model", MODEL, "--port", 0, "--allow_code", folder, folder=folder) as (_, url):
        yield folder, url


PARTS = """
def advantages(rewards):
    return [0.0 for reward in rewards]

async def later(rewards, episodes):
    return rewards

def select(groups, epoch):
    return [None for group in groups]

def shape(score, rows):
    return score

class Shape:
    pass

instance = Shape()
"""
GETS = "row=, expected=, question=, answer=, scores=, calls=, and what arguments sets"
"""By name."""


@pytest.mark.parametrize(
    ("key", "part", "problem"),
    [
        (
            "trainers.grpo.advantages",
            "{_type: python, function: 'own_parts:advantages'}",
            "advantages(rewards): too many positional arguments; it gets rewards, episodes, and what arguments sets",
        ),
        (
            "trainers.grpo.advantages",
            "{_type: python, function: 'own_parts:later'}",
            "later is asynchronous; it must return its result",
        ),
        (
            "trainers.grpo.selection",
            "[{_type: python, function: 'own_parts:select', arguments: {share: 1}}]",
            "select(groups, epoch): got an unexpected keyword argument 'share'; it gets groups, epoch=, seed=, and",
        ),
        (
            "trainers.grpo.selection",
            "[{_type: random_subsample, arguments: {frac: 0.5}}]",
            "random_subsample(groups, fraction, epoch, seed): missing a required argument: 'fraction'; it gets groups",
        ),
        (
            "trainers.grpo.selection",
            "[{_type: no_variance}, {_type: random_subsample, arguments: {fraction: 7}}]",
            "selection.1.arguments.fraction is 7: Input should be less than or equal to 1",
        ),
        (
            "finetuning.reward_function.shape",
            "{_type: python, function: 'own_parts:shape'}",
            f"shape: shape(score, rows): missing a required argument: 'rows'; it gets score, {GETS}",
        ),
        (
            "finetuning.reward_function.shape",
            "{_type: python, function: 'own_parts:instance'}",
            "shape.function: own_parts:instance is a Shape; it must be a function",
        ),
        (
            "finetuning.reward_function.shape",
            "{_type: overlong, arguments: {buffer: 3}}",
            f"overlong(score, calls, max_tokens, buffer, penalty): missing a required argument: 'max_tokens'; it gets "
            f"score, {GETS}",
        ),
    ],
)
def test_a_part_that_cannot_be_called_is_refused_before_anything_is_started(
    tmp_path: Path, key: str, part: str, problem: str
) -> None:
    (tmp_path / "own_parts.py").write_text(PARTS)
    said = refusal(digits_project(tmp_path, rows=2), "-o", key, part)
    assert said.startswith(key)
    assert problem in said

"""`insitu.finetune` and `insitu.evaluate` from scripts, event loops and a notebook."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from factories import MODEL, ROOT, read_lines
from marks import slow_after
from processes import HANGS, forked_python, run_project

import insitu
from insitu import errors

HEAD = f"""
import json
import insitu
from pathlib import Path
from insitu.disk.folder_lock import FolderLock
from digits_plugin import mean_digit

MODEL = {str(MODEL)!r}
ROWS = [{{"question": f"Row {{i}}", "answer": "7"}} for i in range(4)]

async def answer(question: str, model: insitu.Model) -> str:
    return await model.ask(question)

def score(answer: str, row: insitu.Row) -> insitu.Score:
    return insitu.Score(mean_digit(answer), row["question"], steps=[mean_digit(answer)])

def show(**values):
    print("SHOWN", json.dumps(values, default=str))
"""
TRAIN = """
run = insitu.finetune(
    answer, score, train=ROWS, held_out=ROWS[:2], model=MODEL, epochs=2, generations=2, max_tokens=6,
    trainers={"grpo": {"credit": "step"}},
    trainer_adapters={"backend": {"training": {"learning_rate": 1e-3, "mini_batch_size": 4}}},
)
"""


def script(
    folder: Path, code: str, *, head: str = HEAD, returncode: int = 0, **names: str
) -> tuple[dict[str, Any], str]:
    """What a script shows, and all that it prints."""
    (folder / "digits_plugin.py").write_text((ROOT / "tests/support/digits_plugin.py").read_text())
    (folder / "my_script.py").write_text(HEAD + code)
    command = [forked_python(), "my_script.py"]
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == returncode, (done.stdout, done.stderr)
    shown = [json.loads(line.removeprefix("SHOWN ")) for line in done.stdout.splitlines() if line.startswith("SHOWN ")]
    return {key: value for values in shown for key, value in values.items()}, done.stdout + done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trained")
    code = """
with run.model("latest") as model:
    told = model.ask("Row 0"), model.complete("Row 0").choices[0].message.content, model.client.models.list().data[0].id
episodes = list(run.episodes(epoch=2, row=1))
every = run.episodes()
try:
    run.episodes(epoch="2")
except insitu.InsituError as error:
    show(no_number=str(error))
try:
    run.episodes(row="x")
except insitu.InsituError as error:
    show(no_row=str(error))
names = [e.key.text() for e in every]
show(
    sliced=[len(every), [e.key.text() for e in every[1:4]] == names[1:4], every[-1].key.text() == names[-1]],
    table=repr(run.metrics),
)
show(
    folder=run.folder, best=run.best["policy_version"], rewards=run.metrics.column("avg_reward"), told=told,
    validations=[v["epoch"] for v in run.validations], html=run.validations._repr_html_(), shown=repr(run),
    episodes=[(e.key.epoch, e.key.row_id, len(e.calls), e.step_rewards == [e.reward], e.reasoning) for e in episodes],
)
"""
    return folder, script(folder, TRAIN + code)[0]


def test_a_script_trains(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, shown = trained
    assert shown["folder"] == str(folder / "runs/answer")
    assert shown["best"] in (0, 1, 2)
    assert shown["validations"] == [0, 2]
    assert [line["avg_reward"] for line in read_lines(folder / "runs/answer/training_metrics.jsonl")] == shown[
        "rewards"
    ]
    assert shown["episodes"] == [[2, "1", 1, True, "Row 1"]] * 2
    assert "completed, epoch 2 of 2, held out 0." in shown["shown"]
    assert shown["html"].startswith("<table><tr><th>epoch</th>")
    assert all(isinstance(text, str) for text in shown["told"])


def test_results_are_short_and_read_when_they_are_used(trained: tuple[Path, dict[str, Any]]) -> None:
    _, shown = trained
    assert shown["sliced"] == [16, True, True]
    assert shown["no_number"] == "epoch is '2'; it must be a number"
    assert shown["no_row"].endswith(" has no episodes of row 'x'; 4 rows have some, such as 0, 1, 2")
    assert re.fullmatch(r"Table\(2 rows: epoch, (\w+, ){7}\.\.\.; last avg_reward [\d.]+\)", shown["table"])


def test_the_file_that_a_script_writes_does_the_same(trained: tuple[Path, dict[str, Any]]) -> None:
    """The script itself is imported by it, as far as to its call of insitu."""
    folder, shown = trained
    settings = yaml.safe_load((folder / "runs/answer/config.yml").read_text())
    assert settings["workflow"] == {"_type": "python", "function": "my_script:answer", "model": "student"}
    assert (folder / "runs/answer/rows.jsonl").read_text().count("\n") == 4
    code, _, err = run_project(folder, "-o", "finetuning.output_dir", "again", file="runs/answer/config.yml")
    assert code == 0, err
    assert [line["avg_reward"] for line in read_lines(folder / "again/training_metrics.jsonl")] == shown["rewards"]
    assert not (folder / "runs/answer.1").exists()


def test_agents_and_scores_of_every_kind(tmp_path: Path) -> None:
    code = """
import asyncio, sys

class Asker:
    def __init__(self, model):
        self.model = model

    async def run(self, question):
        assert not hasattr(self, "asked")
        self.asked = question
        return await self.model.ask(question)

def blocking(question, model):
    return model.ask(question)

def build(model):
    return Asker(model)

suffix = "7"
agents = {
    "function": answer, "blocking": blocking, "builder": build, "class": Asker,
    "closure": lambda question, model: model.ask(question) + suffix,
}
scores = {}
for name, _agent in agents.items():
    both = {"score": score, "seven": {"_type": "contains", "require": "any"}, "answer": score}
    done = insitu.evaluate(_agent, both, ROWS, model=MODEL, max_tokens=6)
    scores[name] = [estimate.mean for estimate in done.scores.values()]
rows = done.table
judge = {"_type": "llm_judge", "llm": "judge", "rubric": "good?"}
key = "secret-of-nobody"
nobody = {"_type": "openai", "model_name": "x", "base_url": "http://127.0.0.1:9/v1", "api_key": key, "max_retries": 0}
row = [{"question": "x", "answer": "y"}]
both = {"exact": "exact_match", "judge": judge}
done = insitu.evaluate(answer, both, row, model=MODEL, max_tokens=6, llms={"judge": nobody})
show(problems=done.problems, file=(done.folder / "config.yml").read_text(), shown=repr(done))

async def in_a_loop():
    return insitu.evaluate(answer, score, ROWS, model=MODEL, max_tokens=6).score

show(answers=rows.column("answer"))
show(scores=scores, columns=rows.columns, exact=done.score, looped=asyncio.run(in_a_loop()))
"""
    shown, _ = script(tmp_path, code)
    scores = shown["scores"]
    assert scores["function"] == scores["blocking"] == scores["builder"] == scores["class"]
    assert scores["closure"][1] == 1.0
    assert scores["closure"][0] > scores["function"][0]
    assert shown["columns"] == [
        "id",
        "rep",
        "question",
        "expected",
        "answer",
        "error",
        "score",
        "seven",
        "score of answer",
    ]
    assert {type(answer) for answer in shown["answers"]} == {str}
    assert shown["exact"] == 0.0
    (problem,) = shown["problems"]
    assert problem.startswith("1 scores are missing; the first, of row 0: ")
    assert problem in shown["shown"]
    assert "secret-of-nobody" not in shown["file"]
    assert "# Secrets are hidden" in shown["file"]
    assert shown["looped"] == scores["function"][0]
    written = (tmp_path / "evaluations/lambda/config.yml").read_text()
    assert "session:lambda: defined where no file can import it" in written


def test_a_checkpoint_is_evaluated_without_naming_its_model(trained: tuple[Path, dict[str, Any]]) -> None:
    """Also if the best weights of the run are those that it started from."""
    folder, _ = trained
    code = """
def scored(**options):
    return list(insitu.evaluate(answer, score, ROWS, max_tokens=6, checkpoint="runs/answer", **options).table)

show(scored=[scored(), scored(model=MODEL)])
shutil.copytree("runs/answer", "runs/worse")
(Path("runs/worse") / "best.json").write_text(json.dumps({"avg_reward": 0.5, "epoch": 0, "checkpoint": None}))
shown = [dict(checkpoint="runs/worse"), dict(model=MODEL)]
show(started=[list(insitu.evaluate(answer, score, ROWS, max_tokens=6, **each).table) for each in shown])
"""
    shown, _ = script(folder, f"import shutil\n{code}")
    (without, with_model), (best, started) = shown["scored"], shown["started"]
    assert without == with_model != []
    assert best == started != []


def test_the_trained_agent_answers(trained: tuple[Path, dict[str, Any]]) -> None:
    """The agent of a run that is opened again, which is imported from this very script."""
    folder, _ = trained
    code = """
import asyncio, psutil

def backends():
    return [each.pid for each in psutil.Process().children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE]

async def ask_in_a_loop():
    return run.ask("Row 1", checkpoint="latest")

async def several():
    return await asyncio.gather(*(run.agent(f"Row {i}", checkpoint="step_000002") for i in range(4)))

async def own_agent():
    async with run.model("latest") as model:
        return isinstance(model, insitu.Model), await answer("Row 0", model)

run = insitu.Run("runs/answer")
answers = [run.ask("Row 0", checkpoint="latest"), asyncio.run(ask_in_a_loop()), *asyncio.run(several())]
greedy = {run.ask("Row 0", checkpoint="latest", temperature=0) for _ in range(4)}
started = len(backends())
refused = []
for options in ({"checkpoint": "step_9"}, {"checkpoint": "latest", "temperature": -1}):
    try:
        run.ask("Row 0", **options)
    except insitu.ConfigError as error:
        refused.append(str(error))
run.close()
closed = len(backends())
own = asyncio.run(own_agent())
again = run.ask("Row 0", checkpoint="latest")  # nobody closes it
show(answers=answers, greedy=len(greedy), started=started, closed=closed, own=own, again=again)
show(left=backends(), refused=refused)
"""
    shown, printed = script(folder, code)
    assert [type(each) for each in shown["answers"]] == [str] * 6
    assert shown["greedy"] == 1
    assert (shown["started"], shown["closed"], len(shown["left"])) == (1, 0, 1)
    assert not any(map(psutil.pid_exists, shown["left"]))
    assert (shown["own"][0], type(shown["own"][1]), type(shown["again"])) == (True, str, str)
    assert "step_9 was deleted or never made; checkpoints there: step_" in shown["refused"][0]
    assert shown["refused"][1:] == ["temperature is -1; allowed: at least 0"]
    assert "Traceback" not in printed


@pytest.mark.slow
def test_a_program_that_does_not_close_its_agent_ends_in_silence(trained: tuple[Path, dict[str, Any]]) -> None:
    code = "import insitu; print(insitu.Run('runs/answer').ask('Row 0', checkpoint='latest'))"
    (scratch := trained[0] / "scratch").mkdir()
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=trained[0], env=os.environ | {"TMPDIR": str(scratch)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr, [*scratch.glob("insitu-*/*")]) == (0, "", [])


@pytest.mark.slow
def test_a_trained_agent_is_asked_as_it_was_trained(tmp_path: Path) -> None:
    """With functions that no file can import, its row and its errors; and with another file."""
    code = """
import yaml

def make(name):
    def agent(question, model, row):
        if question in ("boom", "exit"):
            raise LookupError(name) if question == "boom" else SystemExit(3)
        return [model.ask(question), row]
    return agent

run = insitu.finetune(
    make("mine"), lambda answer: mean_digit(answer[0]), train=ROWS, model=MODEL, epochs=1, generations=2, max_tokens=4,
)
with run:
    answers = [run.ask("Row 0"), run.ask("Row 0", row=ROWS[1])]
    try:
        run.ask("boom")
    except LookupError as error:
        answers.append(str(error))
    try:
        run.ask("exit")
    except SystemExit as error:
        assert error.code == 3
model = run.model()
model.close()
for wrong in (model.__enter__, lambda: insitu.Run(run.folder, config={}), lambda: run.ask("Row 0", checkpoint=1)):
    try:
        wrong()
    except (insitu.InsituError, TypeError) as error:
        answers.append(str(error))
settings = yaml.safe_load((run.folder / "config.yml").read_text())
settings["workflow"] = {"_type": "python", "function": "my_script:answer", "model": "student"}
settings["eval"]["evaluators"]["lambda"]["function"] = "digits_plugin:mean_digit"
settings["general"]["folder"] = "."
Path("other.yml").write_text(yaml.dump(settings))
with insitu.Run(run.folder, config="other.yml") as other:
    show(answers=answers, other=other.ask("Row 0"))
(run.folder / "best.json").write_text(json.dumps({"avg_reward": 0.5, "epoch": 0, "checkpoint": None}))
run.ask("Row 0")
"""
    shown, printed = script(tmp_path, code, returncode=1)
    first, second, raised, *refused = shown["answers"]
    assert len(refused) == 3
    assert "it was closed before it was used" in refused[0]
    assert refused[1] == "config is a dict; it must be the path of a file, as str or Path, or None"
    assert "1 is not a checkpoint; allowed: best, latest, step_N" in refused[2]
    assert (first[1], second[1]) == ({"question": "Row 0"}, {"question": "Row 1", "answer": "7"})
    assert raised == "mine"
    assert "the run continues" not in printed
    assert isinstance(shown["other"], str)
    assert re.search(r"functions.<workflow>.function was 'session:.*agent' and is 'my_script:answer'", printed)
    assert re.search(
        r"checkpoint is the best of .*: 0.5 at epoch 0, before training: these weights were not trained", printed
    )


@pytest.mark.slow
def test_a_run_is_continued(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = trained
    code = TRAIN.replace("epochs=2", "epochs=3, resume=True") + "show(rewards=run.metrics.column('avg_reward'))"
    shown, _ = script(folder, code)
    assert len(shown["rewards"]) == 3


@pytest.mark.slow
def test_a_run_without_a_completed_epoch_is_begun_again_with_its_files(trained: tuple[Path, dict[str, Any]]) -> None:
    folder = Path(shutil.copytree(trained[0], trained[0].with_name("begun")))
    run = folder / "runs/answer"
    begun = {"config.yml", "rows.jsonl", "held_out.jsonl", "run.json", "events.jsonl"}
    for path in [path for path in run.iterdir() if path.name not in begun]:  # as a process that is killed early
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    script(folder, TRAIN.replace("epochs=2", "epochs=1, resume=True"))
    assert len(read_lines(run / "training_metrics.jsonl")) == 1
    assert {"config.yml", "rows.jsonl"} <= {path.name for path in run.iterdir()}
    assert (run.with_name("answer.1") / "run.json").exists()


def test_a_complete_run_is_left_as_it_was(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = trained
    files = [folder / "runs/answer" / name for name in ("config.yml", "rows.jsonl", "held_out.jsonl", "run.json")]
    epochs = len(read_lines(folder / "runs/answer/training_metrics.jsonl"))
    before = [(file.read_bytes(), file.stat().st_mtime_ns) for file in files]
    _, printed = script(folder, TRAIN.replace("epochs=2", f"epochs={epochs}, resume=True"))
    assert f"is complete after epoch {epochs}" in printed
    assert [(file.read_bytes(), file.stat().st_mtime_ns) for file in files] == before


@pytest.mark.parametrize(
    ("changed", "problem"),
    slow_after(
        2,
        [
            ("train=ROWS[:3]", "the dataset .* has changed"),
            ("held_out=ROWS[1:3]", "the held-out dataset .* has changed"),
            ("temperature=0.5", "temperature was None and is 0.5"),
            ("max_concurrency=FolderLock(Path('runs/answer'), 'x') and 3", "runs/answer is (in use|used)"),
        ],
    ),
)
def test_a_run_whose_continuation_is_refused_is_left_as_it_was(
    trained: tuple[Path, dict[str, Any]], changed: str, problem: str
) -> None:
    folder, _ = trained
    run = folder / "runs/answer"
    names = ("config.yml", "rows.jsonl", "held_out.jsonl", "run.json", "progress.json")
    before = [((run / name).read_bytes(), (run / name).stat().st_mtime_ns) for name in names]
    call = TRAIN.replace("train=ROWS, held_out=ROWS[:2],", "**given,").replace("epochs=2", "epochs=4, resume=True")
    given = f"given = dict(train=ROWS, held_out=ROWS[:2]) | dict({changed})\n"
    _, printed = script(folder, given + call, returncode=1)
    assert re.search(problem, printed), printed
    assert [((run / name).read_bytes(), (run / name).stat().st_mtime_ns) for name in names] == before


REFUSED = [
    ("finetune(answer, train=ROWS)", "ConfigError: a score, model must be given, or config, a file that names them"),
    (
        "finetune(score=score, train=ROWS, model=MODEL)",
        r"ConfigError: an agent must be given (in place of an agent: url= or workflow=, for a service or a "
        "program), or config, a file that names them",
    ),
    (
        "finetune(answer, score, train=ROWS, model=MODEL, trainer={})",
        "ConfigError: the keyword 'trainer' does not exist",
    ),
    (
        "finetune(answer, score, train=ROWS, model=MODEL, epoch=3)",
        "ConfigError: the keyword 'epoch' does not exist (did you mean 'epochs'?); available: agent, score, train",
    ),
    (
        "finetune(answer, score, train=ROWS, model=MODEL, lora={'rank': 4})",
        'ConfigError: lora is a key of training, not a keyword; give finetuning={"training": {"lora": ...}}',
    ),
    (
        "finetune(answer, score, train=ROWS, model=MODEL, finetuning={'training': {'lora': {'rank': 0}}})",
        "ConfigError: trainer_adapters.backend.training.lora.rank: Input should be greater",
    ),
    (
        "finetune(answer, score, train=ROWS, finetuning={'model': MODEL, 'training': {'lora': {'rank': 0}}})",
        "ConfigError: trainer_adapters.backend.training.lora.rank: Input should be greater",
    ),
    (
        "evaluate(answer, score, ROWS, model=MODEL, repetition=3)",
        "ConfigError: the keyword 'repetition' does not exist (did you mean 'repetitions'?)",
    ),
    (
        "finetune(answer, score, train=ROWS[0], model=MODEL)",
        "ConfigError: train is a dict; it must be a path, a list of rows, or a table; of a single row: [row]",
    ),
    (
        "evaluate(answer, score, ROWS[0], model=MODEL)",
        "ConfigError: rows is a dict; it must be a path, a list of rows, or a table; of a single row: [row]",
    ),
    (
        "finetune(answer, score, train=[3], model=MODEL)",
        "ConfigError: train, row 1 must be a mapping of columns, not 3",
    ),
    (
        "finetune(answer, score, train=7, model=MODEL)",
        "ConfigError: train is an int; it must be a path, a list of rows",
    ),
    ("finetune(answer, score, train=[{'x': {1}}], model=MODEL)", "ConfigError: train, row 1 cannot be written as JSON"),
    ("finetune(answer, score, train=[{'x': 1}], model=MODEL)", "row 1: the question key 'question' does not exist"),
    ("finetune(answer, score, train='rows.txt', model=MODEL)", "the file format '.txt' does not exist"),
    ("finetune(answer, score, train='rows.jsonl', model=MODEL)", "'rows.jsonl' does not exist; looked for "),
    ("finetune(answer, {}, train=ROWS, model=MODEL)", "ConfigError: score is an empty mapping"),
    ("finetune(answer, 'exact', train=ROWS, model=MODEL)", "eval.evaluators.exact: _type 'exact' does not exist"),
    (
        "finetune(answer, score, train=ROWS, model=MODEL, epochs=0)",
        "insitu.errors.ConfigError: epochs: Input should be greater",
    ),
    ("finetune(object(), score, train=ROWS, model=MODEL)", "cannot be given another model once it is built"),
    (
        "finetune(answer, score, train=ROWS, model=MODEL, output_dir='/proc/x')",
        "ConfigError: output_dir: cannot write to /proc/x: No such file",
    ),
    ("evaluate(answer, score, ROWS, model=MODEL, output_dir='/proc/x')", "ConfigError: output_dir: cannot write"),
    (
        "evaluate(answer, score, ROWS, model=MODEL, output_dir='runs/answer')",
        "/runs/answer holds a run, whose files would be replaced; give another folder",
    ),
    (
        "evaluate(answer, score, ROWS, model=MODEL, repetitions=0)",
        "insitu.errors.ConfigError: repetitions is 0; it must be a whole number of at least 1",
    ),
    ("evaluate(answer, score, ROWS, model=MODEL, output_dir='own')", "/own/config.yml exists already and is not"),
    ("finetune(answer, score, train=ROWS, model=MODEL, output_dir='own')", "/own/config.yml exists already and is"),
    (
        "evaluate(answer, score, ROWS, model=MODEL, output_dir='theirs')",
        "/theirs/rows.jsonl exists already and is not replaced",
    ),
    ("finetune(config='nothing.yml')", "cannot read the configuration file nothing.yml"),
    ("evaluate(answer, score, ROWS, model='runs')", "BackendUnavailable"),
    (
        "evaluate(answer, lambda answer: 'good', ROWS, model=MODEL)",
        "InsituError: nothing could be scored; 4 scores are ",
    ),
    ("Run('nothing')", "ConfigError: nothing holds no run of insitu finetune"),
    ("finetuned", "module 'insitu' has no attribute 'finetuned'"),
]


def test_what_cannot_be_done_is_an_error_of_insitu(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """With the message of the command line, and before an earlier run is moved aside."""
    (tmp_path / "runs/answer").mkdir(parents=True)
    (tmp_path / "runs/answer/run.json").write_text("{}")
    (tmp_path / "own").mkdir()
    (tmp_path / "own/config.yml").write_text("general: {seed: 3}\n")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/rows.jsonl").write_text('{"question": "a"}\n')
    of_a_call = "# Written by insitu: these settings as a file.\n# Its rows are not in rows.jsonl or held_out.jsonl.\n"
    (tmp_path / "theirs/config.yml").write_text(of_a_call)
    tried = (
        f"print('CALL')\ntry:\n    insitu.{call}\nexcept Exception:\n    traceback.print_exc(file=sys.stdout)\n"
        for call, _ in REFUSED
    )
    _, printed = script(tmp_path, "import sys, traceback\n" + "".join(tried))
    _, *said = printed.split("CALL\n")
    for (call, problem), lines in zip(REFUSED, said, strict=True):
        assert any(problem in line for line in lines.strip().splitlines()), (call, lines)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["answer"]
    assert [path.name for path in (tmp_path / "runs/answer").iterdir()] == ["run.json"]
    assert (tmp_path / "own/config.yml").read_text() == "general: {seed: 3}\n"


def test_a_script_that_asks_for_what_cannot_be_done_fails(tmp_path: Path) -> None:
    _, printed = script(tmp_path, "insitu.finetune(answer, train=ROWS)", returncode=1)
    assert any(
        line.startswith("insitu.errors.ConfigError: a score, model must be given") for line in printed.splitlines()
    )


def test_errors_speak_the_language_of_the_call(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = trained
    code = TRAIN.replace("epochs=2", "epochs=4, temperature=0.5, resume=True")
    _, printed = script(folder, f"try:\n  {code.strip()}\nexcept insitu.ConfigError as error: print('REFUSED', error)")
    refused = next(line for line in printed.splitlines() if line.startswith("REFUSED"))
    assert refused.startswith("REFUSED resume=True: the run in ")
    assert "settings: temperature was None and is 0.5" in refused
    assert not re.search(r"config\.yml|num_epochs|llms|--resume", refused)


def test_the_errors_of_insitu_are_part_of_it() -> None:
    ours = [each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, errors.InsituError)]
    assert [getattr(insitu, each.__name__) for each in ours] == ours


@pytest.mark.slow
def test_rows_may_come_from_generators(tmp_path: Path) -> None:
    code = """
run = insitu.finetune(
    answer, score, train=(row for row in ROWS), held_out=iter(ROWS[:2]), model=MODEL, epochs=1, generations=2,
    max_tokens=2,
)
show(rows=len(open(run.folder / "rows.jsonl").readlines()), held=len(open(run.folder / "held_out.jsonl").readlines()))
"""
    assert script(tmp_path, code)[0] == {"rows": 4, "held": 2}


@pytest.mark.slow
def test_every_episode_and_every_score_has_a_row_of_its_own(tmp_path: Path) -> None:
    code = """
ROWS = [{"question": f"Row {i}", "log": []} for i in range(2)]
SEEN = {"agent": set(), "first": set(), "second": set()}

def note(who, row):
    SEEN[who].add(len(row["log"]))
    row["log"].append(who)

async def answer(question: str, row: insitu.Row, model: insitu.Model) -> str:
    note("agent", row)
    return await model.ask(question)

def first(answer: str, row: insitu.Row) -> float:
    note("first", row)
    return mean_digit(answer)

def second(answer: str, row: insitu.Row) -> float:
    note("second", row)
    return 0.0

insitu.finetune(
    answer, {"first": first, "second": second}, train=ROWS, held_out=ROWS, model=MODEL, epochs=1, generations=4,
    max_tokens=6,
)
show(**{who: list(lengths) for who, lengths in SEEN.items()})
"""
    assert script(tmp_path, code)[0] == {"agent": [0], "first": [0], "second": [0]}


@pytest.mark.slow
def test_held_out_rows_that_change_while_a_run_goes_on_are_noticed(tmp_path: Path) -> None:
    code = """
from hashlib import sha256
HELD = Path("held.jsonl")

def hold_out(text):
    HELD.write_text("".join(json.dumps({"question": f"{text} {i}"}) + "\\n" for i in range(2)))
    return sha256(HELD.read_bytes()).hexdigest()

async def answer(question: str, model: insitu.Model) -> str:
    if Path("runs/answer/validation_history.json").exists():
        hold_out("after")
    return await model.ask(question)

before = hold_out("before")
run = insitu.finetune(
    answer, score, train=ROWS, held_out=HELD, model=MODEL, epochs=1, generations=4, max_tokens=6,
)
show(before=before, after=hold_out("after"))
"""
    shown, printed = script(tmp_path, code)
    scores = read_lines(tmp_path / "runs/answer/validation_scores.jsonl")[1:]
    assert [line["dataset"] for line in scores] == [shown["before"], shown["after"]]
    assert f"the held-out dataset {tmp_path / 'held.jsonl'} has changed" in printed
    settings = json.loads((tmp_path / "runs/answer/run.json").read_text())
    assert settings["held_out"]["sha256"] == shown["before"]

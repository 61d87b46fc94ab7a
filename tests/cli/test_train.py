"""`insitu train` and `insitu ask`: one run of the starter model, what it says to do next, and what is refused."""

import json
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from factories import ROOT, read_lines
from processes import run, start, wait_until

from insitu import Run
from insitu.api.train import Trained

STARTER = ROOT / "src/insitu/starter/model"
AGENT = """
import insitu

async def answer(question: str, model: insitu.Model, row: insitu.Row) -> str:
    if question == "fail":
        raise LookupError(row["answer"])
    return await model.ask(question)

def alone(question: str) -> str:
    return question

def score(answer: str) -> float:
    return sum(map(ord, answer)) % 7 / 7
"""
PYTHON = """
import json
import insitu
from agent import answer, score

left, held = ([json.loads(line) for line in open(f"saved.{name}.jsonl")] for name in ("rows", "held_out"))
insitu.finetune(
    answer, score, train=left, held_out=held, model="model", epochs=2, generations=4, max_tokens=6, temperature=2,
    seed=3, output_dir="from_python", finetuning={"validation": {"reps": 2}},
)
for generations in (4, 5):
    insitu.finetune(config="short.yml", train=left, held_out=held, generations=generations, resume=True)
"""
SHORT = """
general: {seed: 3, folder: .}
llms: {student: {_type: policy, max_tokens: 6, temperature: 2}}
workflow: {_type: python, function: "agent.py:answer", model: student}
eval:
  general: {dataset: {_type: jsonl, file_path: saved.rows.jsonl}}
  evaluators: {score: {_type: python, function: "agent.py:score"}}
finetuning:
  model: model
  training: {learning_rate: 1.5e-3, schedule: linear}
  num_epochs: 2
  output_dir: runs/answer
  validation: {dataset: saved.held_out.jsonl, reps: 2}
"""
SMALL = {
    "finetuning.validation.reps": 2,
    "trajectory_builders.episodes.num_generations": 4,
    "llms.student.max_tokens": 6,
    "llms.student.temperature": 2,
}
ARGUMENTS = ("agent.py:answer", "--score", "agent.py:score", "--rows", "rows.jsonl", "--model", "model")
QUESTIONS = [f"Where is my {item}?" for item in ("kettle", "lamp", "chair", "clock", "stove", "radio")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, "subprocess.CompletedProcess[str]"]:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "agent.py").write_text(AGENT)
    (folder / "model").symlink_to(STARTER)
    rows = [{"question": question, "answer": "it's here"} for question in QUESTIONS]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [word for key, value in {**SMALL, "general.seed": 3}.items() for word in ("-o", key, value)]
    options = ("--epochs", "2", "--held-out", "0.3", "--save", "saved.yml", *overrides)
    done = run("train", *ARGUMENTS, *options, folder=folder, COLUMNS="200", PYTHONWARNINGS="error")
    assert done.returncode == 0, done.stderr
    return folder, done


def numbers(run_dir: Path) -> tuple[list[Any], list[Any]]:
    """The metrics and the held-out scores of a run, without times."""
    epochs = read_lines(run_dir / "training_metrics.jsonl")
    validations = json.loads((run_dir / "validation_history.json").read_text())
    keys = ("epoch", "avg_reward", "loss", "kl", "grad_norm", "entropy", "tokens", "learning_rate", "num_trajectories")
    shown = ("epoch", "avg_reward", "ci95", "num_examples")
    return [[e[key] for key in keys] for e in epochs], [[v[key] for key in shown] for v in validations]


def test_it_says_what_is_held_out_and_the_score_before_and_after(trained: Any) -> None:
    folder, done = trained
    assert done.stdout.startswith("rows.jsonl: 4 rows to train on, 2 held out\n")
    table = [line.split("│")[1].strip() for line in done.stdout.splitlines() if line.startswith("│")]
    assert table == ["before", "after", "best"]
    assert "files: runs/answer/" in done.stdout
    held = [row["question"] for row in read_lines(folder / "runs/answer/held_out.jsonl")]
    left = [row["question"] for row in read_lines(folder / "runs/answer/rows.jsonl")]
    assert (len(held), sorted([*held, *left])) == (2, sorted(QUESTIONS))
    settings = json.loads((folder / "runs/answer/run.json").read_text())["config"]
    training = settings["trainer_adapters"]["backend"]["training"]
    assert (training["learning_rate"], training["schedule"]) == (1.5e-3, "linear")


def test_python_trains_the_same(trained: Any) -> None:
    """And continues the run, with the settings of a file in the short form."""
    folder, _ = trained
    (folder / "short.yml").write_text(SHORT)
    (folder / "from_python.py").write_text(PYTHON)
    with start("from_python.py", folder=folder) as process:
        out, err = process.communicate(600)
        assert process.wait() == 1
    assert numbers(folder / "from_python") == numbers(folder / "runs/answer")
    assert "runs/answer is complete after epoch 2" in out
    assert "settings: generations was 4 and is 5" in err


@pytest.mark.slow
def test_the_saved_file_trains_the_same(trained: Any) -> None:
    """And one in the short form continues its run: its settings and inputs are the same."""
    folder, _ = trained
    saved = yaml.safe_load((folder / "saved.yml").read_text())
    assert saved["eval"]["general"]["dataset"]["file_path"] == "saved.rows.jsonl"
    done = run("finetune", "saved.yml", "-o", "finetuning.output_dir", "from_file", folder=folder)
    assert done.returncode == 0, done.stderr
    assert numbers(folder / "from_file") == numbers(folder / "runs/answer")
    assert len(numbers(folder / "from_file")[0]) == 2
    (folder / "short.yml").write_text(SHORT)
    assert run("runs", "fork", "from_file", "forked", "--epoch", "1", folder=folder).returncode == 0
    resumed = ("finetune", "short.yml", "--resume", "forked", "-o", "trajectory_builders.episodes.num_generations")
    done = run(*resumed, "5", folder=folder)
    assert done.returncode == 2
    assert "trajectory_builders.episodes.num_generations was 4 and is 5" in done.stderr
    done = run(*resumed, "4", folder=folder)
    assert done.returncode == 0, done.stderr
    assert numbers(folder / "forked") == numbers(folder / "from_file")


def test_what_it_says_to_do_next_works(trained: Any) -> None:
    folder, done = trained
    _, _, steps = done.stdout.partition("next:\n")
    view, export, ask = map(shlex.split, steps.splitlines())
    with start(*view[1:], folder=folder) as process:
        assert " ready at http://" in process.stdout.readline()
    exported = run(*export[1:], folder=folder)
    assert exported.returncode == 0, exported.stderr
    assert (folder / export[3] / "config.json").is_file()
    assert "`insitu finetune answer/config.yml`" in (folder / export[3] / "README.md").read_text()
    asked = run(*ask[1:], folder=folder)
    assert asked.returncode == 0, asked.stderr
    assert (asked.stderr, asked.stdout[-1:]) == ("", "\n"), "this little training may have taught it to say nothing"
    assert ask[-1] in QUESTIONS


def test_an_interrupted_run_continues_with_the_rows_of_other_columns(trained: Any, tmp_path: Path) -> None:
    """The column of the question is called as the agent's parameter."""
    (tmp_path / "agent.py").write_text(AGENT.replace("question", "message"))
    (tmp_path / "model").symlink_to(STARTER)
    rows = [{"message": question, "label": "here"} for question in QUESTIONS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [word for key, value in {**SMALL, "general.seed": 3}.items() for word in ("-o", key, value)]
    command = ("train", *ARGUMENTS, "--epochs", "2", "--held-out", "0.3", *overrides)
    with start(*command, folder=tmp_path) as process:
        next(line for line in process.stdout if line.startswith("epoch 1/2"))
        process.send_signal(signal.SIGINT)
        process.communicate(600)
        assert process.wait() == 130
    done = run(*command, "--resume", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert numbers(tmp_path / "runs/answer") == numbers(trained[0] / "runs/answer")
    assert "next:" in done.stdout


def test_a_run_in_the_working_directory_is_exported_by_its_name(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained[0] / "runs/answer")
    _, export, _ = Trained(Run(Path.cwd()), "Where?", None).next_steps()
    assert export[1:4] == ["export", ".", "exported/answer"]


def test_another_run_is_not_continued(trained: Any) -> None:
    """The message names what the command has: the rows, and no option of another command."""
    overrides = [word for key, value in {**SMALL, "general.seed": 3}.items() for word in ("-o", key, value)]
    done = run("train", *ARGUMENTS, "--epochs", "3", "--resume", "--held-out", "0.5", *overrides, folder=trained[0])
    assert done.returncode == 2
    assert done.stderr.endswith(
        "other settings: the dataset rows.jsonl has changed; the held-out dataset held_out.jsonl has changed. Set them "
        "as they were, or start another run with another --output_dir\n"
    )


def test_a_run_may_start_from_the_earlier_one_in_its_folder(trained: Any, tmp_path: Path) -> None:
    """Which is moved aside, and the inputs are those in its new place, also when it continues without weights yet."""
    shutil.copytree(trained[0] / "runs", tmp_path / "runs")
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "rows.jsonl").write_text((trained[0] / "rows.jsonl").read_text())
    overrides = [word for key, value in SMALL.items() for word in ("-o", key, value)]
    arguments = ("train", *ARGUMENTS[:3], "--model", "runs/answer/latest", *overrides)
    rows = ("--rows", "runs/answer/rows.jsonl", "--held_out", "runs/answer/held_out.jsonl")
    done = run(*arguments, *rows, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    recorded = json.loads((tmp_path / "runs/answer/run.json").read_text())
    assert Path(recorded["starting_model"]["file"]).is_relative_to(tmp_path / "runs/answer.1/backend/checkpoints")
    assert recorded["dataset"]["file"] == str(tmp_path / "runs/answer.1/rows.jsonl")
    command = (*arguments, "--rows", "rows.jsonl", "--held_out", "0.5")
    with start(*command, folder=tmp_path) as process:
        new = [tmp_path / "runs" / name for name in ("answer.2", "answer/progress.json")]
        wait_until(lambda: all(path.exists() for path in new))
        process.send_signal(signal.SIGINT)
        process.communicate(600)
        assert process.wait() == 130
    latest = ("--resume", "-o", "trainer_adapters.backend.model", "latest")
    done = run("finetune", "runs/answer/config.yml", *latest, folder=tmp_path)
    assert "backend.model was 'runs/answer.2/latest' and is 'latest'. Set" in done.stderr.replace(f"{tmp_path}/", "")
    done = run(*command, "--resume", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(read_lines(tmp_path / "runs/answer/rows.jsonl")) == 3
    assert json.loads((tmp_path / "runs/answer/run.json").read_text())["dataset"]["file"].endswith("answer/rows.jsonl")


def test_the_file_in_a_run_trains_another_that_can_be_used(trained: Any, tmp_path: Path) -> None:
    """It moves the earlier run aside with that file and the rows."""
    shutil.copytree(trained[0] / "runs", tmp_path / "runs")
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "model").symlink_to(STARTER)
    file = tmp_path / "runs/answer/config.yml"
    file.write_text(file.read_text().replace(str(trained[0]), str(tmp_path)))
    done = run("finetune", "runs/answer/config.yml", "-o", "finetuning.num_epochs", 1, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for command in (
        ("finetune", "runs/answer/config.yml", "--resume", "-o", "finetuning.num_epochs", 2),
        ("trajectories", "rescore", "runs/answer", "--evaluator", "score"),
        ("ask", "runs/answer", "Where is my lamp?", "--checkpoint", "latest"),
    ):
        done = run(*command, folder=tmp_path)
        assert done.returncode == 0, done.stderr
    assert numbers(tmp_path / "runs/answer")[0] == numbers(tmp_path / "runs/answer.1")[0]


def test_the_agent_of_the_run_is_asked(trained: Any) -> None:
    folder, _ = trained
    done = run("ask", "runs/answer", "Where is my lamp?", "--checkpoint", "2", folder=folder)
    assert (done.returncode, done.stderr) == (0, "")
    row = json.dumps({"question": "fail", "answer": "of the row"})
    done = run("ask", "runs/answer", "fail", "--row", row, "--checkpoint", "latest", folder=folder)
    assert done.returncode == 1
    assert "failed: the agent failed: LookupError: of the row" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--checkpoint", "7"), "step_000007 was deleted or never made"),
        (("--checkpoint", "newest"), "'newest' is not a checkpoint; allowed: best, latest, step_N"),
        (("--row", "{"), "--row is not JSON: "),
        (("--row", "[1]"), "--row is [1]; it must be a JSON object"),
    ],
)
def test_what_cannot_be_asked(trained: Any, arguments: tuple[str, ...], problem: str) -> None:
    folder, _ = trained
    done = run("ask", "runs/answer", "Where?", *arguments, folder=folder)
    assert done.returncode == 2
    assert problem in done.stderr


REFUSED = [
    ({"AGENT": "agent.py:anwser"}, "AGENT: in agent.py, 'anwser' does not exist (did you mean 'answer'?)"),
    ({"AGENT": "agnet.py:answer"}, "agnet.py does not exist (did you mean 'agent.py'?)"),
    ({"AGENT": "nowhere:answer"}, "AGENT: no module named 'nowhere'"),
    ({"AGENT": "agent.py"}, "AGENT is 'agent.py'; it must be MODULE:NAME or FILE.py:NAME"),
    ({"AGENT": "agent.py:alone"}, "nothing that it does can be trained: give agent.py:alone a parameter `model`, an "),
    ({"--score": "agent.py:scoer"}, "--score: in agent.py, 'scoer' does not exist (did you mean 'score'?)"),
    ({"--score": "exact_mach"}, "--score: 'exact_mach' does not exist (did you mean 'exact_match'?); available: con"),
    ({"--score": "regex"}, "--score: 'regex' does not exist"),
    ({"--rows": "nothing.jsonl"}, "--rows: 'nothing.jsonl' does not exist; looked for "),
    ({"--rows": "agent.py"}, "the file format '.py' does not exist"),
    ({"--rows": "empty.jsonl"}, "empty.jsonl has no rows"),
    ({"--rows": "no_question.jsonl"}, "no_question.jsonl, row 1: the question key 'question' does not exist"),
    ({"--rows": "no_question.jsonl"}, "; eval.general.dataset.structure.question_key names the column"),
    ({"--rows": "broken.jsonl"}, "broken.jsonl, line 1 is not valid JSON: Expecting"),
    ({"--model": "org/nowhere"}, "--model: org/nowhere is neither a folder or file here nor in the cache"),
    ({"--model": "./nowhere"}, "--model: 'nowhere' does not exist"),
    ({"--held_out": "1"}, "--held_out is 1; a fraction must be at least 0 and below 1"),
    ({"--held_out": "nan"}, "--held_out is nan; a fraction must be"),
    ({"--held_out": "rest.jsonl"}, "--held_out is 'rest.jsonl'; it must be a fraction, from 0 to below 1, or a file"),
    ({"--held_out": "empty.jsonl"}, "validation: dataset "),
    ({"--save": "agent.py"}, "--save: agent.py exists already and is not overwritten; give another name"),
    ({"--save": "/proc/x/y.yml"}, "--save: cannot write to /proc/x"),
    ({"--output_dir": "."}, "/rows.jsonl exists already and is not replaced; give another folder"),
    ({"--rows": "own/rows.jsonl", "--output_dir": "own"}, "/own/rows.jsonl exists already and is not replaced"),
    ({"--epochs": "0"}, "0 is not in the range x>=1"),
    ({"-o": "finetuning.epochs"}, "finetuning: key 'epochs' does not exist"),
]
LOOP = """
import json, sys
from insitu.cli import insitu

for arguments in json.load(open("refused.json")):
    print("CALL")
    try:
        insitu.main(["train", *arguments], standalone_mode=False)
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_what_cannot_be_trained_is_refused_before_anything_is_written(trained: Any, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "model").symlink_to(STARTER)
    (tmp_path / "rows.jsonl").write_text((trained[0] / "rows.jsonl").read_text())
    for name, text in (("empty", ""), ("no_question", '{"ask": 1}\n'), ("broken", "{\n")):
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "runs/answer").mkdir(parents=True)
    (tmp_path / "runs/answer/run.json").write_text("{}")
    (tmp_path / "own").mkdir()
    for name in ("config.yml", "rows.jsonl"):  # as a call from Python leaves them
        (tmp_path / "own" / name).write_text((trained[0] / "runs/answer" / name).read_text())
    right = dict(zip(ARGUMENTS[1::2], ARGUMENTS[2::2], strict=True))
    calls = []
    for change, _ in REFUSED:
        options = {**right, **change}
        agent = options.pop("AGENT", ARGUMENTS[0])
        calls.append([agent, *(word for option in options.items() for word in option), *["1"] * ("-o" in options)])
    (tmp_path / "refused.json").write_text(json.dumps(calls))
    (tmp_path / "refused.py").write_text(LOOP)
    before = sorted(path.name for path in tmp_path.rglob("*") if path.suffix != ".pyc")
    rows = [(path, path.read_text()) for path in tmp_path.rglob("rows.jsonl")]
    with start("refused.py", folder=tmp_path, HF_HUB_OFFLINE="1") as process:
        out, err = process.communicate(600)
        assert process.wait() == 0, err
    _, *said = out.split("CALL\n")
    for (change, problem), text in zip(REFUSED, said, strict=True):
        assert problem in text, (change, text)
    after = sorted(path.name for path in tmp_path.rglob("*") if path.suffix != ".pyc" and path.name != "__pycache__")
    assert after == before
    assert [(path, path.read_text()) for path, _ in rows] == rows


def test_a_file_that_train_has_saved_is_replaced(trained: Any) -> None:
    """Refusing one of another program is above."""
    folder, _ = trained
    rows = (folder / "saved.rows.jsonl").read_text()
    wrong = ("--save", "saved.yml", "--model", "./nowhere")
    done = run("train", *ARGUMENTS[:-2], *wrong, folder=folder)
    assert done.returncode == 2
    assert "exists already" not in done.stderr
    assert (folder / "saved.rows.jsonl").read_text() == rows


@pytest.mark.slow
def test_a_warning_is_given_once(trained: Any) -> None:
    folder, _ = trained
    overrides = [word for key, value in SMALL.items() for word in ("-o", key, value)]
    options = ("--held-out", "rows.jsonl", "--output-dir", "runs/seen", *overrides)
    done = run("train", *ARGUMENTS, *options, folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("6 of 6 held-out rows are among the training rows") == 1

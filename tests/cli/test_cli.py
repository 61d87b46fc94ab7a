"""The command line as processes: quick help, exit codes, and messages that name the mistake."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from factories import digits_project, write_rows
from marks import slow_after
from processes import HANGS, run
from tiny_models import save_tiny_model

TESTS = Path(__file__).resolve().parents[1] / "support"
KEY = "sk-never-to-be-seen"


def insitu(*arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(*arguments, PYTHONPATH=str(TESTS), COLUMNS="200", **environment)


MEMORY = """
import os, resource, sys
quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
_, status, usage = os.wait4(os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=quiet), 0)
print(status, usage.ru_maxrss)
"""


@pytest.mark.parametrize("program", ["insitu", "nat"])
def test_the_installed_programs_need_little_memory_for_their_help(program: str) -> None:
    """Measured from a small process: a child's peak begins with the size of the process it was forked from."""
    command = [sys.executable, "-S", "-c", MEMORY, str(Path(sys.executable).with_name(program)), "finetune", "--help"]
    status, peak = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert status == "0"
    assert int(peak) / (2**20 if sys.platform == "darwin" else 2**10) < 60


def test_shells_complete_commands_and_options() -> None:
    """As docs/reference/cli.md has bash set up."""
    script = (
        'eval "$(_INSITU_COMPLETE=bash_source insitu)"; complete -p insitu; '
        "COMP_WORDS=(insitu finetune --valid); COMP_CWORD=2; _insitu_completion insitu; echo ${COMPREPLY[@]}"
    )
    script = f"PATH={Path(sys.executable).parent}:$PATH; {script}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    registered, offered = done.stdout.splitlines()
    assert registered == "complete -o nosort -F _insitu_completion insitu"
    assert {"--validation_dataset", "--validation_interval"} <= set(offered.split())


@pytest.mark.parametrize("command", slow_after(2, ["", "finetune", "eval", "run", "trajectories"]))
def test_help_imports_little(command: str) -> None:
    """So it is there immediately: it takes as long as its imports."""
    arguments = [command, "--help"] if command else ["--help"]
    code = (
        f"import sys; sys.argv = ['insitu', *{arguments!r}]\n"
        "from insitu.cli import main\n"
        "try: main()\n"
        "finally: print('imported:', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    shown, _, imported = done.stdout.rpartition("imported:")
    assert "Usage: insitu" in shown
    heavy = {
        "torch",
        "transformers",
        "openai",
        "pydantic",
        "aiohttp",
        "numpy",
        "matplotlib",
        "rich",
        "yaml",
        "uvloop",
        "ray",
    }
    assert not heavy & {name.partition(".")[0] for name in imported.split()}
    assert len(imported.split()) < 200


def test_help_lists_the_commands_and_their_options() -> None:
    shown = insitu("--help").stdout
    assert all(name in shown for name in ("finetune", "eval", "run", "backend"))
    shown = insitu("finetune", "--help").stdout
    shared = ("config_file", "dataset", "override", "result_json_path", "endpoint", "endpoint_timeout")
    options = (*shared, "validation_dataset", "validation_interval", "validation_config_file")
    assert all(f"--{name}" in shown for name in options)
    shown = insitu("eval", "--help").stdout
    assert all(f"--{name}" in shown for name in (*shared, "skip_workflow", "skip_completed_entries", "reps"))


# what is wrong with the command line or the file is exit code 2, and says so in a sentence


def project(write: Any, question: str = "question", **sections: Any) -> Path:
    write(
        [{"id": "r0", question: "hello", "answer": "HELLO"}, {"id": "r1", question: "raise oh no", "answer": "x"}],
        "rows.jsonl",
    )
    general = {"dataset": {"_type": "jsonl", "file_path": "rows.jsonl"}, "output_dir": str(write("", "out/x").parent)}
    return write(
        {
            "general": {"plugins": ["plain_parts"]},
            "workflow": {"_type": "parts"},
            "eval": {"general": general, "evaluators": {"exact": {"_type": "judge"}}},
            **sections,
        }
    )


def assert_refused(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["finetune", "--config_fil", "x"], "--config_file"),
        (["finetune", "--learning_rate", "1"], "--learning_rate"),
        (["finetune"], "Missing the YAML file: insitu finetune FILE, or insitu finetune --config_file FILE"),
        (["eval", "x.yml", "--config-file", "y.yml"], "two files were given: x.yml, and --config_file y.yml"),
        (["finetune", "--config_file", "x.yml", "--validation_interval", "0"], "--validation_interval"),
        (["eval", "--config_file", "x.yml", "--reps", "none"], "--reps"),
        (["eval", "--config_file", "x.yml", "-o", "only.key"], "-o"),
        (["finetuen"], "finetuen"),
        (["finetune", "--config_file", "x.yml", "--endpoint_timeout", "0"], "--endpoint_timeout"),
        (["serve", "--config_file", "x.yml", "--port", "70000"], "--port"),
        (["serve", "--config_file", "no/such/file.yml"], "cannot read the configuration file no/such/file.yml"),
        (["eval", "--config_file", "no/such/file.yml"], "cannot read the configuration file no/such/file.yml"),
    ],
)
def test_a_wrong_command_line(arguments: list[str], part: str) -> None:
    assert_refused(insitu(*arguments), part)


@pytest.mark.parametrize("command", ["finetune", "eval"])
def test_a_wrong_file(write: Any, command: str) -> None:
    sections = {"llms": {"m": {"_type": "openai", "modle_name": "x", "api_key": "${INSITU_TEST_KEY}"}}}
    path = project(write, finetuning={"enabeld": True}, **sections)
    assert_refused(insitu(command, "--config_file", path), "llms.m.api_key: the environment variable INSITU_TEST_KEY")
    done = insitu(command, "--config_file", path, INSITU_TEST_KEY=KEY)
    assert_refused(
        done,
        "llms.m: key 'modle_name'",
        "did you mean 'model_name'",
        "finetuning: key 'enabeld'",
        "did you mean 'enabled'",
    )
    assert KEY not in done.stderr + done.stdout


def test_finetuning_that_is_not_enabled(write: Any) -> None:
    assert_refused(insitu("finetune", "--config_file", project(write)), "finetuning.enabled is false")


def test_a_dataset_without_the_question_key(write: Any) -> None:
    done = insitu("eval", "--config_file", project(write, question="qestion"))
    assert_refused(done, "rows.jsonl, row 1: the question key 'question' does not exist", "did you mean 'qestion'?")


def test_a_training_run_with_a_wrong_dataset_ends_before_anything_is_started(write: Any, tmp_path: Path) -> None:
    training = {
        "llms": {"player": {"_type": "policy"}},
        "trajectory_builders": {"b": {"_type": "insitu_traj_builder"}},
        "trainer_adapters": {"a": {"_type": "insitu_trainer_adapter", "url": "http://127.0.0.1:9"}},
        "trainers": {"t": {"_type": "insitu_trainer"}},
        "finetuning": {
            "enabled": True,
            "trainer": "t",
            "trajectory_builder": "b",
            "trainer_adapter": "a",
            "reward_function": {"name": "exact"},
            "output_dir": str(tmp_path / "run"),
        },
    }
    path = project(write, question="qestion", **training)
    assert_refused(insitu("finetune", "--config_file", path), "row 1: the question key 'question'")
    dead = insitu("finetune", "--config_file", project(write, **training))
    assert dead.returncode == 1
    assert "failed: no answer from the backend at http://127.0.0.1:9" in dead.stderr
    assert "Traceback" not in dead.stderr
    (tmp_path / "file").write_text("")
    taken = insitu("finetune", "--config_file", path, "-o", "finetuning.output_dir", tmp_path / "file" / "run")
    assert_refused(taken, "finetuning.output_dir: cannot write to ")


# the file as an argument, options with dashes, and a check of the file


@pytest.mark.parametrize("file", slow_after(1, [["FILE"], ["--config_file", "FILE"], ["--config-file", "FILE"]]))
def test_every_spelling_of_the_file_and_of_an_option(write: Any, tmp_path: Path, file: list[str]) -> None:
    path = str(project(write))
    words = [path if word == "FILE" else word for word in file]
    assert insitu("run", *words, "--input", "hello").stdout == "HELLO\n"
    done = insitu("eval", *words, "--result-json-path", "$.answer")
    assert "result_json_path $.answer: the result 'HELLO' is not JSON" in done.stdout
    done = insitu("validate", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{path} is valid; it does not train (finetuning.enabled is false)\n"
    assert_refused(insitu("validate", *words, "--dataset", "none.jsonl"), "none.jsonl")


def test_validate_checks_what_finetune_checks_and_starts_nothing(tmp_path: Path) -> None:
    digits_project(tmp_path)
    write_rows(tmp_path, [{"say": "a"}, {"say": "b"}])
    write_rows(tmp_path, [{"say": "c"}], "held_out.jsonl")
    done = run("validate", "config.yml", "--validation-dataset", "held_out.jsonl", folder=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[0], done.stderr) == (0, "config.yml is valid", "")
    assert not (tmp_path / "run").exists()
    for key, value, message in (
        ("llms.player.seed", "3", "llms.player.seed: with a fixed seed"),
        ("finetuning.validation", "{dataset: none.jsonl}", "validation: "),
        ("trainer_adapters.backend.model", "./no/model", "'no/model' does not exist"),
        ("finetuning.training_evaluators", "[scroe]", "finetuning.training_evaluators: 'scroe' does not exist"),
    ):
        assert_refused(run("validate", "config.yml", "-o", key, value, folder=tmp_path), message)
    done = run("validate", "config.yml", "-o", "llms.player.max_tokens", "256", folder=tmp_path)
    room = "256 tokens for prompt and completion together: answers end there"
    assert (done.returncode, done.stderr) == (0, f"llms.player.max_tokens is 256, but the model has {room}\n")


@pytest.mark.parametrize(
    ("framework", "problem"),
    [
        (
            "langgrap",
            "functions.inner: the framework of _type 'graph', 'langgrap' does not exist (did you mean 'langgraph'?); "
            "available: adk, agno, ",
        ),
        (
            "semantic_kernel",
            "functions.inner, whose _type 'graph' is registered with the framework semantic_kernel, needs the extra "
            "semantic-kernel (pip install -e '.[semantic-kernel]' in ",
        ),
    ],
    ids=["unknown", "not installed"],
)
def test_a_framework_that_is_not_there_is_refused_when_the_file_is_read(
    framework: str, problem: str, write: Any
) -> None:
    if importlib.util.find_spec(framework) is not None:
        pytest.skip(f"{framework} is installed")
    write(
        "from insitu.plugin_api import FunctionBaseConfig, register_function\n"
        "class Config(FunctionBaseConfig, name='graph'): ...\n"
        f"@register_function(config_type=Config, framework_wrappers=[{framework!r}])\n"
        "async def graph(config, builder):\n"
        "    yield lambda text: text\n",
        "graphs.py",
    )
    path = project(write, general={"plugins": ["graphs", "plain_parts"]}, functions={"inner": {"_type": "graph"}})
    assert_refused(insitu("validate", path), problem)


# evaluating


def test_a_row_that_fails_is_told_and_the_rest_is_scored(write: Any, tmp_path: Path) -> None:
    done = insitu("eval", "--config_file", project(write), "--reps", "2")
    assert done.returncode == 0, done.stderr
    assert "2 of 4 episodes failed; the first, of row 'r1': ValueError: oh no" in done.stdout
    assert str(tmp_path / "out" / "workflow_output.json") in done.stdout
    assert (tmp_path / "out" / "exact_output.json").exists()


@pytest.mark.parametrize(
    ("says", "code", "message"),
    slow_after(
        2,
        [
            ("nan", 1, "1 scores are missing; the first, of row 'r0': the score is nan"),
            ("raise", 1, "evaluator exact raised RuntimeError: no judge today"),
            ("fine", 0, ""),
        ],
    ),
)
def test_what_could_not_be_scored_is_told(write: Any, says: str, code: int, message: str) -> None:
    done = insitu("eval", "--config_file", project(write), "-o", "eval.evaluators.exact.says", says)
    assert done.returncode == code
    assert message in done.stdout
    assert ("failed: nothing could be scored" in done.stderr) is bool(code)


def test_answers_that_stand_in_the_dataset_are_scored_without_the_workflow(write: Any, tmp_path: Path) -> None:
    first = insitu("eval", "--config_file", project(write))
    assert first.returncode == 0, first.stderr
    answers = tmp_path / "out" / "workflow_output.json"
    broken = project(write, workflow={"_type": "parts", "inner": {"depth": 2}})
    options = ("--dataset", answers, "-o", "eval.general.output_dir", tmp_path / "again")
    again = insitu("eval", "--config_file", broken, "--skip_workflow", *options)
    assert again.returncode == 0, again.stderr
    assert (
        "1 of 2 episodes failed; the first, of row 'r1': row 'r1' has no generated_answer: ValueError" in again.stdout
    )
    for name in ("exact_output.json",):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    completed = insitu("eval", "--config_file", broken, "--skip_completed_entries", *options)
    assert "1 of 2 episodes failed; the first, of row 'r1': ValueError: oh no" in completed.stdout


def test_the_part_of_the_answer_and_who_gives_it(write: Any) -> None:
    path = project(write)
    assert_refused(
        insitu("eval", "--config_file", path, "--result_json_path", "$.["), "result_json_path '$.[' is not a JSONPath"
    )
    done = insitu("eval", "--config_file", path, "--result_json_path", "$.answer")
    assert done.returncode == 1
    assert "result_json_path $.answer: the result 'HELLO' is not JSON" in done.stdout
    dead = insitu("eval", "--config_file", path, "--endpoint", "http://127.0.0.1:9")
    assert (dead.returncode, dead.stdout) == (1, "")
    assert dead.stderr.startswith("failed: no answer from the workflow service at http://127.0.0.1:9: ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_end_a_command_without_an_event_loop_alike(tmp_path: Path, number: signal.Signals) -> None:
    os.mkfifo(tmp_path / "config.yml")
    command = [sys.executable, "-m", "insitu", "validate", str(tmp_path / "config.yml")]
    unless_ignored = partial(signal.signal, number, signal.SIG_DFL)  # as the tests may be run under nohup
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=unless_ignored) as waiting:
        try:
            descriptor = os.open(tmp_path / "config.yml", os.O_WRONLY)  # which waits for it
            waiting.send_signal(number)
            _, said = waiting.communicate(timeout=HANGS)
            assert (waiting.returncode, said) == (130, "interrupted\n")
            os.close(descriptor)
        finally:
            waiting.kill()


@pytest.mark.slow
def test_standard_input_may_be_closed(write: Any) -> None:
    """Its descriptor would be that of an event loop, which does not expect it."""
    command = f'exec "{sys.executable}" -m insitu validate "{project(write)}" <&-'
    done = subprocess.run(["sh", "-c", command], env={**os.environ, "PYTHONPATH": str(TESTS)})
    assert done.returncode == 0


def test_run_prints_the_answer(write: Any) -> None:
    done = insitu("run", "--config_file", project(write), "--input", "good day")
    assert (done.returncode, done.stdout) == (0, "GOOD DAY\n")


def test_run_says_in_a_sentence_what_the_workflow_raised_and_where(write: Any) -> None:
    for text, raised in (("raise oh no", "ValueError: oh no"), ("exit", "SystemExit: 0")):
        done = insitu("run", "--config_file", project(write), "--input", text)
        assert done.returncode == 1
        assert done.stderr.startswith(f"failed: the workflow raised {raised} ({TESTS / 'plain_parts.py'}, line ")
        assert "Traceback" not in done.stderr


def test_a_folder_that_cannot_be_written_is_told_before_the_first_episode(write: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = insitu("eval", "--config_file", project(write), "-o", "eval.general.output_dir", tmp_path / "file" / "out")
    assert_refused(done, "eval.general.output_dir: cannot write to ")
    assert done.stdout == ""


def test_a_port_in_use_is_told_with_its_option(tmp_path: Path) -> None:
    digits_project(tmp_path)
    model = save_tiny_model(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for command in (("view", tmp_path), ("serve", tmp_path / "config.yml"), ("backend", "--model", model)):
            done = insitu(*command, "--port", port)
            assert done.returncode != 0
            lines = [line for line in done.stderr.splitlines() if "cannot listen" in line]
            assert len(lines) == 1
            assert f"--port: cannot listen at 127.0.0.1:{port}: Address already in use" in lines[0]
            assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command", ["doctor c.yml --seconds", "promote run to --confidence", "ask run hi --temperature"]
)
def test_no_option_takes_nan(command: str) -> None:
    for value, problem in (("nan", "nan cannot be compared; give a number"), ("-1", "-1.0 is not in the range")):
        done = run(*command.split(), value)
        assert (done.returncode, problem in done.stderr) == (2, True), done.stderr

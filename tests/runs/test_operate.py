"""What an operator meets: health and metrics of a run and of the page, logs, units and containers, a full disk."""

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
from factories import digits_project, read_lines, recorded_run, write_rows
from marks import slow_after
from processes import HANGS, run, run_project, serving, start

from insitu.cli import insitu

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = re.compile(r'(\w+)(?:\{((?:\w+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (-?[\d.e+-]+)')
"""A line of https://prometheus.io/docs/instrumenting/exposition_formats/."""


def samples(text: str) -> dict[tuple[str, ...], float]:
    """The value of each metric, by its name and the values of its labels.

    Those of a metric are together, below its help and its type.
    """
    values, names, described = {}, [], []
    for line in text.splitlines():
        if about := re.fullmatch(r"# HELP (\w+) \S.*", line):
            described += [about[1]]
            continue
        if kind := re.fullmatch(r"# TYPE (\w+) (\w+)", line):
            assert kind[1] == described[-1]
            assert kind[2] == ("counter" if kind[1].endswith("_total") else "gauge")
            continue
        matched = SAMPLE.fullmatch(line)
        assert matched, line
        name, labels, value = matched.groups()
        assert name == described[-1]
        key = (name, *re.findall(r'"((?:[^"\\]|\\.)*)"', labels or ""))
        assert key not in values
        values[key] = float(value)
        names += [name] if names[-1:] != [name] else []
    assert names == described
    assert len(names) == len(set(names))
    return values


@pytest.fixture(scope="module")
def size(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Bytes of the first checkpoint of a run."""
    project = digits_project(tmp_path_factory.mktemp("size"), rows=4)
    code, _, err = run_project(project, "-o", "finetuning.num_epochs", "1")
    assert code == 0, err
    return sum(path.stat().st_size for path in (project / "run/backend/checkpoints/step_000001").iterdir())


def test_a_run_is_monitored_on_its_port(tmp_path: Path) -> None:
    project = digits_project(tmp_path, held_out=3)
    write_rows(project, [{"say": f"Row {i}"} for i in range(4)] + [{"say": "Row 4", "raise": "no"}])
    validation = ("--validation_dataset", "validation.jsonl", "-o", "finetuning.num_epochs", "200")
    options = (*validation, "-o", "general.metrics_port", "0")
    with start("finetune", "config.yml", *options, folder=project, INSITU_METRICS_TOKEN="of-the-metrics") as process:
        lines = iter(process.stdout.readline, "")
        address = next(line for line in lines if line.startswith("metrics: ")).split()[1]
        assert address.startswith("http://127.0.0.1:")
        assert httpx.get(address).status_code == 401
        assert httpx.get(address.removesuffix("metrics") + "health").json() == {"status": "ok"}
        with httpx.Client(headers={"Authorization": "Bearer of-the-metrics"}) as client:
            process.wait_until(lambda: samples(client.get(address).text).get(("insitu_epoch", "run"), 0) >= 2)
            answer = client.get(address)
        process.terminate()
        assert process.wait() == 130
    with pytest.raises(httpx.ConnectError):
        httpx.get(address)
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    values = samples(answer.text)
    assert values[("insitu_status", "run", "running")] == 1
    assert values[("insitu_epochs", "run")] == 200
    epoch = int(values[("insitu_epoch", "run")])
    assert values[("insitu_episodes_total", "run")] >= 20 * epoch
    assert 0 <= values[("insitu_seconds_since_last_episode", "run")] < 600
    metrics = {line["epoch"]: line for line in read_lines(project / "run/training_metrics.jsonl")}
    assert values[("insitu_reward", "run")] in [line["avg_reward"] for line in metrics.values()]
    scores = [each["avg_reward"] for each in json.loads((project / "run/validation_history.json").read_text())]
    assert values[("insitu_held_out_score", "run")] == scores[0]
    failed = sum(metrics[each]["dropped"].get("workflow_error", 0) for each in range(1, epoch + 1))
    assert values[("insitu_dropped_episodes_total", "run", "workflow_error")] >= failed > 0


@pytest.mark.slow
def test_the_port_of_a_run_with_a_token_is_probed_by_any_name(tmp_path: Path) -> None:
    """Its refusals name what exists for it: variables and keys, no options."""
    project = digits_project(tmp_path, rows=2)
    options = ("-o", "finetuning.num_epochs", "200", "-o", "general.metrics_port", "0")
    beyond = ("-o", "general.metrics_host", "0.0.0.0")
    code, _, err = run_project(project, *options, *beyond)
    problem = "general.metrics_host is '0.0.0.0', which other machines can connect to: set INSITU_METRICS_TOKEN"
    assert (code, err) == (2, f"error: {problem}\n")
    for further, token in (((), {}), (beyond, {"INSITU_METRICS_TOKEN": "of-the-metrics"})):
        with start("finetune", "config.yml", *options, *further, folder=project, **token) as process:
            lines = iter(process.stdout.readline, "")
            address = (
                next(line for line in lines if line.startswith("metrics: ")).split()[1].replace("0.0.0.0", "127.1")
            )
            foreign = {"Host": "run.example:9100"}
            health = httpx.get(address.removesuffix("metrics") + "health", headers=foreign)
            assert health.status_code == (200 if token else 403)
            refused = httpx.get(address, headers=foreign)
            assert refused.status_code == (401 if token else 403)
            assert "INSITU_METRICS_TOKEN" in refused.text
            assert "--" not in refused.text
            if token:
                foreign["Authorization"] = "Bearer of-the-metrics"
                assert httpx.get(address, headers=foreign).status_code == 200


def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    digits_project(tmp_path, rows=2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, _, err = run_project(tmp_path, "-o", "general.metrics_port", port)
    assert (code, err) == (
        2,
        f"error: general.metrics_port: 127.0.0.1:{port} cannot be bound: Address already in use\n",
    )
    assert not (tmp_path / "run").exists()


def test_the_page_has_the_metrics_of_all_runs(tmp_path: Path) -> None:
    recorded_run(tmp_path / 'with "quotes"', [0.25, 0.75], [1.0, 0.5])
    recorded_run(tmp_path / "other", [0.5, 0.5], [0.5, 0.5])
    groups = [{"format": 2}, *({"epoch": e, "num_episodes": 4, "dropped": {"timeout": e}} for e in (1, 2, 3))]
    path = tmp_path / "other/groups.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in groups))
    (tmp_path / "other/training_metrics.jsonl").write_text(
        '{"epoch": 1, "dropped": {"timeout": 1, "no_variance": 3}}\n'
    )
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/training_metrics.jsonl").write_text('{"epoch": [], "dropped": "many"}\n')
    with serving("view", tmp_path, INSITU_VIEW_TOKEN="of-the-page") as (_, address):
        assert httpx.get(f"{address}/health").json() == {"status": "ok"}
        assert httpx.get(f"{address}/metrics").status_code == 401
        with httpx.Client(base_url=address, headers={"Authorization": "Bearer of-the-page"}) as client:
            values = samples(client.get("/metrics").text)
            quoted = r"with \"quotes\""
            assert values[("insitu_held_out_score", quoted)] == 0.75
            assert values[("insitu_best_held_out_score", quoted)] == 0.75
            assert values[("insitu_episodes_total", "other")] == 12
            dropped = {
                key[2]: value for key, value in values.items() if key[:2] == ("insitu_dropped_episodes_total", "other")
            }
            assert dropped == {"timeout": 6, "no_variance": 3}
            path.write_text("".join(json.dumps(line) + "\n" for line in groups[:2]))  # as a run that continues cuts it
            assert samples(client.get("/metrics").text)[("insitu_episodes_total", "other")] == 4


FULL_DISK = """
import collections, pathlib, shutil
from digits_plugin import *

usage = collections.namedtuple("usage", "total used free")
shutil.disk_usage = lambda path: usage(0, 0, int(pathlib.Path("free").read_text()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("checkpoints", "warns"), slow_after(1, [(1.9, True), (2.1, False)]))
def test_a_disk_with_less_than_two_checkpoints_left_is_a_warning(
    tmp_path: Path, checkpoints: float, warns: bool, size: int
) -> None:
    project = digits_project(tmp_path, plugin="full_disk", rows=4)
    (project / "full_disk.py").write_text(FULL_DISK)
    (project / "free").write_text(str(int(checkpoints * size)))
    code, out, err = run_project(project, "-o", "finetuning.num_epochs", "1")
    assert code == 0, err
    warning = re.search(r"epoch 1: the disk of (\S+) has .* left, and a checkpoint takes .*: free space", out)
    assert (warning is not None) == warns
    (line,) = read_lines(project / "run/training_metrics.jsonl")
    assert len(line.get("warnings", [])) == warns


def block(name: str) -> str:
    """A file of the guide."""
    matched = re.search(
        rf"^```\w+ file={re.escape(name)}\n(.*?)^```$", (ROOT / "docs/guides/operate.md").read_text(), re.M | re.S
    )
    assert matched is not None
    return matched[1]


def check_command(words: list[str]) -> None:
    """Raises UsageError unless insitu has this command with these options."""
    name, *arguments = words
    command = insitu.get_command(click.Context(insitu), name)
    assert command is not None
    command.make_context(name, arguments, parent=click.Context(insitu))


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze; `make test` runs it where systemd is"
)
def test_the_unit_is_one_that_systemd_accepts(tmp_path: Path) -> None:
    unit = block("insitu.service")
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.M)
    check_command(command.split()[1:])
    path = tmp_path / "insitu.service"
    path.write_text(unit.replace(command.split()[0], sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True)
    assert (done.returncode, "insitu.service" in done.stderr) == (0, False), done.stderr
    path.write_text(path.read_text().replace("KillMode=mixed", "KillMode=gently"))
    wrong = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True)
    assert "gently" in wrong.stderr, "it does not check anything here"


def test_the_container_file_has_commands_that_exist(tmp_path: Path) -> None:
    """`make check` lints it; no base image can be had where these tests run."""
    text = (ROOT / "Containerfile").read_text()
    lines = [line.partition(" ") for line in text.splitlines() if not line.startswith("#")]
    copied = re.findall(r"^!(\S+)$", (ROOT / ".containerignore").read_text(), re.MULTILINE)
    assert all((ROOT / each).exists() for each in copied)
    allowed = {"FROM", "WORKDIR", "COPY", "RUN", "USER", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert {name for name, _, _ in lines} <= allowed
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installs = [shlex.split(rest) for name, _, rest in lines if name == "RUN" and rest.startswith("pip")]
    assert len(installs) == 2
    for words in installs:
        pip = subprocess.run([sys.executable, "-m", *words[:2], "--help"], capture_output=True, text=True)
        assert {word for word in words if word.startswith("-")} <= set(re.findall(r"(?<=[ ,])-[\w-]+", pip.stdout))
        assert (ROOT / words[words.index("-c") + 1]).is_file()
    assert {*installs[1][-1].removeprefix(".[").removesuffix("]").split(",")} <= extras.keys()
    instructions = ("HEALTHCHECK", "ENTRYPOINT", "CMD")
    executed = {name: json.loads(rest[rest.index("[") :]) for name, _, rest in lines if name in instructions}
    assert executed["ENTRYPOINT"] == ["insitu"]
    check_command(executed["CMD"])
    with serving("view", tmp_path) as (_, address):
        check = [word.replace("http://127.0.0.1:9100", address) for word in executed["HEALTHCHECK"][1:]]
        assert subprocess.run([sys.executable, *check]).returncode == 0
    assert subprocess.run([sys.executable, *check], capture_output=True).returncode == 1


@pytest.mark.slow
def test_the_lines_of_a_run_have_times_and_may_be_json(tmp_path: Path) -> None:
    project = digits_project(tmp_path, plugin="logging_plugin", rows=4)
    (project / "logging_plugin.py").write_text(
        "from digits_plugin import *\nimport logging, warnings\n"
        "logging.getLogger('mine').warning('a %s line', 'second\\n')\nwarnings.warn('old', DeprecationWarning)\n"
    )
    finetune = ("finetune", "config.yml", "-o", "finetuning.num_epochs", "1")
    done = run("--log_format", "json", *finetune, folder=project, PYTHONWARNINGS="always", SOME_PASSWORD="second-line")
    assert (done.returncode, done.stdout) == (0, "1 training job completed\n"), done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert {tuple(line) for line in lines} == {("time", "level", "logger", "message")}
    assert all(datetime.fromisoformat(line["time"]).tzinfo is UTC for line in lines)
    said = {(line["level"], line["logger"]): line["message"] for line in lines}
    assert said["WARNING", "mine"] == "a second\n line"
    assert "DeprecationWarning: old" in said["WARNING", "py.warnings"]
    progress = [line["message"] for line in lines if line["logger"] == "insitu.run"]
    assert any(message.startswith("epoch 1/1  reward ") for message in progress)

    text = run("--log_format", "text", *finetune, folder=project)
    assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO insitu.run: epoch 1/1  reward ", text.stderr, re.M)
    refused = run("--log_format", "json", "finetune", "missing.yml", folder=project)
    (line,) = map(json.loads, refused.stderr.splitlines())
    assert (refused.returncode, line["level"], line["message"][:7]) == (2, "ERROR", "error: ")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("finetune",), 2, "error: Missing the YAML file: "),
        (("finetune", "a.yml", "--nothing"), 2, "error: No such option"),
        (("nothing",), 2, "error: No such command 'nothing'"),
        (("--nothing", "finetune"), 2, "error: No such option"),
        (("backend", "--model", "./nowhere", "--port", "0"), 1, "insitu backend: "),
    ],
)
def test_the_reason_for_an_end_is_one_line_of_json(tmp_path: Path, arguments: Any, code: int, said: str) -> None:
    for option in (("--log_format", "json"), ("--log-format=json",)):
        done = run(*option, *arguments, folder=tmp_path)
        (line,) = map(json.loads, done.stderr.splitlines())
        assert (done.returncode, line["level"], line["logger"]) == (code, "ERROR", "insitu"), line
        assert line["message"].startswith(said)
        assert ("--nothing" in arguments) is ("--nothing" in line["message"])


def test_a_warning_of_the_hub_library_is_one_line_of_json() -> None:
    """It has a handler of its own."""
    code = """
import logging, sys
from insitu.wire.log_lines import configure_logging, write_json_lines
write_json_lines(sys.stderr)
configure_logging(logging.WARNING, "json")
from huggingface_hub.utils import logging as hub
hub.get_logger("huggingface_hub.utils._http").warning("no connection")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (line,) = map(json.loads, done.stderr.splitlines())
    assert (line["level"], line["message"]) == ("WARNING", "no connection")


def test_notes_and_the_end_by_a_signal_are_lines_of_json(tmp_path: Path) -> None:
    project = digits_project(tmp_path, rows=2)
    best = recorded_run(project / "earlier", [0.0] * 2, [1.0] * 2)
    served = ("serve", "config.yml", "--port", "0", "--checkpoint", best)
    trained = ("finetune", "config.yml", "-o", "finetuning.num_epochs", "200")
    messages, metrics = [], project / "run/training_metrics.jsonl"
    for command in (served, trained):
        with start("--log_format", "json", *command, folder=project) as process:
            process.stdout.readline() if command is served else process.wait_until(metrics.exists)
            process.terminate()
            messages += [json.loads(line)["message"] for line in process.communicate(HANGS)[1].splitlines()]
    assert messages[0].startswith("checkpoint: ")
    assert messages[-1] == "interrupted"


PLUGINS = '["digits_plugin", "noisy"]'


def test_a_last_line_without_an_end_is_a_line_of_json(tmp_path: Path) -> None:
    project = digits_project(tmp_path, rows=2)
    (project / "noisy.py").write_text("import sys\n\nsys.stderr.write('first\\nlast')\n")
    done = run("--log_format", "json", "validate", "config.yml", "-o", "general.plugins", PLUGINS, folder=project)
    assert [json.loads(line)["message"] for line in done.stderr.splitlines()] == ["first", "last"], done.stdout

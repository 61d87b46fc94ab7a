"""`make test WITH=NAME`: the table of suites, what makes their environments, and the pages that name them."""

import importlib.util
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from processes import HANGS, wait_until

ROOT = Path(__file__).resolve().parents[2]
TABLE = tomllib.loads((ROOT / "tests/environments.toml").read_text())
SUITES, ENVIRONMENTS = TABLE["suites"], TABLE["environments"]
TARGETS = ["install", "quickstart", "test", "check", "bench", "examples", "clean"]


def make(*arguments: str) -> str:
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_help_fits_on_a_screen_and_names_all_targets_and_suites() -> None:
    lines = make("help").splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 120
    phony = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony == [" ".join(["help", *TARGETS])]
    words = set(re.findall(r"\w+", "\n".join(lines)))
    assert words >= {*TARGETS, *SUITES}


def test_each_suite_is_in_the_table_of_contributing() -> None:
    """By its name, with the target that it replaces, unless there was none, and its minutes."""
    pattern = r"^\| `WITH=(\w+)` \| (?:`test-(\w+)` )?\|.*\| (\d+) \|$"
    rows = re.findall(pattern, (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert [(name, minutes) for name, _, minutes in rows] == [(n, str(suite["minutes"])) for n, suite in SUITES.items()]
    assert {(name, replaced) for name, replaced, _ in rows if replaced not in ("", name)} == set()


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_names_files_and_environments_that_exist(name: str) -> None:
    suite = SUITES[name]
    assert suite.keys() <= {"tests", "minutes", "environments", "inside", "variables", "before", "commands"}
    for wanted in [*suite.get("environments", []), *([suite["inside"]] if "inside" in suite else [])]:
        assert any(f"{each}/".startswith(f"{wanted}/") for each in ENVIRONMENTS), wanted
    text = " ".join([*suite.get("before", []), *suite["commands"]])
    files = re.findall(r"(?<!\S)(?:tests|scripts)/[\w./]+", text)
    assert files or name == "slow"
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_every_folder_of_tests_is_in_a_suite() -> None:
    commands = " ".join(command for suite in SUITES.values() for command in suite["commands"])
    assert [each.name for each in (ROOT / "tests").glob("with_*") if f"tests/{each.name}" not in commands] == []


def test_every_framework_with_an_example_has_an_environment() -> None:
    examples = {file.name.removesuffix("_agent.py") for file in (ROOT / "examples/frameworks").glob("*_agent.py")}
    assert {name.partition("/")[2] for name in ENVIRONMENTS if name.startswith("frameworks/")} == examples


def test_environments_install_extras_that_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, entry in ENVIRONMENTS.items():
        words = " ".join(entry["install"] if isinstance(entry, dict) else entry)
        named = re.findall(r"-e \.\[([\w,-]+)\]", words)
        assert {extra for each in named for extra in each.split(",")} <= extras.keys(), name


def test_an_unknown_suite_is_refused_with_those_that_exist() -> None:
    command = [sys.executable, ROOT / "scripts/test_with.py", "slow", "rey"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"WITH=rey: there are {', '.join(SUITES)}\n"


def test_a_suite_that_is_told_to_end_ends_what_it_has_started(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "scripts/test_with.py", tmp_path / "scripts")
    command = "sleep 600 & echo $! > started; mv started pid; wait"
    table = f'[environments]\n[suites.long]\ntests = "nothing"\nminutes = 10\ncommands = ["{command}"]\n'
    (tmp_path / "tests/environments.toml").write_text(table)
    with subprocess.Popen([sys.executable, tmp_path / "scripts/test_with.py", "long"]) as suite:
        wait_until((tmp_path / "pid").exists)
        suite.terminate()
        assert suite.wait(HANGS) == 128 + signal.SIGTERM
    wait_until(lambda: not Path("/proc", (tmp_path / "pid").read_text().strip()).exists())


@pytest.mark.check
def test_the_areas_of_the_mutation_check_name_files_that_exist() -> None:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts/mutants.py")
    assert spec is not None
    assert spec.loader is not None
    mutants = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutants)
    for name, area in mutants.AREAS.items():
        assert len(mutants.chosen(name, 20, seed=0)) == 20
        assert [test for test in area.tests if len([*(ROOT / "tests").rglob(f"test_{test}.py")]) != 1] == [], name

"""The files that GitHub reads: workflows, issue forms, and the metadata of the package."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from insitu import __version__

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
SUITES = tomllib.loads((ROOT / "tests/environments.toml").read_text())["suites"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_what_exists(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow.keys() >= {"name", True, "jobs"}  # `on` is a boolean in YAML 1.1
    makefile = (ROOT / "Makefile").read_text()
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            assert re.fullmatch(r"[\w-]+/[\w-]+@[\w./-]+", step.get("uses", "actions/checkout@v4"))
            command = step.get("run", "")
            if called := re.match(r"make (\w+)(?: WITH=(\w+))?", command):
                assert re.search(rf"^{called[1]}:", makefile, re.MULTILINE)
                assert called[2] is None or called[2] in SUITES
            elif command.startswith("."):
                assert (ROOT / command).exists()


def test_only_the_job_that_publishes_may_ask_for_an_identity() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert {name for name, job in jobs.items() if job["permissions"].get("id-token") == "write"} == {"publish"}
    assert jobs["publish"]["needs"] == "build"
    assert not any("run" in step for step in jobs["publish"]["steps"])


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_issue_forms_have_the_keys_of_github(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        assert form.keys() <= {"blank_issues_enabled", "contact_links"}
        return
    assert form.keys() >= {"name", "description", "body"}
    ids = [each["id"] for each in form["body"]]
    assert len(ids) == len({*ids})
    assert all(each["type"] in ("textarea", "input") and each["attributes"]["label"] for each in form["body"])


def test_a_bug_report_asks_for_the_environment() -> None:
    (ask,) = (each for each in yaml.safe_load(FORMS[0].read_text())["body"] if each["id"] == "environment")
    assert "`insitu env`" in ask["attributes"]["label"]
    assert ask["validations"] == {"required": True}


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert __version__ == PROJECT["version"] == citation["version"]
    assert citation["license"] == PROJECT["license"]


def test_the_package_names_the_systems_that_it_runs_on() -> None:
    systems = {each.rpartition(" :: ")[2] for each in PROJECT["classifiers"] if each.startswith("Operating System")}
    assert systems == {"Linux", "MacOS"}
    assert "sys_platform" not in (ROOT / "pyproject.toml").read_text()
    versions = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    assert versions == workflow["jobs"]["test"]["strategy"]["matrix"]["python-version"]
    assert PROJECT["requires-python"] == f">={versions[0]}"


@pytest.mark.parametrize("name", ["SECURITY.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md"])
def test_links_lead_to_files(name: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / name).read_text()):
        assert (ROOT / target).exists(), target

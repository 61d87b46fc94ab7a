"""The documentation does what it says: every block is run, loaded or written, every link leads somewhere.

The word after a block's language says what becomes of it; a block with no rule fails.

    ```python                run, in order, in one namespace a page       ```LANGUAGE file=NAME   written to NAME
    ```yaml                  a whole file: loaded and checked             ```yaml fragment        merged into grpo.yml
    ```yaml agent            the same, with the module it names made up   ```text, ```json example  only shown
    ```python from=FILE      is in FILE line for line
    ```text printed          the block before prints these lines, with other numbers; `...` is left out
    ```bash                  run by bash, curl failing on a refusal       ```bash refused         the server must refuse

The blocks of the two guides that train an agent run as they are printed, and the held-out scores of their runs must
rise as the guides say. On the other pages, commands run in a copy of the examples with few rows and one epoch, by
options added to the line, on the one backend and the one workflow service that are started here for all pages. Files
that need the ART library are checked, and not run: `make test WITH=art` has it.
"""

import ast
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from factories import read_lines, recorded_run
from fake_nemo import FakeNeMo
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from processes import HANGS, forked_python, install_forked_command, serving

from insitu.cli import insitu
from insitu.config import load_config
from insitu.config.short_form import expanded
from insitu.config.yaml_loader import parse_yaml
from insitu.errors import install_command
from insitu.plugin_api import LLMFrameworkEnum
from insitu.schemas.episodes import DropReason

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = Path("examples/tic_tac_toe")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / EXAMPLE / "README.md"]
GUIDES = {
    "docs/guides/train-your-agent.md": ("desk", "desk_graph"),
    "docs/guides/external-agents.md": ("program",),
    "docs/guides/python.md": (),
}
"""The pages that are run as printed, and the runs whose score must rise."""
PROGRAM = "docs/guides/external-agents.md"
"""The page whose agent is a program, which starts faster in an interpreter that has imported nothing."""
RECORDED = "docs/guides/export.md"
"""The page about runs that have ended; its commands get runs of a tiny model."""
HUB = ("HuggingFaceTB/SmolLM2-135M-Instruct",)
RISE = (0.8, 0.85)
"""The highest held-out score before training and the lowest one after it, as the guides promise: two of three answers
are right, then nine of ten."""
PORT, SERVICE = "http://127.0.0.1:8700", "http://127.0.0.1:8000"
NEMO, DATA_STORE = "http://nemo.test", "http://data-store.test"
BLOCK = re.compile(r"^```(\w*)[ ]*([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
COMMAND = re.compile(r"^insitu (?:-v )?(train|finetune|eval|run|serve|backend)\b(.*)$", re.MULTILINE)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
LONG = {
    ROOT / "docs/guides" / f"{name}.md"
    for name in (
        "train-your-agent",
        "python",
        "external-agents",
        "operate",
        "evaluate",
        "reuse-episodes",
        "preferences",
        "customizer",
        "distill",
    )
}
"""Guides whose runs take many epochs as printed, or that have many runs: in `make test WITH=slow`."""


@dataclass(frozen=True)
class Block:
    language: str
    info: str
    text: str

    @property
    def file(self) -> str | None:
        return self.info.removeprefix("file=") if self.info.startswith("file=") else None


def blocks_of(page: Path) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall(page.read_text())]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@dataclass
class Desk:
    """Where a page's commands run: a copy of the examples, and what blocks have written and exported so far."""

    folder: Path
    backend: str
    service: str
    nemo: FakeNeMo
    as_printed: bool
    seen: set[str]
    """Commands that a page has run already: starting one costs seconds."""
    recorded: bool
    """Whether the page begins with runs that have trained already."""
    forks: bool
    """Whether its Python is forked."""
    exported: Path = field(init=False)
    programs: Path = field(init=False)

    def __post_init__(self) -> None:
        self.exported, self.programs = self.folder / ".exported", self.folder / ".programs"
        self.programs.mkdir()
        install_forked_command(self.programs / "insitu")
        if self.forks:
            (self.programs / "python").symlink_to(forked_python())
        activate = self.folder / ".venv" / "bin" / "activate"
        activate.parent.mkdir(parents=True)
        activate.write_text(f"export PATH={self.programs}:{Path(sys.executable).parent}:$PATH\n")
        (self.folder / "runs").mkdir()
        for model in HUB:  # is in the cache, as far as `insitu validate` looks
            refs = self.folder / f".hub/models--{model.replace('/', '--')}/refs"
            refs.mkdir(parents=True)
            (refs / "main").write_text("0")
        if self.recorded:
            recorded_run(self.folder / "runs/agent", [0.0] * 20, [1.0] * 10 + [0.0] * 10, lora=True)
            recorded_run(self.folder / "runs/next", [0.0] * 20, [1.0] * 20)
        shutil.copytree(ROOT / "examples/help_desk", self.folder / "examples/help_desk")
        shutil.copytree(ROOT / EXAMPLE, self.folder / EXAMPLE, ignore=shutil.ignore_patterns("__pycache__"))
        for rows in (self.folder / EXAMPLE).glob("*.jsonl"):
            rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:4]))

    def bash(self, text: str, *, curl_fails: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a block; what it exports and assigns is there for the next one."""
        block = text if self.as_printed else self.made_small(text)
        script = f"set -eauo pipefail\nsource .exported\n{block}\nexport -p > .exported\n"
        if curl_fails and not self.as_printed:
            script = re.sub(r"\bcurl ", "curl --fail-with-body ", script)
        self.exported.touch()
        environment = {**os.environ, "HF_HUB_OFFLINE": "0" if NEMO in text else "1"}
        environment["HF_HUB_CACHE"] = str(self.folder / ".hub")
        if not self.as_printed:
            environment["PATH"] = f"{self.programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-c", script], cwd=self.folder, env=environment, capture_output=True, text=True, timeout=HANGS
        )

    def made_small(self, text: str) -> str:
        """The block with long runs shortened, and with what only a reader's machine has taken out."""
        lines = []
        here = {PORT: self.backend, SERVICE: self.service}
        here |= {NEMO: self.nemo.entity_host, DATA_STORE: self.nemo.datastore_host}
        text = text.replace("\\\n", " ")
        for printed, address in here.items():
            text = text.replace(printed, address)
        for line in text.splitlines():
            found = COMMAND.match(line)
            if found:
                words = shlex.split(found[2], comments=True)
                asked = command(found[1]).make_context(found[1], words, parent=click.Context(insitu)).params
                own_backend = "insitu runs fork" in text  # which needs its checkpoints
                line = self.small_run(re.sub(r"\s+#.*", "", line), found[1], asked, own_backend)
                if line not in self.seen:
                    self.seen.add(line)
                    lines.append(line)
            elif line.startswith("python scripts/"):  # has its own test
                assert all((ROOT / word).is_file() for word in line.split()[1:]), line
            elif line.startswith("make "):
                assert re.search(rf"^{line.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
            elif not line.startswith(("source .venv/", "git clone ", "cd insitu")):
                lines.append(line)
        return "\n".join(lines)

    def small_run(self, line: str, kind: str, asked: dict[str, Any], own_backend: bool) -> str:
        """The line with what makes it quick; empty for what is not to be run."""
        if kind in ("serve", "backend"):
            return ""
        if kind == "train":
            few = "-o finetuning.num_epochs 1 -o trajectory_builders.episodes.rows_per_epoch 8"
            return f"{line} {few} -o finetuning.validation.reps 1"
        file = self.folder / (asked["file"] or asked["config_file"])
        config = expanded(parse_yaml(file.read_text()))
        adapters = config.get("trainer_adapters") or {}
        if any(block["_type"] == "openpipe_art_trainer_adapter" for block in adapters.values()):
            load_config(file, asked["override"])
            return ""
        if kind == "finetune":
            line += " -o finetuning.num_epochs 1"
            if "episodes" in config["trajectory_builders"]:
                line += " -o trajectory_builders.episodes.num_generations 4"
            if "customizer" in adapters:
                line += " -o trainer_adapters.customizer.poll_interval_seconds 0.01"
            if "validation" in config["finetuning"]:
                line += " -o finetuning.validation.reps 1"
        if "backend" in adapters and "--checkpoint" not in line and not own_backend:
            line += f" -o trainer_adapters.backend.model null -o trainer_adapters.backend.url {self.backend}"
        return line


def command(name: str) -> click.Command:
    found: click.Command | None = insitu
    for word in name.split():
        assert isinstance(found, click.Group)
        found = found.get_command(click.Context(found), word)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a backend on the example's model."""
    folder = str(tmp_path_factory.mktemp("backend"))
    model = ("--model", str(ROOT / EXAMPLE / "model"))
    with serving("backend", *model, "--port", "0", "--output_dir", folder) as (_, address):
        yield address


@pytest.fixture(scope="module")
def service(backend: str) -> Iterator[str]:
    """The address of a service that runs the example's workflow."""
    model = ("-o", "trainer_adapters.backend.model", "null", "-o", "trainer_adapters.backend.url", backend)
    with serving("serve", "--config_file", str(ROOT / EXAMPLE / "grpo.yml"), "--port", "0", *model) as (_, address):
        yield address


@pytest.fixture(scope="module")
def nemo() -> Iterator[FakeNeMo]:
    """NeMo services, at other addresses than those that are printed."""
    with FakeNeMo() as nemo:
        yield nemo


@pytest.fixture(scope="module")
def desks(backend: str, service: str, nemo: FakeNeMo, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Desk]:
    seen: set[str] = set()

    def desk_of(name: str) -> Desk:
        folder = tmp_path_factory.mktemp("page")
        return Desk(folder, backend, service, nemo, name in GUIDES, seen, name == RECORDED, name != PROGRAM)

    return {name: desk_of(name) for name in map(name_of, PAGES)}


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules that a page's files import are forgotten afterwards."""
    before, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if not name.startswith("insitu"):
            spec = sys.modules[name].__spec__
            if spec is not None and spec.origin is not None and "/page" in spec.origin:
                del sys.modules[name]


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow) if page in LONG else page for page in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_block_does_what_it_says(
    page: Path, desks: dict[str, Desk], monkeypatch: pytest.MonkeyPatch, importable: None
) -> None:
    desk = desks[name_of(page)]
    monkeypatch.chdir(desk.folder)
    namespace: dict[str, Any] = {"__name__": page.stem}
    printed = ""
    for number, block in enumerate(blocks_of(page), 1):
        where = f"{name_of(page)}, block {number}"
        kind = f"{block.language} {block.info}".strip()
        if block.file is not None:
            text = block.text if desk.as_printed else block.text.replace(PORT, desk.backend)
            check_written(desk.folder / block.file, text, block, where)
        elif block.info.startswith("from="):
            check_taken(ROOT / block.info.removeprefix("from="), block, where)
        elif kind == "python":
            exec(compile(block.text, where, "exec"), namespace)
        elif block.language == "yaml":
            check_yaml(desk.folder, block, where)
        elif kind in ("bash", "bash refused"):
            done = desk.bash(block.text, curl_fails=block.info != "refused")
            said = f"{where}:\n{block.text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            assert done.returncode == 0, said
            assert done.stdout.startswith('{"error":') == (block.info == "refused"), said
            printed = done.stdout
        elif kind == "text printed":
            check_printed(block.text, printed)
        elif kind in ("json example", "jsonl example"):
            check_json(block)
        else:
            assert kind == "text", f"{where}: there is no rule for {kind!r}"
    for run in GUIDES.get(name_of(page), ()):
        check_rise(desk.folder / "runs" / run)
    if "desk" in GUIDES.get(name_of(page), ()):
        check_files(desk.folder)


def check_rise(run: Path) -> None:
    """The held-out score before and after training."""
    validations = json.loads((run / "validation_history.json").read_text())
    before, after = (validations[i]["avg_reward"] for i in (0, -1))
    assert before <= RISE[0], validations
    assert after >= RISE[1], validations


def check_written(path: Path, text: str, block: Block, where: str) -> None:
    path.write_text(text)
    if block.language in ("json", "jsonl"):
        check_json(block)
    elif block.language == "yaml":
        load_config(path)
    else:
        assert block.language in ("python", "ini"), where  # the last: tests/runs/test_operate.py


def check_printed(text: str, printed: str) -> None:
    """Checks that a command prints the lines, in order, but for numbers, widths and a best score before training."""

    def without_numbers(line: str) -> str:
        return re.sub(r"[-+\d.]+", "0", re.sub(r"[\s━─]+", " ", line.replace(" --checkpoint latest", "")))

    there = [*map(without_numbers, printed.splitlines())]
    for line in filter(None, (line.removesuffix("...") for line in text.splitlines())):
        at = next((n for n, each in enumerate(there) if each.startswith(without_numbers(line).rstrip())), None)
        assert at is not None, (line, printed)
        del there[: at + 1]


def check_taken(path: Path, block: Block, where: str) -> None:
    """Checks that a block's lines are those of a file tested elsewhere, in order."""
    there = (line.strip() for line in path.read_text().splitlines())
    assert all(line.strip() in there for line in block.text.splitlines()), where
    if block.language == "yaml":
        load_config(path)


def check_json(block: Block) -> None:
    for document in block.text.splitlines() if block.language == "jsonl" else [block.text]:
        json.loads(document)


def check_yaml(folder: Path, block: Block, where: str) -> None:
    """Loads it like the command does: an unknown key, type or name raises."""
    data = parse_yaml(block.text)
    if block.info == "fragment":
        base = parse_yaml((folder / EXAMPLE / "grpo.yml").read_text())
        path = folder / EXAMPLE / "fragment.yml"
        path.write_text(yaml.safe_dump(merged(base, data)))
        for module in folder.glob("*.py"):  # of the page
            shutil.copy(module, path.parent)
    else:
        path = folder / "page.yml"
        path.write_text(block.text)
    if block.info == "agent":
        made_up = "from insitu.plugin_api import *\n"
        made_up += "class A(FunctionBaseConfig, name='my_agent'):\n    model: LLMRef\n"
        made_up += "class S(EvaluatorBaseConfig, name='my_score'): pass\n"
        made_up += "register_function(config_type=A)(lambda c, b: None)\n"
        made_up += "register_evaluator(config_type=S)(lambda c, b: None)\n"
        (folder / "my_agent.py").write_text(made_up)
    assert block.info in ("", "agent", "fragment"), where
    load_config(path)


def merged(base: Any, change: Any) -> Any:
    """`change` over `base`; a block with its own `_type` replaces the one that was there."""
    if not isinstance(base, dict) or not isinstance(change, dict):
        return change
    if change.get("_type", base.get("_type")) != base.get("_type"):
        return change
    return base | {key: merged(base.get(key), value) for key, value in change.items()}


@each_page
def test_commands_that_are_only_shown_have_these_options(page: Path) -> None:
    text = re.sub(r"\\\n\s*", "", BLOCK.sub("", page.read_text()))
    for name, words in re.findall(r"^    insitu (train|ask|finetune|eval|run|export) (.*)$", text, re.MULTILINE):
        command(name).make_context(name, shlex.split(words, comments=True), parent=click.Context(insitu))


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(BLOCK.sub("", page.read_text())):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target.partition("#")[0]).exists(), f"{name_of(page)}: {target}"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        if page.name != "README.md":
            assert f"({page.relative_to(ROOT / 'docs')})" in index, page


def test_make_targets_and_extras_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    makefile = (ROOT / "Makefile").read_text()
    suites = tomllib.loads((ROOT / "tests/environments.toml").read_text())["suites"]
    for page in PAGES:
        text = page.read_text()
        for target, suite in re.findall(r"(?:`|^    )make ([\w-]+)(?: WITH=(\w+))?", text, re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{name_of(page)}: make {target}"
            assert not suite or suite in suites, f"{name_of(page)}: make {target} WITH={suite}"
        for named in re.findall(r"pip install -e '\.\[([\w-]+)\]'", text):
            assert named in extras, f"{name_of(page)}: the extra {named}"


def test_every_hint_to_install_works_in_a_clone() -> None:
    """There is no release on a package index."""
    sources = (ROOT / folder for folder in ("src", "scripts", "examples"))
    code = [file for folder in sources for kind in ("*.py", "*.yml") for file in folder.rglob(kind)]
    for file in [*PAGES, *code]:
        for line in file.read_text().splitlines():
            assert "insitu[" not in line or "pip install" not in line, f"{file}: {line}"
    assert install_command("langgraph") in (ROOT / "docs/guides/train-your-agent.md").read_text()


def test_the_lock_file_is_of_these_dependencies() -> None:
    """And names no folder of the machine that wrote it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "uv.lock").read_text()
    assert "file://" not in text
    (own,) = (each for each in tomllib.loads(text)["package"] if each["name"] == "insitu")
    locked = {(each["name"], bounds(each.get("specifier", ""))) for each in own["metadata"]["requires-dist"]}
    extras = (each for extra in project["optional-dependencies"].values() for each in extra)
    declared = [Requirement(each) for each in (*project["dependencies"], *extras)]
    assert locked == {(canonicalize_name(each.name), bounds(str(each.specifier))) for each in declared}, "run uv lock"


def bounds(specifier: str) -> frozenset[str]:
    return frozenset(specifier.split(","))


def test_the_workflow_of_github_runs_what_ci_runs() -> None:
    jobs = parse_yaml((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
    assert [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step] == [".ci/run"]
    assert os.access(ROOT / ".ci/run", os.X_OK)


def script(name: str) -> Any:
    """A module of `scripts`."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_of_the_configuration_is_up_to_date() -> None:
    module = script("write_reference")
    assert module.PAGE.read_text() == module.page(), "run scripts/write_reference.py"
    undescribed = [line for line in module.page().splitlines() if re.match(r"\| `\w+` .*\|  \|$", line)]
    assert not undescribed


def test_the_tables_of_models_are_up_to_date() -> None:
    module = script("write_models")
    assert module.PAGE.read_text() == module.page(), "run scripts/write_models.py"


def test_the_page_of_frameworks_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """And every framework has been tested, streamed too where it streams."""
    module = script("write_frameworks")
    assert module.PAGE.read_text() == module.page(), "run scripts/write_frameworks.py"
    monkeypatch.syspath_prepend(ROOT / "tests/with_frameworks")
    cases = importlib.import_module("cases").CASES
    assert {kind.value for kind in LLMFrameworkEnum} == {*cases, "langchain"}, "langgraph's case is langchain's too"
    found = {file.stem: json.loads(file.read_text()) for file in module.RESULTS.glob("*.json")}
    modes = {name: {mode for mode in module.MODES if mode in results} for name, results in found.items()}
    assert modes == {name: set(module.MODES[: 1 + case.streams]) for name, case in cases.items()}
    about = [(found[name]["framework"], found[name]["package"], found[name]["goes_on"]) for name in cases]
    assert about == [(case.title, case.distribution, case.goes_on) for case in cases.values()]


@pytest.mark.parametrize(
    "name",
    [
        *(
            "init",
            "train",
            "ask",
            "finetune",
            "eval",
            "run",
            "validate",
            "doctor",
            "export",
            "promote",
            "serve",
            "backend",
            "view",
        ),
        *("trajectories show", "trajectories export", "trajectories rescore"),
        *("runs list", "runs show", "runs fork", "runs prune", "env", "schema"),
    ],
)
def test_every_option_is_documented(name: str) -> None:
    text = (ROOT / "docs/reference/cli.md").read_text()
    section = text.partition(f"## `insitu {name}`")[2].partition("\n## ")[0]
    documented = set(re.findall(r"`(--?\w+)", "".join(line for line in section.splitlines() if line.startswith("|"))))
    options = (parameter for parameter in command(name).params if isinstance(parameter, click.Option))
    real = {option for parameter in options for option in (*parameter.opts, *parameter.secondary_opts)}
    assert documented == real


def test_every_reason_code_is_documented() -> None:
    text = (ROOT / "docs/concepts.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == {reason.value for reason in DropReason}


def test_every_code_of_the_doctor_is_documented() -> None:
    section = (ROOT / "docs/guides/train-your-agent.md").read_text().partition("### Will it learn?")[2]
    documented = set(re.findall(r"`(\w+)`", "".join(line for line in section.splitlines() if line.startswith("| "))))
    files = [*(ROOT / "src/insitu/doctor").glob("*.py"), ROOT / "src/insitu/training/metrics.py"]
    calls = [n for file in files for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call)]
    made = [n.args[0] for n in calls if isinstance(n.func, ast.Name) and n.func.id in ("Finding", "Cause") and n.args]
    codes = {code.value for code in made if isinstance(code, ast.Constant)}
    assert len(codes) > 15
    assert codes <= documented


def documented_keys(file: str) -> set[str]:
    """The keys in the first column of the table under a file's heading in files.md."""
    text = (ROOT / "docs/reference/files.md").read_text()
    section = text.partition(f"\n## `{file}`\n")[2].partition("\n#")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return set(re.findall(r"`(\w+)`", " ".join(cells)))


def keys_in(path: Path) -> set[str]:
    if path.suffixes[0] == ".jsonl":
        records = read_lines(path)
    else:
        data = json.loads(path.read_text())
        records = data if isinstance(data, list) else [data]
    return {key for record in records if record.keys() != {"format"} for key in record}


OPTIONAL = {
    "run.json": {"groups", "token_bridge"},
    "progress.json": {"stop", "due_validation"},
    "advantages.jsonl": {"sides", "token_advantages"},
    "calls.jsonl.gz": {"continues", "continues_prompt", "sent_logprobs", "teacher_logprobs"},
    "episodes.jsonl.gz": {"candidates", "source"},
    "groups.jsonl": {"paired", "replaced_by", "rows", "saved"},
    "validation_history.json": {"beside"},
    "best.json": {"beside"},
    "events.jsonl": {"epochs", "changes", "run", "run_id", "best_epoch", "patience", "untrained_episodes"},
    "journal.jsonl": {"episode", "calls", "steps", "abandoned_attempts"},
    "training_metrics.jsonl": {
        *("age", "masked_share", "non_finite_metrics", "sampled_version", "warnings"),
        *("malformed_tool_calls", "teacher_kl"),
        *("planned_episodes", "extra_episodes", "saved_episodes", "replaced_groups", "skipped_rows"),
    },
}


def check_files(folder: Path) -> None:
    """The files that a page's commands have left behind have the documented keys."""
    run, evaluation = folder / "runs" / "desk", folder / ".tmp" / "insitu" / "eval"
    present = {path.name for path in run.iterdir()} - {"backend", ".index.sqlite"}
    for name in present - {"reward_plot.png"}:
        assert keys_in(run / name) | OPTIONAL.get(name, set()) == documented_keys(name), name
    assert "reward_plot.png" in present
    assert keys_in(evaluation / "workflow_output.json") == documented_keys("workflow_output.json")
    scores = json.loads((evaluation / "correct_output.json").read_text())
    assert scores.keys() == {"average_score", "eval_output_items"}
    assert scores["average_score"] >= RISE[1], "the page's last evaluation is that of the best checkpoint"
    assert set(scores["eval_output_items"][0]) == documented_keys("<evaluator>_output.json")
    headings = set(re.findall(r"^## `([\w.]+\.\w+)`", (ROOT / "docs/reference/files.md").read_text(), re.MULTILINE))
    assert headings - {"workflow_output.json", "rescores.jsonl"} == present

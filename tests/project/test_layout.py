"""The house rules that a machine can hold: who may import whom, lengths, docstrings, errors, printing."""

import ast
import gc
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from processes import forked_python

pytestmark = pytest.mark.check
ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "insitu"
ARCHITECTURE = (ROOT / "CONTRIBUTING.md").read_text().partition("## Architecture")[2].partition("\n## ")[0]
FLOORS = {
    name: int(floor)
    for floor, names in re.findall(r"^ {4} *(\d+)  (.+)$", ARCHITECTURE, re.M)
    for name in names.split()
}
"""The floor of each package; a single file counts as one."""
APART = {
    "wire": {"schemas"},
    "builder": {"config"},
    "config": {"builder", "disk"},
    "agents": {"gateway"},
    "runs": {"collect"},
    "collect": {"agents", "gateway"},
}
"""What packages do without, whichever floors they stand on."""
INTEGRATIONS = PACKAGE / "integrations"
SERVER_HALVES = ("art/server", "torchrun", "vllm")
"""What runs in the backend's process."""
BACKEND_MAY = {"errors", "schemas", "wire", "disk", "formats", "algorithms", "advantages", "backend"}
MODULES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(m.relative_to(PACKAGE)) for m in MODULES]


def found_by(check: Callable[[Path], Iterable[str]]) -> str:
    """What a check finds in the modules, a line each; empty if all is well."""
    return "\n".join(f"{name}: {found}" for path, name in zip(MODULES, NAMES, strict=True) for found in check(path))


def part_of(path: Path) -> str:
    """`training` for training/loop.py, `registry` for registry.py, empty for the package's own files."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first.startswith("__") else first


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) of every import: in functions, under TYPE_CHECKING, and by name.

    Any text that is the dotted name of a module of ours counts as an import by name, wherever it stands; of an
    f-string, the part before its first value.
    """
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = [name for name in names if file_of(name) is not None]
            yield from ((node.lineno, name) for name in modules or [node.module or ""])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0].rstrip(".")
            if re.fullmatch(r"insitu(\.\w+)+", name) and file_of(name) is not None:
                yield node.lineno, name


@cache
def file_of(module: str) -> Path | None:
    """The file of a module of ours."""
    top, *parts = module.split(".")
    base = PACKAGE.joinpath(*parts)
    candidates = (base.with_suffix(".py"), base / "__init__.py") if top == "insitu" and parts else ()
    return next((path for path in candidates if path.is_file()), None)


@pytest.fixture(scope="module", autouse=True)
def _forget_the_trees() -> Iterator[None]:
    """A collection of garbage would visit each of their nodes: here and in the tests of other files."""
    gc.disable()
    yield
    parse.cache_clear()
    nodes_of.cache_clear()
    gc.enable()


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in nodes_of(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(tree: ast.AST) -> list[ast.AST]:
    return [*ast.walk(tree)]


def may_import(importer: str, imported: str) -> bool:
    if importer == "integrations":
        return imported in FLOORS or imported == "integrations"
    if importer == "backend":
        return imported in BACKEND_MAY
    if imported == "backend" or imported not in FLOORS or imported in APART.get(importer, ()):
        return False
    return importer in ("", imported) or FLOORS[imported] < FLOORS[importer]


def test_packages_stand_on_at_most_ten_floors() -> None:
    """CONTRIBUTING has the table: a package is one floor above the highest that it imports."""
    core = {part_of(path) for path in MODULES} - {"", "backend", "integrations"}
    graph = {
        part: {part_of(other) for path in MODULES if part_of(path) == part for other in imported_by(path)}
        & core - {part}
        for part in core
    }
    floors: dict[str, int] = {}
    for part in TopologicalSorter(graph).static_order():
        floors[part] = 1 + max((floors[each] for each in graph[part]), default=0)
    assert floors == FLOORS
    assert max(floors.values()) <= 10


def imports_of_later_parts(path: Path) -> Iterator[str]:
    for line, module in imports_of(path):
        top, _, rest = module.partition(".")
        if top == "nat":
            yield f"line {line}: nothing in insitu imports nat"
        if top != "insitu" or not rest or rest == "__version__":
            continue
        imported = rest.partition(".")[0]
        starts_the_backend = path == PACKAGE / "cli" / "backend.py" and imported == "backend"
        serves = is_server_half(path) and may_import("backend", imported)
        if not may_import(part_of(path), imported) and not starts_the_backend and not serves:
            yield f"line {line}: {module}"


def test_imports_go_leftwards_only() -> None:
    assert not found_by(imports_of_later_parts)


def test_the_check_of_imports_sees_what_it_must() -> None:
    text = (
        "if TYPE_CHECKING:\n from insitu.cli import options\n"
        "def f():\n import insitu.training.loop\n"
        "TABLE = {'x': 'insitu.workflow.functions:as_function', 'y': 'insitu is a name'}\n"
        "import_module(f'insitu.integrations.frameworks.{name}')\n"
    )
    found = [m for _, m in imports(ast.parse(text))]
    assert sorted(found) == [
        "insitu.cli.options",
        "insitu.integrations.frameworks",
        "insitu.training.loop",
        "insitu.workflow.functions",
    ]
    assert may_import("backend", "schemas")
    assert not may_import("backend", "config")
    assert not may_import("cli", "backend")
    assert not may_import("schemas", "registry")
    assert not may_import("config", "disk")
    assert may_import("training", "training")


@cache
def imports_of(path: Path) -> list[tuple[int, str]]:
    return [*imports(parse(path))]


@cache
def imported_by(path: Path) -> set[Path]:
    """The modules of ours that a module imports itself."""
    return {file for _, module in imports_of(path) if (file := file_of(module)) is not None} - {path}


def test_there_is_no_import_cycle() -> None:
    graph = {path: imported_by(path) for path in MODULES}
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError with the cycle


def questions_from_outside(path: Path) -> Iterator[str]:
    """Each `getattr` that asks an object of ours for an attribute which its class may lack."""
    for call in (node for node in nodes_of(parse(path)) if isinstance(node, ast.Call) and len(node.args) == 3):
        name = call.args[1]
        is_attribute = isinstance(name, ast.Constant) and not str(name.value).startswith("__")
        if ast.unparse(call.func) == "getattr" and is_attribute and ast.unparse(call.args[0]) != "self":
            yield f"{path.relative_to(PACKAGE)}, line {call.lineno}: {ast.unparse(call)}"


def test_base_classes_declare_what_components_are_asked() -> None:
    """The backend and the integrations ask objects of other libraries; elsewhere it becomes no more."""
    core = (path for path in MODULES if part_of(path) not in ("backend", "integrations"))
    found = [each for path in core for each in questions_from_outside(path)]
    assert len(found) <= 12, "\n".join(found)


def test_the_loop_is_read_on_a_page() -> None:
    assert len((PACKAGE / "training" / "loop.py").read_text().splitlines()) <= 220


def reachable(path: Path) -> set[Path]:
    """All modules that a module imports, directly or not."""
    seen: set[Path] = set()
    waiting = [path]
    while waiting:
        for imported in imported_by(waiting.pop()) - seen:
            seen.add(imported)
            waiting.append(imported)
    return seen


def test_the_walk_of_a_rollout_is_short_and_in_the_order_of_the_imports() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## The walk of a rollout")[2].partition("\n## ")[0]
    walk = [PACKAGE / name for name in re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.M)]
    assert 10 <= len(walk) <= 15
    assert len(set(walk)) == len(walk)
    assert all(path.is_file() and part_of(path) != "backend" for path in walk)
    for index, path in enumerate(walk):
        assert not reachable(path) & set(walk[index + 1 :]), f"{path.name} imports a later file of the walk"


def is_server_half(path: Path) -> bool:
    return any(path.is_relative_to(INTEGRATIONS / half) for half in SERVER_HALVES)


def imports_of_integrations(path: Path) -> Iterator[str]:
    """Those of another integration, and those of a server half that the backend may not have."""
    allowed = {path.relative_to(INTEGRATIONS).parts[0]} if path.is_relative_to(INTEGRATIONS) else set()
    for line, module in imports_of(path):
        parts = module.split(".")
        if parts[:2] == ["insitu", "integrations"]:
            if parts[2] not in allowed:
                yield f"line {line}: {module}"
        elif is_server_half(path) and parts[0] == "insitu" and len(parts) > 1 and not may_import("backend", parts[1]):
            yield f"line {line}: {module}"


def test_integrations_are_leaves() -> None:
    """Nothing imports one, except itself; a half that runs in the backend imports no more than the backend may.

    What they share imports none of them.
    """
    assert not found_by(imports_of_integrations)


def test_folders_are_at_most_two_deep() -> None:
    """Except for the protocols of the backend, a package each, and the server half of an integration."""
    deep = [name for name in NAMES if re.sub(r"^(backend/protocols|integrations)/", "", name).count("/") > 2]
    assert not deep


@pytest.mark.slow
def test_the_core_trains_without_the_integrations(tmp_path: Path) -> None:
    """A copy of the package without the folder trains the quickstart for one epoch."""
    shutil.copytree(PACKAGE, tmp_path / "insitu", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tmp_path / "insitu" / "integrations")
    shutil.copytree(ROOT / "examples/tic_tac_toe", tmp_path / "example")
    options = {"finetuning.num_epochs": 1, "finetuning.output_dir": tmp_path / "run", "finetuning.validation": "null"}
    rows = (tmp_path / "example/train.jsonl").read_text().splitlines(keepends=True)[:4]
    (tmp_path / "example/train.jsonl").write_text("".join(rows))
    code = (
        "import sys; [sys.modules.pop(name) for name in [*sys.modules] if name.partition('.')[0] == 'insitu']; "
        f"sys.path.insert(0, {str(tmp_path)!r}); import insitu.cli; "
        f"sys.argv[0], sys.executable = 'insitu', {str(tmp_path / 'python')!r}; "
        f"assert insitu.__file__.startswith({str(tmp_path)!r}); insitu.cli.main()"
    )
    (tmp_path / "code.py").write_text(code)
    # as `python -m insitu ...`, with the libraries imported already
    (tmp_path / "python").write_text(
        f'#!/bin/sh\nshift 2\nexec {forked_python()} -c "$(cat {tmp_path}/code.py)" "$@"\n'
    )
    (tmp_path / "python").chmod(0o755)

    def finetune(**more: Any) -> "subprocess.CompletedProcess[str]":
        settings = options | {key.replace("__", "."): value for key, value in more.items()}
        overrides = [word for key, value in settings.items() for word in ("-o", key, str(value))]
        return subprocess.run(
            [tmp_path / "python", "-m", "insitu", "finetune", "--config_file", "grpo.yml", *overrides],
            cwd=tmp_path / "example",
            capture_output=True,
            text=True,
        )

    done = finetune()
    assert done.returncode == 0, done.stdout + done.stderr
    (epoch,) = map(json.loads, (tmp_path / "run/training_metrics.jsonl").read_text().splitlines())
    assert epoch["policy_version"] == 1
    done = finetune(finetuning__report_to="tensorboard")
    assert done.returncode == 2
    assert done.stderr.startswith("error: finetuning.report_to: this installation of insitu cannot run trackers")
    done = finetune(trainer_adapters__backend__learner__processes=2, finetuning__output_dir=tmp_path / "other")
    assert done.returncode != 0
    assert "learner: this installation of insitu cannot run torchrun (" in done.stderr


def too_long(path: Path) -> Iterator[str]:
    if (lines := len(path.read_text().splitlines())) > 400:
        yield f"{lines} lines"
    for function in functions(parse(path)):
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > 60:
            yield f"{function.name}: {lines} lines"


def test_lengths() -> None:
    assert not found_by(too_long)


def odd_docstrings(path: Path) -> Iterator[str]:
    docstring = ast.get_docstring(parse(path)) or ""
    first = docstring.partition("\n\n")[0].partition("\n")[0]
    if not re.fullmatch(r"[A-Za-z`].*[.:]", first) or re.search(r"\w\. [A-Z]", first):
        yield repr(first)


def test_a_module_opens_with_one_sentence() -> None:
    assert not found_by(odd_docstrings)


def unlisted_modules(path: Path) -> Iterator[str]:
    """What a folder's docstring leaves out that lists the others, a line each."""
    listed = re.findall(r"^(\w+)/?  +\w.*$", docstring := ast.get_docstring(parse(path)) or "", re.MULTILINE)
    if path.name == "__init__.py" and listed:
        modules = {file.stem for file in path.parent.glob("*.py")} - {path.stem}
        yield from sorted(name for name in modules if not re.search(rf"\b{name}\b", docstring))
        yield from (f"{name} does not exist" for name in listed if not [*path.parent.glob(f"{name}*")])


def test_a_folder_that_lists_its_modules_lists_all() -> None:
    assert not found_by(unlisted_modules)


def test_a_script_says_where_things_are() -> None:
    said = subprocess.run([sys.executable, ROOT / "scripts/where.py", "control group"], capture_output=True, text=True)
    assert [line.split()[0] for line in said.stdout.splitlines()] == ["gateway/cgroups.py"]


def excepts_without_a_reason(path: Path) -> Iterator[str]:
    lines = path.read_text().splitlines()
    for node in nodes_of(parse(path)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        if node.type is None:
            yield f"line {node.lineno}: bare except"
            continue
        names = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
        reraises = isinstance(node.body[-1], ast.Raise)  # so nothing is swallowed
        explained = re.search(r"# (?!type:|noqa)\w", lines[node.lineno - 1])
        if names & {"Exception", "BaseException"} and not reraises and not explained:
            yield f"line {node.lineno}: no reason given"


def test_broad_excepts_say_why() -> None:
    assert not found_by(excepts_without_a_reason)


def prints(path: Path) -> Iterator[str]:
    if path.parent != PACKAGE / "cli":
        for node in nodes_of(parse(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                yield f"line {node.lineno}"


def test_only_the_command_line_prints() -> None:
    assert not found_by(prints)


def left_out_things(path: Path) -> Iterator[str]:
    """Configuration is pydantic, data inside is a dataclass or NamedTuple; no reminders, no banners."""
    found = re.finditer(r"TypedDict|\b(TODO|FIXME|XXX)\b|#\s*[-=#*]{4,}", path.read_text())
    return (match[0] for match in found)


def test_left_out_things_stay_out() -> None:
    assert not found_by(left_out_things)


def effects_of_import(path: Path) -> Iterator[str]:
    for statement in parse(path).body:
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            source = ast.unparse(statement)
            yield from (f"line {statement.lineno}: {what}" for what in ("os.environ", "basicConfig") if what in source)


def test_nothing_configures_logging_or_reads_the_environment_at_import() -> None:
    assert not found_by(effects_of_import)


def test_the_checks_find_what_they_must(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    body = "    pass\n" * 60
    file.write_text(
        f'"""Two. Sentences."""\nTABLE = os.environ\ntry:\n    pass\nexcept:\n    pass\n'
        f"try:\n    pass\nexcept Exception:\n    print()  # TODO\ndef f():\n{body}" + "\n" * 400
    )
    checks = [too_long, odd_docstrings, excepts_without_a_reason, prints, left_out_things, effects_of_import]
    assert [len([*check(file)]) for check in checks] == [2, 1, 2, 1, 1, 1]


def test_our_own_classes_are_not_mocked() -> None:
    word = "Magic" + "Mock|Async" + r"Mock|mock\.patch"
    found = {p.name for p in (ROOT / "tests").rglob("*.py") if re.search(word, p.read_text())}
    assert found <= {"test_nat_paths.py", "test_doc_plugin.py"}, "these do what plugins' own tests do"


def defined_names(tree: ast.AST) -> Iterator[str]:
    """The names of functions and classes, and of the variables and attributes that are assigned."""
    for node in nodes_of(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


def test_tests_wait_for_conditions_and_use_the_public_surface() -> None:
    """Sleeps, private names of ours, and patches of our modules become no more; `tests/support/waiting.py` waits."""
    private = {name for path in MODULES for name in defined_names(parse(path)) if re.match(r"_[a-z]", name)}
    sleeps, reads, patches = [], [], []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text()
        sleeps += [line for line in text.splitlines() if "sleep" + "(" in line]
        nodes, ours = [*ast.walk(ast.parse(text))], {"insitu", "nat"}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("insitu", "nat"):
                ours |= {alias.asname or alias.name for alias in node.names}
                reads += [f"{path.name}: {alias.name}" for alias in node.names if alias.name in private]
        for node in nodes:
            if isinstance(node, ast.Attribute) and node.attr in private:
                if ast.unparse(node.value) not in ("self", "cls", "super()"):
                    reads.append(f"{path.name}: {ast.unparse(node)}")
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "setattr":
                what = ast.unparse(node.args[0]).strip("'")
                patches += [f"{path.name}: {what}"] if what.partition(".")[0] in ours else []
    assert len(sleeps) <= 51, "\n".join(sleeps)
    assert len(reads) <= 20, "\n".join(reads)
    assert len(patches) <= 8, "\n".join(patches)

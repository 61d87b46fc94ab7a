"""Changes the sources in small ways and asks which changes the tests notice.

python scripts/mutants.py [AREA ...] [--count 20] [--seed 0] [--results build/mutants.jsonl]

Each mutant is tried in a copy of the tree, by the test files of its area, the cheapest first. Results are appended as
they come and not computed again, so an interrupted run continues. Prints the survivors of each area.
"""

import argparse
import ast
import contextlib
import copy
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "src/insitu"


class Area(NamedTuple):
    sources: tuple[str, ...]
    """Files of the package."""
    tests: tuple[str, ...]
    """Names of test files, wherever they are under tests/."""


AREAS = {
    "loop": Area(
        ("training/loop.py", "training/schedule.py", "collect/collector.py"),
        (
            *("batches", "curriculum", "api", "staleness", "finetune", "staleness_runs", "validation_beside"),
            *("rollout_budget", "stored_episodes", "resume_plugins", "report", "runs", "distillation"),
            *("resume", "chaos"),
        ),
    ),
    "estimator": Area(
        ("advantages/estimator.py",),
        (
            *("rows", "groups", "advantages", "credit", "histories", "attribution", "token_bridge", "forced_calls"),
            *("text_completions", "plugin_builders", "distillation", "finetune", "credit_runs"),
        ),
    ),
    "resume": Area(
        ("runs/resume.py",),
        ("resume_checks", "batches", "executors", "resume_plugins", "staleness", "resume", "snapshots"),
    ),
    "jobs": Area(
        ("training/jobs.py",),
        ("followed_jobs", "open_jobs", "watchdog", "insitu_adapter", "jobs", "resume_plugins", "finetune", "resume"),
    ),
    "store": Area(
        ("runs/store.py",),
        (
            "store",
            "run_files",
            "stored_episodes",
            "index",
            "inspection",
            "runs",
            "finetune",
            "resume_plugins",
            "resume",
        ),
    ),
    "losses": Area(
        ("backend/learner/losses.py",),
        ("losses", "kl_rows", "objectives", "learner", "prefix_tree", "training_reference", "art_rows", "distillation"),
    ),
}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
BUILTINS = {"max": "min", "min": "max", "any": "all", "all": "any"}
MEMORY = 12 * 2**30
"""Bytes of data that a process of a mutant may have: one that never stops growing ends by itself."""


class Mutant(NamedTuple):
    file: str
    line: int
    before: str
    after: str
    source: str


Change = Callable[[ast.AST], ast.AST]
Place = tuple[ast.AST, str, int | None]
"""Of a node: its parent, the parent's field, and the index if that is a list."""


def changes(node: ast.AST) -> Iterator[Change]:
    """What can be done to a copy of this node."""
    match node:
        case ast.Compare(ops=[comparison]) if type(comparison) in COMPARISONS:
            yield lambda new: _with(new, ops=[COMPARISONS[type(comparison)]()])
        case ast.BoolOp(op=op):
            yield lambda new: _with(new, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in OPERATORS:
            yield lambda new: _with(new, op=OPERATORS[type(op)]())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield lambda new: operand
        case ast.Constant(value=bool(value)):
            yield lambda new: _with(new, value=not value)
        case ast.Constant(value=int(value)) | ast.Constant(value=float(value)):
            yield lambda new: _with(new, value=value + 1)
        case ast.If(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.Compare | ast.UnaryOp | ast.BoolOp):
            yield lambda new: _with(new, test=ast.UnaryOp(ast.Not(), test))
        case ast.comprehension(ifs=[_, *_]):
            yield lambda new: _with(new, ifs=[])
        case ast.Expr(value=ast.Call()) | ast.Expr(value=ast.Await()) | ast.Break() | ast.Continue():
            yield lambda new: ast.Pass()
        case ast.Name(id=name) if name in BUILTINS:
            yield lambda new: _with(new, id=BUILTINS[name])


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    for name, value in fields.items():
        setattr(node, name, value)
    return node


def inside_functions(tree: ast.AST) -> Iterator[Place]:
    """Every node that runs: not annotations, messages of errors, and logging."""

    def below(node: ast.AST, runs: bool) -> Iterator[Place]:
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "format_spec"):
                continue
            inner = runs or (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and field == "body")
            for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if not isinstance(child, ast.AST) or isinstance(child, ast.Raise) or _logs(child):
                    continue
                if inner:
                    yield node, field, index
                yield from below(child, inner)

    return below(tree, False)


def _logs(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith("logger.")


def possible(file: str) -> list[Callable[[], Mutant]]:
    """Makes each mutant of a file."""
    tree = ast.parse((ROOT / PACKAGE / file).read_text())
    made: list[Callable[[], Mutant]] = []
    for parent, field, index in [*inside_functions(tree)]:
        node = getattr(parent, field) if index is None else getattr(parent, field)[index]
        line = getattr(node, "lineno", getattr(parent, "lineno", 0))
        made += [partial(_mutant, file, tree, (parent, field, index), line, change) for change in changes(node)]
    return made


def _mutant(file: str, tree: ast.AST, place: Place, line: int, change: Change) -> Mutant:
    parent, field, index = place
    node = getattr(parent, field) if index is None else getattr(parent, field)[index]
    changed = ast.fix_missing_locations(ast.copy_location(change(copy.deepcopy(node)), node))
    _put(place, changed)
    source = ast.unparse(tree)
    _put(place, node)
    before, after = (ast.unparse(each).splitlines()[0] for each in (node, changed))
    return Mutant(file, line, before, after, source)


def _put(place: Place, node: ast.AST) -> None:
    parent, field, index = place
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def chosen(area: str, count: int, seed: int) -> list[Mutant]:
    every = [make for file in AREAS[area].sources for make in possible(file)]
    return [make() for make in random.Random(f"{seed} {area}").sample(every, min(count, len(every)))]


class Tree:
    """A copy of the tree, in which the tests of an area run."""

    def __init__(self, folder: Path) -> None:
        self.root, self.log = folder / "tree", folder / "pytest.log"
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        for name in filter(None, names):
            if (ROOT / name).exists():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        (self.root / ".venv").symlink_to(ROOT / ".venv")

    def failing(self, tests: tuple[str, ...], limit: float | None = None) -> str | None:
        """The first of the test files that fails, or that takes longer than `limit` seconds."""
        for name in tests:
            (file,) = (self.root / "tests").rglob(f"test_{name}.py")
            if not self._passes(file, limit):
                return name
        return None

    def _passes(self, file: Path, limit: float | None) -> bool:
        variables = os.environ | {"PYTHONPATH": str(self.root / "src")}
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow and not check"]
        with self.log.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, file],
                cwd=self.root,
                env=variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY)),
            )
        try:
            return process.wait(limit) in (0, 5)  # 5: all of its tests are slow
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def try_mutants(area: str, mutants: list[Mutant], results: Path, done: dict[str, Any], tree: Tree) -> None:
    started = time.monotonic()
    tests = AREAS[area].tests
    failing = tree.failing(tests)
    if failing is not None:
        raise SystemExit(f"{tree.log.read_text()[-3000:]}\n{area}: test_{failing}.py fails without a mutant")
    limit = 3 * (time.monotonic() - started) + 60
    for mutant in mutants:
        if identity(mutant) in done:
            continue
        path = tree.root / PACKAGE / mutant.file
        original = path.read_text()
        path.write_text(mutant.source)
        caught = tree.failing(tests, limit)
        path.write_text(original)
        result = {"area": area, **mutant._asdict(), "caught": caught}
        del result["source"]
        done[identity(mutant)] = result
        with results.open("a") as file:
            file.write(json.dumps({"id": identity(mutant), **result}) + "\n")
        print(f"{area} {described(mutant)}: {f'caught by {caught}' if caught else 'SURVIVES'}", flush=True)


def identity(mutant: Mutant) -> str:
    return hashlib.sha256(f"{mutant.file}\n{mutant.source}".encode()).hexdigest()[:16]


def described(mutant: Mutant) -> str:
    return f"{mutant.file}:{mutant.line} `{mutant.before}` -> `{mutant.after}`"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("areas", nargs="*", metavar="AREA", help=", ".join(AREAS))
    parser.add_argument("--count", type=int, default=20, help="mutants of each area")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=ROOT / "build/mutants.jsonl")
    options = parser.parse_args()
    if unknown := set(options.areas) - AREAS.keys():
        parser.error(f"{', '.join(unknown)}: the areas are {', '.join(AREAS)}")
    options.results.parent.mkdir(parents=True, exist_ok=True)
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    done = {line["id"]: line for line in map(json.loads, lines)}
    total = survived = 0
    for area in options.areas or AREAS:
        mutants = chosen(area, options.count, options.seed)
        if any(identity(mutant) not in done for mutant in mutants):
            with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
                try_mutants(area, mutants, options.results, done, Tree(Path(folder)))
        survivors = [mutant for mutant in mutants if not done[identity(mutant)]["caught"]]
        print(f"{area}: {len(mutants) - len(survivors)} of {len(mutants)} caught", flush=True)
        for mutant in survivors:
            print(f"  survives: {described(mutant)}")
        total, survived = total + len(mutants), survived + len(survivors)
    print(f"{total - survived} of {total} caught")


if __name__ == "__main__":
    main()

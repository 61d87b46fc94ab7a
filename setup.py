"""Writes the type stubs of the `nat` aliases, from the table in src/nat, whenever the package is built or installed."""

import ast
import shutil
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
SOURCES = ROOT / "src"
PLUGIN_API = "nat.plugin_api"


def aliases() -> dict[str, str]:
    """Documented path -> module with its names."""
    for statement in ast.parse((SOURCES / "nat/__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "PATHS":
            return dict(ast.literal_eval(statement.value))
    raise SystemExit("src/nat/__init__.py has no table PATHS")


def plugin_names() -> str:
    """Imports of the names that `nat.plugin_api` loads when they are asked for: entry points of a group."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = project["entry-points"]["insitu.plugin_api"].items()
    pairs = [(name, *target.split(":")) for name, target in named]
    return "".join(f"from {module} import {attribute} as {name}\n" for name, module, attribute in pairs)


def stubs(paths: dict[str, str]) -> dict[Path, str]:
    """Path in the stub package -> content."""
    parents = {path.rsplit(".", n)[0] for path in paths for n in range(1, path.count("."))}
    files = {Path("py.typed"): "partial\n", Path("__init__.pyi"): ""}  # partial: not all of `nat`
    for path in parents | paths.keys():
        location = Path(*path.split(".")[1:])
        file = location / "__init__.pyi" if path in parents else location.with_suffix(".pyi")
        files[file] = f"from {paths[path]} import *\n" if path in paths else ""
        files[file] += f"from insitu.config import Config as Config\n{plugin_names()}" if path == PLUGIN_API else ""
    return files


def write(folder: Path, files: dict[Path, str]) -> None:
    """Leaves a folder with these files as it is: several environments may be installed at once."""
    existing = {path.relative_to(folder): path.read_text() for path in folder.rglob("*") if path.is_file()}
    if existing == files:
        return
    shutil.rmtree(folder, ignore_errors=True)
    for file, text in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)


write(SOURCES / "nat-stubs", stubs(aliases()))
setup()

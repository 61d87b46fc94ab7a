"""What confined programs see of this machine besides the system's folders: what they run with, and what is named."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix/store", "/gnu", "/sys")
"""What every confined program sees of the machine's files."""
_PROGRAMS = ("bin", "sbin", "shims")
"""Names of folders of programs, which belong to the folder around them."""
_REPOSITORIES = (".git", ".hg", ".svn", ".jj", ".dvc")


def has_any(folder: Path, paths: Iterable[Path]) -> bool:
    return any(path.is_relative_to(folder) for path in paths)


def is_in(path: Path, folders: Iterable[str | Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def own_python(apart: Sequence[Path]) -> Iterator[Path]:
    """The Python environment of this process, and where else it imports from, but for folders with those `apart`."""
    yield from (Path(sys.prefix), Path(sys.base_prefix))
    yield from (path for path in map(Path, sys.path) if path.is_absolute() and not has_any(path, apart))


def searched(variables: Mapping[str, str], apart: Sequence[Path]) -> Iterator[Path]:
    """Where programs with these environment variables look for programs, modules and libraries.

    Folders of programs come with the installation that they belong to, but never with one of the folders `apart`.
    """
    for path in _folders(variables, "PATH"):
        if not has_any(path, apart):
            yield from _installation(path, apart)
    yield from (*_folders(variables, "PYTHONPATH"), *_folders(variables, "LD_LIBRARY_PATH"))


def _folders(variables: Mapping[str, str], name: str) -> Iterator[Path]:
    yield from filter(Path.is_absolute, map(Path, variables.get(name, "").split(os.pathsep)))


def named(command: Sequence[str], folder: Path, apart: Sequence[Path]) -> Iterator[Path]:
    """The program of a command, if it is a path (a relative one starts at `folder`), with its installation.

    Also files that its arguments name by absolute paths.
    """
    program = folder / command[0]
    if os.sep in command[0]:
        yield from [program, *(_installation(program.parent, apart) if program.parent.name in _PROGRAMS else ())]
    yield from (path for path in map(Path, command[1:]) if path.is_absolute() and path.is_file())


def _installation(programs: Path, apart: Sequence[Path]) -> Iterator[Path]:
    around = programs.parent
    yield programs if programs.name not in _PROGRAMS or has_any(around, apart) else around
    python = (programs / "python").resolve()
    if (around / "pyvenv.cfg").is_file() and python.parent != programs:
        yield from _installation(python.parent, apart)


def with_targets(paths: Iterable[Path]) -> set[Path]:
    """Those that exist, without `..`, and where the links among them lead."""
    return {each for path in paths if path.exists() for each in (Path(os.path.abspath(path)), path.resolve())}


def repositories(folder: Path) -> Iterator[Path]:
    """Where the repositories that a folder is in have their history, and with it all files that were in it."""
    return (place / name for place in (folder, *folder.parents) for name in _REPOSITORIES)

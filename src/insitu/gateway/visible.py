"""What confined programs see of this machine besides the system's folders: what they run with, and what is named."""

import os
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix/store", "/gnu", "/sys")
"""What every confined program sees of the machine's files."""
PRIVATE = ("/tmp", "/run", "/dev", "/proc")
"""Folders that are other ones for confined programs."""
_SEES = "it sees only files that it runs with{}, and those that workspace.readable names"
HINT, VERIFIER_HINT = _SEES.format(""), _SEES.format(", verify_files")
_MISSING = ("No such file or directory", "No module named", "Cannot find module", "not found")
"""What programs say if they do not find a file."""
_PROGRAMS = ("bin", "sbin", "shims", ".bin", "condabin")
"""Names of folders of programs, which belong to the installation around them."""
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")
"""Variables that inherited_environment passes on; clients fail if they do not find these files."""
REPOSITORIES = (".git", ".hg", ".svn", ".jj", ".dvc")


def misses_file(said: str) -> bool:
    return any(text in said for text in _MISSING)


def missing_note(said: str, folder: Path) -> str:
    """The hint for a confined program that reports a missing file; `folder` is that of the YAML file."""
    words = {word for line in said.splitlines() if misses_file(line) for word in re.findall(r"[\w./-]+", line)}
    names = {name for word in words for name in (os.path.basename(word), f"{word.split('.')[0]}.py")}
    beside = sorted(name for name in names if name.strip(".") and (folder / name).is_file())
    if not beside:
        return HINT
    shown = f"or let workspace.readable: [{', '.join(beside)}] show it there"
    return f"{HINT}; {beside[0]} is in {folder}, not in the workspace: give the command its whole path, {shown}"


def has_any(folder: Path, paths: Iterable[str | Path]) -> bool:
    return any(Path(path).is_relative_to(folder) for path in paths)


def is_in(path: Path, folders: Iterable[str | Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def own_python(apart: Collection[Path]) -> Iterator[Path]:
    """The Python environment of this process, and where else it imports from, but for folders with those `apart`."""
    yield from (Path(sys.prefix), Path(sys.base_prefix), *_installed([Path(sys.executable)], apart))
    yield from (path for path in map(Path, sys.path) if path.is_absolute() and not has_any(path, apart))


def searched(variables: Mapping[str, str], apart: Collection[Path]) -> Iterator[Path]:
    """Where programs with these environment variables look for programs, modules, libraries and certificates.

    Folders of programs come with their installations, but none of these with one of the folders `apart`.
    """
    for folder in _folders(variables, "PATH"):
        if not has_any(folder, apart):
            yield _installation(folder, apart) or folder
            if os.path.isfile(folder.parent / "pyvenv.cfg"):  # its Python is elsewhere
                yield from _installed([folder / "python"], apart)
    for name in ("PYTHONPATH", "LD_LIBRARY_PATH", *_CERTIFICATES):
        yield from _folders(variables, name)


def _folders(variables: Mapping[str, str], name: str) -> Iterator[Path]:
    for path in variables.get(name, "").split(os.pathsep):
        if os.path.isabs(path):
            yield Path(os.path.abspath(path))


def named(command: Sequence[str], folder: Path, search: str | None, apart: Collection[Path]) -> set[Path]:
    """The program of a command and what belongs to it, and files that its arguments name by absolute paths.

    A path of the program starts at `folder`, and a name is looked for in the folders `search`.
    """
    program = str(folder / command[0]) if os.sep in command[0] else shutil.which(command[0], path=search)
    files = {Path(part) for part in command[1:] if os.path.isabs(part) and os.path.isfile(part)}
    return files.union(_installed([Path(program)] if program else [], apart))


def _installed(programs: Iterable[Path], apart: Collection[Path]) -> set[Path]:
    """Programs, where their links lead step by step, their interpreters, and the installations of all of these."""
    found, left = set[Path](), [*programs]
    while left:
        path = Path(os.path.abspath(left.pop()))
        if path in found or not os.path.isfile(path):
            continue
        found.update(filter(None, (path, _installation(path.parent, apart))))
        left += [path.parent / os.readlink(path)] if os.path.islink(path) else _interpreter(path)
    return found


def _installation(programs: Path, apart: Collection[Path]) -> Path | None:
    """The folder that a folder of programs belongs to; none, if that has one of those `apart`."""
    around = programs.parent
    places = (around, Path(os.path.realpath(around)))
    return None if programs.name not in _PROGRAMS or any(has_any(place, apart) for place in places) else around


def _interpreter(program: Path) -> list[Path]:
    with suppress(OSError), program.open("rb") as file:
        if file.read(2) == b"#!":
            return [Path(os.fsdecode(word)) for word in file.readline(256).split()[:1]]
    return []


def with_targets(paths: Iterable[Path]) -> set[Path]:
    """The absolute forms of the paths that exist, and the targets of links; none that contains a private folder."""
    forms = os.path.abspath, os.path.realpath
    places = {Path(form(path)) for path in paths if os.path.exists(path) for form in forms}
    return {place for place in places if not has_any(place, PRIVATE)}


def repositories(folder: Path) -> Iterator[Path]:
    """Where the repositories that a folder is in have their history, and with it all files that were in it."""
    return (place / name for place in (folder, *folder.parents) for name in REPOSITORIES)

"""Where answers may be that agents must not see: histories of repositories, results, and further mounts of these."""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from insitu.runs.files import BACKEND_FOLDER, FILES, RUN, TRACKERS
from insitu.schemas.evaluation import WORKFLOW_OUTPUT

KEPT = "workspaces"
"""The folder of a run with the workspaces that are kept."""
_LEVELS = 4
"""How far below a folder results are looked for."""
_MOST_FOLDERS = 2000
"""How many folders are looked into, the nearest first."""
_DEFAULT = ".tmp"
"""The folder of results by default, the only hidden one that is looked into."""
_WITHOUT_RESULTS = {"__pycache__", "node_modules", "site-packages"}


def has_any(folder: Path, paths: Iterable[str | Path]) -> bool:
    return any(Path(path).is_relative_to(folder) for path in paths)


def repositories(folder: Path) -> Iterator[Path]:
    """The folders of the repositories that a folder is in: with its history, they have all files that were in it."""
    for place in (folder, *folder.parents):
        yield from (each for name in (".svn", ".hg", ".jj", ".dvc") if (each := place / name).is_dir())
        git = place / ".git"
        if git.is_file():  # a further work tree, or a submodule
            git = place / (" ".join(_lines(git)).removeprefix("gitdir:").strip() or ".git")
        elif (place / "HEAD").is_file() and (place / "objects").is_dir():
            git = place
        if git.is_dir():
            found = [git.resolve(), (git / "".join(_lines(git / "commondir")[:1])).resolve()]
            for each in dict.fromkeys(found):
                parts = ("objects", "lfs", "modules")  # of a bare repository with work trees in it
                yield from [each / name for name in parts] if each in folder.parents else [each]
            yield from _borrowed(found[-1] / "objects")
            return


def _borrowed(objects: Path) -> Iterator[Path]:
    """The objects of other repositories that one uses (`git clone --shared`)."""
    found = [objects.resolve()]
    for each in found:  # which grows
        lines = _lines(each / "info/alternates")
        found += {(each / line.strip('"')).resolve() for line in lines if line}.difference(found)
    yield from found[1:]


def _lines(path: Path) -> list[str]:
    """The lines of a file; none if there is none, or it cannot be read."""
    try:
        return path.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []


def results(places: Iterable[Path], shown: Collection[str]) -> Iterator[Path]:
    """The folders with results in and below these folders; of those that have something `shown` in them, the files."""
    level, seen = [*dict.fromkeys(places)], set[Path]()
    for _ in range(_LEVELS + 1):
        below = list[Path]()
        for folder in level[: _MOST_FOLDERS - len(seen)]:
            seen.add(folder)
            try:
                entries = {entry.name: entry for entry in os.scandir(folder)}
            except OSError:
                continue
            found = [*_files(folder, entries)]
            if found and not has_any(folder, shown):
                yield folder
                continue
            yield from found
            below += [
                Path(os.path.realpath(entry.path)) if entry.is_symlink() else folder / name
                for name, entry in entries.items()
                if (name[0] != "." or name == _DEFAULT) and name not in _WITHOUT_RESULTS and _is_folder(entry)
            ]
        level = [folder for folder in dict.fromkeys(below) if folder not in seen]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def _files(folder: Path, names: Collection[str]) -> Iterator[Path]:
    """The result files of an evaluation and of a run in a folder."""
    if WORKFLOW_OUTPUT in names:
        yield from (folder / name for name in names if name.endswith("_output.json"))
    with suppress(OSError):
        if RUN in names and b'"run_id"' in (folder / RUN).read_bytes():
            yield from (folder / name for name in (*FILES, BACKEND_FOLDER, TRACKERS, KEPT))


def further_places(paths: Collection[Path]) -> Iterator[Path]:
    """Where other mounts of the same file system show these files and folders, or a folder of theirs."""
    entries = (line.split()[2:5] for line in _lines(Path("/proc/self/mountinfo")))
    mounts = [(device, Path(_unescaped(root)), Path(_unescaped(point))) for device, root, point in entries]
    mounted = Counter(device for device, _, _ in mounts)
    innermost = sorted(mounts, key=lambda mount: len(mount[2].parts))[::-1]  # of equal ones the last, which covers them
    for path in paths:
        device, root, point = next((each for each in innermost if path.is_relative_to(each[2])), ("", path, path))
        inside = root / path.relative_to(point)
        for other in mounts if mounted[device] > 1 else ():
            if other[0] != device:
                continue
            if inside.is_relative_to(other[1]):
                place, original = other[2] / inside.relative_to(other[1]), path
            elif other[1].is_relative_to(inside):
                place, original = other[2], path / other[1].relative_to(inside)
            else:
                continue
            with suppress(OSError):
                if place != original and os.path.samefile(place, original):
                    yield place


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)

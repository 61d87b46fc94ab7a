"""Writes src/nat-stubs, the type stubs of the `nat` aliases, from the table in src/nat.

python scripts/write_stubs.py            write the files
python scripts/write_stubs.py --check    exit with 1 if they are out of date
"""

import argparse
import shutil
import sys
from pathlib import Path

import nat

STUBS = Path(__file__).parent.parent / "src" / "nat-stubs"


def stubs() -> dict[Path, str]:
    """Path in the stub package -> content."""
    files = {Path("py.typed"): "partial\n", Path("__init__.pyi"): ""}  # partial: not all of `nat`
    for path in nat.PARENTS | nat.PATHS.keys():
        location = Path(*path.split(".")[1:])
        file = location / "__init__.pyi" if path in nat.PARENTS else location.with_suffix(".pyi")
        files[file] = f"from {nat.PATHS[path]} import *\n" if path in nat.PATHS else ""
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    if parser.parse_args().check:
        existing = {file.relative_to(STUBS): file.read_text() for file in STUBS.rglob("*") if file.is_file()}
        return 0 if existing == stubs() else 1
    shutil.rmtree(STUBS, ignore_errors=True)
    for file, text in stubs().items():
        (STUBS / file).parent.mkdir(parents=True, exist_ok=True)
        (STUBS / file).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Prints each module of insitu with the sentence that it opens with: where is what?

python scripts/where.py           all of them
python scripts/where.py TEXT      those whose line has this text
"""

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src/insitu"


def main(text: str = "") -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        opening = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
        line = f"{path.relative_to(PACKAGE)!s:<52} {opening}"
        if text.lower() in line.lower():
            print(line)


if __name__ == "__main__":
    main(*sys.argv[1:])

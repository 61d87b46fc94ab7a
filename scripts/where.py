"""Prints each module of insitu with the sentence that it opens with: where is what?

python scripts/where.py           all of them
python scripts/where.py TEXT      those whose path or docstring has this text
"""

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "src/insitu"


def main(text: str = "") -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        place = f"{path.relative_to(PACKAGE)!s:<52} "
        if text.lower() in (place + " ".join(docstring.split())).lower():
            print(place + docstring.partition("\n")[0])


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Counts lines of code: without blank lines, comments and docstrings, and without the starter project.

python scripts/count_lines.py              the tree as it is, by package
python scripts/count_lines.py COMMIT       the tree of a commit, and the difference
"""

import argparse
import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "src/insitu"
STARTER = f"{PACKAGE}/starter/"
NO_CODE = {*(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE), *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)}


def lines_of_code(source: str) -> int:
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documented.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - documented)


def part_of(name: str) -> str:
    return name.removeprefix(f"{PACKAGE}/").partition("/")[0].removesuffix(".py")


def of_tree() -> Counter[str]:
    """Lines of code by package."""
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    names = {str(file.relative_to(ROOT)): file for file in files}
    return _counted({name: file.read_text(encoding="utf-8") for name, file in names.items()})


def of_commit(commit: str) -> Counter[str]:
    listed = _git("ls-tree", "-r", "--name-only", commit, PACKAGE).split()
    return _counted({name: _git("show", f"{commit}:{name}") for name in listed if name.endswith(".py")})


def _counted(sources: dict[str, str]) -> Counter[str]:
    lines = Counter[str]()
    for name, source in sources.items():
        if not name.startswith(STARTER):
            lines[part_of(name)] += lines_of_code(source)
    return lines


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def totals(lines: Counter[str]) -> tuple[int, int]:
    """All lines, and those outside `integrations`."""
    return lines.total(), lines.total() - lines["integrations"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", help="what to compare the tree with")
    commit = parser.parse_args().commit
    now = of_tree()
    if commit is None:
        for part, count in now.most_common():
            print(f"{count:7,}  {part}")
    else:
        try:
            before = of_commit(commit)
        except subprocess.CalledProcessError as error:
            sys.exit(error.stderr.strip())
        for part in sorted(now.keys() | before.keys(), key=lambda name: now[name] - before[name]):
            if now[part] != before[part]:
                print(f"{now[part] - before[part]:+7,}  {part}")
        print("before: {:,}, without integrations {:,}".format(*totals(before)))
    print("now:    {:,}, without integrations {:,}".format(*totals(now)))


if __name__ == "__main__":
    main()

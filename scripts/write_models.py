"""Writes the tables of docs/reference/models.md from tests/support/model_families.py, whose claims are tested.

python scripts/write_models.py            write the page
python scripts/write_models.py --check    exit with 1 if it is out of date
"""

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "models.md"
sys.path.insert(0, str(ROOT / "tests" / "support"))

from model_families import REFUSED, SERVED, Family  # noqa: E402

SERVED_HEAD = """| family | `model_type` | has | LoRA: `all-linear` | rows |
|---|---|---|---|---|
"""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SHORT = {ATTENTION: "attention", (*ATTENTION, "gate_proj", "up_proj", "down_proj"): "usual"}
"""Sets of modules that many families have, as the page calls them."""
REFUSED_HEAD = """| family | `model_type` | reason |
|---|---|---|
"""


def page() -> str:
    """The page with both tables replaced."""
    served = SERVED_HEAD + "".join(map(_served, SERVED))
    refused = REFUSED_HEAD + "".join(
        f"| {family.name} | `{family.model_type}` | {family.refused} |\n" for family in REFUSED
    )
    text = PAGE.read_text()
    for head, table in ((SERVED_HEAD, served), (REFUSED_HEAD, refused)):
        text = re.sub(rf"{re.escape(head)}(\|.*\n)*", lambda _, table=table: table, text)  # type: ignore[misc]
    return text


def _served(family: Family) -> str:
    modules = SHORT.get(tuple(family.lora)) or ", ".join(f"`{name}`" for name in family.lora)
    cells: list[Any] = [family.name, f"`{family.model_type}`", family.has, modules]
    return "".join(f"| {cell} " for cell in (*cells, "packed" if family.packed else "padded")) + "|\n"


def main() -> None:
    if "--check" in sys.argv:
        sys.exit(PAGE.read_text() != page())
    PAGE.write_text(page())


if __name__ == "__main__":
    main()

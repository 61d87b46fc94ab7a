"""The consoles of the commands; everything that a command prints with rich goes through one of them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing rich would slow `--help` down
    from rich.console import Console


def results() -> "Console":
    """Standard output: progress and tables."""
    from rich.console import Console

    return Console(highlight=False)


def notes() -> "Console":
    """Standard error, for commands whose standard output is their answer."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)

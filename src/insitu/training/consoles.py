"""The consoles of the commands; everything that a command prints with rich goes through one of them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # importing rich would slow `--help` down
    from rich.console import Console
    from rich.text import Text


def results() -> "Console":
    """Standard output: progress and tables."""
    return _console(stderr=False)


def notes() -> "Console":
    """Standard error, for commands whose standard output is their answer."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> "Console":
    from rich.console import Console

    from insitu.wire.redaction import redact

    class RedactedConsole(Console):
        """Removes secrets before lines are wrapped, as a secret of two lines is not recognised."""

        def render_str(self, text: str, **options: Any) -> "Text":
            return super().render_str(redact(text), **options)

    return RedactedConsole(stderr=stderr, highlight=False)

"""Log lines with timestamps on standard error, as text or JSON, for log collectors."""

import atexit
import io
import json
import logging
from datetime import UTC, datetime
from typing import TextIO

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_progress = logging.getLogger("insitu.run")


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


_formatter: logging.Formatter | None = None
"""Set by --log_format."""


def configure_logging(level: int, log_format: str | None) -> None:
    global _formatter
    handler, formatter = logging.StreamHandler(), _JsonFormatter() if log_format == "json" else logging.Formatter(_TEXT)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level, handlers=[handler])
    if log_format is not None:
        _formatter = formatter
        logging.captureWarnings(True)
        hub = logging.getLogger("huggingface_hub")  # which would also write its records itself
        hub.addHandler = lambda hdlr: None  # type: ignore[method-assign]
        _progress.setLevel(min(level, logging.INFO))


def log_line(text: str, level: int = logging.ERROR) -> str:
    """A text as a log line, if --log_format is given."""
    record = logging.LogRecord("insitu", level, "", 0, text, None, None)
    return text if _formatter is None else _formatter.format(record)


def write_json_lines(stream: TextIO) -> None:
    """From now on, lines written to a stream become log lines in JSON, unless they are; blank ones are left out."""
    global _formatter
    _formatter, write, rest = _JsonFormatter(), stream.write, ""

    def write_lines(text: str) -> int:
        nonlocal rest
        is_log_line = text.startswith('{"time": "')
        *lines, rest = (rest + ("\n" if is_log_line else text)).split("\n")
        for line in filter(str.strip, lines):
            write(log_line(line, logging.INFO) + "\n")
        if is_log_line:
            write(text.rstrip("\n") + "\n")
        return len(text)

    stream.write = write_lines  # type: ignore[method-assign]
    atexit.register(write_lines, "\n")  # the last line may have no end


class ProgressLog(io.StringIO):
    """A stream whose lines are log records, for the console of a run."""

    def write(self, text: str) -> int:
        for line in filter(str.strip, text.splitlines()):
            _progress.info("%s", line.rstrip())
        return len(text)

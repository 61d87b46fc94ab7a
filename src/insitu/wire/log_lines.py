"""Log lines with timestamps on standard error, as text or JSON, for log collectors."""

import io
import json
import logging
from datetime import UTC, datetime

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_progress = logging.getLogger("insitu.run")


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging(level: int, log_format: str | None) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if log_format == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level, handlers=[handler])
    if log_format is not None:
        logging.captureWarnings(True)
        _progress.setLevel(min(level, logging.INFO))


class ProgressLog(io.StringIO):
    """A stream whose lines are log records, for the console of a run."""

    def write(self, text: str) -> int:
        for line in filter(str.strip, text.splitlines()):
            _progress.info("%s", line.rstrip())
        return len(text)

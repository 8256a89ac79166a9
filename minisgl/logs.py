"""The log of all processes: lines for people, or one JSON object a line for programs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

FIELDS = "fields"  # attribute of a log record: a mapping of values beside its message


def configure_logs(process: str, style: str) -> None:
    """Let all loggers write to stderr, with the name of the process in every line; ``style`` is "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if style == "json" else TextFormatter(process))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def log_request(logger: logging.Logger, event: str, request_id: str, **values: object) -> None:
    """Log what has happened to a client's request, by the id that the client is told; without an id, nothing."""
    if request_id:
        logger.info(event, extra={FIELDS: {"request_id": request_id, **values}})


class JsonFormatter(logging.Formatter):
    """Writes one JSON object a line, with the name of the process."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class TextFormatter(logging.Formatter):
    """Writes time, level, process, message, and other values as ``name=value``."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process} %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        values = getattr(record, FIELDS, {}).items()
        return " ".join([super().formatMessage(record), *(f"{name}={json.dumps(value)}" for name, value in values)])

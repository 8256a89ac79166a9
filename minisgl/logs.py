"""The log of all processes: lines for people, or one JSON object a line for programs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

FIELDS = "fields"
"""Attribute of a log record that holds a mapping of what it tells beside its message."""


def configure_logs(process: str, style: str) -> None:
    """Let all loggers of the process write to stderr.

    Args:
        process: its name, found in every line.
        style: ``"text"`` or ``"json"``.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if style == "json" else TextFormatter(process))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


class JsonFormatter(logging.Formatter):
    """One JSON object a line, with the name of the process."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
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
    """Time, level, process, message, and whatever else is known as ``name=value``."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process} %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The first line of a record."""
        values = getattr(record, FIELDS, {}).items()
        return " ".join([super().formatMessage(record), *(f"{name}={json.dumps(value)}" for name, value in values)])

"""Log lines, for people or as JSON. They hold request ids, times and counts; no prompt, image or key."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar

REQUEST_ID: ContextVar[str] = ContextVar("featcache_request_id", default="")

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class JsonLines(logging.Formatter):
    """One JSON object a line; what was given as `extra` becomes its fields."""

    def format(self, record: logging.LogRecord) -> str:
        doc: dict[str, object] = {
            "time": _utc(record),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        doc |= {"message": record.getMessage(), **_fields(record)}
        if record.exc_info:
            doc["exception"] = self.formatException(record.exc_info)
        return json.dumps(doc, default=str)


class TextLines(logging.Formatter):
    """A line for people: time, level, message, and the extra fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        extra = "".join(f" {name}={value}" for name, value in _fields(record).items())
        line = f"{_utc(record)} {record.levelname.lower():7} {record.getMessage()}{extra}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def set_up_logging(level: str, *, as_json: bool) -> None:
    """Log everything of this process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("httpx2", "httpcore2", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    extra = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    request_id = REQUEST_ID.get()
    return {"request_id": request_id, **extra} if request_id else extra


def _utc(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"

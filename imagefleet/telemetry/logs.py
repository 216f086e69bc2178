"""The log of a long-running process: text for people or JSON lines for programs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

#: The `action` of records of other libraries.
OTHER_ACTION = "other"

#: What every record has; all else comes from `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

#: Each logs every request, several per job.
_VERBOSE = ("azure", "aiohttp.access")


class JsonLines(logging.Formatter):
    """One JSON object per line: time, severity, action, message, and the fields of `extra`.

    SaladCloud's log collector reads `severity`. `action` is a slug that stays the same when the
    message is reworded; `job_id` is present if the line is about one job.
    """

    def format(self, record: logging.LogRecord) -> str:
        extra = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "severity": record.levelname,
            "action": extra.pop("action", OTHER_ACTION),
            "message": record.getMessage(),
            **extra,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(log_format: Literal["auto", "json", "text"]) -> None:
    """Logs to stderr; `auto` is text on a terminal and JSON lines elsewhere."""
    handler = logging.StreamHandler()
    if log_format == "text" or (log_format == "auto" and sys.stderr.isatty()):
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    else:
        handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name in _VERBOSE:
        logging.getLogger(name).setLevel(logging.WARNING)

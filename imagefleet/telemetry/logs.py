"""The log of a process that runs by itself: lines for people, or JSON lines for programs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

#: Of a line that another library wrote.
OTHER_ACTION = "other"

#: What every record carries; all else was given by `extra`.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

#: Each logs every request with its headers, several a job.
_TALKATIVE = ("azure", "aiohttp.access")


class JsonLines(logging.Formatter):
    """One JSON object a line: time, severity, action, message, and what `extra` gave.

    SaladCloud's log collector reads `severity`; `action` is a slug that stays when the words
    change; `job_id` stands wherever a line is about one job.
    """

    def format(self, record: logging.LogRecord) -> str:
        extra = {name: value for name, value in vars(record).items() if name not in _OWN}
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
    """Logs to stderr from here on; `auto` is text where a person looks."""
    handler = logging.StreamHandler()
    if log_format == "text" or (log_format == "auto" and sys.stderr.isatty()):
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    else:
        handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)

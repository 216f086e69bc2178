"""The log of a long-running process: text for people or JSON lines for programs."""

import json
import logging
import math
import sys
import threading
import time
from collections.abc import MutableMapping
from datetime import UTC, datetime
from logging import LoggerAdapter, LogRecord, StreamHandler
from typing import Any, Literal

from imagefleet import redaction

LogFormat = Literal["auto", "json", "text"]

OTHER_ACTION = "other"
UNEXPECTED_ACTION = "unexpected_error"

#: What every record has; all else comes from `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
}

#: What a call takes for itself.
_ARGUMENTS = {"exc_info", "stack_info", "stacklevel"}

#: Each logs every request, several per job.
_VERBOSE = ("azure", "aiohttp.access")


class EventLog(LoggerAdapter[logging.Logger]):
    """A logger of events: a call's keywords, its `action` first, are fields of the record."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name))

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        own = {name: kwargs.pop(name) for name in _ARGUMENTS & kwargs.keys()}
        return msg, own | {"extra": kwargs}


class JsonLines(logging.Formatter):
    """JSON lines: time, severity, an `action` that is never reworded, message, and `extra`."""

    def format(self, record: LogRecord) -> str:
        extra = {
            name: value for name, value in vars(record).items() if name not in _STANDARD
        }
        # asyncio, for one, logs what nothing has handled as an error with its traceback.
        is_failure = record.exc_info and record.levelname in {"ERROR", "CRITICAL"}
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(
                timespec="milliseconds"
            ),
            "severity": record.levelname,
            "action": extra.pop(
                "action", UNEXPECTED_ACTION if is_failure else OTHER_ACTION
            ),
            "message": record.getMessage(),
            **extra,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        shown = {
            name: redaction.message(value) if isinstance(value, str) else value
            for name, value in line.items()
        }
        text = json.dumps(
            shown, ensure_ascii=False, default=lambda it: redaction.message(str(it))
        )
        return redaction.CONTROLS.sub(lambda found: json.dumps(found[0])[1:-1], text)


class TextLines(logging.Formatter):
    """A line for people; further lines of a message are indented, lest they pass for records."""

    def __init__(self) -> None:
        super().__init__(
            "%(asctime)s %(levelname)s %(origin)s%(message)s", defaults={"origin": ""}
        )

    def format(self, record: LogRecord) -> str:
        if device := getattr(record, "device", None):
            record.origin = f"GPU {device}: "
        text = redaction.printable(redaction.message(super().format(record)))
        return text.replace("\n", "\n  ")


class _StandardError(StreamHandler):  # type: ignore[type-arg]  # generic for mypy only
    """Leaves out what cannot be written: a full disk or a closed pipe ends no worker."""

    def handleError(self, record: LogRecord) -> None:  # noqa: N802 - logging's name
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


#: The log of all modules: its lines tell the action, not the module.
log = EventLog("imagefleet")


class Occasion:
    """Says when something is due again, as a warning that an outage makes for every call."""

    def __init__(self, seconds: float = 60.0) -> None:
        self._seconds = seconds
        self._last_at = -math.inf

    def is_due(self) -> bool:
        now = time.monotonic()
        if now - self._last_at < self._seconds:
            return False
        self._last_at = now
        return True


def configure(log_format: LogFormat, handler: logging.Handler | None = None) -> None:
    """Logs to stderr (or *handler*): text for a terminal, and JSON lines for collectors."""
    handler = handler or _StandardError()
    if log_format == "text" or (log_format == "auto" and sys.stderr.isatty()):
        handler.setFormatter(TextLines())
    else:
        handler.setFormatter(JsonLines())
        sys.excepthook = lambda _kind, error, _trace: log_unhandled(error)
        sys.unraisablehook = _log_unraisable
        threading.excepthook = _log_in_thread
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
    for name in _VERBOSE:
        logging.getLogger(name).setLevel(logging.WARNING)


def name_device(device: str) -> None:
    """Names the GPU in each record of this process: a machine's workers share one log."""
    make = logging.getLogRecordFactory()

    def make_named(*arguments: Any, **fields: Any) -> LogRecord:
        record = make(*arguments, **fields)
        record.device = device
        return record

    logging.setLogRecordFactory(make_named)


def are_json() -> bool:
    return any(
        isinstance(each.formatter, JsonLines) for each in logging.getLogger().handlers
    )


def take_over_libraries() -> None:
    """Sends the records of libraries that print their own, as torch's do, to this log instead."""
    for logger in list(logging.Logger.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger) and logger.handlers:
            logger.handlers.clear()
            logger.propagate = True


def log_unhandled(
    error: BaseException, where: str = "", *, exit_code: int | None = 1
) -> None:
    """Logs an exception that nothing has handled; *exit_code*: of the process, if that ends."""
    log.error(
        f"{where}{type(error).__name__}: {error}",
        exc_info=error,
        action=UNEXPECTED_ACTION,
        exit_code=exit_code,
    )


def _log_in_thread(failure: threading.ExceptHookArgs) -> None:
    if failure.exc_type is not SystemExit:
        name = failure.thread.name if failure.thread else "?"
        error = failure.exc_value or failure.exc_type()
        log_unhandled(error, f"in the thread {name!r}: ", exit_code=None)


def _log_unraisable(
    failure: Any,
) -> None:  # sys.UnraisableHookArgs exists for type checkers only
    log_unhandled(
        failure.exc_value or failure.exc_type(),
        f"{failure.err_msg or 'Exception ignored in'} {failure.object!r}: ",
        exit_code=None,
    )


def duration(seconds: float) -> str:
    """`45 s`, `12.3 min`, `3.5 h`."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{math.ceil(seconds)} s"

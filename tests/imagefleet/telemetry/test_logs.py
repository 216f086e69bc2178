import json
import logging
import subprocess
import sys

import pytest

from imagefleet.telemetry import logs


def line_of(**record: object) -> dict[str, object]:
    found = json.loads(logs.JsonLines().format(logging.makeLogRecord(record)))
    assert isinstance(found, dict)
    return found


def test_a_line_has_severity_action_message_and_job():
    line = line_of(
        levelname="WARNING",
        msg="job %s failed",
        args=("j7",),
        action="job_failed",
        job_id="j7",
    )

    assert line.pop("time")
    assert line == {
        "severity": "WARNING",
        "action": "job_failed",
        "message": "job j7 failed",
        "job_id": "j7",
    }


def test_each_line_of_one_of_several_workers_names_its_gpu():
    plain = logging.getLogRecordFactory()
    logs.name_device("3")
    try:
        named = logging.getLogger().makeRecord("n", 20, "f", 1, "drawn", (), None)
    finally:
        logging.setLogRecordFactory(plain)
    unnamed = logging.getLogger().makeRecord("n", 20, "f", 1, "drawn", (), None)

    assert logs.TextLines().format(named).endswith(" INFO GPU 3: drawn")
    assert json.loads(logs.JsonLines().format(named))["device"] == "3"
    assert logs.TextLines().format(unnamed).endswith(" INFO drawn")
    assert "device" not in json.loads(logs.JsonLines().format(unnamed))


def test_a_record_with_line_breaks_is_one_line():
    try:
        json.loads("two\nlines")
    except ValueError:
        record = logging.makeLogRecord(
            {"msg": "a\nb", "exc_info": sys.exc_info(), "path": object()}
        )
    text = logs.JsonLines().format(record)

    assert "\n" not in text
    line = json.loads(text)
    assert line["action"] == "other"
    assert "JSONDecodeError" in line["exception"]


@pytest.mark.parametrize(
    ("log_format", "is_json"), [("auto", True), ("json", True), ("text", False)]
)
def test_json_is_logged_without_a_terminal_unless_text_is_set(
    log_format: str, is_json: bool
):
    program = (
        "import logging; from imagefleet.telemetry import logs;"
        f"logs.configure({log_format!r});"
        "logging.getLogger('worker').info('hello', extra={'action': 'start'})"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
    )

    (line,) = result.stderr.splitlines()
    assert line.startswith("{") is is_json
    assert line.endswith("INFO hello") is not is_json


def test_a_warning_of_an_outage_is_due_once_a_minute(
    monkeypatch,
):
    now = 5.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    occasion = logs.Occasion()
    assert [occasion.is_due() for _ in range(3)] == [True, False, False]
    now += 60
    assert [occasion.is_due() for _ in range(3)] == [True, False, False]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.2, "1 s"),
        (59.9, "60 s"),
        (90, "1.5 min"),
        (5400, "1.5 h"),
        (129_600, "1.5 d"),
    ],
)
def test_a_duration_has_one_unit(seconds: float, text: str):
    assert logs.duration(seconds) == text

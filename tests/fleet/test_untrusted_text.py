"""Text of jobs, blobs, metrics, files and services controls no terminal in any command."""

import asyncio
import json
import logging
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console

from cli import console
from imagefleet import redaction
from imagefleet.records.log import RecordLog
from imagefleet.storage.dead_letter import FailedJob
from imagefleet.storage.local.blobs import METADATA_FOLDER
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.telemetry import logs
from in_process import Imagefleet
from salad_fake import fleet_file

#: Sets the title, clears the screen, colours, turns the direction; markup and emoji of rich.
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e[red]x[/] [/nonsense] :rocket:"

#: A spinner hides the cursor, and removes itself.
_OF_RICH = re.compile(r"\x1b\[(\?25[lh]|1A|2K)|\r")


class _Service(BaseHTTPRequestHandler):
    """A Prometheus whose labels are hostile, and a SaladCloud whose complaints are."""

    def do_POST(self) -> None:
        labels = dict.fromkeys(
            ("instance", "worker", "gpu", "group", "fleet", "reason"), HOSTILE
        )
        series = {"metric": labels, "value": [1_700_000_000, "1.5"]}
        data = {"resultType": "vector", "result": [series]}
        self._answer(200, {"status": "success", "data": data})

    def do_GET(self) -> None:
        self._answer(
            400, {"title": HOSTILE, "detail": HOSTILE, "errors": {HOSTILE: [HOSTILE]}}
        )

    def _answer(self, status: int, record: object) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.dumps(record).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def service(monkeypatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Service)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def storage(tmp_path) -> str:
    """A storage in which everything that others may write is hostile."""
    settings = StorageSettings(storage=f"local:{tmp_path}/data")
    asyncio.run(_fill(settings))
    facts = dict.fromkeys(
        ("kind", "sha256", "job", "worker", "gpu", "seconds"), HOSTILE
    )
    for sidecar in (tmp_path / "data").rglob(f"{METADATA_FOLDER}/**/*.json"):
        sidecar.write_text(json.dumps({"metadata": facts}))
    return settings.storage


async def _fill(settings: StorageSettings) -> None:
    failed = FailedJob(
        outcome="failed",
        id="cat",
        error=HOSTILE,
        reason=HOSTILE,
        attempts=1,
        worker=HOSTILE,
        at="2026-11-01T00:00:00Z",
    )
    other = failed.model_copy(update={"id": HOSTILE})
    async with open_storage(settings) as opened:
        await opened.create()
        await RecordLog(opened.blobs, "w").add([failed, other])
        await opened.blobs.create("default/a.png", b"x", "image/png", {"job": "a"})
        for name in (
            "loras/a.safetensors",
            "models/a.safetensors",
            "kernels/a.kernels",
        ):
            await opened.files.create(name, b"x", "image/png", {"job": "a"})


#: Each with what it shows of others' texts.
COMMANDS = (
    ("failed",),
    ("failed", "--json"),
    ("failed", "default/cat"),
    ("failed", "default/cat", "--json"),
    ("replay", "--all"),
    ("discard", "default/nobody"),
    ("files", "list", "kernels"),
    ("files", "list", "lora"),
    ("files", "list", "model"),
    ("files", "list", HOSTILE),
    ("files", "remove", "lora", HOSTILE),
    ("report",),
    ("report", "--json"),
    ("status", "--prometheus", "{service}"),
    ("status", "--prometheus", "{service}", "--json"),
    ("load", "jobs.jsonl"),
    ("load", "jobs.jsonl", "--skip-invalid"),
    ("prompt", HOSTILE),
    ("prompt", f"a <lora:{HOSTILE}>"),
    ("plan", "--jobs", "10", "--price-file", "prices.yaml", "--gpu", "x"),
    ("deploy", "status"),
    ("deploy", "apply", "--render", "--file", HOSTILE),
    ("worker", "--model", HOSTILE),
    ("keys", "mint", HOSTILE),
    ("nonsense" + HOSTILE,),
)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_no_command_hands_others_control_of_the_terminal(
    in_process: Imagefleet,
    monkeypatch,
    tmp_path,
    storage: str,
    service: str,
    is_terminal: bool,
):
    for name, value in (("STORAGE", storage), ("LOG_FORMAT", "text")):
        monkeypatch.setenv(f"IMAGEFLEET_{name}", value)
    monkeypatch.setenv("SALAD_API_KEY", "key")
    (tmp_path / "jobs.jsonl").write_text(json.dumps({"prompt": "x", HOSTILE: 1}) + "\n")
    (tmp_path / "prices.yaml").write_text(
        json.dumps(
            {"source": HOSTILE, "gpus": {"x": {"batch": 1}, HOSTILE: {"batch": 1}}}
        )
    )
    (tmp_path / "fleet.yaml").write_text(fleet_file(service))
    if is_terminal:
        for name in ("stdout", "stderr"):
            colourless = Console(
                stderr=name == "stderr",
                force_terminal=True,
                color_system=None,
                width=200,
            )
            monkeypatch.setattr(console, name, colourless)

    for arguments in COMMANDS:
        given = (
            each.format(service=service) if "{s" in each else each for each in arguments
        )
        result = in_process(*given)

        shown = _OF_RICH.sub("", result.stdout + result.stderr)
        assert "Traceback" not in shown, shown
        assert not redaction.CONTROLS.search(shown), (arguments, shown)
        assert shown


def test_a_log_line_of_a_job_cannot_pass_for_another():
    record = logging.LogRecord("x", logging.WARNING, "", 0, "job %s failed", (), None)
    record.msg = "job %s failed"
    record.args = (f"{HOSTILE}\n2026-11-01 00:00:00 INFO all is well",)

    text = logs.TextLines().format(record)
    line = logs.JsonLines().format(record)

    assert not redaction.CONTROLS.search(text + line)
    assert "\n  2026-11-01 00:00:00 INFO all is well" in text
    assert len(line.splitlines()) == 1
    assert json.loads(line)["message"] == record.getMessage()

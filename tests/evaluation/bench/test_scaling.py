"""`imagefleet bench scaling`, with processes that count images as workers do, at known speeds."""

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from evaluation.bench import runs, scaling, workers
from fleet import console
from imagefleet.job.message import read_job
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings

pytestmark = pytest.mark.slow

#: Images/s of each of so many workers: two get in each other's way. The first moment is
#: slower, as a warm-up is, and until then one compiles.
STAND_IN = """
import http.server, json, os, signal, sys, time

began_at = time.monotonic()
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
gpus = flags["--gpus"].split(",")
open(os.environ["SEEN"], "a").write(json.dumps([flags, dict(os.environ)]) + "\\n")
if os.environ.get("BROKEN") == flags["--gpus"]:
    print(json.dumps({"severity": "ERROR", "message": "no memory left"}), file=sys.stderr)
    sys.exit(3)

def images():
    seconds = time.monotonic() - began_at
    return (80 if len(gpus) == 2 else 100) * max(0.2 * min(seconds, 0.25), seconds - 0.2)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        for gpu in gpus:
            label = '{device="%s"}' % gpu if len(gpus) > 1 else ""
            self.wfile.write(f"imagefleet_images_total{label} {int(images())}\\n".encode())
            compiling = int(time.monotonic() - began_at < 0.25)
            self.wfile.write(f"imagefleet_engine_compiling{label} {compiling}\\n".encode())

    def log_message(self, *_): ...

server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
action = "start_workers" if len(gpus) > 1 else "start"
said = {"severity": "INFO", "action": action, "port": server.server_port, "message": ""}
print(json.dumps(said), file=sys.stderr, flush=True)
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
server.serve_forever()
"""

RUN = ("bench", "scaling", "--device", "cpu", "--seconds", "0.6")


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the processes were started with, a line each."""
    program, found = tmp_path / "stand_in.py", tmp_path / "seen.jsonl"
    program.write_text(STAND_IN)
    monkeypatch.setattr(workers, "COMMAND", (sys.executable, str(program)))
    monkeypatch.setattr(runs, "SAMPLE_SECONDS", 0.05)
    monkeypatch.setitem(scaling.WARM_SECONDS, "cpu", 0.1)
    prepared = (tmp_path / "model", "a card", "a house", "ugly")
    monkeypatch.setattr(scaling, "_prepared", lambda *_: prepared)
    monkeypatch.setenv("SEEN", str(found))
    return found


def test_each_number_of_workers_is_measured_and_compared_with_one(
    in_process: Any, seen: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("IMAGEFLEET_QUEUE", "of-my-fleet")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    ended = in_process(*RUN, "--workers", "2", "--json", "--json-file", "new/s.json")

    assert ended.returncode == console.EXIT_DONE, ended.stderr
    report = json.loads(ended.stdout)
    one, two = report["rows"]
    assert (one["workers"], two["workers"]) == (1, 2)
    assert one["images_per_second"] == pytest.approx(100, rel=0.1), (
        "without the warm-up"
    )
    assert two["images_per_second"] == pytest.approx(160, rel=0.1)
    assert (one["linear_fraction"], one["perfect_linear"]) == (
        1,
        one["images_per_second"],
    )
    assert two["perfect_linear"] == 2 * one["images_per_second"]
    assert two["linear_fraction"] == pytest.approx(0.8, rel=0.12)
    assert two["by_worker"] == pytest.approx([80, 80], rel=0.1)
    assert "start-up and warm-up are left out" in report["how"]
    assert (report["device"], report["threads_per_worker"]) == ("a card", 3)
    assert json.loads((tmp_path / "new" / "s.json").read_text()) == report

    started = [json.loads(line) for line in seen.read_text().splitlines()]
    assert [flags["--gpus"] for flags, _ in started] == ["0", "0,1"]
    assert len({flags["--storage"] for flags, _ in started}) == 1, (
        "one campaign for all"
    )
    for flags, environment in started:
        assert flags["--device"] == "cpu"
        assert environment["OMP_NUM_THREADS"] == "3"
        assert "IMAGEFLEET_QUEUE" not in environment


def test_the_table_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        runs.Row(1, 14.6, 14.6, 1.0, [14.6], 60.0, 876, 90.0),
        runs.Row(2, 28.98, 29.2, 0.9925, [14.44, 14.54], 60.0, 1739, 95.0),
    ]
    about = {"device": "H200", "threads_per_worker": None, "model": "m", "how": "so"}
    scaling.show(rows, {**about, "sampler": "PLMS", "steps": 50})
    shown = capsys.readouterr().out

    assert re.search(
        r"^ *2 +28\.98 +29\.20 +99\.2 % +14\.44 +14\.54", shown, re.MULTILINE
    )
    assert "H200; m, PLMS, 50 steps; 60 s measured of each run" in shown


def test_a_worker_that_ends_ends_the_measurement_with_its_reason(
    in_process: Any, seen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKEN", "0")
    ended = in_process(*RUN, "--workers", "1,2")

    assert ended.returncode == console.EXIT_REPLACE_THIS_NODE
    assert "the worker ended with exit code 3: no memory left" in ended.stderr


async def test_the_queue_never_runs_dry_and_its_jobs_are_of_one_campaign(
    tmp_path: Path,
) -> None:
    work = runs.Work(
        tmp_path, {"sampler_name": "PLMS", "steps": 50}, 1, 1, (), {}, "a house", "ugly"
    )
    async with open_storage(StorageSettings(storage=f"local:{tmp_path}")) as storage:
        await storage.create()
        filling = asyncio.create_task(
            runs._keep_filled(storage, work, iter(range(9999)), 2)
        )
        drawn = []
        # More than were sent at first: some were added meanwhile.
        while len(drawn) < 4 * runs.JOBS_PER_WORKER + 100:
            for message in await storage.queue.receive(32, 60):
                drawn.append(read_job(message.body, message.id))
                await storage.queue.delete(message)
        filling.cancel()

    assert {(job.campaign, job.sampler, job.steps) for job in drawn} == {
        ("scaling", "plms", 50)
    }
    assert (
        len({job.id for job in drawn}) == len({job.seed for job in drawn}) == len(drawn)
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--workers", "0"), "--workers 0: should be numbers with commas"),
        (("--workers", "two"), "--workers two: should be numbers with commas"),
        (("--device", "tpu"), "--device tpu: should be auto or cpu"),
        (("--set", "sampler_name=dimm"), "--set sampler_name: unknown sampler 'dimm'"),
        (("--model", "nowhere"), "the model 'nowhere' does not exist"),
        (("--device", "auto"), "no NVIDIA GPU, or no driver for it; .*--device cpu"),
    ],
)
def test_a_mistake_is_one_line(
    in_process: Any, seen: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    ended = in_process(*RUN, *arguments)

    assert ended.returncode == console.EXIT_OPERATOR_MUST_ACT
    assert re.search(sentence, ended.stderr)
    assert "Traceback" not in ended.stderr
    assert not seen.exists()


def test_without_a_list_the_numbers_are_powers_of_two() -> None:
    assert [scaling._to_measure(None, gpus) for gpus in (1, 2, 3, 8)] == [
        [1],
        [1, 2],
        [1, 2],
        [1, 2, 4, 8],
    ]
    assert scaling._to_measure([3, 6], 8) == [1, 3, 6]

"""A test that hangs is ended, with what it waits for; one that is slow is not."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import hang

CONFIGURATION = Path(__file__).parents[1] / "pyproject.toml"

#: The project's own hooks, but not its memory of what failed last.
OPTIONS = ("-p", "conftest", "-p", "no:cacheprovider")

TESTS = """
import asyncio, time, hang

hang.HANG_SECONDS = hang._LOOK_SECONDS = 0.3

async def test_hangs() -> None:
    await asyncio.Event().wait()

def test_is_slow() -> None:
    end = time.monotonic() + 0.7
    while time.monotonic() < end:
        pass
"""


def test_a_test_that_waits_for_ever_fails_with_the_line_that_it_waits_at(
    tmp_path,
):
    tests = Path(__file__).parent
    file = tmp_path / "test_hanging.py"
    file.write_text(TESTS)
    folders = (tests, tests / "chaos", tests / "support")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, "-c", CONFIGURATION, file],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
    )
    assert "1 failed, 1 passed" in ended.stdout, ended.stdout + ended.stderr
    assert "await asyncio.Event().wait()" in ended.stdout.partition("It waits at")[2]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells it")
def test_what_waits_for_a_busy_processor_does_not_hang():
    me = psutil.Process()
    cores = os.sched_getaffinity(0)
    me.cpu_affinity([min(cores)])
    try:
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
            before = hang.waiting_seconds(me.pid)
            while hang.waiting_seconds(me.pid) - before < 0.1:
                pass
            other.kill()
    finally:
        me.cpu_affinity(list(cores))

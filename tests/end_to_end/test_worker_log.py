"""A worker's log as a collector reads it: JSON lines and nothing else, however the worker ends."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import forks
import polling
from imagefleet.storage.open import Storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict
from storages import local_only

ROOT = Path(__file__).parents[2]
COMMAND = Path(sys.executable).with_name("imagefleet")

#: A worker with a stand-in engine, a flag and some Python each (fixture of conftest.py).
StandInWorker = Callable[..., list[Any]]

pytestmark = [
    pytest.mark.slow,
    local_only,
]

BUG = "from fleet.worker import command; command.require_libraries = lambda: 1 / 0"

#: A line for each way in which something may go wrong beside the work.
NOISE = """
warnings.warn("old ways", stacklevel=1)
library = logging.getLogger("transformers.models")
logging.getLogger("transformers").addHandler(logging.StreamHandler())
logging.getLogger("transformers").propagate = False
from imagefleet.telemetry import logs
configure = logs.configure
def noisy(*arguments):
    configure(*arguments)
    logs.take_over_libraries()
    library.warning("a token\\nis too long")
    warnings.warn("a kernel is slow", stacklevel=1)
    thread = threading.Thread(target=lambda: 1 / 0, name="uploader")
    thread.start()
    thread.join()
    class Closing:
        def __del__(self):
            raise ValueError("closed twice")
    Closing()
logs.configure = noisy
run_worker = process.run_worker
async def forgetful(*arguments, **options):
    asyncio.get_running_loop().call_soon(lambda: [][0])
    return await run_worker(*arguments, **options)
process.run_worker = forgetful
"""


@pytest.fixture
def environment(storage_settings: StorageSettings, tmp_path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "IMAGEFLEET_STORAGE": storage_settings.storage,
        "IMAGEFLEET_CACHE": str(tmp_path / "cache"),
        "FORCE_COLOR": "1",  # makes no terminal of a pipe or a file
    }


@dataclass(frozen=True)
class Worker:
    """A worker that runs, and the file with its log."""

    process: forks.Fork
    log: Path

    async def end(self) -> tuple[int, list[JSONDict]]:
        """The exit code and the lines of the log; nothing may be printed beside it."""
        printed, _ = await asyncio.to_thread(self.process.communicate)
        assert printed == ""
        return self.process.wait(), log_of(self.log.read_bytes())


Start = Callable[..., Worker]


@pytest.fixture
def start(
    stand_in_forks: forks.Forks,
    stand_in_worker: StandInWorker,
    environment: dict[str, str],
    tmp_path,
) -> Iterator[Start]:
    """Starts a worker with a stand-in engine; it is killed at the end of the test."""
    started = []

    def begin(
        *flags: str, variables: dict[str, str] | None = None, **program: str
    ) -> Worker:
        _python, _c, code, *arguments = stand_in_worker(*flags, **program)
        log = tmp_path / "log"
        log.touch()
        process = stand_in_forks.start(
            *map(str, arguments),
            cwd=tmp_path,
            variables=environment | (variables or {}),
            errors=log,
            program=code,
        )
        started.append(process)
        return Worker(process, log)

    yield begin
    for process in started:
        process.kill()
        process.wait()


def log_of(output: bytes) -> list[JSONDict]:
    return [json.loads(line) for line in output.splitlines()]


async def run(
    command: list[Any], environment: dict[str, str]
) -> tuple[int, list[JSONDict]]:
    """As `Worker.end`, of a process with an interpreter of its own and pipes."""
    done = await asyncio.to_thread(
        subprocess.run,
        command,
        env=environment,
        capture_output=True,
        check=False,
    )
    assert done.stdout == b""
    return done.returncode, log_of(done.stderr)


@pytest.mark.parametrize(
    ("flags", "program", "variables", "code", "action", "message"),
    [
        (["--log-format"], {}, {}, 2, "setup_error", "requires an argument"),
        (
            [],
            {},
            {"IMAGEFLEET_SLOTZ": "2"},
            2,
            "setup_error",
            "unknown setting IMAGEFLEET_SLOTZ",
        ),
        (["--queue", "nowhere"], {}, {}, 2, "setup_error", "no queue 'nowhere'"),
        (
            [],
            {"loading": "raise errors.NodeError('no GPU')"},
            {},
            3,
            "node_error",
            "no GPU",
        ),
        (
            [],
            {"loading": "{}['weights']"},
            {},
            1,
            "unexpected_error",
            "KeyError: 'weights'",
        ),
        ([], {"changes": BUG}, {}, 1, "unexpected_error", "ZeroDivisionError"),
    ],
)
async def test_each_way_to_fail_ends_with_a_json_line(
    storage: Storage,
    start: Start,
    flags: list[str],
    program: dict[str, str],
    variables: dict[str, str],
    code: int,
    action: str,
    message: str,
):
    ended_with, log = await start(*flags, variables=variables, **program).end()

    assert ended_with == code
    assert (log[-1]["severity"], log[-1]["action"], log[-1]["exit_code"]) == (
        "ERROR",
        action,
        code,
    )
    assert message in log[-1]["message"]
    assert ("exception" in log[-1]) == (code == 1)


async def test_warnings_threads_and_other_libraries_write_json_lines_too(
    storage: Storage, stand_in_worker: StandInWorker, environment: dict[str, str]
):
    await storage.queue.send(['{"prompt": "a house", "id": "j1"}'])
    command = stand_in_worker("--until-empty", changes=NOISE)

    # Before main begins only the interpreter could hear a warning.
    code, log = await run(command, {**environment, "PYTHONWARNINGS": "ignore:old ways"})

    assert code == 0
    messages = {line["action"]: line["message"] for line in log}
    assert "1 completed" in messages["stop"]
    said = "\n".join(
        f"{line['severity']} {line['action']} {line['message']}" for line in log
    )
    for words in (
        "WARNING other a token",
        "UserWarning: a kernel is slow",
        "ERROR unexpected_error in the thread 'uploader': ZeroDivisionError",
        "ERROR unexpected_error Exception ignored in",
        "ERROR unexpected_error Exception in callback",
    ):
        assert words in said


async def test_torch_and_its_companions_write_nothing_else(
    storage: Storage, tiny_model: Path, environment: dict[str, str]
):
    await storage.queue.send(['{"prompt": "a house", "steps": 2}'])
    command = [COMMAND, "worker", "--model", tiny_model, "--until-empty"]

    code, log = await run(command, {**environment, "OMP_NUM_THREADS": "1"})

    assert code == 0
    assert log[-1]["images"] == 1
    expected = {"start", "loaded", "fits", "node_check", "stop"}
    expected |= {"first_image", "full_speed"}
    slow = {"progress"}  # a line a minute
    assert {line["action"] for line in log} - slow == expected


async def test_a_log_has_a_line_a_minute_with_the_figures_and_why_nothing_is_done(
    storage: Storage, start: Start
):
    await storage.queue.send(
        f'{{"prompt": "a house", "id": "j{each}"}}' for each in range(40)
    )
    await storage.queue.send(["no job"])
    worker = start(
        "--price-per-hour",
        "0.1",
        changes="process.PROGRESS_SECONDS = 1.0  # in place of 60",
    )
    await polling.until(storage.queue.depth, lambda depth: not depth.messages)
    await polling.until(
        lambda: "the queue is empty: 40 images, 1 fail" in worker.log.read_text()
    )
    worker.process.send_signal(signal.SIGTERM)
    code, log = await worker.end()

    assert code == 0, "a failed job changes it only with --fail-on-failed"
    shown = [line for line in log if line["action"] == "progress"]
    *lines, last = (line for line in shown if line["phase"] != "draining")
    assert shown[-1]["phase"] == "draining", "a drain shows at once"
    working = next(line for line in lines if line["images"])
    assert working["phase"] == "generating"
    assert working["jobs_left"] == pytest.approx(40 - working["images"], abs=5)
    # 20/s, or fewer on a machine that does other work as well.
    assert 0 < working["images_per_second"] < 32
    seconds_left = working["jobs_left"] / working["images_per_second"]
    assert working["seconds_left"] == pytest.approx(seconds_left, rel=0.5)
    assert working["is_own_pace"] is True
    assert working["images_per_dollar"] > 0
    assert "left, " in working["message"]
    assert (last["images"], last["failed_jobs"]) == (40, 1)
    assert last["message"].startswith(
        "waiting for jobs: the queue is empty: 40 images, 1 failed"
    )
    (end,) = (line for line in log if line["action"] == "stop")
    assert (end["images"], end["failed_jobs"]) == (40, 1)
    assert end["images_per_dollar"] > 0


async def test_fail_on_failed_gives_failed_jobs_an_exit_code(
    storage: Storage, start: Start
):
    await storage.queue.send(['{"prompt": "a house"}', "no job"])

    code, log = await start("--until-empty", "--fail-on-failed").end()

    assert code == 4
    assert (log[-1]["images"], log[-1]["failed_jobs"]) == (1, 1)

import os
import signal

import pytest

import polling
from worker import process
from worker.gpus import parent
from worker.gpus.parent import HURRY, STOP, VARIABLE
from worker.settings import WorkerSettings


def test_a_worker_learns_its_part_once_and_its_own_processes_do_not(monkeypatch):
    monkeypatch.setattr(parent, "_end_with_parent", lambda: None)
    monkeypatch.setenv(VARIABLE, '["1", {"name": "m-gpu1", "port": 8082}]')
    settings = WorkerSettings(model="m", host="0.0.0.0", port=8080, name="m")
    assigned = parent.assigned(settings)
    assert assigned is not None
    gpu, own = assigned
    assert (gpu, own.name, own.host, own.port) == ("1", "m-gpu1", "0.0.0.0", 8082)
    assert VARIABLE not in os.environ
    assert parent.assigned(settings) is None


@pytest.mark.parametrize(
    ("signals", "is_hurried"),
    [
        ([STOP], False),
        ([STOP, STOP], False),  # a supervisor's, sent to all processes
        ([STOP, HURRY], True),
        ([HURRY], True),
    ],
)
async def test_only_the_parent_hurries_a_worker(
    signals: list[signal.Signals], is_hurried: bool
):
    with process._signals(is_one_of_several=True) as (stop, hurry, received):
        for number in signals:
            os.kill(os.getpid(), number)
        await (hurry if is_hurried else stop).wait()
        await polling.turn(20)  # whatever has arrived is read meanwhile
        assert stop.is_set()
        assert hurry.is_set() == is_hurried
        assert received

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import polling
from worker import process
from worker.gpus.child import HURRY, READY, STARTING, STOP, VARIABLE, Assignment, Member
from worker.settings import MachineSettings


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Member, socket.socket]]:
    """A worker's view of its parent, and the parent's end."""
    ours, theirs = socket.socketpair()
    assignment = Assignment(
        control=theirs.detach(),
        gpu="1",
        name="m-gpu1",
        instance="i",
        port=8082,
        price_per_hour=0.25,
    )
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr("worker.gpus.child.LAST_SECONDS", 0)
    monkeypatch.setenv(VARIABLE, assignment.model_dump_json())
    member = Member.from_environment()
    assert member is not None
    (reading,) = (each for each in threading.enumerate() if each.name == "parent")
    with ours:
        yield member, ours
    reading.join(5)  # before os._exit is itself again


def test_a_worker_learns_its_part_once_and_its_own_processes_do_not(
    pair: tuple[Member, socket.socket],
) -> None:
    member, ours = pair
    settings = MachineSettings(
        model="m", gpus="all", host="0.0.0.0", port=8080, price_per_hour=2, name="m"
    )
    own = member.settings(settings)
    assert (own.name, own.device, own.price_per_hour) == ("m-gpu1", "cuda", 0.25)
    assert (own.host, own.port) == ("0.0.0.0", 8082)
    assert (
        member.settings(settings.model_copy(update={"device": "cpu"})).device == "cpu"
    )
    assert VARIABLE not in os.environ
    member.report(is_ready=False)
    member.report(is_ready=True)
    assert ours.recv(100) == STARTING + READY


@pytest.mark.parametrize(
    ("words", "is_hurried"),
    [
        ([STOP], False),
        ([STOP, signal.SIGTERM], False),  # a supervisor's, sent to all processes
        ([signal.SIGTERM, STOP, signal.SIGINT], False),
        ([STOP, HURRY], True),
        ([signal.SIGTERM, HURRY], True),
        ([None], True),  # the parent's death
    ],
)
async def test_only_the_parent_or_its_death_hurries_a_worker(
    pair: tuple[Member, socket.socket], words: list[Any], is_hurried: bool
) -> None:
    member, ours = pair
    with process._signals(member) as (stop, hurry, received):
        for word in words:
            if isinstance(word, signal.Signals):
                os.kill(os.getpid(), word)
            elif word is None:
                ours.close()
            else:
                ours.sendall(word)
        await (hurry if is_hurried else stop).wait()
        await polling.turn(20)  # whatever has arrived is read meanwhile
        assert stop.is_set()
        assert hurry.is_set() == is_hurried
        assert received


async def test_a_word_before_the_worker_listens_is_not_lost(
    pair: tuple[Member, socket.socket],
) -> None:
    member, ours = pair
    ours.sendall(STOP)
    await polling.turn(20)
    with process._signals(member) as (stop, _, _):
        await stop.wait()


def test_a_worker_that_hangs_does_not_outlive_its_parent() -> None:
    program = (
        "import threading, worker.gpus.child as member\n"
        "member.LAST_SECONDS = 0.1\n"
        "assert member.Member.from_environment()\n"
        "threading.Event().wait(60)\n"
    )
    ours, theirs = socket.socketpair()
    assignment = Assignment(control=theirs.fileno(), gpu="0", name="m", instance="i")
    with theirs, ours:
        worker = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, VARIABLE: assignment.model_dump_json()},
            pass_fds=[theirs.fileno()],
        )
    assert worker.wait() == 1

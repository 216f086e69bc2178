import os
import signal
import socket
from collections.abc import Iterator

import pytest

import polling
from worker import process
from worker.gpus.child import HURRY, READY, STARTING, STOP, VARIABLE, Assignment, Member
from worker.settings import MachineSettings


@pytest.fixture
def pair(monkeypatch) -> Iterator[tuple[Member, socket.socket]]:
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
    monkeypatch.setenv(VARIABLE, assignment.model_dump_json())
    member = Member.from_environment()
    assert member is not None
    with ours, member._control:
        yield member, ours


def test_a_worker_learns_its_part_once_and_its_own_processes_do_not(
    pair: tuple[Member, socket.socket],
):
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
    assert member.report(is_ready=False)
    assert member.report(is_ready=True)
    assert ours.recv(100) == STARTING + READY
    ours.close()
    assert not member.report(is_ready=True), "the parent is gone"


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
    pair: tuple[Member, socket.socket], signals: list[signal.Signals], is_hurried: bool
):
    member, _ = pair
    with process._signals(member) as (stop, hurry, received):
        for number in signals:
            os.kill(os.getpid(), number)
        await (hurry if is_hurried else stop).wait()
        await polling.turn(20)  # whatever has arrived is read meanwhile
        assert stop.is_set()
        assert hurry.is_set() == is_hurried
        assert received

"""Measures what clients of `imagefleet serve` wait for while another one does what it likes.

    python benchmarks/library/strangers.py --out benchmarks/results/strangers.json

Four clients with keys of their own draw one picture after the other, from one worker with a
stand-in engine. Beside them a fifth one sends what is in `attacks.py`, one kind after the other and
then all at once: 15 minutes in all, each kind after a pause. The figure is the median time of an
answer over that of the pauses around it. Beside it: the longest that `/live` took, and the
gateway's memory.
"""

import argparse
import asyncio
import contextlib
import functools
import hashlib
import itertools
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[1:3])

import aiohttp
import psutil

from benchmarks.stand_in import StandInEngine
from evaluation.bench import machine
from library import attacks, gateway, turns
from rows.groups import Figures, add_figures
from worker.engine import device
from worker.settings import WorkerSettings

FRIENDS = ("ann", "ben", "cas", "dan")

SLOTS = 4

#: Seconds in which the engine draws an image in each slot.
TICK_SECONDS = 0.2

#: Of a kind's seconds, the pause before it.
PAUSE_SHARE = 0.25

#: Images of the stranger that may wait.
MAX_WAITING = 400

#: Figures of which the largest is told.
_WORST = ("answer_over_before", "longest_live_seconds", "memory_mebibytes")

#: Seconds between two looks at the gateway.
LOOK_SECONDS = 0.05


def clients_file(folder: Path) -> Path:
    """The keys of all five."""
    keys = {name: f"{name}-key" for name in FRIENDS} | {"stranger": attacks.KEY}
    rows = [
        {
            "name": name,
            "sha256": hashlib.sha256(key.encode()).hexdigest(),
            "campaign": name,
            "max_waiting": MAX_WAITING,
        }
        for name, key in keys.items()
    ]
    path = folder / "clients.yaml"
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


@dataclass
class Waits:
    """What the clients and `/live` waited for since it was emptied, and the gateway's memory."""

    answers: list[float] = field(default_factory=list)
    silences: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)

    def taken(self) -> "Waits":
        """What there is so far, after which it is empty."""
        found = Waits(self.answers, self.silences, self.memory)
        self.answers, self.silences, self.memory = [], [], []
        return found


async def draw(session: aiohttp.ClientSession, name: str, waits: Waits) -> None:
    """Draws one picture after the other."""
    headers = {"Authorization": f"Bearer {name}-key"}
    for number in itertools.count():
        body = {"prompt": f"{name} {number}", "width": 64, "height": 64}
        began_at = time.monotonic()
        async with session.post(attacks.TXT2IMG, json=body, headers=headers) as answer:
            await answer.read()
        waits.answers.append(time.monotonic() - began_at)


async def look(
    session: aiohttp.ClientSession, process: psutil.Process, waits: Waits
) -> None:
    """Asks whether the gateway lives, and reads its memory."""
    while True:
        began_at = time.monotonic()
        async with session.get("/live") as answer:
            await answer.read()
        waits.silences.append(time.monotonic() - began_at)
        waits.memory.append(process.memory_info().rss / 2**20)
        await asyncio.sleep(LOOK_SECONDS)


@contextlib.asynccontextmanager
async def attacking(port: int, kind: str) -> AsyncIterator[None]:
    """A process that attacks while the block runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        attacks.__file__,
        str(port),
        kind,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        if process.stdout is not None:
            await process.stdout.readline()  # it is ready
        yield
        if process.returncode is not None:
            raise RuntimeError(f"{kind}: the stranger has ended")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        await process.wait()


async def measure(arguments: argparse.Namespace, folder: Path) -> Figures:
    storage = f"local:{folder / 'data'}"
    settings = WorkerSettings(storage=storage, model=Path("stand-in"), trusted_key=None)
    load = functools.partial(StandInEngine, capacity=SLOTS, tick_seconds=TICK_SECONDS)
    flags = ("--clients", str(clients_file(folder)))
    kinds = arguments.kinds or list(attacks.KINDS_AND_ALL)
    each = arguments.seconds / len(kinds)
    waits, pauses, found = Waits(), list[Waits](), dict[str, Waits]()
    async with (
        turns.working(settings, load, may_fail=True),
        gateway.serving(storage, *flags) as session,
    ):
        port = int(session._base_url.port)  # noqa: SLF001 - nobody else tells it
        process = newest_child()
        drawing = [draw(session, name, waits) for name in FRIENDS]
        looking = look(session, process, waits)
        beside = [asyncio.create_task(each) for each in (looking, *drawing)]
        for kind in [*kinds, None]:
            await asyncio.sleep(each * PAUSE_SHARE)
            while len(waits.answers) < len(FRIENDS):  # noqa: ASYNC110 - they tell nobody
                await asyncio.sleep(LOOK_SECONDS)
            pauses.append(waits.taken())
            if kind is None:
                break
            async with attacking(port, kind):
                waits.taken()
                await asyncio.wait(
                    beside, timeout=each, return_when=asyncio.FIRST_COMPLETED
                )
                found[kind] = waits.taken()
            for task in beside:
                if task.done():
                    task.result()
            print(row(kind, figures(found[kind], pauses[-1:])), flush=True)
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    around = zip(found.items(), itertools.pairwise(pauses), strict=True)
    return {kind: figures(attacked, quiet) for (kind, attacked), quiet in around}


def newest_child() -> psutil.Process:
    """The process that this one has started last."""
    return max(psutil.Process().children(), key=psutil.Process.create_time)


def figures(attacked: Waits, pauses: Sequence[Waits]) -> Figures:
    """The answers' times over those of the pauses around them, and the gateway's own figures."""
    quiet = [seconds for pause in pauses for seconds in pause.answers]
    before, during = statistics.median(quiet), statistics.median(attacked.answers)
    return {
        "answer_over_before": during / before,
        "before_seconds": before,
        "answer_seconds": during,
        "longest_answer_seconds": max(attacked.answers),
        "answers": len(attacked.answers),
        "longest_live_seconds": max(attacked.silences),
        "longest_live_before_seconds": max(
            seconds for pause in pauses for seconds in pause.silences
        ),
        "memory_mebibytes": max(attacked.memory),
    }


def row(kind: str, found: Figures) -> str:
    return (
        f"{kind:28} {found['answer_over_before']:5.2f} times of {found['before_seconds']:.2f} s;"
        f" longest {found['longest_answer_seconds']:5.2f} s;"
        f" /live {found['longest_live_seconds']:.3f} s;"
        f" {found['memory_mebibytes']:.0f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seconds", type=float, default=900, help="of all attacks together"
    )
    parser.add_argument("--kinds", nargs="*", help="of attacks (default: all)")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kinds = asyncio.run(measure(arguments, Path(folder)))
    alone = {kind: found for kind, found in kinds.items() if kind in attacks.KINDS}
    worst, worst_of_one_kind = [
        {name: max(found[name] for found in rows.values()) for name in _WORST}
        for rows in (kinds, alone or kinds)
    ]
    result = {
        "kinds": kinds,
        "worst": worst,
        "worst_of_one_kind": worst_of_one_kind,
        "measured": {
            "command": "python benchmarks/library/strangers.py",
            "seconds": arguments.seconds,
            "clients": len(FRIENDS),
            "hardware": machine.hardware(device.find_device("cpu")),
            "versions": machine.versions(),
        },
    }
    add_figures(arguments.out, result)
    print(json.dumps(worst))


if __name__ == "__main__":
    main()

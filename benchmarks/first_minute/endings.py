"""The row of processes that end while they compile: by which way, and what they leave."""

import asyncio
import itertools
import os
import shutil
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from first_minute import packages

#: Draws, says which process compiles once a picture is there, and ends a while later.
PROGRAM = """
import itertools, os, signal, sys, time
import psutil
import imagefleet

def compilers():
    each = psutil.Process().children()
    return [child.pid for child in each if "kernels.compiler" in " ".join(child.cmdline())]

def jobs():
    for seed in itertools.count():
        yield imagefleet.Job(prompt="a red house", seed=seed, steps=4, **size)

model, cache, device, way, seconds, side = sys.argv[1:]
size = {"width": int(side), "height": int(side)}
engine = imagefleet.Engine(model, cache=cache, device=device, slots=2)
ends_at = None
for drawn in engine.draw(jobs()):
    if drawn.error is not None:
        raise drawn.error
    if ends_at is None:
        print(*compilers(), flush=True)
        ends_at = time.monotonic() + float(seconds)
    if time.monotonic() >= ends_at:
        break
if way == "closes":
    engine.close()
elif way == "raises":
    raise ValueError("as any program may")
elif way == "exits":
    sys.exit(3)
else:
    os.kill(os.getpid(), getattr(signal, way))
    time.sleep(60)
"""

#: The ways of a program, and its exit code by each.
WAYS = {
    "closes": 0,
    "raises": 1,
    "exits": 3,
    "SIGINT": -signal.SIGINT,
    "SIGTERM": -signal.SIGTERM,
    "SIGKILL": -signal.SIGKILL,
}

ENDINGS, TINY_ENDINGS = 50, 3

#: Processes that one GPU and sixteen cores hold.
AT_ONCE = 10

#: From the first picture to the end: of these in turn.
PAUSES = (0.0, 4.0, 8.0, 12.0)

#: Of a process' whole life, and of what it has left behind.
LIFE_SECONDS, LEFT_SECONDS = 150.0, 15.0

#: Characters of what a process that ended wrongly had told.
_WORDS = 300

Emit = Callable[..., None]


class Ending(NamedTuple):
    """A process' end."""

    way: str
    #: None: it had to be killed.
    exit_code: int | None
    is_compiling: bool
    orphans: int
    #: The end of what it told on standard error.
    last_words: str

    @property
    def is_good(self) -> bool:
        return self.exit_code == WAYS[self.way] and not self.orphans


def measure(emit: Emit, arguments: Namespace) -> None:
    asyncio.run(_measure(emit, arguments))


async def _measure(emit: Emit, arguments: Namespace) -> None:
    count = TINY_ENDINGS if arguments.tiny else ENDINGS
    turns = zip(range(count), itertools.cycle(WAYS), itertools.cycle(PAUSES))
    ended: list[Ending] = []

    async def end_some() -> None:
        for number, way, seconds in turns:
            pause = 0.0 if arguments.tiny else seconds
            ended.append(await _end(arguments, number, way, pause))
            emit(**_figures(ended))

    await asyncio.gather(*(end_some() for _ in range(min(count, AT_ONCE))))
    emit(is_complete=True)


def _figures(ended: Sequence[Ending]) -> dict[str, object]:
    compiling = sum(each.is_compiling for each in ended)
    bad = [each for each in ended if not each.is_good]
    return {
        "endings": len(ended),
        "endings_while_compiling": compiling,
        "endings_failed": len(bad),
        "failed": [each._asdict() for each in bad],
    }


async def _end(arguments: Namespace, number: int, way: str, seconds: float) -> Ending:
    model = arguments.folder / ("tiny-sd1" if arguments.tiny else "sd1")
    cache = arguments.folder / f"ending-{number}"
    shutil.rmtree(cache, ignore_errors=True)
    side = 64 if arguments.tiny else 512
    told = (model, cache, arguments.device, way, seconds, side)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        *map(str, told),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **packages.forget_compiled(cache)},
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(LIFE_SECONDS):
            stdout, stderr = await process.communicate()
    except TimeoutError:
        process.kill()
        stdout, stderr, code = b"", b"", None
    else:
        code = process.returncode
    compilers = list(_processes(map(int, stdout.split())))
    is_compiling = bool(stdout.split()) and not list(_written(cache))
    _, left = await asyncio.to_thread(psutil.wait_procs, compilers, LEFT_SECONDS)
    for orphan in left:
        orphan.kill()
    shutil.rmtree(cache, ignore_errors=True)
    last_words = stderr.decode(errors="replace")[-_WORDS:]
    return Ending(way, code, is_compiling, len(left), last_words)


def _processes(numbers: Iterator[int]) -> Iterator[psutil.Process]:
    """Those that are there."""
    for number in numbers:
        if psutil.pid_exists(number):
            yield psutil.Process(number)


def _written(cache: Path) -> Iterator[Path]:
    """The packages that were compiled by the end."""
    return cache.rglob("*.kernels")

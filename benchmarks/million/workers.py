"""Worker processes with an instant engine, and what they use while they work."""

import asyncio
import contextlib
import ctypes
import logging
import multiprocessing
import os
import socket
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import NamedTuple

from evaluation.stand_in import StandInEngine
from worker.process import run_worker
from worker.progress import WorkerReport
from worker.settings import WorkerSettings


class Usage(NamedTuple):
    """Resources that a worker uses now; *series* are its metrics' lines."""

    rss_mb: float
    descriptors: int
    threads: int
    series: int
    cpu_seconds: float


@dataclass(frozen=True)
class Workers:
    """Running worker processes."""

    _processes: list[SpawnProcess]
    _ports: list[int]
    _ended: ctypes.Array[ctypes.c_longlong]
    _reports: SimpleQueue[WorkerReport]

    @property
    def ended_jobs(self) -> int:
        return sum(self._ended)

    @property
    def are_running(self) -> bool:
        return any(each.is_alive() for each in self._processes)

    def usage(self) -> list[Usage]:
        """Resources of each worker; empty once one has ended."""
        try:
            return [
                _usage(each.pid, port)
                for each, port in zip(self._processes, self._ports, strict=True)
            ]
        except OSError:
            return []

    def stop(self) -> None:
        """Lets them finish what they have begun."""
        for each in self._processes:
            each.terminate()

    def reports(self) -> list[WorkerReport]:
        """Resources of workers that have ended; raises RuntimeError if one failed."""
        for each in self._processes:
            each.join()
            if each.exitcode:
                raise RuntimeError(f"a worker ended with exit code {each.exitcode}")
        return [self._reports.get() for _ in self._processes]


@contextlib.contextmanager
def running(storage: str, count: int) -> Iterator[Workers]:
    """Workers that end when the queue is empty."""
    context = multiprocessing.get_context("spawn")
    ended = context.RawArray("q", count)
    reports: SimpleQueue[WorkerReport] = context.SimpleQueue()
    ports = _free_ports(count)
    processes = [
        context.Process(target=_work, args=(storage, number, port, ended, reports))
        for number, port in enumerate(ports)
    ]
    for each in processes:
        each.start()
    try:
        yield Workers(processes, ports, ended, reports)
    finally:
        for each in processes:
            each.kill()


def _work(
    storage: str,
    number: int,
    port: int,
    ended: ctypes.Array[ctypes.c_longlong],
    reports: SimpleQueue[WorkerReport],
) -> None:
    logging.getLogger().setLevel(logging.ERROR)
    settings = WorkerSettings(
        storage=storage,
        model=Path("stand-in"),
        name=f"worker-{number}",
        host="127.0.0.1",
        port=port,
        until_empty=True,
    )

    def settled(_outcome: object) -> None:
        ended[number] += 1

    load: Callable[[], StandInEngine] = lambda: StandInEngine(capacity=32)  # noqa: E731
    reports.put(asyncio.run(run_worker(settings, load=load, on_settled=settled)))


def _usage(process: int | None, port: int) -> Usage:
    folder = Path(f"/proc/{process}")
    status = dict(
        line.split(":", 1)
        for line in (folder / "status").read_text().splitlines()
        if ":" in line
    )
    times = (folder / "stat").read_text().rpartition(")")[2].split()
    with urllib.request.urlopen(
        f"http://127.0.0.1:{port}/metrics", timeout=10
    ) as reply:
        lines = reply.read().decode().splitlines()
    return Usage(
        int(status["VmRSS"].split()[0]) / 1024,
        len(list((folder / "fd").iterdir())),
        int(status["Threads"]),
        sum(not line.startswith("#") for line in lines),
        (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK"),
    )


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]

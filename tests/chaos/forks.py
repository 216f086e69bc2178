"""Runs commands of the console, each in a fork of a process that has imported it already.

The imports take half a second of processor time, and seven with torch. A fork has its own
arguments, variables, folder and output, takes signals, and ends as any process does.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from imagefleet.storage.settings import StorageSettings

#: A prelude: the libraries of a command on Azure, which take as long to import as the console.
#: Not for tests that set SSL_CERT_FILE, which aiohttp reads as it is imported.
AZURE = "import imagefleet.storage.azure.storage"

#: Between two looks at a process.
PAUSE_SECONDS = 0.01


class Output:
    """What a process prints into a file, for which `subprocess.Popen` has a pipe."""

    def __init__(self, path: Path, is_over: Callable[[], bool]) -> None:
        self._path = path
        self._is_over = is_over
        self._read = 0

    def readline(self) -> str:
        """Waits for the next line; empty at the end."""
        while True:
            is_over = self._is_over()
            line, newline, _ = self._left().partition("\n")
            if newline or is_over:
                self._read += len(line + newline)
                return line + newline
            time.sleep(PAUSE_SECONDS)

    def read(self) -> str:
        text = self._left()
        self._read += len(text)
        return text

    def _left(self) -> str:
        return self._path.read_text()[self._read :]


class Fork:
    """A command that runs; its methods are those of `subprocess.Popen`."""

    def __init__(
        self, forks: Forks, arguments: tuple[str, ...], pid: int, output: Path
    ) -> None:
        self.args = arguments
        self.returncode: int | None = None
        self.stdout = Output(output, lambda: self.poll() is not None)
        self._forks = forks
        self._pid = pid
        self._lock = threading.Lock()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self._pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                self.returncode = self._forks.ask("poll", self._pid)
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(PAUSE_SECONDS)
        return code

    def communicate(self, timeout: float = math.inf) -> tuple[str, None]:
        self.wait(timeout)
        return self.stdout.read(), None


class Forks:
    """The other end of a server; *folder* is for what the commands print."""

    def __init__(self, requests: IO[str], answers: IO[str], folder: Path) -> None:
        self._requests = requests
        self._answers = answers
        self._folder = folder
        self._started = 0
        self._lock = threading.Lock()

    def ask(self, *request: Any) -> Any:
        with self._lock:
            print(json.dumps(request), file=self._requests, flush=True)
            return json.loads(self._answers.readline())

    def start(
        self,
        *arguments: str,
        cwd: Path,
        variables: Mapping[str, str],
        output: Path | None = None,
        errors: Path | None = None,
        program: str = "",
    ) -> Fork:
        """Starts `imagefleet ARGUMENTS`, or a *program* in Python.

        The errors are among the output by default.
        """
        self._started += 1
        output = output or self._folder / f"output-{self._started}"
        errors = errors or output
        for path in (output, errors):
            path.touch()
        where = [str(output), str(errors)]
        pid = self.ask("start", arguments, str(cwd), dict(variables), where, program)
        return Fork(self, arguments, pid, output)

    @contextlib.contextmanager
    def ending(self) -> Iterator[Callable[..., Fork]]:
        """Gives `start`; what it started and still runs at the end of the block is killed."""
        started: list[Fork] = []

        def start(*arguments: str, **given: Any) -> Fork:
            started.append(self.start(*arguments, **given))
            return started[-1]

        yield start
        for fork in started:
            fork.kill()
            fork.wait()

    def run(
        self,
        *arguments: str,
        cwd: Path,
        variables: Mapping[str, str],
        program: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Runs `imagefleet ARGUMENTS`, or a *program* in Python, to its end."""
        errors = self._folder / "errors"
        errors.write_text("")
        fork = self.start(
            *arguments, cwd=cwd, variables=variables, errors=errors, program=program
        )
        printed, _ = fork.communicate()
        return subprocess.CompletedProcess(
            arguments, fork.wait(), printed, errors.read_text()
        )


def environment(settings: StorageSettings) -> dict[str, str]:
    """The environment of a command that has the storage of *settings*."""
    names = ("storage", "queue", "container", "files_container")
    return {
        **{
            name: value
            for name, value in os.environ.items()
            if "IMAGEFLEET" not in name
        },
        **{f"IMAGEFLEET_{name.upper()}": getattr(settings, name) for name in names},
    }


@contextlib.contextmanager
def running(
    python: Path, folder: Path, variables: Mapping[str, str], prelude: str = ""
) -> Iterator[Forks]:
    """A server on that Python, which first runs *prelude*, for all commands."""
    with subprocess.Popen(
        [python, __file__, prelude],
        env={**variables, "PYTHONSAFEPATH": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        yield Forks(server.stdin, server.stdout, folder)
        server.stdin.close()


def _serve() -> str | None:
    """Starts commands and tells how they ended; returns a program in a fork, which runs it."""
    for line in sys.stdin:
        match json.loads(line):
            case ["start", arguments, cwd, variables, output, program]:
                answer = os.fork()
                if not answer:
                    _become(arguments, cwd, variables, output)
                    return program or "entry.main()"
            case ["poll", pid]:
                ended, status = os.waitpid(pid, os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if ended else None
        print(json.dumps(answer), flush=True)
    return None


def _become(
    arguments: list[str], cwd: str, variables: dict[str, str], output: list[str]
) -> None:
    for number, path in enumerate((os.devnull, *output)):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
    sys.stdin = os.fdopen(0)
    sys.argv = ["imagefleet", *arguments]
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)


def _leave() -> None:
    """Ends the process, once Python's threads have ended and all else is done at exit.

    To take apart what was imported, which copies it, takes a fork up to four seconds.
    """
    if _code is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_code)


if __name__ == "__main__":
    _code = None  # Python ends as ever after an error
    atexit.register(_leave)  # the first of all, which is called last
    gc.disable()  # no import leaves garbage that is worth looking for
    # Imported here once, for all forks.
    from fleet import entry, main  # noqa: F401

    for name in main.COMMANDS:
        main.find(name)
    exec(sys.argv[1])
    # What is imported stays: a fork need not look through it, which copies it, nor take it apart.
    gc.freeze()
    gc.enable()
    try:
        if given := _serve():
            exec(given)
        _code = 0
    except SystemExit as left:
        if isinstance(left.code, int | None):
            _code = left.code or 0
        raise

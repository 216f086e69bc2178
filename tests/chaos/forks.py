"""Runs commands of the console, each in a fork of a process that has imported it already.

The imports take half a second of processor time, and seven with torch. A fork has its own
arguments, variables, folder and output, takes signals, and ends as any process does.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any


class Output:
    """What a process prints into a file, for which `subprocess.Popen` has a pipe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def readline(self) -> str:
        """Waits for the next line."""
        while "\n" not in (text := self._left()):
            time.sleep(0.01)
        line = text[: text.index("\n") + 1]
        self._read += len(line)
        return line

    def read(self) -> str:
        text = self._left()
        self._read += len(text)
        return text

    def _left(self) -> str:
        return self._path.read_text()[self._read :]


class Fork:
    """A command that runs; its methods are those of `subprocess.Popen`."""

    def __init__(self, forks: Forks, arguments: tuple[str, ...], pid: int, output: Path) -> None:
        self.args = arguments
        self.returncode: int | None = None
        self.stdout = Output(output)
        self._forks = forks
        self._pid = pid
        self._pidfd = os.pidfd_open(pid)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self._pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            os.close(self._pidfd)
            self.returncode = self._forks.ask("wait", self._pid)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
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

    def ask(self, *request: Any) -> int:
        with self._lock:
            print(json.dumps(request), file=self._requests, flush=True)
            return int(self._answers.readline())

    def start(
        self,
        *arguments: str,
        cwd: Path,
        variables: Mapping[str, str],
        output: Path | None = None,
        errors: Path | None = None,
    ) -> Fork:
        """Starts `imagefleet ARGUMENTS`; its errors are among its output by default."""
        self._started += 1
        output = output or self._folder / f"output-{self._started}"
        output.touch()
        where = [str(output), str(errors or output)]
        pid = self.ask("start", arguments, str(cwd), dict(variables), where)
        return Fork(self, arguments, pid, output)

    def run(
        self, *arguments: str, cwd: Path, variables: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Runs `imagefleet ARGUMENTS` to its end."""
        errors = self._folder / "errors"
        errors.write_text("")
        fork = self.start(*arguments, cwd=cwd, variables=variables, errors=errors)
        printed, _ = fork.communicate()
        return subprocess.CompletedProcess(arguments, fork.wait(), printed, errors.read_text())


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


def _serve() -> bool:
    """Starts commands and waits for them; True in a fork, whose command is to be run."""
    for line in sys.stdin:
        match json.loads(line):
            case ["start", arguments, cwd, variables, output]:
                answer = os.fork()
                if not answer:
                    _become(arguments, cwd, variables, output)
                    return True
            case ["wait", pid]:
                answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(answer, flush=True)
    return False


def _become(arguments: list[str], cwd: str, variables: dict[str, str], output: list[str]) -> None:
    for number, path in enumerate((os.devnull, *output)):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
    sys.stdin = os.fdopen(0)
    sys.argv = ["imagefleet", *arguments]
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)


if __name__ == "__main__":
    from fleet import entry, main  # noqa: F401 - imported here once, for all forks

    exec(sys.argv[1])
    if _serve():
        entry.main()

"""Runs commands of the console, each in a fork of a process that has imported it already.

The imports take half a second of processor time. A fork has its own arguments, variables, folder
and output, and ends as any process does.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO


class Forks:
    """The server's other end."""

    def __init__(self, requests: IO[str], answers: IO[str], folder: Path) -> None:
        self._requests = requests
        self._answers = answers
        self._output, self._errors = folder / "output", folder / "errors"

    def run(
        self, *arguments: str, cwd: Path, variables: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Runs `imagefleet ARGUMENTS` to its end."""
        request = [arguments, str(cwd), dict(variables), str(self._output), str(self._errors)]
        print(json.dumps(request), file=self._requests, flush=True)
        code = int(self._answers.readline())
        texts = (path.read_text() for path in (self._output, self._errors))
        return subprocess.CompletedProcess(arguments, code, *texts)


@contextlib.contextmanager
def running(python: Path, folder: Path, variables: Mapping[str, str]) -> Iterator[Forks]:
    """A server on that Python, whose own files are in *folder*."""
    with subprocess.Popen(
        [python, __file__],
        cwd=folder,
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
    """Answers requests with exit codes; True in a fork, whose command is to be run."""
    for line in sys.stdin:
        arguments, cwd, variables, *output = json.loads(line)
        child = os.fork()
        if not child:
            for number, path in enumerate((os.devnull, *output)):
                os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
            sys.stdin = os.fdopen(0)
            sys.argv = ["imagefleet", *arguments]
            os.chdir(cwd)
            os.environ.clear()
            os.environ.update(variables)
            return True
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return False


if __name__ == "__main__":
    from fleet import entry, main  # noqa: F401 - imported here once, for all forks

    if _serve():
        entry.main()

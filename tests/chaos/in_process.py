"""Fixtures that run the console command in the test's process, or in a fork of one."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest
import typer

from cli import console
from fleet import main
from forks import AZURE, Fork, Forks, running

Imagefleet = Callable[..., "subprocess.CompletedProcess[str]"]
AsyncImagefleet = Callable[..., Awaitable["subprocess.CompletedProcess[str]"]]


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """A service takes over the log and the hooks for what nothing handles."""
    handlers = logging.root.handlers[:]
    level = logging.root.level
    hooks = sys.excepthook, sys.unraisablehook, threading.excepthook
    yield
    logging.root.handlers[:] = handlers
    logging.root.level = level
    sys.excepthook, sys.unraisablehook, threading.excepthook = hooks
    logging.captureWarnings(capture=False)


@pytest.fixture(scope="session")
def built() -> Any:
    """All commands, which typer would build anew for each call."""
    return typer.main.get_command(main.app)


@pytest.fixture
def in_process(
    built: Any,
    tmp_path,
    monkeypatch,
    capsys,
) -> Imagefleet:
    """As `imagefleet`, but faster: in the test's process."""
    monkeypatch.setattr(main, "app", built)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["imagefleet", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.main()
        return subprocess.CompletedProcess(
            arguments, int(ended.value.code or 0), *capsys.readouterr()
        )

    return run


def assert_refused(ended: "subprocess.CompletedProcess[Any]", *sentences: str) -> None:
    """A command ended with exit code 2, and its standard error has the sentences."""
    assert ended.returncode == console.EXIT_OPERATOR_MUST_ACT, ended.stderr
    for sentence in sentences:
        assert sentence in ended.stderr


def told(ended: "subprocess.CompletedProcess[str]") -> Any:
    """The JSON that a command has printed, which ended well."""
    assert ended.returncode == console.EXIT_DONE, ended.stderr
    return json.loads(ended.stdout)


@pytest.fixture(scope="session")
def console_forks(tmp_path_factory) -> Iterator[Forks]:
    variables = {**os.environ, "COLUMNS": "80"}
    folder = tmp_path_factory.mktemp("forks")
    with running(Path(sys.executable), folder, variables, AZURE) as server:
        yield server


class Start(Protocol):
    """Starts `imagefleet ARGUMENTS` in the test's folder; *errors* are kept from the output."""

    def __call__(self, *arguments: str, errors: Path | None = None) -> Fork: ...


@pytest.fixture
def start(tmp_path, console_forks: Forks) -> Iterator[Start]:
    """Starts commands; what still runs at the end is killed."""
    with console_forks.ending() as start:
        yield partial(start, cwd=tmp_path, variables=os.environ)

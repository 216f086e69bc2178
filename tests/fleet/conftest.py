"""The console command, run as an operator runs it: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet import cli

COMMAND = Path(sys.executable).with_name("imagefleet")

Imagefleet = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def imagefleet(tmp_path: Path) -> Imagefleet:
    """Runs `imagefleet ARGUMENTS`, with more variables by keyword, in an empty folder."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [COMMAND, *arguments],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "80", **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


@pytest.fixture
def in_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Imagefleet:
    """As `imagefleet`, in the process of the test: for what needs no process of its own."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["imagefleet", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return subprocess.CompletedProcess(
            arguments, int(ended.value.code or 0), *capsys.readouterr()
        )

    return run

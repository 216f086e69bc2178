"""Fixtures that run the console command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet import main

COMMAND = Path(sys.executable).with_name("imagefleet")

#: Must never appear in any output.
SECRET = "sv=2024-11-04&sp=up&sig=aB%2FcD3cReT%3D"

FLEET = """\
name: sd15-batch
organization: acme
project: default
api: {url}
image: registry.example.com/acme/imagefleet@sha256:{digest}
replicas: 750
gpus: [RTX 3060 Ti]
environment:
  IMAGEFLEET_STORAGE: https://acmeimages.blob.core.windows.net
  IMAGEFLEET_SAS: {{env: SAS}}
"""

Imagefleet = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def imagefleet(tmp_path: Path) -> Imagefleet:
    """Runs `imagefleet ARGUMENTS` in a new process and an empty folder; keywords set variables."""

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
    """As `imagefleet`, but faster: in the test's process."""

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


@pytest.fixture
def salad(salad_module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A fake SaladCloud, and a `fleet.yaml` for it in the test's folder."""
    from fleet.salad import client, deployment

    monkeypatch.setattr(deployment, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(client, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setenv("SALAD_API_KEY", salad_module.KEY)
    monkeypatch.setenv("SAS", json.dumps({"queue": SECRET}))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    fake = salad_module.SaladFake()
    with salad_module.serving(fake):
        (tmp_path / "fleet.yaml").write_text(FLEET.format(url=fake.url, digest="5" * 64))
        yield fake
    assert not fake.violations

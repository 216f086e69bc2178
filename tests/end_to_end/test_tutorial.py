"""The first tutorial: its own commands, as a newcomer pastes them, from an empty folder."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial.md"

IMAGES = {"house", "star", "fish", "bird", "rocket"}

Run = Callable[[str], str]


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, Any]:
    """Where the tutorial begins: beside a checkout, with the command on the path."""
    (tmp_path / "imagefleet").symlink_to(ROOT)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    hidden = {"DISPLAY", "WAYLAND_DISPLAY"}  # no browser opens
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"PATH": path, "HOME": str(tmp_path / "home"), "COLUMNS": "200"}
    return {"cwd": tmp_path, "env": environment, "text": True, "stdin": subprocess.DEVNULL}


def blocks() -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)


@contextlib.contextmanager
def gallery(block: str, shell: dict[str, Any]) -> Iterator[str]:
    """The command in a terminal of its own; yields the page's address."""
    command = f"exec {block.strip()} --port 0"  # another test may use the default's
    with subprocess.Popen(
        ["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **shell
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert (url := re.search(r"http://\S+/", line)), line + process.stdout.read()
            yield url[0]
            process.send_signal(signal.SIGINT)
            assert process.wait(20) in {0, 130}
        finally:
            process.kill()


def shown_in(url: str) -> list[dict[str, Any]]:
    """The images that the gallery's page gets."""
    state = "campaign=spring&tab=images"
    with urllib.request.urlopen(f"{url}api/rows?{state}&from=0&count=100") as answer:
        rows: list[dict[str, Any]] = json.load(answer)["rows"]
    return rows


@pytest.mark.timeout(300)  # a real engine on a CPU
def test_the_first_tutorial_leads_from_an_empty_folder_to_a_data_set(
    shell: dict[str, Any], tmp_path: Path
) -> None:
    printed: dict[str, str] = {}
    with contextlib.ExitStack() as terminals:
        url = ""
        for block in blocks():
            if block.startswith("imagefleet gallery "):
                url = terminals.enter_context(gallery(block, shell))
                continue
            result = subprocess.run(
                ["bash", "-e", "-c", block + "pwd > ../cwd"],
                **shell,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=200,
                check=False,
            )
            assert result.returncode == 0, block + result.stdout
            printed[block.splitlines()[-1]] = result.stdout
            shell["cwd"] = Path((shell["cwd"] / ".." / "cwd").read_text().strip())

    assert shell["cwd"] == tmp_path / "spring"

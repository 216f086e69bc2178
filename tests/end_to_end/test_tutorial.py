"""The first tutorial: its own commands, as a newcomer pastes them, from an empty folder."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import polling
from imagefleet.validation import JSONDict

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial.md"

_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)

IMAGES = {"house", "star", "fish", "bird", "rocket"}


@pytest.fixture
def shell(tmp_path) -> JSONDict:
    """Where the tutorial begins: beside a checkout, with the command on the path."""
    (tmp_path / "imagefleet").symlink_to(ROOT)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    hidden = {"DISPLAY", "WAYLAND_DISPLAY"}  # no browser opens
    environment = {
        name: value for name, value in os.environ.items() if name not in hidden
    }
    environment |= {"PATH": path, "HOME": str(tmp_path / "home"), "COLUMNS": "200"}
    return {
        "cwd": tmp_path,
        "env": environment,
        "text": True,
        "stdin": subprocess.DEVNULL,
    }


def blocks() -> list[str]:
    return _BLOCK.findall(PAGE.read_text())


@contextlib.contextmanager
def gallery(block: str, shell: JSONDict) -> Iterator[str]:
    """The command in a terminal of its own; yields the page's address."""
    command = f"exec {block.strip()} --port 0"  # another test may use the default's
    with subprocess.Popen(
        ["bash", "-c", command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **shell,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            url = re.search(r"http://\S+/", line)
            assert url, line
            yield url[0]
            process.send_signal(signal.SIGINT)
            assert process.wait() in {0, 130}
        finally:
            process.kill()


def shown_on(url: str) -> tuple[set[str], Any]:
    """The jobs whose images the gallery's page gets within some time, and its last answer."""
    chosen = "campaign=spring&tab=images"

    def look() -> Any:
        page = None
        # Asked for rows alone, it shows those that were there when it was asked first.
        for ask in (f"api/state?{chosen}", f"api/rows?{chosen}&from=0&count=100"):
            with urllib.request.urlopen(url + ask) as answer:
                page = json.load(answer)
        return page

    def jobs(page: Any) -> set[str]:
        return {job for _, job, *_ in page["rows"]}

    page = polling.until_in_thread(look, lambda page: jobs(page) == IMAGES)
    return jobs(page), page


def test_the_first_tutorial_leads_from_an_empty_folder_to_a_data_set(
    shell: JSONDict, tmp_path
):
    printed: dict[str, str] = {}
    with contextlib.ExitStack() as terminals:
        for block in blocks():
            if block.startswith("imagefleet gallery "):
                url = terminals.enter_context(gallery(block, shell))
                continue
            result = subprocess.run(
                ["bash", "-e", "-c", f"{block}\npwd > '{tmp_path}/cwd'"],
                **shell,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
            )
            assert result.returncode == 0, block + result.stdout
            shell["cwd"] = Path((tmp_path / "cwd").read_text().strip())
            printed[" ".join(block.split())] = result.stdout
        shown, page = shown_on(url)
        assert shown == IMAGES, page

    folder = tmp_path / "spring"
    assert shell["cwd"] == folder
    table = printed["imagefleet results spring"]
    assert all(job in table for job in IMAGES), table
    assert "no LoRA no-such-style" in table, table
    assert {path.stem for path in (folder / "pictures").iterdir()} == IMAGES
    for path in (folder / "pictures").iterdir():
        with Image.open(path) as image:
            assert image.size == (128, 128)
    with tarfile.open(folder / "shards" / "00000.tar") as shard:
        prompts = {
            file.read().decode()
            for name in shard.getnames()
            if name.endswith(".txt") and (file := shard.extractfile(name))
        }
    assert len(prompts) == len(IMAGES)
    assert "a red house in a meadow" in prompts
    assert (folder / "shards" / "manifest.json").is_file()

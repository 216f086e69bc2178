"""The demo as a user runs it: a separate process whose output is read."""

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import forks
import polling
from fleet.demo import command as contact_sheet
from imagefleet.files import demo as demo_files
from imagefleet.signing import SigningKey
from pixel import tiny_cascade

pytestmark = pytest.mark.slow

KEYS = [
    "jobs",
    "images",
    "failed",
    "seconds",
    "images_per_second",
    "engine_idle_fraction",
    "dollars",
    "images_per_dollar",
    "contact_sheet",
]


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(worker_forks: forks.Forks, tmp_path) -> Run:
    """Runs `imagefleet ARGUMENTS`, or a program in Python, to its end."""

    def run_command(*arguments: str, program: str = "") -> Any:
        return worker_forks.run(
            *arguments, cwd=tmp_path, variables=os.environ, program=program
        )

    return run_command


def interrupt_a_demo(demo: forks.Fork, cwd: Path) -> str:
    """Presses Ctrl-C once it works on its jobs; returns what it printed."""
    log = cwd / "demo-output" / "worker.log"
    polling.until_in_thread(
        lambda: (
            demo.poll() is not None or (log.exists() and "pulling" in log.read_text())
        )
    )
    demo.send_signal(signal.SIGINT)
    return demo.communicate()[0]


def test_the_demo_runs_end_to_end_and_starts_anew_after_ctrl_c(
    tmp_path, monkeypatch, worker_forks: forks.Forks, run: Run
):
    # The fleet's own: the demo's jobs are not signed, and are of another model.
    key = SigningKey.create(tmp_path / "key.pem")
    monkeypatch.setenv("IMAGEFLEET_TRUSTED_KEY", key.public)
    monkeypatch.setenv("IMAGEFLEET_ACCELERATOR", "sdxl_lightning_4step_lora")
    demo = worker_forks.start("demo", cwd=tmp_path, variables=os.environ)
    printed = interrupt_a_demo(demo, tmp_path)
    assert demo.returncode == 130, printed
    assert "of 24 jobs" in printed
    assert "Traceback" not in printed

    result = run("demo", "--few-steps", "--json-file", "figures/demo.json")

    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "figures" / "demo.json").read_text())
    assert list(report) == KEYS
    assert (report["jobs"], report["images"], report["failed"]) == (24, 22, 2)
    assert report["images_per_second"] == pytest.approx(22 / report["seconds"])
    assert report["images_per_dollar"] == pytest.approx(22 / report["dollars"])
    assert 0 <= report["engine_idle_fraction"] < 1

    pictures = list((tmp_path / "demo-output" / "storage" / "images").glob("*/*.png"))
    assert len(pictures) == 22
    for picture in pictures:
        with Image.open(picture) as image:
            assert "Steps: 4, Sampler: Euler" in image.info["parameters"]
    assert "demo-output/storage/images" in result.stdout
    with Image.open(tmp_path / report["contact_sheet"]) as sheet:
        assert sheet.width > 1000

    command, *shown = shlex.split(result.stdout.splitlines()[-1])
    assert command == "imagefleet"
    failed = run(*shown, "--json")
    assert failed.returncode == 0, failed.stderr
    assert "stepz" in failed.stdout
    assert "no-such-style" in failed.stdout


def test_the_cascades_demo_draws_and_shows_both_stages(tmp_path, run: Run):
    for name in ("base", "sr"):
        tiny_cascade.build(tmp_path / "cascade" / name, name)
    # The weights are random, and so is what they draw, in however many steps.
    jobs = (demo_files.CASCADE / "demo_jobs.jsonl").read_text()
    few = jobs.replace('"steps": 30', '"steps": 4').replace('"steps": 20', '"steps": 3')
    (tmp_path / "cascade" / "demo_jobs.jsonl").write_text(few)
    program = """
import pathlib
from imagefleet.files import demo
demo.CASCADE = pathlib.Path("cascade")
entry.main()
"""
    result = run("demo", "--cascade", "--json-file", "demo.json", program=program)

    assert result.returncode == 0, result.stderr
    assert "failed jobs" not in result.stdout
    report = json.loads((tmp_path / "demo.json").read_text())
    count = len(jobs.splitlines())
    assert (report["jobs"], report["images"], report["failed"]) == (count, 2 * count, 0)
    folder = tmp_path / "demo-output" / "storage" / "images" / "demo-cascade"
    assert len(list(folder.iterdir())) == 2 * count
    with (
        Image.open(tmp_path / report["contact_sheet"]) as sheet,
        Image.open(folder / "01.png") as small,
        Image.open(folder / "01~s2.png") as large,
    ):
        assert (small.size, large.size) == ((16, 16), (32, 32))
        for left, name in ((12, "01.png"), (12 + 188, "01~s2.png")):
            shown = sheet.crop((left, 12, left + 176, 12 + 176))
            tile = contact_sheet.read_tile((folder / name).read_bytes())
            assert shown.tobytes() == tile.tobytes()


def test_few_steps_are_not_of_the_cascade(run: Run):
    result = run("demo", "--cascade", "--few-steps")

    assert result.returncode == 2
    assert result.stderr == "error: give --cascade or --few-steps, not both\n"


def test_without_its_weights_the_cascades_demo_says_so_in_one_line(run: Run):
    program = """
import pathlib
from imagefleet.files import demo
demo.CASCADE = pathlib.Path("nowhere")
entry.main()
"""
    result = run("demo", "--cascade", program=program)

    assert result.returncode == 2
    assert result.stderr == "error: the demo checkpoint 'nowhere/base' does not exist\n"


def test_a_folder_that_is_not_the_demos_is_not_emptied(tmp_path, run: Run):
    precious = tmp_path / "storage" / "precious.txt"
    precious.parent.mkdir()
    precious.write_text("keep me")

    result = run("demo", "--output", ".")

    assert result.returncode == 2
    assert result.stderr == (
        "error: storage exists and is not from a demo: choose another --output\n"
    )
    assert precious.read_text() == "keep me"


@pytest.mark.parametrize(
    "arguments", [["demo"], ["worker", "--model", "model", "--log-format", "text"]]
)
def test_without_torch_one_line_says_what_to_install(
    tmp_path, run: Run, arguments: list[str]
):
    program = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else found(name, *rest)
entry.main()
"""
    result = run(*arguments, program=program)

    assert result.returncode == 2
    assert result.stderr == (
        "error: torch is not installed; to generate images: pip install '.[worker]'\n"
    )
    assert list(tmp_path.iterdir()) == []

"""The wheel: what it installs, and that its commands work away from a checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def run(installed: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from fleet.main import main; main()", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_nothing_is_installed_beside_the_four_packages(installed: Path) -> None:
    names = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert names == {"fleet", "imagefleet", "loadgen", "worker"}


def test_users_type_checkers_find_the_types(installed: Path) -> None:
    assert (installed / "imagefleet" / "py.typed").is_file()


def test_the_modules_come_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    program = "import imagefleet, loadgen; print(imagefleet.__file__, loadgen.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(path.startswith(str(installed)) for path in found.stdout.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ("version",),
        ("prompt", "a ((red)) house <lora:rocket:0.5>"),
        ("plan", "--jobs", "1000", "--gpu", "RTX 4090"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands_work_away_from_the_checkout(
    installed: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    result = run(installed, tmp_path, *arguments)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_the_demo_draws_its_pictures_away_from_the_checkout(
    installed: Path, tmp_path: Path
) -> None:
    result = run(installed, tmp_path, "demo", "--report", "report.json")
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "report.json").read_text())["images"] == 22

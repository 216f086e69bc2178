"""The benchmarks of what is kept, with little to do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks" / "kept" / "verify.py"


def test_an_export_is_made_and_verified_and_other_figures_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load_file: Callable[[Path], Any]
):
    program = load_file(PROGRAM)
    result = tmp_path / "kept.json"
    result.write_text('{"scored_over_plain": 1}')
    monkeypatch.setattr(program, "RESULT", result)
    monkeypatch.setattr("sys.argv", ["verify.py", "--images", "3"])

    program.main()

    found = json.loads(result.read_text())
    assert found["scored_over_plain"] == 1
    assert found["verified"]["images"] == 3
    assert found["verified_per_second"] > 0


def test_a_real_run_keeps_the_same_images_for_fewer_writes_and_bytes(figures_of):
    found = figures_of("kept.judged", "--jobs", "60")
    run = found["kept_run"]
    assert run["kept"] == 3
    writes = run["operations"]["blob_writes"]
    assert writes < run["operations_stored_first"]["blob_writes"] - 50
    assert run["bytes"] < run["bytes_stored_first"] / 10
    assert found["kept_per_dollar_over_stored"] > 4


def test_the_curve_of_eight_scales_is_drawn_and_scored_with_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load_file: Callable[[Path], Any]
):
    program = load_file(PROGRAM.parents[1] / "scoring" / "fid_clip.py")
    figures = tmp_path / "figures.json"
    picture = tmp_path / "curve.svg"
    arguments = ["--folder", str(tmp_path / "curve"), "--captions", "4", "--steps", "2"]
    arguments += ["--device", "cpu", "--out", str(figures), "--picture", str(picture)]
    monkeypatch.setattr("sys.argv", ["fid_clip.py", *arguments])

    program.main()

    groups = json.loads(figures.read_text())["groups"]
    assert [group["cfg_scale"] for group in groups] == [1, 2, 3, 4, 5, 7, 9, 12]
    assert all(len(group["fid_interval"]) == 2 for group in groups)
    assert "<svg" in picture.read_text()

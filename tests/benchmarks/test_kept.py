"""The benchmarks of what is kept, with little to do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "kept" / "verify.py"


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

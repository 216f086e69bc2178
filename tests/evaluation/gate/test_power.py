"""The damage that the gate's documents promise to see, by the program behind their table."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[3] / "benchmarks/scoring/gate.py"

pytestmark = pytest.mark.slow


def test_one_broken_picture_and_a_shift_of_all_fail_and_untouched_redraws_pass():
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), "--json", "--count", "50", "--trials", "5"],
        check=False, capture_output=True, text=True,
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    seen = {
        (row["damage"], row["pictures"]): row["seen"]
        for row in json.loads(ended.stdout)
    }
    assert seen["nothing", 0] == 0
    for single in (
        "wholly grey",
        "another job's picture",
        "noise in 1/16 of it",
        "in grey tones",
        "red and blue swapped",
        "hue turned by 20 of 256",
        "brighter by 20 of 255",
    ):
        assert seen[single, 1] == 5
    for shared in ("blurred by 1/2 pixel", "brighter by 6 of 255", "moved by 1 pixel"):
        assert seen[shared, 50] == 1

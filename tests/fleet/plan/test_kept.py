"""`plan --kept`: a kept image that is judged while it is drawn, and one that is stored first."""

import json

import pytest

from in_process import Imagefleet, told

FEW_STEPS = {"prompt": "a cat", "steps": 4, "cfg_scale": 1}


@pytest.mark.parametrize(("bundle", "least"), [("1", 4), ("32", 3)])
def test_of_few_step_images_of_which_few_are_kept_a_dollar_buys_several_times_as_many(
    in_process: Imagefleet, tmp_path, bundle: str, least: float
):
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text(f"{json.dumps(FEW_STEPS)}\n" * 2000)
    kept = ("--kept", "0.05", "--start-up-seconds", "0", "--bundle", bundle)
    result = in_process("plan", str(jobs), *kept, "--json")
    found = told(result)["kept"]
    assert found["images"] == 100
    assert found["images_per_dollar"] == pytest.approx(100 / found["dollars"])
    ratio = found["images_per_dollar"] / found["stored_first_images_per_dollar"]
    assert least < ratio < 6
    shown = in_process("plan", str(jobs), *kept)
    assert "kept images per dollar" in shown.stdout

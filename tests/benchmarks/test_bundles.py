"""What bundles save, against single jobs in the same run."""

import pytest


@pytest.mark.slow
def test_bundles_take_a_third_of_the_operations_of_single_jobs(figures_of):
    found = figures_of("bundles.measure", "--jobs", "96")
    single, bundled = (
        found[f"dollars_per_million_operations{kind}"] for kind in ("_single", "")
    )
    assert bundled < single / 3
    assert found["bundled"]["jobs_per_message"] == 32


@pytest.mark.slow
def test_few_step_jobs_in_bundles_are_drawn_by_a_whole_worker(figures_of):
    found = figures_of("bundles.measure", "--gpu", "--tiny", "--bundle", "4")
    rows = found["gpu_rows"]
    assert not [row for row in rows.values() if "error" in row]
    assert found["lora_over_no_lora_4_steps"] > 0
    assert rows["four_steps"]["images"] >= 4

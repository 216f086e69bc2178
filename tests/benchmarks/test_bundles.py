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

import json
from pathlib import Path
from typing import get_args

import pytest

from imagefleet import errors
from imagefleet.pricing import prices


@pytest.mark.parametrize(
    "name", ["RTX 3060 Ti 8GB", "RTX 3060 Ti", "rtx3060ti", "3060 ti"]
)
def test_a_card_is_found_by_the_names_people_write(name: str):
    assert prices.find_gpu(name) == "RTX 3060 Ti 8GB"


def test_a_name_with_two_memory_sizes_is_ambiguous():
    with pytest.raises(errors.SetupError, match="RTX 3060 8GB, RTX 3060 12GB"):
        prices.find_gpu("RTX 3060")
    assert prices.find_gpu("3060 12GB") == "RTX 3060 12GB"


def test_a_typo_gets_a_suggestion():
    with pytest.raises(errors.SetupError, match=r"did you mean .*RTX 4090 24GB"):
        prices.find_gpu("RTX 4090 24G")


def test_each_priority_has_its_price():
    hourly = [
        prices.gpu_dollars_per_hour("RTX 4090", each)
        for each in get_args(prices.Priority)
    ]

    assert hourly == [0.33, 0.273, 0.217, 0.16]


def test_storage_costs_three_queue_operations_a_job_and_a_write_an_image():
    def dollars(jobs: int, images: int) -> float:
        return prices.BUILT_IN.storage.dollars(prices.operations(jobs, images))

    # 10,000 writes at $0.055 and 3 x 10,000 operations at $0.01 for 200,000.
    assert dollars(10_000, 10_000) == pytest.approx(0.055 + 0.0015)
    assert dollars(10_000, 40_000) == pytest.approx(0.220 + 0.0015)


def test_the_figures_of_a_warm_up_are_those_that_were_measured():
    path = Path(__file__).parents[3] / "benchmarks/results/first-minute-h200.json"
    measured = json.loads(path.read_text())
    for case, suffix in (("fetched_kernels", ""), ("like_jobs", "_cold")):
        warm_up = prices.WARM_UPS[case]
        for name, figure in (
            (f"first_picture_seconds{suffix}", warm_up.first_image_seconds),
            (f"ready_seconds{suffix}", warm_up.full_speed_seconds),
            ("beside_compiler", warm_up.speed),
        ):
            if measured[name] is not None:
                assert figure == pytest.approx(measured[name], rel=0.02), name

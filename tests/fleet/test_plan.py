from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

from fleet import plan
from jobs import prices

Imagefleet = Callable[..., "subprocess.CompletedProcess[str]"]  # the fixture of conftest.py


def test_a_plan_worked_by_hand() -> None:
    # 36,000 images at 2 a second: 18,000 s, so 5 replica hours; 1 h on 5 replicas, $0.50 at $0.10.
    # 36,000 writes at $0.0000055 are $0.198; 3 x 9,000 operations at $0.00000005 are $0.00135.
    found = plan.make_plan(
        jobs=9_000, images=36_000, images_per_second=2, dollars_per_hour=0.1, replicas=5
    )

    assert found.hours == pytest.approx(1)
    assert found.gpu_dollars == pytest.approx(0.5)
    assert found.storage_dollars == pytest.approx(0.19935)
    assert found.dollars == pytest.approx(0.69935)
    assert found.images_per_dollar_gpu_only == pytest.approx(72_000)
    assert found.images_per_dollar == pytest.approx(36_000 / 0.69935)


def test_more_replicas_take_less_time_and_no_more_money() -> None:
    one = plan.make_plan(10, 10, 1, 0.1, replicas=1)
    ten = plan.make_plan(10, 10, 1, 0.1, replicas=10)

    assert ten.hours == pytest.approx(one.hours / 10)
    assert ten.dollars == pytest.approx(one.dollars)


def test_the_reference_run_in_numbers() -> None:
    # 750 replicas made 9,274,913 images in 24 hours for $1,872: 4,954 images a dollar.
    speed = 9_274_913 / (750 * 24 * 3600)
    found = plan.make_plan(9_274_913, 9_274_913, speed, 0.104, replicas=750)

    assert found.hours == pytest.approx(24)
    assert found.gpu_dollars == pytest.approx(1872)
    assert found.images_per_dollar_gpu_only == pytest.approx(4954, rel=1e-3)


@pytest.mark.parametrize(
    ("images", "hours", "replicas"), [(7200, 1, 1), (7201, 1, 2), (7200, 0.5, 2), (1, 24, 1)]
)
def test_a_deadline_needs_the_fewest_replicas_that_meet_it(
    images: int, hours: float, replicas: int
) -> None:
    assert plan.replicas_for(images, images_per_second=2, deadline_hours=hours) == replicas


def test_every_assumed_speed_is_of_a_card_with_a_price() -> None:
    for gpu in plan.ASSUMED_IMAGES_PER_SECOND:
        assert prices.find_gpu(gpu) == gpu


def test_what_was_given_and_what_was_assumed_is_told_apart(imagefleet: Imagefleet) -> None:
    result = imagefleet("plan", "--jobs", "1000", "--images-per-second", "2", "--json")

    inputs = json.loads(result.stdout)["inputs"]
    assert inputs["images_per_second"] == {"value": 2.0, "source": "given"}
    assert inputs["dollars_per_hour"]["value"] == 0.03
    assert "2025-09-22" in inputs["dollars_per_hour"]["source"]


def test_a_price_and_a_speed_of_ones_own_need_no_known_card(imagefleet: Imagefleet) -> None:
    result = imagefleet(
        *("plan", "--jobs", "7200", "--gpu", "mine", "--json"),
        *("--images-per-second", "1", "--price-per-hour", "1"),
    )

    assert json.loads(result.stdout)["gpu_dollars"] == pytest.approx(2)


def test_a_deadline_is_answered_in_replicas(imagefleet: Imagefleet) -> None:
    result = imagefleet("plan", "--jobs", "1000000", "--gpu", "4090", "--deadline-hours", "24")

    assert result.returncode == 0, result.stderr
    # 3.75 a second makes 324,000 a day: four cards.
    assert "replicas 4" in " ".join(result.stdout.split())
    assert "assumed" in result.stdout


def test_replicas_and_a_deadline_at_once_are_refused(imagefleet: Imagefleet) -> None:
    result = imagefleet("plan", "--jobs", "1", "--replicas", "1", "--deadline-hours", "1")

    assert result.returncode == 2
    assert result.stderr == "error: give --replicas or --deadline-hours; one follows the other\n"


def test_a_card_without_a_known_speed_asks_for_one(imagefleet: Imagefleet) -> None:
    result = imagefleet("plan", "--jobs", "1", "--gpu", "RTX A5000")

    assert result.returncode == 2
    assert "give --images-per-second" in result.stderr

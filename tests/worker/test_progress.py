"""A worker's figures, from counts alone."""

import math

import pytest

from worker.progress import (
    Counts,
    Phase,
    Progress,
    ProgressMeter,
    WorkerReport,
)


def counts(jobs: int = 0, in_flight: int = 0, dollars: float | None = None) -> Counts:
    return Counts(
        images=2 * jobs, ended_jobs=jobs, jobs_in_flight=in_flight, dollars=dollars
    )


def read(
    meter: ProgressMeter,
    now: float,
    counted: Counts,
    phase: Phase = "generating",
    why: str | None = None,
) -> Progress:
    return meter.read(now, now, phase, counted, why)


def test_the_rate_is_that_of_the_last_minute():
    meter = ProgressMeter()
    for second in range(301):
        # A job a second, two images each; five jobs a second in the last half minute.
        progress = read(meter, second, counts(second + max(0, 4 * (second - 270))))

    assert progress.images_per_second == pytest.approx(2 * (60 + 4 * 30) / 60)


def test_samples_are_kept_for_a_minute_only():
    meter = ProgressMeter()
    for second in range(1000):
        read(meter, second, counts(second))

    assert len(meter._samples) <= 62


def test_there_is_no_rate_before_the_first_image():
    meter = ProgressMeter()
    read(meter, 0, counts(), "loading the model")

    assert read(meter, 90, counts()).images_per_second is None
    assert read(meter, 100, counts(5)).images_per_second == pytest.approx(10 / 100)


def test_time_for_loading_does_not_count_for_the_rate():
    meter = ProgressMeter()
    for second in range(50):
        read(meter, second, counts(), "loading the model")

    assert read(meter, 54, counts(5)).images_per_second == pytest.approx(10 / 5)


def test_what_this_worker_has_ended_is_taken_off_the_measured_depth():
    meter = ProgressMeter()
    meter.measured(0, 100, counts(7))

    assert read(meter, 10, counts(27, in_flight=4)).jobs_left == 80
    # Jobs that arrived since the measurement.
    assert read(meter, 20, counts(106, in_flight=4)).jobs_left == 4
    meter.measured(60, 500, counts(106))
    assert read(meter, 61, counts(107)).jobs_left == 499


def test_the_time_left_is_this_workers_own_until_the_queue_is_measured_again():
    meter = ProgressMeter()
    meter.measured(0, 1000, counts())
    read(meter, 0, counts())

    alone = read(meter, 50, counts(50, in_flight=4))
    meter.measured(60, 700, counts(60))  # others work as well: five jobs a second
    together = read(meter, 61, counts(61, in_flight=4))

    assert (alone.jobs_left, alone.is_own_pace) == (950, True)
    assert alone.seconds_left == pytest.approx(950)
    assert (together.jobs_left, together.is_own_pace) == (699, False)
    assert together.seconds_left == pytest.approx(699 / 5)
    assert alone.figures[-1] == "~15.8 min to go"
    assert together.figures[-1] == "2.3 min to go"


def test_a_queue_that_grows_has_no_time_left():
    meter = ProgressMeter()
    meter.measured(0, 1000, counts())
    meter.measured(60, 1100, counts(60))
    read(meter, 0, counts())

    assert read(meter, 61, counts(61)).seconds_left is None


def test_for_how_long_the_queue_lasts_is_unknown_until_it_is_measured_twice():
    meter = ProgressMeter()
    assert meter.queue_seconds is None
    meter.measured(0, 1000, counts())
    assert meter.queue_seconds is None
    meter.measured(60, 700, counts(60))
    assert meter.queue_seconds == 140
    meter.measured(120, 1100, counts(60))
    assert meter.queue_seconds == math.inf
    meter.measured(180, 0, counts(60))
    assert meter.queue_seconds == 0


def test_without_the_right_to_measure_the_queue_the_other_figures_remain():
    meter = ProgressMeter()
    read(meter, 0, counts())

    progress = read(meter, 10, counts(1_000, in_flight=4, dollars=0.5))

    assert progress.jobs_left is progress.seconds_left is None
    assert progress.images_per_dollar == 4000
    assert progress.figures == [
        "2,000 images",
        "200.00 images/s",
        "4 in flight",
        "4,000 images/$",
    ]


def test_an_unknown_price_is_no_figure():
    progress = read(ProgressMeter(), 10, counts(10))

    assert progress.images_per_dollar is None
    assert not any("$" in figure for figure in progress.figures)


@pytest.mark.parametrize(
    ("phase", "why", "state", "figures"),
    [
        ("loading the model", None, "loading the model", ["75 s"]),
        ("waiting for the operator", None, "waiting for the operator", ["75 s"]),
        (
            "waiting for jobs",
            "the queue is empty",
            "waiting for jobs: the queue is empty",
            ["0 images"],
        ),
        ("waiting for jobs", None, "waiting for jobs", ["0 images"]),
        ("draining", "the queue is empty", "draining, 3 in flight", ["0 images"]),
    ],
)
def test_each_phase_says_what_is_done(
    phase: Phase, why: str | None, state: str, figures: list[str]
):
    progress = ProgressMeter().read(75, 75, phase, Counts(jobs_in_flight=3), why)

    assert progress.state == state
    assert progress.figures == [each.replace("75 s", "1.2 min") for each in figures]


def test_a_report_leaves_the_start_up_out_of_the_rate_but_not_out_of_the_cost():
    report = WorkerReport(
        images=100,
        jobs={"completed": 98, "failed": 3},
        seconds=150,
        start_up_seconds=100,
        engine_busy_seconds=45,
        engine_idle_fraction=0.1,
        gpu_dollars=0.15,
        storage_dollars=0.05,
    )

    assert report.images_per_second == 2
    assert report.images_per_dollar == pytest.approx(500)
    assert report.failed_jobs == 3


def test_cancelled_jobs_are_shown_once_there_are_any():
    meter = ProgressMeter()
    assert not [
        each for each in read(meter, 0, counts(1)).figures if "cancelled" in each
    ]

    many = Counts(images=1, ended_jobs=100_001, cancelled_jobs=100_000)

    assert "100,000 cancelled" in read(meter, 1, many).figures

import dataclasses
import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from fleet.plan import command, estimate, work
from fleet.plan.estimate import Input
from fleet.plan.work import ModelJobs
from imagefleet import errors
from imagefleet.pricing import families, prices
from imagefleet.storage.protocol import Operations
from imagefleet.validation import JSONDict
from in_process import Imagefleet, assert_refused, told


def part(
    images_per_second: float,
    dollars_per_hour: float,
    replicas: int = 1,
    start_up_seconds: float = 0,
) -> estimate.Part:
    numbers = (images_per_second, dollars_per_hour, start_up_seconds)
    return estimate.Part(
        "a card", replicas, *(Input(number, "given", "a test") for number in numbers)
    )


def batch(jobs: int, images: int, *, bundled: int = 0) -> list[ModelJobs]:
    return [ModelJobs(None, families.SD1, jobs, images, 1.0, bundled=bundled)]


@pytest.fixture
def bench_report(tmp_path) -> Callable[..., Path]:
    """Writes a report of `imagefleet bench` with some facts changed."""

    def write(name: str = "bench.json", **changes: Any) -> Path:
        facts = {
            "model": "random SD1.5",
            "width": 512,
            "height": 512,
            "steps": 15,
            "ready_seconds": 90.0,
            "worker_images_per_second": 3.0,
            "hardware": {
                "device": "NVIDIA GeForce RTX 4090",
                "memory_bytes": 25_757_220_864,
            },
            **changes,
        }
        path = tmp_path / name
        path.write_text(json.dumps(facts))
        return path

    return write


def test_a_plan_matches_a_calculation_by_hand():
    # 36,000 images at 2 images/s: 18,000 s, so 5 replica hours; 1 h on 5 replicas, $0.50 at $0.10.
    # 36,000 writes at $0.0000055 are $0.198; 3 x 9,000 operations at $0.00000005 are $0.00135.
    found = estimate.make_plan(batch(9_000, 36_000), [part(2, 0.1, replicas=5)])

    assert found.hours == pytest.approx(1)
    assert found.gpu_dollars == pytest.approx(0.5)
    assert found.storage_dollars == pytest.approx(0.19935)
    assert found.dollars == pytest.approx(0.69935)
    assert found.images_per_dollar_gpu_only == pytest.approx(72_000)
    assert found.images_per_dollar == pytest.approx(36_000 / 0.69935)


def test_a_mix_matches_a_calculation_by_hand():
    # 2 x 3 and 4 x 1 images/s are 10: 36,000 take an hour, at 2 x $0.20/h and 4 x $0.05/h.
    found = estimate.make_plan(
        batch(36_000, 36_000), [part(3, 0.2, replicas=2), part(1, 0.05, replicas=4)]
    )

    assert found.replicas == 6
    assert found.hours == pytest.approx(1)
    assert found.gpu_dollars == pytest.approx(0.6)


def test_start_up_is_billed_and_makes_no_images():
    # 1 image/s: 3,600 images take an hour, plus 600 s of start-up, all billed at $1/h.
    found = estimate.make_plan(batch(1, 3600), [part(1, 1, start_up_seconds=600)])

    assert found.hours == pytest.approx(7 / 6)
    assert found.gpu_dollars == pytest.approx(7 / 6)


def test_the_share_of_cold_time_counts_each_start_and_is_all_of_a_short_batch():
    # An hour, of which the first image takes 35 s; 0.011 of a node's hours end in another start.
    # Until full speed after 900 s, 0.41 of the time is lost.
    hour = estimate.make_plan(batch(1, 3600), [part(1, 1)]).cold["unlike_jobs"]
    seconds = [35, 900, 35 + 0.41 * 865]
    assert hour == pytest.approx([1.011 * each / 3600 for each in seconds])
    assert estimate.make_plan(batch(1, 30), [part(1, 1)]).cold["unlike_jobs"] == [
        1,
        1,
        1,
    ]


def test_the_reference_run_is_reproduced():
    # 750 replicas made 9,274,913 images in 24 hours for $1,872: 4,954 images per dollar.
    speed = 9_274_913 / (750 * 24 * 3600)
    found = estimate.make_plan(
        batch(9_274_913, 9_274_913), [part(speed, 0.104, replicas=750)]
    )

    assert found.hours == pytest.approx(24)
    assert found.gpu_dollars == pytest.approx(1872)
    assert found.images_per_dollar_gpu_only == pytest.approx(4954, rel=1e-3)


@pytest.mark.parametrize(
    ("images", "hours", "replicas"),
    [(7200, 1, 1), (7201, 1, 2), (7200, 0.5, 2), (1, 24, 1)],
)
def test_a_deadline_needs_the_fewest_replicas_that_meet_it(
    images: int, hours: float, replicas: int
):
    (found,) = estimate.mix_for(images, [part(2, 0.1)], deadline_hours=hours)

    assert found.replicas == replicas


def test_a_deadline_keeps_the_proportions_of_the_mix():
    mix = estimate.mix_for(
        1_000_000, [part(4, 0.2), part(1, 0.05, replicas=3)], deadline_hours=1
    )

    assert [each.replicas for each in mix] == [40, 120]
    assert estimate.make_plan(batch(1, 1_000_000), mix).hours <= 1


def test_a_deadline_includes_start_up_and_must_be_longer():
    slow_to_start = part(1, 0.1, start_up_seconds=1800)

    (found,) = estimate.mix_for(3600, [slow_to_start], deadline_hours=1)
    assert found.replicas == 2
    with pytest.raises(errors.SetupError, match="start-up is longer"):
        estimate.mix_for(3600, [slow_to_start], deadline_hours=0.5)


def test_every_gpu_with_an_assumed_speed_has_a_price():
    for gpu in prices.ASSUMED_IMAGES_PER_SECOND:
        assert prices.find_gpu(gpu) == gpu


def test_every_input_has_its_source(in_process: Imagefleet):
    result = in_process("plan", "--jobs", "1000", "--images-per-second", "2", "--json")

    (mine,) = json.loads(result.stdout)["mix"]
    assert mine["gpu"] == "RTX 3060 Ti 8GB"
    assert mine["images_per_second"] == {
        "value": 2.0,
        "kind": "given",
        "source": "--images-per-second",
    }
    assert mine["dollars_per_hour"]["value"] == 0.03
    assert mine["dollars_per_hour"]["kind"] == "listed"
    assert "2025-09-22" in mine["dollars_per_hour"]["source"]

    text = " ".join(in_process("plan", "--jobs", "1000").stdout.split())
    assert "RTX 3060 Ti 8GB: 0.83 images/s: assumed:" in text
    assert "paid before first image / full speed / lost, fetched kernels" in text
    assert "Until full speed, like jobs: assumed: one size, cold, on an H200" in text
    start_up = f"{estimate.ASSUMED_START_UP.value:.3g} s of start-up"
    assert f"RTX 3060 Ti 8GB: {start_up}: assumed: one size, cold" in text
    assert "of that, start-up $0.00" in text
    assert "Another node begins: assumed: SaladCloud's week" in text


def test_with_a_price_and_a_speed_the_gpu_need_not_be_known(
    in_process: Imagefleet,
):
    result = in_process(
        "plan",
        "--jobs",
        "7200",
        "--gpu",
        "mine",
        "--json",
        "--images-per-second",
        "1",
        "--price-per-hour",
        "1",
        "--start-up-seconds",
        "360",
    )

    found = json.loads(result.stdout)
    assert found["gpu_dollars"] == pytest.approx(2.1)
    assert found["start_up_dollars"] == pytest.approx(0.1)
    assert found["mix"][0]["start_up_seconds"]["kind"] == "given"


def test_a_bench_report_gives_speed_start_up_and_gpu(
    bench_report: Callable[..., Path], in_process: Imagefleet
):
    result = in_process(
        "plan", "--jobs", "1000", "--bench", str(bench_report()), "--json"
    )

    (mine,) = json.loads(result.stdout)["mix"]
    assert mine["gpu"] == "RTX 4090 24GB"
    assert mine["images_per_second"]["value"] == 3.0
    assert mine["images_per_second"]["kind"] == "measured"
    assert "512x512, 15 steps" in mine["images_per_second"]["source"]
    assert mine["start_up_seconds"]["value"] == 90
    assert mine["dollars_per_hour"]["value"] == 0.16


@pytest.mark.parametrize("first", ["few", "many"])
def test_of_a_gpus_reports_the_one_of_the_nearest_images_counts(
    first: str, bench_report: Callable[..., Path], in_process: Imagefleet, tmp_path
):
    reports = {
        "few": bench_report("few.json", steps=4, worker_images_per_second=7.0),
        "many": bench_report("many.json"),
    }
    order = [reports.pop(first), *reports.values()]
    given = [f"--bench={path}" for path in order]
    jobs = tmp_path / "jobs.jsonl"
    for steps, speed in ((4, 7.0), (15, 3.0)):
        size = {"width": 512, "height": 512}
        job = {"prompt": "a <lora:style:1>", "steps": steps, **size}
        jobs.write_text(json.dumps(job))
        result = in_process("plan", str(jobs), *given, "--json")
        (mine,) = json.loads(result.stdout)["mix"]
        assert mine["images_per_second"]["value"] == pytest.approx(speed)


def test_few_steps_and_loras_are_planned_as_they_were_measured(
    bench_report: Callable[..., Path], in_process: Imagefleet, tmp_path
):
    results = Path(__file__).parents[3] / "benchmarks" / "results"
    few = json.loads((results / "few-steps-h100.json").read_text())
    h200 = json.loads((results / "engine-h200.json").read_text())
    plain = few["no_lora_images_per_second"]
    mixed = plain * h200["mixed_over_no_lora"]
    bench = bench_report(
        worker_images_per_second=mixed,
        hardware={"device": "NVIDIA H100 80GB HBM3", "memory_bytes": 85_000_000_000},
    )

    def planned(prompts: list[str], **fields: Any) -> float:
        path = tmp_path / "jobs.jsonl"
        jobs = ({"prompt": prompt, "width": 512, "height": 512} for prompt in prompts)
        path.write_text("".join(f"{json.dumps({**job, **fields})}\n" for job in jobs))
        given = ("--bench", str(bench), "--price-per-hour", "1")
        result = in_process("plan", str(path), *given, "--json")
        return float(told(result)["mix"][0]["images_per_second"]["value"])

    none = ["a"] * 50
    one = ["a <lora:one:1>"] * 50
    others = [f"a <lora:style-{number}:1>" for number in range(50)]
    few_steps = {"steps": 4, "cfg_scale": 1}
    assert planned(others, steps=15) == pytest.approx(mixed)
    assert planned(none, steps=15) == pytest.approx(plain, rel=0.03)
    four = few["sd15_4_steps_images_per_second"]
    assert planned(none, **few_steps) == pytest.approx(four, rel=0.02)
    assert planned(one, **few_steps) == pytest.approx(four, rel=0.05)
    with_loras = few["sd15_4_steps_lora_images_per_second"]
    assert planned(others, **few_steps) == pytest.approx(with_loras, rel=0.02)
    sdxl = families.find("sdxl")
    assert sdxl.images_per_second(1, 4, 1) / sdxl.images_per_second(1) == pytest.approx(
        few["sdxl_4_over_20"], rel=0.02
    )


def test_a_mix_uses_the_report_of_each_gpu(
    bench_report: Callable[..., Path], in_process: Imagefleet
):
    arguments = ("plan", "--jobs", "1000", "--bench", str(bench_report()))
    result = in_process(*arguments, "--gpu", "4090=2", "--gpu", "3060 Ti=5", "--json")

    mix = json.loads(result.stdout)["mix"]
    assert [(each["replicas"], each["images_per_second"]["kind"]) for each in mix] == [
        (2, "measured"),
        (5, "assumed"),
    ]
    shown = in_process(*arguments, "--gpu", "4090=2", "--gpu", "3060 Ti=5").stdout
    assert "replicas 7" in " ".join(shown.split())


def test_an_unlisted_gpu_needs_a_report_and_a_price(
    bench_report: Callable[..., Path], in_process: Imagefleet
):
    hardware = {"device": "NVIDIA H200", "memory_bytes": 150_000_000_000}
    arguments = (
        "plan",
        "--jobs",
        "10800",
        "--bench",
        str(bench_report(hardware=hardware)),
    )
    refused = in_process(*arguments)
    result = in_process(*arguments, "--price-per-hour", "4", "--gpu", "H200", "--json")

    assert_refused(refused, "unknown GPU class")
    assert json.loads(result.stdout)["gpu_dollars"] == pytest.approx(4 * 1.025)


@pytest.mark.parametrize(
    "changes",
    [{"worker_images_per_second": "fast"}, {"hardware": None}, {"steps": None}],
)
def test_a_file_that_is_not_a_report_is_refused_by_name(
    changes: JSONDict, bench_report: Callable[..., Path]
):
    path = bench_report(**changes)
    if changes == {"steps": None}:
        path.write_text("done\n")
    with pytest.raises(errors.SetupError, match=r"bench.json is not the JSON of"):
        estimate.read_bench(path, prices.BUILT_IN)


def test_prices_can_come_from_a_file(tmp_path, in_process: Imagefleet):
    path = tmp_path / "prices.yaml"
    path.write_text(
        "source: the portal, today\ngpus: {RTX 4090: {batch: 0.12}}\n"
        "storage: {blob_writes_per_10000: 0.1, queue_operations_per_10000: 0}\n"
    )
    arguments = ("--gpu", "4090", "--price-file", str(path), "--json", "--bundle", "1")
    found = json.loads(in_process("plan", "--jobs", "10000", *arguments).stdout)

    assert found["mix"][0]["dollars_per_hour"]["value"] == 0.12
    assert "the portal, today" in found["mix"][0]["dollars_per_hour"]["source"]
    assert found["storage_dollars"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "RTX A5000"), "give --images-per-second"),
        (("--gpu", "4090=none"), "should be NAME or NAME=COUNT"),
        (("--gpu", "4090=0"), "should be NAME or NAME=COUNT"),
        (
            ("--gpu", "4090", "--gpu", "3080 Ti", "--price-per-hour", "1"),
            "apply to one GPU class",
        ),
        (("--priority", "cheap"), "--priority: 'cheap' is not one of 'high'"),
    ],
)
def test_contradictory_options_are_a_one_line_error(
    arguments: tuple[str, ...], message: str, in_process: Imagefleet
):
    result = in_process("plan", "--jobs", "1", *arguments)

    assert_refused(result, message)
    assert result.stderr.count("\n") == 1


def test_a_bundle_is_a_message_and_a_pack_and_part_of_an_append_of_records():
    # 1,000 jobs in bundles of 32: 32 packs, 40 writes and 96 queue operations; 10 jobs of 4 images
    # by themselves: 40 writes and 30 queue operations.
    works = [*batch(1_000, 1_000, bundled=1_000), *batch(10, 40)]

    found = estimate.make_plan(works, [part(1, 1)], bundle=32)

    assert found.storage_operations == Operations(queue=126, blob_writes=80)
    alone = estimate.make_plan(works, [part(1, 1)], bundle=1)
    assert alone.storage_operations == Operations(queue=3 * 1_010, blob_writes=1_040)


def test_a_bundle_has_no_more_than_half_a_minutes_work():
    def packs(tflop_per_image: float) -> int:
        work = batch(640, 640, bundled=640)
        work[0].tflop = 640 * tflop_per_image
        plan = estimate.make_plan(work, [part(1, 1)], bundle=64)
        return plan.storage_operations.queue // 3

    usual = families.SD1.image_tflop()
    assert packs(usual / 10) == 10
    assert packs(usual) == 22
    assert packs(100 * usual) == 640


def test_few_step_images_in_bundles_reach_400_000_a_dollar(in_process: Imagefleet):
    def plan(*more: str) -> JSONDict:
        few_steps = ("--jobs", "1000000", "--accelerator", "hyper-4step")
        ended = in_process("plan", *few_steps, "--gpu", "3060 Ti", "--json", *more)
        result: JSONDict = json.loads(ended.stdout)
        return result

    usual, smaller, alone = (
        plan(*more) for more in ((), ("--bundle", "32"), ("--bundle", "1"))
    )

    assert usual["images_per_dollar"] == pytest.approx(411_000, rel=0.01)
    assert smaller["images_per_dollar"] == pytest.approx(394_000, rel=0.01)
    assert alone["images_per_dollar"] == pytest.approx(125_500, rel=0.01)
    assert usual["storage_dollars"] == pytest.approx(0.11, abs=0.005)
    assert smaller["storage_dollars"] == pytest.approx(0.22, abs=0.005)
    month = usual["storage_month_dollars"]
    assert month["png"] > month["webp, lossless"] > month["jpeg"] > 0


@pytest.mark.parametrize(("days", "is_old"), [(90, False), (91, True)])
def test_listed_prices_that_are_older_than_90_days_are_said_to_be(
    days: int, is_old: bool
):
    works = work.of_count(1_000, work.read_models([], None, None))
    machines = command.Machines(gpu=["RTX 4090"], price_per_hour=None)
    plan, table = command.planned(works, machines)
    day = table.gpus["RTX 4090 24GB"].as_of
    assert day is not None
    fresh = dataclasses.replace(table.storage, as_of=day)
    table = dataclasses.replace(table, storage=fresh)

    said = estimate.old_prices(plan.mix, table, day + timedelta(days=days))

    names = [sentence.split(" is of ")[0] for sentence in said]
    of_all = ["the price of RTX 4090 24GB", "the price of storage"]
    assert names == (of_all if is_old else [])


def test_a_price_that_was_given_is_of_no_day(in_process: Imagefleet):
    given = ["--jobs", "1000", "--gpu", "RTX 3060 Ti", "--price-per-hour", "0.05"]

    ended = in_process("plan", *given, "--json")

    old = json.loads(ended.stdout)["old_prices"]
    assert [each.split(" is of ")[0] for each in old] == ["the price of storage"]
    assert old[0] in " ".join(ended.stderr.split())

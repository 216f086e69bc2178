"""Plans of other model families than SD1.x, and of several models at once."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.plan import estimate, work
from imagefleet import errors
from imagefleet.files import contents
from imagefleet.pricing import families, prices
from imagefleet.validation import JSONDict
from in_process import Imagefleet, assert_refused, told
from loadgen.sources import open_source

Write = Callable[..., str]

SDXL = families.FAMILIES["sdxl"]
GPU = "RTX 4090 24GB"


@pytest.fixture
def jobs(tmp_path) -> Write:
    """Writes a file of jobs with these fields."""

    def write(*fields: JSONDict) -> str:
        path = tmp_path / "jobs.jsonl"
        path.write_text(
            "".join(json.dumps({"prompt": "a", **each}) + "\n" for each in fields)
        )
        return str(path)

    return write


def report(path: Path, family: str, images_per_second: float, **facts: Any) -> str:
    each = families.FAMILIES[family]
    measured = {
        "model": family,
        "family": family,
        "width": each.width,
        "height": each.height,
        "steps": each.steps,
        "ready_seconds": 60.0,
        "hardware": {"device": "RTX 4090"},
        "worker_images_per_second": images_per_second,
    }
    file = path / f"{family}.json"
    file.write_text(json.dumps(measured | facts))
    return str(file)


def plan(imagefleet: Imagefleet, *arguments: str) -> JSONDict:
    more = ("--gpu", "4090", "--start-up-seconds", "0", "--json")
    result = imagefleet("plan", *arguments, *more)
    return told(result)


def test_every_family_that_the_worker_loads_has_its_operations():
    loaded = {kind.family for kind in (contents.SD1, contents.SD2, contents.SDXL)}
    loaded |= {"DeepFloyd IF", "DeepFloyd IF super-resolution", "SD x4 upscaler"}
    loaded |= {contents.KLEIN.family, contents.KLEIN_BASE.family}
    assert {each.title for each in families.FAMILIES.values()} == loaded
    assert families.SD1.image_tflop() == pytest.approx(26.64, rel=1e-3), (
        "as benchmarks/results"
    )
    assert SDXL.image_tflop() == pytest.approx(281, rel=1e-2)


def test_jobs_of_several_models_are_priced_by_family(
    in_process: Imagefleet, jobs: Write
):
    drawn = {"steps": 15, "width": 512, "height": 512}
    path = jobs(
        {"model": "pony", "steps": 20},
        {"model": "dream", **drawn, "batch_size": 3},
        dict(drawn),
    )
    found = plan(in_process, path, "--model", "pony=sdxl", "--model", "dream=sd1")

    by_model = {each["model"]: each for each in found["models"]}
    assert {name: each["images"] for name, each in by_model.items()} == {
        "pony": 1,
        "dream": 3,
        None: 1,
    }
    record = prices.ASSUMED_IMAGES_PER_SECOND[GPU]
    ratio = (
        SDXL.taken_tflop(SDXL.image_tflop())
        / families.SD1.taken_tflop(families.SD1.image_tflop())
        / SDXL.rate
    )
    assert found["hours"] * 3600 == pytest.approx((4 + ratio) / record)
    assert by_model["pony"]["gpu_dollars"] == pytest.approx(
        found["gpu_dollars"] * ratio / (4 + ratio)
    )
    assert sum(each["gpu_dollars"] for each in by_model.values()) == pytest.approx(
        found["gpu_dollars"]
    )
    assert found["jobs"] == 3
    assert found["images"] == 5


def test_steps_and_size_of_the_jobs_count(in_process: Imagefleet, jobs: Write):
    small = {"width": 512, "height": 512, "steps": 15}
    one = plan(in_process, jobs(small))["hours"]

    assert plan(in_process, jobs(small | {"steps": 30}))["hours"] == pytest.approx(
        1.9 * one, rel=0.01
    )
    assert plan(in_process, jobs(small | {"width": 1024}))["hours"] > 2 * one


@pytest.mark.parametrize(
    ("family", "side", "times"), [("sd1", 512, 5.61), ("sdxl", 1024, 7.11)]
)
def test_an_accelerators_steps_of_one_row_are_planned_as_if_the_job_named_them(
    family: str, side: int, times: float, in_process: Imagefleet, jobs: Write
):
    size = {"width": side, "height": side}
    of = ("--family", family)
    few = ("--accelerator", "lightning_4step")
    guided = plan(in_process, jobs(size | {"steps": 20, "cfg_scale": 7}), *of)["hours"]
    named = plan(in_process, jobs(size | {"steps": 4, "cfg_scale": 1}), *of)["hours"]

    assert guided / named == pytest.approx(times, abs=0.01)
    assert plan(in_process, jobs({}), *of, *few)["hours"] == pytest.approx(named)
    assert plan(in_process, "--jobs", "1", *of, *few)["hours"] == pytest.approx(named)
    two = plan(in_process, jobs({"steps": 2}), *of, *few)["hours"]
    assert two < named, "the job's own steps"


def test_a_job_that_an_accelerator_refuses_is_not_planned_with_it(
    in_process: Imagefleet, jobs: Write
):
    result = in_process("plan", jobs({"steps": 30}), "--accelerator", "lightning_4step")

    assert_refused(result, "line 1: steps is 30")


@pytest.mark.parametrize(
    ("before", "side"), [({"width": 256, "height": 384}, 1024), ({}, 2048)]
)
def test_a_stage_that_enlarges_counts_all_its_steps_and_four_times_the_size_before(
    before: dict[str, int], side: int, tmp_path
):
    """Whatever its denoising_strength, which is the noise on the image."""
    # A size that is given holds for all stages, so the last one has none again.
    stage = {
        "model": "x4",
        "steps": 40,
        "denoising_strength": 0.1,
        "width": None,
        "height": None,
    }
    path = tmp_path / "jobs.jsonl"
    path.write_text(
        json.dumps({"prompt": "a", "model": "dream", **before, "then": [stage]})
    )
    models = work.read_models(["dream=sd1", "x4=x4_upscaler"], None)
    found = {each.model: each for each in work.of_source(open_source(path), models)}
    height = 4 * before.get("height", 512)
    alone = families.find("x4_upscaler").image_tflop(side, height, 40)
    assert alone < found["x4"].tflop < 1.05 * alone


def test_a_model_of_unknown_family_is_refused_by_name(
    in_process: Imagefleet, jobs: Write
):
    path = jobs({"model": "pony"}, {"model": "pony"}, {"model": "dream"})
    assert_refused(
        in_process("plan", path, "--model", "dream=sd1"),
        "the family of the model pony is not known: give --model pony=sd1|sd2|sdxl",
    )
    assert (
        "did you mean 'sdxl'?" in in_process("plan", path, "--model", "pony=sdx").stderr
    )
    assert (
        "--model nothing: should be NAME=sd1|sd2|sdxl"
        in in_process("plan", path, "--model", "nothing").stderr
    )
    assert plan(in_process, path, "--family", "sdxl")["models"][0]["family"] == "sdxl"


def test_each_family_takes_its_own_report(
    in_process: Imagefleet, jobs: Write, tmp_path
):
    path = jobs({"model": "pony"}, {"width": 512, "height": 512, "steps": 15})
    arguments = (path, "--model", "pony=sdxl", "--bench", report(tmp_path, "sd1", 4.0))
    both = plan(in_process, *arguments, "--bench", report(tmp_path, "sdxl", 0.5))
    one = plan(in_process, *arguments)

    (part,) = both["mix"]
    speeds = {each["model"]: each["images_per_second"] for each in part["models"]}
    assert {name: (each["value"], each["kind"]) for name, each in speeds.items()} == {
        "pony": (0.5, "measured"),
        None: (4.0, "measured"),
    }
    assert part["images_per_second"]["kind"] == "measured"
    by_model = {
        each["model"]: each["images_per_second"] for each in one["mix"][0]["models"]
    }
    assert by_model["pony"]["kind"] == "estimated", "scaled from SD1.5's report"
    drawn = families.SD1.taken_tflop(26.64, (512, 512), has_other_loras=True)
    assert by_model["pony"]["value"] == pytest.approx(
        4 * SDXL.rate * drawn / SDXL.taken_tflop(SDXL.image_tflop()), rel=1e-3
    )


def test_a_report_of_other_steps_counts_by_its_operations(
    in_process: Imagefleet, tmp_path
):
    made = report(tmp_path, "sdxl", 0.5, steps=15)
    found = plan(in_process, "--jobs", "10", "--family", "sdxl", "--bench", made)

    speed = found["mix"][0]["images_per_second"]
    assert speed["kind"] == "measured"
    assert speed["value"] == pytest.approx(
        0.5 * SDXL.image_tflop(steps=15) / SDXL.image_tflop(), rel=0.1
    )


def test_a_measured_rate_of_a_family_is_used_and_named():
    measured = replace(
        SDXL, rate=1.2, is_measured=True, rate_source="families-h200.json"
    )
    (job,) = work.of_count(1, work.Models({}, measured))
    record = prices.ASSUMED_IMAGES_PER_SECOND[GPU]

    speed = estimate.find_speed(GPU, None, estimate.bench_of(GPU, [], job), job)

    assert speed.value == pytest.approx(
        1.2 * record * 26.64 / measured.image_tflop(), rel=0.02
    )
    assert (
        "SDXL gets 1.20 of SD1.5's operations/s, as measured: families-h200.json"
        in speed.source
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--jobs", "1", "--family", "sdxl", "--gpu", "2060"),
            "takes a GPU of 8 GB at least",
        ),
        ((), "--jobs COUNT, or a FILE of jobs"),
        (
            ("FILE", "--model", "a=sdxl", "--images-per-second", "1"),
            "for several use --bench",
        ),
    ],
)
def test_what_cannot_be_planned_is_a_one_line_error(
    arguments: tuple[str, ...], message: str, in_process: Imagefleet, jobs: Write
):
    path = jobs({"model": "a"}, {})
    result = in_process(
        "plan", *(path if each == "FILE" else each for each in arguments)
    )

    assert_refused(result, message)
    assert result.stderr.count("\n") == 1


def test_a_second_pass_and_an_image_to_begin_with_are_counted(tmp_path):
    def tflop(**fields: Any) -> float:
        path = tmp_path / "jobs.jsonl"
        path.write_text(
            json.dumps({"prompt": "a", "width": 512, "height": 512, **fields}) + "\n"
        )
        (found,) = work.of_source(open_source(path), models)
        return found.tflop

    models = work.read_models([], "sd1")
    sd1 = families.SD1
    plain = tflop(steps=20)
    assert plain == pytest.approx(sd1.image_tflop(512, 512, 20), rel=0.02)
    half = tflop(steps=20, init_images=["a.png"], denoising_strength=0.5)
    assert sd1.image_tflop(512, 512, 11) < half < sd1.image_tflop(512, 512, 13)
    hires = tflop(
        steps=20, enable_hr=True, hr_second_pass_steps=10, hr_upscaler="Lanczos"
    )
    both = plain + sd1.image_tflop(1024, 1024, 10)
    assert both < hires < 1.1 * both
    network = {"upscaler_1": "4x_Sharp", "upscaling_resize": 4}
    chain = tflop(steps=20, then=[network])
    assert chain == pytest.approx(plain + 9.4, rel=0.01), (
        "of ESRGAN, by torch's counter"
    )
    alone = tflop(init_images=["a.png"], width=None, height=None, **network)
    assert alone == pytest.approx(chain - plain)
    with pytest.raises(
        errors.SetupError, match="only resize images, which takes no GPU"
    ):
        tflop(init_images=["a.png"], upscaler_1="Lanczos")
    with pytest.raises(
        errors.SetupError, match="hr_scale: the image would have 4096x4096"
    ):
        tflop(enable_hr=True, hr_scale=8, width=None, height=None)


def test_cards_too_small_for_klein_whole_or_too_old_for_it_are_told_before_they_are_rented(
    in_process: Imagefleet,
):
    jobs = ("plan", "--jobs", "1000", "--family", "klein", "--gpu")
    for gpu, is_int8 in {"RTX 3060 Ti": True, "RTX 4090": False}.items():
        said = in_process(*jobs, gpu).stdout
        assert ("most of its weights in int8" in said) == is_int8
    assert_refused(in_process(*jobs, "RTX 2080 Ti"), "does not compute in bfloat16")

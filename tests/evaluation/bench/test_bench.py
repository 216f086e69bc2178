"""The benchmark command on a small checkpoint; its figures are not compared."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tiny_model
from benchmarks.stand_in import StandInEngine
from evaluation.bench import command as bench
from evaluation.bench import engine as bench_engine
from evaluation.bench import jobs, machine, work
from imagefleet import errors
from imagefleet.job.message import read_job
from rows import amounts
from worker.engine import contract

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    return tiny_model.build_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def workload(tmp_path) -> jobs.Workload:
    return jobs.Workload(
        "a house", "ugly", ((64, 64),), tmp_path, (("one",), ("two",), ("three",))
    )


@pytest.fixture
def _little_is_measured(monkeypatch) -> None:
    """As many LoRAs as two slots need, and one image by diffusers."""
    prepare = bench_engine.prepare
    baseline = bench_engine.measure_baseline
    monkeypatch.setattr(bench_engine, "prepare", partial(prepare, loras=4))
    monkeypatch.setattr(bench_engine, "measure_baseline", partial(baseline, images=1))
    monkeypatch.setitem(machine._REPEATS, "cpu", 3)


@pytest.mark.usefixtures("_little_is_measured")
def test_the_engine_is_measured_against_the_limit_and_against_diffusers(
    in_process, model: Path, tmp_path
):
    arguments = (
        "--model",
        str(model),
        "--seconds",
        "0.3",
        "--slots",
        "2",
        "--baseline",
    )
    arguments += ("--steps", "4")
    priced = (
        "--price-per-hour",
        "0.36",
        "--json-file",
        str(tmp_path / "new" / "report.json"),
    )
    ended = in_process("bench", *arguments, *priced)
    assert ended.returncode == 0, ended.stderr
    report = json.loads((tmp_path / "new" / "report.json").read_text())
    assert (report["width"], report["height"], report["slots"]) == (64, 64, 2)
    assert report["family"] == "sd1"
    assert all(
        report[name] > 0 for name in report if name.endswith("images_per_second")
    )
    assert report["over_diffusers_peft"] == pytest.approx(
        report["mixed_lora_images_per_second"]
        / report["diffusers_peft_images_per_second"]
    )
    assert report["matrix_limit_fraction"] < 1
    assert report["images_per_dollar"] == pytest.approx(
        10_000 * report["worker_images_per_second"]
    )
    assert report["steps"] == 4
    # 1 where so few images are all drawn before the first is stored.
    assert 0 <= report["idle_fraction"] <= 1
    assert "images per dollar" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--device", "tpu"), "'tpu' is not a device"),
        (("--model", "nowhere"), "'nowhere' does not exist"),
        (("--gpu", "RTX 9999"), "unknown GPU class"),
        (("--priority", "urgent"), "--priority"),
    ],
)
def test_errors_are_one_line(in_process, arguments: tuple[str, ...], complaint: str):
    ended = in_process("bench", *arguments)
    assert ended.returncode == 2
    assert complaint in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("name", "gigabytes", "dollars"),
    [
        ("NVIDIA GeForce RTX 4090", 23.6, 0.16),
        ("NVIDIA GeForce RTX 3060", 11.8, 0.04),
        ("NVIDIA GeForce RTX 3060", 7.8, 0.03),
        ("NVIDIA H200", 139.8, None),
        ("x86_64", 0, None),
    ],
)
def test_the_price_is_looked_up_by_the_gpus_name_and_memory(
    name: str, gigabytes: float, dollars: float | None
):
    hardware = {"device": name, "memory_bytes": int(gigabytes * 2**30)}
    assert bench._dollars_per_hour(None, None, "batch", hardware) == dollars


def test_requests_and_messages_are_the_same_jobs(workload: jobs.Workload):
    for number in range(5):
        request = workload.request(number)
        job = read_job(workload.message(number), "id")
        (lora,) = request.loras
        assert f"<lora:{lora.name}:{lora.unet_weight}>" in job.prompt
        assert job.prompt.startswith(request.prompt)
        assert (job.sampler, job.steps, job.seed) == (request.sampler, 15, request.seed)
        assert (job.width, job.height) == (request.width, request.height)


def test_jobs_differ_in_loras_sizes_lengths_and_seeds_in_turn(tmp_path):
    sizes = ((64, 64), (64, 96))
    loras = (("one", "two"), ("three",))
    mixed = jobs.Workload("red", "b", sizes, tmp_path, loras, repeats=(1, 3))
    requests = [mixed.request(number) for number in range(2)]
    assert [(request.width, request.height) for request in requests] == list(sizes)
    assert [tuple(lora.name for lora in each.loras) for each in requests] == list(loras)
    assert [request.prompt for request in requests] == ["0 red", "1 red red red"]
    assert requests[0].seed != requests[1].seed
    assert mixed.message(0).count("<lora:") == 2
    assert json.loads(mixed.message(1))["prompt"].startswith("1 red red red")


def test_a_rate_counts_whole_rounds_after_the_first():
    finished_at = [1.0, 1.0, 3.0, 3.0, 5.0, 5.0, 5.5]
    rate = work.rate_of(finished_at, 2, [5] * 7)  # type: ignore[list-item]
    assert (rate.images, rate.seconds) == (4, 4.0)
    assert amounts.per_second(rate, float) == 5  # type: ignore[arg-type]
    with pytest.raises(errors.SetupError, match="too few"):
        work.rate_of(finished_at[:3], 2)


@pytest.mark.parametrize("phases", [(0, 0, 0), (3, 9, 14), (7, 2, 11)])
def test_a_rate_of_several_sizes_does_not_depend_on_which_of_them_ends_last(
    phases: tuple[int, ...],
):
    lanes = (
        (16, 100),
        (11, 150),
        (11, 150),
    )  # images and their pixels; 15 ticks by turns
    finished_at = []
    pixels = []
    for tick in range(300):
        images, size = lanes[tick % 3]
        if (tick // 3 + phases[tick % 3]) % 15 == 0:
            finished_at += [tick * 0.06] * images
            pixels += [size] * images
    rate = work.rate_of(finished_at, 16, pixels)  # type: ignore[arg-type]
    expected = sum(images * size for images, size in lanes) / (45 * 0.06)
    found = amounts.per_second(rate, float)  # type: ignore[arg-type]
    assert found == pytest.approx(expected, rel=0.02)


def test_drive_keeps_the_engine_full_and_leaves_it_empty(
    workload: jobs.Workload,
):
    engine = StandInEngine(capacity=4, tick_seconds=0.02)
    rate = work.drive(engine, workload.requests(), 0.2)
    assert not engine.busy
    assert rate.images % 4 == 0


def test_waits_at_a_runs_start_and_end_are_no_idle_time(monkeypatch):
    # Rows, and the seconds that a tick took; it waits half a second before each.
    ticks = [(2, 8.0), (4, 1.5), (2, 1.5), (4, 1.5), (1, 8.0), (0, 8.0)]
    engine = SimpleNamespace(unet_rows=0, tick=list)
    noted = work.Ticks(engine)
    moments = []
    now = 0.0
    for _, seconds in ticks:
        moments += [now + 0.5, now + 0.5 + seconds]
        now = moments[-1]
    times = iter(moments)
    monkeypatch.setattr(work, "time", SimpleNamespace(monotonic=lambda: next(times)))
    for rows, _ in ticks:
        noted._tick = partial(_draw_rows, engine, rows)
        engine.tick()

    assert noted.idle_fraction == pytest.approx(1.0 / 5.5)


def _draw_rows(engine: SimpleNamespace, rows: int) -> list[contract.Finished]:
    engine.unet_rows += rows
    return []


def test_a_failed_image_fails_the_measurement(workload: jobs.Workload):
    def refuse(request: contract.ImageRequest) -> contract.Pixels:
        raise errors.TransientError("the image came out as NaN")

    with pytest.raises(errors.TransientError, match="NaN"):
        work.drive(StandInEngine(draw=refuse), workload.requests(), 0.1)


def test_latency_is_the_published_table_beside_diffusers_in_the_same_run(
    in_process, model: Path, tmp_path: Path
):
    given = ["--model", str(model), "--seconds", "0.2", "--slots", "4", "--steps", "3"]
    given += ["--json-file", "latency.json"]

    ended = in_process("bench", "latency", *given)

    assert ended.returncode == 0, ended.stderr
    report = json.loads((tmp_path / "latency.json").read_text())
    told = {name: report[name] for name in ("sampler", "cfg_scale", "steps")}
    assert told == {"sampler": "plms", "cfg_scale": 7.5, "steps": 3}
    for name in ("seconds", "diffusers_seconds", "over_diffusers"):
        assert list(report[name]) == ["1", "2", "4", "512"]
    for images, ratio in report["over_diffusers"].items():
        of_both = report["diffusers_seconds"][images], report["seconds"][images]
        assert ratio == pytest.approx(of_both[0] / of_both[1])
    assert "over diffusers" in " ".join(ended.stdout.split())

"""Figures in the documents are what the files of the measurements say."""

import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

#: What computes it from a file, or where it is there: names with dots between.
Figure = Callable[[Any], float] | str


@functools.cache
def measured(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


@functools.cache
def text(page: str) -> str:
    """The page's words, wherever its lines end."""
    return " ".join((ROOT / page).read_text().split())


def value(file: str, figure: Figure) -> float:
    found = measured(file)
    if not isinstance(figure, str):
        return figure(found)
    for name in figure.split("."):
        found = found[name]
    return float(found)


def of_pairs(choose: Callable[[list[float]], float]) -> Callable[[Any], float]:
    pairs = "library_and_worker_images_per_second"
    return lambda found: choose([one / other for one, other in found[pairs]])


def capped(row: str) -> Callable[[Any], float]:
    def share(found: Any) -> float:
        rows = found["rows"]
        limited: float = rows[row]["mixed_images_per_second"]
        return limited / float(rows["sdxl"]["mixed_images_per_second"])

    return share


def at_full_speed(weather: str) -> list[Figure]:
    """Percent of the paid time, by how nodes warm up."""

    def percent(case: str) -> Figure:
        return lambda found: 100 * found["warm_up"][weather][case]["full_speed"]

    return [percent(each) for each in ("unlike_jobs", "like_jobs", "fetched_kernels")]


#: A page, what it says, and of which file that is; the braces are the figures, in their order.
STATED: list[tuple[str, str, str, list[Figure]]] = [
    (
        "docs/bundles.md",
        "take {:.1f} % of the operations of single ones (`python benchmarks/packs.py`)",
        "packs",
        [lambda found: 100 * found["operations_over_single"]],
    ),
    (
        "docs/serve.md",
        (
            "at most {:.1f} times as long for a picture; all kinds at once {:.1f} times, on two"
            " cores that had nothing else to do, and {:.1f} to {:.1f} times beside other programs."
            " `/live` answered within {:.2f} s, and the gateway took {:.0f} MiB"
        ),
        "strangers",
        [
            "worst_of_one_kind.answer_over_before",
            "kinds.all at once.answer_over_before",
            lambda found: min(found["all_at_once_runs"]),
            lambda found: max(found["all_at_once_runs"]),
            "worst.longest_live_seconds",
            "worst.memory_mebibytes",
        ],
    ),
    (
        "README.md",
        "away from the storage | {:.1f} |",
        "engine-h200",
        ["mixed_lora_images_per_second"],
    ),
    (
        "README.md",
        "with a different LoRA per job | {:.1f} / {:.1f} |",
        "engine-h200",
        ["no_lora_images_per_second", "engine_mixed_lora_images_per_second"],
    ),
    (
        "README.md",
        "diffusers + peft, one job at a time | {:.1f} images/s |",
        "engine-h200",
        ["diffusers_peft_images_per_second"],
    ),
    (
        "README.md",
        "of 8 GB | {:.2f}; {:.2f}, {:.2f} |",
        "families-h200",
        [
            f"rows.sdxl{each}.mixed_images_per_second"
            for each in ("", "_capped_11", "_capped_7")
        ],
    ),
    (
        "docs/engine.md",
        "300 ms away from the storage | {:.1f} |",
        "engine-h200",
        ["mixed_lora_images_per_second"],
    ),
    (
        "docs/engine.md",
        "one at a time | {:.1f} images/s |",
        "engine-h200",
        ["diffusers_peft_images_per_second"],
    ),
    (
        "docs/engine.md",
        "as a card of 8 GB has | {:.0f} % of the speed",
        "engine-h200",
        [lambda found: 100 * found["capped_over_uncapped"]],
    ),
    (
        "docs/engine.md",
        "cold / with caches | {:.0f} s / {:.0f} s |",
        "engine-h200",
        ["first_image_cold_seconds", "first_image_cached_seconds"],
    ),
    (
        "docs/engine.md",
        "three LoRAs, rank 256 together | {:.2f}; {:.2f}; {:.2f} of rank 32 |",
        "engine-h200",
        [
            f"{each}_over_rank_32"
            for each in ("rank_128", "shuffled_ranks", "three_loras")
        ],
    ),
    (
        "docs/engine.md",
        "LoKr, LoHa, DoRA, LoCon | {:.2f}, {:.2f}, {:.2f}, {:.2f} of rank 32 |",
        "engine-h200",
        [f"{each}_over_rank_32" for each in ("lokr", "loha", "dora", "locon_all")],
    ),
    (
        "docs/engine.md",
        "hires fix compute {:.2f} and {:.2f} of the rows",
        "staged-h200",
        ["img2img_over_txt2img", "hires_over_txt2img_by_rows"],
    ),
    (
        "docs/engine.md",
        "jobs with a ControlNet {:.2f}",
        "staged-h200",
        ["controlnet_rows.shares.controlnet"],
    ),
    (
        "docs/engine.md",
        "four unguided steps give {:.0f} images/s",
        "few-steps-h100",
        ["sd15_4_steps_images_per_second"],
    ),
    (
        "docs/metrics.md",
        "with another LoRA for each job give {:.2f} of the images",
        "few-steps-h100",
        [
            lambda found: (
                found["sd15_4_steps_lora_images_per_second"]
                / found["sd15_4_steps_images_per_second"]
            )
        ],
    ),
    (
        "docs/engine.md",
        "{:.0f} with another LoRA in each job, {:.0f} times diffusers + peft",
        "few-steps-h100",
        ["sd15_4_steps_lora_images_per_second", "over_diffusers_peft"],
    ),
    (
        "docs/engine.md",
        "jobs shuffled {:.2f} of unmixed",
        "few-steps-h100",
        ["guided_mixed_over_unmixed"],
    ),
    (
        "docs/engine.md",
        "measure.py`): {:.2f} images/s with another LoRA in each job, {:.1f} times",
        "families-h200",
        ["rows.sdxl.mixed_images_per_second", "sdxl_mixed_over_diffusers_peft"],
    ),
    (
        "docs/engine.md",
        "768x768, 15 steps: {:.2f} images/s",
        "families-h200",
        ["rows.sd2.mixed_images_per_second"],
    ),
    *(
        (
            "docs/engine.md",
            f"{what} | {{:.2f}} | {{:.2f}} |",
            "families-h200",
            [f"rows.{row}.mixed_images_per_second", capped(row)],
        )
        for what, row in (
            ("2, each with weights of its own", "sdxl_capped_23"),
            ("1, with weights of its own", "sdxl_capped_15"),
            ("1, reloaded", "sdxl_capped_11"),
            ("prompts on the CPU", "sdxl_capped_7"),
        )
    ),
    (
        "docs/engine.md",
        "demo checkpoint, worst of 8), compiled | {:.1f} dB",
        "engine-h200",
        ["psnr_db"],
    ),
    (
        "docs/library.md",
        "of nine pairs, {:.2f} to {:.2f} times, the median {:.2f}",
        "library",
        [of_pairs(min), of_pairs(max), of_pairs(statistics.median)],
    ),
    (
        "docs/scaling.md",
        "| images | {:,.0f} | {:,.0f} |",
        "fleet-sim",
        ["reference.published.images", "reference.images"],
    ),
    (
        "docs/scaling.md",
        "| images per dollar | 4,954 | {:,.0f} |",
        "fleet-sim",
        ["reference.images_per_dollar"],
    ),
    (
        "docs/scaling.md",
        "+1.3 % | {:,.0f} |",
        "fleet-sim",
        ["reference.ours.images_per_dollar"],
    ),
    (
        "docs/scaling.md",
        "{:.0f} replicas draw in {:.0f} simulated seconds, times 4,500",
        "fleet-sim",
        ["reference.ours.simulated_replicas", "reference.ours.seconds"],
    ),
    (
        "docs/scaling.md",
        "+0.4 % | {:,.0f} |",
        "fleet-sim",
        [lambda found: found["reference"]["ours"]["images"] * 86_400 / 240],
    ),
    (
        "docs/scaling.md",
        (
            "{:.2f} % of the paid time is at full speed where nodes compile for unlike"
            " jobs, {:.2f} % for jobs of one size, {:.2f} % where"
        ),
        "fleet-sim",
        at_full_speed("usual"),
    ),
    (
        "docs/scaling.md",
        "20 times the interruptions {:.2f}, {:.2f} and {:.2f} %",
        "fleet-sim",
        at_full_speed("20_times_the_interruptions"),
    ),
    (
        "docs/a1111.md",
        "draws {:.2f} of the UNet's rows a second",
        "a1111",
        ["details_over_plain"],
    ),
    (
        "docs/keeping.md",
        "saved {:.1f} % of the UNet calls and dropped {:.0f} of {:.0f} images to keep",
        "kept",
        [
            lambda found: 100 * found["early_stop_calls_saved"],
            lambda found: (
                found["early_stop_wrongly_dropped"]
                * found["early_stop"]["kept_without"]
            ),
            "early_stop.kept_without",
        ],
    ),
]


@pytest.mark.parametrize(("page", "said", "file", "figures"), STATED)
def test_a_figure_of_a_page_is_that_of_its_file(
    page: str, said: str, file: str, figures: list[Figure]
):
    stated = said.format(*(value(file, figure) for figure in figures))
    assert stated in text(page)


def test_the_gates_power_is_that_of_its_file():
    rows = {
        "| {damage} | {pictures} of {of} | {seen} of {trials} | {by} |".format(**row)
        for row in measured("gate")
    }
    page = (ROOT / "docs" / "gate.md").read_text()
    table = page.partition("| damage | in | seen | by |\n")[2].partition("\n\n")[0]
    stated = table.splitlines()[1:]
    assert len(stated) > 10
    assert set(stated) <= rows


@pytest.mark.parametrize(
    "path", sorted(RESULTS.glob("*-h?00.json")), ids=lambda it: it.name
)
def test_a_file_is_named_after_the_card_that_it_is_of(path: Path):
    found = path.read_text()
    others = {"H100", "H200"} - {path.stem.rpartition("-")[2].upper()}
    assert not any(f"NVIDIA {other}" in found for other in others)

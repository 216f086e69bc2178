"""Templates whose job fields have several values."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from imagefleet import errors
from imagefleet.job.message import Job, read_job
from loadgen.sources import TemplateSource

SWEEP = """
prompt: a {noun}
lists: {noun: [cat, dog, fox, owl]}
job:
  campaign: spring
  model: [m1, "m 2 (x)"]
  size: [512x512, 512x768]
  sampler_name: [Euler a, DPM++ 2M Karras]
  cfg_scale: [5, 5.5, 6, 6.5]
  steps: [20, 25, 30]
"""
COMBINATIONS = 2 * 2 * 2 * 4 * 3


def source_of(folder: Path, text: str, **options: Any) -> TemplateSource:
    path = folder / "t.yaml"
    path.write_text(text)
    return TemplateSource(path, **options)


def jobs_of(source: TemplateSource) -> list[Job]:
    return [read_job(body, "unused") for body in source.bodies()]


def test_a_sweep_has_every_combination_once_and_knows_their_number(
    tmp_path: Path,
) -> None:
    source = source_of(tmp_path, SWEEP)
    source.check()
    jobs = jobs_of(source)

    assert source.count == len(jobs) == COMBINATIONS
    swept = {
        (job.model, job.width, job.height, job.sampler_name, job.cfg_scale, job.steps)
        for job in jobs
    }
    assert swept == {
        (model, *size, sampler, cfg_scale, steps)
        for model, size, sampler, cfg_scale, steps in itertools.product(
            ("m1", "m 2 (x)"),
            ((512, 512), (512, 768)),
            ("Euler a", "DPM++ 2M Karras"),
            (5, 5.5, 6, 6.5),
            (20, 25, 30),
        )
    }
    assert {job.campaign for job in jobs} == {"spring"}


def test_an_id_says_what_its_job_is(tmp_path: Path) -> None:
    jobs = jobs_of(source_of(tmp_path, SWEEP))

    assert len({job.id for job in jobs}) == COMBINATIONS
    assert (jobs[0].id or "").endswith("-m1-512x512-euler_ancestral-cfg5-steps20")
    assert (jobs[-1].id or "").endswith("-m_2_x-512x768-dpmpp_2m_karras-cfg6.5-steps30")
    assert all(re.match(r"[0-9a-f]{24}-", job.id or "") for job in jobs)


def test_a_prompt_is_drawn_for_all_combinations_and_they_share_a_seed(
    tmp_path: Path,
) -> None:
    """Otherwise a picture would differ by more than what is swept."""
    rounds = 12
    jobs = jobs_of(source_of(tmp_path, SWEEP, count=rounds * COMBINATIONS))
    drawn = [
        {(job.prompt, job.seed) for job in jobs[start : start + COMBINATIONS]}
        for start in range(0, len(jobs), COMBINATIONS)
    ]

    assert [len(each) for each in drawn] == [1] * rounds
    prompts = {prompt for each in drawn for prompt, _ in each}
    assert len(prompts) > 1
    assert len({seed for each in drawn for _, seed in each}) == rounds
    assert len({job.id for job in jobs}) == rounds * COMBINATIONS


def test_a_sweep_is_the_same_each_time(tmp_path: Path) -> None:
    source = source_of(tmp_path, SWEEP, count=150)
    again = source_of(tmp_path, SWEEP, count=1_000)

    assert again.identity == source.identity
    assert list(itertools.islice(again.bodies(), 150)) == list(source.bodies())
    assert list(source_of(tmp_path, SWEEP, count=150, seed=5).bodies()) != list(
        source.bodies()
    )


def test_a_sweep_of_a_million_is_described_without_making_it(tmp_path: Path) -> None:
    text = "prompt: a\ncount: 2000000\njob: {seed: [7], steps: [20, 30, 40]}"
    source = source_of(tmp_path, text)
    examples = [json.loads(body) for body in source.examples(10)]

    assert source.describe() == "2,000,000 jobs: 3 combinations of 3 steps"
    assert {job.get("steps") for job in examples} == {None, 30, 40}  # 20 is the default
    assert len({job["id"] for job in examples}) == 10
    assert read_job(source.body(1_999_999), "").seed == 7


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("job: {steps: []}", "job: steps: the list is empty"),
        ("job: {steps: [20, 500]}", "job: steps: should be less than or equal to 150"),
        ("job: {steps: [20, 20]}", "job: steps: a value is there twice"),
        ("job: {size: [512, 768]}", "job: size: should be WIDTHxHEIGHT, such as 512x768"),
        ("job: {size: 512x768, width: 512}", "size: is both sides"),
        ("job: {size: [512x512, 512x10000]}", "job: height: should be less than or equal to 2048"),
        ("job: {sampler_name: [Euler a, Eular]}", "unknown sampler 'Eular'"),
        ("job: {sampler: [Euler a]}", "sampler: unknown key; did you mean"),
        ("job: {campaign: [a, b]}", "job: campaign: should be a valid string"),
        ("job: {model: [../x]}", "job: model: "),
    ],
)  # fmt: skip
def test_an_error_of_a_sweep_is_one_sentence(
    tmp_path: Path, text: str, sentence: str
) -> None:
    with pytest.raises(errors.SetupError) as caught:
        source_of(tmp_path, f"prompt: a\n{text}")

    assert sentence in caught.value.message
    assert "t.yaml" in caught.value.message
    assert "\n" not in caught.value.message

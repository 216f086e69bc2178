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
  cfg_scale: {from: 5, to: 6.5, step: 0.5}
  steps: {from: 20, to: 30, step: 5}
"""
COMBINATIONS = 2 * 2 * 2 * 4 * 3


def source_of(folder: Path, text: str, **options: Any) -> TemplateSource:
    path = folder / "t.yaml"
    path.write_text(text)
    return TemplateSource(path, **options)


def jobs_of(source: TemplateSource) -> list[Job]:
    return [read_job(body, "unused") for body in source.bodies(0)]


def test_a_sweep_has_every_combination_once_and_knows_their_number(
    tmp_path: Path,
) -> None:
    source = source_of(tmp_path, SWEEP)
    source.check(0)
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


def test_a_seed_is_swept_like_any_field(tmp_path: Path) -> None:
    jobs = jobs_of(
        source_of(tmp_path, "prompt: a\njob: {seed: {from: 3, to: 7}, steps: [5, 9]}")
    )

    assert sorted((job.seed, job.steps) for job in jobs) == [
        (seed, steps) for seed in range(3, 8) for steps in (5, 9)
    ]
    fixed = jobs_of(source_of(tmp_path, "prompt: a\njob: {seed: 3, steps: [5, 9]}"))
    assert [job.seed for job in fixed] == [3, 3]


def test_a_sweep_is_the_same_each_time_and_resumes_anywhere(tmp_path: Path) -> None:
    source = source_of(tmp_path, SWEEP, count=150)
    again = source_of(tmp_path, SWEEP, count=1_000)

    assert again.identity == source.identity
    assert list(itertools.islice(again.bodies(0), 150)) == list(source.bodies(0))
    assert list(source.bodies(77)) == list(source.bodies(0))[77:]
    assert list(source_of(tmp_path, SWEEP, count=150, seed=5).bodies(0)) != list(
        source.bodies(0)
    )


def test_a_sweep_of_a_million_is_described_without_making_it(tmp_path: Path) -> None:
    text = "prompt: a\njob: {seed: {from: 1, to: 1000000}, steps: [20, 30]}"
    source = source_of(tmp_path, text)
    examples = [json.loads(body) for body in source.examples(10)]

    assert (
        source.describe()
        == "2,000,000 jobs: 2,000,000 combinations of 2 steps x 1,000,000 seed"
    )
    assert {job.get("steps") for job in examples} == {None, 30}  # 20 is the default
    assert len({job["id"] for job in examples}) == 10
    assert read_job(source.body(1_999_999), "").seed == 1_000_000


def test_the_decimals_of_a_range_are_those_that_are_written(tmp_path: Path) -> None:
    source = source_of(
        tmp_path, "prompt: a\njob: {cfg_scale: {from: 5, to: 6, step: 0.1}}"
    )

    assert [job.cfg_scale for job in jobs_of(source)] == [5 + n / 10 for n in range(11)]


HUGE = "job: {seed: {from: 0, to: 4000000000}, steps: {from: 1, to: 150}, clip_skip: [1, 2]}"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("job: {steps: []}", "job: steps: the list is empty"),
        ("job: {steps: [20, 500]}", "job: steps: should be less than or equal to 150"),
        ("job: {steps: [20, 20]}", "job: steps: a value is there twice"),
        ("job: {steps: {from: 20, to: 500}}", "job: steps: should be less than or equal to 150"),
        ("job: {steps: {from: 20, to: 30, step: 2.5}}", "job: steps: should be a valid integer"),
        ("job: {steps: {from: 30, to: 20}}", "a range is {from: 20, to: 40, step: 5}: `from` is"),
        ("job: {steps: {from: 20, to: 30, step: 0}}", "`step` should be greater than 0"),
        ("job: {steps: {from: 20}}", "to: is required"),
        ("job: {steps: {from: 20, to: 30, stepp: 5}}", "stepp: unknown key; did you mean 'step'?"),
        ("job: {cfg_scale: {from: 5.5, to: 9}}", "a range with fractions needs `step`"),
        ("job: {cfg_scale: {from: 5, to: 9, step: 1.0e-30}}", "has more than 100,000 values"),
        (f"job: {{steps: {{from: 1, to: 1{'0' * 400}}}}}", "to: should be a number"),
        ("job: {width: {from: 63, to: 520, step: 1}}", "job: width: should be greater than"),
        ("job: {size: [512, 768]}", "job: size: should be WIDTHxHEIGHT, such as 512x768"),
        ("job: {size: 512x768, width: 512}", "size: is both sides"),
        ("job: {size: [512x512, 512x10000]}", "job: height: should be less than or equal to 2048"),
        ("job: {sampler_name: [Euler a, Eular]}", "unknown sampler 'Eular'"),
        ("job: {sampler: [Euler a]}", "sampler: unknown key; did you mean"),
        ("job: {campaign: [a, b]}", "job: campaign: should be a valid string"),
        ("job: {model: [../x]}", "job: model: "),
        ("job: {steps: {from: yes, to: 5}}", "from: should be a number"),
        (HUGE, "combinations; 1,000,000,000,000 at most"),
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

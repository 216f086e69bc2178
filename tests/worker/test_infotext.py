from __future__ import annotations

from jobs.job import read_job
from worker import infotext


def test_the_text_has_the_three_parts_that_viewers_look_for() -> None:
    job = read_job(
        '{"prompt": "a house, <lora:x:0.5>", "negative_prompt": "people", "steps": 15,'
        ' "cfg_scale": 7.5, "seed": 4294967295, "batch_size": 2, "clip_skip": 2}',
        "m1",
    )
    assert infotext.parameters(job, 1, (512, 768), "dreamy").split("\n") == [
        "a house, <lora:x:0.5>",
        "Negative prompt: people",
        (
            "Steps: 15, Sampler: Euler a, CFG scale: 7.5, Seed: 0, Size: 512x768, Model: dreamy,"
            " Clip skip: 2, Version: imagefleet"
        ),
    ]


def test_no_empty_negative_prompt_is_written() -> None:
    job = read_job('{"prompt": "a house", "seed": 1}', "m1")
    assert infotext.parameters(job, 0, (64, 64), "m").split("\n") == [
        "a house",
        (
            "Steps: 20, Sampler: Euler a, CFG scale: 7, Seed: 1, Size: 64x64, Model: m,"
            " Version: imagefleet"
        ),
    ]

"""The jobs of a sweep: ids that say what they are, one seed for each caption, flat memory."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from evaluation.sweep.source import CaptionFile, SweepSource, all_groups
from imagefleet import errors
from imagefleet.caption import caption_of
from imagefleet.job.message import Job, read_job
from imagefleet.records.record import Record


@pytest.fixture
def path(tmp_path) -> Path:
    found = tmp_path / "c.txt"
    found.write_text("a red house\na (blue) boat\na red house\n")
    return found


def source_of(
    path: Path, guidance: Sequence[float] = (1.5, 7), **terms: Any
) -> SweepSource:
    return SweepSource(
        CaptionFile(path), all_groups(guidance, ["PLMS"], [50]), "curve", **terms
    )


def jobs(source: SweepSource) -> list[Job]:
    return [read_job(body, "unused") for body in source.bodies()]


def test_each_caption_comes_in_each_group_under_an_id_that_says_both(
    path: Path,
):
    found = jobs(source_of(path))

    assert [job.id for job in found] == [
        "cfg-1.5_000000",
        "cfg-7.0_000000",
        "cfg-1.5_000001",
        "cfg-7.0_000001",
        "cfg-1.5_000002",
        "cfg-7.0_000002",
    ]
    assert {(job.sampler, job.steps, job.campaign) for job in found} == {
        ("plms", 50, "curve")
    }
    assert [job.cfg_scale for job in found] == [1.5, 7.0] * 3
    assert found[3].parsed_prompt.sections == found[2].parsed_prompt.sections
    assert found[2].parsed_prompt.sections[0][0].text == "a (blue) boat"
    assert found[2].metadata == {"caption": "a (blue) boat"}
    assert found[0].metadata == {}


def test_a_seed_is_the_captions_alone_whatever_else_is_swept(path: Path):
    one = {job.id: job.seed for job in jobs(source_of(path))}
    many = SweepSource(
        CaptionFile(path),
        all_groups([3, 7], ["ddim"], [10, 20], ["a", "b"], "ink", [0, 1]),
        "other",
    )
    seeds = {(int(str(job.id).rpartition("_")[2]), job.seed) for job in jobs(many)}

    assert seeds == {(number, one[f"cfg-1.5_{number:06}"]) for number in range(3)}
    assert len({seed for _, seed in seeds}) == 3, (
        "a caption that comes again has another seed"
    )
    assert {job.seed for job in jobs(source_of(path, seed=1))}.isdisjoint(one.values())


def test_a_name_says_what_differs_between_the_groups():
    names = [
        each.name
        for each in all_groups(
            [3, 7.25], ["Euler a"], [20, 30], [None, "sd_xl base.v1"], "ink", [-0.5, 1]
        )
    ]

    assert names[0] == "own-model-steps-20-lora--0.5-cfg-3.0"
    assert names[-1] == "sd-xl-base.v1-steps-30-lora-1.0-cfg-7.25"
    assert len(set(names)) == 16
    assert [each.name for each in all_groups([7], ["k_euler_a"], [20])] == ["cfg-7.0"]
    swept = [
        each.name for each in all_groups([7], ["k_euler_a", "DPM++ 2M Karras"], [20])
    ]
    assert swept == ["euler-ancestral-cfg-7.0", "dpmpp-2m-karras-cfg-7.0"]


@pytest.mark.parametrize(
    ("axes", "sentence"),
    [
        (([7, 7.0], ["ddim"], [20]), "two groups would have the name cfg-7.0"),
        (([7], ["ddim", "DDIM"], [20]), "two groups would have the name ddim-cfg-7.0"),
        (([7], ["dimm"], [20]), "--set sampler_name: unknown sampler 'dimm'"),
        (
            ([7], ["ddim"], [20], ["a_b", "a b"]),
            "two groups would have the name a-b-cfg-7.0",
        ),
        (([float("nan")], ["ddim"], [20]), "guidance: should be a finite number"),
        (
            (range(1, 200), ["ddim"], range(1, 60)),
            "these are 11,741 groups; 10,000 at most",
        ),
    ],
)
def test_groups_that_cannot_be_are_refused(axes, sentence: str):
    with pytest.raises(errors.SetupError, match=sentence):
        all_groups(*axes)


@pytest.mark.parametrize(
    ("axes", "job", "sentence"),
    [
        (
            ([-0.5], ["ddim"], [20]),
            {},
            "cfg--0.5, caption 0 .*cfg_scale: .*greater than or equal",
        ),
        (([31], ["ddim"], [20]), {}, "cfg_scale"),
        (([7], ["plms"], [1]), {}, "steps is 1: PLMS takes 2 at least"),
        (
            ([7], ["ddim"], [20], [None], "../x", [1]),
            {},
            "LoRA name '../x' is refused|lora",
        ),
        (([7], ["ddim"], [20]), {"width": 63}, "width: .*greater than or equal to 64"),
    ],
)
def test_a_group_that_could_draw_nothing_is_refused_before_anything_is_sent(
    path: Path, axes, job: dict[str, int], sentence: str
):
    with pytest.raises(errors.SetupError, match=sentence):
        SweepSource(CaptionFile(path), all_groups(*axes), "curve", job=dict(job))


def test_a_lora_of_strength_0_is_none_and_others_are_in_the_prompt(path: Path):
    source = SweepSource(
        CaptionFile(path),
        all_groups([7], ["ddim"], [20], lora="ink", strengths=[0, 0.5]),
        "curve",
    )
    without, with_lora = jobs(source)[2:4]

    assert without.parsed_prompt.loras == ()
    (tag,) = with_lora.parsed_prompt.loras
    assert (tag.name, tag.unet_weight) == ("ink", 0.5)
    assert with_lora.parsed_prompt.sections[0][0].text.rstrip() == "a (blue) boat"
    assert with_lora.metadata == without.metadata == {"caption": "a (blue) boat"}


def test_a_caption_too_long_for_a_message_is_named_before_anything_is_sent(
    path: Path,
):
    path.write_text("short\n" + "long " * 14_000)

    with pytest.raises(errors.SetupError, match=r"caption 1.*prompt"):
        source_of(path).check()


@pytest.mark.parametrize(
    "caption",
    [
        "a (very) red boat",
        "cars AND boats",
        "a BREAK dance",
        "#1 of 3 <lora:x:1> [dogs]",
        "a boat, at sea,",
        "half past 3:15",
        "a \\ sign",
    ],
)
@pytest.mark.parametrize("lora", [None, "ink"])
def test_the_caption_of_a_drawing_is_the_line_of_the_file(
    tmp_path, caption: str, lora: str | None
):
    file = tmp_path / "c.jsonl"
    file.write_text(json.dumps(caption) + "\n")
    swept = all_groups([3], ["PLMS"], [50], [None], lora, [0.5 if lora else None])

    (job,) = jobs(SweepSource(CaptionFile(file), swept, "curve"))

    drawn = {"prompt": job.prompt, "metadata": job.metadata}
    record = Record(outcome="completed", id="x", at=datetime.now(UTC), **drawn)
    assert caption_of(record) == caption_of(job) == caption

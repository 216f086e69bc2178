"""A sweep's manifest lies with its campaign."""

import pytest

from evaluation.sweep import manifest
from imagefleet import errors
from imagefleet.records import reader
from imagefleet.storage.open import Storage
from imagefleet.validation import JSONDict

CAPTIONS = ["a red house", "a blue boat", "a red house"]

SWEEP = manifest.Sweep(
    campaign="quality",
    captions=manifest.digest(CAPTIONS),
    groups=(
        manifest.Group(name="cfg-1.5", guidance=1.5, sampler="plms", steps=50),
        manifest.Group(
            name="cfg-7-lora-0.5",
            guidance=7,
            sampler="plms",
            steps=50,
            lora="ink",
            lora_strength=0.5,
        ),
    ),
    job={"width": 64, "negative_prompt": "blurry"},
)


async def test_the_manifest_is_read_as_it_was_written(storage: Storage):
    assert await manifest.read(storage, "quality") is None

    await manifest.write(storage, SWEEP)

    assert await manifest.read(storage, "quality") == SWEEP
    assert SWEEP.images == 6


async def test_the_same_sweep_again_changes_nothing_and_another_is_refused(
    storage: Storage,
):
    await manifest.write(storage, SWEEP)
    await manifest.write(storage, SWEEP)

    changes: list[tuple[JSONDict, str]] = [
        ({"captions": manifest.digest(["a dog"])}, "other captions"),
        ({"groups": SWEEP.groups[:1]}, "its groups differ by cfg-7-lora-0.5"),
        ({"seed": 2}, "another field of all its jobs differs"),
    ]
    for change, sentence in changes:
        with pytest.raises(
            errors.SetupError, match=f"{sentence}.*choose another --campaign"
        ):
            await manifest.write(storage, SWEEP.model_copy(update=change))
    assert await manifest.read(storage, "quality") == SWEEP


async def test_the_manifest_is_taken_for_no_record(storage: Storage):
    await manifest.write(storage, SWEEP)

    assert [record async for record in reader.images(storage, "quality")] == []
    assert (await reader.counts(storage, "quality")).images == 0


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"{", "not a sweep's manifest"),
        (b'{"version": 2, "campaign": "quality"}', "not a sweep's manifest: version"),
        (
            SWEEP.model_copy(update={"campaign": "x"}).model_dump_json().encode(),
            "another campaign",
        ),
    ],
)
async def test_a_damaged_manifest_is_never_trusted(
    storage: Storage, data: bytes, sentence: str
):
    await storage.blobs.create(
        "-records/quality/sweep.json", data, "application/json", {}
    )

    with pytest.raises(errors.SetupError, match=sentence):
        await manifest.read(storage, "quality")
    with pytest.raises(errors.SetupError, match=sentence):
        await manifest.write(storage, SWEEP)


def test_the_captions_are_those_of_a_text_file_by_their_hash():
    # printf 'a red house\na blue boat\na red house\n' | sha256sum
    expected = "215766a96ec379ac47a89e68ec165d8564e8795362ab573876dd85cc5b325e45"
    assert manifest.digest(iter(CAPTIONS)) == manifest.Captions(
        count=3, sha256=expected
    )


def test_a_caption_has_one_seed_in_all_groups_and_another_where_it_comes_again():
    seeds = [
        manifest.seed_of(number, caption) for number, caption in enumerate(CAPTIONS)
    ]

    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert seeds[0] == 3_320_119_099, (
        "of an earlier version: images of then and now are compared"
    )
    assert manifest.seed_of(0, CAPTIONS[0], seed=1) != seeds[0]

"""What the gate cannot draw or compare is refused, with the reason."""

import json

import pytest
from PIL import Image

from evaluation.gate import images, jobs
from imagefleet import errors


def test_two_jobs_of_one_id_are_not_drawn_over_each_other(tmp_path):
    path = tmp_path / "jobs.jsonl"
    job = json.dumps({"id": "fox", "prompt": "a fox"})
    path.write_text(f"{job}\n{job}\n")

    with pytest.raises(errors.SetupError, match="two of the captions have the id fox"):
        jobs.of_file(path, None, None)


def test_a_file_of_empty_lines_has_no_captions(tmp_path):
    path = tmp_path / "captions.txt"
    path.write_text("\n\n")

    with pytest.raises(errors.SetupError, match="captions"):
        jobs.of_file(path, None, None)


async def test_an_image_that_does_not_say_how_it_was_drawn_is_not_drawn_again(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "fox.png")

    with pytest.raises(images.NotComparableError, match=r"fox\.png has no job in it"):
        await jobs.of_images(images.FolderImages(tmp_path), ["fox.png"])


async def test_an_image_that_is_gone_meanwhile_is_named(tmp_path):
    with pytest.raises(images.NotComparableError, match=r"fox\.png is no longer there"):
        await images.read(images.FolderImages(tmp_path), "fox.png")


def test_two_images_of_one_name_are_no_pair():
    with pytest.raises(images.NotComparableError, match=r"both fox\.jpeg and fox\.png"):
        images.by_key(["fox.png", "fox.jpeg"], "a")

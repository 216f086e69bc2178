"""`imagefleet gate` on images that are there: what passes, what fails, what cannot be compared."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cli import console
from evaluation.gate import jobs
from evaluation.gate.images import FolderImages
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict
from in_process import assert_refused, told

pytestmark = pytest.mark.slow

Encode = Callable[..., bytes]
Folders = tuple[Path, Path]

BY_PIXELS = ("--extractor", "none")

OTHER_SIZE = np.random.default_rng(1).integers(0, 256, (32, 48, 3), np.uint8)


def noisy(path: Path, amplitude: int) -> None:
    """Adds noise to an image, and keeps its job."""
    with Image.open(path) as image:
        text = image.info["imagefleet"]
        pixels = np.asarray(image).astype(int)
    added = np.random.default_rng(1).integers(-amplitude, amplitude + 1, pixels.shape)
    drawn = Image.fromarray((pixels + added).clip(0, 255).astype(np.uint8))
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text("imagefleet", text)
    drawn.save(path, pnginfo=info)


def test_one_spoilt_image_of_four_fails_and_is_shown_first(
    in_process, folders: Folders, tmp_path
):
    noisy(folders[1] / "house.png", 60)

    ended = in_process(
        "gate", "./a", "./b", *BY_PIXELS, "--output", "gate.html", "--json"
    )

    assert ended.returncode == console.EXIT_IMAGES_WRONG
    found = json.loads(ended.stdout)
    assert not found["passed"]
    assert {check["name"]: check["passed"] for check in found["checks"]}[
        "alike"
    ] is False
    assert (found["alike"], found["identical"], found["worst"][0]["key"]) == (
        3,
        3,
        "house",
    )
    expected = 10 * np.log10(255**2 / found["worst"][0]["squares"])
    assert found["psnr_lowest"] == pytest.approx(expected)
    page = (tmp_path / "gate.html").read_text()
    assert "Failed" in page
    assert "out of bounds" in page
    assert page.count("data:image/webp;base64,") == 3 * 4
    assert page.index("difference of house") < page.index("difference of cat")
    assert "http" not in page, "the page is one file"


def test_the_bounds_decide(in_process, folders: Folders):
    for image in folders[1].iterdir():
        noisy(image, 20)

    def code(*bounds: str) -> int:
        return int(in_process("gate", "./a", "./b", *BY_PIXELS, *bounds).returncode)

    for bounds, expected in (
        ("alike=0 psnr=26", console.EXIT_DONE),  # 26.7 dB
        ("alike=0 psnr=27", console.EXIT_IMAGES_WRONG),
        ("alike=1 psnr=26 detail=300 ssim=0.1", console.EXIT_DONE),
        ("alike=1 psnr=26 detail=300 ssim=1", console.EXIT_IMAGES_WRONG),
        ("alike=1 psnr=26 detail=1 ssim=0.1", console.EXIT_IMAGES_WRONG),
    ):
        given = [f"--set={bound}" for bound in bounds.split()]
        assert code("--set=sharpness=300", "--set=brightness=3", *given) == expected
    for wrong in ("alike=101", "psnr=-1", "psnr=x", "pnsr=1"):
        assert code("--set", wrong) == console.EXIT_OPERATOR_MUST_ACT


def test_the_page_and_the_terminal_show_captions_as_text(
    in_process, folders: Folders, encoded: Encode, tmp_path
):
    for folder, amplitude in zip(folders, (0, 60), strict=True):
        path = folder / "cat.png"
        path.write_bytes(encoded("cat", prompt="<script>alert(1)</script> [bold]x"))
        noisy(path, amplitude)

    ended = in_process("gate", "./a", "./b", *BY_PIXELS, "--output", "gate.html")

    assert "[bold]x" in ended.stdout
    assert "<script" not in (tmp_path / "gate.html").read_text()


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"prompt": "a dog"}, "cat: A's caption is 'a cat' and B's 'a dog': the gate"),
        ({"negative_prompt": "ugly"}, "cat: A's negative prompt is '' and B's 'ugly'"),
        ({"seed": 9}, "cat: A's seed is 3 and B's 9: the gate compares drawings of"),
        ({"pixels": OTHER_SIZE}, "cat: A's image has 64x64 pixels and B's 48x32"),
    ],
)
def test_images_of_other_jobs_are_not_compared(
    in_process,
    folders: Folders,
    encoded: Encode,
    changed: JSONDict,
    complaint: str,
):
    (folders[1] / "cat.png").write_bytes(encoded("cat", **changed))

    ended = in_process("gate", "./a", "./b", *BY_PIXELS)

    assert_refused(ended, complaint)


@pytest.mark.parametrize(("folder", "letter"), [(0, "A"), (1, "B")])
def test_missing_images_are_named_unless_only_the_first_are_compared(
    in_process, folders: Folders, folder: int, letter: str
):
    (folders[folder] / "umbrella.png").unlink()

    ended = in_process("gate", "./a", "./b", *BY_PIXELS)

    assert ended.returncode == console.EXIT_OPERATOR_MUST_ACT
    assert re.search(
        rf"{letter} \(folder \S+\) lacks 1 image of the other.*umbrella", ended.stderr
    )
    assert in_process("gate", "./a", "./b", *BY_PIXELS, "--count", "3").returncode == 0


def test_a_damaged_image_is_named(in_process, folders: Folders):
    path = folders[1] / "house.png"
    path.write_bytes(path.read_bytes()[:200])

    ended = in_process("gate", "./a", "./b", *BY_PIXELS)

    assert_refused(ended, "b: house.png is damaged, or no image")


def test_other_differences_of_the_jobs_are_said(
    in_process, folders: Folders, encoded: Encode
):
    (folders[1] / "cat.png").write_bytes(encoded("cat", steps=14))

    ended = in_process("gate", "./a", "./b", *BY_PIXELS)

    assert "differ in more than the engine: steps: 20 and 14" in ended.stderr


def test_images_of_other_programs_are_compared_by_name_in_any_format(
    in_process, folders: Folders
):
    for path in list(folders[1].iterdir()):
        with Image.open(path) as image:
            image.save(path.with_suffix(".webp"), lossless=True)
        path.unlink()

    ended = in_process("gate", "./a", "./b", *BY_PIXELS)

    assert ended.returncode == console.EXIT_DONE
    assert "4 pairs compared by name alone" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("./a", "./no-such"), "the folder 'no-such' does not exist"),
        (("./a", "./a"), "A and B are the same: folder a"),
        (("./a", "./b", "--jobs", "x.txt"), "--jobs is for two settings"),
        (("./a", "./b", "--model", "x"), "--model is for settings that are drawn here"),
        (
            ("./a", "./b", "--reference", "x.npz", *BY_PIXELS),
            "--reference needs an --extractor",
        ),
        (
            ("./a", "float16,floaty"),
            "'floaty' is no setting of the engine; did you mean 'float",
        ),
        (("./a", "float16,float32"), "float32 sets what another word has set"),
        (("./a", "slots=0"), "slots=0: give a number from 1 to 64"),
        (("./a", "spring"), "there is no folder imagefleet-data/images"),
        (
            ("float32", "float16", "--model", "no.safetensors"),
            "'no.safetensors' does not exist",
        ),
        (("./a", "./empty", *BY_PIXELS), "folder empty has no images"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(
    in_process,
    folders: Folders,
    tmp_path,
    arguments: tuple[str, ...],
    complaint: str,
):
    (tmp_path / "empty").mkdir()

    ended = in_process("gate", *arguments)

    assert_refused(ended, complaint)
    assert ended.stdout == ""


async def test_campaigns_are_compared_across_storages(
    storage: Storage,
    storage_settings: StorageSettings,
    encoded: Encode,
    in_process,
    tmp_path,
):
    other = StorageSettings(
        storage=f"local:{tmp_path / 'other'}", container=storage_settings.container
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "cat.png").write_bytes(encoded("cat"))
    async with open_storage(other) as second:
        await second.create()
        for each in (storage, second):
            for key in ("cat", "house"):
                await each.blobs.create(
                    f"float32/{key}.png", encoded(key), "image/png", {}
                )
    names = storage_settings.model_dump(exclude={"sas", "sas_file", "broker_url"})
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in names.items()]
    arguments = (
        "campaign:float32",
        "campaign:float32",
        "--other-storage",
        other.storage,
    )

    ended = await asyncio.to_thread(
        in_process, "gate", *arguments, *flags, *BY_PIXELS, "--json"
    )

    found = told(ended)
    assert (found["passed"], found["identical"], found["psnr"]) == (True, 2, None)
    assert found["a"] == f"campaign float32 in {storage.url}"
    assert found["b"] == f"campaign float32 in {other.storage}"

    (tmp_path / "spring").mkdir()
    ended = await asyncio.to_thread(
        in_process, "gate", "./a", "spring", *flags, *BY_PIXELS
    )
    assert "has no images; for the folder, write ./spring" in ended.stderr


def test_the_other_storages_secrets_are_not_shown(in_process, folders: Folders):
    address = "https://u:S3cr3tPass@acme.blob.core.windows.net/?sig=S3cr3tToken"
    ended = in_process("gate", "./a", "spring", *BY_PIXELS, "--other-storage", address)

    assert ended.returncode == console.EXIT_OPERATOR_MUST_ACT
    assert ended.stderr.startswith("error: ")
    assert "S3cr3t" not in ended.stdout + ended.stderr


async def test_images_of_one_job_have_its_seeds_in_turn_and_are_drawn_together(
    in_process, tmp_path, encoded: Encode
):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for index in (0, 1):
            path = tmp_path / folder / ("cat~1.png" if index else "cat.png")
            path.write_bytes(encoded("cat", batch_size=2))
    noisy(tmp_path / "b" / "cat~1.png", 9)

    ended = await asyncio.to_thread(
        in_process, "gate", "./a", "./b", *BY_PIXELS, "--json"
    )

    worst = json.loads(ended.stdout)["worst"]
    assert [(pair["key"], pair["seed"]) for pair in worst] == [("cat~1", 4), ("cat", 3)]
    found = await jobs.of_images(FolderImages(tmp_path / "a"), ["cat.png", "cat~1.png"])
    assert [(job.id, job.images) for job in found] == [("cat", 2)]

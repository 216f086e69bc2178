"""Takes docs/gallery.png: the gallery in a headless browser, with images of the demo's checkpoint.

PYTHONPATH=tests/support python docs/write_gallery_pictures.py
"""

import asyncio
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from in_browser import browser, gallery

ROOT = Path(__file__).resolve().parents[1]

#: Every job of the demo, with so many seeds.
SEEDS = range(3)

INVALID = {
    "prompt": "a fox in the snow, <lora:missing-style:0.8>",
    "campaign": "spring",
}

SIZES = {"light": (1280, 800), "dark": (400, 800)}
MARGIN = 16

#: Of a picture that people load with a page: 300 kB at most.
COLORS = 160


def imagefleet(*arguments: str, folder: Path) -> None:
    command = [sys.executable, "-m", "fleet.entry", *arguments]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)  # noqa: S603


def draw(folder: Path) -> None:
    """The demo's jobs, each with several seeds, drawn by a worker."""
    model = ROOT / "demo_model"
    lines = (model / "demo_jobs.jsonl").read_text(encoding="utf-8").splitlines()
    valid = [json.loads(line) for line in lines]
    jobs = [
        {
            **job,
            "id": f"{seed}-{number:02}",
            "campaign": "spring",
            "seed": 1000 * seed + number,
        }
        for seed in SEEDS
        for number, job in enumerate(valid)
    ]
    lines = [json.dumps(each) for each in (*jobs, INVALID)]
    (folder / "jobs.jsonl").write_text("\n".join(lines), encoding="utf-8")
    imagefleet("load", "jobs.jsonl", folder=folder)
    loras = ("--lora-directory", str(model / "loras"))
    imagefleet("worker", "--model", str(model), *loras, "--until-empty", folder=folder)


async def shots(url: str, program: str) -> list[bytes]:
    """The list on a desktop, and an image on a phone in the dark."""
    taken = []
    with browser.running(program) as started:
        for scheme, (width, height) in SIZES.items():
            async with started.page(width=width, height=height) as page:
                await page.use_colors(scheme)
                await page.open(url)
                await page.until(gallery.FIRST_SCREEN)
                if scheme == "dark":
                    await page.click(".tile[aria-posinset='5']")
                    await page.until(
                        "document.querySelector('#picture').src.includes('/picture')"
                    )
                    await page.until("document.querySelector('#facts dl')")
                await asyncio.sleep(1)  # what fades in
                taken.append(await page.screenshot())
    return taken


def beside_each_other(shots: list[bytes]) -> bytes:
    images = [Image.open(io.BytesIO(each)).convert("RGB") for each in shots]
    width = sum(each.width for each in images) + MARGIN * (len(images) - 1)
    sheet = Image.new("RGB", (width, max(each.height for each in images)), "white")
    left = 0
    for each in images:
        sheet.paste(each, (left, 0))
        left += each.width + MARGIN
    stored = io.BytesIO()
    sheet.quantize(COLORS, dither=Image.Dither.NONE).save(stored, "PNG", optimize=True)
    return stored.getvalue()


def main() -> None:
    program = browser.find()
    if program is None:
        raise SystemExit(f"a browser is needed: one of {', '.join(browser.BROWSERS)}")
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        draw(folder)
        with gallery.serving(folder / "imagefleet-data") as url:
            taken = asyncio.run(shots(url, program))
    (ROOT / "docs" / "gallery.png").write_bytes(beside_each_other(taken))


if __name__ == "__main__":
    main()

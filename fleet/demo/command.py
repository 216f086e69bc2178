"""`imagefleet demo`: jobs, worker and images on this machine, without an account or a GPU."""

import logging
import math
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import typer
from PIL import Image, ImageDraw, ImageFont, ImageOps

from cli import console, files, options
from cli.options import option
from fleet.worker import command as worker_command
from imagefleet import aio
from imagefleet.errors import SetupError
from imagefleet.files import demo
from imagefleet.job import prompt
from imagefleet.job.message import Job
from imagefleet.pricing import prices
from imagefleet.storage.open import open_storage
from imagefleet.telemetry import logs
from imagefleet.validation import JSONDict, JSONObject
from worker.settings import WorkerSettings, require_libraries

#: The price in the report: the card with the most images per dollar in SaladCloud's benchmarks.
_PRICED_GPU = "RTX 3060 Ti"
_DOLLARS_PER_HOUR = prices.gpu_dollars_per_hour(_PRICED_GPU, "batch")

#: Marks a storage folder as the demo's: only such a folder is emptied.
_MARKER = "made-by-imagefleet-demo"

#: The worker would wait for space, and the demo's log is on the same disk.
_LEAST_FREE_BYTES = 20_000_000


@options.flat
def command(
    output: Path = option(
        "Folder for the queue, the images and the contact sheet.",
        Path("demo-output"),
        metavar="FOLDER",
    ),
    cascade: bool = option(
        "Jobs in two stages instead: a cascade in pixels.", default=False
    ),
    few_steps: bool = option(
        "4 steps without guidance, not 15 with it.", default=False
    ),
    json_file: options.JsonFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Generates images on this machine: no account, no GPU.

    Fills a local queue with 24 jobs and runs a worker until it is empty. Two of the jobs are
    invalid on purpose, to show what happens to them. Each run starts from an empty folder.

    imagefleet demo

    imagefleet demo --output /tmp/demo --json-file /tmp/demo.json

    imagefleet demo --few-steps

    imagefleet demo --cascade
    """
    if cascade and few_steps:
        raise SetupError("give --cascade or --few-steps, not both")
    console.check_writable(json_file)
    require_libraries()
    if cascade:
        model = ",".join(
            str(demo.find_checkpoint(demo.CASCADE / stage)) for stage in ("base", "sr")
        )
        loras = None
        messages = demo.read_jobs(demo.CASCADE, "demo-cascade")
    else:
        checkpoint = demo.find_checkpoint()
        model = str(checkpoint)
        loras = checkpoint / "loras"
        messages = demo.messages()
        if few_steps:
            messages = list(map(demo.without_sampling, messages))
    storage = output / "storage"
    given = {
        "storage": f"local:{storage}",
        "model": model,
        "lora_directory": loras,
        "compile": "off",  # it takes longer than the whole demo
        "until_empty": True,
        "cache": storage / "cache",
        "name": "demo",
    }
    # Its jobs are not signed, one never could be; the fleet's accelerator and VAE are not its.
    own = {
        "trusted_key": None,
        "accelerator": str(demo.ACCELERATOR) if few_steps else None,
        "vae": None,
    }
    settings = options.read(WorkerSettings, given).model_copy(update=own)
    with console.only_one(storage):
        _prepare(storage)
        report = console.run(_demo(settings, output, messages))
    if json_file is not None:
        console.write_file(json_file, console.json_text(report))
    if as_json:
        console.print_json(report)
    else:
        _show(report, settings, storage, cascade=cascade)


def _prepare(storage: Path) -> None:
    """Creates an empty storage folder; refuses to empty one that is not a demo's."""
    if storage.exists() and not (storage / _MARKER).exists():
        raise SetupError(
            f"{storage} exists and is not from a demo: choose another --output"
        )
    with files.writing(storage):
        if storage.exists():
            shutil.rmtree(storage)
        storage.mkdir(parents=True)
        (storage / _MARKER).touch()
        free = shutil.disk_usage(storage).free
    if free < _LEAST_FREE_BYTES:
        raise SetupError(
            f"the disk of {storage.parent} is full: free {_LEAST_FREE_BYTES / 1e6:.0f} MB, or"
            " choose another --output"
        )


async def _demo(
    settings: WorkerSettings, output: Path, messages: list[str]
) -> JSONDict:
    """Draws the jobs; returns the figures, as `--json` prints them."""
    from worker import process  # needs the extra `worker`

    jobs = [
        Job.model_validate_json(each)
        for each in messages
        if each != demo.INVALID_MESSAGE
    ]
    async with aio.Fleet(open_storage(settings)) as fleet:
        batch = await fleet.submit(jobs, campaign=jobs[0].campaign)
        # The client would refuse it.
        await fleet.storage.queue.send(
            [demo.INVALID_MESSAGE] * messages.count(demo.INVALID_MESSAGE)
        )
        # The demo shows a worker's figures; its log says too much for a first look.
        logs.configure("text", logging.FileHandler(output / "worker.log", mode="w"))
        with worker_command.showing() as show:
            drawn = await process.run_worker(settings, on_progress=show)
        if drawn.stopped_by is not None:
            console.print_note(
                f"stopped after {drawn.images} images of {len(messages)} jobs"
            )
            raise typer.Exit(console.EXIT_INTERRUPTED)
        results = {result.id: result async for result in batch.results()}
        images = []
        for name, job in zip(batch.ids, jobs, strict=True):
            if job.then and (first := await fleet.storage.blobs.read(job.blob_name(0))):
                images.append((first, job.prompt))
            if results[name].blobs:
                images.append((await results[name].data(), job.prompt))
    sheet = output / "contact-sheet.png"
    console.write_file(sheet, draw_contact_sheet(images))
    seconds = drawn.seconds - drawn.start_up_seconds
    dollars = seconds / 3600 * _DOLLARS_PER_HOUR
    return {
        "jobs": len(messages),
        "images": drawn.images,
        "failed": drawn.failed_jobs,
        "seconds": seconds,
        "images_per_second": drawn.images_per_second,
        "engine_idle_fraction": drawn.engine_idle_fraction,
        "dollars": dollars,
        "images_per_dollar": drawn.images / dollars,
        "contact_sheet": str(sheet),
    }


def _show(
    report: JSONObject, settings: WorkerSettings, storage: Path, *, cascade: bool
) -> None:
    facts = {
        "images": f"{report['images']} in {storage / settings.container}",
        "contact sheet": report["contact_sheet"],
        "images/s": f"{report['images_per_second']:.2f} ({report['seconds']:.1f} s after the"
        " start-up)",
        "engine idle": f"{console.percent(report['engine_idle_fraction'])} of the time",
        "images per dollar": f"{report['images_per_dollar']:,.0f}: this machine's speed at the"
        f" price of an {_PRICED_GPU} (batch priority, ${_DOLLARS_PER_HOUR:.2f}/h). The demo's model"
        " is a hundredth of Stable Diffusion's size: not comparable",
    }
    if not cascade:
        facts["failed jobs"] = (
            f"{report['failed']}, invalid on purpose; list them with:"
        )
    console.print_facts(facts)
    if cascade:
        return
    # As it was called: by name, or by a path where it is not on the PATH.
    script = sys.argv[0]
    name = Path(script).name
    program = name if shutil.which(name) == script else shlex.quote(script)
    console.print_plain(
        f"\n  {program} failed --storage {shlex.quote(settings.storage)}"
    )


#: The longer side of an image on the sheet; smaller ones are enlarged.
TILE_PIXELS = 176

COLUMNS = 6
MARGIN_PIXELS = 12
FONT_PIXELS = 12
LINE_PIXELS = 15
CAPTION_LINES = 2

#: The font's usual letters that fit below an image.
CAPTION_CHARACTERS = 31

_PAPER = (250, 250, 248)
_INK = (70, 70, 74)


def draw_contact_sheet(images: Sequence[tuple[bytes, str]]) -> bytes:
    """A PNG with the images in rows, each with its prompt's words and LoRAs as a caption."""
    columns = min(COLUMNS, len(images)) or 1
    rows = math.ceil(len(images) / columns)
    cell_height = TILE_PIXELS + CAPTION_LINES * LINE_PIXELS + MARGIN_PIXELS
    width = MARGIN_PIXELS + columns * (TILE_PIXELS + MARGIN_PIXELS)
    sheet = Image.new("RGB", (width, MARGIN_PIXELS + rows * cell_height), _PAPER)
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(FONT_PIXELS)
    for index, (data, text) in enumerate(images):
        row, column = divmod(index, columns)
        left = MARGIN_PIXELS + column * (TILE_PIXELS + MARGIN_PIXELS)
        top = MARGIN_PIXELS + row * cell_height
        tile = read_tile(data)
        sheet.paste(tile, (left + (TILE_PIXELS - tile.width) // 2, top))
        below = left, top + TILE_PIXELS + 3
        draw.multiline_text(below, "\n".join(caption(text)), _INK, font, spacing=3)
    stored = BytesIO()
    sheet.save(stored, "PNG", optimize=True)
    return stored.getvalue()


def read_tile(data: bytes) -> Image.Image:
    image = Image.open(BytesIO(data)).convert("RGB")
    return ImageOps.contain(image, (TILE_PIXELS, TILE_PIXELS), Image.Resampling.LANCZOS)


def caption(text: str) -> list[str]:
    """A prompt in at most `CAPTION_LINES` lines, shortened with an ellipsis."""
    words, loras = prompt.read_words(text)
    shown = " + ".join([words, *(lora.name for lora in loras)])
    return textwrap.wrap(
        shown, CAPTION_CHARACTERS, max_lines=CAPTION_LINES, placeholder="…"
    )

"""A campaign of any length on the local storage, without a worker: pictures and their records."""

import hashlib
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from io import BytesIO
from itertools import cycle
from pathlib import Path

from PIL import Image, ImageDraw, ImageFilter

import sent_jobs
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Lora, Record
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings

BEGAN_AT = datetime(2026, 11, 20, 8, tzinfo=UTC)

SUBJECTS = (
    "a red house",
    "a blue fish",
    "an old lighthouse",
    "a jump rope",
    "a paper boat",
    "an owl",
)
PLACES = (
    "in a magic forest",
    "by the sea at dawn",
    "under the northern lights",
    "on a snowy hill",
)
STYLES = (
    "digital art, volumetric light",
    "watercolour, soft edges",
    "oil painting, detailed",
)
LORAS = ("outline-style", "magic-fantasy-forest-v2", "soft-light", "paper-cut")
GPUS = ("NVIDIA GeForce RTX 3060 Ti", "NVIDIA GeForce RTX 4090")

#: Workers, and the records that each adds at once, as a real one at most.
_WORKERS = 8
_APPENDED = 256


def picture(seed: int, pixels: int = 512) -> bytes:
    """A PNG: hills of a colour below a sky of another, and the sun.

    With grain, so that it takes as many bytes as a generated one.
    """
    chance = random.Random(seed)
    hue = chance.randrange(256)

    def colour(shift: int, saturation: int, value: int) -> tuple[int, int, int]:
        pixel = Image.new("HSV", (1, 1), ((hue + shift) % 256, saturation, value))
        red, green, blue = pixel.convert("RGB").getpixel((0, 0))  # type: ignore[misc]
        return int(red), int(green), int(blue)

    sky = Image.linear_gradient("L").resize((pixels, pixels))
    image = Image.composite(
        Image.new("RGB", sky.size, colour(150, 110, 245)),
        Image.new("RGB", sky.size, colour(0, 150, 120)),
        sky,
    )
    draw = ImageDraw.Draw(image)
    size = chance.randrange(pixels // 12, pixels // 6)
    x = chance.randrange(size, pixels - size)
    y = chance.randrange(size, pixels // 2)
    draw.ellipse((x - size, y - size, x + size, y + size), colour(120, 60, 255))
    image = image.filter(ImageFilter.GaussianBlur(pixels / 200))
    draw = ImageDraw.Draw(image)
    for layer in range(4):
        height = pixels * (0.45 + 0.14 * layer)
        ridge = [(0.0, height)]
        step = pixels / 24
        for number in range(1, 25):
            height += chance.uniform(-1, 1) * pixels / 28
            ridge.append((number * step, height))
        draw.polygon(
            [*ridge, (pixels, pixels), (0, pixels)],
            colour(-6 * layer, 140, 170 - 38 * layer),
        )
    grain = Image.effect_noise(image.size, 24).convert("RGB")
    image = Image.blend(image, grain, 0.12)
    stored = BytesIO()
    image.save(stored, "PNG", compress_level=4)
    return stored.getvalue()


def records(count: int, campaign: str, *, failed: int = 0) -> Iterator[Record]:
    """Records of *count* images, the first one first, and of *failed* jobs."""
    for number in range(count):
        chance = random.Random(number)
        lora = LORAS[number % len(LORAS)]
        words = f"{chance.choice(SUBJECTS)} {chance.choice(PLACES)}, {chance.choice(STYLES)}"
        yield Record(
            outcome="completed",
            id=f"{number:07d}",
            campaign=campaign,
            at=BEGAN_AT + timedelta(seconds=number * 0.7),
            source=f"message-{number}",
            worker=f"replica-{number % 40:02d}",
            gpu=GPUS[number % 2],
            blob=f"{campaign}/{number:07d}.png",
            size_bytes=100_000,
            seconds=3 + chance.random(),
            prompt=f"{words}, <lora:{lora}:0.8>",
            negative_prompt="blurry, deformed, watermark",
            seed=chance.randrange(2**32),
            model="dreamshaper-8",
            sampler="k_euler_a",
            steps=20,
            cfg_scale=7,
            width=512,
            height=512,
            loras=(Lora(lora, 0.8),),
        )
    for number in range(failed):
        yield Record(
            outcome="failed",
            id=f"failed-{number}",
            campaign=campaign,
            at=BEGAN_AT + timedelta(seconds=number),
            source=f"failed-message-{number}",
            worker="replica-07",
            attempts=1 + number % 3,
            prompt=f"{SUBJECTS[number % len(SUBJECTS)]}, <lora:missing-{number % 3}:1>",
            error="MissingFileError",
            reason=f"there is no LoRA missing-{number % 3}: `imagefleet files add lora` adds one",
        )


async def fill(
    folder: Path,
    count: int,
    campaign: str = "spring",
    *,
    failed: int = 0,
    pictures: int = 48,
) -> None:
    """Stores *count* images, of which *pictures* differ, with their records."""
    settings = StorageSettings(storage=f"local:{folder}")
    async with open_storage(settings) as storage:
        await storage.create()
        logs = cycle(
            [RecordLog(storage.blobs, f"benchmark-{each}") for each in range(_WORKERS)]
        )
        drawn = [picture(seed) for seed in range(min(pictures, count))]
        images = folder / settings.container / campaign
        images.mkdir(parents=True, exist_ok=True)
        some: list[Record] = []
        ids: list[str] = []
        for made in records(count, campaign, failed=failed):
            record = made
            ids.append(record.id)
            if record.blob and pictures:
                number = int(record.id)
                digest = hashlib.sha256(drawn[number % len(drawn)]).hexdigest()
                record = record.model_copy(update={"sha256": digest})
                file = folder / settings.container / record.blob
                if number < len(drawn):
                    file.write_bytes(drawn[number])
                else:  # one file of many names
                    file.hardlink_to(images / f"{number % len(drawn):07d}.png")
            some.append(record)
            if len(some) == _APPENDED:
                await next(logs).add(some)
                some = []
        await next(logs).add(some)
        await sent_jobs.note(storage, campaign, count + failed, ids=ids)

"""PNG encoders on 512x512 images: time, size and the speed-up with two threads.

The images are smooth shapes with grain, so that no photographs have to be shipped; on photographs
the order is the same (worker/stages/encode.py has the sizes). Encoders that are not installed are
skipped.

    python benchmarks/stages/encoders.py
"""

from __future__ import annotations

import importlib.util
import io
import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from imagefleet.job.message import Output
from worker.engine.contract import Pixels
from worker.stages import encode

SIZE = 512
IMAGES = 4
ROUNDS = 12
THREADS = 2

Encoder = Callable[[Pixels], bytes]


def test_images() -> list[Pixels]:
    """Blurred colours with grain: about as compressible as a photograph."""
    random = np.random.default_rng(0)
    drawn = []
    for _ in range(IMAGES):
        small = Image.fromarray(random.integers(0, 256, (12, 12, 3), np.uint8))
        smooth = np.asarray(small.resize((SIZE, SIZE), Image.Resampling.BICUBIC), np.float64)
        grain = random.normal(0, 2.5, smooth.shape)
        drawn.append(np.clip(smooth + grain, 0, 255).astype(np.uint8))
    return drawn


def encoders() -> Iterator[tuple[str, Encoder]]:
    yield "imagefleet (isal, up)", lambda pixels: encode.encode(pixels, Output(), "").data
    for level in (1, 6):
        yield f"Pillow level {level}", lambda pixels, level=level: _pillow(pixels, level)
    if importlib.util.find_spec("cv2"):
        import cv2

        yield "OpenCV default", lambda pixels: cv2.imencode(".png", pixels[:, :, ::-1])[1].tobytes()
    if importlib.util.find_spec("imagecodecs"):
        import imagecodecs

        yield (
            "imagecodecs (RLE, sub)",
            lambda pixels: imagecodecs.png_encode(pixels, level=1, strategy=3, filter=16),
        )
    if importlib.util.find_spec("fpng_py"):
        import fpng_py

        yield (
            "fpng",
            lambda pixels: fpng_py.fpng_encode_image_to_memory(pixels.tobytes(), SIZE, SIZE),
        )


def _pillow(pixels: Pixels, level: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=level)
    return buffer.getvalue()


def measure(encoder: Encoder, images: list[Pixels]) -> dict[str, float]:
    """Milliseconds and KiB per image, and the speed-up with two threads."""
    data = [encoder(image) for image in images]
    for image, file in zip(images, data, strict=True):
        decoded = np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))
        if not np.array_equal(decoded, image):
            raise RuntimeError("an encoder changed the image")
    seconds = []
    for _ in range(ROUNDS):
        for image in images:
            began_at = time.perf_counter()
            encoder(image)
            seconds.append(time.perf_counter() - began_at)
    many = images * ROUNDS
    with ThreadPoolExecutor(THREADS) as threads:
        began_at = time.perf_counter()
        list(threads.map(encoder, many))
        threaded = (time.perf_counter() - began_at) / len(many)
    median = statistics.median(seconds)
    return {
        "milliseconds": round(1000 * median, 2),
        "kibibytes": round(statistics.mean(map(len, data)) / 1024),
        "two_threads": round(median / threaded, 2),
    }


def main() -> None:
    images = test_images()
    table = Table("encoder", "ms", "KiB", f"x{THREADS} threads")
    results = {}
    for name, encoder in encoders():
        figures = results[name] = measure(encoder, images)
        table.add_row(name, *(str(figure) for figure in figures.values()))
    Console().print(table)
    print(json.dumps(results))


if __name__ == "__main__":
    main()

"""Blobs that a stolen token or a failing disk leaves: the report counts them and goes on."""

import asyncio
import io
import json
import resource
import struct
import subprocess
import zlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from PIL import PngImagePlugin

import bombs
from imagefleet.job.message import Output
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Record
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from in_process import Imagefleet
from worker.stages import encode

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)
PIXELS = np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3)
GOOD = {
    "worker": "w1",
    "seconds": "2.0",
    "attempt": "1",
    "job": "good",
    "price_per_hour": "0.1",
}

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def png(
    *chunks: tuple[bytes, bytes], width: int = 32, height: int = 32, rows: bytes = b""
) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    every = [(b"IHDR", header), *chunks, (b"IDAT", rows), (b"IEND", b"")]
    file = io.BytesIO(SIGNATURE)
    file.seek(len(SIGNATURE))
    for kind, data in every:
        PngImagePlugin.putchunk(file, kind, data)
    return file.getvalue()


def black_rows(width: int, height: int) -> bytes:
    """As many black pixels, in a thousandth of their size."""
    packer = zlib.compressobj(9)
    row = bytes(1 + 3 * width)
    return b"".join(packer.compress(row) for _ in range(height)) + packer.flush()


#: A prompt's text that expands to 48 MiB.
TEXT_BOMB = bombs.pack(b"x", 48)

PICTURES: dict[str, bytes] = {
    "not-an-image": b"<script>alert(1)</script>",
    "empty": b"",
    "cut": encode.encode(PIXELS, Output(), "a\nSteps: 1").data[:200],
    "huge": png(width=30_000, height=9_600, rows=zlib.compress(bytes(1_000))),
    "wide": png(width=2**31 - 1, height=1, rows=zlib.compress(bytes(1_000))),
    "pixels": png(width=6_000, height=6_000, rows=black_rows(6_000, 600)),
    "zTXt": png((b"zTXt", b"parameters\0\0" + TEXT_BOMB), rows=black_rows(32, 32)),
    "iTXt": png(
        (b"iTXt", b"parameters\0\1\0\0\0" + TEXT_BOMB), rows=black_rows(32, 32)
    ),
    "iCCP": png((b"iCCP", b"icc\0\0" + TEXT_BOMB), rows=black_rows(32, 32)),
    "escapes": png(
        (b"tEXt", b"parameters\0\x1b[2J\x9bred <b>"), rows=black_rows(32, 32)
    ),
}

KNOWN = {"outcome": "completed", "id": "good", "at": NOON}

METADATA: dict[str, Mapping[str, str]] = {
    "seconds": {"seconds": "1e300"},
    "negative": {"seconds": "-1e300"},
    "nan": {"seconds": "nan"},
    "price": {"price_per_hour": "inf"},
    "expensive": {"price_per_hour": "-1e308"},
    "start": {"start_up_seconds": "1e300"},
    "attempt": {"attempt": "1e308"},
    "attempts": {"attempt": "9" * 400},
    "worker": {"worker": "w" * 5000},
    "metadata": {"metadata": "{" * 2000},
    "infinite": {"metadata": '{"a": 1e999}'},
    "surrogate": {"metadata": '{"\ud800": 1}'},
    "images": {"images": "1000000000"},
}


def report(
    in_process: Imagefleet, *arguments: str
) -> tuple[subprocess.CompletedProcess[str], str, str]:
    """The command's outcome, its JSON and its page."""
    result = in_process("report", *arguments, "--json-file", "figures.json")
    assert result.returncode == 0, result.stderr
    return (
        result,
        Path("figures.json").read_text(),
        Path("spring-report.html").read_text(),
    )


async def fill(settings: StorageSettings) -> None:
    async with open_storage(settings) as storage:
        await storage.create()
        create = storage.blobs.create
        for number in range(2):
            data = encode.encode(PIXELS, Output(), "a house\nSteps: 1").data
            await create(f"spring/good-{number}.png", data, "image/png", GOOD)
        for name, data in PICTURES.items():
            await create(
                f"spring/p-{name}.png", data, "image/png", {**GOOD, "job": f"p-{name}"}
            )
        known = {
            "outcome": "completed",
            "campaign": "spring",
            "at": NOON,
            "worker": "w1",
        }
        known["prompt"] = "a cat <hypernet:x:1> (a dog:1e999 <b>\x1b[2J\x9b"
        names = ["good-0", "good-1", *(f"p-{name}" for name in PICTURES)]
        records = [
            Record.model_validate({**known, "id": name, "blob": f"spring/{name}.png"})
            for name in names
        ]
        failed = Record(
            outcome="failed",
            id="x",
            campaign="spring",
            at=NOON,
            error="\x1b[31m" * 40,
            reason="<script>\x9b\x00" * 900,
        )
        await RecordLog(storage.blobs, "w").add([*records, failed])


async def test_hostile_blobs_are_left_out_with_their_number_and_reasons(
    storage_settings: StorageSettings, in_process: Imagefleet
):
    await fill(storage_settings)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    result, text, page = await asyncio.to_thread(
        report,
        in_process,
        "spring",
        "--storage",
        storage_settings.storage,
        "--queue",
        storage_settings.queue,
        "--container",
        storage_settings.container,
        "--files-container",
        storage_settings.files_container,
        "--limit",
        "200",
        "--price-per-hour",
        "1",
    )

    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 300_000, "kilobytes of memory"
    unreadable = len(PICTURES) - 1  # the texts of the escapes are not read
    assert result.stderr.startswith(f"warning: {unreadable} records do not fit: ")
    assert f"and {unreadable - 3:,} more" in result.stderr
    figures = json.loads(text, parse_constant=pytest.fail)
    assert figures["images"] == 2 + len(PICTURES)
    assert figures["damaged"] == len(figures["damage"]) == unreadable
    assert sum(each["images"] for each in figures["workers"]) == 2 + len(PICTURES)
    assert f"{unreadable} records and samples" in page
    assert page.count("not an image") == unreadable
    assert "a cat &lt;hypernet:x:1&gt; (a dog:1e999 &lt;b&gt;" in page
    assert "<script" not in page
    shown = page + result.stdout + result.stderr
    assert not set(shown) & {"\x1b", "\x9b", "\x00", "\ud800"}
    assert len(page) < 300_000


def test_the_metadata_of_an_image_is_read_whole():
    facts = {
        **GOOD,
        "images": "2",
        "seed": "4294967295",
        "metadata": '{"a": [1, null]}',
        "new": "1",
    }

    record = Record.of_blob(KNOWN, facts)

    assert (record.seconds, record.attempts, record.price_per_hour) == (2.0, 1, 0.1)
    assert (record.images, record.seed, record.metadata) == (
        2,
        2**32 - 1,
        {"a": [1, None]},
    )


@pytest.mark.parametrize("name", METADATA)
def test_of_damaged_metadata_nothing_is_taken(name: str):
    assert Record.of_blob(KNOWN, {**GOOD, **METADATA[name]}) == Record.model_validate(
        KNOWN
    )

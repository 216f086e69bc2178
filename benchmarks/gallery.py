"""The gallery in a headless browser: its first screen, scrolling, and filters of many rows.

A campaign is stored without a worker, then `imagefleet gallery` runs with an empty cache. A gap is
a part of the screen without a tile in a frame that was painted; a tile may still wait for its
thumbnail.

    python benchmarks/gallery.py [--images 10000] [--rows 1000000]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

import browser
import drawn_campaign

#: True if every tile on the screen has its thumbnail.
FIRST_SCREEN = """(() => {
  const bottom = document.querySelector("#grid").getBoundingClientRect().bottom;
  const tiles = [...document.querySelectorAll(".tile")].filter(each => {
    const box = each.getBoundingClientRect();
    return box.top < bottom && box.bottom > 0;
  });
  return tiles.length > 5 && tiles.every(each => each.classList.contains("loaded"));
})()"""

#: Scrolls by so many pixels in each frame; what the last frame has painted is judged first.
SCROLL = """(async (step, frames) => {
  const grid = document.querySelector("#grid"), box = grid.getBoundingClientRect();
  const gaps = [], times = [], largest = 30;
  const isGap = () => {
    const columns = new Map();
    for (const tile of grid.querySelectorAll(".tile")) {
      const { left, top, bottom } = tile.getBoundingClientRect();
      if (bottom < box.top || top > box.bottom) continue;
      columns.set(left, [...(columns.get(left) ?? []), [top, bottom]]);
    }
    return columns.size === 0 || [...columns.values()].some(tiles => {
      tiles.sort((one, other) => one[0] - other[0]);
      const ends = [box.top, ...tiles.map(each => each[1])];
      const starts = [...tiles.map(each => each[0]), box.bottom];
      return starts.some((start, number) => start - ends[number] > largest);
    });
  };
  let last = await new Promise(requestAnimationFrame);
  for (let frame = 0; frame < frames; frame++) {
    grid.scrollTop += step;
    const now = await new Promise(requestAnimationFrame);
    times.push(now - last);
    last = now;
    gaps.push(isGap());
  }
  times.sort((one, other) => one - other);
  return {
    frames, gaps: gaps.filter(Boolean).length, median: times[Math.floor(frames / 2)],
    p95: times[Math.floor(frames * 0.95)], top: grid.scrollTop,
  };
})"""


@contextlib.contextmanager
def serving(storage: Path, cache: Path) -> Iterator[tuple[str, int]]:
    """`imagefleet gallery`; gives its address and its process."""
    command = [sys.executable, "-m", "fleet.entry", "gallery", "--storage", f"local:{storage}"]
    command += ["--port", "0", "--no-browser", "--cache", str(cache)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"http://\S+/", process.stdout.readline())
            if found is None:
                raise RuntimeError("the gallery did not start")
            yield found[0], process.pid
        finally:
            process.terminate()


async def screens(url: str, program: str) -> dict[str, Any]:
    """Seconds to the first screen, without and with thumbnails, and how it scrolls."""
    found: dict[str, Any] = {}
    with browser.running(program) as started:
        async with started.page() as warm_up:  # a browser's first page is slow, whatever is on it
            await warm_up.open(url + "page/icon.svg")
        for name in ("cold", "warm"):
            async with started.page() as page:
                began_at = time.monotonic()
                await page.open(url)
                await page.until(FIRST_SCREEN)
                found[f"first_screen_{name}_seconds"] = time.monotonic() - began_at
                if name == "cold":
                    continue
                for speed, step, frames in (("wheel", 120, 240), ("fling", 700, 240)):
                    found[speed] = await page.evaluate(f"{SCROLL}({step}, {frames})")
                    began_at = time.monotonic()
                    await page.until(FIRST_SCREEN)
                    found[speed]["filled_seconds"] = time.monotonic() - began_at
                await page.evaluate("document.querySelector('#grid').scrollTop = 1e9")
                began_at = time.monotonic()
                await page.until(FIRST_SCREEN)
                found["end_filled_seconds"] = time.monotonic() - began_at
                assert page.complaints == []
    return found


async def filters(url: str, rows: int) -> dict[str, Any]:
    """Seconds to read all records, and to answer filters over them."""
    found: dict[str, Any] = {}
    async with aiohttp.ClientSession(url) as client:

        async def state(**chosen: str) -> dict[str, Any]:
            query = urllib.parse.urlencode({"campaign": "spring", **chosen})
            async with client.get(f"/api/state?{query}") as answer:
                answer.raise_for_status()
                read: dict[str, Any] = await answer.json()
                return read

        began_at = time.monotonic()
        while (now := await state())["reading"] or now["total"] < rows:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        found["read_seconds"] = time.monotonic() - began_at
        for name, chosen in {
            "a word that is nowhere": {"text": "zebra"},
            "a word of a sixth": {"text": "owl"},
            "two words": {"text": "lighthouse snowy"},
            "a LoRA": {"lora": "paper-cut"},
            "a worker": {"worker": "replica-07"},
        }.items():
            began_at = time.monotonic()
            total = (await state(**chosen))["total"]
            found[name] = {"rows": total, "seconds": time.monotonic() - began_at}
    return found


def peak_bytes(process: int) -> int:
    """The most memory that a process has had (Linux)."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    return int(found[1]) * 1024 if found else 0


async def measure(images: int, rows: int) -> dict[str, Any]:
    program = browser.find()
    if program is None:
        raise SystemExit(f"a browser is needed: one of {', '.join(browser.BROWSERS)}")
    found: dict[str, Any] = {"images": images, "rows": rows}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        await drawn_campaign.fill(work / "images", images)
        with serving(work / "images", work / "cache") as (url, process):
            found |= await screens(url, program)
            found["peak_bytes"] = peak_bytes(process)
        if rows:
            await drawn_campaign.fill(work / "rows", rows, pictures=0)
            with serving(work / "rows", work / "cache") as (url, process):
                found["filters"] = await filters(url, rows)
                found["filters"]["peak_bytes"] = peak_bytes(process)
            found["filters"]["index_bytes"] = max(
                file.stat().st_size for file in (work / "cache").glob("index-*.sqlite")
            )
    return found


def print_tables(found: dict[str, Any]) -> None:
    table = Table(title=f"{found['images']:,} images")
    for column in ("what", "figure"):
        table.add_column(column)
    table.add_row("first screen, no thumbnails yet", f"{found['first_screen_cold_seconds']:.2f} s")
    table.add_row("first screen, with thumbnails", f"{found['first_screen_warm_seconds']:.2f} s")
    for speed in ("wheel", "fling"):
        of = found[speed]
        table.add_row(f"{speed}: frames with a gap", f"{of['gaps']} of {of['frames']}")
        table.add_row(f"{speed}: frame, median / p95", f"{of['median']:.0f} / {of['p95']:.0f} ms")
        table.add_row(f"{speed}: all thumbnails after it ends", f"{of['filled_seconds']:.2f} s")
    table.add_row("jump to the end: all thumbnails", f"{found['end_filled_seconds']:.2f} s")
    table.add_row("server's memory, peak", f"{found['peak_bytes'] / 1e6:.0f} MB")
    Console().print(table)
    if "filters" in found:
        filtered = dict(found["filters"])
        table = Table(title=f"{found['rows']:,} rows")
        for column in ("what", "rows", "figure"):
            table.add_column(column)
        table.add_row("read all records once", "", f"{filtered.pop('read_seconds'):.0f} s")
        table.add_row("server's memory, peak", "", f"{filtered.pop('peak_bytes') / 1e6:.0f} MB")
        table.add_row("index in the cache", "", f"{filtered.pop('index_bytes') / 1e6:.0f} MB")
        for name, each in filtered.items():
            table.add_row(name, f"{each['rows']:,}", f"{each['seconds']:.2f} s")
        Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=0, help="Also filter so many rows.")
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments.images, arguments.rows))
    print_tables(found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

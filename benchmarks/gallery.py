"""The gallery in a headless browser: its first screen, scrolling, and filters.

A campaign is stored without a worker, then `imagefleet gallery` runs with an empty cache, and the
page is opened as soon as it is served. The first screen is there when each of its tiles shows its
thumbnail. A gap is a part of the screen without a tile in a frame that was painted; a tile may
still wait for its thumbnail.

    python benchmarks/gallery.py [--images 10000]
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

from in_browser import browser, drawn_campaign

#: True if every tile on the screen has its thumbnail.
FIRST_SCREEN = """(() => {
  const bottom = document.querySelector("#grid").getBoundingClientRect().bottom;
  const tiles = [...document.querySelectorAll(".tile")].filter(each => {
    const box = each.getBoundingClientRect();
    return box.top < bottom && box.bottom > 0;
  });
  return tiles.length > 5 && tiles.every(each => each.classList.contains("loaded"));
})()"""

#: The farthest item that is an element, as a share of all.
PLACE = """Math.max(...[...document.querySelectorAll(".tile")].map(
  each => each.ariaPosInSet / each.ariaSetSize))"""

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


async def measure(images: int) -> dict[str, Any]:
    program = browser.find()
    if program is None:
        raise SystemExit(f"a browser is needed: one of {', '.join(browser.BROWSERS)}")
    found: dict[str, Any] = {"images": images}
    with tempfile.TemporaryDirectory() as folder, browser.running(program) as started:
        work = Path(folder)
        await drawn_campaign.fill(work / "images", images)
        async with started.page() as warm_up:  # a browser's first page is slow, whatever is on it
            await warm_up.open("data:text/html,<p>")
            await warm_up.until("document.querySelector('p')")
        with serving(work / "images", work / "cache") as (url, process):
            began_at = time.monotonic()
            found["first_screen_cold_seconds"] = await first_screen(started, url)
            await until_read(url, images)
            found["read_seconds"] = time.monotonic() - began_at
            found |= await scrolls(started, url)
            found["filters"] = await filters(url)
            found["peak_bytes"] = peak_bytes(process)
            found["cpu_seconds"] = cpu_seconds(process)
        size = sum(file.stat().st_size for file in (work / "cache").glob("index-*"))
        found["index_bytes"] = size
    return found


async def first_screen(started: browser.Browser, url: str) -> float:
    """Seconds until a new page shows all of its thumbnails."""
    async with started.page() as page:
        began_at = time.monotonic()
        await page.open(url)
        await page.until(FIRST_SCREEN)
        return time.monotonic() - began_at


async def until_read(url: str, images: int) -> None:
    """Waits until the gallery has read all records."""
    async with aiohttp.ClientSession(url) as client:
        while (now := await state(client))["reading"] or now["total"] < images:  # noqa: ASYNC110
            await asyncio.sleep(0.5)


async def state(client: aiohttp.ClientSession, **chosen: str) -> dict[str, Any]:
    query = urllib.parse.urlencode({"campaign": "spring", **chosen})
    async with client.get(f"/api/state?{query}") as answer:
        answer.raise_for_status()
        read: dict[str, Any] = await answer.json()
        return read


async def scrolls(started: browser.Browser, url: str) -> dict[str, Any]:
    """The first screen with thumbnails in the cache, and how it scrolls."""
    found: dict[str, Any] = {"first_screen_warm_seconds": await first_screen(started, url)}
    async with started.page() as page:
        await page.open(url)
        await page.until(FIRST_SCREEN)
        for speed, step, frames in (("wheel", 120, 240), ("fling", 700, 240)):
            found[speed] = await page.evaluate(f"{SCROLL}({step}, {frames})")
            began_at = time.monotonic()
            await page.until(FIRST_SCREEN)
            found[speed]["filled_seconds"] = time.monotonic() - began_at
        for name, share in (("middle", 0.5), ("end", 1)):
            height = "document.querySelector('#canvas').clientHeight"
            await page.evaluate(f"document.querySelector('#grid').scrollTop = {share} * {height}")
            began_at = time.monotonic()
            await page.until(f"({PLACE}) >= {share} - 0.01 && {FIRST_SCREEN}")
            found[f"{name}_filled_seconds"] = time.monotonic() - began_at
        assert page.complaints == []
    return found


async def filters(url: str) -> dict[str, Any]:
    """Rows of some filters, and seconds to find them for the first time."""
    found: dict[str, Any] = {}
    async with aiohttp.ClientSession(url) as client:
        for name, chosen in {
            "a word that is nowhere": {"text": "zebra"},
            "a word of a sixth": {"text": "owl"},
            "two words": {"text": "lighthouse snowy"},
            "a LoRA": {"lora": "paper-cut"},
            "a worker": {"worker": "replica-07"},
        }.items():
            began_at = time.monotonic()
            total = (await state(client, **chosen))["total"]
            found[name] = {"rows": total, "seconds": time.monotonic() - began_at}
    return found


def peak_bytes(process: int) -> int:
    """The most memory that a process has had (Linux)."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    return int(found[1]) * 1024 if found else 0


def cpu_seconds(process: int) -> float:
    """What a process has used (Linux): on a busy machine, other times say little."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def print_table(found: dict[str, Any]) -> None:
    images = found["images"]
    table = Table(title=f"{images:,} images")
    for column in ("what", "figure"):
        table.add_column(column)
    table.add_row("first screen, empty cache", f"{found['first_screen_cold_seconds']:.2f} s")
    table.add_row("first screen, with thumbnails", f"{found['first_screen_warm_seconds']:.2f} s")
    table.add_row("all records read after", f"{found['read_seconds']:.1f} s")
    for speed in ("wheel", "fling"):
        of = found[speed]
        table.add_row(f"{speed}: frames with a gap", f"{of['gaps']} of {of['frames']}")
        table.add_row(f"{speed}: frame, median / p95", f"{of['median']:.0f} / {of['p95']:.0f} ms")
        table.add_row(f"{speed}: all thumbnails after it ends", f"{of['filled_seconds']:.2f} s")
    for place in ("middle", "end"):
        seconds = found[f"{place}_filled_seconds"]
        table.add_row(f"jump to the {place}: all thumbnails", f"{seconds:.2f} s")
    for name, each in found["filters"].items():
        table.add_row(f"filter: {name}, {each['rows']:,} rows", f"{each['seconds']:.2f} s")
    table.add_row("server's memory, peak", f"{found['peak_bytes'] / 1e6:.0f} MB")
    table.add_row("server's CPU time", f"{found['cpu_seconds']:.1f} s")
    table.add_row("index, for each image", f"{found['index_bytes'] / images / 1000:.2f} kB")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=10_000)
    found = asyncio.run(measure(parser.parse_args().images))
    print_table(found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

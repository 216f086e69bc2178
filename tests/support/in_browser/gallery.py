"""`imagefleet gallery` as a process, and what its page shows, for a browser."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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
def serving(storage: Path) -> Iterator[str]:
    """`imagefleet gallery`; gives its address."""
    command = [
        sys.executable,
        "-m",
        "fleet.entry",
        "gallery",
        "--storage",
        f"local:{storage}",
    ]
    command += ["--port", "0", "--no-browser"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"http://\S+/", process.stdout.readline())
            if found is None:
                raise RuntimeError("the gallery did not start")
            yield found[0]
        finally:
            process.terminate()

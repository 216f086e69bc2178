"""The report in a real browser: nothing is cut off on a phone, and no text is tiny.

Skipped where there is no Chromium or Chrome.
"""

import base64
import html
import io
import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from PIL import Image

from fleet.report import figures, page, records
from imagefleet.pricing import prices
from imagefleet.records.record import Record
from imagefleet.validation import JSONDict

pytestmark = pytest.mark.slow

NOON = datetime(2026, 11, 1, 12, 0, tzinfo=UTC)

BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)

WIDTHS = (320, 400, 768, 1280)

LONG_WORD = "no-spaces-" * 12

#: Measures each page in a frame of each width; a window cannot be as narrow as a phone.
MEASURE = """
<script>
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const root = frame.contentDocument.documentElement, view = frame.contentWindow;
    const texts = [...root.querySelectorAll("body *")].filter(each =>
      each.tagName !== "title" &&
      [...each.childNodes].some(node => node.nodeType === 3 && node.data.trim()));
    const shown = texts.filter(each => each.getClientRects().length &&
      !each.closest("thead") && each.getBoundingClientRect().width);
    return {
      page: frame.title, width: frame.clientWidth, scroll: root.scrollWidth,
      client: root.clientWidth,
      smallest: Math.min(...texts.map(each => parseFloat(view.getComputedStyle(each).fontSize))),
      cut: shown.filter(each => each.getBoundingClientRect().right > root.clientWidth + 1 ||
        each.getBoundingClientRect().left < -1).map(each => each.textContent.slice(0, 60)),
      texts: shown.length,
    };
  });
  document.body.textContent = JSON.stringify(found);
});
</script>
"""


def campaign(workers: int, failures: int) -> figures.Figures:
    """A campaign with long names everywhere."""
    found = records.Records("spring-catalogue-2026-" + "long" * 10)
    for number in range(workers):
        last = NOON + timedelta(hours=8 - number / 100)
        gpu = (
            "NVIDIA GeForce RTX 3060 Ti",
            "NVIDIA GeForce RTX 5090 Laptop GPU",
            None,
        )[number % 3]
        name = f"3f2b9c{number:02d}-77aa-4e0f-9a51-c0ffee{number:06d}"
        found.workers[name, "1"] = records.Worker(
            name, gpu, 0.1, 30, NOON, NOON, last, 40_000, seconds=8 * 3600
        )
        found.images += 40_000
        for minute in range(0, 480, 5):
            found.stored_in_second[int(NOON.timestamp()) + 60 * minute + number] += 416
    found.jobs = found.images
    found.image_bytes = 390_000 * found.images
    for number in range(failures):
        found.failed_by_error["InvalidMessageError", f"{number} {LONG_WORD}"] = (
            10**number
        )
    return figures.compute(found, f"https://{LONG_WORD}", prices.BUILT_IN)


def picture(number: int) -> Mapping[str, Any]:
    prompts = ["a house", "a cat, " * 100, f"a rope <lora:{'x' * 100}:0.35>"]
    name = f"{number:04d}-{LONG_WORD}"
    drawn = Record(outcome="completed", id=name, at=NOON, prompt=prompts[number % 3])
    stored = io.BytesIO()
    Image.new("RGB", ((64, 64), (64, 96), (96, 64))[number % 3], "teal").save(
        stored, "JPEG"
    )
    address = f"https://a.blob.core.windows.net/images/{number}.png"
    return page.sample(drawn, address, base64.b64encode(stored.getvalue()).decode())


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> list[JSONDict]:
    """What a browser makes of several reports at several widths."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser: one of {', '.join(BROWSERS)} is needed")
    folder = tmp_path_factory.mktemp("pages")
    pages = {
        "full": page.render(campaign(40, 4), [picture(n) for n in range(6)], NOON),
        "failures": page.render(campaign(0, 2), [], NOON),
        "one worker": page.render(campaign(1, 0), [picture(0)], NOON),
    }
    frames = "".join(
        f'<iframe title="{name}" style="width:{width}px;height:600px;border:0"'
        f' srcdoc="{html.escape(text)}"></iframe>'
        for name, text in pages.items()
        for width in WIDTHS
    )
    file = folder / "frames.html"
    file.write_text(f"<!doctype html><meta charset=utf-8><body>{frames}{MEASURE}")
    command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={folder / 'profile'}", file.as_uri()]
    dumped = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"\[\{.*\}\]", html.unescape(dumped.stdout), re.DOTALL)
    assert found, dumped.stdout[-2000:]
    return list(json.loads(found[0]))


def test_nothing_is_cut_off_at_any_width(measured: list[JSONDict]):
    assert len(measured) == 3 * len(WIDTHS)
    for each in measured:
        where = (each["page"], each["width"])
        assert each["texts"] > 20, where
        assert each["scroll"] <= each["client"], where
        assert each["cut"] == [], where


def test_no_text_is_smaller_than_12_pixels(measured: list[JSONDict]):
    for each in measured:
        assert each["smallest"] >= 12, (each["page"], each["width"], each["smallest"])

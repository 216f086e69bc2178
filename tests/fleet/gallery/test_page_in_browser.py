"""The page in a real browser, as people use it: by keyboard, on a phone, in the dark.

Skipped where there is no Chromium or Chrome.
"""

import asyncio
import contextlib
import hashlib
import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageStat

import sent_jobs
from fleet.gallery.campaign import Campaign
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Record
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict
from in_browser import drawn_campaign, gallery
from in_browser.browser import Browser, Page

pytestmark = pytest.mark.slow

IMAGES = 3_000
FAILED = 7

HOSTILE = (
    "<img src=x onerror=alert(1)>{{7*7}}\u202e\"'</script><script>alert(2)</script>"
)

Open = Callable[..., AbstractAsyncContextManager[Page]]

#: Of the viewer.
OPENED = "document.querySelector('#viewer').open && document.querySelector('#title').textContent"
CLOSED = "!document.querySelector('#viewer').open"

STATUS = "document.querySelector('#status').textContent"

#: What is cut off at the right, or has text under 12 pixels.
FAULTS = """(() => {
  const width = document.documentElement.clientWidth;
  const texts = [...document.querySelectorAll("body *")].filter(each => each.checkVisibility() &&
    [...each.childNodes].some(node => node.nodeType === 3 && node.data.trim()) &&
    !each.closest(".hidden, option"));
  const cut = texts.filter(each => each.getBoundingClientRect().right > width + 1);
  const tiny = texts.filter(each => parseFloat(getComputedStyle(each).fontSize) < 12);
  return { wide: document.documentElement.scrollWidth - width, texts: texts.length,
    cut: cut.map(each => each.textContent.slice(0, 60)),
    tiny: tiny.map(each => each.textContent.slice(0, 60)) };
})()"""


@pytest.fixture(scope="module")
def campaign(tmp_path_factory) -> StorageSettings:
    """A campaign of some thousand images, and some failed jobs."""
    folder = tmp_path_factory.mktemp("gallery")
    asyncio.run(drawn_campaign.fill(folder, IMAGES, failed=FAILED, pictures=6))
    return StorageSettings(storage=f"local:{folder}")


@pytest.fixture
def open_page(serve, chromium: Browser) -> Open:
    """Opens the gallery of a storage in a browser; fails if the page complains."""

    @contextlib.asynccontextmanager
    async def opened(
        settings: StorageSettings,
        *,
        width: int = 1280,
        height: int = 800,
        fragment: str = "",
    ) -> AsyncIterator[Page]:
        async with (
            serve(settings) as served,
            chromium.page(width=width, height=height) as page,
        ):
            await page.open(f"{served.url}/{fragment}")
            await page.until("document.querySelector('.tile[aria-label]')")
            await page.until(
                f"!{STATUS}.includes('reading')", 20
            )  # or the list goes on to grow
            yield page
            assert page.complaints == []

    return opened


async def active(page: Page) -> int:
    """The place of the chosen tile in the list; 0 if there is none."""
    place = "Number(document.querySelector('.tile.active')?.getAttribute('aria-posinset') ?? 0)"
    return int(await page.evaluate(place))


async def test_a_person_walks_through_it_by_keyboard(
    campaign: StorageSettings, open_page: Open
):
    async with open_page(campaign) as page:
        await page.until(gallery.FIRST_SCREEN)
        columns = await page.evaluate(
            "new Set([...document.querySelectorAll('.tile')]"
            ".map(each => each.getBoundingClientRect().x)).size"
        )
        expected = {
            "ArrowRight": 1,
            "ArrowDown": 1 + columns,
            "ArrowLeft": columns,
            "End": IMAGES,
        }
        await page.press("ArrowRight")
        assert await active(page) == 1
        for key, place in expected.items():
            await page.press(key)
            assert await active(page) == (place + 1 if key != "End" else place), key
        await page.until("document.querySelector('.tile.active.loaded')")
        await page.press("Enter")
        assert await page.until(OPENED) == "0000000"
        await page.press("ArrowRight")  # there is none after the last
        await page.press("ArrowLeft")
        await page.until(f"({OPENED}) === '0000001'")
        await page.press("Escape")
        await page.until(CLOSED)
        assert await active(page) == IMAGES - 1
        await page.press("Home")
        await page.press("Enter")
        await page.until(f"({OPENED}) === '{IMAGES - 1:07d}'")
        for number in range(2, 6):
            await page.press("ArrowRight")
            await page.until(f"({OPENED}) === '{IMAGES - number:07d}'")
        await page.until(
            "document.querySelector('#picture').src.includes('/picture?') &&"
            " document.querySelector('#picture').naturalWidth === 512"
        )
        await page.press("Escape")
        await page.until(CLOSED)
        assert await active(page) == 5


async def test_the_parameters_are_there_and_the_job_can_be_copied(
    campaign: StorageSettings, open_page: Open
):
    async with open_page(campaign) as page:
        await page.evaluate(
            "navigator.clipboard.writeText = async text => { window.copied = text; }; undefined"
        )
        await page.click(".tile[aria-posinset='2']")
        name = await page.until(OPENED)
        facts = await page.until("document.querySelector('#facts').innerText")
        record = next(
            each
            for each in drawn_campaign.records(IMAGES, "spring")
            if each.id == name  # the second newest
        )
        assert int(name) == IMAGES - 2
        for value in (record.prompt, record.negative_prompt, record.worker, record.gpu):
            assert value in facts
        for value in (
            record.seed,
            record.steps,
            record.sampler,
            record.model,
            record.width,
        ):
            assert str(value) in facts
        await page.press("c")
        copied = json.loads(await page.until("window.copied"))
        assert (copied["prompt"], copied["seed"]) == (record.prompt, record.seed)
        assert (copied["campaign"], "id" in copied) == ("spring", False)
        await page.click(".chip")
        await page.until(f"{CLOSED} && document.querySelector('#lora').value")
        await page.until(
            f"document.querySelector('.tile')?.ariaSetSize == {IMAGES // 4}"
        )


async def test_what_is_copied_is_never_the_image_before(
    campaign: StorageSettings, open_page: Open
):
    async with open_page(campaign) as page:
        await page.evaluate(
            "navigator.clipboard.writeText = async text => { window.copied = text; };"
            "(real => { window.fetch = (url, ...rest) => url.includes('/api/record') &&"
            " window.isSlow ? new Promise(() => {}) : real(url, ...rest); })(fetch)"
        )
        await page.click(".tile[aria-posinset='2']")
        await page.until("document.querySelector('#facts dl')")
        await page.evaluate("window.isSlow = true; undefined")
        await page.press("ArrowRight")
        await page.until(f"({OPENED}) === '{IMAGES - 3:07d}'")
        await page.press("c")
        await page.until(
            "document.querySelector('#toast').textContent.includes('being read')"
        )
        assert await page.evaluate("window.copied ?? null") is None
        links = "document.querySelector('#save').href, document.querySelector('#picture').src"
        await page.until(f"((saved, shown) => saved === shown)({links})")


async def test_filters_narrow_the_list_and_outlive_a_reload(
    campaign: StorageSettings, open_page: Open
):
    async with open_page(campaign) as page:
        await page.press("/")
        await page.write("blue fish snowy")
        count = sum(
            "blue fish" in str(each.prompt) and "snowy" in str(each.prompt)
            for each in drawn_campaign.records(IMAGES, "spring")
        )
        size = (
            "Number(document.querySelector('.tile')?.getAttribute('aria-setsize') ?? 0)"
        )
        await page.until(f"{size} === {count}")
        assert "text=blue+fish+snowy" in await page.evaluate("location.hash")
        await page.call("Page.reload")
        await page.until(f"{size} === {count}")
        assert (
            await page.evaluate("document.querySelector('#text').value")
            == "blue fish snowy"
        )
        await page.press("/")
        await page.write(" zebra")
        await page.until("!document.querySelector('#empty').hidden")
        await page.click("#clear")
        await page.until(f"{size} === {IMAGES}")
        await page.until("document.querySelector('#worker [value=\"replica-07\"]')")
        await page.evaluate(
            "(s => { s.value = 'replica-07'; s.dispatchEvent(new Event('change')); })"
            "(document.querySelector('#worker'))"
        )
        await page.until(f"{size} === {IMAGES // 40}")


async def test_thousands_of_images_scroll_without_a_gap(
    campaign: StorageSettings, open_page: Open
):
    async with open_page(campaign) as page:
        await page.until(gallery.FIRST_SCREEN)
        for step, frames in ((120, 25), (700, 25)):
            scrolled = await page.evaluate(f"{gallery.SCROLL}({step}, {frames})")
            assert scrolled["gaps"] == 0, scrolled
        await page.evaluate("document.querySelector('#grid').scrollTop = 1e9")
        await page.until(gallery.FIRST_SCREEN)
        assert await page.evaluate("document.querySelectorAll('.tile').length") < 300


async def test_new_images_come_at_the_top_and_move_nothing_under_a_readers_eyes(
    open_page: Open, tmp_path
):
    settings = StorageSettings(storage=f"local:{tmp_path / 'data'}")
    await drawn_campaign.fill(tmp_path / "data", 150, pictures=2)
    async with open_storage(settings) as storage, open_page(settings) as page:
        log = RecordLog(storage.blobs, "worker-2")
        await sent_jobs.note(storage, "spring", 2, ids=("new1", "new2"))

        async def arrive(number: int) -> None:
            await storage.blobs.create(f"spring/new{number}.png", b"x", "image/png", {})
            record = {
                "outcome": "completed",
                "id": f"new{number}",
                "campaign": "spring",
            }
            record |= {"blob": f"spring/new{number}.png", "at": drawn_campaign.BEGAN_AT}
            record["sha256"] = hashlib.sha256(b"x").hexdigest()
            await log.add([Record.model_validate(record)])

        first = "document.querySelector('.tile[aria-posinset=\"1\"]').getAttribute('aria-label')"
        await page.until(f"{first}.length")
        await arrive(1)
        await page.until(f"{first} === 'new1'")
        await page.evaluate("document.querySelector('#grid').scrollTop = 500")
        await page.until(gallery.FIRST_SCREEN)
        before = await page.evaluate(
            "document.elementFromPoint(300, 400).closest('.tile').id"
        )
        await arrive(2)
        await page.until("!document.querySelector('#newer').hidden")
        assert (
            await page.evaluate("document.querySelector('#newer').textContent")
            == "1 newer"
        )
        where = "document.elementFromPoint(300, 400).closest('.tile').id"
        assert await page.evaluate(where) == before
        await page.click("#newer")
        await page.until(f"{first} === 'new2'")
        await page.until("document.querySelector('.tile.broken')")  # it is no image
        await page.press("ArrowRight")
        await page.press("Home")
        await page.press("Enter")
        await page.until(
            "document.querySelector('#reason').innerText.includes('not a PNG')"
        )
        page.complaints.clear()  # of these two


@pytest.mark.parametrize("width", [1280, 400])
async def test_nothing_is_cut_off_or_tiny_in_any_view(
    campaign: StorageSettings, open_page: Open, width: int
):
    async with open_page(campaign, width=width) as page:
        await page.until(gallery.FIRST_SCREEN)
        views = {"images": await page.evaluate(FAULTS)}
        for scheme in ("light", "dark"):
            await page.use_colors(scheme)
            with Image.open(io.BytesIO(await page.screenshot())) as shown:
                header = ImageStat.Stat(shown.convert("L").crop((0, 0, width, 8))).mean[
                    0
                ]
            assert (header < 60) == (scheme == "dark"), header
        await page.press("ArrowRight")
        await page.press("Enter")
        await page.until(OPENED)
        await page.until("document.querySelector('#facts dl')")
        views["image"] = await page.evaluate(FAULTS)
        await page.press("Escape")
        await page.until(CLOSED)
        await page.click("[data-tab=failed]")
        await page.until("document.querySelector('.tile.job .why')?.textContent")
        views["failed"] = await page.evaluate(FAULTS)
        await page.click(".tile.job")
        await page.until(OPENED)
        await page.until("!document.querySelector('#again').hidden")
        command = await page.evaluate("document.querySelector('#again').textContent")
        assert "imagefleet replay " in command
        views["job"] = await page.evaluate(FAULTS)
        for name, faults in views.items():
            assert (faults["wide"], faults["tiny"]) == (0, []), name
            assert faults["texts"] > 8, name
            assert faults["cut"] == [], name


async def test_hostile_texts_are_texts(open_page: Open, tmp_path):
    settings = StorageSettings(storage=f"local:{tmp_path / 'data'}")
    async with open_storage(settings) as storage:
        await storage.create()
        names = dict.fromkeys(("worker", "gpu", "model", "sampler", "error"), HOSTILE)
        texts = dict.fromkeys(
            ("prompt", "negative_prompt", "reason", "source"), HOSTILE
        )
        known: JSONDict = {
            "id": "1",
            "campaign": "spring",
            "at": drawn_campaign.BEGAN_AT,
        }
        known["sha256"] = hashlib.sha256(drawn := drawn_campaign.picture(1)).hexdigest()
        await storage.blobs.create("spring/1.png", drawn, "image/png", {})
        known |= {
            "loras": [(HOSTILE, 1)],
            "metadata": {HOSTILE: HOSTILE},
            **names,
            **texts,
        }
        image = {"outcome": "completed", "blob": "spring/1.png"}
        await RecordLog(storage.blobs, "w").add(
            [
                Record.model_validate(known | each)
                for each in (image, {"outcome": "failed", "id": "2"})
            ]
        )
    async with open_page(settings) as page:
        await page.evaluate("window.alert = text => { window.owned = text; }")
        for tab in ("images", "failed"):
            await page.click(f"[data-tab={tab}]")
            await page.until("document.querySelector('.tile[aria-label]')")
            await page.click(".tile")
            await page.until(OPENED)
            await page.until("document.querySelector('#facts dl')")
            shown = await page.evaluate("document.querySelector('#viewer').innerText")
            assert shown.count("<img src=x onerror=alert(1)>{{7*7}}") >= 5
            assert "\u202e" not in shown
            await page.press("Escape")
            await page.until(CLOSED)
        assert await page.evaluate("window.owned ?? null") is None
        assert (
            await page.evaluate(
                "document.querySelectorAll('img[src=x], main script').length"
            )
            == 0
        )


async def test_the_page_says_when_the_gallery_has_ended(
    campaign: StorageSettings, serve, chromium: Browser
):
    async with chromium.page() as page:
        async with serve(campaign) as served:
            await page.open(served.url)
            await page.until(gallery.FIRST_SCREEN)
        await page.until("!document.querySelector('#problem').hidden")
        assert "imagefleet gallery" in await page.evaluate(
            "document.querySelector('#problem').textContent"
        )


async def test_a_list_longer_than_a_browser_can_be_high_has_an_end(
    campaign: StorageSettings, open_page: Open, monkeypatch
):
    real = Campaign.view

    async def repeated(self: Campaign, chosen: Any, **options: Any) -> Any:
        view = await real(self, chosen, **options)
        if len(view.seqs) == IMAGES:
            view.seqs = np.tile(view.seqs, 400)
        return view

    monkeypatch.setattr(Campaign, "view", repeated)
    async with open_page(campaign, width=400) as page:
        await page.until(gallery.FIRST_SCREEN)
        await page.press("ArrowRight")
        await page.press("End")
        assert await active(page) == IMAGES * 400
        box = "document.querySelector('.tile.active').getBoundingClientRect()"
        assert await page.evaluate(f"{box}.bottom <= innerHeight && {box}.top > 0")
        await page.press("ArrowUp")
        await page.press("PageUp")
        assert await page.evaluate(f"{box}.bottom <= innerHeight && {box}.top > 0")
        scrolled = await page.evaluate(f"{gallery.SCROLL}(-100, 20)")
        assert scrolled["gaps"] == 0

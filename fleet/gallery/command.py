"""`imagefleet gallery`: shows a campaign's images in the browser as they arrive."""

import asyncio
import math
import os
import sys
import webbrowser

from cli import console, options, target
from cli.options import argument, option
from fleet.gallery import server
from imagefleet.storage.settings import StorageSettings
from imagefleet.telemetry import probes


@options.flat
async def command(
    settings: StorageSettings,
    campaign: str | None = argument(
        "Shown first; by default the one that began last.", None, metavar="CAMPAIGN"
    ),
    host: str = option(
        "Address that it listens on; 0.0.0.0 for all interfaces.", "127.0.0.1"
    ),
    port: int = option("Port; 0 picks a free one.", 8000, min=0, max=65_535),
    browser: bool = option("Open the page in a browser.", default=True),
) -> None:
    """Shows a campaign's images in the browser, as they arrive.

    By prompt, LoRA and worker, each with its parameters; and the failed jobs with their reasons. It
    runs until Ctrl-C, and reads only while a page is open. On Azure the tokens of the role monitor
    suffice.

    imagefleet gallery

    imagefleet gallery spring --port 8080 --no-browser
    """
    shown = target.campaign(campaign)
    async with console.connected(settings) as fleet:
        await target.check_campaign(fleet.storage, shown)
        app = server.Gallery(fleet.storage, host, shown).application()
        async with probes.listening(app, host, port, "the gallery") as chosen:
            name = "localhost" if host in {"0.0.0.0", "::"} else host  # noqa: S104 - compared only
            url = f"http://{probes.authority(name, chosen)}/"
            console.print_plain(
                f"The gallery of {fleet.storage.url} is at {url} (Ctrl-C ends it)"
            )
            # Without a screen, a text browser would take over the terminal.
            has_screen = any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
            if browser and (has_screen or sys.platform == "darwin"):
                await asyncio.to_thread(webbrowser.open, url)
            await console.until_stopped(asyncio.sleep(math.inf))

"""`imagefleet report`: the figures of a campaign, as a self-contained HTML page and as JSON."""

from dataclasses import replace
from pathlib import Path

from cli import console, options, target
from cli.options import option
from fleet.report import figures as report_figures
from fleet.report import page as report_page
from fleet.report import records as report_records
from imagefleet.errors import SetupError
from imagefleet.job.message import DEFAULT_CAMPAIGN
from imagefleet.pricing import prices
from imagefleet.storage.settings import StorageSettings


@options.flat
async def command(
    settings: StorageSettings,
    campaign: target.Campaign = DEFAULT_CAMPAIGN,
    *,
    price_per_hour: float | None = option(
        "$/h of one worker, instead of what it recorded.", min=0.0001, metavar="DOLLARS"
    ),
    prices_path: options.PriceFile = None,
    output: Path | None = option(
        "The page [default: NAME-report.html].", metavar="FILE"
    ),
    json_file: options.JsonFile = None,
    limit: int = option(
        "Sample pictures on the page.", 24, min=0, max=200, metavar="COUNT"
    ),
    as_json: bool = option("Print JSON, write no page.", False, "--json"),
) -> None:
    """Writes a campaign's report: throughput, cost, failures.

    It is made from the workers' records.

    imagefleet report spring

    imagefleet report spring --json-file spring.json
    """
    campaign = target.campaign(campaign)
    table = prices.read_table(prices_path)
    if not settings.is_billed:
        table = replace(table, storage=prices.FREE_STORAGE)
    async with console.connected(settings) as client:
        storage = client.storage
        await target.check_campaign(storage, campaign)
        records = await report_records.read_records(
            storage, campaign, limit, price_per_hour
        )
        ended = records.failed + records.cancelled + records.dropped
        if not (records.images or ended):
            raise SetupError(
                f"campaign {campaign!r} has no images and no failed jobs in {storage.url}"
            )
        sampled = await report_page.read_samples(storage, records)
        made_at = storage.blobs.clock.now()
    figures = report_figures.compute(records, storage.url, table)
    if records.damaged.count:
        console.print_warning(str(records.damaged))
    facts = {"made_at": made_at, **figures}
    if json_file is not None:
        console.write_file(json_file, console.json_text(facts))
    if as_json:
        console.print_json(facts)
        return
    page = output or Path(f"{campaign}-report.html")
    console.write_file(page, report_page.render(figures, sampled, made_at))
    rate = console.number(figures["images_per_second"], 2)
    per_dollar = console.number(figures["money"]["images_per_dollar"])
    images = console.counted(figures["images"], "image")
    failed = console.counted(figures["failed"], "failed job")
    console.print_plain(
        f"{images}, {rate} images/s, {per_dollar} images per dollar, {failed}."
    )
    console.print_plain(f"Report: {page}")

"""`imagefleet report`: the figures of a campaign, as a self-contained HTML page and as JSON."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from fleet import console, options
from fleet.campaigns import target
from fleet.monitor import prometheus
from fleet.options import option
from fleet.report import figures as report_figures
from fleet.report import page as report_page
from fleet.report import records as report_records
from fleet.settings import MonitorSettings
from imagefleet import errors
from imagefleet import scores as campaign_scores
from imagefleet.job.message import DEFAULT_CAMPAIGN
from imagefleet.pricing import prices
from imagefleet.storage.open import LOCAL_SCHEME


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a worker, where it is not what the workers recorded."""

    price_per_hour: float | None = option(
        "$/h of one worker, instead of what it recorded.", min=0.0001, metavar="DOLLARS"
    )
    gpu: str | None = option("GPU class, to use its listed price.", metavar="NAME")
    priority: prices.Priority = option("SaladCloud priority of that price.", "batch")
    prices_path: options.PriceFile = None


@options.from_settings(MonitorSettings)
async def command(
    settings: MonitorSettings,
    campaign: target.Campaign = DEFAULT_CAMPAIGN,
    *,
    price: Price,
    output: Path | None = option("The page [default: NAME-report.html].", metavar="FILE"),
    json_file: options.JsonFile = None,
    scores: Path | None = option(
        "The --json-file of `imagefleet score`, for its curve.", metavar="FILE"
    ),
    limit: int = option("Sample pictures on the page.", 24, min=0, max=200, metavar="COUNT"),
    as_json: bool = option("Print JSON, write no page.", False, "--json"),
) -> None:
    """Writes a campaign's report: throughput, cost, failures.

    It is made from the workers' records. With --prometheus, it also has what only the
    metrics know: the whole cost and the waste.

    imagefleet report spring

    imagefleet report spring --prometheus http://localhost:9090 --json-file spring.json
    """
    campaign = target.campaign(campaign)
    table = prices.read_table(price.prices_path)
    if settings.storage.strip().startswith(LOCAL_SCHEME):
        table = replace(table, storage=prices.FREE_STORAGE)
    scored = None if scores is None else campaign_scores.read(scores)
    if scored is not None and scored.campaign != campaign:
        raise errors.SetupError(f"{scores} has the scores of {scored.campaign}, not of {campaign}")
    given_price, price_source = _price(price, table)
    async with console.connected(settings) as client:
        storage = client.storage
        await target.check_campaign(storage, campaign)
        records = await report_records.read_records(storage, campaign, limit, given_price)
        if not (records.workers or records.failed or records.cancelled):
            raise errors.SetupError(
                f"campaign {campaign!r} has no images and no failed jobs in {storage.url}"
            )
        sampled = await report_page.read_samples(storage.blobs, records)
        made_at = storage.blobs.clock.now()
    figures = report_figures.compute(records, storage.url, table, price_source)
    metrics, period = None, (figures["began_at"], figures["ended_at"])
    if settings.prometheus is not None and all(period):
        async with prometheus.connected(settings.prometheus, settings.queried_fleet) as server:
            replaced = report_figures.Replaced.of(figures)
            metrics = await report_figures.read_metrics(server, *period, replaced)
    if records.damaged.count:
        console.print_warning(str(records.damaged))
    if metrics and metrics["left_out"]:
        console.print_warning(metrics["left_out"])
    facts = {
        "made_at": made_at,
        **figures,
        "metrics": metrics,
        "scores": scored.model_dump() if scored else None,
    }
    if json_file is not None:
        console.write_file(json_file, console.json_text(facts))
    if as_json:
        console.print_json(facts)
        return
    page = output or Path(f"{campaign}-report.html")
    console.write_file(page, report_page.render(figures, metrics, sampled, made_at, scored))
    console.print_plain(f"{_summary(figures)}\nReport: {page}")


def _price(wanted: Price, table: prices.PriceTable) -> tuple[float | None, str]:
    """$/h of one worker, or None for what each recorded, and the source of the price."""
    gpu, priority = wanted.gpu, wanted.priority
    if wanted.price_per_hour is not None:
        return wanted.price_per_hour, "given with --price-per-hour"
    if gpu is None:
        return None, "recorded by the workers with each image"
    name = prices.find_gpu(gpu, table.gpus)
    source = f"{name} at {priority} priority, {table.gpus[name].source}"
    return prices.gpu_dollars_per_hour(name, priority, table), source


def _summary(figures: report_figures.Figures) -> str:
    facts = [console.counted(figures["images"], "image")]
    if (rate := figures["images_per_second"]) is not None:
        facts.append(f"{rate:.2f} images/s")
    if (per_dollar := figures["money"]["images_per_dollar"]) is not None:
        facts.append(f"{per_dollar:,.0f} images per dollar")
    return ", ".join([*facts, console.counted(figures["failed"], "failed job")]) + "."

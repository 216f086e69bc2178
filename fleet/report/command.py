"""`imagefleet report`: what a campaign came to, as one page that needs no server, and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from fleet import console, options
from fleet.monitor import prometheus
from fleet.monitor.settings import MonitorSettings
from fleet.report import figures as report_figures
from fleet.report import metrics as report_metrics
from fleet.report import page as report_page
from fleet.report import records as report_records
from imagefleet import errors
from imagefleet.pricing import price_file, prices
from imagefleet.storage.open import LOCAL_SCHEME, open_storage
from imagefleet.storage.settings import StorageSettings

RECORDED_PRICE = "recorded by the workers beside each image"


@options.from_settings(MonitorSettings)
def command(
    settings: MonitorSettings,
    campaign: Annotated[
        str, typer.Option(metavar="NAME", help="Jobs without a campaign are in 'default'.")
    ] = report_records.NO_CAMPAIGN,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page; NAME-report.html by default.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json-file", metavar="FILE", help="The figures, as JSON.")
    ] = None,
    price_per_hour: Annotated[
        float | None,
        typer.Option(
            min=0.0001, metavar="DOLLARS", help="Of one worker, instead of what it recorded."
        ),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="GPU class, for its price from the table.")
    ] = None,
    priority: Annotated[
        prices.Priority, typer.Option(help="SaladCloud's priority, for that price.")
    ] = "batch",
    prices_path: Annotated[
        Path | None, typer.Option("--price-file", metavar="FILE", help="Your own prices.")
    ] = None,
    samples: Annotated[int, typer.Option(min=0, max=200, help="Pictures on the page.")] = 24,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and write no page.")] = False,
) -> None:
    """Writes a page about a campaign: figures and samples.

    From the records beside the images in the store: totals, throughput, cost, failures, pictures.
    With --prometheus, also what only the metrics know: all the dollars, and what was wasted.

    imagefleet report --campaign spring

    imagefleet report --campaign spring --prometheus http://localhost:9090 --json-file spring.json
    """
    table = _table(settings, prices_path)
    price = _price(price_per_hour, gpu, priority, table)
    figures, metrics, pictures = console.run(_read(settings, campaign, table, price, samples))
    facts = _plain({"made_at": datetime.now(UTC), **asdict(figures)})
    facts["metrics"] = _plain(asdict(metrics)) if metrics else None
    if json_file is not None:
        _write(json_file, json.dumps(facts, ensure_ascii=False, indent=2) + "\n")
    if as_json:
        console.print_json(facts)
        return
    page = html or Path(f"{campaign}-report.html")
    _write(page, report_page.draw(figures, metrics, pictures, datetime.now(UTC)))
    console.stdout.print(_summary(figures), soft_wrap=True, highlight=False)
    console.stdout.print(f"The page: {page}", soft_wrap=True, highlight=False)


async def _read(
    settings: MonitorSettings,
    campaign: str,
    table: prices.PriceTable,
    price: tuple[float | None, str],
    samples: int,
) -> tuple[report_figures.Figures, report_metrics.Metrics | None, list[bytes]]:
    async with open_storage(settings) as storage:
        await storage.check()
        records = await report_records.read_records(storage, campaign, samples)
        if not records.images and not records.failed:
            raise errors.SetupError(
                f"nothing of the campaign {campaign!r} is in {storage.url}: no image, no failed job"
            )
        pictures = [await storage.blobs.read(name) for name in records.samples]
    figures = report_figures.compute(records, storage.url, table, *price)
    metrics = None
    if settings.prometheus is not None and figures.began_at and figures.ended_at:
        async with prometheus.connected(settings.prometheus) as server:
            metrics = await report_metrics.read_metrics(server, figures.began_at, figures.ended_at)
    return figures, metrics, [picture for picture in pictures if picture is not None]


def _price(
    given: float | None, gpu: str | None, priority: prices.Priority, table: prices.PriceTable
) -> tuple[float | None, str]:
    """Dollars per hour of one worker, or None for what each recorded; and where it comes from."""
    if given is not None:
        return given, "given with --price-per-hour"
    if gpu is None:
        return None, RECORDED_PRICE
    name = prices.find_gpu(gpu, table)
    source = f"{name} at {priority} priority, {table.gpus[name].source}"
    return prices.gpu_dollars_per_hour(name, priority, table), source


def _table(settings: StorageSettings, path: Path | None) -> prices.PriceTable:
    table = price_file.read_table(path)
    if settings.storage.strip().startswith(LOCAL_SCHEME):
        return dataclasses.replace(table, storage=prices.FREE_STORAGE)
    return table


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise errors.SetupError(f"cannot write {path}: {error.strerror or error}") from None


def _plain(value: Any) -> Any:
    """What JSON has a form for: times as ISO 8601."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value.isoformat() if isinstance(value, datetime) else value


def _summary(figures: report_figures.Figures) -> str:
    facts = [console.counted(figures.images, "image")]
    if figures.images_per_second is not None:
        facts.append(f"{figures.images_per_second:.2f} a second")
    if figures.money.images_per_dollar is not None:
        facts.append(f"{figures.money.images_per_dollar:,.0f} a dollar")
    return ", ".join([*facts, console.counted(figures.failed, "failed job")]) + "."

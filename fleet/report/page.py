"""The report as one self-contained HTML page: inline plots and pictures, no scripts."""

import base64
import textwrap
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from markupsafe import Markup
from rich import filesize

from cli.console import counted, significant
from fleet.gallery.images import shrink
from fleet.report.figures import Figures
from fleet.report.plot import Bar, Points, bars, time_plot
from fleet.report.records import Records
from imagefleet import errors, sweep
from imagefleet.files.picture import DamagedImageError
from imagefleet.job import prompt
from imagefleet.job.message import MAX_IMAGE_BYTES
from imagefleet.records.record import Record
from imagefleet.redaction import printable
from imagefleet.storage.protocol import BlobStore
from worker.progress import duration

#: Rows of the table of workers, the slowest first.
_MAX_WORKERS = 15

#: The colour of waste.
_BAD = 3

#: The most characters of a prompt; the rest is shown on demand.
_SHOWN_CHARACTERS = 110


async def read_samples(blobs: BlobStore, records: Records) -> list[Mapping[str, Any]]:
    """The samples of *records* that are still there; counts the damaged ones in them."""
    samples = []
    for record in records.samples:
        blob, shown = record.blob or "", None
        try:
            if (data := await blobs.read(blob, MAX_IMAGE_BYTES)) is None:
                continue
            shown = base64.b64encode(shrink(data)).decode()
        except (DamagedImageError, errors.JobError) as error:
            records.damaged.add(blob, str(error))
        samples.append(sample(record, blobs.address(blob), shown))
    return samples


def sample(record: Record, address: str, data: str | None) -> Mapping[str, Any]:
    """An image for the page; *data* is a JPEG in base64, None for what is no image."""
    words = printable(sweep.caption_of(record))
    _, loras = prompt.read_words(record.prompt or "")
    return {
        "job": record.id,
        "address": address,
        "data": data,
        "words": words,
        "short": textwrap.shorten(words, _SHOWN_CHARACTERS, placeholder=" …"),
        "loras": [f"{lora.name} {significant(lora.unet_weight)}" for lora in loras],
    }


def render(
    figures: Figures,
    metrics: Figures | None,
    samples: Sequence[Mapping[str, Any]],
    made_at: datetime,
) -> str:
    """The page; *samples* are shown as thumbnails with their jobs' ids, prompts and LoRAs."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fleet.report", ""),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    filters = {name: _or_unknown(show) for name, show in _FILTERS.items()}
    environment.filters.update(filters | {"gpu_name": gpu_name})
    return environment.get_template("page.html.jinja").render(
        counted=counted,
        figures=figures,
        metrics=metrics,
        made_at=made_at,
        plots=_plots(figures) | (_metrics_plots(metrics) if metrics else {}),
        slowest=list(reversed(figures["workers"]))[:_MAX_WORKERS],
        samples=samples,
    )


def _plots(figures: Figures) -> dict[str, Markup]:
    # Steps: a bin is a mean, so there is nothing to interpolate.
    points = [
        (at, rate["images_per_second"])
        for rate in figures["throughput"]
        for at in (rate["at"], rate["at"] + figures["bin_seconds"])
    ]
    workers, money = figures["workers"], figures["money"]
    dollars: dict[str, float] = defaultdict(float)
    if money["gpu_dollars"] is not None:
        for worker in workers:
            dollars[gpu_name(worker["gpu"])] += worker["gpu_dollars"]
    costs = dict(sorted(dollars.items())) | {
        "storage operations": money["storage_dollars"]
    }
    return {
        "throughput": time_plot({"images/s": points}, "Images/s stored"),
        "money": bars(_rows(costs, _dollars), "Dollars by kind"),
        "split": bars(
            _rows(money["split"] or {}, _dollars), "Dollars by what they paid for"
        ),
    }


def _metrics_plots(metrics: Figures) -> dict[str, Markup]:
    busy, idle = metrics["gpu_busy_seconds"], metrics["gpu_idle_seconds"]
    total = busy + sum(idle.values())
    paid = sum(metrics["dollars"].values())
    spent = _rows(
        metrics["split"], lambda amount: f"{_dollars(amount)}, {_share(amount, paid)}"
    )
    gpu_time = _rows({"busy": busy}, lambda seconds: _share(seconds, total))
    gpu_time += _rows(idle, lambda seconds: _share(seconds, total), "idle: ", _BAD)
    per_dollar = _lines(
        metrics, images_per_dollar_gpu_only="GPU only", images_per_dollar="all in"
    )
    return {
        "spent": bars(spent, "Dollars by what they paid for"),
        "gpu_time": bars(gpu_time, "Share of GPU time"),
        "stages": bars(
            _rows(metrics["stage_mean_seconds"], _seconds), "Mean seconds by stage"
        ),
        "images_per_dollar": time_plot(per_dollar, "Images per dollar over time"),
        "workers": time_plot(_lines(metrics, workers="workers"), "Workers over time"),
    }


def _rows(
    amounts: Mapping[str, float],
    label: Callable[[float], str],
    before: str = "",
    colour: int = 0,
) -> list[Bar]:
    """A bar for each amount, named by what precedes all and its own name."""
    return [
        Bar(before + _words(name), amount, label(amount), colour)
        for name, amount in amounts.items()
    ]


def _lines(metrics: Figures, **legends: str) -> dict[str, Points]:
    found = metrics["over_time"]
    return {legend: found[name] for name, legend in legends.items() if found.get(name)}


def gpu_name(recorded: str | None) -> str:
    return {None: "GPU", "none": "no GPU"}.get(recorded, recorded or "GPU")


def _words(slug: str) -> str:
    return slug[:80].replace("_", " ")


def _dollars(value: float) -> str:
    return f"${value:,.2f}" if value >= 0.1 or value == 0 else f"${significant(value)}"  # noqa: PLR2004


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "0 %"


def _seconds(value: float) -> str:
    return f"{significant(value)} s"


_FILTERS: Mapping[str, Callable[..., str]] = {
    "dollars": _dollars,
    "moment": "{:%Y-%m-%d %H:%M:%S}".format,
    "number": lambda value, spec=",": format(value, spec),
    "seconds": _seconds,
    "size": filesize.decimal,
    "span": duration,
    "words": _words,
}


def _or_unknown(show: Callable[..., str]) -> Callable[..., str]:
    return lambda value, *spec: "n/a" if value is None else show(value, *spec)

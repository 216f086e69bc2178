"""The report as one self-contained HTML page: inline plots and pictures, no scripts."""

from __future__ import annotations

import base64
import io
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import jinja2
import numpy as np
from markupsafe import Markup
from rich import filesize

from fleet import contact_sheet
from fleet.console import counted
from fleet.report.figures import Figures, Metrics
from fleet.report.plot import Bar, Line, bars, histogram, time_plot
from fleet.report.records import Records
from imagefleet import errors
from imagefleet import scores as campaign_scores
from imagefleet import scores as curve
from imagefleet.files import picture
from imagefleet.job import prompt
from imagefleet.job.message import MAX_IMAGE_BYTES
from imagefleet.scores import Scores, number_text
from imagefleet.storage.protocol import BlobStore
from worker.progress import duration

#: Rows of the table of workers, the slowest first.
_MAX_WORKERS = 15

_SPEED_BINS = 24
#: Stands for a figure that cannot be computed.
_UNKNOWN = "n/a"

#: The colour of waste.
_BAD = 3


#: The longer side of a sample: twice its size on the page, for screens of high resolution.
_PIXELS = 384
_WEBP_QUALITY = 80

#: The most characters of a prompt; the rest is shown on demand.
_SHOWN_CHARACTERS = 110


@dataclass(frozen=True, slots=True)
class Sample:
    """An image for the page; *data* is a WebP in base64, None for what is no image."""

    job: str
    address: str
    data: str | None = None
    width: int = 0
    height: int = 0
    words: str = ""
    loras: Sequence[str] = ()

    @property
    def short(self) -> str:
        return textwrap.shorten(self.words, _SHOWN_CHARACTERS, placeholder=" …")


async def read_samples(blobs: BlobStore, records: Records) -> list[Sample]:
    """The samples of *records* that are still there; counts the damaged ones in them."""
    samples = []
    for blob, job in records.samples:
        try:
            data = await blobs.read(blob, MAX_IMAGE_BYTES)
            if data is not None:
                samples.append(shrunk(job, blobs.address(blob), data))
        except (picture.DamagedImageError, errors.JobError) as error:
            records.damaged.add(blob, str(error))
            records.damaged_samples += 1
            samples.append(Sample(job, blobs.address(blob)))
    return samples


def shrunk(job: str, address: str, data: bytes) -> Sample:
    """The sample in a file's bytes; raises DamagedImageError."""
    tile, text = contact_sheet.read_image(data, _PIXELS)
    words, loras = prompt.read_words(text)
    stored = io.BytesIO()
    tile.save(stored, "WEBP", quality=_WEBP_QUALITY)
    return Sample(
        job,
        address,
        base64.b64encode(stored.getvalue()).decode(),
        tile.width,
        tile.height,
        words,
        [f"{lora.name} {number_text(lora.unet_weight)}" for lora in loras],
    )


def render(
    figures: Figures,
    metrics: Metrics | None,
    samples: Sequence[Sample],
    made_at: datetime,
    scores: Scores | None = None,
) -> str:
    """The page; *samples* are shown as thumbnails with their jobs' ids, prompts and LoRAs."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fleet.report", ""),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    filters = (gpu_name, _dollars, _moment, _number, _seconds, _span, _words)
    environment.filters.update({each.__name__.lstrip("_"): each for each in filters})
    environment.filters["size"] = filesize.decimal
    return environment.get_template("page.html.jinja").render(
        counted=counted,
        figures=figures,
        metrics=metrics,
        made_at=made_at,
        plots=_plots(figures) | (_metrics_plots(metrics) if metrics else {}),
        slowest=list(reversed(figures.workers))[:_MAX_WORKERS],
        samples=samples,
        scores=scores,
        curve=Markup(curve.svg(scores) if scores else ""),  # noqa: S704 - its texts are escaped
        scored_with=campaign_scores.facts(scores) if scores else {},
    )


def _plots(figures: Figures) -> dict[str, Markup]:
    # Steps: a bin is a mean, so there is nothing to interpolate.
    points = [
        (at, rate.images_per_second)
        for rate in figures.throughput
        for at in (rate.at, rate.at + figures.bin_seconds)
    ]
    speeds = [worker.images_per_second for worker in figures.workers if worker.images_per_second]
    bins: list[tuple[float, float, int]] = []
    if len(speeds) > _SPEED_BINS:
        numbers, edges = np.histogram(speeds, _SPEED_BINS)
        bins = list(zip(edges[:-1].tolist(), edges[1:].tolist(), numbers.tolist(), strict=True))
    dollars: dict[str, float] = defaultdict(float)
    if figures.money.gpu_dollars is not None:
        for worker in figures.workers:
            dollars[gpu_name(worker.gpu)] += worker.gpu_dollars or 0.0
    costs = [*sorted(dollars.items()), ("storage operations", figures.money.storage_dollars)]
    return {
        "throughput": time_plot([Line("images/s", points)], "Images/s stored", filled=True),
        "money": bars([Bar(*cost, _dollars(cost[1])) for cost in costs], "Dollars by kind"),
        "speeds": histogram(bins, "Workers by speed", "images/s"),
    }


def _metrics_plots(metrics: Metrics) -> dict[str, Markup]:
    stages = [
        Bar(_words(stage), mean, _seconds(mean))
        for stage, mean in metrics.stage_mean_seconds.items()
    ]
    busy, idle = metrics.gpu_busy_seconds, metrics.gpu_idle_seconds
    total = busy + sum(idle.values())
    gpu_time = [Bar("busy", busy, _share(busy, total))] + [
        Bar(f"idle: {_words(reason)}", each, _share(each, total), _BAD)
        for reason, each in idle.items()
    ]
    per_dollar = _lines(metrics, images_per_dollar_gpu_only="GPU only", images_per_dollar="all in")
    return {
        "spent": bars(_spent(metrics), "Dollars by kind, and waste by reason"),
        "gpu_time": bars(gpu_time, "Share of GPU time"),
        "stages": bars(stages, "Mean seconds by stage"),
        "images_per_dollar": time_plot(per_dollar, "Images per dollar over time"),
        "workers": time_plot(_lines(metrics, workers="workers"), "Workers over time"),
    }


def _spent(metrics: Metrics) -> list[Bar]:
    kinds = {"gpu": "GPU", "storage": "storage operations"}
    rows = [
        Bar(kinds.get(kind, kind), amount, _dollars(amount))
        for kind, amount in metrics.dollars.items()
    ]
    gpu = metrics.dollars.get("gpu", 0.0)
    return rows + [
        Bar(
            f"of the GPU: {_words(reason)}",
            amount,
            f"{_dollars(amount)}, {_share(amount, gpu)}",
            _BAD,
        )
        for reason, amount in metrics.wasted_dollars.items()
    ]


def _lines(metrics: Metrics, **legends: str) -> list[Line]:
    return [
        Line(legend, points)
        for name, legend in legends.items()
        if (points := metrics.over_time.get(name))
    ]


def gpu_name(recorded: str | None) -> str:
    return {None: "GPU", "none": "no GPU"}.get(recorded, recorded or "GPU")


def _words(slug: str) -> str:
    return slug[:80].replace("_", " ")


def _number(value: float | None, spec: str = ",") -> str:
    return _UNKNOWN if value is None else format(value, spec)


def _dollars(value: float | None) -> str:
    if value is None:
        return _UNKNOWN
    return f"${value:,.2f}" if value >= 0.1 or value == 0 else f"${number_text(value)}"  # noqa: PLR2004


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "0 %"


def _seconds(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{number_text(value)} s"


def _span(seconds: float | None) -> str:
    return _UNKNOWN if seconds is None else duration(seconds)


def _moment(at: datetime) -> str:
    return at.strftime("%Y-%m-%d %H:%M:%S")

"""The report as one HTML page: plots and pictures are in it, nothing is loaded, nothing runs."""

from __future__ import annotations

import base64
import importlib.util
import io
from collections.abc import Iterator, Sequence
from datetime import datetime
from html import escape

from fleet.console import counted
from fleet.report import metrics as report_metrics
from fleet.report.figures import Figures
from fleet.report.metrics import Metrics
from fleet.report.plot import Bar, Line, bars, histogram, number_text, time_plot

#: Rows of the table of workers: the slowest, who are the ones to look at.
_MOST_WORKERS = 15

_SPEED_BINS = 24
_WEBP_QUALITY = 82

#: The colour of what should not be.
_BAD = 3

#: Everything that the plots and the page need; `dashboards/preview.py` uses it too.
STYLE = """
:root { --paper: #fff; --ink: #1c1d21; --soft: #666a73; --rule: #e2e4e8; --wash: #f5f6f8;
  --c0: #2f6db5; --c1: #d9772b; --c2: #3d9a63; --c3: #b0435a; --c4: #7d62b0; --c5: #7a7f87; }
@media (prefers-color-scheme: dark) { :root { --paper: #17181c; --ink: #e8e9ec; --soft: #9a9ea8;
  --rule: #34363d; --wash: #202228; --c0: #6aa5e8; --c1: #eb9a57; --c2: #6cc48f; --c3: #e07a90;
  --c4: #a890d8; --c5: #a3a8b0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 2rem 1.25rem 4rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.9rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 2.6rem 0 .4rem; font-size: 1.2rem; } h3 { margin: 1.4rem 0 .2rem; font-size: 1rem; }
p, ul { margin: .3rem 0; } .soft, figcaption, th { color: var(--soft); }
.totals { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: 1px;
  margin: 1.6rem 0 0; background: var(--rule); border: 1px solid var(--rule); }
.totals div { padding: .8rem 1rem; background: var(--paper); }
.totals dt { color: var(--soft); font-size: .85rem; }
.totals dd { margin: 0; font-size: 1.6rem; font-variant-numeric: tabular-nums; }
.totals small { display: block; color: var(--soft); font-size: .8rem; }
svg { display: block; width: 100%; height: auto; margin: .4rem 0; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
.grid { stroke: var(--rule); } .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.area { opacity: .16; } .point { opacity: 0; } .point:hover { opacity: 1; }
.c0 { stroke: var(--c0); fill: var(--c0); } .c1 { stroke: var(--c1); fill: var(--c1); }
.c2 { stroke: var(--c2); fill: var(--c2); } .c3 { stroke: var(--c3); fill: var(--c3); }
.c4 { stroke: var(--c4); fill: var(--c4); } .c5 { stroke: var(--c5); fill: var(--c5); }
.line.c0, .line.c1, .line.c2, .line.c3, .line.c4, .line.c5 { fill: none; }
.bar, .area { stroke: none; }
.key { display: inline-block; margin-right: 1.2rem; font-size: .85rem; }
.key::before { content: ""; display: inline-block; width: .8rem; height: .25rem;
  margin-right: .4rem; vertical-align: middle; }
.key.c0::before { background: var(--c0); } .key.c1::before { background: var(--c1); }
.key.c2::before { background: var(--c2); } .key.c3::before { background: var(--c3); }
.key.c4::before { background: var(--c4); } .key.c5::before { background: var(--c5); }
.wide { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: .9rem; }
th, td { padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--rule); text-align: left;
  vertical-align: top; } th { font-weight: 500; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.reason { overflow-wrap: anywhere; }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: 1rem; }
figure { margin: 0; } figure img { width: 100%; height: auto; display: block;
  background: var(--wash); } figcaption { font-size: .75rem; line-height: 1.35; }
.notes { font-size: .85rem; color: var(--soft); padding-left: 1.1rem; }
@media print { body { max-width: none; padding: 0; } h2 { break-after: avoid; } }
"""


def draw(
    figures: Figures, metrics: Metrics | None, pictures: Sequence[bytes], made_at: datetime
) -> str:
    """The whole page; *pictures* are encoded images, shown small with the prompts in them."""
    body = "".join(
        [
            _head(figures, made_at),
            _totals(figures),
            _throughput(figures),
            _money(figures),
            _metrics(metrics) if metrics else "",
            _workers(figures),
            _failures(figures),
            _samples(pictures),
            _notes(figures, metrics),
        ]
    )
    title = escape(f"Campaign {figures.campaign}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head><body>{body}</body></html>\n"
    )


def _head(figures: Figures, made_at: datetime) -> str:
    span = ""
    if figures.began_at and figures.ended_at:
        span = f"{_moment(figures.began_at)} to {_moment(figures.ended_at)}, all times UTC. "
    return (
        f"<header><h1>Campaign {escape(figures.campaign)}</h1>"
        f'<p class="soft">{span}{escape(figures.storage)}. Written {_moment(made_at)}.</p></header>'
    )


def _totals(figures: Figures) -> str:
    money = figures.money
    images = f"{figures.images:,}"
    size = f"{counted(figures.jobs, 'job')}, {_size(figures.image_bytes)}"
    rate = _or_unknown(figures.images_per_second, "{:,.2f}")
    workers = f"{counted(len(figures.workers), 'worker')}, {_span(figures.seconds)}"
    all_in = _or_unknown(money.images_per_dollar, "{:,.0f}")
    gpu_only = f"GPU only: {_or_unknown(money.images_per_dollar_gpu_only, '{:,.0f}')}"
    failed = figures.jobs + figures.failed
    share = f"{figures.failed / failed:.2%} of the jobs" if failed else ""
    tiles = [
        ("Images", images, size),
        ("Images/s", rate, workers),
        ("Images per dollar, all in", all_in, gpu_only),
        ("Dollars", _dollars(money.dollars), "GPU and storage operations"),
        ("Failed jobs", f"{figures.failed:,}", share),
    ]
    shown = "".join(
        f"<div><dt>{name}</dt><dd>{value}<small>{escape(more)}</small></dd></div>"
        for name, value, more in tiles
    )
    return f'<dl class="totals">{shown}</dl>'


def _throughput(figures: Figures) -> str:
    if not figures.throughput:
        return ""
    # Steps: a bin is a mean, and nothing lies between two of them.
    points = [
        (at, rate.images_per_second)
        for rate in figures.throughput
        for at in (rate.at, rate.at + figures.bin_seconds)
    ]
    plot = time_plot([Line("images/s", points)], "Images stored a second", filled=True)
    again = figures.images_stored_later_than_first_delivery
    return _section(
        "Images stored a second",
        f"{plot}<p class='soft'>Means of {figures.bin_seconds:,} s. From pull to"
        f" stored, half of the images took {_seconds(figures.seconds_in_worker_median)} or less,"
        f" 95 % took {_seconds(figures.seconds_in_worker_p95)} or less. {again:,} images came from"
        " a job that was delivered more than once.</p>",
    )


def _money(figures: Figures) -> str:
    money = figures.money
    by_gpu: dict[str, float] = {}
    for worker in figures.workers:
        name = worker.gpu or "GPU"
        by_gpu[name] = by_gpu.get(name, 0.0) + (worker.gpu_dollars or 0.0)
    rows = [Bar(name, dollars, _dollars(dollars)) for name, dollars in sorted(by_gpu.items())]
    rows.append(Bar("storage operations", money.storage_dollars, _dollars(money.storage_dollars)))
    text = f"<p class='soft'>Price of a worker: {escape(money.price_source)}.</p>"
    if money.gpu_dollars is None:
        text = "<p>The GPU's part is not known: not every worker recorded its price.</p>"
        rows = rows[-1:]
    return _section("Where the money went", bars(rows, "Dollars by kind") + text)


def _metrics(metrics: Metrics) -> str:
    jobs = ", ".join(
        f"{count:,.0f} {_words(outcome)}" for outcome, count in metrics.jobs.items() if count
    )
    facts = (
        f"The whole fleet over this span, other campaigns included: {metrics.images:,.0f} images;"
        f" {_or_unknown(metrics.images_per_dollar, '{:,.0f}')} a dollar all in,"
        f" {_or_unknown(metrics.images_per_dollar_gpu_only, '{:,.0f}')} GPU only."
        f" Jobs: {jobs or 'none'}."
    )
    stages = [
        Bar(_words(stage), each, _seconds(each))
        for stage, each in metrics.stage_mean_seconds.items()
    ]
    over_time = {
        "Images per dollar": {
            "images_per_dollar_gpu_only": "GPU only",
            "images_per_dollar": "all in",
        },
        "Workers": {"workers": "workers"},
    }
    parts = [
        f"<p class='soft'>{escape(facts)}</p>",
        _part("Dollars", bars(_spent(metrics), "Dollars by kind, and what was wasted")),
        _part("The GPUs' time", bars(_waits(metrics), "Share of the GPUs' time")),
        _part("Mean time in each stage", bars(stages, "Mean seconds by stage")),
    ]
    for title, names in over_time.items():
        plot = time_plot(report_metrics.lines(metrics, names), f"{title} over time")
        parts.append(_part(title, plot))
    parts.append(
        "<p class='soft'>A point of images per dollar looks back over"
        f" {metrics.rate_seconds:.0f} s,"
        " start-up included.</p>"
    )
    return _section("What the metrics add", "".join(parts))


def _spent(metrics: Metrics) -> list[Bar]:
    kinds = {"gpu": "GPU", "storage": "storage operations"}
    rows = [
        Bar(kinds.get(kind, kind), each, _dollars(each)) for kind, each in metrics.dollars.items()
    ]
    gpu = metrics.dollars.get("gpu", 0.0)
    rows += [
        Bar(f"of the GPU's: {_words(reason)}", each, f"{_dollars(each)}, {_share(each, gpu)}", _BAD)
        for reason, each in metrics.wasted_dollars.items()
    ]
    return rows


def _waits(metrics: Metrics) -> list[Bar]:
    busy = metrics.gpu_busy_seconds
    total = busy + sum(metrics.gpu_idle_seconds.values())
    rows = [Bar("busy", busy, _share(busy, total))]
    rows += [
        Bar(f"waited: {_words(reason)}", each, _share(each, total), _BAD)
        for reason, each in metrics.gpu_idle_seconds.items()
    ]
    return rows


def _workers(figures: Figures) -> str:
    speeds = [worker.images_per_second for worker in figures.workers if worker.images_per_second]
    plot = ""
    if len(speeds) > _SPEED_BINS:
        plot = histogram(list(_bins(speeds)), "Workers by speed", "/s")
    slow = sum(worker.is_slow for worker in figures.workers)
    rows = [
        f"<tr><td class='reason'>{escape(worker.name)}{' (slow)' if worker.is_slow else ''}</td>"
        f"<td>{escape(worker.gpu or '?')}</td><td class=number>{worker.images:,}</td>"
        f"<td class=number>{_or_unknown(worker.images_per_second, '{:,.3f}')}</td>"
        f"<td class=number>{_span(worker.seconds)}</td>"
        f"<td class=number>{_dollars(worker.gpu_dollars)}</td></tr>"
        for worker in list(reversed(figures.workers))[:_MOST_WORKERS]
    ]
    if not rows:
        return ""
    shown = f"The slowest {len(rows)} of {len(figures.workers):,}" if plot else "The slowest first"
    return _section(
        "Workers",
        f"{plot}<p class='soft'>{shown}. Slower than two thirds of the median of their GPU class:"
        f" {slow:,}.</p>"
        "<div class='wide'><table><tr><th>worker<th>GPU<th class=number>images"
        "<th class=number>images/s<th class=number>time<th class=number>GPU dollars</tr>"
        f"{''.join(rows)}</table></div>",
    )


def _failures(figures: Figures) -> str:
    if not figures.failures:
        return _section("Failed jobs", "<p>None.</p>")
    rows = "".join(
        f"<tr><td class=number>{each.count:,}</td><td>{escape(each.error)}</td>"
        f"<td class='reason'>{escape(each.reason)}</td></tr>"
        for each in figures.failures
    )
    return _section(
        "Failed jobs",
        "<div class='wide'><table><tr><th class=number>jobs<th>error<th>reason</tr>"
        f"{rows}</table></div><p class='soft'>They wait in the poison queue:"
        f" imagefleet failed list --campaign {escape(figures.campaign)}</p>",
    )


def _samples(pictures: Sequence[bytes]) -> str:
    if not pictures:
        return ""
    if importlib.util.find_spec("PIL") is None:
        missing = "<p>Pictures need Pillow: pip install 'imagefleet[worker]'.</p>"
        return _section("Samples", missing)
    shown = "".join(_figure(picture) for picture in pictures)
    return _section("Samples, chosen by chance", f'<div class="samples">{shown}</div>')


def _figure(picture: bytes) -> str:
    from fleet import contact_sheet

    tile, caption = contact_sheet.read_tile(picture)
    stored = io.BytesIO()
    tile.save(stored, "WEBP", quality=_WEBP_QUALITY)
    data = base64.b64encode(stored.getvalue()).decode()
    return (
        f'<figure><img src="data:image/webp;base64,{data}" alt="{escape(caption)}"'
        f' width="{tile.width}" height="{tile.height}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _notes(figures: Figures, metrics: Metrics | None) -> str:
    notes = [*figures.notes]
    if metrics is not None:
        notes.append(
            "The metrics are the whole fleet's; of a worker that died, what it did after its last"
            " push is not in them."
        )
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return _section("What these figures rest on", f'<ul class="notes">{items}</ul>')


def _part(title: str, plot: str) -> str:
    return f"<h3>{title}</h3>{plot}" if plot else ""


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>"


def _bins(values: Sequence[float]) -> Iterator[tuple[float, float, int]]:
    low, high = min(values), max(values)
    width = (high - low) / _SPEED_BINS or 1.0
    counts = [0] * _SPEED_BINS
    for value in values:
        counts[min(int((value - low) / width), _SPEED_BINS - 1)] += 1
    for number, count in enumerate(counts):
        yield low + number * width, low + (number + 1) * width, count


def _words(slug: str) -> str:
    return slug.replace("_", " ")


def _or_unknown(value: float | None, shown: str) -> str:
    return "?" if value is None else shown.format(value)


def _dollars(value: float | None) -> str:
    if value is None:
        return "?"
    return f"${value:,.2f}" if value >= 1 or value == 0 else f"${number_text(value)}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "0 %"


def _seconds(value: float | None) -> str:
    return "?" if value is None else f"{number_text(value)} s"


def _span(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:  # noqa: PLR2004 - an hour
        return f"{minutes // 60:,} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _size(size: int) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:  # noqa: PLR2004 - a thousand of one is one of the next
            return f"{number_text(size)} {unit}"
        size //= 1000
    return f"{size:,} TB"


def _moment(at: datetime) -> str:
    return at.strftime("%Y-%m-%d %H:%M:%S")

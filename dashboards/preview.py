"""Draws the pages without a Grafana: each panel's queries asked of a Prometheus, as plain HTML.

    python dashboards/preview.py http://localhost:9090 --minutes 60 --folder preview

What a panel says is the same as in Grafana, how it looks is not: stacked panels are drawn as
lines, and every figure is its newest value.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from html import escape
from pathlib import Path
from typing import Any

from fleet.monitor import prometheus
from fleet.report.page import STYLE
from fleet.report.plot import Line, number_text, time_plot

PAGES = Path(__file__).parent / "grafana"

#: Points of a curve, as many as a panel of half a screen shows.
POINTS = 200

#: What Grafana's names of units say.
AXES = {"percentunit": ", share", "currencyUSD": ", dollars", "s": ", seconds"}

LAYOUT = """
body { max-width: 90rem; }
main { display: grid; grid-template-columns: repeat(24, 1fr); gap: .6rem; }
article { border: 1px solid var(--rule); padding: .5rem .8rem; min-width: 0; }
h2 { margin: 0; font-size: .95rem; } .figure { font-size: 1.7rem; }
svg { max-height: 13rem; }
"""


async def draw(server: prometheus.Prometheus, page: Mapping[str, Any], minutes: float) -> str:
    """One dashboard as HTML, its panels where Grafana puts them."""
    panels = [await draw_panel(server, panel, minutes) for panel in page["panels"]]
    return (
        f"<!doctype html><meta charset=utf-8><title>{escape(page['title'])}</title>"
        f"<style>{STYLE}{LAYOUT}</style><h1>{escape(page['title'])}</h1>"
        f"<p class=soft>{escape(page['description'])} A preview, not drawn by Grafana.</p>"
        f"<main>{''.join(panels)}</main>"
    )


async def draw_panel(
    server: prometheus.Prometheus, panel: Mapping[str, Any], minutes: float
) -> str:
    end = datetime.now(UTC)
    begin = end - timedelta(minutes=minutes)
    step = max(1.0, 60 * minutes / POINTS)
    # Grafana's own rule, with the 15 s between two pushes of provisioning/datasource.yaml.
    variables = {"$__rate_interval": max(step + 15, 60), "$__range": 60 * minutes}
    unit = panel["fieldConfig"]["defaults"]["unit"]
    lines = []
    for target in panel["targets"]:
        expression = target["expr"]
        for name, seconds in variables.items():
            expression = expression.replace(name, f"{seconds:.0f}s")
        if target.get("instant") or panel["type"] == "stat":
            found = await server.at(expression, end)
        else:
            found = await server.over(expression, begin, end, step)
        legend = target.get("legendFormat", "")
        lines += [Line(named(legend, each.labels), each.points) for each in found]
    content = "<p class=soft>no data</p>"
    if panel["type"] == "timeseries":
        content = time_plot(lines, panel["title"]) or content
    elif lines:
        figures = ((shown(line.points[-1][1], unit), line.name) for line in lines)
        content = "".join(
            f"<p><span class=figure>{figure}</span> {escape(name)}</p>" for figure, name in figures
        )
    title = panel["title"]
    if panel["type"] == "timeseries":
        title += AXES.get(unit, "")
    width = panel["gridPos"]["w"]
    return f"<article style='grid-column: span {width}'><h2>{escape(title)}</h2>{content}</article>"


def shown(value: float, unit: str) -> str:
    """A figure with its unit."""
    match unit:
        case "percentunit":
            return f"{value:.1%}"
        case "currencyUSD":
            return f"${number_text(value)}"
        case "s":
            return f"{number_text(value)} s"
        case _:
            return number_text(value)


def named(legend: str, labels: Mapping[str, str]) -> str:
    """Grafana's legend: the text with its {{label}}s, or the labels that tell series apart."""
    if legend:
        return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), legend)
    hidden = {"__name__", "job", "instance"}
    return ", ".join(value for name, value in labels.items() if name not in hidden)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("prometheus", metavar="URL")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--folder", type=Path, default=Path("preview"))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    async with prometheus.connected(arguments.prometheus) as server:
        for path in sorted(PAGES.glob("*.json")):
            page = await draw(server, json.loads(path.read_text()), arguments.minutes)
            (arguments.folder / f"{path.stem}.html").write_text(page)


if __name__ == "__main__":
    asyncio.run(main())

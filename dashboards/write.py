"""Writes the dashboards' JSON and the README's tables from `pages.py`.

    python dashboards/write.py

Uses Grafana's generator, grafana-foundation-sdk, whose types follow the published schema.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from pages import DASHBOARDS, Dashboard, Panel

FOLDER = Path(__file__).parent

#: Grafana's grid is 24 wide.
GRID = 24
FIGURE_HEIGHT = 4
PLOT_HEIGHT = 8

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")


class AlertMarks(models.AnnotationQuery):
    """Marks on every curve while an alert fires."""

    def __init__(self) -> None:
        expression = 'ALERTS{alertname=~"Imagefleet.+", alertstate="firing"}'
        super().__init__("Alerts", SOURCE, icon_color="red", expr=expression)

    def to_json(self) -> dict[str, object]:
        # The schema lacks what only Prometheus has; without them, the marks have no text.
        return {
            **super().to_json(),
            "titleFormat": "{{alertname}}",
            "tagKeys": "severity,queue",
        }


PanelBuilder = stat.Panel | timeseries.Panel | table.Panel


def build(page: Dashboard) -> str:
    """One dashboard's JSON: its numbers in rows of four, then the plots, two in a row."""
    figures = [panel for panel in page.panels if panel.kind == "stat"]
    plots = [panel for panel in page.panels if panel.kind != "stat"]
    places = [*_rows(len(figures), 4, FIGURE_HEIGHT)]
    top = places[-1].y + FIGURE_HEIGHT
    places += _rows(len(plots), 2, PLOT_HEIGHT, top)
    builder = (
        dashboard.Dashboard(f"imagefleet: {page.name.capitalize()}")
        .uid(f"imagefleet-{page.name}")
        .description(page.question)
        .tags(["imagefleet"])
        .timezone("browser")
        .time("now-3h", "now")
        .refresh("30s")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        )
        .link(
            dashboard.DashboardLink("imagefleet")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["imagefleet"])
            .include_vars(include_vars=True)
            .keep_time(keep_time=True)
        )
    )
    for number, (panel, place) in enumerate(zip((*figures, *plots), places, strict=True), 1):
        builder.with_panel(_panel(panel).id(number).grid_pos(place))
    built = builder.build()
    built.annotations = models.AnnotationContainer([AlertMarks()])
    return json.dumps(built, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _rows(count: int, in_a_row: int, height: int, top: int = 0) -> Iterator[models.GridPos]:
    """Positions of *count* panels in evenly filled rows of full width."""
    in_a_row = math.ceil(count / math.ceil(count / in_a_row))
    for number in range(count):
        row, column = divmod(number, in_a_row)
        width = GRID // min(in_a_row, count - row * in_a_row)
        yield models.GridPos(x=column * width, y=top + row * height, w=width, h=height)


def _panel(panel: Panel) -> PanelBuilder:
    builder: PanelBuilder
    if panel.kind == "stat":
        builder = stat.Panel().graph_mode(common_models.BigValueGraphMode.AREA)
        builder.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    elif panel.kind == "table":
        # Without a footer, the generator writes one that its schema rejects.
        builder = table.Panel().footer(common.TableFooterOptions().reducer([]))
        builder.with_transformation(
            models.DataTransformerConfig(
                id_val="organize",
                options={"excludeByName": {"Time": True, "instance": True, "job": True}},
            )
        )
    else:
        builder = _curves(stacked=panel.kind == "stack")
    builder.title(panel.title).description(panel.answers).datasource(SOURCE).unit(panel.unit).min(0)
    if panel.decimals is not None:
        builder.decimals(panel.decimals)
    steps = [models.Threshold(value=None, color="green")]
    if panel.bad_above is not None:
        steps.append(models.Threshold(value=panel.bad_above, color="red"))
    builder.thresholds(
        dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
    )
    queries = {"": panel.queries} if isinstance(panel.queries, str) else panel.queries
    for letter, (legend, query) in zip("ABCDEF", queries.items(), strict=False):
        target = prometheus.Dataquery().ref_id(letter).expr(query).datasource(SOURCE)
        if legend:
            target.legend_format(legend)
        if panel.kind == "table":
            target.instant().format(PromQueryFormat.TABLE)
        elif panel.kind == "stat" and "$__range" in query:
            target.instant()
        else:
            target.range()
        builder.with_target(target)
    return builder


def _curves(*, stacked: bool) -> timeseries.Panel:
    builder = timeseries.Panel().line_width(1).fill_opacity(25 if stacked else 8)
    builder.show_points(common_models.VisibilityMode.NEVER)
    builder.legend(
        common.VizLegendOptions()
        .show_legend(show_legend=True)
        .display_mode(common_models.LegendDisplayMode.LIST)
        .placement(common_models.LegendPlacement.BOTTOM)
        .calcs(["lastNotNull"])
    )
    builder.tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
    if stacked:
        builder.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    return builder


def tables() -> str:
    """The README's section on the panels: the question that each answers."""
    parts = []
    for page in DASHBOARDS:
        parts.append(f"### {page.name.capitalize()}\n\n{page.question}\n\n")
        parts.append("| panel | what it answers |\n| --- | --- |\n")
        parts.extend(f"| {panel.title} | {panel.answers} |\n" for panel in page.panels)
        parts.append("\n")
    return "".join(parts)


def main() -> None:
    for page in DASHBOARDS:
        (FOLDER / "grafana" / f"{page.name}.json").write_text(build(page), encoding="utf-8")
    readme = FOLDER / "README.md"
    text = readme.read_text(encoding="utf-8")
    written = re.sub(
        r"(<!-- panels: .*? -->\n).*(<!-- /panels -->)",
        lambda found: found[1] + "\n" + tables() + found[2],
        text,
        flags=re.DOTALL,
    )
    readme.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()

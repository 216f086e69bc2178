"""Writes the dashboards' JSON and the README's table from `pages/`.

    python dashboards/write.py

Uses Grafana's generator, grafana-foundation-sdk, whose types follow the published schema.
"""

import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    prometheus,
    stat,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from pages import DASHBOARDS, Dashboard, Panel
from pages.queries import CHOSEN, INFO

FOLDER = Path(__file__).parent

#: Grafana's grid is 24 wide.
GRID = 24
FIGURE_HEIGHT = 4
PLOT_HEIGHT = 8

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")


#: Fleets with workers or with an exporter alone.
FLEETS = 'label_values({__name__=~"imagefleet_(worker_info|queue_messages)"}, fleet)'
WORKERS = f"label_values({INFO}, worker)"

#: A name in a table leads to the worker's details.
WORKER_LINK = (
    "/d/imagefleet-nodes/imagefleet-nodes?var-fleet=${__data.fields.fleet}"
    "&var-worker=${__data.fields.worker}&${datasource:queryparam}&${__url_time_range}"
)

_VERSIONS = "count by (fleet, version, group)"


class Marks(models.AnnotationQuery):
    """Marks on every curve while *expression* has a value."""

    def __init__(
        self, name: str, colour: str, expression: str, title: str, tags: str
    ) -> None:
        super().__init__(name, SOURCE, icon_color=colour, expr=expression)
        self._title, self._tags = title, tags

    def to_json(self) -> dict[str, object]:
        # The schema lacks what only Prometheus has; without them, the marks have no text.
        return {**super().to_json(), "titleFormat": self._title, "tagKeys": self._tags}


MARKS = (
    Marks(
        "Alerts",
        "red",
        f'ALERTS{{alertname=~"Imagefleet.+", alertstate="firing", {CHOSEN}}}',
        "{{alertname}}",
        "severity,fleet,queue",
    ),
    # Workers of a version or a group that none had in the hour before.
    Marks(
        "Roll-outs",
        "blue",
        f"{_VERSIONS} ({INFO}) unless {_VERSIONS} (last_over_time({INFO}[1h] offset 5m))",
        "{{version}} {{group}}",
        "fleet",
    ),
)


PanelBuilder = stat.Panel | timeseries.Panel | table.Panel


def build(page: Dashboard) -> str:
    """One dashboard's JSON: its numbers in rows of four, then the plots, two in a row."""
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
            dashboard.DatasourceVariable("datasource")
            .label("Prometheus")
            .type("prometheus")
        )
        .with_variable(
            _choice("fleet", FLEETS)
            .multi(multi=True)
            .include_all(include_all=True)
            .all_value(
                ".*"
            )  # the workers of an older version, without the label, as well
            .current(
                models.VariableOption(text=["All"], value=["$__all"], selected=True)
            )
        )
        .link(
            dashboard.DashboardLink("imagefleet")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["imagefleet"])
            .include_vars(include_vars=True)
            .keep_time(keep_time=True)
        )
    )
    if page.worker_panels:
        builder.with_variable(_choice("worker", WORKERS))
    figures = [panel for panel in page.panels if panel.kind == "stat"]
    plots = [panel for panel in page.panels if panel.kind != "stat"]
    number = itertools.count(1)
    top = _place(builder, figures, number, 4, FIGURE_HEIGHT, 0)
    top = _place(builder, plots, number, 2, PLOT_HEIGHT, top)
    if page.worker_panels:
        place = models.GridPos(x=0, y=top, w=GRID, h=1)
        builder.with_row(
            dashboard.Row("Worker $worker").id(next(number)).grid_pos(place)
        )
        _place(builder, page.worker_panels, number, 2, PLOT_HEIGHT, top + 1)
    built = builder.build()
    built.annotations = models.AnnotationContainer(list(MARKS))
    return json.dumps(built, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _choice(name: str, query: str) -> dashboard.QueryVariable:
    """A variable with the values that the server has."""
    choice = (
        dashboard.QueryVariable(name)
        .label(name.capitalize())
        .datasource(SOURCE)
        .query(query)
    )
    choice.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    return choice.sort(models.VariableSort.ALPHABETICAL_ASC)


def _place(
    builder: dashboard.Dashboard,
    panels: Sequence[Panel],
    number: Iterator[int],
    in_a_row: int,
    height: int,
    top: int,
) -> int:
    """Adds *panels* from *top* on; returns the line below them."""
    places = [*_rows(len(panels), in_a_row, height, top)]
    for panel, place in zip(panels, places, strict=True):
        builder.with_panel(_panel(panel).id(next(number)).grid_pos(place))
    return places[-1].y + height


def _rows(
    count: int, in_a_row: int, height: int, top: int = 0
) -> Iterator[models.GridPos]:
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
        builder = _table(panel)
    else:
        builder = _curves(stacked=panel.kind == "stack")
        if panel.bad_above is not None:
            builder.thresholds_style(
                common.GraphThresholdsStyleConfig().mode(
                    common_models.GraphTresholdsStyleMode.DASHED_AND_AREA
                )
            )
    builder.title(panel.title).description(panel.answers).datasource(SOURCE).unit(
        panel.unit
    ).min(0)
    if panel.decimals is not None:
        builder.decimals(panel.decimals)
    builder.thresholds(
        dashboard.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps(_steps(panel))
    )
    # Grafana shows the name only where there are several.
    queries = (
        {"{{fleet}}": panel.queries}
        if isinstance(panel.queries, str)
        else panel.queries
    )
    for letter, (legend, query) in zip("ABCDEF", queries.items(), strict=False):
        target = prometheus.Dataquery().ref_id(letter).expr(query).datasource(SOURCE)
        if panel.kind != "table":
            target.legend_format(legend)
        if panel.kind == "table":
            target.instant().format(PromQueryFormat.TABLE)
        elif panel.kind == "stat" and "$__range" in query:
            target.instant()
        else:
            target.range()
        builder.with_target(target)
    return builder


def _steps(panel: Panel) -> list[models.Threshold]:
    """The colours of a value, from the lowest on."""
    good = "green" if panel.kind == "stat" else "transparent"
    if panel.bad_below is not None:
        return [
            models.Threshold(value=None, color="red"),
            models.Threshold(value=panel.bad_below, color=good),
        ]
    steps = [models.Threshold(value=None, color=good)]
    if panel.bad_above is not None:
        steps.append(models.Threshold(value=panel.bad_above, color="red"))
    return steps


def _table(panel: Panel) -> table.Panel:
    """A row for each worker, whose name leads to its details, and a column for each query."""
    # Without a footer, the generator writes one that its schema rejects.
    builder = table.Panel().footer(common.TableFooterOptions().reducer([]))
    columns = list(panel.queries)
    fields = (
        ["Value"] if len(columns) == 1 else [f"Value #{letter}" for letter in "ABCDEF"]
    )
    hidden = ("Time", "__name__", "instance", "job", "device")
    shown = ("fleet", "worker", "gpu", "fault", *fields)
    organize = {
        "excludeByName": dict.fromkeys(hidden, True),
        "indexByName": {name: number for number, name in enumerate(shown)},
        "renameByName": dict(zip(fields, columns, strict=False)),
    }
    if len(columns) > 1:
        builder.with_transformation(
            models.DataTransformerConfig(id_val="merge", options={})
        )
    builder.with_transformation(
        models.DataTransformerConfig(id_val="organize", options=organize)
    )
    link = {"title": "Details of this worker", "url": WORKER_LINK}
    builder.override_by_name("worker", [models.DynamicConfigValue("links", [link])])
    for column, unit in panel.units.items():
        builder.override_by_name(column, [models.DynamicConfigValue("unit", unit)])
    if panel.bad_above is not None or panel.bad_below is not None:
        cells = models.DynamicConfigValue(
            "custom.cellOptions", {"type": "color-background"}
        )
        builder.override_by_name(columns[0], [cells])
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
    builder.tooltip(
        common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI)
    )
    if stacked:
        builder.stacking(
            common.StackingConfig().mode(common_models.StackingMode.NORMAL)
        )
    return builder


def overview() -> str:
    """The README's table of dashboards: the question that each answers."""
    rows = [f"| {page.name.capitalize()} | {page.question} |\n" for page in DASHBOARDS]
    return "".join(["| dashboard | what it answers |\n| --- | --- |\n", *rows, "\n"])


def main() -> None:
    for page in DASHBOARDS:
        (FOLDER / "grafana" / f"{page.name}.json").write_text(
            build(page), encoding="utf-8"
        )
    readme = FOLDER / "README.md"
    text = readme.read_text(encoding="utf-8")
    written = re.sub(
        r"(<!-- dashboards: .*? -->\n).*(<!-- /dashboards -->)",
        lambda found: found[1] + "\n" + overview() + found[2],
        text,
        flags=re.DOTALL,
    )
    readme.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()

"""The dashboards' files, checked without Grafana."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

NAMES = ["cost", "failures", "fleet", "nodes", "pipeline"]

METRIC = re.compile(r"\bimagefleet[_:][a-z0-9_:]+")

#: What a histogram adds to its name.
_SUFFIXES = ("_sum", "_count", "_bucket")

#: What Grafana reads from a Prometheus annotation query and its schema does not have.
_PROMETHEUS_ONLY = ("titleFormat", "tagKeys")


@pytest.fixture(params=NAMES)
def page(request: pytest.FixtureRequest, dashboards: Path) -> dict[str, Any]:
    text = (dashboards / "grafana" / f"{request.param}.json").read_text()
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def panels(page: dict[str, Any]) -> list[dict[str, Any]]:
    """Its panels without the heading of a row."""
    return [panel for panel in page["panels"] if panel["type"] != "row"]


def expressions(dashboards: Path) -> Iterator[str]:
    """Every query of every panel, and of every rule."""
    for path in sorted((dashboards / "grafana").glob("*.json")):
        for panel in panels(json.loads(path.read_text())):
            yield from (target["expr"] for target in panel["targets"])
    for name in ("rules.yaml", "alerts.yaml"):
        groups = yaml.safe_load((dashboards / "prometheus" / name).read_text())[
            "groups"
        ]
        yield from (rule["expr"] for group in groups for rule in group["rules"])


def recorded(dashboards: Path) -> set[str]:
    groups = yaml.safe_load((dashboards / "prometheus" / "rules.yaml").read_text())[
        "groups"
    ]
    return {rule["record"] for group in groups for rule in group["rules"]}


def documented(dashboards: Path) -> set[str]:
    """The metrics in the README's table."""
    text = (dashboards / "README.md").read_text()
    rows = re.findall(r"^\| `(imagefleet[_:][^`{]+)", text, re.MULTILINE)
    return set(rows)


def test_the_files_are_what_the_generator_writes(
    dashboards: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "dashboards"
    shutil.copytree(dashboards, copy, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, copy / "write.py"], check=True, timeout=1100)

    for path in [*(dashboards / "grafana").iterdir(), dashboards / "README.md"]:
        written = (copy / path.relative_to(dashboards)).read_text()
        assert written == path.read_text(), (
            f"{path.name}: run python dashboards/write.py"
        )


def test_the_files_match_grafanas_published_schema(page: dict[str, Any]) -> None:
    plugins.register_default_plugins()

    for marks in page["annotations"]["list"]:
        for name in _PROMETHEUS_ONLY:
            del marks[name]

    understood = Dashboard.from_json(page)

    # Reading drops what the schema does not have.
    assert json.loads(json.dumps(understood, cls=JSONEncoder)) == page


def test_firing_alerts_are_marked_on_the_curves(
    page: dict[str, Any], dashboards: Path
) -> None:
    groups = yaml.safe_load((dashboards / "prometheus" / "alerts.yaml").read_text())[
        "groups"
    ]
    marks = page["annotations"]["list"][0]

    pattern = re.search(r'alertname=~"([^"]+)", alertstate="firing"', marks["expr"])
    assert pattern is not None
    assert all(
        re.fullmatch(pattern[1], rule["alert"])
        for each in groups
        for rule in each["rules"]
    )
    assert marks["titleFormat"] == "{{alertname}}"
    assert (marks["enable"], marks["datasource"]["uid"]) == (True, "${datasource}")


def test_panels_have_distinct_titles_and_do_not_overlap(page: dict[str, Any]) -> None:
    everything = page["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    assert len({panel["title"] for panel in everything}) == len(everything)
    for panel in panels(page):
        assert panel["description"].endswith((".", "?")), (
            f"{panel['title']} answers nothing"
        )
    for first, second in combinations([panel["gridPos"] for panel in everything], 2):
        beside = (
            first["x"] + first["w"] <= second["x"]
            or second["x"] + second["w"] <= first["x"]
        )
        below = (
            first["y"] + first["h"] <= second["y"]
            or second["y"] + second["h"] <= first["y"]
        )
        assert beside or below
        assert first["x"] + first["w"] <= 24


def test_every_panel_queries_the_data_source_chosen_on_the_page(
    page: dict[str, Any],
) -> None:
    variables = {each["name"]: each for each in page["templating"]["list"]}
    assert variables["datasource"]["query"] == "prometheus"
    for panel in panels(page):
        sources = [
            panel["datasource"],
            *(target["datasource"] for target in panel["targets"]),
        ]
        assert {source["uid"] for source in sources} == {"${datasource}"}


def test_every_page_lets_choose_fleets_and_every_query_asks_for_those_alone(
    page: dict[str, Any],
) -> None:
    (choice,) = [each for each in page["templating"]["list"] if each["name"] == "fleet"]
    assert (choice["multi"], choice["includeAll"]) == (True, True)
    assert choice["current"]["value"] == ["$__all"]
    # Matches the workers of an older version, which have no such label, too.
    assert choice["allValue"] == ".*"

    asked = [target["expr"] for panel in panels(page) for target in panel["targets"]]
    asked += [marks["expr"] for marks in page["annotations"]["list"]]
    for expression in asked:
        selectors = re.findall(
            r"\b(?:ALERTS|imagefleet[_:][a-z0-9_:]+)(\{[^}]*\})?", expression
        )
        assert selectors, expression
        assert all('fleet=~"$fleet"' in each for each in selectors), expression
        for joined in re.findall(r"\bon \(([^)]+)\) group_left", expression):
            assert joined.startswith("fleet"), expression


def test_a_roll_out_is_marked_with_its_version_and_group(page: dict[str, Any]) -> None:
    marks = page["annotations"]["list"][1]

    assert (marks["name"], marks["titleFormat"]) == (
        "Roll-outs",
        "{{version}} {{group}}",
    )
    assert marks["iconColor"] != page["annotations"]["list"][0]["iconColor"]


def test_a_limit_is_drawn_into_its_curves_and_colours_numbers(
    page: dict[str, Any],
) -> None:
    for panel in panels(page):
        defaults = panel["fieldConfig"]["defaults"]
        colours = [step["color"] for step in defaults["thresholds"]["steps"]]
        style = defaults.get("custom", {}).get("thresholdsStyle", {}).get("mode")
        if panel["type"] == "timeseries":
            assert (style == "dashed+area") is ("red" in colours), panel["title"]
            assert colours[0] == "transparent"
        elif panel["type"] == "stat":
            assert "green" in colours


def test_the_idle_limit_is_that_of_the_alert(dashboards: Path) -> None:
    groups = yaml.safe_load((dashboards / "prometheus" / "alerts.yaml").read_text())[
        "groups"
    ]
    (alert,) = [
        rule["expr"]
        for group in groups
        for rule in group["rules"]
        if rule["alert"] == "ImagefleetGpuIdle"
    ]
    pipeline = json.loads((dashboards / "grafana" / "pipeline.json").read_text())
    limits = [
        panel["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]["value"]
        for panel in panels(pipeline)
        if panel["title"].startswith("GPU idle")
    ]

    assert limits == [float(alert.rpartition(">")[2])] * 2


def test_a_workers_name_in_a_table_leads_to_its_details(
    page: dict[str, Any], dashboards: Path
) -> None:
    nodes = json.loads((dashboards / "grafana" / "nodes.json").read_text())
    details = [panel for panel in panels(nodes) if "$worker" in panel["title"]]
    assert len(details) == 4
    assert "worker" in {each["name"] for each in nodes["templating"]["list"]}

    for panel in panels(page):
        if panel["type"] == "table":
            (link,) = [
                value["value"][0]["url"]
                for override in panel["fieldConfig"]["overrides"]
                if override["matcher"]["options"] == "worker"
                for value in override["properties"]
            ]
            assert link.startswith(f"/d/{nodes['uid']}/")
            assert "var-worker=${__data.fields.worker}" in link
            assert "var-fleet=${__data.fields.fleet}" in link
            assert all("(worker" in each["expr"] for each in panel["targets"]), panel[
                "title"
            ]


def test_failed_jobs_do_not_count_as_lost_or_retried(dashboards: Path) -> None:
    failures = json.loads((dashboards / "grafana" / "failures.json").read_text())
    (panel,) = [
        each
        for each in panels(failures)
        if each["title"] == "Jobs lost or retried, by node"
    ]

    (outcomes,) = re.findall(r'outcome=~"([^"]+)"', panel["targets"][0]["expr"])

    assert set(outcomes.split("|")) == {"lost", "retried"}


def test_every_metric_that_is_queried_is_in_the_readme(dashboards: Path) -> None:
    asked = {name for each in expressions(dashboards) for name in METRIC.findall(each)}
    known = documented(dashboards) | recorded(dashboards)
    known |= {name + suffix for name in known for suffix in _SUFFIXES}

    assert asked - known == set()
    assert recorded(dashboards) <= documented(dashboards)


@pytest.mark.parametrize("name", ["datasource.yaml", "dashboards.yaml"])
def test_the_provisioning_has_the_version_that_grafana_reads(
    dashboards: Path, name: str
) -> None:
    assert (
        yaml.safe_load((dashboards / "provisioning" / name).read_text())["apiVersion"]
        == 1
    )

"""The dashboards' files, checked without Grafana."""

from __future__ import annotations

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

NAMES = ["cost", "failures", "fleet", "pipeline"]

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


def expressions(dashboards: Path) -> Iterator[str]:
    """Every query of every panel, and of every rule."""
    for path in sorted((dashboards / "grafana").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            yield from (target["expr"] for target in panel["targets"])
    for name in ("rules.yaml", "alerts.yaml"):
        groups = yaml.safe_load((dashboards / "prometheus" / name).read_text())["groups"]
        yield from (rule["expr"] for group in groups for rule in group["rules"])


def recorded(dashboards: Path) -> set[str]:
    groups = yaml.safe_load((dashboards / "prometheus" / "rules.yaml").read_text())["groups"]
    return {rule["record"] for group in groups for rule in group["rules"]}


def documented(dashboards: Path) -> set[str]:
    """The metrics in the README's table."""
    text = (dashboards / "README.md").read_text()
    rows = re.findall(r"^\| `(imagefleet[_:][^`{]+)", text, re.MULTILINE)
    return set(rows)


def test_the_files_are_what_the_generator_writes(dashboards: Path, tmp_path: Path) -> None:
    copy = tmp_path / "dashboards"
    shutil.copytree(dashboards, copy, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, copy / "write.py"], check=True, timeout=60)

    for path in [*(dashboards / "grafana").iterdir(), dashboards / "README.md"]:
        written = (copy / path.relative_to(dashboards)).read_text()
        assert written == path.read_text(), f"{path.name}: run python dashboards/write.py"


def test_the_files_match_grafanas_published_schema(page: dict[str, Any]) -> None:
    plugins.register_default_plugins()

    (marks,) = page["annotations"]["list"]
    for name in _PROMETHEUS_ONLY:
        del marks[name]

    understood = Dashboard.from_json(page)

    # Reading drops what the schema does not have.
    assert json.loads(json.dumps(understood, cls=JSONEncoder)) == page


def test_firing_alerts_are_marked_on_the_curves(page: dict[str, Any], dashboards: Path) -> None:
    groups = yaml.safe_load((dashboards / "prometheus" / "alerts.yaml").read_text())["groups"]
    (marks,) = page["annotations"]["list"]

    pattern = re.search(r'alertname=~"([^"]+)", alertstate="firing"', marks["expr"])
    assert pattern is not None
    assert all(re.fullmatch(pattern[1], rule["alert"]) for each in groups for rule in each["rules"])
    assert marks["titleFormat"] == "{{alertname}}"
    assert (marks["enable"], marks["datasource"]["uid"]) == (True, "${datasource}")


def test_panels_have_distinct_titles_and_do_not_overlap(page: dict[str, Any]) -> None:
    panels = page["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["description"].endswith((".", "?")), f"{panel['title']} answers nothing"
    for first, second in combinations([panel["gridPos"] for panel in panels], 2):
        beside = first["x"] + first["w"] <= second["x"] or second["x"] + second["w"] <= first["x"]
        below = first["y"] + first["h"] <= second["y"] or second["y"] + second["h"] <= first["y"]
        assert beside or below
        assert first["x"] + first["w"] <= 24


def test_every_panel_queries_the_data_source_chosen_on_the_page(page: dict[str, Any]) -> None:
    variables = {each["name"]: each for each in page["templating"]["list"]}
    assert variables["datasource"]["query"] == "prometheus"
    for panel in page["panels"]:
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert {source["uid"] for source in sources} == {"${datasource}"}


def test_failed_jobs_do_not_count_as_lost_or_retried(dashboards: Path) -> None:
    panels = json.loads((dashboards / "grafana" / "failures.json").read_text())["panels"]
    (panel,) = [each for each in panels if each["title"] == "Jobs lost or retried, by node"]

    (outcomes,) = re.findall(r'outcome=~"([^"]+)"', panel["targets"][0]["expr"])

    assert set(outcomes.split("|")) == {"lost", "retried"}


def test_every_metric_that_is_queried_is_in_the_readme(dashboards: Path) -> None:
    asked = {name for each in expressions(dashboards) for name in METRIC.findall(each)}
    known = documented(dashboards) | recorded(dashboards)
    known |= {name + suffix for name in known for suffix in _SUFFIXES}

    assert asked - known == set()
    assert recorded(dashboards) <= documented(dashboards)


@pytest.mark.parametrize("name", ["datasource.yaml", "dashboards.yaml"])
def test_the_provisioning_has_the_version_that_grafana_reads(dashboards: Path, name: str) -> None:
    assert yaml.safe_load((dashboards / "provisioning" / name).read_text())["apiVersion"] == 1

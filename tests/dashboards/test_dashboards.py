"""The dashboards' files, checked without Grafana."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from imagefleet.validation import JSONDict

NAMES = ["cost", "failures", "fleet", "nodes", "pipeline"]


#: What Grafana reads from a Prometheus annotation query and its schema does not have.
_PROMETHEUS_ONLY = ("titleFormat", "tagKeys")


@pytest.fixture(params=NAMES)
def page(request, dashboards: Path) -> JSONDict:
    text = (dashboards / "grafana" / f"{request.param}.json").read_text()
    loaded: JSONDict = json.loads(text)
    return loaded


def panels(page: JSONDict) -> list[JSONDict]:
    """Its panels without the heading of a row."""
    return [panel for panel in page["panels"] if panel["type"] != "row"]


def test_the_files_are_what_the_generator_writes(dashboards: Path, tmp_path):
    copy = tmp_path / "dashboards"
    shutil.copytree(dashboards, copy, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, copy / "write.py"], check=True)

    for path in [*(dashboards / "grafana").iterdir(), dashboards / "README.md"]:
        written = (copy / path.relative_to(dashboards)).read_text()
        assert written == path.read_text(), (
            f"{path.name}: run python dashboards/write.py"
        )


def test_the_files_match_grafanas_published_schema(page: JSONDict):
    plugins.register_default_plugins()

    for marks in page["annotations"]["list"]:
        for name in _PROMETHEUS_ONLY:
            del marks[name]

    understood = Dashboard.from_json(page)

    # Reading drops what the schema does not have.
    assert json.loads(json.dumps(understood, cls=JSONEncoder)) == page


def test_every_panel_queries_the_data_source_chosen_on_the_page(
    page: JSONDict,
):
    variables = {each["name"]: each for each in page["templating"]["list"]}
    assert variables["datasource"]["query"] == "prometheus"
    for panel in panels(page):
        sources = [
            panel["datasource"],
            *(target["datasource"] for target in panel["targets"]),
        ]
        assert {source["uid"] for source in sources} == {"${datasource}"}


def test_a_workers_name_in_a_table_leads_to_its_details(
    page: JSONDict, dashboards: Path
):
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


def test_failed_jobs_do_not_count_as_lost_or_retried(dashboards: Path):
    failures = json.loads((dashboards / "grafana" / "failures.json").read_text())
    (panel,) = [
        each
        for each in panels(failures)
        if each["title"] == "Jobs lost or retried, by node"
    ]

    (outcomes,) = re.findall(r'outcome=~"([^"]+)"', panel["targets"][0]["expr"])

    assert set(outcomes.split("|")) == {"lost", "retried"}


@pytest.mark.parametrize("name", ["datasource.yaml", "dashboards.yaml"])
def test_the_provisioning_has_the_version_that_grafana_reads(
    dashboards: Path, name: str
):
    assert (
        yaml.safe_load((dashboards / "provisioning" / name).read_text())["apiVersion"]
        == 1
    )

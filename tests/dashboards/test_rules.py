"""Recording and alert rules, checked with promtool."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

Tool = Callable[[str], str]  # the fixture of conftest.py

#: Every alert.
ALERTS = {
    "ImagefleetThroughputFell",
    "ImagefleetPoisonGrowing",
    "ImagefleetImagesPerDollarLow",
    "ImagefleetGpuIdle",
    "ImagefleetNoCompletions",
    "ImagefleetOldestJob",
    "ImagefleetSilent",
    "ImagefleetExporterSilent",
    "ImagefleetCostAboveConfirmed",
    "ImagefleetWaitingForOperator",
    "ImagefleetNodesGivenUp",
    "ImagefleetSuspectImages",
    "ImagefleetGpuOut",
    "ImagefleetClockOff",
}


def promtool(
    tool: Tool, folder: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [tool("promtool"), *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "rules.yaml", "alerts.yaml"),
        ("check", "config", "prometheus.yaml"),
        pytest.param(("test", "rules", "tests.yaml"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_promtool_accepts_rules_and_configuration(
    tool: Tool, dashboards: Path, arguments: list[str]
):
    result = promtool(tool, dashboards / "prometheus", *arguments)

    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_has_a_test_in_which_it_fires(dashboards: Path):
    folder = dashboards / "prometheus"
    groups = yaml.safe_load((folder / "alerts.yaml").read_text())["groups"]
    tests = yaml.safe_load((folder / "tests.yaml").read_text())["tests"]

    tried = [each for test in tests for each in test.get("alert_rule_test", [])]
    fired = {each["alertname"] for each in tried if each["exp_alerts"]}
    kept_still = {each["alertname"] for each in tried if not each["exp_alerts"]}

    names = {rule["alert"] for group in groups for rule in group["rules"]}
    assert names == ALERTS == fired
    assert kept_still == ALERTS


def test_while_an_alert_fires_another_fleet_is_fine_and_the_alert_names_the_one_in_trouble(
    dashboards: Path,
):
    tests = yaml.safe_load((dashboards / "prometheus" / "tests.yaml").read_text())[
        "tests"
    ]
    tried = [(test, each) for test in tests for each in test["alert_rule_test"]]

    for test, each in tried:
        if each["exp_alerts"]:
            (alert,) = each["exp_alerts"]
            fleets = {
                fleet
                for series in test["input_series"]
                for fleet in re.findall(r'fleet="([^"]+)"', series["series"])
            }
            in_trouble = alert["exp_labels"]["fleet"]
            assert fleets == {in_trouble, "healthy/jobs"}, each["alertname"]
            assert alert["exp_annotations"]["summary"].startswith(f"{in_trouble}: ")


def test_every_alert_links_to_its_section_of_the_runbook(dashboards: Path):
    groups = yaml.safe_load((dashboards / "prometheus" / "alerts.yaml").read_text())[
        "groups"
    ]
    for rule in (rule for group in groups for rule in group["rules"]):
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        text = (dashboards.parent / page).read_text()

        assert anchor == rule["alert"].lower()
        section = text.partition(f"\n### {rule['alert']}\n\n")[2].partition("\n\n")[0]
        assert len(section) > 100, (
            f"{page} does not say what to do about {rule['alert']}"
        )


@pytest.mark.parametrize(("workers", "fires"), [(50, True), (100, False)])
def test_a_few_bad_nodes_among_many_good_ones_do_not_fire_an_alert(
    tool: Tool, dashboards: Path, tmp_path, workers: int, fires: bool
):
    series = "imagefleet_node_reallocations_total"
    rule = {"eval_time": "30m", "alertname": "ImagefleetNodesGivenUp", "exp_alerts": []}
    test = {
        "interval": "1m",
        "input_series": [
            {
                "series": f'{series}{{instance="{number}",result="granted"}}',
                "values": "0x10 1x3" if number < 4 else "0x60",
            }
            for number in range(workers)
        ],
        "alert_rule_test": [rule],
    }
    rules = str(dashboards / "prometheus" / "alerts.yaml")
    tests = tmp_path / "tests.yaml"
    tests.write_text(yaml.safe_dump({"rule_files": [rules], "tests": [test]}))

    result = promtool(tool, tmp_path, "test", "rules", str(tests))

    output = result.stdout + result.stderr
    assert result.returncode == (1 if fires else 0), output
    assert ("4 nodes given up in an hour" in output) is fires


def test_every_rule_keeps_the_fleets_apart(dashboards: Path):
    for name in ("rules.yaml", "alerts.yaml"):
        groups = yaml.safe_load((dashboards / "prometheus" / name).read_text())[
            "groups"
        ]
        for rule in (rule for group in groups for rule in group["rules"]):
            text = " ".join(rule["expr"].split())
            for clause in re.findall(
                r"\b(?:sum|avg|max|min|count|group|on)\b ?(.{14})", text
            ):
                assert re.match(r"(?:by )?\(fleet\b", clause), rule["expr"]

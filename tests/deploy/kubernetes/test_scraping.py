"""The scrape configuration and the PodMonitor: what is scraped, and with which labels.

Debian builds Prometheus without the discovery of Kubernetes. So vmagent, which reads the same
configuration, discovers the pods of a fake API server, and promtool checks the rest.
"""

import contextlib
import json
import re
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import polling
from imagefleet.validation import JSONDict

pytestmark = pytest.mark.slow

Tool = Callable[[str], str]

PODS = "/api/v1/namespaces/imagefleet/pods"


def config_of(rendered: Any) -> JSONDict:
    data = rendered.of_kind("ConfigMap")["imagefleet-scrape-config"]["data"]
    loaded: JSONDict = yaml.safe_load(data["imagefleet.yaml"])
    return loaded


def pods_of(rendered: Any) -> list[JSONDict]:
    """A pod of each workload, running, and a worker's that has ended."""
    running = [
        {
            "metadata": template["metadata"],
            "spec": template["spec"],
            "status": {"phase": "Running"},
        }
        for template in rendered.templates()
    ]
    (worker,) = (
        each for each in running if each["spec"]["containers"][0]["name"] == "worker"
    )
    pods = [*running, worker | {"status": {"phase": "Succeeded"}}]
    for number, pod in enumerate(pods):
        name = f"{pod['spec']['containers'][0]['name']}-{number}"
        pod["metadata"] = pod["metadata"] | {
            "name": name,
            "namespace": "imagefleet",
            "uid": name,
            "resourceVersion": "1",
        }
        pod["status"] = pod["status"] | {
            "podIP": f"127.0.1.{number + 1}",
            "hostIP": "127.0.0.1",
        }
    return pods


@pytest.fixture
def targets(
    api, render, tool: Tool, unused_port: int, tmp_path
) -> Iterator[list[JSONDict]]:
    """What vmagent makes of the scrape configuration."""
    pods = pods_of(render("job"))
    # All else is forbidden, as by the role.
    api.answers = {
        PODS: {"kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": pods},
    }
    config = config_of(render("scrape-config"))
    config["scrape_configs"][0]["kubernetes_sd_configs"][0]["api_server"] = api.address
    file = tmp_path / "prometheus.yaml"
    file.write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{unused_port}"
    agent = subprocess.Popen(
        [
            tool("vmagent"),
            f"-promscrape.config={file}",
            "-promscrape.config.strictParse",
            f"-httpListenAddr={address}",
            "-remoteWrite.url=http://127.0.0.1:9/",
            f"-remoteWrite.tmpDataPath={tmp_path}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield found_by(address)
    finally:
        agent.kill()
        agent.wait()


def found_by(address: str) -> list[JSONDict]:
    """The targets, once there are some."""

    def look() -> list[JSONDict]:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://{address}/api/v1/targets") as answer,
        ):
            return list(json.load(answer)["data"]["activeTargets"])
        return []

    return list(polling.until_in_thread(look))


def test_running_workers_and_the_exporter_are_found_with_the_labels_that_dashboards_join_on(
    targets: list[JSONDict], api
):
    assert all(
        "labelSelector=app.kubernetes.io%2Fpart-of%3Dimagefleet" in r
        for r in api.requests
    )
    found = {
        target["scrapeUrl"]: (target["labels"]["job"], target["labels"]["instance"])
        for target in targets
    }
    # In the order of the rendered manifests, the job that loads is the second pod.
    assert found == {
        "http://127.0.1.1:9108/metrics": ("imagefleet-exporter", "exporter-0"),
        "http://127.0.1.3:8080/metrics": ("imagefleet-worker", "worker-2"),
    }


def test_the_pod_monitor_scrapes_the_same_pods_and_labels(render):
    rendered = render("pod-monitor", "scrape-config")
    (monitor,) = rendered.of_kind("PodMonitor").values()
    endpoint, *of_gpus = monitor["spec"]["podMetricsEndpoints"]
    for each in of_gpus:
        assert each == {**endpoint, "port": each["port"]}
    scraped = {
        container["name"]
        for labels, _, container in rendered.pods()
        if monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
        and endpoint["port"] in {port["name"] for port in container.get("ports", [])}
    }
    assert scraped == {"worker", "exporter"}
    (scrape,) = config_of(rendered)["scrape_configs"]
    copied = {
        rule["target_label"]: rule["source_labels"]
        for rule in scrape["relabel_configs"]
        if "target_label" in rule
    }
    assert copied.pop("endpoint")  # which the operator adds
    label = monitor["spec"]["jobLabel"].translate(str.maketrans("./-", "___"))
    assert copied == {
        "job": [f"__meta_kubernetes_pod_label_{label}"],
        **{
            rule["targetLabel"]: rule["sourceLabels"]
            for rule in endpoint["relabelings"]
        },
    }
    assert (
        "filterRunning" not in endpoint
    )  # the default: pods of a finished Job are left out


def test_no_label_of_a_target_hides_one_of_a_metric(repository: Path):
    documented = (repository / "dashboards" / "README.md").read_text()
    listed = re.findall(r"^\| `imagefleet_\w+\{([a-z_,]+)\}", documented, re.MULTILINE)
    own = {label for labels in listed for label in labels.split(",")} | {"fleet"}
    assert {"outcome", "queue", "worker"} <= own
    # The operator adds the last four by itself.
    added = {"job", "instance", "namespace", "pod", "container", "endpoint"}
    assert own & added == set()


def test_prometheus_may_find_the_pods(render):
    rendered = render("scrape-config")
    (binding,) = rendered.of_kind("RoleBinding").values()
    (role,) = rendered.of_kind("Role").values()
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (discovery,) = config_of(rendered)["scrape_configs"][0]["kubernetes_sd_configs"]
    assert discovery["namespaces"]["names"] == [role["metadata"]["namespace"]]
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    ]


def test_the_network_policy_lets_prometheus_in(render):
    rendered = render("scrape-config")
    (policy,) = rendered.of_kind("NetworkPolicy").values()
    (rule,) = policy["spec"]["ingress"]
    (monitor,) = render("pod-monitor").of_kind("PodMonitor").values()
    scraped = [each["port"] for each in monitor["spec"]["podMetricsEndpoints"]]
    assert rule["ports"] == [{"protocol": "TCP", "port": port} for port in scraped]
    (source,) = rule["from"]
    assert source["podSelector"]["matchLabels"] == {
        "app.kubernetes.io/name": "prometheus"
    }
    namespace = rendered.of_kind("ConfigMap")["imagefleet-scrape-config"]["metadata"][
        "namespace"
    ]
    assert source["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": namespace
    }
    (binding,) = rendered.of_kind("RoleBinding").values()
    assert [subject["namespace"] for subject in binding["subjects"]] == [namespace]

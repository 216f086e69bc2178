"""Components of the kustomization: what each one changes, and that they go together."""

import ipaddress
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli import console
from imagefleet.validation import JSONDict

Errors = Callable[
    [list[Any]], list[Exception]
]  # these three: the fixtures of conftest.py
CreateJob = Callable[..., JSONDict]
Build = Callable[..., subprocess.CompletedProcess[str]]

JOB_NAME = "batch.kubernetes.io/job-name"


CRON_JOBS = "/apis/batch/v1/namespaces/imagefleet/cronjobs"

#: What kubectl asks before it asks for the CronJob.
DISCOVERY = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": []},
    "/apis": {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [
            {
                "name": "batch",
                "versions": [{"groupVersion": "batch/v1", "version": "v1"}],
            },
        ],
    },
    "/apis/batch/v1": {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": "batch/v1",
        "resources": [
            {
                "name": "cronjobs",
                "singularName": "cronjob",
                "namespaced": True,
                "kind": "CronJob",
            }
        ],
    },
}


@pytest.fixture
def create_job(api, kubectl: str, tmp_path) -> Callable[..., JSONDict]:
    """What `kubectl create job NAME --from cronjob/NAME` makes of a rendered CronJob."""

    def create(rendered: Any, name: str = "imagefleet-worker") -> JSONDict:
        cron_job = rendered.of_kind("CronJob")[name]
        api.answers = DISCOVERY | {f"{CRON_JOBS}/{name}": cron_job}
        server = ("--server", api.address, "--namespace", "imagefleet")
        made = subprocess.run(
            [
                kubectl,
                *server,
                "create",
                "job",
                "spring",
                "--from",
                f"cronjob/{name}",
                "--dry-run=client",
                "--output",
                "json",
            ],
            env={"HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert made.returncode == 0, made.stderr
        job: JSONDict = json.loads(made.stdout)
        # The API server gives the CronJob its id.
        job["metadata"]["ownerReferences"][0]["uid"] = "an-id"
        return job

    return create


def selects(selector: JSONDict, labels: dict[str, str]) -> bool:
    """Kubernetes' label selector, as far as the manifests use it."""
    absent = selector.get("matchExpressions", [])
    assert all(each["operator"] == "DoesNotExist" for each in absent)
    return selector["matchLabels"].items() <= labels.items() and not any(
        each["key"] in labels for each in absent
    )


def test_every_component_is_a_line_of_the_kustomization_and_of_the_readme(
    repository: Path, components: tuple[str, ...]
):
    folder = repository / "deploy" / "kubernetes"
    assert sorted(components) == sorted(
        path.name for path in (folder / "components").iterdir()
    )
    _, _, text = (folder / "README.md").read_text().partition("## Components")
    described = re.findall(r"^\| `([a-z-]+)` \|", text, re.MULTILINE)
    assert tuple(described) == components


@pytest.mark.slow
def test_every_component_works_alone(
    components: tuple[str, ...], render, plain, errors_of: Errors
):
    for name in components:
        rendered = render("job", name) if name == "kueue" else render(name)
        assert rendered != plain, name
        assert errors_of(rendered) == []


@pytest.mark.parametrize("component", ["gpu-nodes", "gpus-per-pod", "priority-class"])
def test_a_component_that_comes_after_the_job_is_an_error_not_a_silence(
    component: str, build: Build
):
    built = build(["job", component])
    assert built.returncode != 0
    assert "Deployment" in built.stderr


def test_all_pods_pull_with_the_secret(render):
    rendered = render("image-pull-secret")
    accounts = rendered.of_kind("ServiceAccount")
    for _, pod, _ in rendered.pods():
        assert accounts[pod["serviceAccountName"]]["imagePullSecrets"] == [
            {"name": "registry"}
        ]
        assert "imagePullSecrets" not in pod, "would replace the account's"


class TestEgress:
    @pytest.fixture
    def policies(self, render) -> JSONDict:
        policies: JSONDict = render("egress").of_kind("NetworkPolicy")
        return policies

    def test_by_default_nothing_enters_or_leaves_the_namespace(
        self, policies: JSONDict
    ):
        spec = policies["default-deny"]["spec"]
        assert spec == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}

    def test_every_pod_may_reach_dns_https_and_the_metrics_alone(
        self, policies: JSONDict, render
    ):
        spec = policies["imagefleet-egress"]["spec"]
        assert spec["policyTypes"] == ["Egress"]
        for labels, _, _ in render("egress").pods():
            assert selects(spec["podSelector"], labels)
        ports = [{port["port"] for port in rule["ports"]} for rule in spec["egress"]]
        assert ports == [{53}, {443}, {8429}]
        assert all(rule["to"] for rule in spec["egress"]), "an empty list is everywhere"

    @pytest.mark.parametrize(
        ("address", "allowed"),
        [
            ("20.60.1.4", True),
            ("2603:1030::1", True),
            (
                "169.254.169.254",
                False,
            ),  # the node's metadata service, with the node's identity
            ("10.0.0.1", False),  # Kubernetes' API
            ("192.168.1.1", False),
            ("fd00::1", False),
        ],
    )
    def test_https_reaches_the_internet_but_no_private_address(
        self, policies: JSONDict, address: str, allowed: bool
    ):
        (https,) = (
            rule
            for rule in policies["imagefleet-egress"]["spec"]["egress"]
            if rule["ports"] == [{"protocol": "TCP", "port": 443}]
        )
        host = ipaddress.ip_address(address)

        def holds(block: str) -> bool:
            network = ipaddress.ip_network(block)
            return network.version == host.version and host in network

        reached = any(
            holds(peer["ipBlock"]["cidr"])
            and not any(map(holds, peer["ipBlock"]["except"]))
            for peer in https["to"]
        )
        assert reached is allowed

    def test_cilium_allows_the_accounts_names_and_the_sign_in_alone(
        self, render, errors_of: Errors
    ):
        rendered = render("egress-fqdn")
        (policy,) = rendered.of_kind("CiliumNetworkPolicy").values()
        assert errors_of([policy]) == []
        for labels, _, _ in rendered.pods():
            assert selects(policy["spec"]["endpointSelector"], labels)
        names = [
            name
            for rule in policy["spec"]["egress"]
            for selector in rule.get("toFQDNs", [])
            for name in selector.values()
        ]
        storage = rendered.of_kind("ConfigMap")["imagefleet-settings"]["data"][
            "IMAGEFLEET_STORAGE"
        ]
        blobs = storage.removeprefix("https://")
        queues = blobs.replace(".blob.", ".queue.")
        assert names == [blobs, queues, "login.microsoftonline.com"]
        assert not any("toEntities" in rule for rule in policy["spec"]["egress"])


def test_workers_and_nothing_else_are_placed_on_gpu_nodes_and_give_way(
    render,
):
    rendered = render("gpu-nodes", "priority-class")
    _, worker, container = rendered.worker()
    assert worker["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert worker["priorityClassName"] == "imagefleet-batch"
    for _, pod, other in rendered.pods():
        if other["name"] != container["name"]:
            assert not {"nodeSelector", "tolerations", "priorityClassName"} & pod.keys()
    value = rendered.of_kind("PriorityClass")["imagefleet-batch"]["value"]
    assert -10 <= value < 0  # below, the cluster autoscaler adds no nodes


def test_pods_of_several_gpus_scale_by_their_gpus(plain, render):
    rendered = render("gpus-per-pod")
    (one, many) = (
        each.worker()[2]["resources"]["limits"] for each in (plain, rendered)
    )
    gpus = int(many["nvidia.com/gpu"]) / int(one["nvidia.com/gpu"])
    assert gpus == 4
    before, after = (
        each.of_kind("ScaledObject")["imagefleet-worker"]["spec"]
        for each in (plain, rendered)
    )
    modified, changed = (
        each["advanced"]["scalingModifiers"] for each in (before, after)
    )
    assert int(changed["target"]) == gpus * int(modified["target"])
    assert changed["formula"] == modified["formula"]
    assert after["maxReplicaCount"] * gpus == before["maxReplicaCount"]


def test_a_load_is_a_job_of_its_own(plain, create_job: CreateJob, errors_of: Errors):
    job = create_job(plain, "imagefleet-load")
    assert errors_of([job]) == []
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"][0] == "load"


def test_the_disruption_budget_covers_workers_but_no_pods_of_a_job(
    render, create_job: CreateJob
):
    rendered = render("disruption-budget")
    (budget,) = rendered.of_kind("PodDisruptionBudget").values()
    selected = [
        container["name"]
        for labels, _, container in rendered.pods()
        if selects(budget["spec"]["selector"], labels)
    ]
    assert selected == ["worker"]
    labels = create_job(render("job"))["spec"]["template"]["metadata"]["labels"]
    # The Job controller adds this label.
    assert not selects(budget["spec"]["selector"], labels | {JOB_NAME: "spring"})


class TestJobMode:
    @pytest.fixture
    def job(
        self, render, components: tuple[str, ...], create_job: CreateJob
    ) -> JSONDict:
        return create_job(render(*components))

    def test_replaces_the_deployment_and_its_scaling(self, render):
        rendered = render("job")
        assert not rendered.of_kind("ScaledObject")
        assert not rendered.of_kind("TriggerAuthentication")
        assert set(rendered.of_kind("Deployment")) == {"imagefleet-exporter"}
        cron_job = rendered.of_kind("CronJob")["imagefleet-worker"]
        assert cron_job["spec"]["suspend"] is True, (
            "workers would start before there are jobs"
        )

    def test_its_pod_is_that_of_the_deployment(
        self, job: JSONDict, render, components: tuple[str, ...]
    ):
        before = components[: components.index("job")]
        _, pod, container = render(*before).worker()
        its_pod = job["spec"]["template"]["spec"]
        (its_container,) = its_pod["containers"]
        assert its_container == container | {"args": ["worker", "--until-empty"]}
        assert its_pod == pod | {
            "restartPolicy": "Never",
            "containers": [its_container],
        }

    def test_is_a_work_queue(self, job: JSONDict, errors_of: Errors):
        assert errors_of([job]) == []
        # With completions, pods would start again on an empty queue.
        assert "completions" not in job["spec"]
        assert job["spec"]["parallelism"] > 1

    def test_kueue_queues_it_and_lets_its_number_of_pods_change(
        self, job: JSONDict, render, create_job: CreateJob
    ):
        assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu-queue"
        annotations = job["metadata"]["annotations"]
        assert annotations["kueue.x-k8s.io/elastic-job"] == "true"
        assert "kueue" not in str(create_job(render("job"))["metadata"])

    def test_exit_codes_do_what_they_mean(self, job: JSONDict):
        def outcome(exit_code: int, *, disrupted: bool = False) -> str:
            """The action of the first rule that fits a failed pod, as Kubernetes takes it."""
            for rule in job["spec"]["podFailurePolicy"]["rules"]:
                if codes := rule.get("onExitCodes"):
                    assert codes["operator"] == "In"
                    assert codes["containerName"] == "worker"
                    if exit_code in codes["values"]:
                        return str(rule["action"])
                elif disrupted:
                    assert rule["onPodConditions"] == [
                        {"type": "DisruptionTarget", "status": "True"}
                    ]
                    return str(rule["action"])
            return "Count"

        assert outcome(console.EXIT_OPERATOR_MUST_ACT) == "FailJob"
        assert (
            outcome(console.EXIT_REPLACE_THIS_NODE) == "Count"
        )  # by backoffLimit, and replaced
        assert outcome(console.EXIT_UNEXPECTED) == "Count"
        assert (
            outcome(143, disrupted=True) == "Ignore"
        )  # evicted and drained: only replaced
        assert outcome(137, disrupted=True) == "Ignore"  # or too slow at that
        assert outcome(143) == "Count"  # a failed liveness probe
        assert job["spec"]["backoffLimit"] >= job["spec"]["parallelism"]

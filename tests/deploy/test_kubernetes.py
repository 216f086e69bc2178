"""The manifests, checked against their schemas, each other and the settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from worker.pipeline import HAND_BACK_SECONDS
from worker.settings import WorkerSettings

Manifest = dict[str, Any]

#: The version of the schemas.
KUBERNETES = "1.32"


@pytest.fixture
def folder(repository: Path) -> Path:
    return repository / "deploy" / "kubernetes"


@pytest.fixture
def manifests(folder: Path) -> list[Manifest]:
    paths = [path for path in folder.glob("*.yaml") if path.name != "kustomization.yaml"]
    return [each for path in paths for each in yaml.safe_load_all(path.read_text()) if each]


@pytest.fixture
def kustomization(folder: Path) -> Manifest:
    loaded: Manifest = yaml.safe_load((folder / "kustomization.yaml").read_text())
    return loaded


@pytest.fixture
def schemas() -> dict[str, Manifest]:
    text = (Path(__file__).parent / "keda-schemas.yaml").read_text()
    return dict(yaml.safe_load(text))


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {
        each["metadata"].get("name") or each["metadata"]["generateName"]: each
        for each in manifests
        if each["kind"] == kind
    }


def pods(manifests: list[Manifest]) -> Iterator[tuple[Manifest, Manifest, Manifest]]:
    """The labels, pod and container of each workload."""
    for each in manifests:
        if each["kind"] in {"Deployment", "Job"}:
            template = each["spec"]["template"]
            (container,) = template["spec"]["containers"]
            yield template["metadata"]["labels"], template["spec"], container


def check(manifest: Manifest, schemas: dict[str, Manifest]) -> None:
    if manifest["apiVersion"].startswith("keda.sh/"):
        jsonschema.validate(manifest, schemas[manifest["kind"]])
    else:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_every_manifest_is_valid(manifests: list[Manifest], schemas: dict[str, Manifest]) -> None:
    assert len(manifests) >= 9
    for manifest in manifests:
        check(manifest, schemas)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda found: found["Deployment"]["spec"]["template"]["spec"].update(volums=[]),
        lambda found: found["ScaledObject"]["spec"]["triggers"][0]["metadata"].update(length="5"),
        lambda found: found["ScaledObject"]["spec"]["triggers"][0]["metadata"].update(
            queueLength=5
        ),
        lambda found: found["TriggerAuthentication"]["spec"]["podIdentity"].pop("provider"),
    ],
)
def test_a_mistake_in_a_manifest_is_found(
    break_it: Callable[[dict[str, Manifest]], object],
    manifests: list[Manifest],
    schemas: dict[str, Manifest],
) -> None:
    found = {manifest["kind"]: manifest for manifest in manifests}
    break_it(found)
    found_errors = []
    for manifest in manifests:
        try:
            check(manifest, schemas)
        except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
            found_errors.append(error)
    assert len(found_errors) == 1


def test_the_kustomization_has_every_file_except_the_job(
    folder: Path, kustomization: Manifest, manifests: list[Manifest]
) -> None:
    files = {path.name for path in folder.glob("*.yaml")}
    assert files - set(kustomization["resources"]) == {"kustomization.yaml", "load.yaml"}
    (namespace,) = of_kind(manifests, "Namespace")
    assert kustomization["namespace"] == namespace
    (load,) = of_kind(manifests, "Job").values()
    assert load["metadata"]["namespace"] == namespace
    images = {
        image["name"]: f"{image['newName']}@{image['digest']}" for image in kustomization["images"]
    }
    used = {container["image"] for _, _, container in pods(manifests)}
    assert used == {*images, images["imagefleet"]}


def test_referenced_names_exist(manifests: list[Manifest]) -> None:
    accounts, maps = of_kind(manifests, "ServiceAccount"), of_kind(manifests, "ConfigMap")
    for _, pod, container in pods(manifests):
        assert pod["serviceAccountName"] in accounts
        for source in container["envFrom"]:
            assert source["configMapRef"]["name"] in maps
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    for deployment in of_kind(manifests, "Deployment").values():
        selected = deployment["spec"]["selector"]["matchLabels"].items()
        assert selected <= deployment["spec"]["template"]["metadata"]["labels"].items()
    for scaled in of_kind(manifests, "ScaledObject").values():
        assert scaled["spec"]["scaleTargetRef"]["name"] in of_kind(manifests, "Deployment")
        (trigger,) = scaled["spec"]["triggers"]
        assert trigger["authenticationRef"]["name"] in of_kind(manifests, "TriggerAuthentication")


def test_keda_counts_the_workers_queue_including_leased_jobs(
    manifests: list[Manifest],
) -> None:
    (settings,) = of_kind(manifests, "ConfigMap").values()
    (scaled,) = of_kind(manifests, "ScaledObject").values()
    metadata = scaled["spec"]["triggers"][0]["metadata"]
    assert metadata["queueName"] == settings["data"]["IMAGEFLEET_QUEUE"]
    assert metadata["queueLengthStrategy"] == "all"
    address = f"https://{metadata['accountName']}.blob.core.windows.net"
    assert settings["data"]["IMAGEFLEET_STORAGE"] == address
    # A number here would override KEDA's with every apply.
    assert "replicas" not in of_kind(manifests, "Deployment")["imagefleet-worker"]["spec"]


def test_pods_are_labelled_for_workload_identity(manifests: list[Manifest]) -> None:
    (account,) = of_kind(manifests, "ServiceAccount").values()
    (auth,) = of_kind(manifests, "TriggerAuthentication").values()
    identity = account["metadata"]["annotations"]["azure.workload.identity/client-id"]
    assert auth["spec"]["podIdentity"] == {"provider": "azure-workload", "identityId": identity}
    for labels, _, _ in pods(manifests):
        assert labels["azure.workload.identity/use"] == "true"


def test_commands_and_variables_are_valid(
    manifests: list[Manifest], parse_command: Callable[..., Any]
) -> None:
    (settings,) = of_kind(manifests, "ConfigMap").values()
    for _, _, container in pods(manifests):
        own = {entry["name"]: entry.get("value", "a-pod") for entry in container.get("env", [])}
        assert {name[:11] for name in own} <= {"IMAGEFLEET_"}
        image = {"IMAGEFLEET_MODEL": "/models/checkpoint"}
        parse_command(container.get("args", ["worker"]), image | settings["data"] | own)


def test_the_termination_grace_period_covers_the_drain(
    manifests: list[Manifest], parse_command: Callable[..., Any]
) -> None:
    (settings,) = of_kind(manifests, "ConfigMap").values()
    worker = of_kind(manifests, "Deployment")["imagefleet-worker"]
    pod = worker["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    own = {entry["name"]: entry.get("value", "a-pod") for entry in container["env"]}
    image = {"IMAGEFLEET_MODEL": "/models/checkpoint"}
    parsed = parse_command(["worker"], image | settings["data"] | own)
    assert isinstance(parsed, WorkerSettings)
    assert pod["terminationGracePeriodSeconds"] >= parsed.grace_seconds + 2 * HAND_BACK_SECONDS
    (port,) = container["ports"]
    assert port["containerPort"] == parsed.port
    assert parsed.host == "0.0.0.0"  # metrics are scraped from outside the pod


def test_probes_use_the_health_commands(manifests: list[Manifest]) -> None:
    worker = of_kind(manifests, "Deployment")["imagefleet-worker"]
    (container,) = worker["spec"]["template"]["spec"]["containers"]
    for probe, state in (("startup", "started"), ("liveness", "live"), ("readiness", "ready")):
        check = container[f"{probe}Probe"]
        assert check["exec"]["command"] == ["imagefleet", "health", state]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_pods_are_unprivileged_and_write_only_to_volumes(manifests: list[Manifest]) -> None:
    for _, pod, container in pods(manifests):
        assert pod["securityContext"]["runAsUser"] == 65532
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }

"""The rendered manifests, checked against their schemas, each other and the settings."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from imagefleet.storage.azure.roles import (
    JOB_QUEUES,
    RESOURCES,
    ROLES,
    azure_role,
    name_of,
)
from imagefleet.storage.settings import StorageSettings
from worker.pipeline import HAND_BACK_SECONDS
from worker.settings import MachineSettings

Errors = Callable[
    [list[Any]], list[Exception]
]  # these two: the fixtures of conftest.py

MULTI = re.MULTILINE | re.DOTALL
DIGEST = "sha256:" + 64 * "1"


def test_every_manifest_is_valid(manifests, errors_of: Errors):
    assert len(manifests) >= 9
    assert errors_of(manifests) == []


def test_the_kustomization_has_every_file_of_the_base(repository: Path):
    base = repository / "deploy" / "kubernetes" / "base"
    kustomization = yaml.safe_load((base / "kustomization.yaml").read_text())
    files = {path.name for path in base.glob("*.yaml")}
    assert files - set(kustomization["resources"]) == {"kustomization.yaml"}


def test_one_entry_per_image_changes_all_manifests(
    repository: Path, components: tuple[str, ...], render
):
    shipped = yaml.safe_load(
        (repository / "deploy" / "kubernetes" / "kustomization.yaml").read_text()
    )["images"]
    names = ["imagefleet-worker", "imagefleet"]
    assert [image["name"] for image in shipped] == names

    ours = [
        {"name": name, "newName": f"ghcr.io/us/{name}", "digest": DIGEST}
        for name in names
    ]

    expected = {f"ghcr.io/us/{name}@{DIGEST}" for name in names}
    for manifests in (render(images=ours), render(*components, images=ours)):
        used = {
            pod["containers"][0]["name"]: pod["containers"][0]["image"]
            for _, pod, _ in manifests.pods()
        }
        assert set(used.values()) == expected
        assert {"worker", "exporter", "load"} <= set(used)
        light = {image for name, image in used.items() if name != "worker"}
        assert len(light) == 1
        assert used["worker"] not in light


def test_a_tag_that_moves_is_in_no_shipped_manifest(plain):
    for _, _, container in plain.pods():
        assert re.search(r"@sha256:[0-9a-f]{64}$", container["image"])


def test_all_is_in_the_namespace_that_the_base_makes(manifests):
    (namespace,) = manifests.of_kind("Namespace")
    elsewhere = {
        (each["kind"], each["metadata"]["name"]): each["metadata"].get("namespace")
        for each in manifests
        if each["metadata"].get("namespace") != namespace
    }
    # Without a namespace, and what Prometheus mounts.
    allowed = {
        ("Namespace", namespace): None,
        ("PriorityClass", "imagefleet-batch"): None,
        ("ConfigMap", "imagefleet-scrape-config"): "monitoring",
    }
    assert elsewhere.items() <= allowed.items()


def test_referenced_names_exist(manifests):
    accounts = manifests.of_kind("ServiceAccount")
    maps = manifests.of_kind("ConfigMap")
    for _, pod, container in manifests.pods():
        assert pod["serviceAccountName"] in accounts
        for source in container["envFrom"]:
            assert source["configMapRef"]["name"] in maps
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        if "priorityClassName" in pod:
            assert pod["priorityClassName"] in manifests.of_kind("PriorityClass")
    for deployment in manifests.of_kind("Deployment").values():
        selected = deployment["spec"]["selector"]["matchLabels"].items()
        assert selected <= deployment["spec"]["template"]["metadata"]["labels"].items()
    for scaled in manifests.of_kind("ScaledObject").values():
        assert scaled["spec"]["scaleTargetRef"]["name"] in manifests.of_kind(
            "Deployment"
        )
        for trigger in scaled["spec"]["triggers"]:
            assert trigger["authenticationRef"]["name"] in manifests.of_kind(
                "TriggerAuthentication"
            )


def test_keda_adds_up_the_workers_queues_including_leased_jobs(plain):
    settings = plain.of_kind("ConfigMap")["imagefleet-settings"]["data"]
    (scaled,) = plain.of_kind("ScaledObject").values()
    triggers = {each["name"]: each["metadata"] for each in scaled["spec"]["triggers"]}
    queues = StorageSettings(queue=settings["IMAGEFLEET_QUEUE"]).queues_of(None)
    assert {
        name: metadata["queueName"] for name, metadata in triggers.items()
    } == queues
    # By itself KEDA scales by the largest of its triggers.
    formula = scaled["spec"]["advanced"]["scalingModifiers"]["formula"]
    assert formula.split(" + ") == list(queues)
    for metadata in triggers.values():
        assert metadata["queueLengthStrategy"] == "all"
        address = f"https://{metadata['accountName']}.blob.core.windows.net"
        assert settings["IMAGEFLEET_STORAGE"] == address
    # A number here would override KEDA's with every apply.
    assert "replicas" not in plain.of_kind("Deployment")["imagefleet-worker"]["spec"]


def test_the_readmes_queue_of_a_model_is_the_workers(repository: Path):
    text = (repository / "deploy" / "kubernetes" / "README.md").read_text()
    (model,) = re.findall(r"store:([\w-]+)\.safetensors", text)
    name = StorageSettings().queues_of(model)["normal"]
    assert f"queueName: {name}," in text
    assert f"job_queue('jobs', '{model}')" in text


def test_each_role_has_an_identity_of_its_own(plain, manifests):
    accounts = manifests.of_kind("ServiceAccount")
    used = {
        container["name"]: pod["serviceAccountName"]
        for _, pod, container in manifests.pods()
    }
    assert sorted(used.values()) == sorted(accounts)
    assert used.keys() - {"gateway"} == {"worker", "load", "exporter"}
    assert used == {name: f"imagefleet-{name}" for name in used}
    for account in accounts.values():
        assert "azure.workload.identity/client-id" in account["metadata"]["annotations"]
        assert account["automountServiceAccountToken"] is False
    (auth,) = plain.of_kind("TriggerAuthentication").values()
    assert auth["spec"]["podIdentity"].keys() == {"provider", "identityId"}
    assert auth["spec"]["podIdentity"]["provider"] == "azure-workload"
    for labels, pod, _ in manifests.pods():
        assert labels["azure.workload.identity/use"] == "true"
        # Kubernetes' own token, which no role needs; Azure's is projected for the label.
        assert pod["automountServiceAccountToken"] is False


def test_the_documented_azure_roles_are_the_least_that_each_role_needs(
    repository: Path,
):
    text = (repository / "deploy" / "kubernetes" / "README.md").read_text()
    rows = re.findall(
        r"^\| `imagefleet-(\w+)` \| `[^`]+` \| (.+?) \|$", text, re.MULTILINE
    )
    assigned = {
        identity: {
            name: role
            for names, role in re.findall(r"((?:`[\w-]+`(?:, )?)+): ([\w ]+)", roles)
            for name in re.findall(r"`([\w-]+)`", names)
        }
        for identity, roles in rows
    }
    assert assigned.keys() == {"worker", "load", "exporter", "gateway", "scaler"}
    names = {name_of(StorageSettings(), resource): resource for resource in RESOURCES}
    queues = dict.fromkeys(JOB_QUEUES.values(), "r")
    monitor = {**queues, "poison": "r"}  # it reads no images
    for identity, needed in (
        (
            "worker",
            {resource: ROLES["worker"].letters(resource) for resource in RESOURCES},
        ),
        ("load", {resource: ROLES["load"].letters(resource) for resource in RESOURCES}),
        ("exporter", monitor),
        ("scaler", queues),
        # It makes queues, sends jobs and takes them back, and writes claims and records.
        (
            "gateway",
            {
                **dict.fromkeys(JOB_QUEUES.values(), "raup"),
                "blob": "racdl",
                "packs": "rcl",
                "files": "racwl",
            },
        ),
    ):
        given = {names[name]: role for name, role in assigned[identity].items()}
        assert given.keys() == {
            resource for resource, letters in needed.items() if letters
        }
        for resource, role in given.items():
            least = {azure_role(resource, letter) for letter in needed[resource]}
            assert role in least, (identity, resource)
            assert len(least) == 1 or role.endswith("Contributor"), (identity, resource)
    # The commands below the table are those of its first row.
    commands = re.findall(
        r'^assign "([\w ]+)" \w+/default/\w+/([\w-]+)$', text, re.MULTILINE
    )
    assert {name: role for role, name in commands} == assigned["worker"]


def test_nothing_is_loaded_by_an_apply(plain):
    assert plain.of_kind("CronJob")["imagefleet-load"]["spec"]["suspend"] is True


def test_commands_and_variables_are_valid(manifests, parse_command):
    settings = manifests.of_kind("ConfigMap")["imagefleet-settings"]
    for _, _, container in manifests.pods():
        own = {
            entry["name"]: entry.get("value", "a-pod")
            for entry in container.get("env", [])
        }
        assert {name[:11] for name in own} <= {"IMAGEFLEET_"}
        image = {"IMAGEFLEET_MODEL": "/models/checkpoint"}
        parse_command(container.get("args", ["worker"]), image | settings["data"] | own)


def test_the_termination_grace_period_covers_the_drain(manifests, parse_command):
    settings = manifests.of_kind("ConfigMap")["imagefleet-settings"]
    _, pod, container = manifests.worker()
    own = {entry["name"]: entry.get("value", "a-pod") for entry in container["env"]}
    image = {"IMAGEFLEET_MODEL": "/models/checkpoint"}
    parsed = parse_command(["worker"], image | settings["data"] | own)
    assert isinstance(parsed, MachineSettings)
    assert parsed.gpus == "all"
    assert (
        pod["terminationGracePeriodSeconds"]
        >= parsed.grace_seconds + 2 * HAND_BACK_SECONDS
    )
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports.pop("metrics") == parsed.port
    # Of each of several GPUs, as the parent numbers them.
    assert [*ports.values()] == [parsed.port + 1 + gpu for gpu in range(len(ports))]
    assert parsed.host == "0.0.0.0"  # metrics are scraped from outside the pod


def test_probes_use_the_health_commands(manifests):
    _, _, container = manifests.worker()
    for probe, state in (
        ("startup", "started"),
        ("liveness", "live"),
        ("readiness", "ready"),
    ):
        check = container[f"{probe}Probe"]
        assert check["exec"]["command"] == ["imagefleet", "health", state]


def test_pods_are_unprivileged_and_write_only_to_volumes(manifests):
    for _, pod, container in manifests.pods():
        assert pod["securityContext"]["runAsUser"] == 65532
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }


def test_the_kustomization_of_the_readme_leaves_no_placeholder(
    repository: Path, kubectl: str, tmp_path, errors_of: Errors
):
    deploy = repository / "deploy" / "kubernetes"
    (shown,) = re.findall(
        r"^```yaml\n(# fleet/.+?)^```$", (deploy / "README.md").read_text(), MULTI
    )
    shutil.copytree(deploy, tmp_path / "imagefleet" / "deploy" / "kubernetes")
    (tmp_path / "fleet").mkdir()
    (tmp_path / "fleet" / "kustomization.yaml").write_text(shown)
    built = subprocess.run(
        [kubectl, "kustomize", tmp_path / "fleet"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert not re.search(
        r"ACCOUNT|0{8}|registry\.example|image: imagefleet", built.stdout
    )
    assert errors_of(list(yaml.safe_load_all(built.stdout))) == []

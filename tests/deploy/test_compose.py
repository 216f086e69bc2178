"""The compose files, parsed by docker compose and compared with the repository."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from imagefleet.storage.azure import account
from imagefleet.validation import JSONDict
from worker.settings import WorkerSettings

Services = dict[str, JSONDict]


@pytest.fixture
def compose(repository: Path) -> Path:
    return repository / "deploy" / "compose"


@pytest.fixture
def read(compose: Path, command_of: Callable[[str], str]) -> Callable[..., Services]:
    """Parses compose files with `docker compose config`, which needs no daemon."""

    def read(*names: str) -> Services:
        files = [part for name in names for part in ("-f", str(compose / name))]
        done = subprocess.run(
            [command_of("docker-compose"), *files, "config", "--format", "json"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout)["services"])

    return read


def ours(services: Services) -> Services:
    return {name: each for name, each in services.items() if "build" in each}


@pytest.mark.parametrize("names", [["compose.yaml"], ["compose.yaml", "gpu.yaml"]])
def test_docker_compose_accepts_the_files(
    names: list[str], read: Callable[..., Services]
):
    assert read(*names).keys() == {
        "azurite",
        "load",
        "worker",
        "exporter",
        "vmagent",
        "prometheus",
        "grafana",
    }


def test_every_mounted_file_and_build_folder_exists(
    read: Callable[..., Services], repository: Path
):
    services = read("compose.yaml")
    mounts = [mount for each in services.values() for mount in each.get("volumes", [])]
    binds = [Path(mount["source"]) for mount in mounts if mount["type"] == "bind"]
    assert len(binds) >= 5
    assert [path for path in binds if not path.exists()] == []
    stages = re.findall(
        r"^FROM .* AS (\w+)$", (repository / "Dockerfile").read_text(), re.MULTILINE
    )
    for service in ours(services).values():
        assert Path(service["build"]["context"]) == repository
        assert service["build"]["target"] in stages


def test_third_party_images_are_pinned_by_digest(read: Callable[..., Services]):
    services = read("compose.yaml")
    images = [
        each["image"] for name, each in services.items() if name not in ours(services)
    ]
    assert [
        image for image in images if not re.search(r":v?\d+\.\d+\.\d+(@|$)", image)
    ] == []
    without = [
        image for image in images if not re.search(r"@sha256:[0-9a-f]{64}$", image)
    ]
    assert without == ["victoriametrics/vmagent:v1.122.0"]


def test_every_command_and_variable_is_valid(
    read: Callable[..., Services], parse_command
):
    for service in ours(read("compose.yaml")).values():
        variables = {
            name: value
            for name, value in service["environment"].items()
            if name.startswith("IMAGEFLEET_")
        }
        image = {"IMAGEFLEET_MODEL": "/models/checkpoint"}
        settings = parse_command(
            service.get("command") or ["worker"], image | variables
        )
        assert account.read_address(settings.storage) is not None


def test_our_containers_run_read_only_and_without_capabilities(
    read: Callable[..., Services],
):
    for service in ours(read("compose.yaml")).values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "/tmp" in service["tmpfs"]


def test_the_stop_grace_period_covers_the_drain(read: Callable[..., Services]):
    (seconds,) = re.fullmatch(
        r"(\d+)s", read("compose.yaml")["worker"]["stop_grace_period"]
    ).groups()
    assert int(seconds) >= WorkerSettings.model_fields["grace_seconds"].default + 10


def test_the_datasource_is_that_of_the_dashboards_with_another_url(
    compose: Path, repository: Path
):
    theirs = repository / "dashboards" / "provisioning" / "datasource.yaml"
    own, original = (
        yaml.safe_load(path.read_text())
        for path in (compose / "datasource.yaml", theirs)
    )
    original["datasources"][0]["url"] = "http://prometheus:9090"
    assert own == original


def test_two_gateways_stand_behind_a_proxy(
    read: Callable[..., Services], monkeypatch, tmp_path
):
    monkeypatch.setenv("CLIENTS", str(tmp_path / "clients.yaml"))

    services = read("compose.yaml", "gateway.yaml")

    gateway = services["gateway"]
    proxy = services["proxy"]
    assert gateway["deploy"]["replicas"] == 2
    assert gateway["command"][0] == "serve"
    assert "ports" not in gateway  # only the proxy is reached
    assert proxy["command"][-1] == "gateway:7860"

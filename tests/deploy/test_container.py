"""Builds and runs the light image without Docker, and the worker's with `make images`."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import jsonschema
import pytest
from referencing import Registry, Resource

from imagefleet.validation import JSONDict
from in_process import assert_refused
from worker.settings import WorkerSettings

pytestmark = pytest.mark.slow

#: The first test builds the images.
BUILDS = pytest.mark.timeout(600)

JOBS = 6


@pytest.fixture
def sbom_schema(builder) -> jsonschema.Draft7Validator:
    """CycloneDX 1.6, which names two other schemas by their files."""
    names = [f"{name}.SNAPSHOT.schema.json" for name in ("bom-1.6", "spdx", "jsf-0.82")]
    sbom, *others = map(builder.read_schema, names)
    registry: Registry[Any] = Registry().with_resources(
        (urljoin(sbom["$id"], name), Resource.from_contents(schema))
        for name, schema in zip(names[1:], others, strict=True)
    )
    return jsonschema.Draft7Validator(sbom, registry=registry)


def test_hadolint_accepts_the_dockerfile(
    repository: Path, command_of: Callable[[str], str]
):
    done = subprocess.run(
        [command_of("hadolint"), repository / "Dockerfile"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_the_dockerfile_sets_existing_settings(repository: Path):
    variables = re.findall(
        r"\bIMAGEFLEET_([A-Z_]+)=", (repository / "Dockerfile").read_text()
    )
    assert variables
    assert {name.lower() for name in variables} <= WorkerSettings.model_fields.keys()


@BUILDS
def test_the_light_image_loads_jobs_and_has_no_torch(
    light_image, data: Path, repository: Path
):
    jobs = (
        (repository / "demo_model" / "demo_jobs.jsonl").read_text().splitlines()[:JOBS]
    )
    (data / "jobs.jsonl").write_text("\n".join(jobs))
    storage = {"IMAGEFLEET_STORAGE": "local:/data/storage"}
    loaded = light_image.run("load", "/data/jobs.jsonl", data=data, **storage)
    assert loaded.returncode == 0, loaded.stderr
    status = light_image.run("status", "--json", data=data, **storage)
    assert f'"messages": {JOBS}' in status.stdout
    torch = light_image.run("python", "-c", "import torch", data=data, entrypoint=False)
    assert "No module named 'torch'" in torch.stderr
    assert_refused(
        light_image.run("worker", "--model", "x", data=data), "torch is not installed"
    )


@BUILDS
def test_the_worker_image_drains_a_queue_unprivileged_with_a_read_only_root(
    worker_image, light_image, data: Path, repository: Path
):
    jobs = (
        (repository / "demo_model" / "demo_jobs.jsonl").read_text().splitlines()[-JOBS:]
    )
    (data / "jobs.jsonl").write_text("\n".join(jobs))
    storage = {"IMAGEFLEET_STORAGE": "local:/data/storage"}
    loaded = light_image.run("load", "/data/jobs.jsonl", data=data, **storage)
    assert loaded.returncode == 0, loaded.stderr
    worked = worker_image.run("worker", "--until-empty", data=data, **storage)
    assert worked.returncode == 0, worked.stderr
    assert f"{JOBS} completed" in worked.stderr + worked.stdout
    images = list((data / "storage" / "images").rglob("*.png"))
    assert len(images) == JOBS
    assert {image.stat().st_uid for image in images} == {65532}
    written = worker_image.run(
        "sh",
        "-c",
        "id -u; touch /x; touch /opt/imagefleet/x",
        data=data,
        entrypoint=False,
    )
    assert written.stdout == "65532\n"
    assert written.stderr.count("Read-only file system") == 2


@BUILDS
def test_the_worker_image_has_the_torch_it_was_built_for(worker_image, data: Path):
    right, wrong = (
        worker_image.run(
            "python", "/pins/check_torch.py", wanted, data=data, entrypoint=False
        )
        for wanted in ("none", "12.8")
    )
    assert right.returncode == 0, right.stderr
    assert wrong.returncode == 1
    assert "it is for CPUs, not for CUDA 12.8" in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            {},
            [
                "--extra-index-url https://download.pytorch.org/whl/cu128",
                "torch==2.11.0+cu128",
            ],
        ),
        (
            {"PYTORCH_INDEX": "https://mirror.example/whl"},
            [
                "--extra-index-url https://mirror.example/whl/cu128",
                "torch==2.11.0+cu128",
            ],
        ),
        ({"CUDA": "13"}, ["torch==2.13.0"]),
        (
            {"CUDA": "none"},
            [
                "--extra-index-url https://download.pytorch.org/whl/cpu",
                "torch==2.13.0+cpu",
            ],
        ),
    ],
)
def test_the_cuda_argument_selects_torch_and_its_index(
    arguments: dict[str, str], lines: list[str], builder
):
    locked = builder.read_pins(arguments)
    chosen = [line for line in locked if re.match(r"(--|torch=)", line)]
    assert [line.partition(" --hash=")[0] for line in chosen] == lines
    assert all("--hash=sha256:" in line for line in locked if "==" in line)


def test_an_unknown_cuda_version_fails_the_build(builder, repository: Path):
    with pytest.raises(AssertionError, match="exit status 1"):
        builder.read_pins({"CUDA": "12.6"})

    # The builder may end before it has passed on what the step said last.
    text = (repository / "Dockerfile").read_text()
    (step,) = re.findall(r"^RUN (case .*?esac)", text, re.MULTILINE | re.DOTALL)
    script = step.replace("\\\n", "")
    ended = subprocess.run(
        ["sh", "-c", script],
        env={"CUDA": "12.6"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr == "CUDA=12.6 is unknown: use 12.8, 13 or none\n"


@BUILDS
def test_the_worker_image_has_its_command_user_and_health_check(
    worker_image,
):
    config = worker_image.config
    assert config["Entrypoint"] == ["imagefleet"]
    assert config["Cmd"] == ["worker"]
    assert config["User"] == "65532:65532"
    assert config["StopSignal"] == "SIGTERM"
    assert config["Healthcheck"]["Test"] == ["CMD", "imagefleet", "health", "live"]
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    in_cache = {
        name
        for name, value in worker_image.environment.items()
        if value[:6] == "/cache"
    }
    assert in_cache == {"HOME", "IMAGEFLEET_CACHE"}
    # Set from outside, they would have the kernels of all versions in one folder.
    assert (
        not {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
        & worker_image.environment.keys()
    )
    assert worker_image.environment["IMAGEFLEET_KERNELS"] == "/kernels"
    assert worker_image.environment["IMAGEFLEET_MODEL"] == "/models/checkpoint"


@BUILDS
def test_the_sbom_of_the_worker_image_lists_what_is_in_it(
    worker_image, sbom_schema, data: Path, repository: Path
):
    packages = sbom(worker_image, sbom_schema, data)
    assert packages["torch"]["version"] == "2.13.0+cpu"
    version = ("python", "-c", "import platform; print(platform.python_version())")
    printed = worker_image.run(*version, data=data, entrypoint=False).stdout.strip()
    assert packages["python"]["version"] == printed
    assert packages["libc6"]["purl"].startswith("pkg:deb/debian/libc6@")
    for name in ("torch", "diffusers", "imagefleet", "python"):
        assert packages[name]["licenses"], name
    assert locked(repository, "worker", "upscalers", "torch-none") <= versions(packages)


@BUILDS
def test_the_sbom_of_the_light_image_lists_what_is_in_it(
    light_image, sbom_schema, data: Path, repository: Path
):
    packages = sbom(light_image, sbom_schema, data)
    assert locked(repository, "light") <= versions(packages)
    assert "torch" not in packages


def sbom(
    image: Any, schema: jsonschema.Draft7Validator, data: Path
) -> dict[str, JSONDict]:
    """The components of an image by name, of a valid list."""
    read = image.run(
        "cat", "/usr/share/imagefleet/sbom.json", data=data, entrypoint=False
    )
    document = json.loads(read.stdout)
    schema.validate(document)
    return {
        each["name"].lower().replace("_", "-"): each for each in document["components"]
    }


def locked(repository: Path, *names: str) -> set[tuple[str, str]]:
    """Names and versions in lock files."""
    folder = repository / "deploy" / "locks"
    text = "".join((folder / f"{name}.txt").read_text() for name in names)
    found = re.findall(r"^([^#=]+)==(\S+)", text, re.MULTILINE)
    return {(name.replace(".", "-"), version) for name, version in found}


def versions(packages: dict[str, JSONDict]) -> set[tuple[str, str]]:
    return {(name, each["version"]) for name, each in packages.items()}


@BUILDS
def test_a_change_of_the_code_ships_megabytes_without_torch(
    worker_image, light_image, capsys
):
    *_, code = worker_image.layer_bytes
    assert code < 8e6
    assert max(worker_image.layer_bytes) > 500e6  # torch, below
    with capsys.disabled():
        for image in (light_image, worker_image):
            megabytes = [round(size / 1e6) for size in image.layer_bytes]
            print(  # noqa: T201
                f"\n{image.name}: {sum(megabytes)} MB unpacked, layers {json.dumps(megabytes)}"
            )

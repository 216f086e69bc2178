"""Fixtures for the images: a builder that needs neither Docker nor a registry."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urljoin

import pytest
from pydantic_settings import BaseSettings
from typer.core import TyperGroup

from cli import options
from fleet.settings import ExporterSettings, WebhookSettings
from gateway.settings import GatewaySettings
from in_process import as_it_was, built, in_process
from loadgen.settings import LoadSettings
from worker.settings import MachineSettings

__all__ = ["as_it_was", "built", "in_process"]

REPOSITORY = Path(__file__).parents[2]
DEBIAN = Path(__file__).parent / "debian"
REQUIRED = bool(os.environ.get("REQUIRE_CONTAINER"))

#: The worker's, which takes more time than all other tests of these files: `make images`.
IS_WORKER_BUILT = bool(os.environ.get("BUILD_WORKER_IMAGE"))

#: Base, two images and the intermediate layers; most of it torch.
NEEDED_BYTES = 8 * 2**30

#: Each layer is written four times, and all of it deleted at the end: disks take minutes for that.
MEMORY = Path("/dev/shm")
NEEDED_MEMORY_BYTES = 2 * NEEDED_BYTES

#: The commands that the files under deploy/ run.
MODELS: Mapping[str, type[BaseSettings]] = {
    "worker": MachineSettings,
    "load": LoadSettings,
    "exporter": ExporterSettings,
    "webhooks": WebhookSettings,
    "serve": GatewaySettings,
}

BASE = "localhost/python-base"

LOCKS_OF_CPU_IMAGES = ("build", "light", "sbom", "torch-none", "upscalers", "worker")

#: Debian's Python contains tests.
collect_ignore = ["debian"]

ISOLATED = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


@dataclass(frozen=True)
class Image:
    """A built image in the builder's storage."""

    builder: Builder
    name: str
    config: Mapping[str, Any]
    layer_bytes: tuple[int, ...]

    @property
    def environment(self) -> dict[str, str]:
        return dict(entry.split("=", 1) for entry in self.config["Env"])

    def run(
        self, *arguments: str, data: Path, entrypoint: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Like `docker run --read-only --tmpfs /cache --tmpfs /tmp --volume data:/data`."""
        command = self.command(
            *arguments, data=data, entrypoint=entrypoint, **variables
        )
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def command(
        self, *arguments: str, data: Path, entrypoint: bool = True, **variables: str
    ) -> list[str]:
        """The command that `run` runs; when it is killed, so is all in the container."""
        user = self.config["User"]
        uid, gid = user.split(":")
        os.chown(data, int(uid), int(gid))
        command = [*(self.config["Entrypoint"] if entrypoint else []), *arguments]
        # Nothing is compiled in the image, and its file system is read-only.
        compiled = self.builder.folder / "compiled" / self.name
        compiled.mkdir(parents=True, exist_ok=True)
        os.chown(compiled, int(uid), int(gid))
        variables = self.environment | variables | {"PYTHONPYCACHEPREFIX": "/compiled"}
        settings = [f"{name}={value}" for name, value in variables.items()]
        script = f"""
            container=$(buildah from --pull-never {self.name})
            mounted=$(buildah mount "$container")
            root={self.builder.folder}/root
            mkdir -p "$root" "$mounted/data" "$mounted/compiled"
            mount --bind "$mounted" "$root"
            mount -o remount,bind,ro "$root"
            mount -t tmpfs -o uid={uid},gid={gid} tmpfs "$root/cache"
            mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
            mount -t proc proc "$root/proc"
            mount --rbind /dev "$root/dev"
            mount --bind {data} "$root/data"
            mount --bind {compiled} "$root/compiled"
            status=0
            chroot --userspec={user} "$root" /usr/bin/env -i "$@" || status=$?
            umount --recursive "$root"
            buildah umount "$container" >/dev/null
            buildah rm "$container" >/dev/null
            exit $status
        """
        return self.builder.command(script, *settings, *command)


class Builder:
    """Debian's buildah, unpacked in the tests' folder, with its storage in *folder*."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._flags = (
            f"--root {folder}/storage --runroot {folder}/run"
            f" --registries-conf {DEBIAN}/etc/containers/registries.conf"
        )

    def shell(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs a script that can call buildah."""
        return subprocess.run(
            self.command(script, *arguments),
            capture_output=True,
            text=True,
            check=False,
            cwd=REPOSITORY,
        )

    def command(self, script: str, *arguments: str) -> list[str]:
        """The command that runs a script which can call buildah.

        It has its own namespaces, so that no mount and no process survives it.
        """
        prelude = f"""
            set -eu
            mount -t overlay overlay -o lowerdir={DEBIAN}/usr:/usr /usr
            export TMPDIR={self.folder}
            buildah() {{ command buildah {self._flags} "$@"; }}
        """
        return [*ISOLATED, "sh", "-c", prelude + script, "sh", *arguments]

    @property
    def build_line(self) -> str:
        """`buildah build` on the base image; targets and arguments follow."""
        return (
            "buildah build --layers --pull-never --isolation chroot --format docker"
            f" --signature-policy {DEBIAN}/etc/containers/policy.json"
            f" --build-arg BASE_IMAGE={BASE}"
        )

    @property
    def cpu_build_line(self) -> str:
        """Without gigabytes of CUDA; pip finds torch where it found the tests' own."""
        return f"{self.build_line} --build-arg CUDA=none --build-arg PYTORCH_INDEX="

    def make_base(self) -> None:
        policy = f"--signature-policy {DEBIAN}/etc/containers/policy.json"
        self._must(
            f"""
            container=$(buildah from scratch)
            cp --archive {DEBIAN}/base/. "$(buildah mount "$container")"
            buildah commit -q {policy} "$container" {BASE}
            buildah rm "$container"
            """
        )

    def build(self, targets: Sequence[str]) -> dict[str, Image]:
        """Builds targets of the Dockerfile from the working tree.

        One after another: at the same time each would build what they share, and later builds
        would find either one's layers, of which those above may be the other's.
        """
        self._must(
            f"""
            for target in {" ".join(targets)}; do
              {self.cpu_build_line} --target $target --tag localhost/$target "$@" .
            done
            """,
            *self.pip_volumes(),
        )
        return {target: self.image(f"localhost/{target}") for target in targets}

    def read_pins(self, arguments: Mapping[str, str]) -> list[str]:
        """The lines of the lock file of the torch that a build with *arguments* installs."""
        given = " ".join(
            f"--build-arg {name}={value}" for name, value in arguments.items()
        )
        return self._read(
            f"{self.build_line} {given}", "pins", "/pins/torch.txt"
        ).splitlines()

    def read_schema(self, name: str) -> Any:
        """A JSON schema that comes with what writes the SBOM."""
        path = f"/opt/sbom/lib/python3*/site-packages/cyclonedx/schema/_res/{name}"
        return json.loads(
            self._read(self.cpu_build_line, "sbom", path, *self.pip_volumes())
        )

    def _read(self, build_line: str, target: str, path: str, *arguments: str) -> str:
        """A file of a target; *path* may be a pattern."""
        return self._must(
            f"""
            {build_line} --target {target} --tag localhost/{target} "$@" . >&2
            container=$(buildah from --pull-never localhost/{target})
            mounted=$(buildah mount "$container")
            cat "$mounted"{path}
            buildah rm "$container" >&2
            """,
            *arguments,
        )

    def image(self, name: str) -> Image:
        inspected = json.loads(self._must(f"buildah inspect --type image {name}"))
        layers = json.loads(inspected["Manifest"])["layers"]
        sizes = tuple(layer["size"] for layer in layers)
        return Image(self, name, inspected["Docker"]["config"], sizes)

    def _must(self, script: str, *arguments: str) -> str:
        done = self.shell(script, *arguments)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def pip_volumes(self) -> list[str]:
        """Makes pip in the build use this machine's package indexes."""
        listed = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        settings: dict[str, str] = {}
        for name, value in re.findall(
            r"^(?:global|install|:env:)\.([a-z-]+)=(.+)$", listed, re.MULTILINE
        ):
            settings[name] = " ".join(str(ast.literal_eval(value)).split())
        with contextlib.suppress(
            OSError, ValueError, KeyError
        ):  # another kind of index: by itself
            settings["index-url"] = self._write_index(settings)
        sources = " ".join(settings.values()).split()
        paths = (each.removeprefix("file://") for each in sources)
        mounts = {path for path in paths if path[0] == "/" and Path(path).exists()}
        configuration = self.folder / "pip.conf"
        lines = [f"{name} = {value}" for name, value in settings.items()]
        # Compiling every module takes longer than the few runs here would save. "no" is what
        # switches it off: pip stores the value itself.
        lines = ["[global]", *lines, "[install]", "no-compile = no", ""]
        configuration.write_text("\n".join(lines))
        # A `simple` folder links to files next to it.
        mounts |= {
            str(Path(path).parent) for path in mounts if Path(path).name == "simple"
        }
        return [
            *(f"--volume={path}:{path}:ro" for path in sorted(mounts)),
            f"--volume={configuration}:/etc/pip.conf:ro",
        ]

    def _write_index(self, settings: Mapping[str, str]) -> str:
        """The index's pages with the files that the locks name; returns its address.

        A page has thousands of files, and pip compares each with every tag of its platform.
        """
        folder = self.folder / "index" / "simple"
        if folder.exists():
            return folder.as_uri()
        locks = [
            REPOSITORY / "deploy" / "locks" / f"{name}.txt"
            for name in LOCKS_OF_CPU_IMAGES
        ]
        lines = [
            line
            for lock in locks
            for line in lock.read_text().splitlines()
            if "==" in line
        ]
        hashes = {
            found for line in lines for found in re.findall(r"sha256:(\w+)", line)
        }
        index = settings.get("index-url", "https://pypi.org/simple").rstrip("/")
        tls = ssl.create_default_context(cafile=settings.get("cert"))

        def page(name: str) -> str:
            accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
            request = urllib.request.Request(f"{index}/{name}/", headers=accept)
            with urllib.request.urlopen(request, context=tls) as response:
                files = json.load(response)["files"]
            return "".join(
                f'<a href="{urljoin(response.url, file["url"])}#sha256={file["hashes"]["sha256"]}">'
                f"{file['filename']}</a><br>"
                for file in files
                if file["hashes"].get("sha256") in hashes
            )

        names = {line.partition("==")[0] for line in lines}
        with ThreadPoolExecutor(8) as threads:
            pages = dict(zip(names, threads.map(page, names), strict=True))
        for name, text in pages.items():
            (folder / name).mkdir(parents=True)
            (folder / name / "index.html").write_text(f"<!doctype html>{text}")
        return folder.as_uri()


@pytest.fixture(scope="session")
def builder() -> Iterator[Builder]:
    """A builder with a base image, removed after the test run."""
    if not (DEBIAN / ".unpacked").is_file():
        _skip(
            "buildah is missing: `make test` unpacks it from Debian's packages, as root"
        )
    if os.geteuid() != 0:
        _skip("only root can build images")
    if subprocess.run([*ISOLATED, "true"], capture_output=True, check=False).returncode:
        _skip("images cannot be built here: mounting is not allowed")
    where = MEMORY if _free_memory_bytes() >= NEEDED_MEMORY_BYTES else None
    with tempfile.TemporaryDirectory(prefix="imagefleet-images-", dir=where) as folder:
        if shutil.disk_usage(folder).free < NEEDED_BYTES:
            _skip(f"building images takes {NEEDED_BYTES // 2**30} GB in {folder}")
        made = Builder(Path(folder))
        with ThreadPoolExecutor(1) as thread:  # the index answers meanwhile
            volumes = thread.submit(made.pip_volumes)
            made.make_base()
            volumes.result()
        yield made


@pytest.fixture(scope="session")
def images(builder: Builder) -> dict[str, Image]:
    """The light one, and the worker's if that is asked for and torch comes without CUDA."""
    pip = [sys.executable, "-m", "pip", "show", "torch"]
    torch = subprocess.run(pip, capture_output=True, text=True, check=True).stdout
    is_worker_built = IS_WORKER_BUILT and "+cpu" in torch
    return builder.build(["light", "worker"] if is_worker_built else ["light"])


@pytest.fixture
def light_image(images: dict[str, Image]) -> Image:
    return images["light"]


@pytest.fixture
def worker_image(request) -> Image:
    if not IS_WORKER_BUILT:
        pytest.skip("`make images` builds the worker's image")
    images: dict[str, Image] = request.getfixturevalue("images")
    if "worker" not in images:
        pytest.skip(
            "torch comes with CUDA here, gigabytes that a test should not download"
        )
    return images["worker"]


@pytest.fixture
def data(tmp_path) -> Path:
    """The folder mounted at an image's /data."""
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def command_of() -> Callable[[str], str]:
    """Returns the path of a program installed from a wheel."""

    def find(name: str) -> str:
        found = shutil.which(name, path=Path(sys.executable).parent)
        assert found, f"{name} is not installed: pip install the dev extra"
        return found

    return find


@pytest.fixture
def parse_command(built: TyperGroup, monkeypatch) -> Callable[..., BaseSettings]:
    """Parses a command line and variables into settings, without running the command."""

    def parse(arguments: list[str], variables: Mapping[str, str]) -> BaseSettings:
        for name in [name for name in os.environ if name.startswith("IMAGEFLEET_")]:
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        name, *rest = arguments
        parsed = built.commands[name].make_context(name, rest)
        model = MODELS[name]
        # As typer gives what is not there.
        given = {
            field: parsed.params.get(field) or None for field in model.model_fields
        }
        return options.read(model, given)

    return parse


def _free_memory_bytes() -> int:
    """Of the machine, and allowed for files; 0 where that is not known."""
    try:
        found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
        allowed = shutil.disk_usage(MEMORY).free
    except OSError:
        return 0
    return min(int(found[1]) * 1024, allowed) if found else 0


def _skip(reason: str) -> NoReturn:
    if REQUIRED:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)

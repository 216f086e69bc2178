"""The manifests as `kubectl kustomize` renders them, and the schemas that they have to fit."""

import copy
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import kubernetes_validate
import pytest
import yaml

Manifest = dict[str, Any]

DEPLOY = Path(__file__).parents[3] / "deploy" / "kubernetes"
SCHEMAS = Path(__file__).parents[1] / "schemas"

#: Versions of Kubernetes' schemas: the oldest that the README promises, and a newer one.
OLDEST = re.search(
    r"Kubernetes and kubectl (1\.\d+) or newer", (DEPLOY / "README.md").read_text()
)
assert OLDEST is not None
KUBERNETES = (OLDEST[1], "1.32")

#: In the order of the kustomization, whose last one has to be the last.
COMPONENTS = tuple(
    line.split("components/")[1].split()[0]
    for line in (DEPLOY / "kustomization.yaml").read_text().splitlines()
    if "- components/" in line
)


class Manifests(list[Manifest]):
    """What one kustomization renders."""

    def of_kind(self, kind: str) -> dict[str, Manifest]:
        return {each["metadata"]["name"]: each for each in self if each["kind"] == kind}

    def templates(self) -> Iterator[Manifest]:
        """The pod template of each workload."""
        for each in self:
            if each["kind"] == "Deployment":
                yield each["spec"]["template"]
            elif each["kind"] == "CronJob":
                yield each["spec"]["jobTemplate"]["spec"]["template"]

    def pods(self) -> Iterator[tuple[dict[str, str], Manifest, Manifest]]:
        """The labels, pod and container of each workload."""
        for template in self.templates():
            (container,) = template["spec"]["containers"]
            yield template["metadata"]["labels"], template["spec"], container

    def worker(self) -> tuple[dict[str, str], Manifest, Manifest]:
        """The same of the workers."""
        (worker,) = (each for each in self.pods() if each[2]["name"] == "worker")
        return worker


Render = Callable[..., Manifests]


@pytest.fixture(scope="session")
def kubectl() -> str:
    """kubectl, of which only the kustomize that it contains is used."""
    found = shutil.which("kubectl", path=Path(sys.executable).parent) or shutil.which(
        "kubectl"
    )
    if found is None:
        reason = "kubectl is missing: on Linux the dev extra installs it"
        if sys.platform == "linux":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return found


@pytest.fixture
def build(kubectl: str, tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Builds the kustomization with components, and with replacements made in its text."""

    def run(
        components: Sequence[str] = (), **replaced: Any
    ) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / "kubernetes"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(DEPLOY, folder)
        kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
        kustomization["components"] = [f"components/{name}" for name in components]
        (folder / "kustomization.yaml").write_text(
            yaml.safe_dump(kustomization | replaced)
        )
        return subprocess.run(
            [kubectl, "kustomize", folder], capture_output=True, text=True, check=False
        )

    return run


@pytest.fixture(scope="session")
def rendered() -> dict[str, Manifests]:
    """What has been rendered, so that no test waits for it twice."""
    return {}


@pytest.fixture
def render(
    build: Callable[..., subprocess.CompletedProcess[str]],
    rendered: dict[str, Manifests],
) -> Render:
    """Renders the kustomization with components, and with replacements made in its text."""

    def run(*components: str, **replaced: Any) -> Manifests:
        key = json.dumps([components, replaced])
        if key not in rendered:
            built = build(components, **replaced)
            assert built.returncode == 0, built.stderr
            rendered[key] = Manifests(yaml.load_all(built.stdout, yaml.CSafeLoader))
        return copy.deepcopy(rendered[key])

    return run


@pytest.fixture(params=["plain", "all components"])
def manifests(request, render: Render) -> Manifests:
    return render(*(COMPONENTS if request.param == "all components" else ()))


@pytest.fixture
def plain(render: Render) -> Manifests:
    return render()


@pytest.fixture
def components() -> tuple[str, ...]:
    return COMPONENTS


@pytest.fixture(scope="session")
def errors_of() -> Callable[[Sequence[Manifest]], list[Exception]]:
    """Holds each manifest against its schema; once those that several renderings have."""
    schemas: dict[str, Manifest] = {}
    for path in ("cilium.yaml", "keda.yaml", "prometheus-operator.yaml"):
        schemas |= yaml.safe_load((SCHEMAS / path).read_text())
    valid: set[str] = set()

    def check(manifests: Sequence[Manifest]) -> list[Exception]:
        found: list[Exception] = []
        for manifest in manifests:
            text = json.dumps(manifest)
            if text in valid:
                continue
            try:
                if manifest["kind"] in schemas:
                    jsonschema.validate(manifest, schemas[manifest["kind"]])
                else:
                    for version in KUBERNETES:
                        kubernetes_validate.validate(manifest, version, strict=True)
                valid.add(text)
            except (
                jsonschema.ValidationError,
                kubernetes_validate.ValidationError,
            ) as error:
                found.append(error)
        return found

    return check


class Api:
    """Kubernetes' API, as far as a test needs it: *answers* by path."""

    def __init__(self) -> None:
        self.answers: Mapping[str, Manifest] = {}
        self.requests: list[str] = []
        stopping = self._stopping = threading.Event()
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urlsplit(self.path)
                api.requests.append(self.path)
                answer = api.answers.get(url.path)
                if answer is None:
                    self.send_error(403)
                    return
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                if "watch=" in url.query:
                    stopping.wait(60)
                else:
                    self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._stopping.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def api() -> Iterator[Api]:
    server = Api()
    yield server
    server.close()

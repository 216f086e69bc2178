"""deploy/README.md's ten commands, read from it and run in order (by `make images`).

The storage is Azurite, SaladCloud its fakes. The images are really built, with torch for CPUs and
the demo's checkpoint; the worker really draws, with tokens from a broker in the console's image.
`az`, `docker` and the editor are small programs on the PATH; `docker push` only prints the digest,
as no registry is at hand.
"""

import contextlib
import io
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from azure.core.exceptions import ResourceNotFoundError
from azure.storage.blob import ContainerClient
from azure.storage.queue import QueueClient, QueueServiceClient
from PIL import Image, ImageStat

import polling
from fleet.settings import BrokerSettings
from imagefleet.storage.azure.storage import API_VERSION
from imagefleet.validation import JSONDict

pytestmark = pytest.mark.slow

#: What takes minutes in production is made short; the commands' own code is as it is.
IMAGEFLEET = """
import sys
from fleet import main
from fleet.salad import deployment
from fleet.scale import decision, scaler
deployment.POLL_SECONDS = 0.2
decision.SETTLE_SECONDS = scaler.SETTLE_SECONDS = 1
if sys.argv[1:2] == ["scale"]:
    sys.argv += ["--sample-seconds", "1"]
main.main()
"""

AZ = """
import json, sys
from pathlib import Path
match sys.argv[1:]:
    case ["group", "create", "--name", "acme", "--location", _]:
        pass
    case ["storage", "account", "create", "--name", "acmeimages", "--resource-group", "acme",
          "--location", _, "--sku", "Standard_LRS"]:
        pass
    case ["storage", "account", "show-connection-string", "--name", "acmeimages",
          "--output", "tsv"]:
        print({connection!r})
    case ["containerapp", "env", "create", "--name", "acme", "--resource-group", "acme",
          "--location", _, "--logs-destination", "none"]:
        pass
    case ["containerapp", "create", "--name", "broker", "--resource-group", "acme", *options,
          "--query", "properties.configuration.ingress.fqdn", "--output", "tsv"]:
        Path("app.json").write_text(json.dumps(options))
        print({broker!r})
    case ["containerapp", "delete", "--name", "broker", "--resource-group", "acme", "--yes"]:
        Path("app.json").unlink()
    case _:
        sys.exit(f"az: {{sys.argv[1:]}}?")
"""

#: The operator's edits of the fleet file, and the address of the fake.
EDITOR = """
import re, sys
from pathlib import Path
path = Path(sys.argv[1])
text = path.read_text()
for old, new in (
    (r"^organization: .*", "organization: acme\\napi: {salad}"),
    (r"^image: .*", "image: registry.example.com/acme/imagefleet@" + Path("digest").read_text()),
    (r"(?<=  IMAGEFLEET_STORAGE: ).*", {storage!r}),
):
    text, count = re.subn(old, new.strip(), text, flags=re.MULTILINE)
    assert count == 1, old
path.write_text(text)
"""

#: For one command; on an idle machine none takes more than ten seconds.
LONGEST_SECONDS = 180

JOBS_OF_THE_TRIAL = 4
JOBS = 3


@dataclass(frozen=True)
class Step:
    """The lines of one numbered command; *comment* is what the document says about them."""

    number: int
    comment: str
    lines: list[str]


@pytest.fixture
def steps(repository: Path) -> list[Step]:
    text = (repository / "deploy" / "README.md").read_text()
    _, _, after = text.partition("## From nothing to images on SaladCloud")
    block = after.split("```")[1].partition("\n")[2]
    found = [Step(0, "", [])]
    for line in block.replace("\\\n", "").splitlines():
        if numbered := re.match(r"# (\d+) +(.*)", line):
            found.append(Step(int(numbered[1]), numbered[2], []))
        elif line.startswith("#"):
            last = found[-1]
            found[-1] = Step(
                last.number, f"{last.comment} {line[1:].strip()}", last.lines
            )
        elif line:
            found[-1].lines.append(line)
    return found


@pytest.fixture
def salad(salad_module) -> Iterator[Any]:
    fake = salad_module.SaladFake()
    fake.class_prices["RTX 3070 (8 GB)"] = {"batch": "0.04"}
    with salad_module.serving(fake):
        yield fake
    assert not fake.violations


@pytest.fixture(scope="module")
def cloud_module(load_file: Callable[[Path], Any]) -> Any:
    return load_file(Path(__file__).with_name("cloud_fake.py"))


@pytest.fixture
def cloud(cloud_module, data: Path) -> Iterator[Any]:
    """SaladCloud's identities, and Azure Container Apps."""
    fake = cloud_module.CloudFake(data)
    fake.organization = "acme"
    yield fake
    fake.close()


@pytest.fixture
def start_app(
    cloud, cloud_module, builder, unused_port: int, tmp_path
) -> Callable[[list[str]], None]:
    """Runs the container that `az containerapp create` asks for."""

    def start(options: list[str]) -> None:
        app = cloud_module.app_of(options)
        assert app["port"] == BrokerSettings.model_fields["port"].default
        folder = tmp_path / "app"
        folder.mkdir()
        cloud.create_app(
            builder.image(app["image"]), folder, unused_port, app["variables"]
        )

    return start


@pytest.fixture
def connection(azurite_address: str) -> Iterator[str]:
    """Azurite's connection string; the queue and the containers that the document uses are new."""
    yield azurite_address
    with QueueServiceClient.from_connection_string(
        azurite_address, api_version=API_VERSION
    ) as queues:
        for name in ("jobs", "jobs-high", "jobs-low", "jobs-poison"):
            with contextlib.suppress(ResourceNotFoundError):
                queues.delete_queue(name)
    for name in ("images", "files"):
        with (
            ContainerClient.from_connection_string(
                azurite_address, name, api_version=API_VERSION
            ) as container,
            contextlib.suppress(ResourceNotFoundError),
        ):
            container.delete_container()


@pytest.fixture
def checkout(repository: Path, tmp_path) -> Path:
    """A checkout as the document asks for, with a checkpoint and jobs of one's own."""
    folder = tmp_path / "checkout"
    for name in (
        "cli",
        "evaluation",
        "fleet",
        "imagefleet",
        "loadgen",
        "worker",
        "templates",
        "demo_model",
    ):
        shutil.copytree(
            repository / name,
            folder / name,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copytree(repository / "deploy" / "salad", folder / "deploy" / "salad")
    shutil.copytree(repository / "deploy" / "locks", folder / "deploy" / "locks")
    for name in ("check_torch.py", "write_sbom.py"):
        shutil.copy2(repository / "deploy" / name, folder / "deploy")
    for path in repository.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy2(path, folder)
    shutil.copytree(
        repository / "demo_model",
        folder / "models" / "dreamshaper-8",
        # buildah takes a copy of the same files for the one in its cache, whatever its path.
        ignore=shutil.ignore_patterns("README.md", "demo_jobs.jsonl"),
    )
    jobs = (repository / "demo_model" / "demo_jobs.jsonl").read_text().splitlines()
    (folder / "jobs.jsonl").write_text("\n".join(jobs[:JOBS]))
    # A GPU would draw 200 of 512x640 in minutes.
    template = folder / "templates" / "catalogue.toml"
    text = template.read_text()
    for old, new in (
        ("count = 200", f"count = {JOBS_OF_THE_TRIAL}"),
        ("steps = 25", "steps = 8"),
        ("width = 512", "width = 128"),
        ("height = 640", "height = 128"),
    ):
        assert old in text
        text = text.replace(old, new)
    template.write_text(text)
    return folder


class Operator:
    """Types the document's lines into a shell in *folder*, at a terminal where it answers yes."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder = folder
        self._environment = environment
        self._exports = folder / ".exports"
        self._exports.write_text("")

    def type(self, line: str, until: Callable[[], bool] | None = None) -> str:
        """Runs a line and returns all that it printed; with *until*, Ctrl-C ends it then."""
        script = f". {self._exports}; {line}\nstatus=$?; export -p > {self._exports}; exit $status"
        terminal, stdin = pty.openpty()
        os.write(terminal, b"y\ny\n")
        with (
            contextlib.closing(os.fdopen(terminal, "rb", buffering=0)),
            subprocess.Popen(
                ["bash", "-c", script],
                cwd=self._folder,
                env=self._environment,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            ) as shell,
        ):
            os.close(stdin)
            try:
                if until is not None:
                    wait(until, shell)
                    os.killpg(shell.pid, signal.SIGINT)
                printed, _ = shell.communicate(timeout=LONGEST_SECONDS)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(shell.pid, signal.SIGKILL)
        assert until or shell.returncode == 0, f"{line}\n{printed}"
        assert "Traceback" not in printed, printed
        # The images were built before, but for the checkpoint; to install torch takes minutes.
        assert "Installing collected packages" not in printed, printed
        return printed

    def exported(self, name: str) -> str:
        script = f'. {self._exports}; printf %s "${name}"'
        return subprocess.run(
            ["bash", "-c", script], env={}, capture_output=True, text=True, check=True
        ).stdout


class Node:
    """Starts SaladCloud's replicas: the worker of the image that a group names, with its variables.

    One process stands for all of them. It runs on this machine's CPU, so without the checks that
    would ask for a node with a GPU.
    """

    def __init__(self, salad: Any, cloud: Any, builder: Any, data: Path) -> None:
        self.log = data / "worker.log"
        self.log.write_text("")
        self._salad = salad
        self._cloud = cloud
        self._builder = builder
        self._data = data
        self._is_over = threading.Event()
        self._worker: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="node")
        self._thread.start()

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(0.1):
            groups = list(self._salad.groups.values())
            for group in groups:
                group.step(self._salad.nodes)
            running = [group for group in groups if group.running]
            if running and self._worker is None:
                self._cloud.group = running[0].body["name"]
                self._start(running[0].body["container"])
            elif not running:
                self._kill()
        self._kill()

    def _start(self, container: JSONDict) -> None:
        image = self._builder.image(container["image"])
        variables = {
            **container["environment_variables"],
            "IMAGEFLEET_PORT": "0",
            "IMAGEFLEET_DEVICE": "cpu",
            "IMAGEFLEET_MIN_IMAGES_PER_SECOND": "0",
            "SALAD_METADATA_URL": self._cloud.url,
            "SSL_CERT_FILE": f"/data/{self._cloud.certificate.name}",
        }
        command = image.command(*image.config["Cmd"], data=self._data, **variables)
        with self.log.open("a") as log:
            self._worker = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT
            )

    def _kill(self) -> None:
        """As SaladCloud may, without notice."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.wait()
            self._worker = None


@pytest.fixture
def node(salad, cloud, builder, data: Path) -> Iterator[Node]:
    started = Node(salad, cloud, builder, data)
    yield started
    started.end()
    sys.stdout.write(started.log.read_text())  # shown where the test fails


def wait(until: Callable[[], bool], shell: subprocess.Popen[str] | None = None) -> None:
    def look() -> bool:
        assert shell is None or shell.poll() is None, shell and shell.communicate()[0]
        return until()

    polling.until_in_thread(look)


@pytest.fixture
def operator(
    checkout: Path,
    repository: Path,
    builder,
    connection: str,
    salad,
    cloud,
    tmp_path,
) -> Operator:
    endpoints = dict(part.split("=", 1) for part in connection.strip(";").split(";"))
    storage = ";".join(
        f"{name}={endpoints[name]}" for name in ("BlobEndpoint", "QueueEndpoint")
    )
    build = builder.command(f'{builder.cpu_build_line} "$@"', *builder.pip_volumes())
    digest = builder.command(
        "buildah inspect --type image --format '{{.FromImageDigest}}' $1"
    )
    programs = {
        "imagefleet": f"#!{sys.executable}{IMAGEFLEET}",
        "az": f"#!{sys.executable}{AZ.format(connection=connection, broker=cloud.host)}",
        "edit": f"#!{sys.executable}{EDITOR.format(salad=salad.url, storage=storage)}",
        "docker": textwrap.dedent(f"""\
            #!/bin/bash
            set -e
            command=$1; shift
            case $command in
              build) {shlex.join(build)} "$@" ;;
              push) {shlex.join(digest)} "$1" > digest; echo "1: digest: $(cat digest)" ;;
              *) exit 2 ;;
            esac
            """),
    }
    path = tmp_path / "bin"
    path.mkdir()
    for name, text in programs.items():
        (path / name).write_text(text)
        (path / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{path}:{os.environ['PATH']}",
        "PYTHONPATH": str(repository),
        "EDITOR": "edit",
        "COLUMNS": "120",
        "IMAGEFLEET_VERIFY_SHARE": "0",  # one job in 200 would be two messages
        "no_proxy": "127.0.0.1",
    }
    return Operator(checkout, environment)


@pytest.mark.usefixtures("worker_image")  # built before: to install torch takes minutes
@pytest.mark.timeout(600)  # the first test that needs the images builds them
def test_the_ten_commands_lead_from_nothing_to_images(
    steps: list[Step],
    operator: Operator,
    salad,
    salad_module,
    node: Node,
    checkout: Path,
    connection: str,
    cloud,
    start_app: Callable[[list[str]], None],
):
    queue = QueueClient.from_connection_string(
        connection, "jobs", api_version=API_VERSION
    )
    blobs = ContainerClient.from_connection_string(
        connection, "images", api_version=API_VERSION
    )
    printed: dict[int, str] = {}

    def are_there(count: int) -> bool:
        names = list(blobs.list_blob_names()) if blobs.exists() else []
        return sum(name.endswith((".jpg", ".png")) for name in names) >= count

    def do(number: int, until: Callable[[], bool] | None = None) -> None:
        step = steps[number]
        assert step.number == number
        assert step.lines
        for line in step.lines:
            watched = until if "--follow" in line else None
            typed = line.replace(
                "SALAD_API_KEY=...", f"SALAD_API_KEY={salad_module.KEY}"
            )
            printed[number] = printed.get(number, "") + operator.type(typed, watched)
        # What the document says a command costs is what the command says.
        for dollars in re.findall(r"\$[\d.]+ to \$[\d.]+/h", step.comment):
            assert dollars in printed[number], (number, dollars, printed[number])

    assert [step.number for step in steps] == list(range(11))
    with queue, blobs:
        do(0)
        do(1)
        assert operator.exported("IMAGEFLEET_STORAGE") == connection
        do(2)
        do(3)
        assert (checkout / "digest").read_text().strip() in (
            checkout / "fleet.yaml"
        ).read_text()
        do(4)
        assert (
            queue.get_queue_properties().approximate_message_count == JOBS_OF_THE_TRIAL
        )
        do(5)
        assert operator.exported("BROKER_URL") == f"https://{cloud.host}/tokens"
        start_app(json.loads((checkout / "app.json").read_text()))
        do(6)
        assert not salad.requests
        assert "AccountKey" not in printed[6]
        do(7)
        assert "Apply?" in printed[7]
        assert [group.replicas for group in salad.groups.values()] == [5]
        do(8, until=lambda: are_there(1))
        assert sum(group.replicas for group in salad.groups.values()) == 750
        do(9)
        assert are_there(JOBS_OF_THE_TRIAL + JOBS)
        assert queue.get_queue_properties().approximate_message_count == 0
        do(10)
        (picture, *_) = [
            name for name in blobs.list_blob_names() if name.startswith("catalogue/")
        ]
        with Image.open(io.BytesIO(blobs.download_blob(picture).readall())) as image:
            assert image.format == "JPEG"
            assert image.size == (128, 128)
            assert max(deviation for deviation in ImageStat.Stat(image).stddev) > 10
    assert not salad.groups
    assert not (checkout / "app.json").exists()
    report = json.loads(operator.type("imagefleet report catalogue --json"))
    assert report["images"] == JOBS_OF_THE_TRIAL
    assert (checkout / "catalogue-report.html").stat().st_size > 10_000

"""The wheel: what it installs, and that every command works away from a checkout.

The commands run in an environment that holds the wheel and what it declares, and nothing else: a
dependency that only the development environment has would be missed.
"""

import asyncio
import contextlib
import hashlib
import importlib.util
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import urllib.request
import venv
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer
from packaging.requirements import Requirement
from PIL import Image

import forks
import polling
from fleet.main import app
from header_files import file_of, lora_of, shaped
from imagefleet.files import kernels
from imagefleet.files.contents import TEXT_STATES_FORMAT
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Record
from imagefleet.storage.dead_letter import FailedJob
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from salad_fake import fleet_file

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]

AZURE = "DefaultEndpointsProtocol=https;AccountName=pictures;AccountKey=a2V5a2V5"

FAILED_JOBS = [
    FailedJob(
        outcome="failed",
        id=job_id,
        campaign="spring",
        error="MissingFileError",
        reason="there is no LoRA fox",
        attempts=1,
        worker="w1",
        at=datetime(2026, 11, 1, tzinfo=UTC),
        source=f"message-{job_id}",
        body='{"prompt": "a fox"}',
    )
    for job_id in ("j1", "j2")
]

#: What a command says that needs the libraries of the worker, which are not installed here.
NEEDS_WORKER = r"torch is not installed; .*pip install '\.\[worker\]'"


@dataclass(frozen=True)
class Case:
    """What a command is run with, and a pattern of what it prints."""

    arguments: str
    printed: str
    exit_code: int = 0


#: Every command, in an order in which each finds what it needs. {azurite}, {prometheus} and
#: {port} are addresses.
COMMANDS: dict[str, Case] = {
    "prompt": Case(
        "'a ((red)) house <lora:rocket:0.5>' --negative blurry", r"1\.21 +red"
    ),
    "plan": Case("--jobs 1000 --gpu 'RTX 4090'", r"images per dollar"),
    "load": Case("jobs.jsonl --storage local:other", r"2 jobs"),
    "import": Case("jobs.jsonl --storage local:other", r'"prompt": "an owl"'),
    "sweep": Case(
        "captions.txt --campaign curve --dry-run", r"2 captions x 1 group: 2 jobs"
    ),
    "cancel": Case("--all --dry-run", r"0 jobs of the queue jobs would be deleted"),
    "status": Case("--json", r'"messages": 0'),
    "report": Case("spring", r"Report: spring-report\.html"),
    "results": Case("spring", r"images +1"),
    "export": Case("spring shards", r"1 image, .* in 1 shard"),
    "score": Case(
        "spring --extractor demo",
        r"torch is not installed; .*pip install '\.\[evaluation\]'",
        2,
    ),
    "failed": Case("spring/j1", r"there is no LoRA fox"),
    "replay": Case("spring/j1", r"1 .*replayed"),
    "discard": Case("--all --yes", r"1 .*discarded"),
    "verify": Case("spring", r"no second drawings"),
    "gate": Case(
        "spring ./imagefleet-data/images/spring",
        r"skimage is not installed; .*pip install '\.\[evaluation\]'",
        2,
    ),
    "redo": Case("--worker nobody", r"no images to draw again"),
    "keys mint": Case(
        "monitor --storage '{azurite}' --policy spring", r"IMAGEFLEET_SAS="
    ),
    "keys revoke": Case("spring --storage '{azurite}'", r"revoked spring on jobs"),
    "deploy apply": Case("--yes", r"sd15-batch"),
    "deploy status": Case("", r"sd15-batch"),
    "scale": Case("--dollars-per-hour 1 --max-dollars 1 --dry-run --once", r"replicas"),
    "deploy drain": Case("--delete --yes --wait-minutes 0", r"deleting sd15-batch"),
    "files add model": Case(
        "dreams.safetensors", r"--model store:dreams\.safetensors --model-sha256"
    ),
    "files add kernels": Case("unet.kernels", r"unet\.kernels"),
    "files add lora": Case("rocket.safetensors --manifest", r"^<lora:rocket:1>$"),
    "files add embedding": Case("mist.safetensors", r"^mist$"),
    "files add upscaler": Case("sharp.safetensors", r"^sharp$"),
    "files add controlnet": Case("canny.safetensors", r"^canny$"),
    "files add text": Case("states --json", r'"change": "stored"'),
    "files list model": Case("", r"dreams\.safetensors +\S+ +SD 1\.x"),
    "files list kernels": Case("", r"unet\.kernels +\S+ +NVIDIA H200"),
    "files list lora": Case("--json", r'"name": "rocket\.safetensors"'),
    "files list text": Case("--json", r'"name": "0{64}\.safetensors"'),
    "files remove lora": Case("rocket --yes", r"loras/rocket\.safetensors: removed"),
    "files make kernels": Case("--model dreams.safetensors", NEEDS_WORKER, 2),
    "files make text": Case("jobs.jsonl --model .", NEEDS_WORKER, 2),
    "health": Case("live --port {port}", r"^not live: no answer", 1),
    "worker": Case("--model model", NEEDS_WORKER, 2),
    "demo": Case("", NEEDS_WORKER, 2),
    "bench": Case("", NEEDS_WORKER, 2),
}


#: Commands that run until they are stopped, which have tests of their own.
SERVICES = {"broker", "exporter", "gallery", "serve", "webhooks"}


#: What the gallery answers.
GALLERY = {
    "": "<!doctype html>",
    "page/gallery.js": "import",
    "page/gallery.css": "--paper",
    "api/campaigns?first=1": '"newest":',
}


def commands() -> set[str]:
    """Every command that the console has, those groups included that do something themselves."""

    def walk(command: Any, path: tuple[str, ...]) -> Iterator[str]:
        if not hasattr(command, "commands") or command.invoke_without_command:
            yield " ".join(path)
        for name, each in getattr(command, "commands", {}).items():
            yield from walk(each, (*path, name))

    return set(walk(typer.main.get_command(app), ())) - {""}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        "wheel",
        "--directory",
        folder,
    ]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def unpacked(wheel: Path) -> Path:
    """A folder with what the wheel installs."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(wheel.parent / "unpacked")
    return wheel.parent / "unpacked"


def declared(requirements: list[str]) -> dict[str, metadata.Distribution]:
    """The installed distributions that these requirements ask for, directly or not."""
    found: dict[str, metadata.Distribution] = {}
    left = [Requirement(each) for each in requirements]
    seen: set[str] = set()
    while left:
        requirement = left.pop()
        for extra in {"", *requirement.extras}:
            key = f"{requirement.name.lower()}[{extra}]"
            if key in seen:
                continue
            seen.add(key)
            distribution = found.setdefault(
                requirement.name.lower(), metadata.distribution(requirement.name)
            )
            left.extend(
                each
                for each in map(Requirement, distribution.requires or [])
                if each.marker is None or each.marker.evaluate({"extra": extra})
            )
    return found


def link(distribution: metadata.Distribution, site_packages: Path) -> None:
    """Installs a distribution once more, without a copy."""
    for file in distribution.files or []:
        if (
            ".." not in file.parts
            and (source := Path(distribution.locate_file(file))).is_file()
        ):
            target = site_packages / file
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                target.hardlink_to(source)
            except OSError:  # on another disk
                target.write_bytes(source.read_bytes())


@pytest.fixture(scope="module")
def environment(wheel: Path) -> Path:
    """A virtual environment with the wheel and its base dependencies only."""
    folder = wheel.parent / "environment"
    venv.create(folder, with_pip=False, symlinks=True)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            folder / "bin" / "python",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--disable-pip-version-check",
            wheel,
        ],
        check=True,
    )
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (installed,) = metadata.distributions(path=[str(site_packages)])
    base = [each for each in installed.requires or [] if "extra ==" not in each]
    for distribution in declared(base).values():
        link(distribution, site_packages)
    return folder


@pytest.fixture(scope="module")
def variables(environment: Path, salad, tmp_path_factory) -> dict[str, str]:
    """All that the commands see of this machine."""
    return {
        "PATH": f"{environment / 'bin'}:/usr/bin:/bin",
        "HOME": str(tmp_path_factory.mktemp("home")),
        "SALAD_API_KEY": salad.key,
        "no_proxy": "127.0.0.1",
        "COLUMNS": "120",
        "LANG": "C.UTF-8",
    }


@pytest.fixture(scope="module")
def work(tmp_path_factory, azurite_address: str, salad) -> Path:
    """The folder in which the commands run, with jobs to load, a failed one, and a stored image."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "jobs.jsonl").write_text('{"prompt": "a fox"}\n{"prompt": "an owl"}\n')
    (folder / "captions.txt").write_text("a fox\nan owl\n")
    (folder / "dreams.safetensors").write_bytes(file_of())
    (folder / "rocket.safetensors").write_bytes(lora_of())
    (folder / "mist.safetensors").write_bytes(shaped(emb_params=[2, 768]))
    (folder / "sharp.safetensors").write_bytes(
        shaped(**{"model.0.weight": [64, 3, 3, 3]})
    )
    hint = "control_model.input_hint_block.0.weight"
    (folder / "canny.safetensors").write_bytes(shaped(**{hint: [16, 3, 3, 3]}))
    (folder / "states").mkdir()
    (folder / "states" / f"{'0' * 64}.safetensors").write_bytes(
        file_of("states", format=TEXT_STATES_FORMAT, encoder="t5")
    )
    kernels.write(folder / "unet.kernels", kernels.Header("NVIDIA H200", []), b"")
    (folder / "fleet.yaml").write_text(fleet_file(salad.url, replicas=2))

    stored = io.BytesIO()
    Image.new("RGB", (64, 64), "teal").save(stored, "PNG")

    async def fill() -> None:
        async with open_storage(
            StorageSettings(storage=f"local:{folder}/imagefleet-data")
        ) as local:
            await local.create()
            await local.poison.send([job.encode() for job in FAILED_JOBS])
            await RecordLog(local.blobs, "w1").add(FAILED_JOBS)
            sha256 = hashlib.sha256(stored.getvalue()).hexdigest()
            facts = {"worker": "w1", "seconds": "2", "attempt": "1", "job": "0001"}
            facts["sha256"] = sha256
            await local.blobs.create(
                "spring/0001.png", stored.getvalue(), "image/png", facts
            )
            image = Record(
                outcome="completed",
                id="0001",
                campaign="spring",
                at=datetime.now(UTC),
                blob="spring/0001.png",
                size_bytes=len(stored.getvalue()),
                sha256=sha256,
                seconds=2,
            )
            await RecordLog(local.blobs, "w1").add([image])
        async with open_storage(StorageSettings(storage=azurite_address)) as azurite:
            await azurite.create()

    asyncio.run(fill())
    return folder


@pytest.fixture(scope="module")
def salad() -> Iterator[Any]:
    """The fake SaladCloud of the tests in tests/fleet."""
    spec = importlib.util.spec_from_file_location(
        "salad_fake", ROOT / "tests/chaos/salad_fake.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fake = module.SaladFake()
    fake.key = module.KEY
    with module.serving(fake):
        yield fake
    assert not fake.violations


@pytest.fixture(scope="module")
def prometheus() -> Iterator[str]:
    """A Prometheus that knows no metric."""

    class Empty(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            data = {"resultType": "vector", "result": []}
            self.wfile.write(json.dumps({"status": "success", "data": data}).encode())

        do_POST = do_GET  # noqa: N815 - the name is given

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Empty) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def run(
    environment: Path,
    variables: dict[str, str],
    work: Path,
    tmp_path_factory,
) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Runs a command of the installed wheel."""
    python = environment / "bin" / "python"
    folder = tmp_path_factory.mktemp("forks")
    with forks.running(python, folder, variables, forks.AZURE) as server:
        yield partial(server.run, cwd=work, variables=variables)


def test_nothing_is_installed_beside_the_packages(unpacked: Path):
    names = {path.name for path in unpacked.iterdir() if path.suffix != ".dist-info"}
    assert names == {
        "cli",
        "evaluation",
        "fleet",
        "gateway",
        "imagefleet",
        "loadgen",
        "worker",
    }


def test_users_type_checkers_find_the_types(unpacked: Path):
    assert (unpacked / "imagefleet" / "py.typed").is_file()


def test_the_environment_has_no_development_packages(
    environment: Path, variables: dict[str, str], tmp_path
):
    for name in ("torch", "pytest", "diffusers", "azure.identity"):
        program = f"import {name}"
        found = subprocess.run(
            [environment / "bin" / "python", "-c", program],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            check=False,
        )
        assert b"ModuleNotFoundError" in found.stderr, name


def test_every_command_is_run_here():
    # `files` is run with each kind.
    tried = {re.sub(r"^(files \w+) .*", r"\1", name) for name in COMMANDS}
    missing = commands() - tried - SERVICES
    assert not missing, f"add what they are run with to COMMANDS: {sorted(missing)}"
    assert tried <= commands()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_works_away_from_the_checkout(
    command: str,
    run: Callable[..., subprocess.CompletedProcess[str]],
    azurite_address: str,
    prometheus: str,
    unused_port: int,
):
    case = COMMANDS[command]
    arguments = case.arguments.format(
        azurite=azurite_address, prometheus=prometheus, port=unused_port
    )
    result = run(*command.split(), *shlex.split(arguments))
    assert result.returncode == case.exit_code, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert re.search(case.printed, result.stdout + result.stderr, re.MULTILINE)


def test_the_report_shows_pictures_without_the_workers_libraries(
    run: Callable[..., subprocess.CompletedProcess[str]], work: Path
):
    result = run("report", "spring", "--output", "pictures.html")
    assert result.returncode == 0, result.stderr
    text = (work / "pictures.html").read_text()
    assert 'src="data:image/jpeg;base64,' in text
    assert (
        f'href="{(work / "imagefleet-data/images/spring/0001.png").as_uri()}"' in text
    )


@pytest.mark.parametrize(
    ("service", "path", "shown"),
    [
        ("exporter", "metrics", "imagefleet_queue_messages{"),
        ("serve", "docs", "/sdapi/v1/txt2img"),
    ],
)
def test_a_service_answers_and_ends_when_asked(
    service: str,
    path: str,
    shown: str,
    environment: Path,
    variables: dict[str, str],
    work: Path,
    unused_port: int,
):
    with subprocess.Popen(
        [environment / "bin" / "imagefleet", service, "--port", str(unused_port)],
        cwd=work,
        env=variables,
        stderr=subprocess.PIPE,
    ) as process:
        url = f"http://127.0.0.1:{unused_port}/{path}"

        def page() -> str:
            assert process.poll() is None
            with contextlib.suppress(OSError), urllib.request.urlopen(url) as answer:
                return str(answer.read().decode())
            return ""

        polling.until_in_thread(page, lambda text: shown in text)
        process.terminate()
        assert process.wait() == 0


def test_the_gallery_serves_its_page_and_the_pictures(
    environment: Path, variables: dict[str, str], work: Path
):
    command = [
        environment / "bin" / "imagefleet",
        "gallery",
        "--port",
        "0",
        "--no-browser",
    ]
    with subprocess.Popen(
        command, cwd=work, env=variables, stdout=subprocess.PIPE, text=True
    ) as gallery:
        assert gallery.stdout is not None
        try:
            found = re.search(r"http://\S+/", gallery.stdout.readline())
            assert found
            for path, text in GALLERY.items():
                with urllib.request.urlopen(found[0] + path) as answer:
                    assert text in answer.read().decode()
        finally:
            gallery.terminate()
            assert gallery.wait() == 0


def test_the_demo_draws_its_pictures_away_from_the_checkout(unpacked: Path, tmp_path):
    """The first one, and then Ctrl-C: a whole demo is in tests/end_to_end."""
    program = "from fleet.main import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", program, "demo", "--few-steps"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(unpacked), "PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as demo:
        pictures = tmp_path / "demo-output" / "storage" / "images"
        polling.until_in_thread(
            lambda: demo.poll() is not None or any(pictures.glob("*/*.png"))
        )
        demo.send_signal(signal.SIGINT)
        printed, _ = demo.communicate()
    assert demo.returncode == 130, printed
    (first, *_) = pictures.glob("*/*.png")
    with Image.open(first) as image:
        assert image.width >= 64

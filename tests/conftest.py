"""The two storages that tests run on, a folder and Azurite, and fake services."""

import contextlib
import gc
import importlib.util
import logging
import math
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import aiohttp
import hypothesis
import pytest
import trustme
from _pytest.logging import catching_logs
from aiohttp import web
from azure.storage.queue import (
    AccountSasPermissions,
    ResourceTypes,
    generate_account_sas,
)
from prometheus_client import CollectorRegistry

import azurite
import hang
import polling
import signers
from imagefleet import cancelled
from imagefleet.files import safetensors
from imagefleet.signing import JobSigner, SigningKey, TrustedJobs
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.telemetry import probes
from imagefleet.validation import JSONDict

# A busy machine takes any time.
hypothesis.settings.register_profile(
    "any machine",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("any machine")

#: Without Azurite, half of the tests are skipped: acceptable on a laptop, an error in CI.
AZURITE_REQUIRED = bool(os.environ.get("CI") or os.environ.get("REQUIRE_AZURITE"))

#: Where `make test` unpacks Prometheus and VictoriaMetrics; nothing is installed on the machine.
DEBIAN = Path(__file__).parent / "dashboards" / "debian" / "usr" / "bin"

#: Likewise without Prometheus and VictoriaMetrics.
PROMETHEUS_REQUIRED = bool(os.environ.get("CI") or os.environ.get("REQUIRE_PROMETHEUS"))

#: What `make test` unpacks. One is a whole Debian, whose links lead to this machine's own /run,
#: where files come and go while pytest looks for tests.
collect_ignore = ["azurite/node_modules", "dashboards/debian", "deploy/debian"]


#: Here every test runs on both storages; elsewhere its half on Azurite is slow, unless the test
#: names its storages.
CONTRACTS = ("imagefleet/records", "imagefleet/storage")

#: Files on the process of another one: what takes long to build, or torch to import, is there once.
JOINED_FILES = {
    "tests/deploy/test_ten_commands.py": "tests/deploy/test_container.py",
    **dict.fromkeys(
        (
            "tests/end_to_end/test_demo.py",
            "tests/end_to_end/test_job_mode.py",
            "tests/end_to_end/test_models.py",
        ),
        "tests/end_to_end/test_worker_process.py",
    ),
}


@dataclass(frozen=True)
class VictoriaMetrics:
    """Takes pushed text and answers PromQL."""

    url: str

    @property
    def push_url(self) -> str:
        return f"{self.url}/api/v1/import/prometheus"

    async def arrived(self) -> None:
        """Returns when all that was pushed so far can be queried: what is pushed last can."""
        last = f"last_{uuid.uuid4().hex}"
        async with aiohttp.ClientSession() as client:
            async with client.post(self.push_url, data=f"{last} 1\n"):
                pass
            async with client.get(f"{self.url}/internal/force_flush"):
                pass
        await polling.until(lambda: self.ask(last))

    async def ask(self, query: str) -> list[JSONDict]:
        # It rounds the time down to a second, before the newest samples.
        parameters = {"query": query, "time": str(math.ceil(time.time()))}
        async with (
            aiohttp.ClientSession(self.url) as client,
            client.get("/api/v1/query", params=parameters) as response,
        ):
            answer = await response.json()
        assert answer["status"] == "success", answer
        return list(answer["data"]["result"])


@dataclass
class FakeSaladMetadata:
    """SaladCloud's metadata service as specified, over real HTTP.

    *reasons* records the requests; *broken* may answer in its place.
    """

    url: str = ""
    jwt: str = "header.claims.signature"
    ready: bool = True
    started: bool = True
    reasons: list[str] = field(default_factory=list)
    broken: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.broken is not None:
            return await self.broken(request)
        if request.headers.get("Metadata") != "true":
            return _problem(403, "The header Metadata is missing.")
        if any(name.lower().startswith("x-forwarded-") for name in request.headers):
            return _problem(403, "The request was forwarded.")
        if request.method == "GET":
            return self._get(request.path)
        return self._change(request.method, request.path, await request.json())

    def _get(self, path: str) -> web.Response:
        answers: dict[str, JSONDict] = {
            "/v1/token": {"jwt": self.jwt},
            "/v1/status": {"ready": self.ready, "started": self.started},
        }
        if path in answers:
            return web.json_response(answers[path])
        return _problem(404, "The container instance could not be found.")

    def _change(self, method: str, path: str, body: JSONDict) -> web.Response:
        match method, path, body:
            case "POST", "/v1/reallocate", {"reason": str(reason)} if (
                1 <= len(reason) <= 1000
            ):
                self.reasons.append(reason)
            case _:
                return _problem(400, "The request is not valid.")
        return web.Response(status=204)


def _problem(status: int, detail: str) -> web.Response:
    return web.json_response(
        {"status": status, "detail": detail},
        status=status,
        content_type="application/problem+json",
    )


@pytest.fixture
async def salad_metadata_service() -> AsyncIterator[FakeSaladMetadata]:
    """A fake of SaladCloud's metadata service; its `url` is for SALAD_METADATA_URL."""
    service = FakeSaladMetadata()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", service.handle)
    runner = web.AppRunner(
        app, access_log=None, shutdown_timeout=0, handler_cancellation=True
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    service.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield service
    await runner.cleanup()


@pytest.fixture
def serve_probes() -> Callable[[bool], AbstractAsyncContextManager[int]]:
    """Serves a worker's probes, which all give the same answer; yields the port."""

    def serve(answer: bool) -> AbstractAsyncContextManager[int]:
        def say() -> bool:
            return answer

        return probes.serving(
            CollectorRegistry(),
            is_live=say,
            is_ready=say,
            is_started=say,
            host="127.0.0.1",
            port=0,
        )

    return serve


@pytest.fixture(scope="session")
def load_file() -> Callable[[Path], Any]:
    """Imports a Python file by its path: neither the tests nor deploy/ are packages."""

    def load(path: Path) -> Any:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def salad_module(load_file: Callable[[Path], Any]) -> Any:
    """tests/chaos/salad_fake.py."""
    return load_file(Path(__file__).parent / "chaos" / "salad_fake.py")


def _catch_at_the_root(self: catching_logs[Any]) -> Any:
    """Without pytest 9's search for loggers that do not propagate: ours all do.

    It looks through a thousand of them six times for each test, and a test has an error if a thread
    makes one meanwhile.
    """
    root = logging.getLogger()
    if self.level is not None:
        self.handler.setLevel(self.level)
        self.orig_level = root.level
        root.setLevel(min(self.orig_level, self.level))
    root.addHandler(self.handler)
    self.attached_loggers.append(root)
    return self.handler


def pytest_configure() -> None:
    if hasattr(catching_logs, "attached_loggers"):
        catching_logs.__enter__ = _catch_at_the_root
    # The search for garbage would look through all that is imported, torch too, again and again.
    gc.disable()
    # A shell's background jobs ignore SIGINT, and so do their child processes.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, with `JOINED_FILES`: xdist 3.8 loses its own groups with pytest 9.2."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope: str = super()._split_scope(nodeid)
            return JOINED_FILES.get(scope, scope)

    return Scheduling(config, log)


_SHARED_AZURITE = pytest.StashKey[str]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """One Azurite for the fast tests of all processes: a new one answers slowly for long.

    Each process that runs slow tests has its own, as those use the default names and send thousands
    of messages.
    """
    config = node.config
    if config.option.markexpr != "not slow" or azurite.why_missing():
        return
    if _SHARED_AZURITE not in config.stash:
        stack = contextlib.ExitStack()
        config.add_cleanup(stack.close)
        config.stash[_SHARED_AZURITE] = stack.enter_context(azurite.running())
    node.workerinput["azurite"] = config.stash[_SHARED_AZURITE]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    items: list[pytest.Item], config: pytest.Config
) -> None:
    """Gives slow tests their longer limit; what takes long is begun first, not last.

    That is a file of many tests among the fast ones, and of few, a storm say, among the slow ones.
    """
    for item in items:
        if _is_slow_on_azurite(item):
            item.add_marker("slow")
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))
    if "PYTEST_XDIST_WORKER" in os.environ:
        is_slow = config.option.markexpr == "slow"
        tests = Counter(
            item.path
            for item in items
            if is_slow == (item.get_closest_marker("slow") is not None)
        )
        items.sort(
            key=lambda item: (
                item.get_closest_marker("long") is None,
                tests[item.path] if is_slow else -tests[item.path],
                str(item.path),
            )
        )


def _is_slow_on_azurite(item: pytest.Item) -> bool:
    """A test of what stands above the storages' contract: one of the two tells as much."""
    callspec = getattr(item, "callspec", None)
    if callspec is None or callspec.params.get("storage_settings") != "azurite":
        return False
    if any(
        "storage_settings" in each.args[0] for each in item.iter_markers("parametrize")
    ):
        return False
    path = item.path.relative_to(Path(__file__).parent).as_posix()
    return not path.startswith(CONTRACTS)


_WATCHDOG = hang.HangWatchdog()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test that hangs is ended after a minute, with what it waits for."""
    if not _WATCHDOG.is_alive():
        _WATCHDOG.start()
    _WATCHDOG.test = item.nodeid
    try:
        return (yield)
    finally:
        _WATCHDOG.test = None


def pytest_collection_finish() -> None:
    gc.freeze()
    # What is imported and compiled later is not frozen: a search of all takes half a second.
    gc.set_threshold(10_000, 10, 20)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _no_settings_from_environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("IMAGEFLEET_", "SALAD_")):
                patch.delenv(name)
        yield


@pytest.fixture(scope="session", autouse=True)
def _files_need_no_rest() -> Iterator[None]:
    """Nor do those of what is loaded for a session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors, "REST_SECONDS", 0.0)
        yield


@pytest.fixture(scope="session")
def azurite_address(request: pytest.FixtureRequest) -> Iterator[str]:
    """The connection string of an in-memory Azurite for this test run."""
    if reason := azurite.why_missing():
        _azurite_is_missing(reason)
    shared = getattr(request.config, "workerinput", {}).get("azurite")
    with contextlib.nullcontext(shared) if shared else azurite.running() as address:
        yield address


@pytest.fixture
def local_settings(tmp_path) -> StorageSettings:
    """Settings of a folder that does not exist yet."""
    return StorageSettings(storage=f"local:{tmp_path / 'storage'}")


@pytest.fixture(scope="session")
def delete_queues(azurite_address: str) -> Callable[[str], None]:
    """Without the client library, which takes ten times as long."""
    url = urlsplit(azurite_address.partition("QueueEndpoint=")[2].rstrip(";"))
    sas = generate_account_sas(
        azurite.ACCOUNT,
        azurite.ACCOUNT_KEY,
        ResourceTypes(service=True, container=True),
        AccountSasPermissions(list=True, delete=True),
        datetime.now(UTC) + timedelta(days=1),
    )

    def delete(prefix: str) -> None:
        with contextlib.closing(HTTPConnection(url.hostname or "", url.port)) as opened:

            def send(method: str, target: str) -> str:
                opened.request(method, f"{url.path}/{target}&{sas}")
                with opened.getresponse() as answer:
                    assert answer.status in {200, 204, 404}, answer.status
                    return answer.read().decode()

            found = send("GET", f"?comp=list&prefix={prefix}")
            for queue in re.findall("<Name>(.*?)</Name>", found):
                send("DELETE", f"{queue}?timeout=30")

    return delete


@pytest.fixture
def azurite_settings(
    azurite_address: str, delete_queues: Callable[[str], None]
) -> Iterator[StorageSettings]:
    """Settings of queues and containers of this test alone, which do not exist yet."""
    name = f"test-{uuid.uuid4().hex[:16]}"
    settings = StorageSettings(
        storage=azurite_address,
        queue=name,
        container=name,
        files_container=f"{name}-files",
    )
    yield settings
    # Azurite slows down with every message in any queue.
    delete_queues(name)


@pytest.fixture(params=["local", "azurite"])
def storage_settings(request) -> StorageSettings:
    """Settings of a storage that is not created yet, once for each kind of storage."""
    settings = request.getfixturevalue(f"{request.param}_settings")
    assert isinstance(settings, StorageSettings)
    return settings


@pytest.fixture
async def storage(storage_settings: StorageSettings) -> AsyncIterator[Storage]:
    """A storage, opened and created."""
    async with open_storage(storage_settings) as storage:
        await storage.create()
        yield storage


@pytest.fixture
async def local_storage(local_settings: StorageSettings) -> AsyncIterator[Storage]:
    """For what no storage does in its own way."""
    async with open_storage(local_settings) as storage:
        await storage.create()
        yield storage


@pytest.fixture
async def owner(azurite_settings: StorageSettings) -> AsyncIterator[Storage]:
    """The storage, opened with the account's key."""
    async with open_storage(azurite_settings) as storage:
        await storage.create()
        yield storage


@pytest.fixture
def key(tmp_path) -> SigningKey:
    return SigningKey.create(tmp_path / "key.pem")


@pytest.fixture
def signer(key: SigningKey) -> JobSigner:
    """Signs jobs of the fleet of `signers.scope`."""
    return signers.signer(key)


@pytest.fixture
def trusted(key: SigningKey) -> TrustedJobs:
    return signers.trusted(key)


@pytest.fixture
def cancel_at_once(monkeypatch) -> None:
    """`cancel` does not wait until the storage's clock is ahead of what it cancels."""

    async def return_at_once(_seconds: float) -> None:
        """For tests in which nothing is sent later, or that look at what is sent meanwhile."""

    monkeypatch.setattr(cancelled, "_wait", return_at_once)


@pytest.fixture(scope="session")
def tool() -> Callable[[str], str]:
    """Finds prometheus, promtool, victoria-metrics, vmagent or exiftool."""

    def find(name: str) -> str:
        if found := shutil.which(name) or shutil.which(DEBIAN / name):
            return found
        reason = (
            f"no {name}: `make test` unpacks it from Debian's packages where apt-get is"
        )
        if PROMETHEUS_REQUIRED:
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)

    return find


@pytest.fixture(scope="module")
def victoria_metrics(
    tool: Callable[[str], str], tmp_path_factory
) -> Iterator[VictoriaMetrics]:
    """A server for the tests of one file, so that no other metrics get in."""
    (port,) = azurite.free_ports(1)
    command = [
        tool("victoria-metrics"),
        f"-httpListenAddr=127.0.0.1:{port}",
        f"-storageDataPath={tmp_path_factory.mktemp('victoria-metrics')}",
        "-search.latencyOffset=0s",  # by default an answer leaves out the last 30 seconds
    ]
    with _metrics_server(command, port) as url:
        yield VictoriaMetrics(url)


@dataclass
class FakeBroker:
    """A service behind TLS that issues tokens by `answer` and records the identity tokens."""

    certificate: Path
    tls: ssl.SSLContext
    url: str = ""
    answer: Callable[[], web.Response] = lambda: web.Response(status=503)
    identity_tokens: list[str] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.Response:
        assert request.method == "POST"
        self.identity_tokens.append(
            request.headers["Authorization"].removeprefix("Bearer ")
        )
        return self.answer()


@pytest.fixture
async def broker(tmp_path, monkeypatch) -> AsyncIterator[FakeBroker]:
    """A broker on this machine whose certificate is trusted during the test."""
    authority = trustme.CA()
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    certificate = tmp_path / "authority.pem"
    authority.cert_pem.write_to_path(certificate)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    fake = FakeBroker(certificate, tls)
    runner = web.ServerRunner(web.Server(fake.handle), shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    fake.url = f"https://127.0.0.1:{runner.addresses[0][1]}/tokens"
    yield fake
    await runner.cleanup()


@contextlib.contextmanager
def _metrics_server(command: list[str], port: int) -> Iterator[str]:
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as server:
        try:
            azurite.wait_for(server, [port])
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(server.pid, signal.SIGKILL)


def _azurite_is_missing(reason: str) -> NoReturn:
    if AZURITE_REQUIRED:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture
def unused_port() -> int:
    """A port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])

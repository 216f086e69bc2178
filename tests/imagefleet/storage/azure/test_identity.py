"""The workload identity of a Kubernetes pod."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from imagefleet import errors
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict

#: Most tests start a process of their own.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]

Run = Callable[..., Awaitable[JSONDict]]

#: Of managed identities on Azure's machines; on SaladCloud's, of another service.
METADATA_ADDRESS = "169.254.169.254"

#: Prints the depth of the queue or the error, and every address that it connected to or resolved.
PROGRAM = """
import asyncio, json, sys
addresses = set()

def record(event, arguments):
    if event == "socket.connect":
        addresses.add(str(arguments[1][0]))
    elif event == "socket.getaddrinfo":
        addresses.add(str(arguments[0]))

sys.addaudithook(record)
from imagefleet import errors, concurrency
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings

async def depth():
    async with open_storage(StorageSettings(), concurrency.NEVER) as storage:
        return (await storage.queue.depth()).messages

try:
    result = asyncio.run(depth())
except errors.FleetError as error:
    result = f"{type(error).__name__}: {error}"
print(json.dumps({"result": result, "addresses": sorted(addresses)}))
"""


@dataclass
class FakeCloud:
    """Microsoft Entra and Queue Storage at one HTTPS address."""

    url: str
    status: int = 200
    denies: bool = False
    assertions: list[str] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.Response:
        if request.path.endswith("/oauth2/v2.0/token"):
            form = await request.post()
            self.assertions.append(str(form["client_assertion"]))
            answer: JSONDict = {
                "token_type": "Bearer",
                "expires_in": 3600,
                "access_token": "pod",
            }
            if self.status != 200:
                answer = {
                    "error": "invalid_client",
                    "error_description": "AADSTS700016: unknown",
                }
            return web.json_response(answer, status=self.status)
        if request.headers.get("Authorization") != "Bearer pod":
            return web.Response(
                status=401, headers={"x-ms-error-code": "InvalidAuthenticationInfo"}
            )
        if self.denies:
            return web.Response(
                status=403,
                headers={"x-ms-error-code": "AuthorizationPermissionMismatch"},
            )
        if request.path.endswith("/messages"):
            return web.Response(
                text="<QueueMessagesList/>", content_type="application/xml"
            )
        if request.query.get("comp") == "list":
            return web.Response(
                text='<EnumerationResults ServiceEndpoint="https://a/" ContainerName="images">'
                "<Blobs/><NextMarker/></EnumerationResults>",
                content_type="application/xml",
            )
        return web.Response(headers={"x-ms-approximate-messages-count": "7"})


@pytest.fixture
async def cloud(broker) -> AsyncIterator[FakeCloud]:
    """A fake cloud with the certificate of the broker."""
    fake = FakeCloud("")
    runner = web.ServerRunner(web.Server(fake.handle), shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=broker.tls).start()
    fake.url = f"https://127.0.0.1:{runner.addresses[0][1]}"
    yield fake
    await runner.cleanup()


@pytest.fixture
def pod(cloud: FakeCloud, tmp_path) -> dict[str, str]:
    """The environment of a pod with workload identity."""
    (tmp_path / "token").write_text("the pod's own token")
    return {
        "AZURE_FEDERATED_TOKEN_FILE": str(tmp_path / "token"),
        "AZURE_CLIENT_ID": "a-client",
        "AZURE_TENANT_ID": "a-tenant",
        "AZURE_AUTHORITY_HOST": cloud.url,
        "IMAGEFLEET_STORAGE": f"BlobEndpoint={cloud.url}/;QueueEndpoint={cloud.url}/",
    }


@pytest.fixture
def run(tmp_path) -> Run:
    """Runs the program with these environment variables."""
    warnings = tmp_path / "warnings"
    warnings.touch()

    async def run_program(**variables: str) -> JSONDict:
        # No fork of a process that has imported aiohttp, which read SSL_CERT_FILE as it did.
        with warnings.open("a") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                PROGRAM,
                env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
                stdout=subprocess.PIPE,
                stderr=errors,
            )
            output, _ = await process.communicate()
        return dict(json.loads(output))

    return run_program


async def test_a_pods_identity_gives_access(
    cloud: FakeCloud, pod: dict[str, str], run: Run
):
    assert await run(**pod) == {"result": 3 * 7, "addresses": ["127.0.0.1"]}
    assert cloud.assertions == ["the pod's own token"]


async def test_a_refused_identity_is_a_setup_error(
    cloud: FakeCloud, pod: dict[str, str], run: Run
):
    cloud.status = 401
    found = await run(**pod)
    assert found["result"].startswith(
        "SetupError: Microsoft Entra refuses the pod's identity"
    )
    assert "AADSTS700016" in found["result"]
    assert METADATA_ADDRESS not in found["addresses"]


async def test_an_identity_without_a_permission_is_told_azures_role(
    cloud: FakeCloud, pod: dict[str, str], run: Run
):
    cloud.denies = True
    found = await run(**pod)
    assert "the pod's identity may not count and peek at messages" in found["result"]
    assert "assign it the Azure role 'Storage Queue Data Reader'" in found["result"]


async def test_a_missing_client_id_is_named(pod: dict[str, str], run: Run):
    del pod["AZURE_CLIENT_ID"]
    found = await run(**pod)
    assert "AZURE_CLIENT_ID" in found["result"]
    assert found["addresses"] == []


async def test_a_key_takes_precedence_over_a_pods_identity(
    cloud: FakeCloud, pod: dict[str, str], azurite_settings: StorageSettings, run: Run
):
    async with open_storage(azurite_settings) as storage:
        await storage.create()
    pod["IMAGEFLEET_STORAGE"] = azurite_settings.storage
    pod["IMAGEFLEET_QUEUE"] = azurite_settings.queue
    assert await run(**pod) == {"result": 0, "addresses": ["127.0.0.1"]}
    assert cloud.assertions == []


async def test_without_credentials_no_address_is_contacted(run: Run):
    found = await run(
        IMAGEFLEET_STORAGE="https://pictures.blob.core.windows.net",
        SALAD_MACHINE_ID="a-machine",
        IDENTITY_ENDPOINT=f"http://{METADATA_ADDRESS}/metadata/identity",
    )
    assert found["result"].startswith("SetupError: no credentials for 'jobs'")
    assert found["addresses"] == []


def test_no_code_uses_a_credential_that_tries_several_sources():
    """It would contact another service on SaladCloud's nodes; a comment may name one."""
    searching = re.compile(
        "(?<!`)(Default|Chained|ManagedIdentity)(Azure|Token)?Credential"
    )
    for package in ("cli", "fleet", "imagefleet", "loadgen", "worker"):
        for path in (ROOT / package).rglob("*.py"):
            assert not searching.search(path.read_text()), path


def test_a_missing_azure_identity_is_named(
    monkeypatch,
):
    monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", "/var/run/secrets/token")
    monkeypatch.setitem(sys.modules, "azure.identity", None)
    settings = StorageSettings(storage="https://pictures.blob.core.windows.net")
    with pytest.raises(errors.SetupError, match=r"pip install '\.\[azure-identity\]'"):
        open_storage(settings)

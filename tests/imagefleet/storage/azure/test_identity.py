"""The identity of a Kubernetes pod, and the address that is never asked for one."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from imagefleet import errors
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings

ROOT = Path(__file__).parents[4]

#: Where a machine in Azure finds its managed identity, and one of SaladCloud's its own service.
METADATA_ADDRESS = "169.254.169.254"

#: Looks at the queue's depth; prints it, or what went wrong, and every address that it connected
#: to or asked for.
PROGRAM = """
import asyncio, json, sys
addresses = set()

def heard(event, arguments):
    if event == "socket.connect":
        addresses.add(str(arguments[1][0]))
    elif event == "socket.getaddrinfo":
        addresses.add(str(arguments[0]))

sys.addaudithook(heard)
from imagefleet import errors, retry
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings

async def look():
    async with open_storage(StorageSettings(), retry.NEVER) as home:
        return (await home.queue.depth()).messages

try:
    result = asyncio.run(look())
except errors.FleetError as error:
    result = f"{type(error).__name__}: {error}"
print(json.dumps({"result": result, "addresses": sorted(addresses)}))
"""


@dataclass
class FakeCloud:
    """Microsoft Entra and a queue service behind one address with TLS."""

    url: str
    status: int = 200
    assertions: list[str] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.Response:
        if request.path.endswith("/oauth2/v2.0/token"):
            form = await request.post()
            self.assertions.append(str(form["client_assertion"]))
            answer: dict[str, Any] = {
                "token_type": "Bearer",
                "expires_in": 3600,
                "access_token": "pod",
            }
            if self.status != 200:
                answer = {"error": "invalid_client", "error_description": "AADSTS700016: unknown"}
            return web.json_response(answer, status=self.status)
        if request.headers.get("Authorization") != "Bearer pod":
            return web.Response(
                status=401, headers={"x-ms-error-code": "InvalidAuthenticationInfo"}
            )
        if request.path.endswith("/messages"):
            return web.Response(text="<QueueMessagesList/>", content_type="application/xml")
        return web.Response(headers={"x-ms-approximate-messages-count": "7"})


@pytest.fixture
async def cloud(broker: Any) -> AsyncIterator[FakeCloud]:
    """A cloud with the broker's certificate."""
    fake = FakeCloud("")
    runner = web.ServerRunner(web.Server(fake.handle), shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=broker.tls).start()
    fake.url = f"https://127.0.0.1:{runner.addresses[0][1]}"
    yield fake
    await runner.cleanup()


@pytest.fixture
def pod(cloud: FakeCloud, tmp_path: Path) -> dict[str, str]:
    """The variables of a pod with workload identity."""
    (tmp_path / "token").write_text("the pod's own token")
    return {
        "AZURE_FEDERATED_TOKEN_FILE": str(tmp_path / "token"),
        "AZURE_CLIENT_ID": "a-client",
        "AZURE_TENANT_ID": "a-tenant",
        "AZURE_AUTHORITY_HOST": cloud.url,
        "IMAGEFLEET_STORAGE": f"BlobEndpoint={cloud.url}/;QueueEndpoint={cloud.url}/",
    }


async def look(**variables: str) -> dict[str, Any]:
    """Runs the program as if on a machine with these variables."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM),
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    return dict(json.loads(output))


async def test_a_pods_identity_lets_it_in(cloud: FakeCloud, pod: dict[str, str]) -> None:
    assert await look(**pod) == {"result": 7, "addresses": ["127.0.0.1"]}
    assert cloud.assertions == ["the pod's own token"]


async def test_a_pods_identity_that_is_refused_is_the_operators_to_mend(
    cloud: FakeCloud, pod: dict[str, str]
) -> None:
    cloud.status = 401
    found = await look(**pod)
    assert found["result"].startswith("SetupError: Microsoft Entra refuses the pod's identity")
    assert "AADSTS700016" in found["result"]
    assert METADATA_ADDRESS not in found["addresses"]


async def test_a_pod_without_its_client_id_is_told_so(pod: dict[str, str]) -> None:
    del pod["AZURE_CLIENT_ID"]
    found = await look(**pod)
    assert "AZURE_CLIENT_ID" in found["result"]
    assert found["addresses"] == []


async def test_a_key_goes_before_a_pods_identity(
    cloud: FakeCloud, pod: dict[str, str], azurite_settings: StorageSettings
) -> None:
    async with open_storage(azurite_settings) as storage:
        await storage.create()
    pod["IMAGEFLEET_STORAGE"] = azurite_settings.storage
    pod["IMAGEFLEET_QUEUE"] = azurite_settings.queue
    assert await look(**pod) == {"result": 0, "addresses": ["127.0.0.1"]}
    assert cloud.assertions == []


async def test_without_credentials_nobody_is_asked_for_some() -> None:
    found = await look(
        IMAGEFLEET_STORAGE="https://pictures.blob.core.windows.net",
        SALAD_MACHINE_ID="a-machine",
        IDENTITY_ENDPOINT=f"http://{METADATA_ADDRESS}/metadata/identity",
    )
    assert found["result"].startswith("SetupError: no credentials for 'jobs'")
    assert found["addresses"] == []


def test_no_credential_is_used_that_looks_around_for_another() -> None:
    """What `DefaultAzureCredential` tries on a node of SaladCloud's is another service."""
    searching = {"DefaultAzureCredential", "ManagedIdentityCredential", "ChainedTokenCredential"}
    for package in ("fleet", "imagefleet", "loadgen", "worker", "deploy"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = {getattr(node, "id", ""), getattr(node, "attr", "")}
                if isinstance(node, ast.ImportFrom):
                    names = {alias.name for alias in node.names}
                assert not names & searching, f"{path}, line {getattr(node, 'lineno', 0)}"


def test_without_its_library_a_pods_identity_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", "/var/run/secrets/token")
    monkeypatch.setitem(sys.modules, "azure.identity", None)
    settings = StorageSettings(storage="https://pictures.blob.core.windows.net")
    with pytest.raises(errors.SetupError, match=r"pip install 'imagefleet\[azure-identity\]'"):
        open_storage(settings)

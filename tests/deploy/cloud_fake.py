"""What the ten commands use beside Azurite and the fake of SaladCloud's API.

SaladCloud's metadata service and keys, with which a node proves who it is, and Azure Container
Apps: HTTPS in front of a container of an image that was built here.
"""

import asyncio
import contextlib
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jwt
import trustme
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec

import polling

#: As the image's entrypoint, with the keys of the fake.
BROKER = """
import sys
from fleet import entry
from fleet.keys import broker
broker.KEYS_URL = sys.argv.pop(1)
entry.main()
"""


class CloudFake:
    """Serves in a thread of its own until `close`."""

    def __init__(self, folder: Path) -> None:
        self.organization = self.group = ""
        self.certificate = folder / "authority.pem"
        self._key = ec.generate_private_key(ec.SECP256R1())
        authority = trustme.CA()
        authority.cert_pem.write_to_path(self.certificate)
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("127.0.0.1").configure_cert(self._tls)
        self._container_port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cloud")
        self._thread.start()
        self._servers = asyncio.run_coroutine_threadsafe(
            self._serve(), self._loop
        ).result(30)
        self._container: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.delete_app()

    def create_app(
        self, image: Any, data: Path, port: int, variables: dict[str, str]
    ) -> None:
        """Runs the container behind HTTPS, at *port* since all share this machine's network."""
        program = ("python", "-c", BROKER, f"{self.url}/jwks.json", "broker")
        own = {**variables, "IMAGEFLEET_PORT": str(port)}
        command = image.command(*program, data=data, entrypoint=False, **own)
        self._container = subprocess.Popen(command, stdout=sys.stderr)
        self._container_port = port
        container = self._container

        def answers() -> bool:
            assert container.poll() is None, "the container ended"
            return self._answers(port)

        polling.until_in_thread(answers)

    def delete_app(self) -> None:
        if self._container is not None:
            self._container.kill()
            self._container.wait()
            self._container = None

    @staticmethod
    def _answers(port: int) -> bool:
        done = subprocess.run(
            ["bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port}"],
            capture_output=True,
            check=False,
        )
        return done.returncode == 0

    async def _serve(self) -> list[Any]:
        app = web.Application()
        app.router.add_get("/jwks.json", self._jwks)
        app.router.add_get("/v1/token", self._token)
        app.router.add_route("*", "/v1/{path:.*}", self._others)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ingress = await asyncio.start_server(
            self._forward, "127.0.0.1", 0, ssl=self._tls
        )
        self.host = f"127.0.0.1:{ingress.sockets[0].getsockname()[1]}"
        return [runner, ingress]

    async def _stop(self) -> None:
        runner, ingress = self._servers
        ingress.close()
        await runner.cleanup()

    async def _jwks(self, _: web.Request) -> web.Response:
        public = jwt.algorithms.ECAlgorithm.to_jwk(self._key.public_key(), as_dict=True)
        return web.json_response(
            {"keys": [{**public, "kid": "new", "use": "sig", "alg": "ES256"}]}
        )

    async def _token(self, request: web.Request) -> web.Response:
        assert request.headers["Metadata"] == "true"
        now = int(time.time())
        claims = {
            "aud": "2c3573b6-88de-4067-821f-1af088bd9c6a",
            "exp": now + 300,
            "sub": "a-machine",
            "salad_organization_name": self.organization,
            "salad_workload_name": self.group,
        }
        signed = jwt.encode(
            claims, self._key, algorithm="ES256", headers={"kid": "new"}
        )
        return web.json_response({"jwt": signed})

    async def _others(self, _: web.Request) -> web.Response:
        return web.Response(status=204)

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            theirs = await asyncio.open_connection("127.0.0.1", self._container_port)
            await asyncio.gather(_copy(reader, theirs[1]), _copy(theirs[0], writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()


def app_of(arguments: list[str]) -> dict[str, Any]:
    """What `az containerapp create` is asked for, with its secrets in place of their names."""
    options: dict[str, list[str]] = {}
    for each in arguments:
        if each.startswith("--"):
            options[each] = []
        else:
            options[[*options][-1]].append(each)
    secrets = dict(each.split("=", 1) for each in options["--secrets"])
    variables = {
        name: secrets[value.removeprefix("secretref:")]
        if "secretref:" in value
        else value
        for name, _, value in (each.partition("=") for each in options["--env-vars"])
    }
    assert options["--ingress"] == ["external"]
    assert options["--args"] == ["broker"]
    return {
        "image": options["--image"][0],
        "port": int(options["--target-port"][0]),
        "variables": variables,
    }

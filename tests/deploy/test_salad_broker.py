"""The token broker, with real signatures and Azurite."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import jwt
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import SecretStr

from fleet.keys import mint
from imagefleet import retry
from imagefleet.storage.azure.storage import AzureStorage
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings

PATH = Path(__file__).parents[2] / "deploy" / "salad" / "broker" / "broker.py"

ORGANIZATION = "2c3573b6-88de-4067-821f-1af088bd9c6a"
GROUP = "5f1d0c52-0a0e-4cf0-9b3b-0a5f0b8f4a11"

Client = TestClient[Any, Any]


class Salad:
    """Signs identity tokens and publishes keys like SaladCloud."""

    def __init__(self) -> None:
        self.keys = {"old": ec.generate_private_key(ec.SECP256R1())}
        self.requests = 0
        self.is_down = False

    async def publish(self, request: web.Request) -> web.Response:
        self.requests += 1
        if self.is_down:
            return web.Response(status=500)
        return web.json_response({"keys": [self._public(name) for name in self.keys]})

    def sign(self, *, key: str = "old", signed_with: Any = None, **changes: Any) -> str:
        now = int(time.time())
        claims = {
            "iat": now,
            "nbf": now,
            "exp": now + 300,
            "sub": "a-machine",
            "aud": ORGANIZATION,
            "salad_container_group_id": GROUP,
            "salad_machine_id": "a-machine",
            **changes,
        }
        claims = {name: value for name, value in claims.items() if value is not None}
        private = signed_with or self.keys[key]
        return jwt.encode(claims, private, algorithm="ES256", headers={"kid": key})

    def _public(self, name: str) -> dict[str, Any]:
        public = jwt.algorithms.ECAlgorithm.to_jwk(self.keys[name].public_key(), as_dict=True)
        return {**public, "kid": name, "use": "sig", "alg": "ES256"}


@pytest.fixture(scope="module")
def module() -> ModuleType:
    specification = importlib.util.spec_from_file_location("salad_broker", PATH)
    assert specification is not None
    assert specification.loader is not None
    loaded = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def salad() -> Salad:
    return Salad()


@pytest.fixture
async def client(
    module: ModuleType, salad: Salad, azurite_settings: StorageSettings
) -> AsyncIterator[Client]:
    published = web.Application()
    published.router.add_get("/jwks.json", salad.publish)
    async with TestServer(published) as server:
        minter = mint.Minter(azurite_settings)
        broker = module.Broker(
            minter, ORGANIZATION, [GROUP], timedelta(hours=1), str(server.make_url("/jwks.json"))
        )
        async with TestClient(TestServer(module.application(broker))) as client:
            yield client


async def ask(client: Client, identity_token: str | None) -> tuple[int, dict[str, Any]]:
    headers = {} if identity_token is None else {"Authorization": f"Bearer {identity_token}"}
    async with client.post("/tokens", headers=headers) as response:
        return response.status, await response.json()


async def test_a_node_of_the_group_gets_a_workers_tokens_that_work(
    client: Client, salad: Salad, azurite_settings: StorageSettings
) -> None:
    status, body = await ask(client, salad.sign())
    assert status == 200, body
    settings = azurite_settings.model_copy(
        update={"storage": body["storage"], "sas": SecretStr(json.dumps(body))}
    )
    async with open_storage(azurite_settings) as owner:
        await owner.create()
        async with AzureStorage(settings, retry.NEVER) as worker:
            await worker.check()
            await worker.files.check()
            assert await worker.blobs.create("fox.png", b"pixels", "image/png", {})


async def test_the_other_claim_for_the_group_is_accepted(client: Client, salad: Salad) -> None:
    identity_token = salad.sign(salad_container_group_id=None, salad_workload_id=GROUP)
    assert (await ask(client, identity_token))[0] == 200


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"aud": "another-organization"}, 403),
        ({"salad_container_group_id": "another-group"}, 403),
        ({"salad_container_group_id": None}, 403),
        ({"salad_container_group_id": [GROUP]}, 403),
        ({"salad_container_group_id": {GROUP: True}}, 403),
        ({"aud": None}, 401),
        ({"exp": None}, 401),
        ({"sub": None}, 401),
        ({"exp": int(time.time()) - 60}, 401),
        ({"nbf": int(time.time()) + 600}, 401),
        ({"signed_with": ec.generate_private_key(ec.SECP256R1())}, 401),
    ],
)
async def test_a_token_of_another_group_or_signature_is_refused(
    client: Client, salad: Salad, changes: dict[str, Any], status: int
) -> None:
    answered, body = await ask(client, salad.sign(**changes))
    assert answered == status
    assert set(body) == {"error"}


@pytest.mark.parametrize("identity_token", [None, "", "abc", "a.b.c"])
async def test_an_invalid_token_is_refused(client: Client, identity_token: str | None) -> None:
    assert (await ask(client, identity_token))[0] == 401


async def test_the_token_does_not_choose_its_algorithm(client: Client, salad: Salad) -> None:
    claims = jwt.decode(salad.sign(), options={"verify_signature": False})
    for algorithm, key in (("HS256", "a secret of the attacker, long enough"), ("none", None)):
        forged = jwt.encode(claims, key, algorithm=algorithm, headers={"kid": "old"})
        assert (await ask(client, forged))[0] == 401


async def test_the_keys_are_fetched_once_and_not_for_every_unknown_key_id(
    client: Client, salad: Salad
) -> None:
    for _ in range(5):
        assert (await ask(client, salad.sign()))[0] == 200
    stranger = ec.generate_private_key(ec.SECP256R1())
    for _ in range(5):
        assert (await ask(client, salad.sign(key="unknown", signed_with=stranger)))[0] == 401
    assert salad.requests <= 2


async def test_a_forged_key_id_cannot_add_lines_to_the_log(
    client: Client, salad: Salad, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = ec.generate_private_key(ec.SECP256R1())
    forged = "x\n2026-01-01 INFO issued tokens to machine y\x1b[2J" + "z" * 2_000
    assert (await ask(client, salad.sign(key=forged, signed_with=stranger)))[0] == 401
    (line,) = [each.getMessage() for each in caplog.records if "refused" in each.getMessage()]
    assert line.isprintable()
    assert len(line) < 400


async def test_unavailable_keys_are_a_temporary_error(client: Client, salad: Salad) -> None:
    salad.is_down = True
    assert (await ask(client, salad.sign()))[0] == 503


async def test_a_key_of_another_curve_is_refused(client: Client, salad: Salad) -> None:
    salad.keys["other"] = ec.generate_private_key(ec.SECP384R1())
    claims = jwt.decode(salad.sign(), options={"verify_signature": False})
    identity_token = jwt.encode(
        claims, salad.keys["other"], algorithm="ES384", headers={"kid": "other"}
    )
    assert (await ask(client, identity_token))[0] == 401


async def test_only_post_is_allowed(client: Client, salad: Salad) -> None:
    headers = {"Authorization": f"Bearer {salad.sign()}"}
    async with client.get("/tokens", headers=headers) as response:
        assert response.status == 405

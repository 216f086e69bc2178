"""The token broker, with real signatures and Azurite."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import jwt
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import SecretStr

from fleet.keys import broker, mint
from fleet.settings import BrokerSettings
from imagefleet import concurrency, errors
from imagefleet.storage.azure.roles import ROLES
from imagefleet.storage.azure.storage import AzureStorage
from imagefleet.storage.open import open_storage
from imagefleet.storage.proofs import Prover, machine_key
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict

ORGANIZATION = "2c3573b6-88de-4067-821f-1af088bd9c6a"
NAME = "acme"
GROUP = "sd15-batch-0123abcd-2"

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
            "salad_organization_id": ORGANIZATION,
            "salad_organization_name": NAME,
            "salad_workload_id": "5f1d0c52-0a0e-4cf0-9b3b-0a5f0b8f4a11",
            "salad_workload_name": GROUP,
            "salad_machine_id": "a-machine",
            **changes,
        }
        claims = {name: value for name, value in claims.items() if value is not None}
        private = signed_with or self.keys[key]
        return jwt.encode(claims, private, algorithm="ES256", headers={"kid": key})

    def _public(self, name: str) -> JSONDict:
        public = jwt.algorithms.ECAlgorithm.to_jwk(
            self.keys[name].public_key(), as_dict=True
        )
        return {**public, "kid": name, "use": "sig", "alg": "ES256"}


@pytest.fixture
def salad() -> Salad:
    return Salad()


@pytest.fixture
async def start(
    salad: Salad, azurite_settings: StorageSettings
) -> AsyncIterator[Callable[..., AbstractAsyncContextManager[Client]]]:
    """Starts a broker with settings of the storage and of one's own."""
    published = web.Application()
    published.router.add_get("/jwks.json", salad.publish)
    async with (
        TestServer(published) as server,
        open_storage(azurite_settings) as storage,
    ):
        await storage.create()

        @contextlib.asynccontextmanager
        async def run(**own: Any) -> AsyncIterator[Client]:
            given = {"organization": NAME, "salad_fleets": "other,sd15-batch", **own}
            settings = BrokerSettings(**azurite_settings.model_dump(), **given)
            identities = broker.Identities(settings, str(server.make_url("/jwks.json")))
            app = broker.application(broker.Broker(settings, identities))
            async with TestClient(TestServer(app)) as client:
                yield client

        yield run


@pytest.fixture
async def client(
    start: Callable[..., AbstractAsyncContextManager[Client]],
) -> AsyncIterator[Client]:
    async with start() as client:
        yield client


async def ask(client: Client, identity_token: str | None) -> tuple[int, JSONDict]:
    headers = (
        {} if identity_token is None else {"Authorization": f"Bearer {identity_token}"}
    )
    async with client.post("/tokens", headers=headers) as response:
        return response.status, await response.json()


async def test_a_node_of_the_group_gets_a_workers_tokens_that_work(
    client: Client, salad: Salad, azurite_settings: StorageSettings
):
    status, body = await ask(client, salad.sign())
    assert status == 200, body
    settings = azurite_settings.model_copy(
        update={"storage": body["storage"], "sas": SecretStr(json.dumps(body))}
    )
    async with open_storage(azurite_settings) as owner:
        await owner.create()
        async with AzureStorage(settings, concurrency.NEVER) as worker:
            await worker.check()
            await worker.files.check()
            assert await worker.blobs.create("fox.png", b"pixels", "image/png", {})


MACHINE = "0d8f5c1e-77a2-4c1b-9a3e-5b2f0e7d9c11"


async def test_each_machine_gets_a_key_of_its_own_that_no_restart_changes(
    start,
    salad: Salad,
    azurite_settings: StorageSettings,
    caplog,
):
    keys: dict[str, set[str]] = {}
    for _ in range(2):
        async with start() as client:
            for machine in (
                MACHINE,
                MACHINE.replace("0d", "1d"),
                "a-machine",
                MACHINE.upper(),
            ):
                _, body = await ask(client, salad.sign(salad_machine_id=machine))
                keys.setdefault(machine, set()).add(body.get("machine_key", ""))
                assert body.get("machine", machine) == machine.lower()
            _, body = await ask(client, salad.sign(sub=MACHINE, salad_machine_id=None))
            keys[MACHINE].add(body["machine_key"])
    first, second, other, upper_case = keys.values()
    assert other == {""}, "names of workers begin with no such id"
    assert upper_case == first
    assert len(first) == len(second) == 1
    assert first != second
    async with open_storage(azurite_settings) as owner:
        proofs = await owner.proofs()
    (key,) = first
    proof = Prover(MACHINE, key).proof(f"{MACHINE}-7", b"claims")
    assert proofs is not None
    assert proofs.accept(f"{MACHINE}-7", b"claims", proof)
    assert key not in caplog.text


async def test_two_brokers_that_begin_at_once_end_with_both_secrets(
    azurite_settings: StorageSettings,
):
    async with open_storage(azurite_settings) as owner:
        await owner.create()
        assert await owner.proofs() is None
        first = await mint.proof_secret(azurite_settings)
        assert await mint.proof_secret(azurite_settings) == first, "one is there"
        replaced = "5ec2e7" * 10
        for _ in range(2):
            assert await mint.proof_secret(azurite_settings, replaced) == replaced
        proofs = await owner.proofs()
    for secret in (first, replaced):
        proof = Prover(MACHINE, machine_key(secret, MACHINE)).proof(MACHINE, b"claims")
        assert proofs is not None
        assert proofs.accept(MACHINE, b"claims", proof)


def policy_of(body: JSONDict) -> str:
    return body["queue"].partition("si=")[2].partition("&")[0]


async def test_tokens_for_chains_have_a_policy_of_their_own_and_work_for_every_stage(
    start, salad: Salad, azurite_settings: StorageSettings
):
    job = {"prompt": "a", "id": "a", "model": "one", "then": [{"model": "two"}]}
    body = json.dumps({**job, "stage": {"number": 2}})
    async with open_storage(azurite_settings) as owner:
        await owner.create()
        assert await owner.blobs.create("default/a.png", b"pixels", "image/png", {})
    policies = []
    for chains in (False, True, True, False):
        async with start(models="one,two", chains=chains) as client:
            _, tokens = await ask(client, salad.sign())
        policies.append(policy_of(tokens))
        update = {"storage": tokens["storage"], "sas": SecretStr(json.dumps(tokens))}
        async with AzureStorage(
            azurite_settings.model_copy(update=update), concurrency.NEVER
        ) as worker:
            await worker.models.send([body])
            if chains:
                assert await worker.blobs.read("default/a.png") == b"pixels"
            else:
                with pytest.raises(errors.SetupError):
                    await worker.blobs.read("default/a.png")
    async with open_storage(azurite_settings) as owner:
        depth = await owner.models.of("two")["normal"].depth()
        assert depth.messages == len(policies)
    assert policies == [policies[0], policies[1], policies[1], policies[0]]
    assert len({*policies}) == 2, "a policy keeps the permissions that it was made with"


@pytest.mark.parametrize("organization", [NAME, ORGANIZATION])
async def test_the_organization_is_known_by_its_name_or_its_id(
    organization: str, start, salad: Salad
):
    async with start(organization=organization) as client:
        assert (await ask(client, salad.sign()))[0] == 200
        other = salad.sign(
            aud="ee8d2f0c-88de-4067-821f-1af088bd9c6a", salad_organization_name="ea"
        )
        assert (await ask(client, other))[0] == 403
        nameless = salad.sign(aud=[ORGANIZATION], salad_organization_name=None)
        assert (await ask(client, nameless))[0] == 403


async def test_without_fleets_all_groups_of_the_organization_get_tokens(
    start, salad: Salad
):
    async with start(salad_fleets=None) as client:
        assert (await ask(client, salad.sign(salad_workload_name=None)))[0] == 200


#: Changes of what is signed, and the answer.
SIGNED: list[tuple[JSONDict, int]] = [
    ({"salad_organization_name": "another-organization"}, 403),
    ({"salad_organization_name": [NAME]}, 403),
    ({"salad_workload_name": "another-group"}, 403),
    ({"salad_workload_name": "sd15-batch-x-0123abcd-2"}, 403),
    ({"salad_workload_name": "x-sd15-batch-0123abcd-2"}, 403),
    ({"salad_workload_name": None}, 403),
    ({"salad_workload_name": [GROUP]}, 403),
    ({"salad_workload_name": {GROUP: True}}, 403),
    ({"salad_workload_name": "other"}, 200),
    ({"salad_workload_name": None, "salad_container_group_name": GROUP}, 200),
    ({"aud": None}, 401),
    ({"exp": None}, 401),
    ({"sub": None}, 401),
    ({"exp": int(time.time()) - 60}, 401),
    ({"nbf": int(time.time()) + 7200}, 401),
    ({"signed_with": ec.generate_private_key(ec.SECP256R1())}, 401),
]


async def test_tokens_are_for_valid_signatures_of_the_fleets_groups_alone(
    client: Client, salad: Salad
):
    for changes, status in SIGNED:
        answered, body = await ask(client, salad.sign(**changes))
        assert answered == status, changes
        assert ("queue" in body) == (status == 200), changes
        assert ("error" in body) == (status != 200), changes


async def test_a_thiefs_tokens_end_with_the_policy_and_the_fleets_go_on(
    start,
    salad: Salad,
    azurite_settings: StorageSettings,
    monkeypatch,
):
    async def works(body: JSONDict) -> bool:
        changes = {"storage": body["storage"], "sas": SecretStr(json.dumps(body))}
        settings = azurite_settings.model_copy(update=changes)
        async with AzureStorage(settings, concurrency.NEVER) as worker:
            try:
                await worker.queue.receive(1, 30)
            except errors.SetupError:
                return False
            return True

    async with start() as client:
        _, stolen = await ask(client, salad.sign())
        assert await works(stolen)
        assert "se=" in stolen["queue"]
        assert "sp=" not in stolen["queue"], (
            "permissions of its own would outlive the policy"
        )
        assert await mint.remove_policy(azurite_settings, "broker")
        assert not await works(stolen)
        monkeypatch.setattr(broker, "CHECK_SECONDS", 0)
        _, renewed = await ask(client, salad.sign())
        assert await works(renewed)
    async with start() as restarted:
        _, after = await ask(restarted, salad.sign())
        assert await works(after)
    assert not await works(stolen), (
        "a policy of the same name would have brought it back"
    )
    assert len(await mint.policies(azurite_settings, ROLES["worker"])) == 1


async def test_many_nodes_that_ask_at_once_share_one_policy(
    start,
    salad: Salad,
    azurite_settings: StorageSettings,
    monkeypatch,
):
    monkeypatch.setattr(broker, "CHECK_SECONDS", 0)
    async with start() as client:
        await mint.remove_policy(azurite_settings, "broker")
        answers = await asyncio.gather(*(ask(client, salad.sign()) for _ in range(5)))
    assert {status for status, _ in answers} == {200}
    assert len({policy_of(body) for _, body in answers}) == 1


async def test_nodes_get_tokens_while_the_storage_does_not_answer(
    start, salad: Salad, monkeypatch
):
    async def fail(*_: object) -> set[str]:
        raise errors.TransientError("the storage does not answer")

    async def hang(*_: object) -> set[str]:
        await asyncio.Event().wait()
        return set()

    async with start() as client:
        _, before = await ask(client, salad.sign())
        monkeypatch.setattr(broker, "CHECK_SECONDS", 0)
        monkeypatch.setattr(broker, "LONGEST_CHECK_SECONDS", 0.1)
        for broken in (fail, hang):
            monkeypatch.setattr(mint, "policies", broken)
            status, body = await ask(client, salad.sign())
            assert status == 200
            assert policy_of(body) == policy_of(before)


async def test_a_fifth_policy_of_others_is_a_temporary_error_with_a_line_in_the_log(
    start,
    salad: Salad,
    azurite_settings: StorageSettings,
    monkeypatch,
    caplog,
):
    async with start() as client:
        await mint.remove_policy(azurite_settings, "broker")
        for number in range(mint.MAX_POLICIES):
            await mint.store_policy(azurite_settings, ROLES["worker"], f"other{number}")
        monkeypatch.setattr(broker, "CHECK_SECONDS", 0)
        status, body = await ask(client, salad.sign())
    assert (status, body) == (503, {"error": "try again later"})
    assert "already has 5 stored policies" in caplog.text


async def test_an_invalid_token_is_refused(client: Client):
    for identity_token in (None, "", "abc", "a.b.c"):
        assert (await ask(client, identity_token))[0] == 401, identity_token


async def test_the_token_does_not_choose_its_algorithm(client: Client, salad: Salad):
    claims = jwt.decode(salad.sign(), options={"verify_signature": False})
    for algorithm, key in (
        ("HS256", "a secret of the attacker, long enough"),
        ("none", None),
    ):
        forged = jwt.encode(claims, key, algorithm=algorithm, headers={"kid": "old"})
        assert (await ask(client, forged))[0] == 401


async def test_a_forged_key_id_cannot_add_lines_to_the_log(
    client: Client, salad: Salad, caplog
):
    stranger = ec.generate_private_key(ec.SECP256R1())
    forged = "x\n2026-01-01 INFO issued tokens to machine y\x1b[2J" + "z" * 2_000
    assert (await ask(client, salad.sign(key=forged, signed_with=stranger)))[0] == 401
    (line,) = [
        each.getMessage() for each in caplog.records if "refused" in each.getMessage()
    ]
    assert line.isprintable()
    assert len(line) < 400


async def test_unavailable_keys_are_a_temporary_error(client: Client, salad: Salad):
    salad.is_down = True
    assert (await ask(client, salad.sign()))[0] == 503


async def test_a_probe_needs_no_token(client: Client):
    async with client.get("/live") as response:
        assert response.status == 200

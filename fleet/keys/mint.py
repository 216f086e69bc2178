"""Creates SAS tokens with the account key, and the stored policies that make them revocable.

A token of a policy has its own expiry, and its permissions from the policy: Azure takes each from
one of the two. It ends with whichever ends first.
"""

import contextlib
import json
import re
import secrets
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from azure.storage.blob import AccessPolicy as BlobPolicy
from azure.storage.blob import ContainerSasPermissions, generate_container_sas
from azure.storage.blob.aio import ContainerClient
from azure.storage.queue import AccessPolicy as QueuePolicy
from azure.storage.queue import QueueSasPermissions, generate_queue_sas
from azure.storage.queue.aio import QueueClient

from imagefleet.errors import SetupError
from imagefleet.storage import proofs
from imagefleet.storage.azure import account, roles
from imagefleet.storage.azure import errors as azure_errors
from imagefleet.storage.azure.roles import Role
from imagefleet.storage.azure.storage import API_VERSION
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import Resource, StorageSettings
from imagefleet.validation import JSONDict

#: Azure's limit of stored policies for a queue or container.
MAX_POLICIES = 5


class Place(NamedTuple):
    """A queue or container; a job queue may be a model's."""

    resource: Resource
    model: str | None = None

    @property
    def is_container(self) -> bool:
        return roles.is_container(self.resource)

    def letters(self, role: Role) -> str:
        return role.letters(self.resource, self.model)

    def permission(self, role: Role) -> QueueSasPermissions | ContainerSasPermissions:
        kind = ContainerSasPermissions if self.is_container else QueueSasPermissions
        return kind.from_string(self.letters(role))

    def name(self, settings: StorageSettings) -> str:
        return roles.name_of(settings, *self)

    def client(self, settings: StorageSettings) -> Any:
        """The client of the queue or container, with the account's key."""
        address = account.read_address(settings.storage.strip())
        open_client = (
            address.container_client if self.is_container else address.queue_client
        )
        return open_client(self.name(settings), None, api_version=API_VERSION)


@dataclass(frozen=True)
class Minted:
    """The tokens of a role by place, and the storage address without its key."""

    role: str
    storage: str
    by_place: Mapping[Place, str]
    expires_at: datetime

    @property
    def sas(self) -> str:
        """The tokens as the value of IMAGEFLEET_SAS."""
        return json.dumps(self.fields, separators=(",", ":"))

    @property
    def record(self) -> JSONDict:
        """The content of a token file, and a broker's response."""
        return {
            "role": self.role,
            "storage": self.storage,
            "expires_at": f"{self.expires_at:%Y-%m-%dT%H:%M:%SZ}",
            **self.fields,
        }

    @property
    def fields(self) -> JSONDict:
        """All tokens, as `sas.Tokens` reads them."""
        fields: JSONDict = {}
        for place, token in self.by_place.items():
            queues = fields
            if place.model is not None:
                queues = fields.setdefault("models", {}).setdefault(place.model, {})
            queues[place.resource] = token
        return fields


class Minter:
    """Creates tokens without calling Azure; raises SetupError if there is no account key."""

    def __init__(self, settings: StorageSettings) -> None:
        address = account.read_address(settings.storage.strip())
        if not address.has_key or address.sas is not None:
            raise SetupError(
                "tokens are signed with the account key: set IMAGEFLEET_STORAGE to a connection"
                " string with AccountName and AccountKey"
            )
        self._settings = settings
        queue = Place("queue").client(settings)
        container = Place("blob").client(settings)
        self._account = {
            "account_name": queue.account_name,
            "account_key": queue.credential.account_key,
        }
        self._https = queue.scheme == "https"
        self.storage = _address_without_key(queue, container, self._https)

    def mint(
        self,
        role: Role,
        life: timedelta,
        policy: str | None = None,
        models: Collection[str] = (),
    ) -> Minted:
        """Tokens that expire after *life*, or as soon as the stored *policy* is removed, if given.

        Those of the queues of *models*, too. They have no start time: a node's or Azure's clock may
        be behind this one.
        """
        expires_at = (datetime.now(UTC) + life).replace(microsecond=0)
        tokens = {
            place: self._token(place, role, expires_at, policy)
            for place in _places(role, models)
        }
        return Minted(role.name, self.storage, tokens, expires_at)

    def _token(
        self, place: Place, role: Role, expires_at: datetime, policy: str | None
    ) -> str:
        name = place.name(self._settings)
        terms = {
            **self._account,
            "protocol": "https" if self._https else None,
            "expiry": expires_at,
            "policy_id": policy,
            "permission": place.permission(role) if policy is None else None,
        }
        if place.is_container:
            return generate_container_sas(container_name=name, **terms)
        return generate_queue_sas(queue_name=name, **terms)


def _places(role: Role | None, models: Collection[str] = ()) -> list[Place]:
    """All that the role has a token for; None: all there is."""
    places = [
        *map(Place, roles.RESOURCES),
        *(
            Place(queue, model)
            for model in models
            for queue in roles.RESOURCES
            if queue in roles.JOB_QUEUES.values()
        ),
    ]
    return [place for place in places if role is None or place.letters(role)]


async def store_policy(
    settings: StorageSettings,
    role: Role,
    name: str,
    models: Collection[str] = (),
) -> None:
    """Creates the stored policy *name* on each resource that *role* has a token for.

    The queues of high and low priority and those of *models* are created if they do not exist.
    Raises SetupError if it has other permissions, or the resource too many policies.
    """

    async def store(place: Place) -> None:
        permission = str(place.permission(role))
        async with _stored(settings, place) as policies:
            existing = policies.get(name)
            if existing is not None and existing.permission != permission:
                raise SetupError(
                    f"the policy {name!r} of {place.name(settings)!r} allows"
                    f" {existing.permission!r}, not {permission!r}: use one name per role"
                )
            if existing is None and len(policies) >= MAX_POLICIES:
                raise SetupError(
                    f"{place.name(settings)!r} already has {MAX_POLICIES} stored policies"
                    f" ({', '.join(policies)}): `imagefleet keys revoke` one of them"
                )
            kind = BlobPolicy if place.is_container else QueuePolicy
            policies.setdefault(name, kind(permission=permission))

    places = _places(role, models)
    optional = [
        place for place in places if place.resource in roles.OPTIONAL or place.model
    ]
    for place in places:
        if place not in optional:
            await store(place)
    if optional:
        async with open_storage(settings) as storage:
            await storage.models.create()
            for model in models:
                await storage.models.make(model)
    for place in optional:
        await store(place)


async def policies(
    settings: StorageSettings, role: Role, models: Collection[str] = ()
) -> set[str]:
    """The policies with which all resources have the role's permissions."""
    found = []
    for place in _places(role, models):
        permission = str(place.permission(role))
        async with _stored(settings, place, may_be_missing=True) as policies:
            found.append(
                {
                    name
                    for name, each in policies.items()
                    if each.permission == permission
                }
            )
    return set.intersection(*found)


async def proof_secret(settings: StorageSettings, own: str | None = None) -> str:
    """The secret of the machines' keys; makes one if there is none.

    *own* is one that was in use before. Of two brokers that make one at the same time, one replaces
    the other's, and adds it again when it asks next: proofs by both count.
    """
    async with Place("files").client(settings) as files:
        with azure_errors.translated(f"the metadata of {settings.files_container!r}"):
            found = (await files.get_container_properties()).metadata or {}
            known = [each for each in found.get(proofs.SECRETS, "").split(",") if each]
            in_use = dict.fromkeys(filter(None, [*known, own]))
            wanted = list(in_use) or [secrets.token_hex(32)]
            if len(wanted) > len(known):
                await files.set_container_metadata(
                    {**found, proofs.SECRETS: ",".join(wanted)}
                )
    async with Place("poison").client(settings) as queue:
        with azure_errors.translated(f"the metadata of {settings.poison_queue!r}"):
            noted = (await queue.get_queue_properties()).metadata or {}
            if proofs.IN_USE not in noted:
                await queue.set_queue_metadata({**noted, proofs.IN_USE: "1"})
    return own or wanted[0]


def is_of_broker(policy: str, name: str) -> bool:
    return bool(re.fullmatch(rf"{re.escape(policy)}-[0-9a-f]{{8}}", name))


async def remove_policy(settings: StorageSettings, name: str) -> list[str]:
    """Removes the policy *name* or a broker's for it; returns whose tokens that revokes."""
    async with open_storage(settings) as storage:
        models = await storage.models.names()
    removed = []
    for place in _places(None, models):
        async with _stored(settings, place, may_be_missing=True) as policies:
            ours = [
                each for each in policies if each == name or is_of_broker(name, each)
            ]
            for each in ours:
                del policies[each]
        if ours:
            removed.append(place.name(settings))
    if not removed:
        raise SetupError(f"there is no policy {name!r} to revoke")
    return removed


def _address_without_key(
    queue: QueueClient, container: ContainerClient, https: bool
) -> str:
    blob_url, queue_url = (
        client.url.partition("?")[0].rpartition("/")[0] for client in (container, queue)
    )
    if https:
        with contextlib.suppress(SetupError):  # a custom domain
            if account.read_address(blob_url).queue_url == queue_url:
                return blob_url
    return f"BlobEndpoint={blob_url};QueueEndpoint={queue_url}"


@contextlib.asynccontextmanager
async def _stored(
    settings: StorageSettings, place: Place, *, may_be_missing: bool = False
) -> AsyncIterator[JSONDict]:
    """The stored policies of a queue or container; what is changed of them is stored."""
    what = f"the stored policies of {place.name(settings)!r}"
    policies: JSONDict = {}
    public_access = None
    async with place.client(settings) as client:
        with (
            azure_errors.translated(what),
            azure_errors.tolerated(azure_errors.MISSING if may_be_missing else ()),
        ):
            if place.is_container:
                found = await client.get_container_access_policy()
                public_access = found["public_access"]
                policies |= {
                    each.id: each.access_policy for each in found["signed_identifiers"]
                }
            else:
                policies |= await client.get_queue_access_policy()
        before = set(policies)
        yield policies
        if set(policies) == before:
            return
        with azure_errors.translated(what):
            if place.is_container:
                # The call replaces all of it: public access would end if it were not repeated.
                await client.set_container_access_policy(
                    policies, public_access=public_access
                )
            else:
                await client.set_queue_access_policy(signed_identifiers=policies)

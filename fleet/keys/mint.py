"""Creates SAS tokens with the account key, and the stored policies that make them revocable.

A token of a policy has its own expiry, and its permissions from the policy: Azure takes each from
one of the two. It ends with whichever ends first.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from azure.storage.blob import AccessPolicy as BlobPolicy
from azure.storage.blob import ContainerSasPermissions, generate_container_sas
from azure.storage.blob.aio import ContainerClient
from azure.storage.queue import AccessPolicy as QueuePolicy
from azure.storage.queue import QueueSasPermissions, generate_queue_sas
from azure.storage.queue.aio import QueueClient

from imagefleet import errors
from imagefleet.storage.azure import account
from imagefleet.storage.azure import errors as azure_errors
from imagefleet.storage.azure.roles import (
    OPTIONAL,
    RESOURCES,
    Role,
    is_container,
    is_job_queue,
    name_of,
)
from imagefleet.storage.azure.storage import API_VERSION
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import Resource, StorageSettings

#: Azure's limit of stored policies for a queue or container.
MAX_POLICIES = 5

_NO_KEY = (
    "tokens are signed with the account key: set IMAGEFLEET_STORAGE to a connection string with"
    " AccountName and AccountKey"
)


class Place(NamedTuple):
    """A queue or container; a job queue may be a model's, and one of its shards."""

    resource: Resource
    model: str | None = None
    shard: int = 0

    def letters(self, role: Role) -> str:
        return role.letters(self.resource, self.model)

    def name(self, settings: StorageSettings) -> str:
        return name_of(settings, *self)

    def client(self, settings: StorageSettings, credential: Any = None, **terms: Any) -> Any:
        """The client of the queue or container, with a credential or the account's key."""
        address = account.read_address(settings.storage.strip())
        is_blobs = is_container(self.resource)
        open_client = address.container_client if is_blobs else address.queue_client
        return open_client(self.name(settings), credential, api_version=API_VERSION, **terms)


@dataclass(frozen=True, slots=True)
class Minted:
    """The tokens of a role by place, and the storage address without its key."""

    role: str
    storage: str
    by_place: Mapping[Place, str]
    expires_at: datetime
    policy: str | None = None

    @property
    def sas(self) -> str:
        """The tokens as the value of IMAGEFLEET_SAS."""
        return json.dumps(self.fields, separators=(",", ":"))

    @property
    def record(self) -> dict[str, Any]:
        """The content of a token file, and a broker's response."""
        return {
            "role": self.role,
            "storage": self.storage,
            "expires_at": f"{self.expires_at:%Y-%m-%dT%H:%M:%SZ}",
            **self.fields,
        }

    @property
    def fields(self) -> dict[str, Any]:
        """All tokens, as `sas.Tokens` reads them."""
        fields: dict[str, Any] = {}
        for place, token in self.by_place.items():
            of_model = fields
            if place.model is not None:
                of_model = fields.setdefault("models", {}).setdefault(place.model, {})
            if place.shard:
                others = of_model.setdefault("shards", [])
                while len(others) < place.shard:
                    others.append({})
                of_model = others[place.shard - 1]
            of_model[place.resource] = token
        return fields


class Minter:
    """Creates tokens without calling Azure; raises SetupError if there is no account key."""

    def __init__(self, settings: StorageSettings) -> None:
        address = account.read_address(settings.storage.strip())
        if not address.has_key or address.sas is not None:
            raise errors.SetupError(_NO_KEY)
        self._settings = settings
        queue = Place("queue").client(settings)
        container = Place("blob").client(settings)
        key = getattr(queue.credential, "account_key", None)
        if key is None:  # a connection string with a SAS token
            raise errors.SetupError(_NO_KEY)
        self._account = {"account_name": str(queue.account_name), "account_key": str(key)}
        self._https = queue.scheme == "https"
        self.storage = _address_without_key(queue, container, self._https)

    def mint(
        self,
        role: Role,
        life: timedelta,
        policy: str | None = None,
        models: Collection[str] = (),
        shards: int = 1,
    ) -> Minted:
        """Tokens that expire after *life*, or as soon as the stored *policy* is removed, if given.

        Those of the queues of *models*, too, and of as many *shards* of each queue.

        `store_policy` creates it. They have no start time: a node's or Azure's clock may be behind
        this one.
        """
        expires_at = (datetime.now(UTC) + life).replace(microsecond=0)
        tokens = {
            place: self._token(place, place.letters(role), expires_at, policy)
            for place in _places(role, models, shards)
        }
        return Minted(role.name, self.storage, tokens, expires_at, policy)

    def _token(self, place: Place, letters: str, expires_at: datetime, policy: str | None) -> str:
        resource, name = place.resource, place.name(self._settings)
        terms: dict[str, Any] = {
            **self._account,
            "protocol": "https" if self._https else None,
            "expiry": expires_at,
        }
        if policy is not None:
            terms["policy_id"] = policy
        else:
            terms["permission"] = _permission(resource, letters)
        if is_container(resource):
            return generate_container_sas(container_name=name, **terms)
        return generate_queue_sas(queue_name=name, **terms)


def _places(role: Role | None, models: Collection[str] = (), shards: int = 1) -> list[Place]:
    """All that the role has a token for; None: all there is."""
    queues = [each for each in RESOURCES if is_job_queue(each)]
    places = [Place(each) for each in RESOURCES]
    places += [Place(each, model) for model in models for each in queues]
    places += [
        Place(queue, model, shard)
        for shard in range(1, shards)
        for model in (None, *models)
        for queue in queues
    ]
    return [each for each in places if role is None or each.letters(role)]


async def store_policy(
    settings: StorageSettings,
    role: Role,
    name: str,
    models: Collection[str] = (),
    shards: int = 1,
) -> None:
    """Creates the stored policy *name* on each resource that *role* has a token for.

    The queues of high and low priority, those of *models* and the shards are created if they do not
    exist.

    Raises:
        SetupError: it exists with other permissions, or the resource has too many policies.
    """

    def store(place: Place, policies: dict[str, Any]) -> bool:
        resource = place.resource
        permission = str(_permission(resource, place.letters(role)))
        existing = policies.get(name)
        if existing is not None and existing.permission != permission:
            raise errors.SetupError(
                f"the policy {name!r} of {place.name(settings)!r} allows"
                f" {existing.permission!r}, not {permission!r}: use one name per role"
            )
        if existing is None and len(policies) >= MAX_POLICIES:
            raise errors.SetupError(
                f"{place.name(settings)!r} already has {MAX_POLICIES} stored policies"
                f" ({', '.join(policies)}): `imagefleet keys revoke` one of them"
            )
        kind = BlobPolicy if is_container(resource) else QueuePolicy
        policies[name] = kind(permission=permission)
        return existing is None

    places = _places(role, models, shards)
    optional = [each for each in places if each.resource in OPTIONAL or each.model or each.shard]
    await _change_policies(settings, [each for each in places if each not in optional], store)
    if models:
        async with open_storage(settings) as storage:
            for model in models:
                await storage.models.make(model)
    await _create_queues(settings, [each for each in optional if each.model is None or each.shard])
    await _change_policies(settings, optional, store)


async def policies(settings: StorageSettings, role: Role, models: Collection[str] = ()) -> set[str]:
    """The names of the policies with which all resources have the role's permissions.

    All but shards, which `store_policy` adds.
    """
    places, found = _places(role, models), list[set[str]]()

    def note(place: Place, stored: dict[str, Any]) -> bool:
        permission = str(_permission(place.resource, place.letters(role)))
        found.append({name for name, each in stored.items() if each.permission == permission})
        return False

    await _change_policies(settings, places, note, skip_missing=True)
    return set.intersection(*found) if len(found) == len(places) else set()


def is_of_broker(policy: str, name: str) -> bool:
    """True if *name* is a policy that a broker made for *policy*."""
    return bool(re.fullmatch(rf"{re.escape(policy)}-[0-9a-f]{{8}}", name))


async def remove_policy(settings: StorageSettings, name: str) -> list[str]:
    """Removes the policy *name* or a broker's for it, which revokes its tokens.

    Returns the resources that had one.
    """

    def remove(_: Place, policies: dict[str, Any]) -> bool:
        ours = [each for each in policies if each == name or is_of_broker(name, each)]
        for each in ours:
            del policies[each]
        return bool(ours)

    async with open_storage(settings) as storage:
        models = await storage.models.names()
        shards = await storage.models.most_shards()
    places = _places(None, models, shards)
    removed = await _change_policies(settings, places, remove, skip_missing=True)
    if not removed:
        raise errors.SetupError(f"there is no policy {name!r} to revoke")
    return removed


def _permission(resource: Resource, letters: str) -> QueueSasPermissions | ContainerSasPermissions:
    kind = ContainerSasPermissions if is_container(resource) else QueueSasPermissions
    return kind.from_string(letters)


async def _create_queues(settings: StorageSettings, places: Iterable[Place]) -> None:
    """Creates those that do not exist."""
    for place in places:
        async with place.client(settings) as client:
            with (
                azure_errors.translated(f"the queue {client.queue_name!r}"),
                azure_errors.tolerated({"QueueAlreadyExists"}),
            ):
                await client.create_queue()


def _address_without_key(queue: QueueClient, container: ContainerClient, https: bool) -> str:
    blob_url, queue_url = (
        client.url.partition("?")[0].rpartition("/")[0] for client in (container, queue)
    )
    if https:
        with contextlib.suppress(errors.SetupError):  # a custom domain
            if account.read_address(blob_url).queue_url == queue_url:
                return blob_url
    return f"BlobEndpoint={blob_url};QueueEndpoint={queue_url}"


async def _change_policies(
    settings: StorageSettings,
    places: Iterable[Place],
    change: Callable[[Place, dict[str, Any]], bool],
    *,
    skip_missing: bool = False,
) -> list[str]:
    """Stores the policies that *change* reports as changed; returns their resources' names.

    *skip_missing* leaves out queues and containers that do not exist.
    """
    changed = []
    for place in places:
        name = place.name(settings)
        async with place.client(settings) as client:
            with (
                azure_errors.translated(f"the stored policies of {name!r}"),
                azure_errors.tolerated(azure_errors.MISSING if skip_missing else ()),
            ):
                policies = await _read_policies(client)
                if change(place, policies):
                    await _write_policies(client, policies)
                    changed.append(name)
    return changed


async def _read_policies(client: QueueClient | ContainerClient) -> dict[str, Any]:
    if isinstance(client, QueueClient):
        return dict(await client.get_queue_access_policy())
    found = await client.get_container_access_policy()
    return {each.id: each.access_policy for each in found["signed_identifiers"]}


async def _write_policies(client: QueueClient | ContainerClient, policies: dict[str, Any]) -> None:
    if isinstance(client, QueueClient):
        await client.set_queue_access_policy(signed_identifiers=policies)
        return
    # The call replaces all of it: public access would end if it were not repeated.
    found = await client.get_container_access_policy()
    await client.set_container_access_policy(policies, public_access=found["public_access"])

"""Finds the permissions of the credentials in use with requests that change nothing.

Azure checks a request's permission first. So each request is one that cannot succeed: for a missing
message or blob, or with conditions that contradict each other.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import parse_qs

from azure.core import MatchConditions
from azure.core.credentials import AzureSasCredential
from azure.core.exceptions import HttpResponseError
from azure.storage.blob.aio import ContainerClient
from azure.storage.queue.aio import QueueClient

from fleet.keys.mint import Place
from imagefleet import errors
from imagefleet.storage.azure import account, sas
from imagefleet.storage.azure import errors as azure_errors
from imagefleet.storage.azure.credentials import Credentials
from imagefleet.storage.azure.queue import shards_of
from imagefleet.storage.azure.roles import (
    OPTIONAL,
    RESOURCES,
    is_container,
    is_job_queue,
)
from imagefleet.storage.settings import Resource, StorageSettings

#: The id and the receipt of a message that does not exist.
_NO_MESSAGE = ("00000000-0000-0000-0000-000000000000", "AgAAAAMAAAAAAAAAAAAAAAAAAAA=")
_NO_BLOB = ".imagefleet-check"

#: Refused for another reason than the request: the credential as a whole, or too many requests.
_NOT_AN_ANSWER = frozenset({401, 403, 408, 429})

QUEUE_PROBES: Mapping[str, Callable[[QueueClient], Awaitable[Any]]] = {
    "r": lambda queue: queue.peek_messages(1),
    # Invalid: the message would expire before it becomes visible.
    "a": lambda queue: queue.send_message("{}", visibility_timeout=60, time_to_live=1),
    "u": lambda queue: queue.update_message(*_NO_MESSAGE, visibility_timeout=1),
    "p": lambda queue: queue.delete_message(*_NO_MESSAGE),
}
BLOB_PROBES: Mapping[str, Callable[[ContainerClient], Awaitable[Any]]] = {
    "r": lambda blobs: blobs.get_blob_client(_NO_BLOB).get_blob_properties(),
    "a": lambda blobs: blobs.get_blob_client(_NO_BLOB).append_block(b"-"),
    # Only over a blob with this ETag, which none has.
    "c": lambda blobs: blobs.upload_blob(
        _NO_BLOB, b"", overwrite=True, etag='"0x0"', match_condition=MatchConditions.IfNotModified
    ),
    "w": lambda blobs: blobs.get_blob_client(_NO_BLOB).set_blob_metadata({}),
    "d": lambda blobs: blobs.delete_blob(_NO_BLOB),
    "l": lambda blobs: anext(aiter(blobs.list_blob_names(results_per_page=1)), None),
}


@dataclass(frozen=True, slots=True)
class Checked:
    """The permissions on one resource; *until* is None where the token does not say."""

    resource: Resource
    name: str
    allowed: str
    denied: str
    until: datetime | None
    policy: str | None


async def check(settings: StorageSettings) -> list[Checked]:
    """Tries every permission on all resources and shards; raises SetupError if one is missing."""
    credentials = Credentials(account.read_address(settings.storage.strip()), settings)
    checked = []
    try:
        for resource in RESOURCES:
            checked.append(await _check(settings, credentials, Place(resource)))
            if is_job_queue(resource) and checked[-1].allowed:
                for shard in range(1, await _shards(settings, credentials, resource)):
                    place = Place(resource, None, shard)
                    checked.append(await _check(settings, credentials, place))
    finally:
        await credentials.close()
    return checked


async def _check(settings: StorageSettings, credentials: Credentials, place: Place) -> Checked:
    access, allowed = credentials.of(*place), ""
    probes = BLOB_PROBES if is_container(place.resource) else QUEUE_PROBES
    async with place.client(settings, access.credential, retry_total=0) as client:
        try:
            for letter, probe in probes.items():
                if await access.attempt(letter, functools.partial(_is_allowed, probe, client)):
                    allowed += letter
        except errors.MissingResourceError as error:
            has_token = not isinstance(error, errors.NoTokenError)
            if has_token and place.resource not in OPTIONAL:
                raise
            allowed = ""
    denied = "".join(letter for letter in probes if letter not in allowed)
    credential = access.credential
    token = ""
    if allowed and isinstance(credential, AzureSasCredential):
        token = credential.signature
    (policy,) = parse_qs(token).get("si", [None])
    name = place.name(settings)
    return Checked(place.resource, name, allowed, denied, sas.expiry(token), policy)


async def _shards(settings: StorageSettings, credentials: Credentials, resource: Resource) -> int:
    """The shards of a job queue; those that there are tokens for, where it cannot be read."""
    access = credentials.of(resource)
    granted = credentials.shards(resource, None)
    async with Place(resource).client(settings, access.credential, retry_total=0) as client:
        try:
            found = await access.attempt("r", client.get_queue_properties)
        except errors.SetupError:
            return granted
    return max(granted, shards_of(found).made)


async def _is_allowed(probe: Callable[[Any], Awaitable[Any]], client: Any) -> bool:
    try:
        await probe(client)
    except HttpResponseError as error:
        code, status = azure_errors.code_of(error), error.status_code or 0
        if code in azure_errors.LESS_PERMISSION:
            return False
        is_client_error = 400 <= status < 500 and status not in _NOT_AN_ANSWER  # noqa: PLR2004
        if code in azure_errors.MISSING or not is_client_error:
            raise
    return True

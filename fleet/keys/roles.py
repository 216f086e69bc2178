"""The least permissions on Azure Storage that each kind of process needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from imagefleet.storage.settings import Resource, StorageSettings

RESOURCES: tuple[Resource, ...] = ("queue", "poison", "blob")

#: What each permission of a SAS token allows.
QUEUE_PERMISSIONS: Mapping[str, str] = {
    "r": "count and peek at messages",
    "a": "add messages",
    "u": "renew and hand back leased messages",
    "p": "lease and delete messages",
}
BLOB_PERMISSIONS: Mapping[str, str] = {
    "r": "read blobs",
    "c": "create blobs, never overwrite one",
    "w": "overwrite blobs",
    "d": "delete blobs",
    "l": "list blobs",
}


@dataclass(frozen=True, slots=True)
class Role:
    """A kind of process and its permissions on each resource; no token without any."""

    name: str
    what: str
    queue: str
    poison: str = ""
    blob: str = ""

    def letters(self, resource: Resource) -> str:
        letters: str = getattr(self, resource)
        return letters


ROLES: Mapping[str, Role] = {
    role.name: role
    for role in (
        Role(
            "worker",
            "workers, which may run on untrusted machines",
            # Reading the queue gives nothing away: a worker may process every message. The depth
            # gauges and --until-empty need it.
            queue="rup",
            poison="a",
            blob="rc",
        ),
        Role("load", "`imagefleet load` on existing queues", queue="a"),
        Role(
            "monitor",
            "the read-only commands `status`, `exporter`, `scale` and `report`",
            queue="r",
            poison="r",
            blob="rl",
        ),
        Role(
            "operator",
            "`imagefleet failed`: list, replay and discard failed jobs",
            queue="ra",
            poison="rup",
            blob="r",
        ),
    )
}


def name_of(settings: StorageSettings, resource: Resource) -> str:
    """The name of the queue or container."""
    if resource == "blob":
        return settings.container
    return settings.queue if resource == "queue" else settings.poison_queue


def explain(resource: Resource, letters: Iterable[str]) -> list[str]:
    """What each of the letters allows."""
    words = BLOB_PERMISSIONS if resource == "blob" else QUEUE_PERMISSIONS
    return [words.get(letter, letter) for letter in letters]

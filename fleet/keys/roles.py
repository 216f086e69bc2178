"""Who needs which permissions of Azure Storage: the least, found by taking each away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from imagefleet.storage.settings import Resource, StorageSettings

RESOURCES: tuple[Resource, ...] = ("queue", "poison", "blob")

#: What a letter of a SAS token allows, of those that a role here has.
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
    """A kind of process, and the letters that it needs on each resource; none for no token."""

    name: str
    what: str
    queue: str
    poison: str = ""
    blob: str = ""

    def letters(self, resource: Resource) -> str:
        return {"queue": self.queue, "poison": self.poison, "blob": self.blob}[resource]


ROLES: Mapping[str, Role] = {
    role.name: role
    for role in (
        Role(
            "worker",
            "workers, which may sit on strangers' machines",
            # Who may process messages sees them all the same, so counting them gives nothing
            # away; --until-empty and the gauges of the queue's depth need it.
            queue="rup",
            poison="a",
            blob="rc",
        ),
        Role("load", "`imagefleet load`, where the queues are there already", queue="a"),
        Role(
            "monitor",
            "`imagefleet status`, `top`, `exporter`, `scale` and `report`, which change nothing",
            queue="r",
            poison="r",
            blob="rl",
        ),
        Role(
            "operator",
            "`imagefleet failed`, which lists, replays and discards failed jobs",
            queue="ra",
            poison="rup",
            blob="r",
        ),
    )
}


def name_of(settings: StorageSettings, resource: Resource) -> str:
    """The name of the queue or container."""
    names = {
        "queue": settings.queue,
        "poison": settings.poison_queue,
        "blob": settings.container,
    }
    return names[resource]


def explain(resource: Resource, letters: str) -> list[str]:
    """What the letters allow, in words."""
    words = BLOB_PERMISSIONS if resource == "blob" else QUEUE_PERMISSIONS
    return [words.get(letter, letter) for letter in letters]

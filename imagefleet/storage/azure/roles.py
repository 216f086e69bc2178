"""The least permissions on Azure Storage that each kind of process needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import get_args

from imagefleet.storage.settings import Priority, Resource, StorageSettings

RESOURCES: tuple[Resource, ...] = get_args(Resource)

JOB_QUEUES: Mapping[Priority, Resource] = {
    "high": "queue_high",
    "normal": "queue",
    "low": "queue_low",
}

#: The queues of the other priorities; a worker does without.
OPTIONAL: frozenset[Resource] = frozenset({"queue_high", "queue_low"})

#: Stands for a permission where a request needs a valid token of the resource, whatever it allows.
ANY_PERMISSION = "*"

#: What each permission of a SAS token allows.
QUEUE_PERMISSIONS = {
    "r": "count and peek at messages",
    "a": "add messages",
    "u": "renew and hand back leased messages",
    "p": "lease and delete messages",
}
BLOB_PERMISSIONS = {
    "r": "read blobs",
    "c": "create blobs, never overwrite one",
    "a": "append to records",
    "w": "overwrite blobs",
    "d": "delete blobs",
    "l": "list blobs",
}


#: Azure's roles for identities: the least that has each permission. To update a message, the roles
#: for processing messages do not suffice.
_AZURE_QUEUE_ROLES = {
    "r": "Storage Queue Data Reader",
    "a": "Storage Queue Data Message Sender",
    "u": "Storage Queue Data Contributor",
    "p": "Storage Queue Data Message Processor",
}


@dataclass(frozen=True, slots=True)
class Role:
    """A kind of process and its permissions; *queue* is for the job queue of each priority."""

    name: str
    what: str
    queue: str = ""
    poison: str = ""
    blob: str = ""
    packs: str = ""
    files: str = ""

    def letters(self, resource: Resource, model: str | None = None) -> str:
        letters: str = getattr(self, "queue" if resource in OPTIONAL else resource)
        if model is not None and "p" in letters and "a" not in letters:
            # A job in the wrong queue is moved; whoever may rewrite jobs may as well add some.
            letters += "a"
        return letters

    def for_chains(self) -> Role:
        """A worker's where jobs have several stages: it reads images, and adds jobs."""
        return replace(self, queue="raup", blob="rac")


ROLES = {
    role.name: role
    for role in (
        Role(
            "worker",
            "workers, which may run on untrusted machines",
            # Reading the queue gives nothing away: a worker may process every message. The depth
            # gauges and --until-empty need it.
            queue="rup",
            poison="a",
            blob="ac",
            # A pack's name cannot be guessed, so it reads those of its own bundles.
            packs="rc",
            files="r",
        ),
        Role(
            "trusted-worker",
            "workers on machines of your own, which share the kernels that they compile",
            queue="rup",
            poison="a",
            blob="ac",
            packs="rc",
            files="rc",
        ),
        # It notes which jobs it has sent, and reads that and which campaigns are cancelled.
        Role(
            "load",
            "`imagefleet load` on existing queues",
            queue="a",
            blob="ac",
            # The name of a blob there is the secret that bundles' names follow from.
            packs="cl",
            files="rac",
        ),
        Role(
            "monitor",
            "the read-only commands: `status`, `exporter`, `scale`, `results`,"
            " `export`, `report`, `gallery`, `verify`, `failed` and `webhooks`",
            queue="r",
            poison="r",
            blob="rl",
            packs="rl",
            # What was sent, and what the operator has replayed, discarded and replaced.
            files="rl",
        ),
        Role(
            "operator",
            "`imagefleet replay`, `discard`, `redo`, `cancel`, `sweep` and `verify --quarantine`",
            queue="ra",
            poison="rup",
            blob="racdl",
            packs="rcl",
            files="racwdl",
        ),
        Role(
            "files",
            "`imagefleet files`, which adds, lists and removes what workers read",
            files="rcwdl",
        ),
    )
}


def name_of(
    settings: StorageSettings, resource: Resource, model: str | None = None
) -> str:
    """The name of the queue or container; a job queue may be a *model*'s."""
    queues = {
        JOB_QUEUES[each]: name for each, name in settings.queues_of(model).items()
    }
    names = {
        **queues,
        "poison": settings.poison_queue,
        "blob": settings.container,
        "packs": settings.packs_container,
        "files": settings.files_container,
    }
    return names[resource]


def is_container(resource: Resource) -> bool:
    return resource in {"blob", "packs", "files"}


def with_permission(resource: Resource, letter: str) -> list[Role]:
    """The roles that have it, the one with the fewest permissions first."""
    able = (
        role
        for role in ROLES.values()
        if role.letters(resource) and letter in role.letters(resource) + ANY_PERMISSION
    )
    return sorted(
        able, key=lambda role: sum(len(role.letters(each)) for each in RESOURCES)
    )


def azure_role(resource: Resource, letter: str) -> str:
    """The least of Azure's own roles that gives an identity this permission."""
    if is_container(resource):
        return (
            f"Storage Blob Data {'Reader' if letter in {'r', 'l'} else 'Contributor'}"
        )
    return _AZURE_QUEUE_ROLES.get(letter, "Storage Queue Data Contributor")


def explain(resource: Resource, letters: Iterable[str]) -> list[str]:
    words = BLOB_PERMISSIONS if is_container(resource) else QUEUE_PERMISSIONS
    return [words.get(letter, letter) for letter in letters]

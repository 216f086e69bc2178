"""Settings of the storage, which every command shares."""

import base64
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from imagefleet import signing
from imagefleet.errors import SetupError
from imagefleet.redaction import WebAddress

LOCAL_SCHEME = "local:"

#: Azure's rule for names of queues and containers, with space left for `-poison`.
_AZURE_NAME = re.compile(r"(?=.{3,56}$)[a-z0-9](-?[a-z0-9])*")

#: Azure's limit for the name of a queue.
MAX_CHARACTERS = 63

_HASH_CHARACTERS = 10

#: The longest `--queue` where jobs name models: the slug keeps six characters.
MAX_BASE_CHARACTERS = 40

_NOT_IN_A_SLUG = re.compile("[^a-z0-9]+")


def _azure_name(name: str) -> str:
    if not _AZURE_NAME.fullmatch(name):
        raise ValueError(
            "should be 3 to 56 lower-case letters, digits and single hyphens"
        )
    return name


AzureName = Annotated[str, AfterValidator(_azure_name)]


def _public_keys(text: str) -> str:
    signing.TrustedKeys.read(text)
    return text


#: One or more public keys, separated by commas.
PublicKeys = Annotated[str, AfterValidator(_public_keys)]

#: What a SAS token is for: the job queues, that of normal priority first, the poison queue, the
#: containers of images, of packs of images, and of LoRAs and models.
Resource = Literal[
    "queue", "queue_high", "queue_low", "poison", "blob", "packs", "files"
]

Priority = Literal["high", "normal", "low"]

#: The priorities, in the order in which workers take jobs.
PRIORITIES: tuple[Priority, ...] = get_args(Priority)


def checked_priority(text: str) -> Priority:
    """Raises SetupError for what is no priority."""
    if text in PRIORITIES:
        return text
    raise SetupError(
        f"the priority {text[:80]!r} is not one of {', '.join(PRIORITIES)}"
    )


def job_queue(base: str, model: str | None = None, priority: str = "normal") -> str:
    """The name of the queue of a model's jobs, or of those without one.

    That of a model is `jobs-SLUG-HASH`: SLUG is what fits of the model's name, HASH is of
    the exact name, so that no two models share a queue (by chance, one pair in 10^15). Raises
    SetupError if *base* leaves no room for the rest.
    """
    if model is not None:
        if len(base) > MAX_BASE_CHARACTERS:
            raise SetupError(
                f"the queue name {base!r} is too long for jobs that name a model: --queue should"
                f" have {MAX_BASE_CHARACTERS} characters at most"
            )
        digest = hashlib.blake2b(model.encode(), digest_size=8).digest()
        text = base64.b32encode(digest).decode().lower()[:_HASH_CHARACTERS]
        room = MAX_CHARACTERS - len("-high") - _HASH_CHARACTERS - len(base) - 2
        slug = _NOT_IN_A_SLUG.sub("-", model.lower())[:room].strip("-")
        base = "-".join(filter(None, (base, slug, text)))
    return base if priority == "normal" else f"{base}-{priority}"


def priority_of(queue: str) -> Priority:
    """The priority of a job queue's jobs, by its name."""
    return next((each for each in PRIORITIES if queue.endswith(f"-{each}")), "normal")


def local_folder(address: str) -> Path | None:
    """The folder that a storage's address names; None for an account of Azure."""
    address = address.strip()
    if not address.startswith(LOCAL_SCHEME):
        return None
    return Path(address.removeprefix(LOCAL_SCHEME)).expanduser()


class StorageSettings(BaseSettings):
    """Each field is a flag and a variable: `queue` is `--queue` and `IMAGEFLEET_QUEUE`."""

    model_config = SettingsConfigDict(
        env_prefix="IMAGEFLEET_",
        env_ignore_empty=True,
        extra="forbid",
        hide_input_in_errors=True,
    )

    storage: str = Field(
        default="local:./imagefleet-data",
        repr=False,  # a connection string holds the account's key
        description="Storage of jobs and images: local:FOLDER for one machine, or an Azure Storage"
        " account's connection string or URL (https://ACCOUNT.blob.core.windows.net).",
    )
    queue: AzureName = Field(
        default="jobs",
        description="Name of the job queue; jobs of high and low priority are in NAME-high and"
        " NAME-low, jobs that name a model in NAME-MODEL-HASH, and failed jobs in NAME-poison.",
    )
    container: AzureName = Field(
        default="images", description="Blob container for the images."
    )
    files_container: AzureName = Field(
        default="files",
        description="Blob container for LoRAs and models, which workers only read.",
    )
    sas: SecretStr | None = Field(
        default=None,
        description="SAS tokens if --storage holds no key: JSON with queue, queue_high,"
        " queue_low, poison, blob and files, as `imagefleet keys` prints it, or one token of the"
        " whole account.",
    )
    sas_file: Path | None = Field(
        default=None,
        description="File with that JSON instead; it is read again when it changes, so that tokens"
        " are renewed without a restart.",
    )
    broker_url: WebAddress | None = Field(
        default=None,
        repr=False,  # people append a token
        pattern=r"^https://[^\s@]+$",
        description="Service that issues SAS tokens to workers on SaladCloud, which authenticate"
        " with their node's identity token, and renews them before they expire.",
    )

    @property
    def local_folder(self) -> Path | None:
        """The folder of a local storage; None for an account of Azure."""
        return local_folder(self.storage)

    @property
    def is_local(self) -> bool:
        """True if it is a folder of this machine, whose polls are cheap and need no tokens."""
        return self.local_folder is not None

    @property
    def is_billed(self) -> bool:
        """True if its operations cost money."""
        return not self.is_local

    def queues_of(self, model: str | None) -> Mapping[Priority, str]:
        """The names of a model's job queues, in the order in which workers take jobs."""
        return {each: job_queue(self.queue, model, each) for each in PRIORITIES}

    @property
    def packs_container(self) -> str:
        """The container of packs, which hold the images of bundles of jobs."""
        return f"{self.container}-packs"

    @property
    def poison_queue(self) -> str:
        """The queue of failed jobs, whatever their model."""
        return f"{self.queue}-poison"

    @model_validator(mode="after")
    def _check_containers(self) -> Self:
        if self.files_container in {self.container, self.packs_container}:
            raise ValueError(
                "files_container must differ from container and its packs: whoever stores images"
                " could replace LoRAs and models"
            )
        return self


class SignerSettings(StorageSettings):
    """Settings of what fills the queue, replays failed jobs and adds files; never a worker's."""

    signing_key: Path | None = Field(
        default=None,
        description="File of the private key (`imagefleet keys mint signing`) that signs jobs and"
        " the list of LoRAs and models, for workers with --trusted-key.",
    )
    trusted_key: PublicKeys | None = Field(
        default=None,
        repr=False,  # the private key, if somebody mistakes the two
        description="Public keys, besides --signing-key's, whose signatures count when failed jobs"
        " are sent again, and in exports.",
    )

    def keys(self) -> signing.Keys:
        """The keys that these settings name; raises SetupError if a file is missing or wrong."""
        own = (
            None
            if self.signing_key is None
            else signing.SigningKey.read(self.signing_key)
        )
        names = [key for key in (own and own.public, self.trusted_key) if key]
        return signing.Keys(own, signing.trusted_keys(",".join(names)))

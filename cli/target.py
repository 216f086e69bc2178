"""The argument `CAMPAIGN[/ID]`: the campaign, or one of its jobs, that a command acts on."""

from typing import Annotated, NamedTuple, TypeVar

from pydantic import TypeAdapter
from typer import Argument

from imagefleet import validation
from imagefleet.errors import SetupError
from imagefleet.job.message import DEFAULT_CAMPAIGN, SafeId, fields_if_any, job_key
from imagefleet.records import reader
from imagefleet.storage.open import Storage
from imagefleet.storage.protocol import Message

Campaign = Annotated[
    str,
    Argument(metavar="CAMPAIGN", help="Jobs without a campaign are in 'default'."),
]
OnlyCampaign = Annotated[
    str | None, Argument(metavar="CAMPAIGN", help="Only this campaign.")
]
OnlyJobs = Annotated[
    str | None,
    Argument(
        metavar="CAMPAIGN[/ID]", help="Only this campaign, or this one of its jobs."
    ),
]

Text = TypeVar("Text", str, str | None)


class Target(NamedTuple):
    """A campaign and, where one is named, the id of a job in it; None stands for all."""

    campaign: str | None = None
    id: str | None = None

    @property
    def prefix(self) -> str:
        """Start of the names of its images; other jobs' names may begin so, too."""
        return "" if self.campaign is None else f"{self.campaign}/{self.id or ''}"

    def __str__(self) -> str:
        return (
            job_key(self.campaign, self.id)
            if self.id
            else self.campaign or "all campaigns"
        )


def read(text: str | None) -> Target:
    """The target that *text* names; raises SetupError for what cannot be a name."""
    if text is None:
        return Target()
    campaign, slash, job_id = text.partition("/")
    check_name("CAMPAIGN", campaign)
    if slash:
        check_name("ID", job_id)
    return Target(campaign, job_id or None)


def images(text: str | None) -> Target:
    """Reads a target as `read` does, but takes the name of an image, which the storage judges."""
    named, _, name = (text or "").partition("/")
    return read(named or text)._replace(id=name or None)


def campaign(text: Text) -> Text:
    """The campaign that *text* names; raises SetupError for anything else."""
    found = read(text)
    if found.id is not None:
        raise SetupError(f"{text} is one job: give its campaign, {found.campaign}")
    return text


def check_name(what: str, name: str | None) -> None:
    """Raises SetupError for what no campaign and no job can be called; None is not given."""
    with validation.as_error(SetupError, f"{what}: "):
        TypeAdapter[str | None](SafeId | None).validate_python(name)


async def check_campaign(storage: Storage, name: str | None) -> str | None:
    """Raises SetupError for a campaign that does not exist, with the name that is close.

    A campaign exists once it has a record, an image or a message; None stands for all campaigns.
    Azure does not show what most messages are: a campaign may then exist that has nothing else,
    and the sentence that is returned says so.
    """
    if name is None:
        return None
    names = [known async for known in reader.campaigns(storage)]
    if name in names:
        return None
    async for _ in storage.blobs.names(f"{name}/"):
        return None
    messages = (await storage.queue.depth()).messages
    if messages and await find_message(storage, Target(name)):
        return None
    hint = validation.suggestion(name, names)
    missing = f"campaign {name!r} has no records, images or messages in {storage.url}"
    if messages and not storage.queue.is_local:
        return (
            f"{missing} that can be seen{hint}; the queue {storage.queue.name} holds"
            f" {messages:,} messages, and Azure shows only the first of them"
        )
    raise SetupError(missing + (hint or "; `imagefleet status` lists the campaigns"))


async def unknown_job(storage: Storage, named: Target) -> SetupError:
    """The error for a job that has no image, record or message."""
    await check_campaign(storage, named.campaign)
    return SetupError(
        f"job {str(named)!r} has no image, record or message in {storage.url}: was it sent?"
    )


async def find_message(storage: Storage, named: Target) -> tuple[Message, bool] | None:
    """A message of the target in the job queue and whether it is leased, as far as is shown."""
    text = named.id or (
        "" if named.campaign == DEFAULT_CAMPAIGN else named.campaign or ""
    )
    async for message, is_leased in storage.queue.find(text):
        fields = fields_if_any(message.body)
        if not fields or (named.id and fields.get("verify")):
            continue
        of = Target(fields.get("campaign") or DEFAULT_CAMPAIGN, fields.get("id"))
        job_id = of.id or message.id
        if of.campaign == named.campaign and named.id in {None, job_id}:
            return message, is_leased
    return None

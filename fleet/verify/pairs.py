"""Pairs of drawings by two workers, and which workers draw wrong by them."""

import asyncio
import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from cli.console import Move
from cli.target import Target
from imagefleet import concurrency, likeness
from imagefleet.errors import UnusableFileError
from imagefleet.files import picture
from imagefleet.job.chain import SEPARATOR
from imagefleet.job.message import CHECKS, COMPARABLE_STEPS
from imagefleet.job.names import DUPLICATES
from imagefleet.records import catalog, decisions, pictures
from imagefleet.records import record as records
from imagefleet.records.record import Spot
from imagefleet.storage.open import Storage
from imagefleet.storage.proofs import Proofs, machine_of
from worker.inputs.pictures import parameters

#: In an image's parameters, in the last of the lines that begin so.
_STEPS = re.compile(r"^Steps: (\d{1,3}),", re.MULTILINE)

#: Pairs read at once: two images each, some 400 KB in all.
CONCURRENCY = 16

#: An image without a worker's record: no worker stored it.
NO_RECORD = ""

#: `not_there`: the image is not drawn yet; `few_steps`: it may come out different rightly;
#: `unproven`: anybody with a token may have stored the second drawing.
Result = Literal[
    "alike",
    "different",
    "same_worker",
    "not_there",
    "unreadable",
    "few_steps",
    "other_job",
    "unproven",
]

RESULTS: Mapping[Result, str] = {
    "alike": "pairs alike",
    "different": "pairs that differ",
    "same_worker": "pairs by one worker twice",
    "not_there": "pairs without their image",
    "unreadable": "pairs without a readable image",
    "few_steps": "pairs of too few steps",
    "other_job": "pairs of different jobs, not comparable",
    "unproven": "pairs without proof of their worker",
}


@dataclass(slots=True)
class Pair:
    """An image and its second drawing; `not_there` until they are compared."""

    image: str
    second: str
    #: The worker of the image, and that of the second drawing.
    workers: tuple[str, str]
    #: The time at which the second drawing was stored.
    drawn_at: datetime
    result: Result = "not_there"
    distance: float | None = None
    note: str | None = None
    #: The second drawing's job, of which the image must be, too.
    digest: str | None = None


async def listed(
    storage: Storage, named: Target, since: datetime | None
) -> AsyncIterator[Pair]:
    """The second drawings and duplicates in the storage that were stored since then."""
    for prefix in (CHECKS, DUPLICATES):
        async for record in storage.blobs.records(prefix + named.prefix):
            if named.id is not None and record.metadata.get("job") != named.id:
                continue
            if since is None or record.created_at >= since:
                name = record.name.removeprefix(prefix)
                image = name if prefix == CHECKS else name.rpartition("/")[0]
                workers = NO_RECORD, record.metadata.get("worker", NO_RECORD)
                yield Pair(
                    image,
                    record.name,
                    workers,
                    record.created_at,
                    digest=record.metadata.get("digest"),
                )


async def compare(storage: Storage, pairs: Iterable[Pair], on_pair: Move) -> None:
    proofs = await storage.proofs()
    pairs = list(pairs)
    packed = await _packed(storage, pairs)

    async def work(pair: Pair) -> None:
        await _compare(storage, proofs, pair, packed.get(pair.image))
        on_pair()

    await concurrency.for_each(pairs, work, CONCURRENCY)


async def _packed(
    storage: Storage, pairs: Iterable[Pair]
) -> dict[str | None, records.Record]:
    """The records of images in packs by name, in campaigns of which second drawings are."""
    found = {}
    keys = {pair.image.rpartition(".")[0].partition(SEPARATOR)[0] for pair in pairs}
    for campaign in {key.partition("/")[0] for key in keys}:
        shards = await catalog.shards_of(storage, campaign)
        images = await decisions.packed_images(storage, shards, keys)
        for record, stored in await decisions.stored_of(storage, images):
            if stored:
                found[record.blob] = record
    return found


async def _compare(
    storage: Storage, proofs: Proofs | None, pair: Pair, packed: records.Record | None
) -> None:
    facts = await storage.blobs.metadata(pair.image)
    if facts is None and packed is not None:
        facts = {"worker": packed.worker, "digest": str(packed.digest)}
    else:
        packed = None
    if facts is None:
        return
    pair.workers = facts.get("worker", NO_RECORD), pair.workers[1]
    if pair.digest is None or facts.get("digest") != pair.digest:
        pair.result = "other_job"
        return
    if proofs is None and len(set(pair.workers)) == 1:
        pair.result = "same_worker"
        return
    spots = packed.spot if packed else Spot(pair.image), Spot(pair.second)
    first, second = [await _read(storage, spot) for spot in spots]
    if first is None or second is None:  # deleted meanwhile, for a redo
        return
    if proofs is not None:
        told = await storage.blobs.metadata(pair.second) or {}
        author = proofs.author(pair.image, facts, first)
        if packed and proofs.accept(packed.worker, packed.claims, packed.proof):
            is_file = hashlib.sha256(first).hexdigest() == packed.sha256
            author = packed.worker if is_file else None
        pair.workers = (
            author or NO_RECORD,
            proofs.author(pair.second, told, second) or NO_RECORD,
        )
        if pair.workers[1] == NO_RECORD:
            pair.result = "unproven"
            return
    if len(set(pair.workers)) == 1:
        pair.result = "same_worker"
    else:
        pair.result, pair.distance, pair.note = await asyncio.to_thread(
            _judge, first, second
        )


async def _read(storage: Storage, spot: Spot) -> bytes | None:
    try:
        return await pictures.read(storage, spot)
    except UnusableFileError:  # too large for an image
        return b"too large"


def _judge(first: bytes, second: bytes) -> tuple[Result, float | None, str | None]:
    a = picture.read(first)
    b = picture.read(second)
    if a is None and b is None:
        return "unreadable", None, None
    if a is None or b is None:
        return (
            "different",
            None,
            "the image cannot be read" if a is None else "its second cannot",
        )
    if a.size != b.size:
        return "different", None, "sizes {}x{} and {}x{}".format(*a.size, *b.size)
    distance = likeness.distance(a.fingerprint, b.fingerprint)
    if distance < likeness.SAME_BELOW:
        return "alike", distance, None
    few = max(_steps(first), _steps(second)) < COMPARABLE_STEPS
    return "few_steps" if few else "different", distance, None


def _steps(data: bytes) -> int:
    """Steps that an image was drawn in, by its parameters: a model may have its own number."""
    told = _STEPS.findall(parameters(data))
    return int(told[-1]) if told else COMPARABLE_STEPS


#: A worker is named once pairs with so many other machines speak against it: one differing pair
#: does not tell which of its two is wrong.
ENOUGH_WITNESSES = 2

#: Added to the pairs of each worker, so that one differing pair of one is not a share of 100 %.
_PRIOR_PAIRS = 4


@dataclass(frozen=True, slots=True)
class Record:
    """One worker's pairs; *witnesses*: the other machines whose pairs speak against it."""

    worker: str
    compared: int
    different: int
    witnesses: int

    @property
    def draws_wrong(self) -> bool:
        return self.worker != NO_RECORD and self.witnesses >= ENOUGH_WITNESSES

    @property
    def is_for_quarantine(self) -> bool:
        """True if nothing speaks for it, either.

        Without proofs, who stores a drawing writes any worker's name beside it, so false drawings
        can speak against anybody. But who may not read images makes none alike without drawing it.
        """
        return self.draws_wrong and self.compared == self.different


def judge(pairs: Sequence[Pair]) -> list[Record]:
    """The record of each worker, those that draw wrong first.

    A differing pair speaks against the worker of which a larger share of pairs differs; against
    neither if they are equal.
    """
    compared = Counter[str]()
    different = Counter[str]()
    for pair in pairs:
        if pair.result in {"alike", "different"}:
            compared.update(pair.workers)
        if pair.result == "different":
            different.update(pair.workers)
    shares = {
        each: different[each] / (compared[each] + _PRIOR_PAIRS) for each in compared
    }
    shares[NO_RECORD] = math.inf  # what no worker stored speaks against no worker
    witnesses = defaultdict(set)
    for pair in pairs:
        other, suspect = sorted(pair.workers, key=lambda each: shares.get(each, 0))
        if pair.result == "different" and shares[suspect] != shares[other]:
            # A machine has as many names as processes, and proves each.
            witnesses[suspect].add(machine_of(other) or other)
    return sorted(
        (
            Record(each, compared[each], different[each], len(witnesses[each]))
            for each in compared
        ),
        key=lambda each: (-each.witnesses, -each.different, each.worker),
    )


def undecided(pairs: Sequence[Pair], records: Sequence[Record]) -> list[Pair]:
    """The differing pairs of which it is not known who drew wrong."""
    wrong = {each.worker for each in records if each.draws_wrong} | {NO_RECORD}
    return [
        pair
        for pair in pairs
        if pair.result == "different" and wrong.isdisjoint(pair.workers)
    ]

"""Pairs of drawings by two workers, and which workers draw wrong by them."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from fleet.campaigns.target import Target
from imagefleet import concurrency, errors, likeness
from imagefleet.files import picture
from imagefleet.job.message import CHECKS, COMPARABLE_STEPS, DUPLICATES, MAX_IMAGE_BYTES
from imagefleet.storage.open import Storage

#: Pairs read at once: two images each, some 400 KB in all.
CONCURRENCY = 16

#: An image without a worker's record: no worker stored it.
NO_RECORD = ""

Result = Literal["alike", "different", "same_worker", "not_there", "unreadable", "few_steps"]
"""`not_there`: the image is not drawn yet; `few_steps`: it may come out different rightly."""


@dataclass(frozen=True, slots=True)
class Second:
    """The second drawing of an image, as listed."""

    image: str
    blob: str
    worker: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Pair:
    """What came of comparing an image with its second drawing."""

    image: str
    second: str
    workers: tuple[str, str]
    """The worker of the image, and that of the second drawing."""
    result: Result
    distance: float | None = None
    note: str | None = None


async def listed(storage: Storage, named: Target, since: datetime | None) -> AsyncIterator[Second]:
    """The second drawings and duplicates in the storage that were stored since then."""
    for prefix in (CHECKS, DUPLICATES):
        async for record in storage.blobs.records(prefix + named.prefix):
            if named.id is not None and record.metadata.get("job") != named.id:
                continue
            if since is None or record.created_at >= since:
                name = record.name.removeprefix(prefix)
                image = name if prefix == CHECKS else name.rpartition("/")[0]
                yield Second(
                    image, record.name, record.metadata.get("worker", NO_RECORD), record.created_at
                )


async def compare(
    storage: Storage, seconds: Sequence[Second], on_pair: Callable[[], None]
) -> list[Pair]:
    """Compares each second drawing with its image, some at once, in the order given."""
    pairs: list[Pair | None] = [None] * len(seconds)

    async def work(place: int) -> None:
        pairs[place] = await _compare(storage, seconds[place])
        on_pair()

    await concurrency.for_each(range(len(seconds)), work, CONCURRENCY)
    return [pair for pair in pairs if pair is not None]


async def _compare(storage: Storage, second: Second) -> Pair:
    facts = await storage.blobs.metadata(second.image)
    if facts is None:
        return Pair(second.image, second.blob, (NO_RECORD, second.worker), "not_there")
    workers = facts.get("worker", NO_RECORD), second.worker
    if len(set(workers)) == 1:
        return Pair(second.image, second.blob, workers, "same_worker")
    first, other = [await _read(storage, name) for name in (second.image, second.blob)]
    if first is None or other is None:  # deleted meanwhile, for a redo
        return Pair(second.image, second.blob, workers, "not_there")
    result, distance, note = await asyncio.to_thread(_judge, first, other)
    return Pair(second.image, second.blob, workers, result, distance, note)


async def _read(storage: Storage, name: str) -> bytes | None:
    try:
        return await storage.blobs.read(name, MAX_IMAGE_BYTES)
    except errors.UnusableFileError:  # too large for an image
        return b"too large"


def _judge(first: bytes, second: bytes) -> tuple[Result, float | None, str | None]:
    a, b = picture.read(first), picture.read(second)
    if a is None and b is None:
        return "unreadable", None, None
    if a is None or b is None:
        return "different", None, "the image cannot be read" if a is None else "its second cannot"
    if a.size != b.size:
        return "different", None, "sizes {}x{} and {}x{}".format(*a.size, *b.size)
    distance = likeness.distance(a.fingerprint, b.fingerprint)
    if distance < likeness.SAME_BELOW:
        return "alike", distance, None
    found = picture.job_in(second)
    few = found is not None and found[1].steps < COMPARABLE_STEPS
    return "few_steps" if few else "different", distance, None


#: A worker is named once pairs with so many other workers speak against it: one differing pair
#: does not tell which of its two is wrong.
ENOUGH_WITNESSES = 2

#: Added to the pairs of each worker, so that one differing pair of one is not a share of 100 %.
_PRIOR_PAIRS = 4


@dataclass(frozen=True, slots=True)
class Record:
    """One worker's pairs; *witnesses*: the other workers whose pairs speak against it."""

    worker: str
    compared: int
    different: int
    witnesses: int

    @property
    def draws_wrong(self) -> bool:
        return self.worker != NO_RECORD and self.witnesses >= ENOUGH_WITNESSES


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
    shares = {each: different[each] / (compared[each] + _PRIOR_PAIRS) for each in compared}
    witnesses: dict[str, set[str]] = defaultdict(set)
    for pair in pairs:
        if pair.result == "different" and (suspect := _suspect(pair, shares)) is not None:
            witnesses[suspect].update(set(pair.workers) - {suspect})
    records = [
        Record(each, compared[each], different[each], len(witnesses[each])) for each in compared
    ]
    return sorted(records, key=lambda each: (-each.witnesses, -each.different, each.worker))


def undecided(pairs: Sequence[Pair], records: Sequence[Record]) -> list[Pair]:
    """The differing pairs of which it is not known who drew wrong."""
    wrong = {each.worker for each in records if each.draws_wrong} | {NO_RECORD}
    return [pair for pair in pairs if pair.result == "different" and wrong.isdisjoint(pair.workers)]


def _suspect(pair: Pair, shares: Mapping[str, float]) -> str | None:
    first, second = pair.workers
    if NO_RECORD in pair.workers:
        return NO_RECORD
    if shares[first] == shares[second]:
        return None
    return max(pair.workers, key=lambda each: shares[each])

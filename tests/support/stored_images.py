"""Stores images as workers do: records after the images that they are of, blobs and packs."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

import made_records
from imagefleet.files import pack
from imagefleet.files.pack import Member
from imagefleet.job.message import Output, read_job, text_for_image
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Record, of_job
from imagefleet.storage.open import Storage
from worker.stages import encode


class ImageLog(RecordLog):
    """A log whose images are stored, with the metadata that a worker gives them."""

    async def add(self, records: Iterable[Record], *, again: bool = False) -> None:
        records = list(records)
        for each in records:
            if each.outcome == "completed" and each.blob is not None:
                told = {"job": each.id, "images": str(each.images), "seconds": "1"}
                told |= {"digest": each.digest} if each.digest else {}
                told |= {"sha256": each.sha256} if each.sha256 else {}
                await self._blobs.create(each.blob, b"pixels", "image/png", told)
        await super().add(records, again=again)


def member(
    name: str, campaign: str = "spring", shade: int = 0, **fields: Any
) -> Member:
    """A picture with its job in it, and its record; *shade* makes it another picture."""
    body = json.dumps({"prompt": f"a house {name}", "id": name, "campaign": campaign})
    job = read_job(body, "none")
    seed = int.from_bytes(name.encode()[-4:], "big") + shade
    pixels = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), np.uint8)
    data = encode.encode(pixels, Output(), "a house", text_for_image(body, job)).data
    told = {**of_job(job), "worker": "w1", "seconds": 1.5, "seed": 7} | fields
    told = {each: told[each] for each in told.keys() - {"id", "campaign"}}
    return Member(made_records.image(name, campaign, **told), data)


def pack_name(bundle: int = 0, campaign: str = "spring") -> str:
    return pack.name_of(campaign, f"{bundle:032x}", 1)


async def store_pack(
    storage: Storage,
    members: Sequence[Member],
    ends: Sequence[Record] = (),
    *,
    name: str | None = None,
    recorded: bool = True,
    again: bool = False,
) -> list[Record]:
    """Stores a pack and, if it is *recorded*, its records; returns those of its pictures."""
    await storage.create()
    made = pack.write(name or pack_name(), members, ends)
    await storage.packs.create(name or pack_name(), made.data, "application/x-tar", {})
    if recorded:
        log = RecordLog(storage.blobs, "w1")
        await log.add([*made.records, *ends], again=again)
    return made.records


async def store_alone(storage: Storage, of: Member) -> Record:
    """Stores a picture as a blob of its own, as the worker of a single job does."""
    await storage.create()
    (record,) = pack.write(pack_name(), [of]).records
    record = record.model_copy(update={"pack": None, "offset": None})
    told = {"job": record.id, "digest": str(record.digest), "worker": record.worker}
    told["sha256"] = str(record.sha256)
    await storage.blobs.create(str(record.blob), of.data, "image/png", told)
    await RecordLog(storage.blobs, "w1").add([record])
    return record

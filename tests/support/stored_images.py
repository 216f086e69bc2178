"""Writes records as a worker does: after the images that they are of."""

from collections.abc import Iterable

from imagefleet.records.log import RecordLog
from imagefleet.records.record import Record


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

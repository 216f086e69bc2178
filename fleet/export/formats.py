"""A sample of an export, and the tar that it is written to."""

import hashlib
import io
import json
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from imagefleet.caption import caption_of
from imagefleet.files import pack
from imagefleet.records import columns
from imagefleet.records.record import Record
from imagefleet.validation import JSONDict

#: Columns of an export that are fields of a result under the same name.
FIELDS = (
    "id",
    "campaign",
    "index",
    "prompt",
    "negative_prompt",
    "seed",
    "model",
    "loras",
    "sampler",
    "steps",
    "cfg_scale",
    "clip_skip",
    "width",
    "height",
    "worker",
    "gpu",
    "seconds",
    "at",
    "metadata",
)


@dataclass
class Sample:
    """A verified image with its record."""

    #: The key that img2dataset makes: the digits of the shard, then those of the sample.
    key: str
    record: Record
    data: bytes

    @property
    def name(self) -> str:
        return (self.record.blob or "").rpartition("/")[2]

    def row(self, address: columns.Address) -> JSONDict:
        result = columns.row(self.record, address)
        return {
            "url": result["address"],
            "caption": caption_of(self.record),
            "key": self.key,
            "sha256": hashlib.sha256(self.data).hexdigest(),
            **{name: result[name] for name in FIELDS},
        }


#: Bytes of a shard's records that are kept in memory until its end.
_RECORDS_IN_MEMORY = 16 * 2**20


class ShardWriter:
    """A tar with KEY.png, KEY.txt and KEY.json for each image, as webdataset reads it.

    Beside packs it has what these have of an image: readers want the same of all. Its last member
    has the images' records, each line with the key of its image.
    """

    def __init__(
        self, path: Path, *, beside_packs: bool, address: columns.Address
    ) -> None:
        self._beside_packs = beside_packs
        self._address = address
        self._records = tempfile.SpooledTemporaryFile(_RECORDS_IN_MEMORY)  # noqa: SIM115 - see close
        self._tar = tarfile.open(path, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115 - see close

    def write(self, samples: Sequence[Sample]) -> None:
        """Appends samples, in the order of the plan."""
        for sample in samples:
            self._add(sample, sample.name.rpartition(".")[2].lower(), sample.data)
            if self._beside_packs:
                text = columns.json_text(columns.sample(sample.record))
            else:
                row = sample.row(self._address)
                text = json.dumps(row, indent=4, default=datetime.isoformat)
                self._add(sample, "txt", row["caption"].encode())
            self._add(sample, "json", text.encode())
            key = f'{{"key":"{sample.key}",'.encode()
            self._records.write(key + sample.record.line().removeprefix(b"{"))

    def _add(self, sample: Sample, suffix: str, data: bytes) -> None:
        member = tarfile.TarInfo(f"{sample.key}.{suffix}")
        member.size = len(data)
        member.mtime = max(0, int(sample.record.at.timestamp()))
        member.mode = 0o644
        self._tar.addfile(member, io.BytesIO(data))

    def close(self) -> None:
        with self._records, self._tar:
            member = tarfile.TarInfo(pack.HEAD)
            if size := self._records.tell():
                member.size = size
                self._records.seek(0)
                self._tar.addfile(member, self._records)

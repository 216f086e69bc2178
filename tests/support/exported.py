"""The samples that an export holds."""

import json
import tarfile
from pathlib import Path
from typing import Any, NamedTuple


class Exported(NamedTuple):
    row: dict[str, Any]
    text: str
    data: bytes


def samples(folder: Path) -> list[Exported]:
    """The samples of all shards, in order: JSON, caption, and the image's file."""
    found: dict[str, dict[str, bytes]] = {}
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                key, _, suffix = member.name.partition(".")
                if not suffix:  # the records
                    continue
                file = tar.extractfile(member)
                assert file is not None
                found.setdefault(key, {})[suffix] = file.read()
    return [
        Exported(
            json.loads(parts.pop("json")),
            parts.pop("txt").decode(),
            parts.popitem()[1],
        )
        for parts in found.values()
    ]

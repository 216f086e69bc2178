"""Files of compiled kernels: what they are for, then torch's artifact, compressed.

Whoever can write one where workers find it can run programs there: loading an artifact runs it.
"""

import json
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from imagefleet.errors import SetupError

#: Where a worker has a graph's kernels from: its disk, elsewhere, or its own compiler.
ORIGINS = ("disk", "fetched", "compiled")

#: A tick of SD1.5 takes 3 s from 51 to 6.4 MB; with the usual preset, 20 s to 3.1 MB.
_LZMA_PRESET = 1

#: A tick of SDXL has some 70 MB; far more would be meant to fill the memory.
_MAX_BYTES = 2**30


class Header(NamedTuple):
    #: The GPU and the version of torch, as lists show them.
    made_for: str
    #: The places of the kernels' inputs among the tensors of what was compiled.
    inputs: Sequence[int]


def write(path: Path, header: Header, artifact: bytes) -> None:
    with lzma.open(path, "wb", preset=_LZMA_PRESET) as file:
        file.write(json.dumps(header._asdict()).encode() + b"\n")
        file.write(artifact)


def read(path: Path) -> tuple[Header, bytes]:
    """The header and the artifact; raises SetupError if the file is damaged, or of another kind."""
    try:
        with lzma.open(path) as file:
            line, _, artifact = file.read(_MAX_BYTES + 1).partition(b"\n")
        header = Header(**json.loads(line))
    except (lzma.LZMAError, EOFError, OSError, ValueError, TypeError) as error:
        raise SetupError(f"{path} is damaged, or no file of kernels: {error}") from None
    if len(artifact) > _MAX_BYTES:
        raise SetupError(f"{path} is too large: over {_MAX_BYTES:,} bytes")
    return header, artifact

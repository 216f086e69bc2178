"""Files that claim to be what they are not: bytes that expand, and chunks of a PNG."""

import io
import zlib

from PIL import PngImagePlugin

_MEBIBYTE = 2**20


def pack(letter: bytes, mebibytes: int) -> bytes:
    """So many mebibytes of one letter, of which one is compressed and the others repeat it."""
    packer = zlib.compressobj()
    first, other = (
        packer.compress(letter * _MEBIBYTE) + packer.flush(zlib.Z_FULL_FLUSH)
        for _ in range(2)
    )
    checksum = zlib.adler32(letter * (_MEBIBYTE * mebibytes))
    return first + other * (mebibytes - 1) + b"\3\0" + checksum.to_bytes(4, "big")


def png(*chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG file of chunks, each a kind and its data, whatever they say."""
    file = io.BytesIO()
    for kind, data in (*chunks, (b"IEND", b"")):
        PngImagePlugin.putchunk(file, kind, data)
    return b"\x89PNG\r\n\x1a\n" + file.getvalue()

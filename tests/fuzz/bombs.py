"""Compressed bytes that expand to a thousand times their size."""

import zlib

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

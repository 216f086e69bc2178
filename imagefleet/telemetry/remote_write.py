"""Metrics as Prometheus' remote write takes them, for those who have no import address.

Version 0.1.0 of the protocol (https://prometheus.io/docs/specs/prw/remote_write_spec/): a protocol
buffer of series, compressed by snappy. Its four messages hold strings, a double and an integer, so
they are written here; the libraries that could do it bring gRPC or all of OpenTelemetry along.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from imagefleet import errors

HEADERS = {
    "Content-Type": "application/x-protobuf",
    "Content-Encoding": "snappy",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
}

#: Field numbers with their wire types, from Prometheus' `remote.proto` and `types.proto`.
_SERIES, _LABELS, _SAMPLES, _NAME, _TEXT = b"\x0a", b"\x0a", b"\x12", b"\x0a", b"\x12"
_NUMBER, _TIMESTAMP = b"\x09", b"\x10"


def check_library() -> None:
    """Raises SetupError where the compressor is missing."""
    _snappy()


def encode(registry: CollectorRegistry, labels: Mapping[str, str], timestamp_ms: int) -> bytes:
    """All samples of *registry* as one request's body, each with *labels* and of that time.

    A sample's own label goes before one of *labels* that has its name.
    """
    request = b"".join(
        _SERIES + _sized(series) for series in _series(registry, labels, timestamp_ms)
    )
    return bytes(_snappy().compress_raw(request))


def _series(
    registry: CollectorRegistry, labels: Mapping[str, str], timestamp_ms: int
) -> Iterator[bytes]:
    for metric in registry.collect():
        for sample in metric.samples:
            # The protocol asks for labels in order.
            named = sorted({**labels, **sample.labels, "__name__": sample.name}.items())
            value = _NUMBER + struct.pack("<d", sample.value) + _TIMESTAMP + _varint(timestamp_ms)
            yield b"".join(
                [
                    *(
                        _LABELS + _sized(_NAME + _text(name) + _TEXT + _text(text))
                        for name, text in named
                        if text  # an empty label is none, and Prometheus refuses it
                    ),
                    _SAMPLES + _sized(value),
                ]
            )


def _text(text: str) -> bytes:
    return _sized(text.encode())


def _sized(payload: bytes) -> bytes:
    return _varint(len(payload)) + payload


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:  # noqa: PLR2004 - seven bits a byte
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _snappy() -> Any:
    try:
        import cramjam
    except ModuleNotFoundError:
        raise errors.SetupError(
            "remote write needs cramjam: pip install 'imagefleet[remote-write]'"
        ) from None
    return cramjam.snappy

"""The columns of results, the same in data frames, JSON, CSV, Parquet and exports."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from imagefleet.records.record import Record

#: Fields in the order of their columns; each is a field of the record under the same name.
FIELDS = (
    *("outcome", "campaign", "id", "index", "stage", "prompt", "negative_prompt", "seed"),
    *("model", "loras", "embeddings", "sampler", "steps", "cfg_scale", "clip_skip"),
    *("width", "height", "worker", "gpu", "seconds", "attempts", "at", "size_bytes", "blob"),
)

COLUMNS = (*FIELDS, "address", "error", "reason", "metadata")

Address = Callable[[str], str]
"""The address of a blob, by its name."""


def row(record: Record, address: Address) -> dict[str, Any]:
    """The result of a record, by column."""
    result: dict[str, Any] = {name: getattr(record, name) for name in FIELDS}
    result["loras"] = loras(record)
    result["embeddings"] = embeddings(record)
    result["address"] = address(record.blob) if record.blob is not None else None
    result["error"] = record.error
    result["reason"] = record.reason
    result["metadata"] = record.metadata
    return result


def loras(record: Record) -> list[dict[str, Any]]:
    return [{"name": name, "weight": weight} for name, weight in record.loras]


def embeddings(record: Record) -> list[dict[str, Any]]:
    return [{"name": name, "sha256": sha256} for name, sha256 in record.embeddings]


def json_text(value: object) -> str:
    """A value as JSON within a cell."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)

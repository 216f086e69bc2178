"""A fleet's own prices, in a file: today's GPU classes and storage over the built-in table's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from imagefleet import errors
from imagefleet.pricing import prices

_Dollars = Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)]

#: Azure's price lists are by this many operations.
_PER = 10_000


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Storage(_Strict):
    blob_writes_per_10000: _Dollars | None = None
    blob_reads_per_10000: _Dollars | None = None
    queue_operations_per_10000: _Dollars | None = None


class _File(_Strict):
    source: str = Field(min_length=1)
    gpus: dict[str, dict[prices.Priority, _Dollars]] = {}
    storage: _Storage | None = None


def read_table(path: Path | None) -> prices.PriceTable:
    """The built-in table with what the file says in place of its own; None: as it is.

    YAML, or JSON: `source` (where the prices come from and when), `gpus` (by class, dollars an
    hour by priority) and `storage` (dollars for 10,000 operations).

    Raises:
        SetupError: the file cannot be read or is no such table; the sentence names the entry.
    """
    if path is None:
        return prices.BUILT_IN
    file = _read(path)
    gpus = dict(prices.BUILT_IN.gpus)
    for name, dollars in file.gpus.items():
        known = prices.matching_gpus(name, prices.BUILT_IN.gpus)
        # Two classes of that name: the file has to say which, as everybody has.
        gpu = prices.find_gpu(name) if known else name
        gpus[gpu] = prices.GpuPrices(dollars, file.source)
    return prices.PriceTable(gpus, _storage_prices(file))


def _read(path: Path) -> _File:
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return _File.model_validate(content)
    except OSError as error:
        raise errors.SetupError(f"the price file {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise errors.SetupError(f"the price file {path} is no YAML: {error}") from None
    except ValidationError as error:
        detail = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(each) for each in detail["loc"]) or "the whole"
        raise errors.SetupError(f"the price file {path}: {where}: {detail['msg']}") from None


def _storage_prices(file: _File) -> prices.StoragePrices:
    ours = prices.BUILT_IN.storage
    if file.storage is None:
        return ours

    def price(given: float | None, built_in: float) -> float:
        return built_in if given is None else given / _PER

    return prices.StoragePrices(
        blob_write=price(file.storage.blob_writes_per_10000, ours.blob_write),
        blob_read=price(file.storage.blob_reads_per_10000, ours.blob_read),
        queue_operation=price(file.storage.queue_operations_per_10000, ours.queue_operation),
        source=file.source,
    )

"""A file with a fleet's own prices, which override the built-in ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from imagefleet import errors, validation, yaml_file
from imagefleet.pricing import prices

_Dollars = Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)]

#: Azure's price lists are per this many operations.
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
    """The built-in table, overridden by the file's entries.

    YAML or JSON: `source` (where and when the prices are from), `gpus` ($/h by class and priority)
    and `storage` (dollars per 10,000 operations).

    Raises:
        SetupError: the file cannot be read, or an entry is not valid.
    """
    if path is None:
        return prices.BUILT_IN
    file = _read(path)
    gpus = dict(prices.BUILT_IN.gpus)
    for name, dollars in file.gpus.items():
        known = prices.matching_gpus(name, prices.BUILT_IN.gpus)
        gpu = prices.find_gpu(name) if known else name
        gpus[gpu] = prices.GpuPrices(dollars, file.source)
    return prices.PriceTable(gpus, _storage_prices(file))


def _read(path: Path) -> _File:
    try:
        return _File.model_validate(yaml_file.parse(path.read_bytes()) or {})
    except OSError as error:
        raise errors.SetupError(f"the price file {path}: {error.strerror or error}") from None
    except yaml_file.YamlError as error:
        raise errors.SetupError(f"the price file {path} is not valid YAML: {error}") from None
    except ValidationError as error:
        reason = validation.sentence(error, _Storage.model_fields)
        raise errors.SetupError(f"the price file {path}: {reason}") from None


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

"""The report as one self-contained HTML page: inline plots and pictures, no scripts."""

import base64
import textwrap
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich import filesize

from cli.console import counted, significant
from fleet.gallery.images import shrink
from fleet.report.figures import Figures
from fleet.report.records import Records
from imagefleet.caption import caption_of
from imagefleet.errors import JobError
from imagefleet.files.picture import DamagedImageError
from imagefleet.job import prompt
from imagefleet.records import columns, pictures
from imagefleet.records.record import Record
from imagefleet.redaction import printable
from imagefleet.storage.open import Storage
from imagefleet.telemetry.logs import duration
from imagefleet.validation import JSONObject

#: Rows of the table of workers, the slowest first.
_MAX_WORKERS = 15

#: The most characters of a prompt; the rest is shown on demand.
_SHOWN_CHARACTERS = 110


async def read_samples(storage: Storage, records: Records) -> list[JSONObject]:
    """The samples of *records* that are still there; counts the damaged ones in them."""
    samples = []
    address = columns.addresses(storage)
    for record in records.samples:
        blob = record.blob or ""
        shown = None
        try:
            if (data := await pictures.read(storage, record.spot)) is None:
                continue
            shown = base64.b64encode(shrink(data)).decode()
        except (DamagedImageError, JobError) as error:
            records.damaged.add(blob, str(error))
        samples.append(sample(record, address(record), shown))
    return samples


def sample(record: Record, address: str, data: str | None) -> JSONObject:
    """An image for the page; *data* is a JPEG in base64, None for what is no image."""
    words = printable(caption_of(record))
    _, loras = prompt.read_words(record.prompt or "")
    return {
        "job": record.id,
        "address": address,
        "data": data,
        "words": words,
        "short": textwrap.shorten(words, _SHOWN_CHARACTERS, placeholder=" …"),
        "loras": [f"{lora.name} {significant(lora.unet_weight)}" for lora in loras],
    }


def render(
    figures: Figures,
    samples: Sequence[JSONObject],
    made_at: datetime,
) -> str:
    """The page; *samples* are shown as thumbnails with their jobs' ids, prompts and LoRAs."""
    environment = Environment(
        loader=PackageLoader("fleet.report", ""),
        autoescape=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    filters = {name: _or_unknown(show) for name, show in _FILTERS.items()}
    environment.filters.update(filters, gpu_name=gpu_name)
    return environment.get_template("page.html.jinja").render(
        counted=counted,
        figures=figures,
        made_at=made_at,
        costs=_costs(figures),
        slowest=list(reversed(figures["workers"]))[:_MAX_WORKERS],
        samples=samples,
    )


def _costs(figures: Figures) -> dict[str, float]:
    """Dollars by GPU class, and those of the storage's operations."""
    costs: dict[str, float] = defaultdict(float)
    if figures["money"]["gpu_dollars"] is not None:
        for worker in sorted(
            figures["workers"], key=lambda each: gpu_name(each["gpu"])
        ):
            costs[gpu_name(worker["gpu"])] += worker["gpu_dollars"]
    costs["storage operations"] = figures["money"]["storage_dollars"]
    return costs


def gpu_name(recorded: str | None) -> str:
    return {None: "GPU", "none": "no GPU"}.get(recorded, recorded or "GPU")


def _dollars(value: float) -> str:
    return f"${value:,.2f}" if value >= 0.1 or value == 0 else f"${significant(value)}"  # noqa: PLR2004


_FILTERS: Mapping[str, Callable[..., str]] = {
    "dollars": _dollars,
    "moment": "{:%Y-%m-%d %H:%M:%S}".format,
    "second": lambda at: f"{datetime.fromtimestamp(at, UTC):%d %b %H:%M:%S}",
    "significant": significant,
    "number": lambda value, spec=",": format(value, spec),
    "seconds": lambda value: f"{significant(value)} s",
    "size": filesize.decimal,
    "span": duration,
    "words": lambda slug: slug[:80].replace("_", " "),
}


def _or_unknown(show: Callable[..., str]) -> Callable[..., str]:
    return lambda value, *spec: "n/a" if value is None else show(value, *spec)

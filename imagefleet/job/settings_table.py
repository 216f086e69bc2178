"""AUTOMATIC1111's fields and settings by name, from the table `a1111.toml`, which explains them."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from imagefleet.validation import JSONDict

TXT2IMG, IMG2IMG, HIRES, EXTRAS = PASSES = ("txt2img", "img2img", "hires", "extras")


class Effect(NamedTuple):
    """A field or a setting of AUTOMATIC1111: its effect in *passes*; in the others it has none."""

    passes: frozenset[str] = frozenset()
    #: The job's field that it sets; null stands for its default.
    field: str = ""
    #: Values beside null that switch it off, if it sets no field; all others are refused.
    neutral: tuple[object, ...] = ()
    #: The passes whose jobs refuse it, whatever its value: the job says why.
    refused: frozenset[str] = frozenset()


_TABLE: JSONDict = tomllib.loads(
    Path(__file__).with_name("a1111.toml").read_text(encoding="utf-8")
)


def _effects(rows: list[JSONDict]) -> Mapping[str, Effect]:
    return {
        name: Effect(
            frozenset(row.get("passes", ())),
            row.get("field", "").replace("=", name),
            tuple(row.get("neutral", ())),
            frozenset(row.get("refused", ())),
        )
        for row in rows
        for name in row["names"]
    }


#: How names of settings begin that are all of saving, of its page, or of training.
FAMILIES: tuple[str, ...] = (*_TABLE["families"],)

#: What AUTOMATIC1111 leaves out where `seed_enable_extras` is false.
SEED_EXTRAS = {
    "subseed",
    "subseed_strength",
    "seed_resize_from_h",
    "seed_resize_from_w",
}

#: The API of its release 1.10 as installed.
A1111 = "a1111-1.10"

#: The values of fields that a job with these `defaults` leaves out, where they are not a job's own.
DEFAULTS: Mapping[str, Mapping[str, object]] = _TABLE["defaults"]

#: Fields of payloads, beside those that simply are fields of a job, and `override_settings`' names.
FIELDS = _effects(_TABLE["fields"])
SETTINGS = _effects(_TABLE["settings"])

"""AUTOMATIC1111's `override_settings`: its server's settings, changed for one job."""

import re
from collections.abc import Collection

from imagefleet import validation
from imagefleet.job.prompt import SAFE_NAME
from imagefleet.job.settings_table import FAMILIES, SETTINGS
from imagefleet.redaction import printable
from imagefleet.validation import JSONDict, JSONObject

#: Of `jpeg_quality`, which is WebP's as well, where `samples_format` is set.
_JPEG_QUALITY = 80

#: A file as AUTOMATIC1111 lists it: `folder/name.safetensors [short hash]`, or a part of that.
_TITLE = re.compile(
    r"(?:.*[/\\])?(?P<name>[^/\\]+?)(?:\.(?:safetensors|ckpt|pth?))?(?: *\[[0-9a-f]{8,64}\])?"
)


#: Titles of no file.
NO_FILE: tuple[object, ...] = (
    None,
    "",
    [],
    {},
    "Automatic",
    "None",
    "none",
    "Use same checkpoint",
)


def fields(settings: object, payload: JSONObject, passes: Collection[str]) -> JSONDict:
    """The fields that *settings* set; raises ValueError where they conflict with *payload*, say."""
    if not isinstance(settings, dict):
        raise ValueError("override_settings: must be an object")  # noqa: TRY004 - for pydantic
    found = {}
    for name, value in settings.items():
        row = SETTINGS.get(name)
        if row is None:
            if name.startswith(FAMILIES):
                continue
            hint = validation.suggestion(name, SETTINGS)
            raise ValueError(
                f"override_settings.{printable(name[:80])} is not supported: it may change the"
                f" image; remove it{hint}"
            )
        if value is None or row.passes.isdisjoint(passes):
            continue
        if not row.field:
            if value not in row.neutral:
                raise ValueError(
                    f"override_settings.{name} is not supported: it would change the image; remove"
                    " it or switch it off"
                )
        elif value != "":
            found[row.field] = _field(row.field, value, settings)
            if payload.get(row.field) not in (None, found[row.field]):
                raise ValueError(
                    f"override_settings.{name} contradicts the field {row.field}: keep one"
                    " of the two"
                )
    return found


def _field(field: str, value: object, settings: JSONObject) -> object:
    """A setting's value as a field has it."""
    if field == "output":
        kind = str(value).lower().replace("jpg", "jpeg")
        quality = {"quality": settings.get("jpeg_quality") or _JPEG_QUALITY}
        return {"format": kind} | (quality if kind != "png" else {})
    return name_of_title(value) if field == "model" else value


def file_name(title: object) -> object:
    """The name of a VAE or a checkpoint; None: the job's own. Raises ValueError if it is none."""
    if title in NO_FILE:
        return None
    name = name_of_title(title)
    if isinstance(name, str) and not SAFE_NAME.fullmatch(name):
        raise ValueError("should be the name of a file in the storage, without a path")
    return name


def name_of_title(title: object) -> object:
    """The name of a checkpoint's file or folder, by which workers know it."""
    match = _TITLE.fullmatch(title) if isinstance(title, str) else None
    return match["name"] if match else title

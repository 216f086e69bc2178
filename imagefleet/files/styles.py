"""AUTOMATIC1111's styles: parts of prompts by a name, from its `styles.csv`."""

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path

from imagefleet.errors import JobError, SetupError
from imagefleet.validation import JSONObject

_FIELDS = ("prompt", "negative_prompt")

#: The prompt and the negative prompt of each style.
Styles = Mapping[str, tuple[str, str]]


def read(path: Path) -> Styles:
    """The styles of A1111's `styles.csv`; raises SetupError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
        return {
            row["name"]: (row.get("prompt") or "", row.get("negative_prompt") or "")
            for row in rows
        }
    except (OSError, ValueError, KeyError, csv.Error) as error:
        raise SetupError(
            f"{path}: should be a CSV file of name, prompt and negative_prompt: {error}"
        ) from None


def apply(
    styles: Styles, names: Iterable[object], fields: JSONObject
) -> dict[str, str]:
    """The prompts of *fields* with the named styles; raises JobError for one that is not there."""
    prompts = [str(fields.get(field, "")) for field in _FIELDS]
    for name in names:
        if name == "":
            continue
        if not isinstance(name, str) or name not in styles:
            raise JobError(f"styles: there is no style {str(name)[:80]!r}")
        texts = zip(prompts, styles[name], strict=True)
        prompts = [_styled(prompt, style) for prompt, style in texts]
    return dict(zip(_FIELDS, prompts, strict=True))


def _styled(prompt: str, style: str) -> str:
    if "{prompt}" in style:
        return style.replace("{prompt}", prompt)
    return ", ".join(text for text in (prompt.strip(), style.strip()) if text)

"""docs/a1111.md names every field and setting that draws otherwise than AUTOMATIC1111."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from imagefleet import errors
from imagefleet.job import differences, settings_table
from imagefleet.job.message import Job, read_job
from imagefleet.validation import JSONDict
from tests.imagefleet.job import test_txt2img
from worker.engine import decoder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


#: `/sdapi/v1/options` of 1.10 with its own extensions: all settings, as installed.
OPTIONS: JSONDict = json.loads((ROOT / "gateway" / "answers.json").read_text())[
    "/sdapi/v1/options"
]

#: Values of a setting that may draw another picture than its default, of all types.
CHANGED = (True, False, 0, 0.25, 7, 1_000, "x", ["x"], {"a": 1})


def read(fields: JSONDict, **settings: Any) -> JSONDict | None:
    """What a job draws of its fields; None: it is refused."""
    payload = {"prompt": "a", **fields, "override_settings": settings}
    try:
        drawn = read_job(json.dumps(payload), "one").given_fields
    except errors.InvalidMessageError:
        return None
    return {
        name: value
        for name, value in drawn.items()
        if (name, value) not in [("eta_ancestral", 1.0), ("eta_ddim", 0.0)]
    }


def silent_differences() -> list[str]:
    """Fields and settings that are ignored without a row, and differences that nobody is told."""
    known = (
        settings_table.FIELDS.keys() | Job.model_fields.keys() | test_txt2img.ALIASES
    )
    fields = test_txt2img.A1111_FIELDS | test_txt2img.A1111_IMG2IMG_FIELDS
    found = sorted((fields | test_txt2img.A1111_EXTRAS_FIELDS) - known)
    for kind, base in test_txt2img.JOBS.items():
        plain = {**base, "defaults": settings_table.A1111}
        if read(plain, **OPTIONS) != read(plain):
            found.append(f"{kind}: the settings as installed")
        found += [f"{kind}: {name}" for name in OPTIONS if is_silent(kind, plain, name)]
    page = (ROOT / "docs" / "a1111.md").read_text()
    sources = [*(ROOT / "imagefleet").rglob("*.py"), *(ROOT / "worker").rglob("*.py")]
    code = "".join(source.read_text() for source in sources)
    for name, text in differences.KNOWN.items():
        is_told = name in differences.OF_JOBS or f'warn("{name}")' in code
        if not is_told or text[1:] not in page:
            found.append(name)
    return found


def passes_of(job: str) -> set[str]:
    """A second pass comes after a first one, which takes fields and settings as well."""
    return {job, "txt2img"} if job == "hires" else {job}


def is_silent(kind: str, plain: JSONDict, name: str) -> bool:
    """Whether a setting that has a row for a pass is taken, and draws what it draws without."""
    if name.startswith(settings_table.FAMILIES):
        return False
    row = settings_table.SETTINGS[name]
    if row.passes.isdisjoint(passes_of(kind)):
        return False
    if name == "refiner_switch_by_sample_steps":  # of a refiner
        return False
    values = [
        value
        for value in CHANGED
        if value != OPTIONS[name] and value not in row.neutral
    ]
    return any(read(plain, **{name: value}) == read(plain) for value in values)


def test_nothing_is_drawn_otherwise_without_a_word():
    assert silent_differences() == []


def test_what_is_drawn_otherwise_in_every_picture_is_on_the_page():
    """`processing.py` ends with `(255 * x).astype(np.uint8)`."""
    between = torch.tensor([0.6, -0.6]).reshape(2, 1, 1, 1).expand(2, 3, 1, 1) / 255
    drawn, _ = decoder.to_pixels(between + 1 / 255)
    there = ((between + 1 / 255) / 2 + 0.5) * 255
    assert drawn.flatten().unique().tolist() != there.byte().flatten().unique().tolist()
    page = (ROOT / "docs" / "a1111.md").read_text()
    assert "is rounded, where AUTOMATIC1111 cuts it off" in page

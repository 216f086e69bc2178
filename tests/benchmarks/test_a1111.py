"""What differs from AUTOMATIC1111 without a word: benchmarks/results/a1111.json.

    PYTHONPATH=.:docs python tests/benchmarks/test_a1111.py [RESULTS.json of benchmarks/engine.py]

writes the figures; the test holds that they are still those.
"""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from imagefleet import errors
from imagefleet.job import differences, editing, settings_table
from imagefleet.job.message import Job, read_job

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def of_tests(path: str) -> ModuleType:
    """A module of tests, which are no package where this is a program."""
    spec = importlib.util.spec_from_file_location(
        Path(path).stem, ROOT / "tests" / path
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


test_txt2img = of_tests("imagefleet/job/test_txt2img.py")

RESULTS = ROOT / "benchmarks" / "results" / "a1111.json"

#: `/sdapi/v1/options` of 1.10 with its own extensions: all settings, as installed.
OPTIONS: dict[str, Any] = json.loads(
    (ROOT / "tests" / "imagefleet" / "job" / "a1111_options.json").read_text(
        encoding="utf-8"
    )
)

#: Values of a setting that may draw another picture than its default, of all types.
CHANGED = (True, False, 0, 0.25, 7, 1_000, "x", ["x"], {"a": 1})

PROMPTS = 20_000


def read(fields: dict[str, Any], **settings: Any) -> dict[str, Any] | None:
    """What a job draws of its fields; None: it is refused."""
    payload = {"prompt": "a", **fields, "override_settings": settings}
    try:
        drawn = read_job(json.dumps(payload), "one").given_fields
    except errors.InvalidMessageError:
        return None
    return {
        name: value for name, value in drawn.items() if (name, value) != ("eta", 1.0)
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
    page = (ROOT / "docs" / "a1111.md").read_text(encoding="utf-8")
    sources = [*(ROOT / "imagefleet").rglob("*.py"), *(ROOT / "worker").rglob("*.py")]
    code = "".join(source.read_text(encoding="utf-8") for source in sources)
    for name, text in differences.KNOWN.items():
        if f'differences.warn("{name}")' not in code or text[1:] not in page:
            found.append(name)
    return found


def is_silent(kind: str, plain: dict[str, Any], name: str) -> bool:
    """Whether a setting that has a row for a pass is taken, and draws what it draws without."""
    if name.startswith(settings_table.FAMILIES):
        return False
    row = settings_table.SETTINGS[name]
    of_others = {"eta_ddim", "refiner_switch_by_sample_steps"}  # DDIM, and a refiner
    if row.passes.isdisjoint(test_txt2img.passes_of(kind)) or name in of_others:
        return False
    values = [
        value
        for value in CHANGED
        if value != OPTIONS[name] and value not in row.neutral
    ]
    return any(read(plain, **{name: value}) == read(plain) for value in values)


def prompts_different() -> int:
    """Of random prompts, those whose words an independent reading has at other steps."""
    test_editing = of_tests("imagefleet/job/test_editing.py")
    author, found = test_editing.Author(seed=42), 0
    for _ in range(PROMPTS):
        text = author.damaged(author.prompt(author.random.randint(1, 3)))
        steps = author.random.choice([1, 5, 12, 20])
        read = test_editing.Reading(text).schedule(steps, None)
        found += editing.schedule(text, steps, 0) != read
    return found


def roundtrip_different() -> int:
    """Of 300 jobs, those that do not come back from their pictures; the test ends at the first."""
    round_trip = of_tests("fleet/test_import_round_trip.py")
    with tempfile.TemporaryDirectory() as folder:
        try:
            round_trip.test_300_jobs_of_all_fields_come_back_from_their_pictures_as_they_were(
                Path(folder)
            )
        except AssertionError:
            return 1
    return 0


def figures(engine: Path | None = None) -> dict[str, Any]:
    """The figures; that of a GPU is of `benchmarks/engine.py`, whose results are in *engine*."""
    found: dict[str, Any] = {
        "silent_differences": len(silent_differences()),
        "prompts_different": prompts_different(),
        "roundtrip_different": roundtrip_different(),
    }
    name = "editing_over_plain_by_rows"
    if engine is None:
        found["not_measured"] = {
            name: "needs a GPU: benchmarks/engine.py --rows edited"
        }
    else:
        found[name] = json.loads(engine.read_text(encoding="utf-8"))[name]
    return found


def test_nothing_is_drawn_otherwise_without_a_word() -> None:
    assert silent_differences() == []
    written = json.loads(RESULTS.read_text(encoding="utf-8"))
    for name in ("silent_differences", "prompts_different", "roundtrip_different"):
        assert written.get(name, 0) == 0


if __name__ == "__main__":
    text = json.dumps(figures(Path(sys.argv[1]) if sys.argv[1:] else None), indent=2)
    RESULTS.write_text(f"{text}\n", encoding="utf-8")

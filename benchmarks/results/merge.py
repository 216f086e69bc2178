"""Brings the figures of several runs together in one file.

    python benchmarks/results/merge.py --into benchmarks/results/engine-h200.json NEW.json

A figure that a later file has replaces an earlier one; `measured` says of each which file has it
and the commit that was measured, where they are not the first file's. Rows of `engine.py` likewise:
shares compare rows of one run, so they are taken as they are, never computed anew from rows of two.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Figures = dict[str, Any]

#: Of files that have much else.
ONLY = (
    *("first_image_cached_seconds", "first_image_cold_seconds"),
    *("multi_gpu_linear_fraction", "multi_gpu_count"),
    "two_models_over_one",
)


def merge(base: Figures, name: str, found: Figures) -> Figures:
    """*base* with what the file *name* has measured."""
    is_engine = "rows" in found
    new = found["rows"] if is_engine else {}
    new = {row: each for row, each in new.items() if not {"error", "not_measured"} & each.keys()}
    rows: Figures = {**base.get("rows", {}), **new}
    taken = {
        key: value
        for key, value in found.items()
        if _is_measured(value) and (is_engine or key in ONLY) and key not in ("rows", "measured")
    }
    if "mixed_lora_images_per_second" not in taken:
        taken.pop("mixed_lora_measured", None)  # says how that figure was measured
    run = {"file": name, "commit": found.get("commit")}
    own = ("commit", "seconds", "mixed_lora_measured", "hardware", "versions")
    measured = {**base.get("measured", {}), **{key: run for key in taken if key not in own}}
    kept = {key: base[key] for key in ("commit", "seconds") if key in base}
    return {**base, **taken, **kept, "measured": measured, "rows": rows}


def _is_measured(value: Any) -> bool:
    if isinstance(value, dict):
        return any(each is not None for each in value.values())
    return value is not None


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, required=True, help="the file that is changed")
    parser.add_argument("files", type=Path, nargs="+", help="of later runs, the latest last")
    arguments = parser.parse_args(given)
    results = json.loads(arguments.into.read_text(encoding="utf-8"))
    for path in arguments.files:
        results = merge(results, path.name, json.loads(path.read_text(encoding="utf-8")))
    arguments.into.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

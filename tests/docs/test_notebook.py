"""The notebook runs, and shows what the one in the repository shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import nbformat
import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "client.ipynb"


def lines(notebook: Any) -> list[str]:
    """What its cells have printed; results come in the order in which they are done."""
    return sorted(line for text in outputs(notebook, "text") for line in text.splitlines())


def outputs(notebook: Any, kind: str) -> list[str]:
    shown: Iterable[Any] = (each for cell in notebook.cells for each in cell.get("outputs", ()))
    return [found for each in shown if (found := {**each, **each.get("data", {})}.get(kind))]


@pytest.mark.timeout(600)  # a real engine on a CPU
def test_the_notebook_runs_and_shows_what_is_in_the_repository(
    load_file: Callable[[Path], Any],
) -> None:
    known = nbformat.read(NOTEBOOK, as_version=4)
    new = load_file(NOTEBOOK.with_name("run_notebook.py")).run()

    assert lines(new) == lines(known)
    assert len(outputs(new, "image/jpeg")) == len(outputs(known, "image/jpeg")) == 4
    assert [len(table) for table in outputs(new, "text/html")] != []


def test_the_notebook_is_small_and_names_no_folder_of_the_machine_that_ran_it() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert len(text) < 100_000
    assert "/tmp/" not in text
    assert "/home/" not in text

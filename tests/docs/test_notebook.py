"""The notebook runs, and shows what the one in the repository shows."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import nbformat
import pytest

pytestmark = pytest.mark.slow

NOTEBOOK = Path(__file__).parents[2] / "docs" / "client.ipynb"


def lines(notebook: Any) -> list[str]:
    """What its cells have printed; results come in the order in which they are done.

    A kernel that is slow for a moment sends a line in two parts.
    """
    return sorted("".join(outputs(notebook, "text")).splitlines())


def outputs(notebook: Any, kind: str) -> list[str]:
    shown: Iterable[Any] = (
        each for cell in notebook.cells for each in cell.get("outputs", ())
    )
    return [
        found for each in shown if (found := {**each, **each.get("data", {})}.get(kind))
    ]


def test_the_notebook_runs_and_shows_what_is_in_the_repository(
    load_file: Callable[[Path], Any], tmp_path, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    known = nbformat.read(NOTEBOOK, as_version=4)
    try:
        new = load_file(NOTEBOOK.with_name("run_notebook.py")).run()
    finally:
        for log in tmp_path.glob("*/worker.log"):  # left by a failure
            print(log.read_text())  # noqa: T201

    assert lines(new) == lines(known)
    assert len(outputs(new, "image/jpeg")) == len(outputs(known, "image/jpeg")) == 4
    assert [len(table) for table in outputs(new, "text/html")] != []


def test_the_notebook_is_small_and_names_no_folder_of_the_machine_that_ran_it():
    text = NOTEBOOK.read_text()
    assert len(text) < 100_000
    assert "/tmp/" not in text
    assert "/home/" not in text

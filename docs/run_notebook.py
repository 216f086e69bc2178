"""Runs the notebook and writes it with what it shows: python docs/run_notebook.py."""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).with_name("client.ipynb")

#: For a cell; the worker takes some seconds to start.
CELL_SECONDS = 120


def run(path: Path = NOTEBOOK) -> nbformat.NotebookNode:
    """The notebook with new outputs; an exception in a cell is raised."""
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        resources=where,
        record_timing=False,
        kernel_name="python3",
    )
    client.execute()
    return notebook


if __name__ == "__main__":
    nbformat.write(run(), NOTEBOOK)

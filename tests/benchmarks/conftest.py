"""Runs programs of `benchmarks/` in this process, which has torch: its import takes ten seconds."""

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(monkeypatch, tmp_path) -> Iterator[Callable[..., str]]:
    """What a program prints that is run in an empty folder, with some of its constants changed."""

    def run_one(program: str, *arguments: str, **constants: Any) -> str:
        loaded = importlib.import_module(program.removesuffix(".py").replace("/", "."))
        with (
            monkeypatch.context() as patched,
            contextlib.redirect_stdout(io.StringIO()) as printed,
        ):
            for name, value in constants.items():
                patched.setattr(loaded, name, value)
            patched.setattr(sys, "argv", [program, *arguments])
            try:
                code = loaded.main()
            except SystemExit as end:
                code = end.code
        assert not code, printed.getvalue()
        return printed.getvalue()

    paths = f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'chaos'}"
    monkeypatch.setenv("PYTHONPATH", paths)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield run_one
    torch.set_num_threads(threads)

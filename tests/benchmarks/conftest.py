"""Runs programs of `benchmarks/` in this process, which has torch: its import takes ten seconds."""

import asyncio
import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evaluation.bench import engine as bench_engine
from in_process import as_it_was
from rows import groups, process
from rows import program as rows_program

__all__ = ["as_it_was"]

ROOT = Path(__file__).parents[2]


class GroupHere(groups.Group):
    """A group of rows in a thread: what it is told and replies are those of a process."""

    def __init__(self) -> None:
        self.asked = SimpleQueue[bytes | None]()
        self.told = SimpleQueue[str]()
        super().__init__(SimpleNamespace(stdin=SimpleNamespace(write=self.asked.put)))  # type: ignore[arg-type]

    @classmethod
    async def start(cls, script: Path, *arguments: str) -> "GroupHere":
        """Returns once it is ready, as the next one takes other arguments."""
        group = cls()
        program = script.relative_to(ROOT / "benchmarks").with_suffix("")
        loaded = importlib.import_module(".".join(program.parts))
        HERE.set(group)
        group.runs = asyncio.create_task(asyncio.to_thread(group.run, loaded))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sys, "argv", [str(script), *arguments])
            module = loaded if hasattr(loaded, "Channel") else rows_program
            patched.setattr(module, "Channel", ChannelHere)
            await super(cls, group).wait_until_ready()
        return group

    def run(self, program: Any) -> None:
        try:
            with contextlib.suppress(SystemExit):
                program.main()
        finally:
            self.told.put("")

    async def wait_until_ready(self) -> None:
        """It has been waited for."""

    async def end(self) -> None:
        self.asked.put(None)
        await self.runs

    async def _read(self) -> groups.Figures:
        line = await asyncio.to_thread(self.told.get)
        return json.loads(line) if line else {"error": "it has ended"}


HERE: ContextVar[GroupHere] = ContextVar("HERE")


class ChannelHere(process.Channel):
    """Replies to the group of this thread."""

    def __init__(self) -> None:
        self._group = HERE.get()

    def serve(self, *rows: Any, **until: Any) -> float:
        HERE.set(self._group)  # an engine's thread serves as well
        return super().serve(*rows, **until)

    def reply(self, **figures: Any) -> None:
        self._group.told.put(json.dumps(figures))


class Asked:
    """The standard input of each group."""

    @property
    def stdin(self) -> Iterator[bytes]:
        return iter(HERE.get().asked.get, None)  # type: ignore[arg-type]


@pytest.fixture
def few_steps(monkeypatch):
    """Each image of a benchmark takes two steps."""

    def prepare(*given: Any, **named: Any) -> bench_engine.Setup:
        setup = prepared(*given, **named)
        return replace(setup, workload=replace(setup.workload, steps=(2,)))

    prepared = bench_engine.prepare
    monkeypatch.setattr(bench_engine, "prepare", prepare)


@pytest.fixture
def groups_here(monkeypatch) -> None:
    """Groups of rows are threads: as processes each imports torch anew."""
    monkeypatch.setattr(groups, "Group", GroupHere)
    monkeypatch.setattr(process, "sys", Asked())


@pytest.fixture
def figures_of() -> Callable[..., Any]:
    """The JSON on the last line of a program that has a process of its own."""

    def run_one(program: str, *arguments: str) -> Any:
        command = [sys.executable, "-m", f"benchmarks.{program}", *arguments]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run_one


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

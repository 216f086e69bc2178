"""The compiler's process: what it leaves, and that it ends with whoever began it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import polling
from packages import ask_the_tensor, multiply
from worker.engine.kernels import package
from worker.engine.kernels.compiler import CompileError, Compiler
from worker.engine.kernels.description import Description
from worker.engine.kernels.package import Package, UnusablePackageError

pytestmark = pytest.mark.slow

#: Begins to compile, then says the compiler's number and waits.
PARENT = """
import sys, time
from pathlib import Path
from worker.engine.kernels.compiler import Compiler
compiler = Compiler()
compiler.begin(b"", Path(sys.argv[1]) / "never.kernels")
print(compiler._child.process.pid, flush=True)
if sys.argv[2] == "exits":
    sys.exit(3)
if sys.argv[2] == "raises":
    raise KeyboardInterrupt
time.sleep(600)
"""


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    started = Compiler()
    yield started
    started.close()


def tensors(size: int = 3) -> list[torch.Tensor]:
    return [torch.zeros(size, size), torch.rand(size, size), torch.rand(size, size)]


def compiled(compiler: Compiler, description: Description, target: Path) -> Path:
    compiler.begin(description.content, target)
    polling.until_in_thread(lambda: compiler.is_done(1.0))
    compiler.end()
    return target


def test_what_is_compiled_is_loaded_elsewhere_and_runs_on_other_tensors(
    compiler: Compiler, tmp_path
):
    of = Description.of((multiply, tensors()))
    path = compiled(compiler, of, tmp_path / "one.kernels")
    own = tensors()
    call = Package.load(path).bind(Description.of((multiply, own)).tensors)
    for _ in range(2):
        call()
        assert torch.equal(own[0], own[1] @ own[2])
        own[1].add_(1)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "one.kernels",
        "one.lock",
    ]


def test_what_cannot_be_compiled_is_said_and_the_next_is_compiled(
    compiler: Compiler, tmp_path
):
    of = Description.of((ask_the_tensor, tensors()[:1]))
    with pytest.raises(CompileError, match="Unsupported"):
        compiled(compiler, of, tmp_path / "none.kernels")
    of = Description.of((multiply, tensors(4)))
    assert compiled(compiler, of, tmp_path / "next.kernels").exists()


def test_a_compiler_that_is_killed_is_said_and_the_next_graph_has_another(tmp_path):
    compiler = Compiler()
    compiler.begin(
        Description.of((multiply, tensors())).content, tmp_path / "a.kernels"
    )
    assert compiler._child is not None
    os.kill(compiler._child.process.pid, signal.SIGKILL)
    polling.until_in_thread(lambda: compiler.is_done(1.0))
    with pytest.raises(CompileError, match="perhaps the machine's memory was full"):
        compiler.end()
    of = Description.of((multiply, tensors()))
    assert compiled(compiler, of, tmp_path / "b.kernels").exists()
    compiler.close()


def test_a_damaged_package_is_unusable(tmp_path):
    (tmp_path / "it.kernels").write_bytes(b"half of one")
    with pytest.raises(UnusablePackageError, match="damaged"):
        Package.load(tmp_path / "it.kernels")


@pytest.mark.parametrize("way", ["exits", "raises", "killed", "stopped"])
def test_the_compiler_ends_with_its_parent_however_that_ends(tmp_path, way: str):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), way],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        if way in ("killed", "stopped"):
            parent.send_signal(signal.SIGKILL if way == "killed" else signal.SIGTERM)
        code = parent.wait()
    expected = {"exits": 3, "killed": -signal.SIGKILL, "stopped": -signal.SIGTERM}
    assert code == expected.get(way, code)

    def has_ended() -> bool:
        try:
            return child.status() == psutil.STATUS_ZOMBIE  # init takes its time
        except psutil.NoSuchProcess:
            return True

    polling.until_in_thread(has_ended)


def test_of_two_that_want_the_same_one_compiles_it(tmp_path, monkeypatch):
    target = tmp_path / "it.kernels"
    made = []
    monkeypatch.setattr(package, "_compile", lambda _, path: made.append(path))
    package.compile_package(b"", target)
    target.touch()
    package.compile_package(b"", target)
    assert made == [target]

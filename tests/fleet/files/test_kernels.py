"""`imagefleet files` with kernels: from a folder of them into the storage, and to a worker."""

import asyncio
import json
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli import console
from imagefleet import concurrency
from imagefleet.signing import TrustedKeys
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from in_process import Imagefleet, assert_refused
from kernel_files import GRAPH, KEY, compile_into
from worker.engine import load
from worker.files.kernels import archive, cache
from worker.files.kernels.cache import KernelCache
from worker.files.kernels.shared import SharedKernels

NAME = f"{KEY.name}.tar.xz"
DEMO = Path(__file__).parents[3] / "demo_model"


@pytest.fixture
def packed(tmp_path) -> Path:
    archive.pack(compile_into(tmp_path / "compiled"), KEY, tmp_path / "kernels" / NAME)
    return tmp_path / "kernels" / NAME


def origin_of(
    settings: StorageSettings, folder: Path, trusted: TrustedKeys | None = None
) -> str | None:
    """Where a worker with the same GPU finds its kernels."""

    async def fetch() -> str | None:
        async with open_storage(settings) as storage:
            kernels = KernelCache(folder, KEY)
            await kernels.fetch(storage.files, trusted=trusted)
            return kernels.origin

    return asyncio.run(fetch())


def test_what_was_added_is_listed_and_fetched_by_a_worker_with_that_gpu(
    in_process: Imagefleet,
    packed: Path,
    flags: list[str],
    storage_settings: StorageSettings,
    tmp_path,
):
    dry = in_process("files", "add", "kernels", "kernels", "--dry-run", *flags)
    assert f"kernels/{NAME}: would be stored" in dry.stderr
    assert origin_of(storage_settings, tmp_path / "before") is None

    added = in_process("files", "add", "kernels", "kernels", *flags)
    assert (added.stdout, f"kernels/{NAME}: stored" in added.stderr) == (
        f"{NAME}\n",
        True,
    )
    again = in_process("files", "add", "kernels", f"kernels/{NAME}", "--json", *flags)
    assert [each["change"] for each in json.loads(again.stdout)["files"]] == [
        "was there"
    ]
    listed = json.loads(
        in_process("files", "list", "kernels", "--json", *flags).stdout
    )["files"]
    assert [(each["name"], each["content"], each["bytes"]) for each in listed] == [
        (NAME, "NVIDIA H200, torch 2.11.0", packed.stat().st_size)
    ]

    assert origin_of(storage_settings, tmp_path / "worker") == "store"
    assert (tmp_path / "worker" / GRAPH).read_bytes() == b"a graph"


def test_other_kernels_for_the_same_gpu_are_replaced_only_if_asked(
    in_process: Imagefleet,
    packed: Path,
    flags: list[str],
    storage_settings: StorageSettings,
    tmp_path,
):
    in_process("files", "add", "kernels", "kernels", *flags)
    archive.pack(compile_into(tmp_path / "anew", b"a newer graph"), KEY, packed)

    assert_refused(
        in_process("files", "add", "kernels", "kernels", *flags),
        "is other kernels for this GPU: --replace",
    )

    replaced = in_process("files", "add", "kernels", "kernels", "--replace", *flags)
    assert f"kernels/{NAME}: replaced" in replaced.stderr
    assert origin_of(storage_settings, tmp_path / "worker") == "store"
    assert (tmp_path / "worker" / GRAPH).read_bytes() == b"a newer graph"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("gone", "'gone' does not exist"),
        ("empty", "there is no .tar.xz in 'empty'"),
        ("cut.tar.xz", "cut.tar.xz is damaged"),
        ("text.tar.xz", "damaged, or no archive"),
    ],
)
def test_what_no_worker_could_load_never_reaches_the_storage(
    source: str, reason: str, in_process: Imagefleet, packed: Path, tmp_path
):
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.tar.xz").write_bytes(packed.read_bytes()[:-20])
    (tmp_path / "text.tar.xz").write_text("hello")
    assert_refused(in_process("files", "add", "kernels", source), reason)
    assert not (tmp_path / "imagefleet-data").exists()


def test_what_workers_share_is_listed_and_removed_as_what_was_added(
    in_process: Imagefleet,
    flags: list[str],
    storage_settings: StorageSettings,
    tmp_path,
):
    async def share() -> None:
        async with open_storage(storage_settings) as storage:
            await storage.create()
            policy = concurrency.RetryPolicy(tries=1)
            await SharedKernels(storage.files, tmp_path / "w", KEY, None, policy).share(
                None
            )

    compile_into(tmp_path / "w")
    asyncio.run(share())
    (row,) = json.loads(
        in_process("files", "list", "kernels", "--json", *flags).stdout
    )["files"]
    shared = f"{KEY.name}/1.tar.xz"
    assert (row["name"], row["content"]) == (
        shared,
        "NVIDIA H200, torch 2.11.0, by a worker",
    )
    assert len(row["sha256"]) == 64
    removed = in_process("files", "remove", "kernels", shared, "--yes", *flags)
    assert removed.stdout == f"kernels/{shared}: removed\n", removed.stderr
    assert json.loads(
        in_process("files", "list", "kernels", "--json", *flags).stdout
    ) == {"files": []}


# Building: what only a GPU can do is replaced, the rest is real.


@pytest.fixture
def gpu(monkeypatch) -> dict[str, Any]:
    """A machine with the key, whose compiler leaves the usual files; returns its arguments."""
    used: dict[str, Any] = {}

    def load_engine(settings: load.EngineSettings) -> SimpleNamespace:
        used.update(asdict(settings))
        compile_into(cache.use_folder(Path("unused"), KEY))
        return SimpleNamespace(close=lambda: None)

    for name in (cache.TORCH_FOLDER, cache.TRITON_FOLDER):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(cache, "find_key", lambda *_: KEY)
    monkeypatch.setattr(load, "load_engine", load_engine)
    return used


def test_a_build_packs_what_a_worker_with_these_settings_compiles(
    in_process: Imagefleet, gpu: dict[str, Any], tmp_path
):
    build = (
        "files",
        "make",
        "kernels",
        "--model",
        str(DEMO),
        "--cache",
        "cache",
        "--slots",
        "6",
    )
    build += ("--accelerator", "sdxl_lightning_4step", "--taesd", "taesd")
    dry = in_process(*build, "--dry-run")
    assert dry.stdout == f"kernels/{NAME}\n", dry.stderr
    assert gpu == {}

    built = in_process(*build, "--output", "out", "--json")
    assert built.returncode == console.EXIT_DONE, built.stderr
    path = tmp_path / "out" / NAME
    size = path.stat().st_size
    assert json.loads(built.stdout) == {
        "path": f"out/{NAME}",
        "key": asdict(KEY),
        "bytes": size,
    }
    assert (gpu["slots"], gpu["compile"]) == (6, "auto")
    assert (gpu["is_unguided"], gpu["taesd"]) == (True, Path("taesd"))
    assert archive.check(path)[0] == KEY
    assert (tmp_path / "cache" / "kernels" / KEY.name / GRAPH).exists()


def test_a_build_that_compiled_nothing_says_so(
    in_process: Imagefleet, gpu: dict[str, Any], monkeypatch
):
    monkeypatch.setattr(
        load, "load_engine", lambda *_, **__: SimpleNamespace(close=lambda: None)
    )
    result = in_process(
        "files", "make", "kernels", "--model", str(DEMO), "--cache", "cache"
    )
    assert result.returncode == console.EXIT_OPERATOR_MUST_ACT
    assert re.search(r"torch kept no kernels in /\S+/cache/kernels/", result.stderr)


def test_without_a_gpu_nothing_is_built(in_process: Imagefleet, tmp_path):
    build = ("files", "make", "kernels", "--model", str(DEMO), "--device", "cpu")
    assert_refused(in_process(*build), "compiled for NVIDIA GPUs, and here is none")
    assert not (tmp_path / "kernels").exists()

"""`imagefleet files` with kernels: from a folder of them into the storage, and to a worker."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from imagefleet.files import kernels
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from in_process import Imagefleet, assert_refused, told
from worker.engine import device, load
from worker.files.kernels import KernelExchange

NAME = "unet-512x512-16x2-per_slot-0123456789abcdef.kernels"
HEADER = kernels.Header("NVIDIA H200, torch 2.11.0", [0, 2, 1])
DEMO = Path(__file__).parents[3] / "demo_model"


@pytest.fixture
def packed(tmp_path) -> Path:
    (tmp_path / "kernels").mkdir()
    kernels.write(tmp_path / "kernels" / NAME, HEADER, b"a program")
    return tmp_path / "kernels" / NAME


def fetched(
    settings: StorageSettings, folder: Path
) -> tuple[kernels.Header, bytes] | None:
    """What a worker with the same GPU gets."""

    async def fetch() -> bool:
        async with open_storage(settings) as storage:
            exchange = KernelExchange(storage.files)
            return await asyncio.wrap_future(exchange.find(NAME, folder / NAME))

    return kernels.read(folder / NAME) if asyncio.run(fetch()) else None


def test_what_was_added_is_listed_and_fetched_by_a_worker_with_that_gpu(
    in_process: Imagefleet,
    packed: Path,
    flags: list[str],
    storage_settings: StorageSettings,
    tmp_path,
):
    dry = in_process("files", "add", "kernels", "kernels", "--dry-run", *flags)
    assert f"kernels/{NAME}: would be stored" in dry.stderr
    assert fetched(storage_settings, tmp_path / "before") is None

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

    assert fetched(storage_settings, tmp_path / "worker") == (HEADER, b"a program")


def test_other_kernels_for_the_same_gpu_are_replaced_only_if_asked(
    in_process: Imagefleet,
    packed: Path,
    flags: list[str],
    storage_settings: StorageSettings,
    tmp_path,
):
    in_process("files", "add", "kernels", "kernels", *flags)
    kernels.write(packed, HEADER, b"a newer one")

    assert_refused(
        in_process("files", "add", "kernels", "kernels", *flags),
        "kernels are put in its place with --replace",
    )

    replaced = in_process("files", "add", "kernels", "kernels", "--replace", *flags)
    assert f"kernels/{NAME}: replaced" in replaced.stderr
    assert fetched(storage_settings, tmp_path / "worker") == (HEADER, b"a newer one")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("gone", "'gone' does not exist"),
        ("empty", "there is no .kernels in 'empty'"),
        ("cut.kernels", "cut.kernels is damaged"),
        ("text.kernels", "damaged, or no file of kernels"),
    ],
)
def test_what_no_worker_could_load_never_reaches_the_storage(
    source: str, reason: str, in_process: Imagefleet, packed: Path, tmp_path
):
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.kernels").write_bytes(packed.read_bytes()[:-20])
    (tmp_path / "text.kernels").write_text("hello")
    assert_refused(in_process("files", "add", "kernels", source), reason)
    assert not (tmp_path / "imagefleet-data").exists()


def test_what_workers_share_is_listed_and_removed_as_what_was_added(
    in_process: Imagefleet,
    packed: Path,
    flags: list[str],
    storage_settings: StorageSettings,
):
    async def share() -> None:
        async with open_storage(storage_settings) as storage:
            await storage.create()
            await KernelExchange(storage.files, shares=True)._share(packed)

    asyncio.run(share())
    (row,) = json.loads(
        in_process("files", "list", "kernels", "--json", *flags).stdout
    )["files"]
    assert (row["name"], row["content"]) == (
        NAME,
        "NVIDIA H200, torch 2.11.0, by a worker",
    )
    assert len(row["sha256"]) == 64
    removed = in_process("files", "remove", "kernels", NAME, "--yes", *flags)
    assert removed.stdout == f"kernels/{NAME}: removed\n", removed.stderr
    assert json.loads(
        in_process("files", "list", "kernels", "--json", *flags).stdout
    ) == {"files": []}


# Building: what only a GPU can do is replaced, the rest is real.


@pytest.fixture
def gpu(monkeypatch) -> dict[str, Any]:
    """A machine with a GPU, whose compiler leaves one file; returns its settings."""
    used: dict[str, Any] = {}

    def load_engine(settings: load.EngineSettings) -> SimpleNamespace:
        for name in ("slots", "compile", "is_unguided", "taesd"):
            used[name] = getattr(settings, name)
        settings.kernels.mkdir(parents=True)
        kernels.write(settings.kernels / NAME, HEADER, b"a program")
        graphs = {"disk": 0, "fetched": 0, "compiled": 1}
        return SimpleNamespace(graphs=graphs, close=lambda: None)

    monkeypatch.setattr(device, "find_device", lambda _: SimpleNamespace(type="cuda"))
    monkeypatch.setattr(load, "load_engine", load_engine)
    return used


def test_a_build_leaves_a_file_for_each_graph_that_a_worker_with_these_settings_compiles(
    in_process: Imagefleet, gpu: dict[str, Any], tmp_path
):
    build = ("files", "make", "kernels", "--model", str(DEMO), "--slots", "6")
    build += ("--accelerator", "sdxl_lightning_4step", "--taesd", "taesd")
    dry = in_process(*build, "--dry-run")
    assert dry.stdout == "kernels\n", dry.stderr
    assert gpu == {}

    built = in_process(*build, "--output", "out", "--json")
    assert told(built) == {"folder": "out", "files": [f"out/{NAME}"]}
    assert gpu == {
        "slots": 6,
        "compile": "auto",
        "is_unguided": True,
        "taesd": Path("taesd"),
    }
    assert kernels.read(tmp_path / "out" / NAME) == (HEADER, b"a program")


def test_a_build_that_compiled_nothing_says_so(
    in_process: Imagefleet, gpu: dict[str, Any], monkeypatch
):
    nothing = SimpleNamespace(
        graphs=dict.fromkeys(("disk", "fetched", "compiled"), 0), close=lambda: None
    )
    monkeypatch.setattr(load, "load_engine", lambda _: nothing)
    assert_refused(
        in_process("files", "make", "kernels", "--model", str(DEMO)),
        "torch could not compile anything",
    )


def test_without_a_gpu_nothing_is_built(in_process: Imagefleet, tmp_path):
    build = ("files", "make", "kernels", "--model", str(DEMO), "--device", "cpu")
    assert_refused(in_process(*build), "compiled for NVIDIA GPUs, and here is none")
    assert not (tmp_path / "kernels").exists()

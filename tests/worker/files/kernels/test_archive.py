"""Archives of compiled kernels: what is in them, and which are refused."""

import io
import json
import lzma
import tarfile
from dataclasses import asdict
from pathlib import Path

import pytest

from imagefleet import errors
from kernel_files import CUBIN, GRAPH, KEY, LIST, OTHER, compile_into
from worker.files.kernels import archive
from worker.files.kernels.archive import UnusableArchiveError


@pytest.fixture
def packed(tmp_path) -> Path:
    archive.pack(compile_into(tmp_path / "there"), KEY, tmp_path / "kernels.tar.xz")
    return tmp_path / "kernels.tar.xz"


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_kernels_come_out_as_they_were_and_know_where_they_are(packed: Path, tmp_path):
    here = tmp_path / "somewhere" / "else"
    archive.unpack(packed, here, KEY)

    found, before = contents(here), contents(tmp_path / "there")
    listed = json.loads(found.pop(LIST))
    assert listed == {"child_paths": {"kernel.cubin": str(here / CUBIN)}}
    locks = {"locks/cab.lock", "imagefleet-12.lock", "lock", LIST}
    assert found == {name: before[name] for name in before if name not in locks}
    assert str(tmp_path / "there").encode() not in lzma.decompress(packed.read_bytes())


def test_that_something_is_compiled_is_said_once_all_of_it_is_there(
    packed: Path,
):
    with tarfile.open(packed) as tar:
        assert tar.getnames()[-1] == "imagefleet-12.compiled"


def test_the_same_kernels_give_the_same_bytes_whatever_their_folder(
    tmp_path,
):
    for name in ("a", "much/longer"):
        target = tmp_path / f"{name[0]}.tar.xz"
        archive.pack(compile_into(tmp_path / name), KEY, target)
    assert (tmp_path / "a.tar.xz").read_bytes() == (tmp_path / "m.tar.xz").read_bytes()


def test_what_is_there_already_stays_as_another_worker_may_be_reading_it(
    packed: Path, tmp_path
):
    here = tmp_path / "here"
    (here / GRAPH).parent.mkdir(parents=True)
    (here / GRAPH).write_bytes(b"my own")
    archive.unpack(packed, here, KEY)
    assert (here / GRAPH).read_bytes() == b"my own"
    assert (here / CUBIN).exists()
    assert not list(here.rglob("*.part"))


def test_kernels_of_another_torch_or_driver_are_never_unpacked(packed: Path, tmp_path):
    with pytest.raises(
        UnusableArchiveError, match=r"is for driver 580, torch 2\.11\.0$"
    ):
        archive.unpack(packed, tmp_path / "here", OTHER)
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("share", [0, 0.3, 0.9, 0.999])
def test_a_truncated_archive_leaves_nothing_behind(
    packed: Path, tmp_path, share: float
):
    data = packed.read_bytes()
    packed.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(UnusableArchiveError, match=r"kernels\.tar\.xz is damaged"):
        archive.unpack(packed, tmp_path / "here", KEY)
    assert not (tmp_path / "here").exists()


def test_no_flipped_byte_goes_unnoticed(packed: Path, tmp_path):
    data = packed.read_bytes()
    for at in range(0, len(data), 37):
        packed.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        with pytest.raises(UnusableArchiveError):
            archive.unpack(packed, tmp_path / "here", KEY)
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/../../outside"])
def test_no_entry_leads_out_of_the_folder(tmp_path, name: str):
    written = by_hand(tmp_path, name)
    with pytest.raises(UnusableArchiveError, match="an entry not its own"):
        archive.unpack(written, tmp_path / "in" / "here", KEY)
    assert not list(tmp_path.rglob("*outside"))


def test_a_link_is_no_kernel(tmp_path):
    written = by_hand(tmp_path, "link", tarfile.SYMTYPE)
    with pytest.raises(UnusableArchiveError, match="an entry not its own"):
        archive.unpack(written, tmp_path / "here", KEY)


@pytest.mark.parametrize("header", [b"{}", b"[", b'{"gpu": 1}', b"[" * 60_000])
def test_an_archive_of_something_else_is_named(tmp_path, header: bytes):
    written = by_hand(tmp_path, "file", header=header)
    with pytest.raises(
        UnusableArchiveError, match="no key of kernels that this version reads"
    ):
        archive.check(written)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(UnusableArchiveError, match="damaged, or no archive"):
        archive.check(tmp_path / "text")
    with pytest.raises(UnusableArchiveError, match="No such file"):
        archive.check(tmp_path / "missing")


def test_an_archive_that_would_fill_the_disk_is_refused(
    packed: Path, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        archive, "MAX_BYTES", archive.check(packed)[1]
    )  # and its header
    with pytest.raises(UnusableArchiveError, match="too large"):
        archive.unpack(packed, tmp_path / "here", KEY)
    assert not (tmp_path / "here").exists()


def test_a_folder_that_cannot_be_written_is_the_nodes_fault_not_the_archives(
    packed: Path, tmp_path
):
    (tmp_path / "file").touch()
    with pytest.raises(errors.SetupError, match="cannot be written"):
        archive.unpack(packed, tmp_path / "file" / "here", KEY)


def by_hand(
    folder: Path, name: str, kind: bytes = tarfile.REGTYPE, header: bytes | None = None
) -> Path:
    """An archive with one entry that `pack` would not write."""
    path = folder / "by-hand.tar.xz"
    with tarfile.open(path, "w:xz") as tar:
        for each, content, of_kind in (
            (
                archive.HEADER,
                header or json.dumps(asdict(KEY)).encode(),
                tarfile.REGTYPE,
            ),
            (name, b"hello", kind),
        ):
            entry = tarfile.TarInfo(each)
            entry.size, entry.type = len(content), of_kind
            tar.addfile(entry, io.BytesIO(content))
    return path

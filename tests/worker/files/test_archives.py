"""Archives of models: files and folders alone, and none outside."""

import os
import tarfile

import pytest

from imagefleet import errors
from tar_files import tar_of
from worker.files import model
from worker.files.disk_cache import DiskCache


def entry_of(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type = kind
    entry.linkname = link
    return entry


#: Links that lead out of the folder in a row, past the checks of older Pythons.
DEEP = "/".join(["d" * 200] * 3)
LINKS = (
    entry_of("a", tarfile.SYMTYPE, DEEP),
    entry_of("a/b", tarfile.SYMTYPE, "../" * 3),
    entry_of("c", tarfile.SYMTYPE, f"a/b{'/..' * 9}"),
)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (tar_of({"../outside": b"x", "model_index.json": b"{}"}), "leads outside"),
        (tar_of({"unet/config.json": b"{}"}), "model_index.json is missing"),
        (tar_of({"/tmp/outside": b"x"}), "leads outside"),
        (tar_of({"a": b"x", "a/b": b"y"}), "'a/b' is no name, or there twice"),
        (tar_of({"a": b"x", "./a": b"y"}), "'./a' is no name, or there twice"),
        (tar_of({f"{'n' * 300}/outside": b"x"}), "is too long"),
        (
            tar_of({}, entry_of("pipe", tarfile.FIFOTYPE)),
            "is neither a file nor a folder",
        ),
        (tar_of({}, entry_of("a", tarfile.SYMTYPE, "unet")), "tar --dereference"),
        (tar_of({f"{DEEP}/x": b"y"}, *LINKS), "is a link"),
        (tar_of({"a": b"x"}, entry_of("b", tarfile.LNKTYPE, "a")), "is a link"),
    ],
)
def test_an_archive_that_cannot_be_a_model_is_the_archives_fault(
    content: bytes, complaint: str, tmp_path
):
    cache = DiskCache(tmp_path / "cache")
    cache.folder.mkdir()
    archive = cache.folder / "sd15.tar.part"
    archive.write_bytes(content)
    with pytest.raises(errors.SetupError, match=complaint):
        model._unpack(archive, cache.folder / "sd15", cache)
    assert "outside" not in {
        name for _, _, names in os.walk(tmp_path) for name in names
    }
    assert not (cache.folder / "sd15").exists()

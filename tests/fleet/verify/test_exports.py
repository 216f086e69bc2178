"""`imagefleet verify EXPORT`, by a stranger: what was changed is found, whoever changed it."""

import asyncio
import hashlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cli import console
from fleet.export.plan import MANIFEST
from header_files import lora_of
from imagefleet.files import pack
from imagefleet.job.message import read_job
from imagefleet.signing import SigningKey
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict
from in_process import Imagefleet
from storages import flags
from stored_images import member as made_picture

#: Verifies an export in a process without a storage: its exit code, and what it prints as JSON.
Verify = Callable[..., tuple[int, JSONDict]]

JOBS = 6


@pytest.fixture
def storage_settings(local_settings: StorageSettings) -> StorageSettings:
    """Of one storage: an export is the same of all."""
    return local_settings


@pytest.fixture(params=["alone", "packed"])
def bundle(request: pytest.FixtureRequest) -> int:
    """Jobs of a message: in packs, an export has copies of these."""
    return 1 if request.param == "alone" else 3


@pytest.fixture
async def export(
    storage_settings: StorageSettings,
    imagefleet: Imagefleet,
    run_worker,
    key: SigningKey,
    bundle: int,
    tmp_path: Path,
) -> Callable[..., Path]:
    """Exports six pictures, drawn with a LoRA by a real worker from signed jobs."""
    (tmp_path / "style.safetensors").write_bytes(lora_of())
    rows = [
        {"id": f"j.{number}", "prompt": f"a house {number} <lora:style:0.8>"}
        for number in range(JOBS)
    ]
    (tmp_path / "jobs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    where = flags(storage_settings)
    signed = ["--signing-key", str(tmp_path / "key.pem")]

    def run(*arguments: str) -> None:
        ended = imagefleet(*arguments, *where)
        assert ended.returncode == 0, ended.stderr

    def load() -> None:
        run("files", "add", "lora", "style.safetensors")
        sent = ["--campaign", "spring", "--bundle", str(bundle), "--verify-share", "0"]
        run("load", "jobs.jsonl", *sent, *signed)

    await asyncio.to_thread(load)
    await run_worker("w1")

    def export(*options: str) -> Path:
        run("export", "spring", "out", *(options or signed))
        return tmp_path / "out"

    return export


@pytest.fixture
def verify(in_process: Imagefleet) -> Verify:
    def run(folder: Path, *arguments: str) -> tuple[int, JSONDict]:
        ended = in_process("verify", str(folder), "--json", *arguments)
        assert ended.stdout, ended.stderr
        return ended.returncode, json.loads(ended.stdout)

    return run


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def rewrite(path: Path, change: Callable[[str, bytes], bytes]) -> None:
    """Writes a tar again, each of its members as *change* makes it."""
    found = members(path)
    with tarfile.open(path, "w") as tar:
        for name, data in found.items():
            info = tarfile.TarInfo(name)
            info.size = len(made := change(name, data))
            tar.addfile(info, io.BytesIO(made))


def list_again(folder: Path) -> None:
    """Writes the hashes of all files into the manifest, as who changed them would."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for shard in manifest["shards"]:
        data = (folder / shard["file"]).read_bytes()
        shard |= {"file_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def named(found: JSONDict) -> list[tuple[str | None, str]]:
    return [(fault["picture"], fault["why"]) for fault in found["faults"]]


async def test_an_export_as_it_was_made_has_no_fault_and_signatures_that_count(
    export: Callable[..., Path], verify: Verify, key: SigningKey
):
    folder = await asyncio.to_thread(export)

    for options in ([], ["--trusted-key", key.public]):
        code, found = await asyncio.to_thread(verify, folder, *options)
        assert (code, found["faults"]) == (0, [])
        assert (found["pictures"], found["without_job"]) == (JOBS, 0)
    assert (found["signed_jobs"], found["is_sealed"]) == (JOBS, True)


async def test_one_changed_byte_is_found_in_its_picture_and_in_no_other(
    export: Callable[..., Path], verify: Verify
):
    folder = await asyncio.to_thread(export)
    path = min(folder.glob("*.tar"))
    name = [each for each in members(path) if each.endswith(".png")][1]
    data = bytearray(path.read_bytes())
    data[data.find(members(path)[name]) + 500] ^= 1
    path.write_bytes(data)

    code, found = await asyncio.to_thread(verify, folder)

    assert code == console.EXIT_IMAGES_WRONG
    why = "its file has another SHA-256 than its record"
    assert named(found) == [(name.removesuffix(".png"), why)]


def forged(found: bytes, before: bytes, after: bytes) -> bytes:
    assert before in found
    return found.replace(before, after, 1)


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        (b"<lora:style:0.8>", b"<lora:stile:0.8>", "prompt"),
        (b"a house 1", b"a mouse 1", "prompt"),
        (b'"seed":', b'"seed":1', "seed"),
    ],
)
async def test_a_forged_record_is_found_though_columns_and_hashes_fit_it(
    export: Callable[..., Path],
    verify: Verify,
    before: bytes,
    after: bytes,
    why: str,
):
    folder = await asyncio.to_thread(export)
    for path in folder.glob("*.tar"):
        lines = members(path)[pack.HEAD].splitlines()
        (line,) = [each for each in lines if b'"id":"j.1"' in each] or [b""]
        if not line:
            continue
        changed = forged(line, before, after)
        rewrite(path, lambda _, data: data.replace(line, changed))  # noqa: B023
    list_again(folder)

    code, found = await asyncio.to_thread(verify, folder)

    assert code == console.EXIT_IMAGES_WRONG
    ((picture, told),) = [each for each in named(found) if each[0]]
    assert picture in {"j%2E1", "000000001"}
    assert why in told or "column" in told


async def test_a_record_that_tells_another_worker_everywhere_breaks_the_signature(
    export: Callable[..., Path], verify: Verify, key: SigningKey
):
    folder = await asyncio.to_thread(export)
    for path in folder.glob("*.tar"):
        rewrite(path, lambda _, data: data.replace(b'"w1"', b'"w2"'))
    list_again(folder)

    code, found = await asyncio.to_thread(verify, folder, "--trusted-key", key.public)

    assert code == console.EXIT_IMAGES_WRONG
    assert [fault["file"] for fault in found["faults"]] == [MANIFEST]
    assert not found["is_sealed"]


async def test_a_lora_that_was_swapped_for_another_of_its_name_is_found(
    export: Callable[..., Path],
    verify: Verify,
    imagefleet: Imagefleet,
    storage_settings: StorageSettings,
    tmp_path: Path,
):
    (tmp_path / "style.safetensors").write_bytes(lora_of("another"))
    for change in (
        ["remove", "lora", "style", "--yes"],
        ["add", "lora", "style.safetensors"],
    ):
        command = ["files", *change, *flags(storage_settings)]
        ended = await asyncio.to_thread(imagefleet, *command)
        assert ended.returncode == 0, ended.stderr
    folder = await asyncio.to_thread(export)

    code, found = await asyncio.to_thread(verify, folder)

    assert code == console.EXIT_IMAGES_WRONG
    assert len(named(found)) == JOBS
    for _, why in named(found):
        assert "another LoRA style" in why


async def test_a_picture_of_a_job_that_nobody_signed_is_named_by_who_has_the_key(
    export: Callable[..., Path], verify: Verify, key: SigningKey, tmp_path: Path
):
    """The forger draws another picture, with a record and a job that fit it."""
    folder = await asyncio.to_thread(export)
    path = min(folder.glob("*.tar"))
    seed = read_job('{"prompt":"x","id":"j.1"}', "none").seed
    fake = made_picture("j.1", seed=seed, size_bytes=len(made_picture("j.1").data))
    packed = pack.write(pack.name_of("spring", "0" * 32, 1), [fake])
    for other in folder.glob("*.tar"):
        other.unlink()
    (folder / MANIFEST).unlink()
    path.write_bytes(packed.data)

    code, found = await asyncio.to_thread(verify, folder)
    assert (code, found["faults"]) == (0, []), "its files agree"
    code, found = await asyncio.to_thread(verify, folder, "--trusted-key", key.public)
    assert code == console.EXIT_IMAGES_WRONG
    assert named(found) == [("j%2E1", "neither its job nor the manifest is signed")]


async def test_a_job_that_another_key_has_signed_does_not_count(
    export: Callable[..., Path], verify: Verify, tmp_path: Path
):
    other = SigningKey.create(tmp_path / "other.pem")
    folder = await asyncio.to_thread(export)

    code, found = await asyncio.to_thread(verify, folder, "--trusted-key", other.public)

    assert code == console.EXIT_IMAGES_WRONG
    assert found["signed_jobs"] == 0
    assert found["fault_count"] == JOBS + 1


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def link(path: Path) -> None:
    shutil.move(path, path.with_name("moved"))
    path.symlink_to("moved")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def member_of(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0) -> bytes:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.size = size
    info.linkname = "../../secret"
    return info.tobuf(tarfile.USTAR_FORMAT)


def begin_with(block: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(block + path.read_bytes()) and None


HOSTILE: dict[str, Callable[[Path], None]] = {
    "a link in place of a file": link,
    "a file that is cut": cut,
    "a link in it": begin_with(member_of("000000000.png", tarfile.SYMTYPE)),
    "a hard link in it": begin_with(member_of("000000000.png", tarfile.LNKTYPE)),
    "a device in it": begin_with(member_of("000000000.png", tarfile.CHRTYPE)),
    "a path out of the folder": begin_with(member_of("../../out.png")),
    "a picture of a terabyte": begin_with(member_of("0.png", size=2**32)),
    "a header of a gigabyte": begin_with(member_of("x", tarfile.XHDTYPE, 2**30)),
    "records twice": begin_with(member_of(pack.HEAD)),
    "nothing": lambda path: path.write_bytes(b"") and None,
    "gone": Path.unlink,
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_a_hostile_file_is_a_fault_of_its_own_and_writes_nothing(
    export: Callable[..., Path], verify: Verify, what: str, tmp_path: Path
):
    folder = await asyncio.to_thread(export)
    path = min(folder.glob("*.tar"))
    HOSTILE[what](path)
    before = files_in(tmp_path)

    code, found = await asyncio.to_thread(verify, folder)

    assert code == console.EXIT_IMAGES_WRONG
    assert {fault["file"] for fault in found["faults"]} == {path.name}
    assert files_in(tmp_path) == before


async def test_a_manifest_that_names_files_elsewhere_reads_none_of_them(
    export: Callable[..., Path], verify: Verify, tmp_path: Path
):
    folder = await asyncio.to_thread(export)
    manifest = json.loads((folder / MANIFEST).read_text())
    shutil.copy(min(folder.glob("*.tar")), tmp_path / "other.tar")
    manifest["shards"][0]["file"] = "../other.tar"
    (folder / MANIFEST).write_text(json.dumps(manifest))

    code, found = await asyncio.to_thread(verify, folder)

    assert code == console.EXIT_IMAGES_WRONG
    why = {fault["file"]: fault["why"] for fault in found["faults"]}
    assert why["../other.tar"] == "is no file in the folder of the export"


def test_a_folder_without_an_export_is_said(in_process: Imagefleet, tmp_path: Path):
    ended = in_process("verify", str(tmp_path))

    assert ended.returncode == console.EXIT_OPERATOR_MUST_ACT
    assert "has no manifest.json" in ended.stderr
    assert "are not for it" in in_process("verify", "./out", "--quarantine").stderr

"""What a pack holds, and what is refused as none."""

import gc
import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import made_records
from imagefleet.files import pack
from imagefleet.files.pack import Contents, Member
from imagefleet.records.record import Record
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings

NAME = pack.name_of("spring", "0123456789abcdef" * 2, 1)
NOTHING = Contents()


def png(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (shade, 0, 0)).save(file, "PNG")
    return file.getvalue()


def members(*names: str, **fields: Any) -> list[Member]:
    return [
        Member(made_records.image(name, **fields), png(shade))
        for shade, name in enumerate(names)
    ]


def files_of(data: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        found = {each.name: tar.extractfile(each) for each in tar}
        return {name: file.read() for name, file in found.items() if file}


def tar_of(files: list[tuple[str, bytes]], kind: bytes = tarfile.REGTYPE) -> bytes:
    """A tar as packs are, of any files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.type = kind
            member.mtime = int(made_records.NOON.timestamp())
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def test_each_picture_lies_where_its_record_says():
    made = pack.write(NAME, members("a", "b"))

    assert [record.blob for record in made.records] == ["spring/a.png", "spring/b.png"]
    for shade, record in enumerate(made.records):
        assert record.offset is not None
        assert record.size_bytes is not None
        part = made.data[record.offset : record.offset + record.size_bytes]
        assert part == png(shade)
        assert record.sha256 == hashlib.sha256(part).hexdigest()
        assert record.pack == NAME


def test_a_pack_is_read_as_it_was_written():
    ends = [
        made_records.ended("bad", reason="no such LoRA", body='{"prompt": "\\n"}'),
        made_records.ended("late", "cancelled"),
    ]
    written = pack.write(NAME, members("a", "b", prompt="ein Hündchen 🐶"), ends)

    assert pack.read(NAME, written.data) == Contents(written.records, ends)


def test_a_pack_of_failures_alone_is_one():
    ends = [made_records.ended("bad")]

    assert pack.read(NAME, pack.write(NAME, [], ends).data) == ([], ends)


def test_the_same_pictures_make_the_same_bytes():
    assert pack.write(NAME, members("a", "b")) == pack.write(NAME, members("a", "b"))


def test_a_proof_covers_the_place_in_the_pack():
    def prove(record: Record) -> Record:
        told = json.loads(record.claims)
        assert told["pack"] == NAME
        assert told["offset"] > 512
        assert told["size_bytes"] == len(png(0))
        return record.model_copy(update={"proof": "x" * 22})

    made = pack.write(NAME, members("a"), prove=prove)

    assert made.records[0].proof == "x" * 22
    assert pack.read(NAME, made.data).records == made.records


@pytest.mark.parametrize("name", ["v1.5-a", "a.png.png", "x" * 128, "0." + "." * 120])
def test_ids_with_dots_and_long_ones_come_back(name: str):
    made = pack.write(NAME, members(name))

    assert pack.read(NAME, made.data).records[0].id == name
    assert all(each.count(".") == 1 for each in list(files_of(made.data))[1:])


def test_several_images_of_a_job_are_several_members():
    first = made_records.image("a", images=2)
    second = made_records.image("a", images=2, index=1, blob="spring/a~1.png")
    made = pack.write(NAME, [Member(first, png(0)), Member(second, png(1))])

    assert pack.read(NAME, made.data).records == made.records
    assert list(files_of(made.data))[1:] == ["a.png", "a.json", "a~1.png", "a~1.json"]


@pytest.mark.parametrize(
    "refused",
    [
        lambda: members("a", "a"),
        lambda: members("a", campaign="autumn"),
        lambda: members("a", blob="spring/b.png"),
        lambda: members("a", blob="spring/../a.png"),
        lambda: [Member(made_records.image("a"), bytes(pack.MAX_PACK_BYTES))],
        lambda: members("a") + members("b", blob="spring/b.jpg"),
    ],
    ids=["twice", "campaign", "another's name", "climbing", "too large", "formats"],
)
def test_what_no_reader_would_take_is_not_written(refused: Callable[[], list[Member]]):
    with pytest.raises(ValueError):
        pack.write(NAME, refused())


@pytest.mark.parametrize("bundle", ["", "spring", "../" + "0" * 29, "G" * 32])
def test_a_bundle_whose_name_could_be_guessed_has_no_pack(bundle: str):
    with pytest.raises(ValueError):
        pack.name_of("spring", bundle, 1)


def test_only_names_of_packs_have_a_campaign():
    assert pack.campaign_of(NAME) == "spring"
    assert pack.campaign_of("spring/a.png") is None
    assert pack.campaign_of(f"-records/{NAME}") is None


WHOLE = pack.write(NAME, members("a", "b"), [made_records.ended("bad")]).data
FILES = files_of(WHOLE)


def changed(name: str, data: bytes) -> bytes:
    return tar_of(list({**FILES, name: data}.items()))


def renamed(old: str, new: str) -> bytes:
    names = {old: new}
    return tar_of([(names.get(name, name), data) for name, data in FILES.items()])


def claimed(**fields: Any) -> bytes:
    """The pack whose first record says something else, in as many bytes."""
    first, *others = FILES["__records__"].split(b"\n")
    line = json.dumps(json.loads(first) | fields, separators=(",", ":")).encode()
    text = b"\n".join([line, *others]).strip()
    return changed("__records__", text.ljust(len(FILES["__records__"]), b"\n"))


def ending(*lines: bytes) -> bytes:
    """The pack with other ends."""
    pictures = FILES["__records__"].strip().split(b"\n")[:2]
    text = b"\n".join([*pictures, *lines])
    return changed("__records__", text.ljust(len(FILES["__records__"]), b"\n"))


def test_the_forgeries_differ_from_a_pack_in_one_thing_alone():
    assert pack.read(NAME, tar_of(list(FILES.items()))) != NOTHING


@pytest.mark.parametrize(
    "forged",
    {
        "empty": b"",
        "no tar": b"x" * 10_240,
        "no member": tar_of([]),
        "cut in a picture": WHOLE[:3_000],
        "cut between members": WHOLE[:-10_240],
        "longer": WHOLE + bytes(512),
        "no records": tar_of(list(FILES.items())[1:]),
        "twice": tar_of([*FILES.items(), *FILES.items()]),
        "a member twice": tar_of([*list(FILES.items())[:4], ("a.png", png(3))]),
        "a picture without a record": tar_of([*FILES.items(), ("c.png", png(3))]),
        "another file": tar_of([*FILES.items(), ("c.txt", b""), ("c.json", b"{}")]),
        "absolute": renamed("a.png", "/a.png"),
        "climbing": renamed("a.png", "../a.png"),
        "another name": renamed("a.png", "c.png"),
        "links": tar_of(list(FILES.items()), tarfile.SYMTYPE),
        "another picture": changed("a.png", png(7)),
        "no lines": changed("__records__", b"{"),
        "a list": changed("__records__", b"[]"),
        "deep": changed("__records__", b"[" * 100_000),
        "another's name": claimed(blob="spring/c.png"),
        "another campaign": claimed(campaign="autumn"),
        "another place": claimed(offset=0),
        "another size": claimed(size_bytes=1),
        "another hash": claimed(sha256="0" * 64),
        "another pack": claimed(pack=NAME.replace("~1", "~2")),
        "no place": claimed(pack=None),
        "an end that is none": ending(made_records.image("x").line().strip()),
        "an end twice": ending(*[made_records.ended("bad").line().strip()] * 2),
        "another line": ending(b"{}"),
    }.items(),
    ids=lambda forged: forged[0],
)
def test_what_is_no_whole_pack_counts_as_empty(forged: tuple[str, bytes]):
    assert pack.read(NAME, forged[1]) == NOTHING


def test_a_pack_under_another_name_counts_as_empty():
    assert pack.read(NAME.replace("~1", "~2"), WHOLE) == NOTHING


@pytest.mark.parametrize("bodies", [10, 60_000], ids=["short", "long"])
async def test_the_start_of_a_pack_tells_its_records(
    local_settings: StorageSettings, bodies: int
):
    ends = [made_records.ended(f"bad-{n}", body="x" * bodies) for n in range(8)]
    written = pack.write(NAME, members("a", "b"), ends)
    async with open_storage(local_settings) as storage:
        await storage.create()
        await storage.files.create(NAME, written.data, "application/x-tar", {})
        found = await pack.head(storage.files, NAME)
        await storage.files.create("spring/x.tar", WHOLE, "application/x-tar", {})

        assert found == Contents(written.records, ends)
        assert await pack.head(storage.files, NAME.replace("~1", "~2")) is None
        assert await pack.head(storage.files, "spring/x.tar") == NOTHING


def test_a_file_of_nothing_but_a_size_takes_no_memory():
    """A sparse member says how large its zeros are."""
    bomb = io.BytesIO()
    with tarfile.open(fileobj=bomb, mode="w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("a.png")
        member.pax_headers = {
            "GNU.sparse.major": "0",
            "GNU.sparse.minor": "1",
            "GNU.sparse.map": "0,0",
            "GNU.sparse.size": str(2**50),
        }
        tar.addfile(member)

    assert pack.read(NAME, bomb.getvalue()) == NOTHING


@given(st.integers(0, len(WHOLE) - 1), st.binary(min_size=1, max_size=64))
def test_a_changed_pack_is_never_read_as_another(at: int, noise: bytes):
    damaged = WHOLE[:at] + noise + WHOLE[at + len(noise) :]

    found = pack.read(NAME, damaged)

    pictures = [png(0), png(1)]
    for record, data in zip(found.records, pictures, strict=bool(found.records)):
        assert record.sha256 == hashlib.sha256(data).hexdigest()


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Two packs, of which the first lacks what the second has."""
    bare = members("a", "b", "c", "d", "e", "f")
    rich = members(
        "v1.5",
        "w",
        prompt="a house",
        steps=4,
        cfg_scale=1.5,
        metadata={"order": 7},
        loras=(("outline-style", 0.8),),
    )
    second = pack.name_of("spring", "f" * 32, 2)
    for name, held in ((NAME, bare), (second, [*members("g"), *rich])):
        file = tmp_path / name.partition("/")[2]
        file.write_bytes(pack.write(name, held, [made_records.ended("bad")]).data)
    return tmp_path


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_webdataset_reads_packs(stored: Path):
    webdataset = pytest.importorskip("webdataset")
    files = [str(each) for each in sorted(stored.glob("*.tar"))]
    shards = webdataset.WebDataset(files, shardshuffle=False)
    samples = list(shards.decode("pil").to_tuple("__key__", "png", "json"))
    gc.collect()  # it leaves its files open

    assert [key for key, *_ in samples] == [*"abcdefg", "v1%2E5", "w"]
    _, image, meta = samples[-1]
    assert (image.size, meta["prompt"], meta["steps"]) == ((8, 8), "a house", 4)


def test_datasets_reads_packs_whose_first_records_lack_fields(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    found = datasets.load_dataset(
        "webdataset",
        data_files=f"{stored}/*.tar",
        cache_dir=str(tmp_path / "cache"),
        split="train",
    )

    assert type(found.features["png"]).__name__ == "Image"
    rows = list(found)
    assert [row["json"]["id"] for row in rows] == [*"abcdefg", "v1.5", "w"]
    assert [row["png"].size for row in rows] == [(8, 8)] * 9
    last = rows[-1]["json"]
    assert (last["prompt"], last["steps"], last["cfg_scale"]) == ("a house", 4, 1.5)
    assert json.loads(last["metadata"]) == {"order": 7}

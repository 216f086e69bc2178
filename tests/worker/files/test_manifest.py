"""Manifests of files: plain ones, and signed ones, which list all that a worker takes."""

import json

import pytest

from imagefleet import errors
from imagefleet.files.kinds import LORA
from imagefleet.signing import SigningKey, TrustedKeys
from worker.files import manifest
from worker.files.manifest import Manifest


class Source:
    """A manifest that can be replaced; counts how often it is read."""

    def __init__(self, content: bytes | None) -> None:
        self.content = content
        self.reads = 0

    async def read(self) -> bytes | None:
        self.reads += 1
        return self.content


WHERE = "loras/manifest.json in the container 'files'"


def plain(source: Source) -> Manifest:
    return Manifest(WHERE, source.read, LORA)


async def test_a_manifest_gives_hashes_by_name_in_any_case():
    source = Source(json.dumps({"a": "ABC", "b": "def"}).encode())
    hashes = plain(source)
    assert [await hashes.sha256(name) for name in ("a", "b", "c")] == [
        "abc",
        "def",
        None,
    ]
    assert source.reads == 1


async def test_without_a_manifest_any_file_will_do():
    source = Source(None)
    hashes = plain(source)
    assert await hashes.sha256("a") is None
    assert await hashes.sha256("a") is None
    assert source.reads == 1, "that there is none is remembered as well"


async def test_a_manifest_is_read_again_after_a_while_and_when_told_to_forget_it(
    monkeypatch,
):
    source = Source(b'{"a": "1"}')
    hashes = plain(source)
    assert await hashes.sha256("a") == "1"
    source.content = b'{"a": "2"}'
    assert await hashes.sha256("a") == "1"
    hashes.forget()
    assert await hashes.sha256("a") == "2"
    source.content = None
    monkeypatch.setattr(manifest, "READ_AGAIN_SECONDS", -1.0)
    assert await hashes.sha256("a") is None


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b'{"a": 1}', b'"a"', b"\xff", b"[" * 100_000]
)
async def test_an_invalid_manifest_stops_the_lookup_instead_of_trusting_any_file(
    content: bytes,
):
    source = Source(content)
    hashes = plain(source)
    for _ in range(2):
        with pytest.raises(
            errors.TransientError,
            match=r"manifest\.json in the container 'files' is not",
        ):
            await hashes.sha256("a")
    source.content = b'{"a": "1"}'
    assert await hashes.sha256("a") == "1"


@pytest.fixture
def other_key(tmp_path) -> SigningKey:
    return SigningKey.create(tmp_path / "other.pem")


def strict(source: Source, *keys: SigningKey) -> Manifest:
    trusted = TrustedKeys.read(",".join(key.public for key in keys))
    return Manifest(WHERE, source.read, LORA, trusted)


async def test_a_signed_manifest_lists_all_that_is_taken(key: SigningKey):
    hashes = strict(Source(manifest.encode("loras", {"a": "ABC"}, key)), key)
    assert await hashes.sha256("a") == "abc"
    with pytest.raises(
        errors.MissingFileError, match=r"does not list 'b': `imagefleet files add lora`"
    ):
        await hashes.sha256("b")


async def test_a_file_listed_a_moment_ago_is_not_refused_for_an_old_copy(
    key: SigningKey,
):
    source = Source(manifest.encode("loras", {"a": "1"}, key))
    hashes = strict(source, key)
    assert await hashes.sha256("a") == "1"
    source.content = manifest.encode("loras", {"a": "1", "b": "2"}, key)
    assert await hashes.sha256("b") == "2"
    assert source.reads == 2


async def test_a_file_that_is_not_listed_costs_one_read_a_job(key: SigningKey):
    source = Source(manifest.encode("loras", {}, key))
    hashes = strict(source, key)
    for reads in (1, 2, 3):
        with pytest.raises(errors.MissingFileError):
            await hashes.sha256("b")
        assert source.reads == reads


async def test_a_manifest_that_is_not_signed_is_the_operators_fault_and_no_jobs(
    key: SigningKey, other_key: SigningKey
):
    listed = {"a": "1"}
    good = json.loads(manifest.encode("loras", listed, key))
    bad = {
        "there is none": None,
        "it is plain": manifest.encode("loras", listed, None),
        "another key": manifest.encode("loras", listed, other_key),
        "is not a JSON": b"{",
    }
    for change in (
        {"files": {"a": "2"}},
        {"files": {"a": "1", "b": "2"}},
        {"folder": "models"},
        {"signature": "A" * 88},
        {"signature": good["signature"].swapcase()},
        {"signature": ["x"]},
        {"more": 1},
    ):
        content = json.dumps(good | change).encode()
        with pytest.raises(errors.SetupError, match="another key signed it"):
            await strict(Source(content), key).sha256("a")
    for why, content in bad.items():
        with pytest.raises(errors.SetupError, match=f"must be signed .*{why}"):
            await strict(Source(content), key).sha256("a")


async def test_a_jobs_signature_is_none_for_a_manifest(key: SigningKey):
    fields = {"folder": "loras", "files": {"a": "1"}}
    source = Source(
        json.dumps({**fields, "signature": key.sign("job", fields)}).encode()
    )
    with pytest.raises(errors.SetupError, match="another key signed it"):
        await strict(source, key).sha256("a")


async def test_two_keys_are_trusted_while_keys_change(
    key: SigningKey, other_key: SigningKey
):
    for signer in (key, other_key):
        source = Source(manifest.encode("loras", {"a": "1"}, signer))
        assert await strict(source, key, other_key).sha256("a") == "1"


async def test_without_a_trusted_key_a_signed_manifest_is_read_as_a_plain_one(
    key: SigningKey,
):
    hashes = plain(Source(manifest.encode("loras", {"a": "1"}, key)))
    assert await hashes.sha256("a") == "1"
    assert await hashes.sha256("b") is None


@pytest.mark.parametrize("is_strict", [False, True])
async def test_a_manifest_is_bounded_in_bytes_and_files(
    key: SigningKey, monkeypatch, *, is_strict: bool
):
    source = Source(manifest.encode("loras", {"a": "1", "b": "2"}, key))
    hashes = strict(source, key) if is_strict else plain(source)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "MAX_FILES", 1)
        with pytest.raises(
            errors.SetupError, match="too large: 16 MiB and 1 files are allowed"
        ):
            await hashes.sha256("a")
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "MAX_BYTES", 100)
        with pytest.raises(errors.SetupError, match="too large"):
            await hashes.sha256("a")
    assert await hashes.sha256("a") == "1"

"""Content Credentials of pictures that leave the fleet, read back by C2PA's own reader."""

import asyncio
import hashlib
import io
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import c2pa
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

import exported
from cli import console
from fleet.results import credentials
from imagefleet.files import picture
from imagefleet.files.pack import Member
from imagefleet.job.message import Output
from imagefleet.records.pictures import Picture
from imagefleet.storage.open import Storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict
from in_process import Imagefleet
from storages import flags
from stored_images import member, store_alone, store_pack
from worker.stages import encode

_PEM = serialization.Encoding.PEM
_USES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


class Publisher:
    """A publisher's PEM file, and the certificate of the authority that stands above it."""

    def __init__(self, folder: Path, key: Any) -> None:
        above = ec.generate_private_key(ec.SECP256R1())
        self.anchor = self._certificate("authority", above, "authority", above)
        own = self._certificate("acme", key, "authority", above)
        private = key.private_bytes(
            _PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self.path = folder / "publisher.pem"
        self.path.write_bytes(private + own + self.anchor)

    @staticmethod
    def _certificate(name: str, key: Any, issuer: str, issuers_key: Any) -> bytes:
        is_authority = name == issuer
        uses = ("key_cert_sign", "crl_sign") if is_authority else _USES[:1]
        made = x509.CertificateBuilder(
            issuer_name=named(issuer),
            subject_name=named(name),
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=datetime.now(UTC) - timedelta(days=1),
            not_valid_after=datetime.now(UTC) + timedelta(days=30),
        )
        usage = x509.KeyUsage(**{use: use in uses for use in _USES})
        made = made.add_extension(usage, critical=True)
        limits = x509.BasicConstraints(ca=is_authority, path_length=None)
        made = made.add_extension(limits, critical=True)
        above = x509.AuthorityKeyIdentifier.from_issuer_public_key(
            issuers_key.public_key()
        )
        own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        made = made.add_extension(above, critical=False)
        made = made.add_extension(own, critical=False)
        if not is_authority:
            extended = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.EMAIL_PROTECTION])
            made = made.add_extension(extended, critical=False)
        return made.sign(issuers_key, hashes.SHA256()).public_bytes(_PEM)

    def read(self, data: bytes, kind: str = "png") -> tuple[str, JSONDict]:
        """What C2PA's reader makes of a file: its verdict, and the assertions by label."""
        trust = {
            "trust": {"trust_anchors": self.anchor.decode()},
            "verify": {"verify_trust": True},
        }
        context = c2pa.Context(c2pa.Settings.from_dict(trust))
        with c2pa.Reader(f"image/{kind}", io.BytesIO(data), context=context) as reader:
            manifest = reader.get_active_manifest()
            assert manifest is not None
            assert "thumbnail" not in manifest
            told = {each["label"]: each["data"] for each in manifest["assertions"]}
            return str(reader.get_validation_state()), told


def named(name: str) -> x509.Name:
    words = {NameOID.COMMON_NAME: name, NameOID.ORGANIZATION_NAME: "acme"}
    return x509.Name([x509.NameAttribute(*each) for each in words.items()])


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    return Publisher(tmp_path, ec.generate_private_key(ec.SECP256R1()))


def drawn(kind: str = "png") -> Picture:
    """A picture drawn with a LoRA, whose hash its text has."""
    made = member("a", loras=[("style", 0.8)], model="dream", proof="p" * 22)
    pixels = np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)
    text = 'a house\nSteps: 1, Lora hashes: "style: 0123456789ab"'
    data = encode.encode(pixels, Output(format=kind), text).data  # type: ignore[arg-type]
    sha256 = hashlib.sha256(data).hexdigest()
    record = made.record.model_copy(update={"sha256": sha256})
    return Picture(data, record, is_kept_aside=False)


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_a_picture_tells_its_model_its_loras_by_hash_its_job_and_its_workers_proof(
    publisher: Publisher, kind: str
):
    before = drawn(kind)

    signed = credentials.Credentials.read(str(publisher.path)).sign(before)

    assert not isinstance(signed, str)
    verdict, told = publisher.read(signed.data, kind)
    assert verdict == "Trusted"
    ((action,)) = told["c2pa.actions.v2"]["actions"]
    assert action["digitalSourceType"].endswith("/trainedAlgorithmicMedia")
    receipt = told[credentials.RECEIPT]
    assert receipt["loras"] == [
        {"name": "style", "weight": 0.8, "hash": "0123456789ab"}
    ]
    for name in ("model", "digest", "proof", "sha256", "worker"):
        assert receipt[name] == getattr(before.record, name)
    assert "prompt" not in receipt
    assert len(signed.data) - len(before.data) < 4_000
    assert signed.record.sha256 == hashlib.sha256(signed.data).hexdigest()


def test_the_prompt_is_told_where_it_is_wanted(publisher: Publisher):
    signed = credentials.Credentials.read(f"{publisher.path}+prompt").sign(drawn())

    assert not isinstance(signed, str)
    _, told = publisher.read(signed.data)
    assert told[credentials.RECEIPT]["prompt"] == "a house a"


def test_a_changed_picture_is_invalid_to_the_reader(publisher: Publisher):
    signed = credentials.Credentials.read(str(publisher.path)).sign(drawn())
    assert not isinstance(signed, str)
    data = bytearray(signed.data)
    data[-40] ^= 1

    assert publisher.read(bytes(data))[0] == "Invalid"


def test_an_ed25519_key_signs_too(tmp_path: Path):
    publisher = Publisher(tmp_path, ed25519.Ed25519PrivateKey.generate())

    signed = credentials.Credentials.read(str(publisher.path)).sign(drawn())

    assert not isinstance(signed, str)
    assert publisher.read(signed.data)[0] == "Trusted"


@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN PRIVATE KEY-----"])
def test_a_file_that_is_no_key_is_one_sentence(
    in_process: Imagefleet, tmp_path: Path, content: bytes | None
):
    if content is not None:
        (tmp_path / "key.pem").write_bytes(content)

    ended = in_process("export", "spring", "out", "--c2pa", "key.pem")

    assert ended.returncode == console.EXIT_OPERATOR_MUST_ACT
    assert "--c2pa: should be a PEM file" in ended.stderr


async def stored(storage: Storage) -> list[Member]:
    """Two pictures in a pack, and one by itself."""
    made = [with_size(each) for each in "abc"]
    await store_pack(storage, made[:2])
    await store_alone(storage, made[2])
    return made


def with_size(name: str) -> Member:
    size_bytes = len(member(name).data)
    return member(name, seed=drawn_seed(name), size_bytes=size_bytes)


def drawn_seed(name: str) -> int:
    found = picture.job_in(member(name).data)
    assert found is not None
    return found[1].seed


async def test_an_export_and_a_download_have_signed_pictures_of_packs_too(
    storage: Storage,
    storage_settings: StorageSettings,
    in_process: Imagefleet,
    publisher: Publisher,
    tmp_path: Path,
):
    made = await stored(storage)
    where = [*flags(storage_settings), "--c2pa", str(publisher.path)]

    def run(*arguments: str) -> JSONDict:
        ended = in_process(*arguments, "--json")
        assert ended.returncode == 0, ended.stderr
        found: JSONDict = json.loads(ended.stdout)
        return found

    await asyncio.to_thread(run, "export", "spring", "out", *where)
    download = ["results", "spring", "--download", "down", *where]
    first = await asyncio.to_thread(run, *download)
    again = await asyncio.to_thread(run, *download)

    signed = [sample.data for sample in exported.samples(tmp_path / "out")]
    signed += [path.read_bytes() for path in files_in(tmp_path / "down")]
    assert len(signed) == 2 * len(made)
    told = [publisher.read(data) for data in signed]
    assert {verdict for verdict, _ in told} == {"Trusted"}
    of_pictures = {receipt[credentials.RECEIPT]["sha256"] for _, receipt in told}
    assert of_pictures == {hashlib.sha256(each.data).hexdigest() for each in made}
    assert (first["images"], again["images"], again["already_there"]) == (3, 0, 3)
    verdict = await asyncio.to_thread(run, "verify", str(tmp_path / "out"))
    assert (verdict["pictures"], verdict["faults"]) == (3, [])


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.png"))


def test_options_that_do_not_fit_are_said(in_process: Imagefleet):
    alone = in_process("results", "spring", "--c2pa", "key.pem")
    assert "--c2pa go with --download" in alone.stderr
    both = in_process(
        *("results", "spring", "--download", "x", "--packed", "--c2pa", "key.pem")
    )
    assert "leave out --packed" in both.stderr

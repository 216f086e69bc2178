import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import imagefleet
import signers
from browsing import visible
from imagefleet import Job, aio, errors, signing
from imagefleet.job.message import read_job
from imagefleet.signing import SigningKey, TrustedKeys
from imagefleet.storage.settings import SignerSettings, StorageSettings

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@pytest.fixture(scope="module")
def key(tmp_path_factory) -> SigningKey:
    return SigningKey.create(tmp_path_factory.mktemp("keys") / "key.pem")


def private_text(path: Path) -> str:
    return "".join(path.read_text().splitlines()[1:-1])


# A busy machine is slow to draw examples.
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.text(), JSON))
def test_a_signature_holds_for_the_same_content_in_another_order(
    fields: dict[str, object],
):
    key = SigningKey(ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32)))
    trusted = TrustedKeys.read(key.public)
    signature = key.sign("job", fields)
    assert trusted.accept("job", dict(reversed(fields.items())), signature)
    assert not trusted.accept("job", {**fields, "one more": 1}, signature)
    assert not trusted.accept("manifest of loras", fields, signature)


@pytest.mark.parametrize(
    "signature",
    [
        None,
        "",
        5,
        [],
        {},
        "A" * 88,
        "A" * 86 + "==",
        "A" * 87,
        "é" * 88,
        "=" * 88,
        "A" * 60_000,
    ],
)
def test_garbage_is_no_signature(key: SigningKey, signature: object):
    assert not TrustedKeys.read(key.public).accept("job", {"a": 1}, signature)


def test_content_too_deep_to_be_written_is_not_signed(key: SigningKey):
    deep: dict[str, object] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    assert not TrustedKeys.read(key.public).accept("job", deep, "A" * 86 + "==")


def test_one_of_several_keys_is_enough(key: SigningKey, tmp_path):
    new = SigningKey.create(tmp_path / "new.pem")
    both = TrustedKeys.read(f" {key.public}, {new.public} ")
    assert both.accept("job", {}, key.sign("job", {}))
    assert both.accept("job", {}, new.sign("job", {}))
    assert not TrustedKeys.read(new.public).accept("job", {}, key.sign("job", {}))


def test_a_new_key_is_its_owners_alone_and_never_overwrites(tmp_path):
    path = tmp_path / "key.pem"
    before = os.umask(0)
    try:
        made = SigningKey.create(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        SigningKey.create(path)
    assert SigningKey.read(path).public == made.public
    assert private_text(path) not in f"{made!r} {made.__dict__}"


def test_what_is_no_signing_key_is_refused_without_quoting_it(tmp_path):
    secret = ed25519.Ed25519PrivateKey.generate()
    pem = secret.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    locked = secret.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    other_kind = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    for content in (b"", b"hello", pem[:-60], locked, other_kind, os.urandom(200_000)):
        (tmp_path / "key.pem").write_bytes(content)
        with pytest.raises(
            errors.SetupError, match="not an Ed25519 private key"
        ) as raised:
            SigningKey.read(tmp_path / "key.pem")
        assert raised.value.__context__ is None
    body = "".join(pem.decode().splitlines()[1:-1])
    for given_by_mistake in (pem.decode(), body, "x" * 5000, "nul\0"):
        with pytest.raises(errors.SetupError, match="file cannot be read") as raised:
            SigningKey.read(Path(given_by_mistake))
        assert body[20:] not in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "a,b",
        "AAAA",
        "A" * 44,
        ",",
        "A" * 43 + "=,",
        "MC4CAQAwBQYDK2VwBCIEIBBB",
    ],
)
def test_what_is_no_public_key_is_refused_without_quoting_it(text: str):
    with pytest.raises(ValueError, match="should be a public key") as raised:
        TrustedKeys.read(text)
    assert text == "" or len(text) < 3 or text not in str(raised.value)


def test_too_many_keys_are_refused(tmp_path):
    names = [SigningKey.create(tmp_path / f"{n}.pem").public for n in range(9)]
    with pytest.raises(ValueError, match="9 keys; 8 are allowed"):
        TrustedKeys.read(",".join(names))


def test_a_commands_keys_trust_its_own_signature_and_that_of_others(
    key: SigningKey, tmp_path
):
    own = SigningKey.create(tmp_path / "own.pem")
    given_keys = {"signing_key": tmp_path / "own.pem", "trusted_key": key.public}
    keys = SignerSettings(**given_keys).keys()
    assert keys.trusted is not None
    assert keys.signing is not None
    assert keys.signing.public == own.public
    for signer in (own, key):
        assert keys.trusted.accept("job", {}, signer.sign("job", {}))
    assert SignerSettings().keys() == signing.NO_KEYS


# The client


async def test_what_the_client_submits_is_signed_with_its_id_and_campaign(
    key: SigningKey, local_settings: StorageSettings, tmp_path
):
    own = SigningKey.create(tmp_path / "own.pem")
    options = {"storage": local_settings.storage, "signing_key": tmp_path / "own.pem"}
    async with aio.connect(**options) as fleet:
        batch = await fleet.submit(
            [Job(prompt="a"), Job(prompt="b", id="b")], campaign="spring"
        )
        bodies = [each.body async for each in visible(fleet.storage.queue)]
        trusted = signers.trusted(own, fleet.storage.scope)
        jobs = [read_job(body, "m", trusted) for body in bodies]
        assert [(job.id, job.campaign) for job in jobs] == [
            (each, "spring") for each in batch.ids
        ]
        with pytest.raises(errors.UntrustedJobError):
            read_job(bodies[0], "m", signers.trusted(key, fleet.storage.scope))


def test_a_wrong_key_of_the_client_is_a_sentence(
    local_settings: StorageSettings,
):
    with pytest.raises(errors.SetupError, match="trusted_key: should be a public key"):
        imagefleet.connect(local_settings.storage, trusted_key="x")
    with pytest.raises(
        errors.SetupError, match="IMAGEFLEET_SIGNING_KEY: the file cannot be read"
    ):
        imagefleet.connect(local_settings.storage, signing_key="no-such-file")

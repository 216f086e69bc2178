"""Proofs of authorship: no machine proves what another has done."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefleet.records.record import Record
from imagefleet.storage.proofs import Proofs, Prover, machine_key, machine_of
from worker.stages.record import proven

MACHINE, OTHER = (f"0d8f5c1e-77a2-4c1b-9a3e-5b2f0e7d9c{last}" for last in ("11", "12"))
SECRET = "5ec2e7" * 10
PROOFS = Proofs(["an older one", SECRET])
PROVER = Prover(MACHINE, machine_key(SECRET, MACHINE))

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)
IMAGE = Record(
    outcome="completed",
    blob="spring/a.png",
    id="a",
    campaign="spring",
    digest="d" * 64,
    sha256="5" * 64,
    at=NOON,
    started_at=NOON,
    seconds=2.5,
    price_per_hour=0.25,
    worker=f"{MACHINE}-17",
    gpu="RTX 4090",
)


def accepted(record: Record) -> bool:
    return PROOFS.accept(record.worker, record.claims, record.proof)


@pytest.mark.parametrize("name", ["", "-17", "-17-gpu0", "-gpu0:1", "-a\nb"])
def test_a_machine_proves_all_names_that_begin_with_its_id(name: str):
    assert accepted(proven(IMAGE.model_copy(update={"worker": MACHINE + name}), PROVER))


def test_an_id_is_one_in_capitals_as_well():
    assert accepted(
        proven(IMAGE.model_copy(update={"worker": f"{MACHINE.upper()}-17"}), PROVER)
    )


@pytest.mark.parametrize(
    "name", [f"{OTHER}-17", f"{MACHINE}0", f"x{MACHINE}-17", f"x-{MACHINE}", "w"]
)
def test_a_machine_proves_no_other_name(name: str):
    assert machine_of(name) != MACHINE
    assert PROVER.proof(name, b"claims") is None
    told = proven(IMAGE.model_copy(update={"worker": name}), PROVER)
    assert told.proof is None
    assert not accepted(told)


def test_a_proof_is_of_one_record_and_one_blob_alone():
    record = proven(IMAGE, PROVER)
    changes = {
        "blob": "spring/b.png",
        "digest": "e" * 64,
        "sha256": None,
        "at": NOON.replace(year=2027),
        "started_at": None,
        "seconds": 3600.0,
        "price_per_hour": 1000.0,
        "start_up_seconds": 1.0,
        "gpu": "H200",
        "model": "m",
        "worker": f"{MACHINE}-18",
        "proof": None,
    }
    assert accepted(record)
    for name, value in changes.items():
        assert not accepted(record.model_copy(update={name: value})), name
    metadata = PROVER.proven("a.png", {"worker": IMAGE.worker, "sha256": "9f86d0"})
    assert PROOFS.author("a.png", metadata, b"test") is None, "another file"
    metadata["sha256"] = (
        "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    )
    assert PROOFS.author("a.png", metadata, b"test") is None, "metadata were changed"
    metadata = PROVER.proven("a.png", metadata)
    assert PROOFS.author("a.png", metadata, b"test") == IMAGE.worker
    assert PROOFS.author("b.png", metadata, b"test") is None, "another name"
    forged = {**metadata, "worker": f"{OTHER}-1", "proof": "ä\udc80"}
    assert PROOFS.author("a.png", forged, b"test") is None


def test_a_machine_that_finds_anothers_image_does_not_name_it():
    assert proven(IMAGE, Prover(OTHER, machine_key(SECRET, OTHER))).worker == "?"


def test_the_key_is_in_no_representation():
    assert PROVER.key not in repr(PROVER)


@given(
    seconds=st.floats(0, 600_000),
    price=st.floats(0, 1000) | st.none(),
    gpu=st.text(max_size=20),
    at=st.datetimes(datetime(1970, 1, 1), datetime(2999, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001
)
def test_a_record_that_was_written_and_read_keeps_its_proof(
    seconds: float, price: float | None, gpu: str, at: datetime
):
    told = {
        "seconds": seconds,
        "price_per_hour": price,
        "gpu": gpu,
        "at": at,
        "started_at": at,
    }
    record = proven(Record.model_validate(IMAGE.model_dump() | told), PROVER)
    assert accepted(Record.read(record.line()))

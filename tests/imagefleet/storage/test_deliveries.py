import base64
import json
from datetime import UTC, datetime

import pytest

from imagefleet import errors
from imagefleet.job import sizes
from imagefleet.job.message import read_job
from imagefleet.storage import protocol
from imagefleet.storage.deliveries import CONDEMNED_AFTER, SUSPECT_AFTER, Deliveries

JOB = '{"prompt": "a red house", "id": "j"}'


def delivered(body: str | None, count: int) -> Deliveries:
    assert body is not None
    return Deliveries.of(protocol.Message("m", body, count, datetime.now(UTC)))


def test_a_first_delivery_has_no_past_whatever_its_message_claims():
    assert (
        delivered('{"prompt": "x", "deliveries": {"lost_alone": 9}}', 1) == Deliveries()
    )


def test_deliveries_without_an_end_are_lost():
    assert delivered(JOB, 3) == Deliveries(known=2, lost=2)


def test_failures_and_returns_are_not_lost():
    second = delivered(delivered(JOB, 1).ended(failed=True).write_to(JOB), 2)
    assert second == Deliveries(known=1, failed=1)
    third = delivered(second.ended(failed=False).write_to(JOB), 5)
    assert third == Deliveries(known=4, failed=1, lost=2)


def test_a_death_alone_counts_only_while_the_mark_stands():
    suspect = delivered(JOB, 1 + SUSPECT_AFTER)
    assert suspect.is_suspect
    after_death = delivered(suspect.marked_alone().write_to(JOB), 2 + SUSPECT_AFTER)
    assert (after_death.lost, after_death.lost_alone) == (1 + SUSPECT_AFTER, 1)
    handed_back = suspect.marked_alone().ended(failed=False).write_to(JOB)
    assert delivered(handed_back, 2 + SUSPECT_AFTER).lost_alone == 0
    assert not after_death.is_condemned
    assert after_death.model_copy(update={"lost_alone": CONDEMNED_AFTER}).is_condemned


def test_the_record_does_not_change_the_job():
    unmarked = read_job(JOB, "m")
    for body in (JOB, base64.b64encode(JOB.encode()).decode()):
        written = delivered(body, 3).marked_alone().write_to(body)
        assert written is not None
        assert read_job(written, "m") == unmarked


@pytest.mark.parametrize(
    "record",
    [
        [],
        "x",
        {"lost": -1},
        {"lost": "many"},
        {"known": 10**9},
        None,
        7,
    ],
)
def test_a_damaged_record_counts_as_none(record: object):
    body = json.dumps({"prompt": "x", "deliveries": record})
    assert delivered(body, 2) == Deliveries(known=1, lost=1)


@pytest.mark.parametrize(
    "body", ["not JSON", "[1, 2]", "[" * 60_000, json.dumps("x" * 65_000)]
)
def test_a_message_that_cannot_hold_a_record_stays_as_it_is(body: str):
    assert delivered(body, 9).write_to(body) is None


def test_a_record_never_makes_a_message_too_large():
    body = json.dumps({"prompt": "x" * 65_490})
    assert sizes.fits(body)
    assert delivered(body, 9).write_to(body) is None


def test_a_users_own_job_cannot_bring_a_record_along():
    from imagefleet.job.message import Job

    with pytest.raises(ValueError, match="deliveries"):
        Job.model_validate({"prompt": "x", "deliveries": {}})
    with pytest.raises(errors.InvalidMessageError, match="deliverys"):
        read_job('{"prompt": "x", "deliverys": {}}', "m")

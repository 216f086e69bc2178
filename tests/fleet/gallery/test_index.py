"""The index has a row for each image and each job that ended, whatever order records come in."""

import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fleet.gallery.index import Filter, Index
from imagefleet.records.record import Lora, Record

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)


def image(number: int, **fields: Any) -> Record:
    known = {
        "outcome": "completed",
        "id": f"job-{number}",
        "campaign": "spring",
        "at": NOON,
    }
    return Record.model_validate(known | {"blob": f"spring/job-{number}.png"} | fields)


def ended(number: int, outcome: str = "failed", **fields: Any) -> Record:
    known = {
        "outcome": outcome,
        "id": f"job-{number}",
        "campaign": "spring",
        "at": NOON,
    }
    return Record.model_validate(known | {"source": f"message-{number}"} | fields)


@pytest.fixture
def index() -> Iterator[Index]:
    made = Index()
    yield made
    made.close()


def jobs(index: Index, **chosen: Any) -> list[str]:
    seqs = index.select(Filter(**chosen)).tolist()
    return [records[0].id for records in index.records(seqs).values()]


def test_a_filter_of_words_takes_them_as_they_are(index: Index):
    index.add(
        [
            image(1, prompt="A red House, 100% detailed"),
            image(2, prompt="a blue fish, 100 details"),
            image(3, prompt="a_b\\c <lora:x:1> 'quoted\" %"),
        ]
    )
    assert jobs(index, text="house") == ["job-1"]
    assert jobs(index, text="a 100") == ["job-1", "job-2"]
    assert jobs(index, text="100%") == ["job-1"]
    assert jobs(index, text="a_b\\c") == ["job-3"]
    assert jobs(index, text="'quoted\"") == ["job-3"]
    assert jobs(index, text="job-2") == ["job-2"]
    index.add([image(4, prompt="ein roter \u00c4pfelbaum, \u0434\u043e\u043c")])
    for word in ("\u00c4pfel", "\u00e4pfelbaum", "ROTER", "\u0414\u043e\u043c"):
        assert jobs(index, text=word) == ["job-4"], word
    assert jobs(index, text="zebra") == []


def test_loras_and_workers_are_chosen_by_their_whole_names_and_counted(
    index: Index,
):
    two = (Lora("ink", 1), Lora("inkwell", 0.5), Lora("ink", 0.2))
    index.add(
        [image(1, loras=two, worker="w-1"), image(2, loras=two[1:2], worker="w-10")]
    )
    index.add([ended(3, worker="w-1")])

    assert jobs(index, lora="ink") == ["job-1"]
    assert jobs(index, lora="inkwell") == ["job-1", "job-2"]
    assert jobs(index, worker="w-1") == ["job-1"]
    assert jobs(index, worker="w-1", tab="failed") == ["job-3"]
    assert jobs(index, worker="w-1", lora="ink", text="zebra") == []
    assert index.names("lora") == [("inkwell", 2), ("ink", 1)]
    assert index.names("worker") == [("w-1", 1), ("w-10", 1)]


def test_a_record_that_comes_twice_is_one_row(index: Index):
    for _ in range(2):
        index.add([image(1, loras=(Lora("ink", 1),)), ended(2)])

    assert (jobs(index), jobs(index, tab="failed")) == (["job-1"], ["job-2"])
    assert index.names("lora") == [("ink", 1)]
    assert index.counts()[0] == {"images": 1, "failed": 1, "cancelled": 0, "dropped": 0}
    assert index.counts()[1] == 2


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("outcome", ["replayed", "discarded"])
def test_a_failed_job_that_an_operator_has_settled_is_gone(
    index: Index, outcome: str, is_late: bool
):
    records = [ended(1), ended(1, outcome)]
    for record in records if is_late else reversed(records):
        index.add([record])

    assert jobs(index, tab="failed") == []
    assert index.counts()[0]["failed"] == 0


def test_a_replayed_job_that_fails_again_is_a_row_again(index: Index):
    index.add([ended(1), ended(1, "replayed"), ended(1, source="another message")])

    assert jobs(index, tab="failed") == ["job-1"]


def test_the_images_of_a_job_are_rows_of_their_own_and_one_job(index: Index):
    index.add(
        [
            image(1, blob=f"spring/job-1-{n}.png", index=n, images=3, completes=n == 2)
            for n in range(3)
        ]
    )

    assert jobs(index) == ["job-1"] * 3
    assert index.counts()[1] == 1


def test_a_row_that_comes_late_moves_no_other(index: Index):
    index.add([image(n, at=NOON + timedelta(minutes=n)) for n in range(2)])
    index.add(
        [image(7, at=NOON - timedelta(minutes=1)), image(8, at=NOON)], at_end=True
    )

    assert jobs(index) == ["job-0", "job-1", "job-7", "job-8"]


def test_records_of_which_one_cannot_be_added_are_not_counted(
    index: Index, monkeypatch
):
    with monkeypatch.context() as full:
        full.setattr("zlib.compress", lambda *_: object())  # no value of SQLite's
        with pytest.raises(sqlite3.Error):
            index.add([image(1)])
    assert (jobs(index), index.counts()[1]) == ([], 0)
    index.add([image(1)])
    assert (jobs(index), index.counts()[1]) == (["job-1"], 1)


def test_a_record_is_kept_whole(index: Index):
    record = image(
        1, prompt="a cat, <lora:ink:1>", metadata={"a": [1, None]}, seed=2**32 - 1
    )
    failed = ended(2, error="MissingFileError", reason="x" * 3000)
    index.add([record, failed])

    assert index.records([2, 99, 1]) == {2: [failed], 1: [record]}

"""Results as data frames."""

import sys
from datetime import UTC, datetime

import pytest

import imagefleet
from imagefleet import Job, aio, errors
from imagefleet.records import columns
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Lora, Record
from imagefleet.storage.settings import StorageSettings

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)

RECORDS = [
    Record(
        outcome="completed",
        id="a",
        campaign="spring",
        at=NOON,
        blob="spring/a.png",
        prompt="a red house",
        seed=2**32 - 1,
        loras=(Lora("outline-style", 0.8),),
        seconds=1.5,
        metadata={"order": 7},
    ),
    Record(
        outcome="failed",
        id="b",
        campaign="spring",
        at=NOON,
        error="JobError",
        reason="too large",
    ),
]


async def frames(settings: StorageSettings) -> imagefleet.Fleet:
    """A fleet with two jobs of spring that have ended."""
    async with aio.connect(settings.storage) as fleet:
        await fleet.submit([Job(prompt="a house", id=each.id) for each in RECORDS])
        await RecordLog(fleet.storage.blobs, "w1").add(RECORDS)
    return imagefleet.connect(settings.storage)


async def test_a_campaign_is_a_data_frame(local_settings: StorageSettings):
    with await frames(local_settings) as fleet:
        table = fleet.results("spring").frame()

    assert tuple(table.columns) == columns.COLUMNS
    assert list(table.outcome) == ["completed", "failed"]
    image = table.iloc[0]
    failed = table.iloc[1]
    assert (image.seed, image.seconds, image["at"]) == (2**32 - 1, 1.5, NOON)
    assert image.loras == [{"name": "outline-style", "weight": 0.8}]
    assert image.metadata == {"order": 7}
    assert image.address.endswith("/images/spring/a.png")
    assert failed.reason == "too large"
    assert table.isna().loc[1, ["seed", "seconds", "blob", "address", "prompt"]].all()
    assert {
        name: str(table.dtypes[name]) for name in ("id", "seed", "seconds", "at")
    } == {
        "id": "string",
        "seed": "Int64",
        "seconds": "float64",
        "at": "datetime64[us, UTC]",
    }


async def test_what_is_read_is_not_in_the_frame_of_the_rest(
    local_settings: StorageSettings,
):
    with await frames(local_settings) as fleet:
        results = fleet.results("spring")
        assert next(results).id == "a"
        assert list(results.frame().id) == ["b"]
        assert list(fleet.failed().frame().id) == ["b"]
        empty = fleet.results("autumn").frame()
    assert (len(empty), str(empty.seed.dtype)) == (0, "Int64")


async def test_without_pandas_one_sentence_says_what_to_install(
    local_settings: StorageSettings, monkeypatch
):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with (
        await frames(local_settings) as fleet,
        pytest.raises(errors.SetupError, match=r"pip install '\.\[pandas\]'"),
    ):
        fleet.results("spring").frame()

"""Captions say what images show."""

from datetime import UTC, datetime

from imagefleet.caption import CAPTION, caption_of
from imagefleet.records.record import Record


def test_the_caption_of_an_image_is_that_of_the_sweep_not_its_escaped_prompt():
    record = Record(
        outcome="completed", id="x", at=datetime.now(UTC), prompt=r"a \(red\) house"
    )

    assert caption_of(record) == "a (red) house"
    noted = record.model_copy(update={"metadata": {CAPTION: "a (red) house"}})
    assert caption_of(noted) == "a (red) house"
    forged = record.model_copy(update={"metadata": {CAPTION: 3}})
    assert caption_of(forged) == "a (red) house"

"""The caption of an image: what data sets, scores and reports name it by."""

from imagefleet.job import prompt
from imagefleet.job.message import Job
from imagefleet.records.record import Record

#: Key of a job's metadata: its caption, where its prompt is written otherwise.
CAPTION = "caption"


def caption_of(drawn: Record | Job) -> str:
    """Caption of an image: the sweep's, or the words that its prompt draws."""
    caption = drawn.metadata.get(CAPTION)
    if isinstance(caption, str):
        return caption
    return prompt.read_words(drawn.prompt or "")[0]

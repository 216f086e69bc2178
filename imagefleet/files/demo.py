"""The demo's checkpoint and its 24 messages: the reference job, 21 more, and two invalid ones."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from imagefleet import errors

REFERENCE_MESSAGE = Path(__file__).with_name("reference-job.json").read_text(encoding="utf-8")

CAMPAIGN = "demo"

_IN_WHEEL = Path(__file__).with_name("demo_model")

#: The demo's checkpoint: inside the package, or in a checkout of the source.
TRAINED = _IN_WHEEL if _IN_WHEEL.is_dir() else Path(__file__).resolve().parents[2] / "demo_model"

#: A misspelt field and an unknown LoRA, for the demo to show failed jobs.
INVALID_MESSAGE = json.dumps({"prompt": "a lighthouse in a storm", "stepz": 15})
_WITH_LORA = "a castle in the clouds, <lora:no-such-style:0.8>"
MISSING_LORA_MESSAGE = json.dumps(
    {"prompt": _WITH_LORA, "id": "missing-lora", "campaign": CAMPAIGN}
)


def find_checkpoint() -> Path:
    """The folder of the demo's checkpoint; raises SetupError if it is missing."""
    if not TRAINED.is_dir():
        raise errors.SetupError(f"the demo checkpoint {str(TRAINED)!r} does not exist")
    return TRAINED


def messages(valid: Iterable[str]) -> list[str]:
    """All messages in order; *valid*: the 21 jobs that come with the checkpoint."""
    named = [
        json.dumps({"id": f"{number:02}", "campaign": CAMPAIGN, **json.loads(text)})
        for number, text in enumerate(valid, start=1)
    ]
    first, others, last = named[:7], named[7:14], named[14:]
    return [REFERENCE_MESSAGE, *first, INVALID_MESSAGE, *others, MISSING_LORA_MESSAGE, *last]

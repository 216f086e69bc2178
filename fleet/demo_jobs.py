"""The demo's 24 messages: the reference job as it was sent, 21 more, and two that are wrong."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

REFERENCE_MESSAGE = Path(__file__).with_name("reference-job.json").read_text(encoding="utf-8")

#: The LoRA that the reference job asks for.
REFERENCE_LORA = "magic-fantasy-forest-v2"

CAMPAIGN = "demo"

#: The demo's checkpoint, in a checkout of the source; too large for a package.
TRAINED = Path(__file__).resolve().parent.parent / "demo_model"

#: A slip of the fingers, and a LoRA that nobody has: what becomes of them is part of the demo.
INVALID_MESSAGE = json.dumps({"prompt": "a lighthouse in a storm", "stepz": 15})
MISSING_LORA_MESSAGE = json.dumps(
    {
        "prompt": "a castle in the clouds, <lora:no-such-style:0.8>",
        "id": "missing-lora",
        "campaign": CAMPAIGN,
    }
)

#: What the random checkpoint draws, every third with the LoRA: 7 things in 3 lights.
_THINGS = ("lighthouse", "sailing boat", "windmill", "castle", "bridge", "cottage", "mountain")
_LIGHTS = ("at dawn", "by moonlight", f"in a forest, <lora:{REFERENCE_LORA}:0.5>")


def messages(valid: Iterable[str] | None = None) -> list[str]:
    """All messages in their order; *valid* are the 21 that the demo checkpoint was made for."""
    given = [json.dumps(job) for job in _own_jobs()] if valid is None else list(valid)
    named = [_named(text, number) for number, text in enumerate(given, start=1)]
    return [
        REFERENCE_MESSAGE,
        *named[:7],
        INVALID_MESSAGE,
        *named[7:14],
        MISSING_LORA_MESSAGE,
        *named[14:],
    ]


def _own_jobs() -> list[dict[str, object]]:
    return [
        {"prompt": f"a {thing} {light}", "steps": 15, "sampler_name": "Euler a"}
        for light in _LIGHTS
        for thing in _THINGS
    ]


def _named(text: str, number: int) -> str:
    """The job with an id that sorts as it was sent, and in the demo's campaign."""
    return json.dumps({"id": f"{number:02}", "campaign": CAMPAIGN, **json.loads(text)})

"""The demo's 24 messages: the reference job verbatim, 21 more, and two invalid ones."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

REFERENCE_MESSAGE = Path(__file__).with_name("reference-job.json").read_text(encoding="utf-8")

#: The LoRA in the reference job's prompt.
REFERENCE_LORA = "magic-fantasy-forest-v2"

CAMPAIGN = "demo"

_IN_WHEEL = Path(__file__).with_name("demo_model")

#: The demo's checkpoint: inside the package, or in a checkout of the source.
TRAINED = _IN_WHEEL if _IN_WHEEL.is_dir() else Path(__file__).resolve().parents[1] / "demo_model"

#: A misspelt field and an unknown LoRA, for the demo to show failed jobs.
INVALID_MESSAGE = json.dumps({"prompt": "a lighthouse in a storm", "stepz": 15})
MISSING_LORA_MESSAGE = json.dumps(
    {
        "prompt": "a castle in the clouds, <lora:no-such-style:0.8>",
        "id": "missing-lora",
        "campaign": CAMPAIGN,
    }
)

#: Prompts for the random checkpoint: 7 things in 3 lights, a third of them with the LoRA.
_THINGS = ("lighthouse", "sailing boat", "windmill", "castle", "bridge", "cottage", "mountain")
_LIGHTS = ("at dawn", "by moonlight", f"in a forest, <lora:{REFERENCE_LORA}:0.5>")


def messages(valid: Iterable[str] | None = None) -> list[str]:
    """All messages in order; *valid*: the 21 jobs that come with the demo checkpoint."""
    given = [json.dumps(job) for job in _random_model_jobs()] if valid is None else list(valid)
    named = [_with_id(text, number) for number, text in enumerate(given, start=1)]
    return [
        REFERENCE_MESSAGE,
        *named[:7],
        INVALID_MESSAGE,
        *named[7:14],
        MISSING_LORA_MESSAGE,
        *named[14:],
    ]


def _random_model_jobs() -> list[dict[str, object]]:
    return [
        {"prompt": f"a {thing} {light}", "steps": 15, "sampler_name": "Euler a"}
        for light in _LIGHTS
        for thing in _THINGS
    ]


def _with_id(text: str, number: int) -> str:
    """The job in the demo's campaign, with an id that sorts in sending order."""
    return json.dumps({"id": f"{number:02}", "campaign": CAMPAIGN, **json.loads(text)})

"""The demo's models and messages: of its checkpoint, and of its cascade of two stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from imagefleet import errors

_HERE = Path(__file__).parent
_PROJECT = _HERE.parents[1]

REFERENCE_MESSAGE = (_HERE / "reference-job.json").read_text(encoding="utf-8")

CAMPAIGN = "demo"
CASCADE_CAMPAIGN = "demo-cascade"

#: A misspelt field and an unknown LoRA, for the demo to show failed jobs.
INVALID_MESSAGE = json.dumps({"prompt": "a lighthouse in a storm", "stepz": 15})
MISSING_LORA_MESSAGE = json.dumps(
    {
        "prompt": "a castle in the clouds, <lora:no-such-style:0.8>",
        "id": "missing-lora",
        "campaign": CAMPAIGN,
    }
)

#: The folders of the cascade's stages, which are the names of their models.
STAGES = ("base", "sr")

CASCADE_PROMPTS = (
    *("a red house, in a meadow", "a blue fish, in the sea", "a green tree, in the snow"),
    *("a yellow star, at night", "an orange cat, plain background", "a purple umbrella, in a city"),
    *("a red car, in the desert", "a pink heart, in a forest", "three red apples, in a meadow"),
    *("a white boat to the left of a yellow sun", "a brown cup next to a green leaf"),
    "a large blue butterfly, in the forest",
)

_FIRST = {"model": "base", "sampler_name": "DDPM", "steps": 30, "cfg_scale": 3}

#: Little noise on the image that is enlarged does best (`demo_world/cascade/measure.py`).
_SECOND = {"model": "sr", "steps": 20, "cfg_scale": 1, "denoising_strength": 0.05}


def _trained(name: str) -> Path:
    """A folder of weights: inside the package, or in a checkout of the source."""
    in_wheel = _HERE / name
    return in_wheel if in_wheel.is_dir() else _PROJECT / name


TRAINED = _trained("demo_model")
CASCADE = _trained("demo_cascade")


def find_checkpoint() -> Path:
    """The folder of the demo's checkpoint; raises SetupError if it is missing."""
    return _existing(TRAINED, "checkpoint")


def find_stages() -> list[Path]:
    """The folders of the cascade's stages; raises SetupError if one is missing."""
    return [_existing(CASCADE / name, "cascade") for name in STAGES]


def _existing(folder: Path, what: str) -> Path:
    if not folder.is_dir():
        raise errors.SetupError(f"the demo's {what} {str(folder)!r} does not exist")
    return folder


def messages(checkpoint: Path) -> list[str]:
    """The 24 messages: the reference job, the 21 beside the checkpoint, and two invalid ones."""
    lines = (checkpoint / "demo_jobs.jsonl").read_text(encoding="utf-8").splitlines()
    jobs = [_numbered(number, CAMPAIGN, json.loads(line)) for number, line in enumerate(lines, 1)]
    return [
        REFERENCE_MESSAGE,
        *jobs[:7],
        INVALID_MESSAGE,
        *jobs[7:14],
        MISSING_LORA_MESSAGE,
        *jobs[14:],
    ]


def cascade_messages() -> list[str]:
    """The cascade's jobs, in order, each of two stages."""
    return [
        _numbered(
            number,
            CASCADE_CAMPAIGN,
            {"prompt": prompt, "seed": number, **_FIRST, "then": [_SECOND]},
        )
        for number, prompt in enumerate(CASCADE_PROMPTS, start=1)
    ]


def _numbered(number: int, campaign: str, job: dict[str, Any]) -> str:
    """The job as a message, with an id that sorts in sending order."""
    return json.dumps({"id": f"{number:02}", "campaign": campaign, **job})

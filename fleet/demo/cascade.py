"""The demo's cascade in pixels: its two models, and its jobs of two stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from imagefleet import errors

CAMPAIGN = "demo-cascade"

_IN_WHEEL = Path(__file__).with_name("cascade_model")

#: The cascade's two stages: inside the package, or in a checkout of the source.
TRAINED = _IN_WHEEL if _IN_WHEEL.is_dir() else Path(__file__).resolve().parents[2] / "demo_cascade"

#: The folders of the stages, which are the names of their models.
STAGES = ("base", "sr")

PROMPTS = (
    *("a red house, in a meadow", "a blue fish, in the sea", "a green tree, in the snow"),
    *("a yellow star, at night", "an orange cat, plain background", "a purple umbrella, in a city"),
    *("a red car, in the desert", "a pink heart, in a forest", "three red apples, in a meadow"),
    *("a white boat to the left of a yellow sun", "a brown cup next to a green leaf"),
    "a large blue butterfly, in the forest",
)

_FIRST = {"model": "base", "sampler_name": "DDPM", "steps": 30, "cfg_scale": 3}

#: Little noise on the image that is enlarged does best (`demo_world/cascade/measure.py`).
_SECOND = {"model": "sr", "steps": 20, "cfg_scale": 1, "denoising_strength": 0.05}


def find_stages() -> list[Path]:
    """The folders of both stages; raises SetupError if one is missing."""
    folders = [TRAINED / name for name in STAGES]
    for folder in folders:
        if not folder.is_dir():
            raise errors.SetupError(f"the demo's cascade {str(folder)!r} does not exist")
    return folders


def messages() -> list[str]:
    """The jobs, in order."""
    found: list[dict[str, Any]] = [
        {"id": f"{number:02}", "campaign": CAMPAIGN, "prompt": prompt, "seed": number}
        for number, prompt in enumerate(PROMPTS, start=1)
    ]
    return [json.dumps({**each, **_FIRST, "then": [_SECOND]}) for each in found]

"""What jobs' images alone say about a node."""

from __future__ import annotations

import numpy as np

from imagefleet import likeness
from worker.node.self_check import RECENT, ImageChecks


def test_similar_images_of_a_campaign_are_not_copies() -> None:
    checks = ImageChecks()
    random = np.random.default_rng(0)
    white = np.full((64, 64, 3), 250, np.uint8)
    for seed in range(3 * RECENT):
        logo = white.copy()
        logo[20:40, 20:40] = random.integers(0, 200, 3)
        assert checks.repetition(likeness.fingerprint(logo), seed, (64, 64)) is None
    assert checks.copies == 0


def test_an_image_in_a_tenth_of_a_canarys_time_was_not_drawn() -> None:
    checks = ImageChecks()
    assert checks.haste(0.0, 15, (512, 512)) is None  # no canary yet
    checks.canary_took(0.4, 4, (512, 512))
    assert checks.haste(15 * 0.02, 15, (512, 512)) is None
    assert "a tenth" in str(checks.haste(15 * 0.009, 15, (512, 512)))
    assert checks.haste(15 * 0.009, 15, (128, 128)) is None  # a sixteenth of the pixels
    checks.canary_took(0.001, 4, (512, 512))  # too short for the clock
    assert checks.haste(0.0, 15, (512, 512)) is None

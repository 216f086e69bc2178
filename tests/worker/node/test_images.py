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

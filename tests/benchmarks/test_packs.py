"""What reading a campaign costs in packs, against single images."""

from pathlib import Path

import pytest

import packs


async def test_packs_take_a_twentieth_of_the_operations_of_single_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of a million images 1,000 are fetched: here as many of so few."""
    monkeypatch.setattr(packs, "FETCHED", 3)

    found = await packs.run(3_200, 400, 32, tmp_path)

    assert found["operations_over_single"] < 1 / 20
    assert found["packed"]["fetched"]["reads"] == 3
    assert found["packed"]["exported"]["reads"] <= 100 + 10
    assert found["single"]["exported"]["reads"] >= 3_200

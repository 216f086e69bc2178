from typing import Any

import pytest
import torch


@pytest.fixture
def latents(family_engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Those that decoders are given from now on."""
    kind = type(family_engine("sd1")._decoder)
    seen, add = [], kind.add
    monkeypatch.setattr(kind, "add", lambda *given: seen.append(given[2]) or add(*given))
    return seen

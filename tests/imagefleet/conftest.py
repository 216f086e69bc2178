"""A proxy that injects faults between a client and Azurite."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from proxy import Fault, FaultProxy


@dataclass(slots=True)
class FaultyAzurite:
    """Each of the next requests suffers the next of `faults`."""

    proxy: FaultProxy
    faults: deque[Fault]

    @property
    def address(self) -> str:
        return self.proxy.address

    @property
    def requests(self) -> int:
        return self.proxy.requests


@pytest.fixture
async def faulty_azurite(azurite_address: str) -> AsyncIterator[FaultyAzurite]:
    """Azurite behind a fault-injecting proxy."""
    faults = deque[Fault]()
    proxy = FaultProxy(lambda: faults.popleft() if faults else "pass")
    async with proxy.running(azurite_address):
        yield FaultyAzurite(proxy, faults)

"""`imagefleet scale` on a fake SaladCloud, killed at random moments while it spends."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import salad_fake
from fleet.scale import ledger

REPLICAS = 20

FLEET = """\
name: storm
organization: acme
project: default
api: {url}
image: registry.example.com/acme/imagefleet@sha256:{digest}
replicas: {replicas}
gpus: [RTX 3060 Ti]
environment:
  IMAGEFLEET_STORAGE: https://acmeimages.blob.core.windows.net
"""

#: Between two readings of the workers that are billed.
_METER_SECONDS = 0.1

#: What the scaler may miss: workers that came and went between two samples, and rounding.
_TOLERANCE = 0.05

#: What replicas may run, all together, between a scaler's last look and its kill or its next start.
_UNSEEN_SECONDS = 5.0

#: Runs `imagefleet ARGUMENTS` and kills it after some seconds; returns its exit code.
Command = Callable[..., Awaitable[int]]


@dataclass(slots=True)
class KilledScaler:
    """A scaler and the cloud that it pays; `errors` says what it got wrong."""

    folder: Path
    random: random.Random
    command: Command
    errors: list[str] = field(default_factory=list)
    cloud: salad_fake.SaladFake = field(default_factory=salad_fake.SaladFake)
    _replica_seconds: float = 0.0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Scales during the block, killed and restarted again and again; then checks the cost."""
        with salad_fake.serving(self.cloud):
            fleet_file = FLEET.format(
                url=self.cloud.url, digest="5" * 64, replicas=REPLICAS
            )
            (self.folder / "fleet.yaml").write_text(fleet_file)
            if await self._imagefleet(
                60, "deploy", "apply", "--yes", "--replicas", "1"
            ):
                raise RuntimeError("the groups cannot be created")
            tasks = [
                asyncio.create_task(each) for each in (self._scale(), self._meter())
            ]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            await self._check(await self._scale_once())

    async def _scale(self) -> None:
        while True:
            calls = len(self.cloud.requests)
            code = await self._imagefleet(
                self.random.uniform(0, 3),
                *self._arguments,
                "--sample-seconds",
                "1",
                has_begun=partial(self._has_called, calls),
            )
            if code >= 0:
                self.errors.append(f"the scaler ended by itself with {code}")

    async def _scale_once(self) -> int:
        return await self._imagefleet(60, *self._arguments, "--once")

    async def _has_called(self, calls: int) -> bool:
        return len(self.cloud.requests) > calls

    async def _imagefleet(
        self, kill_after_seconds: float, *arguments: str, **options: Any
    ) -> int:
        fleet_file = ("--file", str(self.folder / "fleet.yaml"))
        environment = {"SALAD_API_KEY": salad_fake.KEY, "no_proxy": "127.0.0.1"}
        return await self.command(
            kill_after_seconds,
            *arguments,
            *fleet_file,
            environment=environment,
            **options,
        )

    @property
    def _ledger(self) -> Path:
        return self.folder / "ledger.json"

    @property
    def _arguments(self) -> tuple[str, ...]:
        return (
            "scale",
            "--yes",
            "--dollars-per-hour",
            "0.5",
            "--max-dollars",
            "5",
            "--images-per-second",
            "0.001",
            "--state",
            str(self._ledger),
        )

    async def _meter(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(_METER_SECONDS)
            now = time.monotonic()
            if self._ledger.exists():  # what ran before the first scaler is not its own
                running = sum(group.running for group in self.cloud.groups.values())
                self._replica_seconds += running * (now - before)
            before = now

    async def _check(self, code: int) -> None:
        if code:
            said = (self.folder / "workers.log").read_text()[-500:]
            self.errors.append(f"after the storm the scaler fails with {code}: {said}")
            return
        counted = ledger.read(self._ledger, "storm", time.time())
        seconds = max(0.0, self._replica_seconds - _UNSEEN_SECONDS)
        cost = seconds / 3600 * (counted.price or 0)
        if counted.dollars < cost * (1 - _TOLERANCE):
            self.errors.append(f"the ledger has ${counted.dollars:.6f} of ${cost:.6f}")
        if self.cloud.most_at_once > REPLICAS:
            self.errors.append(
                f"{self.cloud.most_at_once} replicas ran, of {REPLICAS} allowed"
            )
        self.errors += self.cloud.violations

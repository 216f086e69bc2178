"""All checks of one node, from its start to its end.

| check | when | finds |
| --- | --- | --- |
| `start_up` | before the first job | an occupied GPU, a start that takes too long |
| weights | at the start, every 5 minutes, after an alarm | a flipped bit in the GPU's memory |
| `watchdog` | every 5 minutes of work | a GPU or a line that became slow |
| failed images | 10 in a row, then a plain one | an engine that draws nothing any more |
| engine | every second | a call of the engine that never ends |
| `quarantine` | at the start, every 5 minutes | what other nodes' drawings have shown |

NaN and images of one colour are refused before (`worker.engine.decoder`, `worker.stages.encode`). A
node cannot be asked whether it draws right: its owner may answer for it. So what it draws is
compared with what other nodes draw of the same jobs (`imagefleet verify`).
"""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from imagefleet import concurrency
from imagefleet.errors import FleetError, NodeError
from imagefleet.storage.open import Storage
from imagefleet.telemetry.logs import log
from worker.engine.contract import Engine
from worker.gpu_thread import EngineThread
from worker.metrics import NodeFault, WorkerMetrics
from worker.node import suspects
from worker.node.quarantine import Quarantine
from worker.node.start_up import StartUpCheck, plain_request
from worker.node.watchdog import NodeLimits, NodeWatchdog
from worker.settings import WorkerSettings, machine_name
from worker.stages import encode

#: Seconds between two checks of the weights, each 30 ms for SD1.5 on an H100.
WEIGHTS_SECONDS = 300.0

#: The time for the record of suspect images, which nobody else can write.
RECORD_SECONDS = 60.0

#: Side tasks by name; each raises NodeError once it has found a fault.
Watches = dict[str, Coroutine[Any, Any, None]]


@dataclass(eq=False)
class NodeChecks:
    """Checks the node and the engine that `begin` names."""

    _storage: Storage
    _settings: WorkerSettings
    _limits: NodeLimits
    _metrics: WorkerMetrics
    _engine_thread: EngineThread
    _retry_policy: concurrency.RetryPolicy
    _engine: Engine | None = None
    _fault: str | None = None

    def __post_init__(self) -> None:
        self.start_up = StartUpCheck(self._settings, self._limits, self._metrics)
        self.watchdog = NodeWatchdog(self._engine_thread, self._limits, self._metrics)
        names = frozenset({self._settings.name, machine_name()})
        self.quarantine = Quarantine(self._storage.files, names)
        self._good(time.monotonic())
        self._one_at_a_time = asyncio.Lock()

    async def refuse_quarantined(self) -> None:
        """Raises NodeError if this node may lease no jobs."""
        if reason := await self.quarantine.reason():
            self._metrics.node_faults.labels("quarantined").inc()
            raise NodeError(f"this node is quarantined: {reason}")

    async def begin(self, engine: Engine) -> None:
        """Checks the weights of an engine before its first job; raises NodeError."""
        self._engine = engine
        self._fault = None
        self._good(time.monotonic())
        await self.check_weights()

    def watches(self) -> Watches:
        """The checks of a node at work."""
        return {
            "watch engine": self._engine_thread.watch(),
            "watch speed": self.watchdog.watch_speed(),
            "watch failures": self.watchdog.watch_failures(self.diagnose),
            "watch weights": self.watch_weights(),
            "watch quarantine": self.quarantine.watch(
                partial(self._give_up, "quarantined")
            ),
        }

    async def watch_weights(self) -> NoReturn:
        """Side task: compares the weights on the device with the file's."""
        while True:
            await asyncio.sleep(concurrency.jitter(WEIGHTS_SECONDS))
            await self.check_weights()

    async def check_weights(self) -> None:
        """Raises NodeError if the weights on the device are not the checkpoint's."""
        assert self._engine is not None  # noqa: S101 - `begin` comes first
        if (self_check := self._engine.self_check) is None:
            return
        async with self._one_at_a_time:
            began_at = time.monotonic()
            find = partial(self._engine_thread.call, self_check.find_fault)
            # Read a second time: the sum itself may have been computed wrongly.
            fault = await find() and await find()
            if fault is None:
                self._good(began_at)
                return
        self._give_up("weights", fault)
        raise NodeError(f"this node draws wrong images: {fault}")

    async def diagnose(self, alarm: str) -> str | None:
        """Finds what is wrong with this node; None: its jobs are at fault, or the worker drains.

        A LoRA that gives NaN, or a size too large for a GPU class's memory, fails every image of a
        campaign on any node, and each node that is given up for it is kept from the group for 48
        hours. So before failed images count against a node, a plain image is drawn.
        """
        try:
            async with self._one_at_a_time:
                if not await self._draws_plain_image():
                    return None
        except FleetError as error:
            reason = f"{alarm}; and a plain image failed as well: {error}"
            self._give_up("failed_images", reason)
            return reason
        log.warning(
            f"{alarm}; but a plain image succeeded: the jobs are at fault, not this node",
            action="node_proved",
        )
        await self.check_weights()
        return None

    async def record_suspects(self) -> None:
        """Records what a node that is given up has stored since it was last found good."""
        drawn = self._engine_thread.clock.images - self._good_images
        if self._fault is None or not drawn:
            return
        self._metrics.suspect_images.inc(drawn)
        try:
            async with asyncio.timeout(RECORD_SECONDS):
                await suspects.record(
                    self._storage,
                    self._settings.name,
                    self._good_at,
                    self._fault,
                    self._retry_policy,
                )
        except TimeoutError:
            log.warning(
                f"suspect images are not recorded within {RECORD_SECONDS:g} s",
                action="suspects_not_recorded",
            )

    async def _draws_plain_image(self) -> bool:
        """Draws one image without LoRA; False: the worker drains. Raises what it failed with."""
        assert self._engine is not None  # noqa: S101 - `begin` comes first
        request = plain_request(self._engine, seed=0)
        prepared = await asyncio.to_thread(self._engine.prepare, request)
        if (delivery := await self._engine_thread.draw(prepared)) is None:
            return False
        encode.refuse_one_colour(delivery.pixels())
        return True

    def _good(self, at: float) -> None:
        """A check that began at that time (monotonic seconds) has passed."""
        self._good_at = at
        self._good_images = self._engine_thread.clock.images

    def _give_up(self, fault: NodeFault, reason: str) -> None:
        self._fault = reason
        self._metrics.node_faults.labels(fault).inc()

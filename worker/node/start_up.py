"""The check of a node before its first job.

Free GPU memory is measured where there is a limit, on SaladCloud. A full disk is found as files are
fetched, slow GPUs and uploads while the node works (`worker.node.watchdog`).
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass

from imagefleet.errors import NodeError
from imagefleet.telemetry.logs import log
from worker.engine.contract import Engine, ImageRequest
from worker.engine.pixel.text_states import ZEROS
from worker.inputs import img2img
from worker.metrics import NodeFault, WorkerMetrics
from worker.node.watchdog import NodeLimits
from worker.settings import WorkerSettings

_PROMPT = "photo of a house by a lake, volumetric light"


@dataclass(eq=False)
class StartUpCheck:
    """The start-up check of one node."""

    _settings: WorkerSettings
    _limits: NodeLimits
    _metrics: WorkerMetrics

    def __post_init__(self) -> None:
        self._fault: NodeFault = "engine"  # unless a check below fails
        self._began_at = time.monotonic()

    def load(self, load: Callable[[], Engine]) -> Engine:
        """Loads the engine after a check of the GPU; raises NodeError."""
        self._check_gpu()
        return load()

    @contextlib.asynccontextmanager
    async def limited(self) -> AsyncIterator[None]:
        """Context manager: enforces the start-up time limit and logs what the checks found.

        Raises NodeError for what they found, or if the limit is over.
        """
        limit_seconds = self._limits.start_up_seconds
        limit = asyncio.timeout(limit_seconds or None)
        try:
            async with limit:
                yield
        except NodeError as error:
            self._failed(error)
            raise
        except TimeoutError:
            if not limit.expired():
                raise
            self._fault = "start_up_time"
            failure = NodeError(
                f"this node is not ready after {limit_seconds:g} s (--start-up-seconds)"
            )
            self._failed(failure)
            raise failure from None
        log.info(
            f"the node check passed after {time.monotonic() - self._began_at:.1f} s",
            action="node_check",
            limits=asdict(self._limits),
        )

    def _failed(self, failure: NodeError) -> None:
        self._metrics.node_faults.labels(self._fault).inc()
        self._metrics.node_check_passed.set(0)
        log.error(
            f"the node check failed after {time.monotonic() - self._began_at:.1f} s: {failure}",
            action="node_check",
            fault=self._fault,
            limits=asdict(self._limits),
        )

    def _check_gpu(self) -> None:
        least = self._limits.free_gpu_bytes
        device = self._settings.device
        # Without a limit no GPU is rented: `auto` may mean the CPU.
        if device == "cpu" or not least:
            return
        from worker.engine import device as cuda_check  # torch takes seconds to load

        free = cuda_check.free_gpu_bytes(device)
        if free < least:
            self._fault = "gpu_memory"
            raise NodeError(
                f"the GPU has {free / 2**20:,.0f} MiB free; a worker needs {least / 2**20:,.0f}"
            )


def plain_request(engine: Engine, seed: int) -> ImageRequest:
    """An image that every healthy node can generate: the checkpoint's own size, no LoRA.

    It takes one row a step where the engine compiles for that.
    """
    width, height = engine.default_size
    return ImageRequest(
        prompt=_PROMPT,
        negative_prompt="",
        loras=(),
        sampler="euler",  # which all families draw with
        steps=15,
        cfg_scale=1 if engine.is_unguided else 7,
        seed=seed,
        width=width,
        height=height,
        text_states=None if engine.text_encoder is None else (ZEROS, ZEROS),
        init=img2img.sample(engine.family, width, height),
    )

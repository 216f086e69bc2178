"""`imagefleet worker`: one process for one GPU."""

from __future__ import annotations

import importlib.util

from fleet import console, options
from imagefleet import errors
from imagefleet.telemetry import logs
from worker.settings import WorkerSettings

#: What `imagefleet[worker]` adds and a worker cannot do without.
_LIBRARIES = (
    *("torch", "diffusers", "transformers", "peft", "safetensors", "numpy", "PIL", "isal"),
    *("filelock", "pynvml"),
)


def require_libraries() -> None:
    """Raises SetupError, with the command that mends it, where only the console is installed."""
    for name in _LIBRARIES:
        if importlib.util.find_spec(name) is None:
            raise errors.SetupError(
                f"to make pictures, {name} is missing: pip install 'imagefleet[worker]'"
            )


@options.from_settings(WorkerSettings)
def command(settings: WorkerSettings) -> None:
    """Works on the queue: one worker for each GPU.

    It runs until SIGTERM or Ctrl-C, which lets it finish what the GPU has begun and hand the rest
    back, or with --until-empty until the queue is empty.

    imagefleet worker --model ./model --until-empty

    imagefleet worker --model ./model.safetensors --lora-directory ./loras --port 9100
    """
    require_libraries()
    from worker import process

    logs.configure(settings.log_format)
    console.run(process.run_worker(settings))

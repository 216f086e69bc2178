"""`imagefleet worker`: one process per GPU."""

from __future__ import annotations

import importlib.util

from fleet import console, options
from imagefleet import errors
from imagefleet.telemetry import logs
from worker.settings import WorkerSettings

#: The libraries of `imagefleet[worker]`.
_LIBRARIES = (
    *("torch", "diffusers", "transformers", "peft", "safetensors", "numpy", "PIL", "isal"),
    *("filelock", "pynvml"),
)


def require_libraries() -> None:
    """Raises SetupError, with the command to run, where only the console is installed."""
    for name in _LIBRARIES:
        if importlib.util.find_spec(name) is None:
            raise errors.SetupError(
                f"{name} is not installed; to generate images: pip install 'imagefleet[worker]'"
            )


@options.from_settings(WorkerSettings)
def command(settings: WorkerSettings) -> None:
    """Generates images from the queue's jobs: one worker per GPU.

    Runs until SIGTERM or Ctrl-C, or with --until-empty until the queue is empty. When stopped it
    finishes the images in flight and hands the other jobs back.

    imagefleet worker --model ./model --until-empty

    imagefleet worker --model ./model.safetensors --lora-directory ./loras --port 9100
    """
    from worker.files import check
    from worker.salad import metadata

    if metadata.find_metadata() is None:  # there a worker waits for the operator instead
        check.check(settings)
    require_libraries()
    from worker import process

    logs.configure(settings.log_format)
    console.run(process.run_worker(settings))

"""`imagefleet worker`: one process per GPU."""

from __future__ import annotations

import importlib.util

import typer

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
    finishes the images in flight and hands the other jobs back. With --until-empty, exit code 0
    says that the queue is empty, 143 that SIGTERM came first.

    imagefleet worker --model ./model --until-empty

    imagefleet worker --model ./model.safetensors --lora-directory ./loras --port 9100
    """
    require_libraries()
    from worker import process

    logs.configure(settings.log_format)
    report = console.run(process.run_worker(settings))
    if report.stopped_by is not None:
        # As a shell has it. With 0 a Kubernetes Job would not replace a worker that was evicted.
        raise typer.Exit(128 + report.stopped_by)

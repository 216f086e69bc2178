"""`imagefleet demo`: jobs, worker and images on this machine, without an account or a GPU."""

import logging
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from cli import console, files, options
from cli.options import option
from fleet.worker import command as worker_command
from imagefleet import aio, errors
from imagefleet.files import demo
from imagefleet.job.message import Job
from imagefleet.pricing import prices
from imagefleet.storage.open import open_storage
from imagefleet.telemetry import logs
from worker.settings import WorkerSettings, require_libraries

#: The price in the report: the card with the most images per dollar in SaladCloud's benchmarks.
_PRICED_GPU = "RTX 3060 Ti"
_DOLLARS_PER_HOUR = prices.gpu_dollars_per_hour(_PRICED_GPU, "batch")

#: Marks a storage folder as the demo's: only such a folder is emptied.
_MARKER = "made-by-imagefleet-demo"

#: The worker would wait for space, and the demo's log is on the same disk.
_LEAST_FREE_BYTES = 20_000_000


@options.flat
def command(
    output: Path = option(
        "Folder for the queue and the images.",
        Path("demo-output"),
        metavar="FOLDER",
    ),
    cascade: bool = option(
        "Jobs in two stages instead: a cascade in pixels.", default=False
    ),
    few_steps: bool = option(
        "4 steps without guidance, not 15 with it.", default=False
    ),
    json_file: options.JsonFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Generates images on this machine: no account, no GPU.

    Fills a local queue with 24 jobs and runs a worker until it is empty. Two of the jobs are
    invalid on purpose, to show what happens to them. Each run starts from an empty folder.

    imagefleet demo

    imagefleet demo --output /tmp/demo --json-file /tmp/demo.json

    imagefleet demo --few-steps

    imagefleet demo --cascade
    """
    if cascade and few_steps:
        raise errors.SetupError("give --cascade or --few-steps, not both")
    console.check_writable(json_file)
    require_libraries()
    if cascade:
        stages = [demo.find_checkpoint(demo.CASCADE / name) for name in ("base", "sr")]
        model, loras = ",".join(map(str, stages)), None
        messages = demo.read_jobs(demo.CASCADE, "demo-cascade")
    else:
        checkpoint = demo.find_checkpoint()
        model, loras, messages = str(checkpoint), checkpoint / "loras", demo.messages()
        if few_steps:
            messages = list(map(demo.without_sampling, messages))
    storage = output / "storage"
    given = {
        "storage": f"local:{storage}",
        "model": model,
        "lora_directory": loras,
        "compile": "off",  # it takes longer than the whole demo
        "until_empty": True,
        "cache": storage / "cache",
        "name": "demo",
    }
    # Its jobs are not signed, one never could be; the fleet's accelerator and VAE are not its.
    accelerator = str(demo.ACCELERATOR) if few_steps else None
    own = {"trusted_key": None, "accelerator": accelerator, "vae": None}
    settings = options.read(WorkerSettings, given).model_copy(update=own)
    in_use = f"another `imagefleet demo` is at work in {output}"
    with console.only_one(storage, in_use):
        _prepare(storage)
        report = console.run(_demo(settings, output, messages))
    if json_file is not None:
        console.write_file(json_file, console.json_text(report))
    if as_json:
        console.print_json(report)
    else:
        _show(report, settings, storage, cascade=cascade)


def _prepare(storage: Path) -> None:
    """Creates an empty storage folder; refuses to empty one that is not a demo's."""
    if storage.exists() and not (storage / _MARKER).exists():
        raise errors.SetupError(
            f"{storage} exists and is not from a demo: choose another --output"
        )
    with files.writing(storage):
        if storage.exists():
            shutil.rmtree(storage)
        storage.mkdir(parents=True)
        (storage / _MARKER).touch()
        free = shutil.disk_usage(storage).free
    if free < _LEAST_FREE_BYTES:
        raise errors.SetupError(
            f"the disk of {storage.parent} is full: free {_LEAST_FREE_BYTES / 1e6:.0f} MB, or"
            " choose another --output"
        )


async def _demo(
    settings: WorkerSettings, output: Path, messages: list[str]
) -> dict[str, Any]:
    """Draws the jobs; returns the figures, as `--json` prints them."""
    from worker import process  # needs the extra `worker`

    jobs = [
        Job.model_validate_json(each)
        for each in messages
        if each != demo.INVALID_MESSAGE
    ]
    async with aio.Fleet(open_storage(settings)) as fleet:
        await fleet.submit(jobs, campaign=jobs[0].campaign)
        # The client would refuse it.
        await fleet.storage.queue.send(
            [each for each in messages if each == demo.INVALID_MESSAGE]
        )
        # The demo shows a worker's figures; its log says too much for a first look.
        logs.configure("text", logging.FileHandler(output / "worker.log", mode="w"))
        with worker_command.showing() as show:
            drawn = await process.run_worker(settings, on_progress=show)
        if drawn.stopped_by is not None:
            console.print_note(
                f"stopped after {drawn.images} images of {len(messages)} jobs"
            )
            raise typer.Exit(console.EXIT_INTERRUPTED)
        failed = (await fleet.depth()).failed.messages
    seconds = drawn.seconds - drawn.start_up_seconds
    dollars = seconds / 3600 * _DOLLARS_PER_HOUR
    return {
        "jobs": len(messages),
        "images": drawn.images,
        "failed": failed,
        "seconds": seconds,
        "images_per_second": drawn.images_per_second,
        "engine_idle_fraction": drawn.engine_idle_fraction,
        "dollars": dollars,
        "images_per_dollar": drawn.images / dollars,
    }


def _show(
    report: Mapping[str, Any], settings: WorkerSettings, storage: Path, *, cascade: bool
) -> None:
    # As it was called: by name, or by a path where it is not on the PATH.
    script = sys.argv[0]
    name = Path(script).name
    program = name if shutil.which(name) == script else shlex.quote(script)
    address = shlex.quote(settings.storage)
    speed, seconds = report["images_per_second"], report["seconds"]
    facts = {
        "images": f"{report['images']} in {storage / settings.container}",
        "with their prompts": f"{program} gallery --storage {address}",
        "images/s": f"{speed:.2f} ({seconds:.1f} s after the start-up)",
        "engine idle": f"{console.percent(report['engine_idle_fraction'])} of the time",
        "images per dollar": f"{report['images_per_dollar']:,.0f}: this machine's speed at the"
        f" price of an {_PRICED_GPU} (batch priority, ${_DOLLARS_PER_HOUR:.2f}/h). The demo's model"
        " is a hundredth of Stable Diffusion's size: not comparable",
    }
    if not cascade:
        facts["failed jobs"] = (
            f"{report['failed']}, invalid on purpose; list them with:"
        )
    console.print_facts(facts)
    if not cascade:
        console.print_plain(f"\n  {program} failed --storage {address}")

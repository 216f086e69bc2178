"""`imagefleet demo`: the whole way of a job on this machine, without an account or a GPU."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fleet import console, demo_jobs, options, worker
from imagefleet import errors
from imagefleet.pricing import prices
from imagefleet.storage.open import open_storage
from worker.settings import WorkerSettings

if TYPE_CHECKING:
    from worker.engine import contract
    from worker.process import WorkerReport

#: The stated price: the card with the most images per dollar in SaladCloud's own benchmarks.
PRICED_GPU = "RTX 3060 Ti"
PRICED_PRIORITY: prices.Priority = "batch"

#: What a job can end as; the other outcomes mean that it comes again.
_ENDED = frozenset({"completed", "duplicate", "failed"})

#: The folder of the demo's queue and images carries this file, and only one that does is emptied.
_MARKER = "made-by-imagefleet-demo"


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What the demo came to; `--report` writes exactly these keys."""

    jobs: int
    images: int
    failed: int
    seconds: float
    images_per_second: float
    engine_idle_fraction: float
    dollars: float
    images_per_dollar: float
    mosaic: str


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the demo keeps its things."""

    directory: Path

    @property
    def storage(self) -> Path:
        return self.directory / "storage"

    @property
    def mosaic(self) -> Path:
        return self.directory / "mosaic.png"

    @property
    def log(self) -> Path:
        return self.directory / "worker.log"


def command(
    directory: Annotated[
        Path, typer.Option(help="Where queue, images and contact sheet go.")
    ] = Path("demo-output"),
    report_file: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Write the figures to this file, as JSON."),
    ] = None,
) -> None:
    """Makes pictures on this machine: no account, no GPU.

    Fills a local queue with 24 jobs and works until it is empty. Two of the jobs are wrong on
    purpose, to show what becomes of them. Run again, it begins anew.

    imagefleet demo

    imagefleet demo --directory /tmp/demo --report /tmp/demo.json
    """
    with console.one_line_errors():
        worker.require_libraries()
        places = _Places(directory)
        _prepare(places)
        model, loras, messages = _find_checkpoint(places)
        settings = _settings(places, model, loras)
    report = console.run(_demo(settings, places, messages))
    _show(report, settings, places)
    if report_file is not None:
        report_file.parent.mkdir(parents=True, exist_ok=True)
        report_file.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")


def _prepare(places: _Places) -> None:
    """An empty home for this run: what an earlier demo left in it goes, anybody else's stays."""
    if places.storage.exists():
        if not (places.storage / _MARKER).exists():
            raise errors.SetupError(
                f"{places.storage} is there and not from a demo: give another --directory"
            )
        shutil.rmtree(places.storage)
    try:
        places.storage.mkdir(parents=True)
        (places.storage / _MARKER).touch()
    except OSError as error:
        raise errors.SetupError(f"cannot write to {places.directory}: {error.strerror}") from None


def _settings(places: _Places, model: Path, loras: Path) -> WorkerSettings:
    return options.read(
        WorkerSettings,
        {
            "storage": f"local:{places.storage}",
            "model": model,
            "lora_directory": loras,
            "until_empty": True,
            "cache": places.storage / "cache",
            "name": "demo",
        },
    )


def _find_checkpoint(places: _Places) -> tuple[Path, Path, list[str]]:
    """Checkpoint, LoRAs and messages: trained in a checkout of the source, else random."""
    trained = demo_jobs.TRAINED
    if trained.is_dir():
        valid = (trained / "demo_jobs.jsonl").read_text(encoding="utf-8").splitlines()
        return trained, trained / "loras", demo_jobs.messages(valid)
    console.stdout.print("The demo's checkpoint is not here: a random one makes patterns instead.")
    from fleet.bench import tiny_model

    model = tiny_model.build_tiny_checkpoint(places.directory / "random-model")
    loras = places.directory / "random-loras"
    tiny_model.build_tiny_lora(loras / f"{demo_jobs.REFERENCE_LORA}.safetensors", model)
    return model, loras, demo_jobs.messages()


@dataclass(slots=True)
class _Stopwatch:
    """Monotonic seconds; the engine is ready on its own thread, jobs end on the loop's."""

    ready_at: float = 0.0
    ended_at: float = 0.0
    ended_jobs: int = 0


async def _demo(settings: WorkerSettings, places: _Places, messages: list[str]) -> DemoReport:
    from fleet import contact_sheet

    async with open_storage(settings) as storage:
        await storage.create()
        await storage.queue.send(messages)
    watch, worker_report = await _work(settings, places, len(messages))
    if watch.ended_jobs < len(messages):
        console.stdout.print(f"Stopped after {watch.ended_jobs} of {len(messages)} jobs.")
        raise typer.Exit(console.EXIT_INTERRUPTED)
    async with open_storage(settings) as storage:
        failed = (await storage.poison.depth()).messages
        names = sorted([name async for name in storage.blobs.names()])
        images = [await storage.blobs.read(name) for name in names]
    places.mosaic.write_bytes(
        contact_sheet.draw_contact_sheet([image for image in images if image])
    )
    seconds = watch.ended_at - watch.ready_at
    dollars = seconds / 3600 * prices.gpu_dollars_per_hour(PRICED_GPU, PRICED_PRIORITY)
    return DemoReport(
        jobs=len(messages),
        images=worker_report.images,
        failed=failed,
        seconds=seconds,
        images_per_second=worker_report.images / seconds,
        engine_idle_fraction=worker_report.engine_idle_fraction,
        dollars=dollars,
        images_per_dollar=worker_report.images / dollars,
        mosaic=str(places.mosaic),
    )


async def _work(
    settings: WorkerSettings, places: _Places, jobs: int
) -> tuple[_Stopwatch, WorkerReport]:
    from worker import process

    watch = _Stopwatch()
    with _logging_to(places.log), _progress() as progress:
        task = progress.add_task("loading the model", total=jobs)

        def load() -> contract.Engine:
            from worker.engine.load import load_engine

            # To compile takes longer than the whole demo.
            engine = load_engine(
                Path(settings.model), settings.device, kind=settings.engine, compile="off"
            )
            watch.ready_at = time.monotonic()
            progress.update(task, description="making pictures")
            return engine

        def on_settled(outcome: str) -> None:
            if outcome in _ENDED:
                watch.ended_at = time.monotonic()
                watch.ended_jobs += 1
                progress.update(task, completed=watch.ended_jobs)

        report = await process.run_worker(settings, load=load, on_settled=on_settled)
    return watch, report


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console.stdout,
    )


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """The worker's log, which would tear the progress bar apart, into a file."""
    handler = logging.FileHandler(path, mode="w", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
        handler.close()


def _show(report: DemoReport, settings: WorkerSettings, places: _Places) -> None:
    price = prices.gpu_dollars_per_hour(PRICED_GPU, PRICED_PRIORITY)
    storage = shlex.quote(settings.storage)
    facts = {
        "images": f"{report.images} in {places.storage / settings.container}",
        "contact sheet": report.mosaic,
        "images/s": f"{report.images_per_second:.2f}"
        f" ({report.seconds:.1f} s, the loading of the model not counted)",
        "engine waited": f"{report.engine_idle_fraction:.1%} of the time",
        "images per dollar": f"{report.images_per_dollar:,.0f}: this machine's speed at the price"
        " of"
        f" an {PRICED_GPU} ({PRICED_PRIORITY} priority, ${price:.2f} an hour)."
        " The demo's model is a hundredth of Stable Diffusion's size: no figure to compare",
        "failed jobs": f"{report.failed}, wrong on purpose; they are shown by:",
    }
    for name, fact in facts.items():
        console.stdout.print(f"{name:<16} {fact}", soft_wrap=True, highlight=False)
    console.stdout.print(
        f"\n  {_this_program()} failed list --storage {storage}", soft_wrap=True, highlight=False
    )


def _this_program() -> str:
    """How a person calls this very program from here, be it installed on the path or not."""
    script = Path(sys.executable).with_name("imagefleet")
    if not script.exists():
        return f"{shlex.quote(sys.executable)} -m fleet.main"
    if (found := shutil.which(script.name)) and Path(found).samefile(script):
        return script.name
    inside = script.is_relative_to(Path.cwd())
    return shlex.quote(str(script.relative_to(Path.cwd()) if inside else script))

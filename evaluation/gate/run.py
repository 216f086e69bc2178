"""Draws what is to be drawn, pairs both sides and compares them."""

import importlib
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from cli import console
from evaluation.gate import compare, images, jobs, page, verdict
from evaluation.gate.compare import Measures
from evaluation.gate.images import (
    CampaignImages,
    FolderImages,
    Images,
    NotComparableError,
)
from evaluation.gate.options import GateRequest
from evaluation.gate.page import Result
from evaluation.gate.sides import Campaign, Engine, Folder
from evaluation.score import extractors
from evaluation.score import reference as references
from evaluation.score.networks import load
from evaluation.score.statistics import Statistics
from imagefleet import concurrency
from imagefleet.errors import SetupError
from imagefleet.files import demo
from imagefleet.job.message import Job
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from worker.files import check
from worker.settings import require_libraries

#: Nothing is compared by features.
NONE = "none"

#: Of missing images, in a message.
_SHOWN = 5

_REFERENCE_BATCH = 32


def run(plan: GateRequest, *, with_pictures: bool, quiet: bool) -> Result:
    """The gate, in the main thread; raises SetupError, which says why, if it cannot compare."""
    _check(plan)
    measures = _measures(plan)
    with _folders(plan) as folders:
        _draw(plan, folders, quiet=quiet)
        return console.run(
            _compare(plan, measures, folders, with_pictures=with_pictures, quiet=quiet)
        )


def _check(plan: GateRequest) -> None:
    """Raises SetupError for options that have no effect on these sides."""
    both = len(plan.engines) == 2  # noqa: PLR2004
    for flag, value in (("--jobs", plan.drawn.jobs), ("--steps", plan.drawn.steps)):
        if value is not None and not both:
            raise SetupError(
                f"{flag} is for two settings that are drawn here; the jobs are those of the images"
                " there are"
            )
    for flag, value in (("--model", plan.drawn.model), ("--keep", plan.drawn.keep)):
        if value is not None and not plan.engines:
            raise SetupError(
                f"{flag} is for settings that are drawn here; there are none"
            )
    if plan.a == plan.b and plan.storages[0] == plan.storages[1]:
        raise SetupError(f"A and B are the same: {plan.a}")
    with load.needs_extra():
        importlib.import_module("skimage")  # before what takes minutes is drawn
    if plan.drawn.model is not None:
        check.check_path(plan.drawn.model)
    if plan.engines:
        require_libraries()


def _measures(plan: GateRequest) -> Measures:
    draws_demo = bool(plan.engines) and plan.drawn.model is None
    name = plan.judged.extractor or (extractors.DEMO if draws_demo else NONE)
    clip = plan.judged.clip or (
        name if name == extractors.DEMO or Path(name).is_dir() else NONE
    )
    device = load.find_device({name, clip} - {NONE}, plan.drawn.device)
    found = None if name == NONE else load.load_extractor(name, device)
    texts = None if clip == NONE else load.load_text_extractor(clip, device)
    if found is None:
        if plan.judged.reference is not None:
            raise SetupError("--reference needs an --extractor")
        return Measures(None, texts, None)
    reference = plan.judged.reference or (
        extractors.DEMO if name == extractors.DEMO else None
    )
    return Measures(
        found, texts, None if reference is None else _reference(reference, found)
    )


def _reference(name: str, extractor: extractors.Extractor) -> Statistics:
    if Path(name).is_dir():
        return console.run(_statistics(FolderImages(Path(name)), extractor))
    found = references.read(name, extractor.facts, None).statistics
    assert found is not None  # noqa: S101 - `read` refuses one without
    return found


async def _statistics(folder: Images, extractor: extractors.Extractor) -> Statistics:
    names = sorted(await folder.names())
    found = Statistics.merged([], extractor.facts.dimensions)
    for first in range(0, len(names), _REFERENCE_BATCH):
        batch = names[first : first + _REFERENCE_BATCH]
        drawn = await concurrency.gather(*(images.read(folder, name) for name in batch))
        features = extractor.features([Image.fromarray(each.pixels) for each in drawn])
        found += Statistics.of(np.asarray(features))
    if found.count < 2:  # noqa: PLR2004
        raise SetupError(f"{folder.label}: the reference needs at least two images")
    return found


@contextmanager
def _folders(plan: GateRequest) -> Iterator[tuple[Path, Path]]:
    """Context manager: the folders that the sides are drawn into."""
    with tempfile.TemporaryDirectory(prefix="imagefleet-gate-") as temporary:
        root = Path(temporary) if plan.drawn.keep is None else plan.drawn.keep
        folders = root / "a", root / "b"
        for at in plan.engines:
            if folders[at].exists() and any(folders[at].iterdir()):
                raise SetupError(
                    f"{folders[at]} has files already: choose another --keep"
                )
            folders[at].mkdir(parents=True, exist_ok=True)
        yield folders


def _draw(plan: GateRequest, folders: tuple[Path, Path], *, quiet: bool) -> None:
    if not plan.engines:
        return
    from evaluation.gate import draw  # only this needs the worker's libraries

    draw.check(plan.engines.values(), plan.drawn.device)
    to_draw = _jobs(plan, folders)
    drawn = plan.drawn
    setup = draw.Setup(
        drawn.model or demo.find_checkpoint(),
        drawn.device,
        plan.drawn.lora_directory
        or (None if plan.drawn.model else demo.find_checkpoint() / "loras"),
        drawn.embedding_directory,
    )
    total = sum(job.images for job in to_draw)
    # Once on, torch accumulates in float16 until the process ends.
    order = sorted(
        plan.engines, key=lambda at: "fp16_accumulate" in plan.engines[at].settings
    )
    for at in order:
        side = plan.engines[at]
        with console.counting(f"drawing {side}", total, quiet=quiet) as on_image:
            draw.draw(to_draw, side, setup, folders[at], on_image)


def _jobs(plan: GateRequest, folders: tuple[Path, Path]) -> list[Job]:
    if len(plan.engines) == len(plan.sides):
        return jobs.of_file(plan.drawn.jobs, plan.drawn.count, plan.drawn.steps)
    there = 1 if 0 in plan.engines else 0

    async def read() -> list[Job]:
        async with _opened(plan, there, folders) as side:
            by_key = images.by_key(await side.names(), side.label)
            names = [by_key[key] for key in sorted(by_key)[: plan.drawn.count]]
            return await jobs.of_images(side, names)

    return console.run(read())


@asynccontextmanager
async def _opened(
    plan: GateRequest, at: int, folders: tuple[Path, Path]
) -> AsyncIterator[Images]:
    side = plan.sides[at]
    if isinstance(side, Campaign):
        # Only images are read: neither queues nor a right to them are needed.
        async with open_storage(plan.storages[at]) as storage:
            yield CampaignImages(storage, side.name)
    elif isinstance(side, Folder):
        yield FolderImages(side.path)
    else:
        model = (
            "the demo's model" if plan.drawn.model is None else str(plan.drawn.model)
        )
        yield FolderImages(folders[at], f"{side}, drawn with {model}")


async def _compare(
    plan: GateRequest,
    measures: Measures,
    folders: tuple[Path, Path],
    *,
    with_pictures: bool,
    quiet: bool,
) -> Result:
    async with _opened(plan, 0, folders) as a, _opened(plan, 1, folders) as b:
        names = [images.by_key(await side.names(), side.label) for side in (a, b)]
        keys = _keys(plan, (a, b), (names[0], names[1]))
        with console.counting("compared", len(keys), quiet=quiet) as on_pairs:
            found = await compare.compare(
                (a, b), keys, (names[0], names[1]), measures, on_pairs
            )
        judged = verdict.judge(found, measures, plan.bounds, plan.judged.limit)
        pictures = []
        if with_pictures:
            for pair in judged.worst:
                both = await concurrency.gather(
                    images.read(a, pair.name_a), images.read(b, pair.name_b)
                )
                pictures.append(page.picture(pair, *both))
        return Result((a.label, b.label), measures, found, judged, tuple(pictures))


def _keys(
    plan: GateRequest,
    sides: tuple[Images, Images],
    names: tuple[Mapping[str, str], Mapping[str, str]],
) -> list[str]:
    """The names of the pairs; raises NotComparableError if a side lacks images of the other."""
    # What is drawn here has all images of a job, even if not all are asked for.
    leading = 1 if isinstance(plan.a, Engine) and not isinstance(plan.b, Engine) else 0
    keys = sorted(names[leading])[: plan.drawn.count]
    lacking = [
        ("BA"[leading], sides[1 - leading], set(keys) - names[1 - leading].keys())
    ]
    if plan.drawn.count is None:
        extra = names[1 - leading].keys() - set(keys)
        lacking.append(("AB"[leading], sides[leading], extra))
    for letter, side, missing in lacking:
        if missing:
            shown = ", ".join(sorted(missing)[:_SHOWN])
            more = (
                f" and {len(missing) - _SHOWN:,} more" if len(missing) > _SHOWN else ""
            )
            raise NotComparableError(
                f"{letter} ({side.label}) lacks {console.counted(len(missing), 'image')} of the"
                f" other side: {shown}{more}; --count compares the first ones alone"
            )
    return keys


def other_storage(settings: StorageSettings, address: str | None) -> StorageSettings:
    """The settings of B's storage: another address, with the same names and no token of A's."""
    if address is None:
        return settings
    tokens = {"sas": None, "sas_file": None, "broker_url": None}
    return settings.model_copy(update={"storage": address, **tokens})

"""Compares what the engine is told of random payloads with what AUTOMATIC1111 is told.

    python tests/a1111/oracle.py --payloads 5000 --out benchmarks/results/a1111.json

Told are sizes, seeds, the scales of the first latents, and of each call of the model its timestep,
noise, words, guidance, ControlNet and checkpoint, of models that predict noise or velocities, and
of SDXL's. `formulas` has what AUTOMATIC1111 makes of a payload, `payloads` draws them. A payload
that is refused, or of which is said how it differs, is not silent.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    _ROOT = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(_ROOT), str(_ROOT / "benchmarks")]

import formulas
import payloads
import torch

from families import tiny_controlnets, tiny_families
from imagefleet import errors
from imagefleet.job import differences
from imagefleet.job.message import Job, read_job
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from rows.groups import add_figures
from worker.engine import load
from worker.engine.sampler import NOISE_SCALE, TIMESTEP
from worker.engine.slots.prepare import PreparedRequest
from worker.inputs.reader import JobFiles
from worker.settings import WorkerSettings
from worker.stages.requests import JobRequests, RequestReader

#: Of timesteps, and of standard deviations of noise, which have the rounding of float32.
_TIMESTEPS = 2e-2
_NOISE = 1e-4


class Comparison:
    """Counts payloads: those told the same, those refused or said, and those that differ."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.refused = Counter[str]()
        self.different: list[tuple[int, list[str]]] = []


def compare(count: int, begin: int = 0) -> Comparison:
    """Compares the payloads of *count* numbers from *begin* on."""
    found = Comparison()
    with _readers() as readers:
        for number in range(begin, begin + count):
            case = payloads.case(number)
            reader = readers[case.family]
            engine: Any = reader.engine
            try:
                job = read_job(json.dumps(case.payload), "one")
                read = asyncio.run(reader.read_rested(job))
                prepared = engine.prepare(read.requests[0])
            except errors.JobError as error:
                found.counts["refused"] += 1
                found.refused[error.message.partition(":")[0][:60]] += 1
                continue
            said = list(differences.of_job(job, (job.width, job.height)))
            wrong = list(_differences(case, job, read, prepared, engine))
            if not wrong:
                found.counts["same"] += 1
            elif said:
                found.counts["said"] += 1
                found.refused.update(said)
            else:
                found.counts["different"] += 1
                found.different.append((number, wrong))
    return found


@contextmanager
def _readers() -> Iterator[dict[str, RequestReader]]:
    """A reader with an engine of each family."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(1))
        yield {
            family: _reader(Path(name, family), family, stack, threads)
            for family in set(payloads.FAMILIES)
        }


def _reader(
    folder: Path, family: Any, stack: ExitStack, threads: ThreadPoolExecutor
) -> RequestReader:
    """With one refiner, of the same family, whatever its name, and SD1's with one ControlNet."""
    prediction = "v_prediction" if family == "sd2" else "epsilon"
    own, other = (
        tiny_families.build(folder / each, family, prediction_type=prediction)
        for each in ("own", "other")
    )
    engine = load.load_engine(load.EngineSettings(own, "cpu", slots=1))
    stack.callback(engine.close)
    settings = WorkerSettings(model=str(own), cache=folder / "cache")
    storage = open_storage(StorageSettings(storage=f"local:{folder / 'storage'}"))
    asyncio.run(storage.create())
    if family == "sd1":
        data = tiny_controlnets.build(folder / "lines.safetensors", own).read_bytes()
        name = "controlnets/lines.safetensors"
        kind = "application/octet-stream"
        asyncio.run(storage.files.create(name, data, kind, {}))
    files = JobFiles(storage, settings)

    async def find(name: str | None, *_: Any) -> Path | None:
        return None if name is None else other

    files.inputs._models.find = find  # type: ignore[method-assign]
    return RequestReader(engine, files, threads)


def _differences(
    case: payloads.Case,
    job: Job,
    read: JobRequests,
    prepared: PreparedRequest,
    engine: Any,
) -> Iterator[str]:
    there = formulas.told(case, engine.checkpoint.alphas_cumprod)
    requests = read.requests
    overlay = read.inputs.overlay
    box = None if overlay is None else overlay.box
    if box != there.box:
        yield f"box {box}, there {there.box}"
    seeds = [(each.seed, each.noise.subseed) for each in requests]
    if seeds != there.seeds:
        yield f"seeds: {seeds}, there {there.seeds}"
    if job.clip_skip != there.clip_skip:
        yield f"clip skip: {job.clip_skip}, there {there.clip_skip}"
    noise = requests[0].noise
    found = noise.source, noise.seed_delta, noise.resize_from
    if found != there.noise:
        yield f"noise of {found}, there {there.noise}"
    own: PreparedRequest | None = prepared
    for number, expected in enumerate(there.passes, 1):
        if own is None:
            yield f"pass {number}: none"
            return
        yield from (f"pass {number}: {each}" for each in _of_pass(own, expected))
        yield from _checkpoint_and_controls(own, expected)
        if own.ends is not None and (own := own.next_pass) is None:
            return
        own = own.next_pass
    if own is not None:
        yield "a pass too many"


def _of_pass(own: PreparedRequest, there: formulas.Pass) -> Iterator[str]:
    request = own.request
    schedule = own.schedule
    size = request.width // 8 * 8, request.height // 8 * 8
    if size != there.size:
        yield f"size {size}, there {there.size}"
    for name, value in (
        ("initial_scale", there.noise_scale),
        ("image_scale", there.image_scale),
    ):
        found = getattr(schedule, name)
        if not _alike(found, value, _NOISE):
            yield f"{name} {found}, there {value}"
    if there.is_adaptive:
        return
    table = schedule.table
    timesteps = table[:, TIMESTEP].tolist()
    expected = [timestep for timestep, _ in there.calls]
    if not expected and not own.schedule.noisy[0] and len(timesteps) == 1:
        return  # a call that leaves the latents as they are
    if len(timesteps) != len(expected) or not all(
        _alike(one, other, _TIMESTEPS)
        for one, other in zip(timesteps, expected, strict=True)
    ):
        yield f"timesteps {timesteps}, there {expected}"
        return
    yield from _noise(own, there)
    scales = list(own.scales(0))[::-1]
    if schedule.unguided[:1] != (True,) and not _all_alike(scales, there.scales):
        yield f"scales {scales}, there {there.scales}"
    unguided = list(schedule.unguided)
    if unguided != there.unguided:
        yield f"unguided {unguided}, there {there.unguided}"
    texts = [_texts(own, call) for call in range(len(table))]
    theirs = [[" ".join(text.split()) for text in call] for call in there.texts]
    if texts != theirs:
        yield f"texts {texts}, there {theirs}"


def _checkpoint_and_controls(
    own: PreparedRequest, there: formulas.Pass
) -> Iterator[str]:
    """Compares the call from which on another checkpoint draws, and weights of ControlNets."""
    if not there.calls:
        return
    weights = [list(each.weights) for each in own.controls]
    if weights != ([there.controls] if any(there.controls) else []):
        yield f"controls {weights}, there {there.controls}"
    found = own.ends
    if found is None and own.checkpoint is not None:
        found = own.begins
    if found != there.switch:
        yield f"refiner from call {found}, there {there.switch}"


def _noise(own: PreparedRequest, there: formulas.Pass) -> Iterator[str]:
    """Compares the noise of calls; noise that is 0 in all of them may be drawn or not."""
    schedule = own.schedule
    scales = schedule.table[:, NOISE_SCALE].tolist()
    drawn = [
        scale if is_drawn else None
        for scale, is_drawn in zip(scales, schedule.noisy, strict=True)
    ]
    expected = [noise for _, noise in there.calls]
    if not any(expected) and not any(drawn):
        return
    if not _all_alike(drawn, expected):
        yield f"noise {drawn}, there {expected}"
    if not _all_alike([schedule.initial_churn], [there.churn]):
        yield f"churn {schedule.initial_churn}, there {there.churn}"


def _texts(own: PreparedRequest, call: int) -> list[str]:
    """The words of each subprompt, first to last, and of the negative prompt."""
    *conds, uncond = own.text_rows
    rows = [*conds[::-1], uncond]
    return [" ".join(row.subprompt.at(call).text.split()) for row in rows]


def _all_alike(own: list[Any], there: list[Any]) -> bool:
    return len(own) == len(there) and all(
        one is other is None
        or (one is not None and other is not None and _alike(one, other, _NOISE))
        for one, other in zip(own, there, strict=True)
    )


def _alike(one: float, other: float, within: float) -> bool:
    return abs(one - other) <= within * max(1.0, abs(other) if within < 1e-3 else 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--payloads", type=int, default=5_000)
    parser.add_argument("--begin", type=int, default=1_000, help="the first's number")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = compare(given.payloads, given.begin)
    for number, wrong in found.different:
        print(f"payload {number}: {'; '.join(wrong)[:500]}")
    for reason, count in found.refused.most_common():
        print(f"{count:6} refused or said: {reason}")
    figures = {
        "payloads": given.payloads,
        "payloads_different": found.counts["different"],
        "payloads_refused": found.counts["refused"],
        "payloads_same": found.counts["same"],
        "payloads_said": found.counts["said"],
        "torch": torch.__version__,
    }
    text = json.dumps(figures)
    if given.out is not None:
        add_figures(given.out, figures)
    print(text)


if __name__ == "__main__":
    main()

"""Figures of a fleet between two moments, and what limits it."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, mode

from simulation import clock
from simulation.fleet import Fleet, Missing, Scenario, stand_ins

#: Simulated seconds between two looks at a run.
LOOK_SECONDS = 5.0

#: Of a limit: above it, requests are refused every second.
AT_LIMIT = 0.94

#: Engines that wait longer than this are not what limits a fleet.
IDLE = 0.01

GPUS = "GPUs"
QUEUE = "operations/s of one queue"
ACCOUNT = "requests/s of the storage account"
LATENCY = "latency of the storage"

#: Objects that Python allocates before it looks for cycles: nearly nothing is garbage.
_GC_OBJECTS = 200_000

#: Fields of `Figures` that are counts, shares, and figures per second.
_COUNTS = (
    "images",
    "redeliveries",
    "lost",
    "visible_duplicates",
    "set_aside",
    "interruptions",
    "given_up",
)
_SHARES = ("share_of_possible", "idle_fraction")
_RATES = (
    "images_per_second",
    "queue_operations_per_second",
    "busiest_queue_per_second",
    "requests_per_second",
    "refused_per_second",
)

#: Called with the simulated seconds so far.
Report = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Sample:
    """Sums of a fleet at one moment."""

    at: float
    images: int
    queue_operations: int
    busiest_queue: int
    requests: int
    refused: int
    redeliveries: int
    busy_seconds: float
    up_seconds: float
    possible_images: float
    missing: dict[str, float]
    dollars: float
    interruptions: int
    given_up: int

    @classmethod
    def of(cls, fleet: Fleet) -> Sample:
        fleet.count()
        account, places = fleet.account, fleet.places
        return cls(
            at=fleet.loop.time(),
            images=account.images,
            queue_operations=account.queue_operations,
            busiest_queue=max(each.limit.accepted for each in account.queues.values()),
            requests=account.requests.accepted,
            refused=account.refused,
            redeliveries=account.redeliveries,
            busy_seconds=sum(each.busy for each in places),
            up_seconds=sum(each.up_seconds for each in places),
            possible_images=sum(each.possible_images for each in places),
            missing={
                each.name: sum(getattr(place.missing, each.name) for place in places)
                for each in dataclasses.fields(Missing)
            },
            dollars=sum(each.dollars for each in places),
            interruptions=fleet.interruptions,
            given_up=fleet.given_up,
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a run."""

    replicas: int
    simulated_replicas: int
    #: Simulated seconds that were measured.
    seconds: float
    images: int
    images_per_second: float
    #: Share of the images that the nodes would draw if none ever waited, or was away.
    share_of_possible: float
    #: Shares of that, by what they are lost to; without those in the slots at the end.
    missing: dict[str, float]
    idle_fraction: float
    queue_operations_per_second: float
    busiest_queue_per_second: float
    requests_per_second: float
    refused_per_second: float
    redeliveries: int
    lost: int
    visible_duplicates: int
    #: Images drawn for jobs that had one already; nobody is shown them.
    set_aside: int
    dollars: float
    images_per_dollar: float
    interruptions: int
    given_up: int
    bottleneck: str
    #: Runs of which these are the figures: rates are their means, counts their sums.
    seeds: int = 1


def measure(
    plan: Scenario,
    warm_seconds: float,
    seconds: float,
    report: Report = lambda *_: None,
) -> Figures:
    """Simulates a fleet; the first seconds do not count, or all do where the jobs end."""
    usual, state = gc.get_threshold(), random.getstate()
    gc.set_threshold(_GC_OBJECTS, 20, 50)
    random.seed(plan.seed)  # of the worker's pauses
    try:
        with clock.simulated_time() as loop, stand_ins():
            fleet = Fleet(plan, loop)
            return clock.run(loop, _measure(fleet, warm_seconds, seconds, report))
    finally:
        gc.set_threshold(*usual)
        random.setstate(state)


async def _measure(
    fleet: Fleet, warm_seconds: float, seconds: float, report: Report
) -> Figures:
    fleet.start()
    if fleet.plan.jobs is None:
        await _advance(fleet, warm_seconds, report)
        first = Sample.of(fleet)
        await _advance(fleet, warm_seconds + seconds, report)
    else:
        first = Sample.of(fleet)
        await _drain(fleet, seconds, report)
    last = Sample.of(fleet)
    await fleet.stop()
    return figures(fleet, first, last)


async def _advance(fleet: Fleet, until: float, report: Report) -> None:
    while (left := until - fleet.loop.time()) > 0:
        await asyncio.sleep(min(left, LOOK_SECONDS))
        fleet.check()
        report(fleet.loop.time())


async def _drain(fleet: Fleet, longest_seconds: float, report: Report) -> None:
    """Until no job is left; raises TimeoutError."""
    images = -1
    while fleet.account.images != images or any(
        each.messages for each in fleet.account.job_queues
    ):
        images = fleet.account.images
        await _advance(fleet, fleet.loop.time() + LOOK_SECONDS, report)
        images = images or -1
        if fleet.loop.time() > longest_seconds:
            raise TimeoutError(
                f"jobs are left after {longest_seconds:g} simulated seconds"
            )


def figures(fleet: Fleet, first: Sample, last: Sample) -> Figures:
    seconds = last.at - first.at
    images = last.images - first.images
    up_seconds = last.up_seconds - first.up_seconds
    dollars = last.dollars - first.dollars
    idle = max(0.0, 1 - (last.busy_seconds - first.busy_seconds) / up_seconds)
    queue = (last.queue_operations - first.queue_operations) / seconds
    busiest = (last.busiest_queue - first.busiest_queue) / seconds
    requests = (last.requests - first.requests) / seconds
    account = fleet.account
    possible = last.possible_images - first.possible_images
    missing = {
        name: (last.missing[name] - first.missing[name]) / possible
        for name in last.missing
    }
    # Drawn twice, or by a node that was interrupted; and what is on its way at the end, less that
    # at the beginning.
    missing["not_stored"] = 1 - images / possible - sum(missing.values())
    twice = sum(account.recorded_twice(name) for name in account.containers)
    return Figures(
        replicas=fleet.plan.replicas,
        simulated_replicas=fleet.plan.replicas,
        seconds=seconds,
        images=images,
        images_per_second=images / seconds,
        share_of_possible=images / possible,
        missing=missing,
        idle_fraction=idle,
        queue_operations_per_second=queue,
        busiest_queue_per_second=busiest,
        requests_per_second=requests,
        refused_per_second=(last.refused - first.refused) / seconds,
        redeliveries=last.redeliveries - first.redeliveries,
        lost=len(account.lost),
        visible_duplicates=account.overwritten + twice,
        set_aside=account.set_aside,
        dollars=dollars,
        images_per_dollar=images / dollars if dollars else 0.0,
        interruptions=last.interruptions - first.interruptions,
        given_up=last.given_up - first.given_up,
        bottleneck=bottleneck(
            busiest / fleet.plan.queue_limit, requests / fleet.plan.account_limit, idle
        ),
    )


def together(runs: Sequence[Figures]) -> Figures:
    """The figures of several runs, which differ in their seed alone."""
    known = [asdict(run) for run in runs]
    sums = {name: sum(each[name] for each in known) for name in _COUNTS}
    sums |= {name: sum(each[name] for each in known) for name in ("seconds", "dollars")}
    return dataclasses.replace(
        runs[0],
        **sums,
        **{name: fmean(each[name] for each in known) for name in (*_SHARES, *_RATES)},
        missing={
            name: fmean(run.missing[name] for run in runs) for name in runs[0].missing
        },
        images_per_dollar=sums["images"] / sums["dollars"] if sums["dollars"] else 0.0,
        bottleneck=mode(run.bottleneck for run in runs),
        seeds=len(runs),
    )


def whole(part: Figures, replicas: int, share: float) -> Figures:
    """The figures of *replicas*, of which only a *share* was simulated."""
    known = asdict(part)
    return dataclasses.replace(
        part,
        replicas=replicas,
        **{name: round(known[name] / share) for name in _COUNTS},
        **{name: known[name] / share for name in (*_RATES, "dollars")},
    )


def bottleneck(queue_share: float, account_share: float, idle_fraction: float) -> str:
    """Names what limits a fleet that uses such shares of the limits."""
    if queue_share >= AT_LIMIT:
        return QUEUE
    if account_share >= AT_LIMIT:
        return ACCOUNT
    return LATENCY if idle_fraction > IDLE else GPUS

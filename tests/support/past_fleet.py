"""Fleets that never were: what their processes would have exposed, and recorded."""

import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import prometheus_client
from prometheus_client.parser import text_string_to_metric_families

import sent_jobs
from imagefleet.records.log import RecordLog
from imagefleet.records.record import Record
from imagefleet.storage.open import Storage
from imagefleet.telemetry.metrics import render
from worker.metrics import WorkerMetrics

BEGAN = datetime(2026, 11, 1, 12, tzinfo=UTC)
PUSH_SECONDS = 15

#: One drawing of so many is of an image that process 0 has stored, of a job that fails, of the
#: first image of two whose job is cancelled meanwhile, or of a failed job that was replayed.
DOUBLED = 40
FAILED = 23
CANCELLED = 150
REPLAYED = 7

#: The campaigns, each of which has so many jobs in turn.
CAMPAIGNS = ("spring", "summer", "autumn")
IN_TURN = 70

#: A killed process has written no records of its last images, which others find.
UNRECORDED = 5


@dataclass
class Process:
    """A worker's process from *start* to *end*, in seconds, and what a server knows of it."""

    instance: str
    start: float
    end: float
    images_per_second: float = 1.0
    dollars_per_hour: float = 0.72
    device: str | None = None
    #: Of each metric.
    labels: dict[str, str] = field(init=False)
    #: Other counters with a label, and their values at its end.
    counts: dict[str, float] = field(default_factory=dict)
    start_up_seconds: float = 0
    #: Between its last push and its end; one that was killed has pushed no last time.
    unpushed_seconds: float = 0
    #: Of what it drew; another one had stored the rest.
    stored_share: float = 1
    #: Spans of time in which nothing that was pushed arrived.
    silences: Sequence[tuple[float, float]] = ()

    def __post_init__(self) -> None:
        registry = (metrics := WorkerMetrics("acme/jobs", self.device)).registry
        metrics.set_worker_info(worker=f"{self.instance}-{self.device}", gpu="RTX 3060")
        prometheus_client.Counter(
            "imagefleet_cost_dollars", "...", ["kind"], registry=registry
        ).labels("gpu")
        prometheus_client.Gauge(
            "imagefleet_price_dollars_per_hour", "...", registry=registry
        )
        self.labels = {}
        for family in text_string_to_metric_families(render(registry).decode()):
            for sample in family.samples:
                labels = {
                    "job": "imagefleet-worker",
                    "instance": self.instance,
                    **sample.labels,
                }
                self.labels[sample.name] = ",".join(
                    f'{name}="{labels[name]}"' for name in labels
                )

    @property
    def images(self) -> float:
        return self.images_at(self.end - self.start)

    def images_at(self, age: float) -> float:
        """What it counts at that age."""
        drawn = max(0.0, age - self.start_up_seconds) * self.images_per_second
        return drawn * self.stored_share

    @property
    def is_killed(self) -> bool:
        return bool(self.unpushed_seconds)

    @property
    def dollars(self) -> float:
        return self.dollars_in(self.start, self.end)

    def dollars_in(self, begin: float, end: float) -> float:
        """What it cost between those moments."""
        seconds = max(0.0, min(end, self.end) - max(begin, self.start))
        return seconds * self.dollars_per_hour / 3600

    def waste(self, **seconds: float) -> None:
        """Sets the counters of dollars that bought no image, by reason."""
        for reason, lost in seconds.items():
            series = f'imagefleet_wasted_dollars_total{{reason="{reason}"}}'
            self.counts[series] = lost * self.dollars_per_hour / 3600

    def samples(self) -> Iterator[tuple[str, float, float]]:
        """Each series, the time and the value of each push; the last is at the process's end."""
        seconds = self.end - self.start - self.unpushed_seconds
        for age in [*range(0, int(seconds), PUSH_SECONDS), seconds]:
            if any(begin < self.start + age < end for begin, end in self.silences):
                continue
            values = {
                "imagefleet_images_total": self.images_at(age),
                "imagefleet_cost_dollars_total": age * self.dollars_per_hour / 3600,
                "imagefleet_price_dollars_per_hour": self.dollars_per_hour,
                "imagefleet_worker_info": 1.0,
            }
            lines = {
                f"{name}{{{self.labels[name]}}}": value
                for name, value in values.items()
            }
            common = self.labels["imagefleet_images_total"]
            for series, total in self.counts.items():
                lines[f"{series[:-1]},{common}}}"] = total * age / seconds
            for line, value in lines.items():
                yield line, BEGAN.timestamp() + self.start + age, value


def campaign_of(place: int) -> str:
    """The campaign of a process's job, by its number."""
    return CAMPAIGNS[place // IN_TURN % len(CAMPAIGNS)]


def a_fleet(chance: random.Random) -> list[Process]:
    """Workers at unlike prices that start again at their address, or as others, some killed.

    Their pushes are lost for 1 to 60 minutes, once in some of their lives.
    """
    processes: list[Process] = []
    for number in range(chance.randint(2, 4)):
        at = chance.uniform(0, 600)
        device = chance.choice(["0", None])
        name = f"m{number}"
        speed = chance.uniform(0.05, 0.2)
        price = chance.choice([0.05, 0.18, 0.36, 1.2])
        for run in range(chance.randint(1, 3)):
            end = at + chance.uniform(3_000, 6_000)
            is_at_its_address = chance.random() < 0.6
            address = name if is_at_its_address else f"{name}-{run}"
            process = Process(address, at, end, speed, price, device)
            process.start_up_seconds = chance.uniform(20, 90)
            process.unpushed_seconds = chance.choice([0, chance.uniform(0, 15)])
            length = 60 * chance.choice([1, 6, 20, 59])
            if chance.random() < 0.5 and end - at > length + 300:
                begin = chance.uniform(at + 120, end - length - 60)
                process.silences = [(begin, begin + length)]
            processes.append(process)
            at = end + chance.uniform(5, 400)
    return processes


def fate(place: int) -> str:
    """What becomes of the job that a process draws, if nobody has drawn it before."""
    if place and place % FAILED == 0:
        return "failed"
    return "cancelled" if place % CANCELLED == 1 else "completed"


def drawings(
    number: int,
    process: Process,
    doubled: Collection[int],
    replayed: list[tuple[str, str]],
) -> Iterator[Record]:
    """A record of each drawing; *doubled* jobs of process 0 among them, and *replayed* ones."""
    seconds = process.end - process.start - process.start_up_seconds
    drawn = int(seconds * process.images_per_second)
    for place in range(drawn):
        name = f"{number}-{place}"
        outcome = fate(place)
        campaign = campaign_of(place)
        if (
            place == drawn - 1
        ):  # it is stored: a worker's records tell its time until then
            outcome = "completed"
        elif place in doubled:
            name = f"0-{place}"
            outcome = "completed"
        elif replayed and outcome == "completed" and place % REPLAYED == 0:
            name, campaign = replayed.pop()
        at = process.end - (drawn - 1 - place) / process.images_per_second
        yield Record(
            outcome="failed" if outcome == "failed" else "completed",
            images=2 if outcome == "cancelled" else 1,
            source=f"message-{name}",
            id=name,
            campaign=campaign,
            blob=f"{campaign}/{name}.png",
            at=BEGAN + timedelta(seconds=at),
            worker=f"{process.instance}-{process.device}",
            started_at=BEGAN + timedelta(seconds=process.start),
            start_up_seconds=process.start_up_seconds,
            price_per_hour=process.dollars_per_hour,
            seconds=1 / process.images_per_second,
        )


async def write_records(
    storage: Storage, processes: Sequence[Process], bad: Process, chance: random.Random
) -> Counter[str]:
    """What the processes and an operator record, and how many there are of each.

    Half of the failed jobs are replayed, and jobs are cancelled while they wait, too. The bad one's
    last images are replaced; none is drawn in their place: it would be one more.
    """
    found = Counter[str]()
    of_first = 0
    to_draw = list[tuple[str, str]]()
    unrecorded: list[Record] = []
    operator = RecordLog(storage.files, "operator")
    for campaign in CAMPAIGNS:
        await operator.open(campaign, "cancelled")
    for number, process in enumerate(processes):
        at_first = range(5, of_first - 1, DOUBLED) if number else ()
        doubled = {at for at in at_first if fate(at) == "completed" and at % REPLAYED}
        records = [*drawings(number, process, doubled, to_draw)]
        of_first = of_first or len(records)
        names = {f"0-{place}" for place in doubled}
        again = [each for each in records if each.id in names]
        stored = [
            each
            for each in records
            if each.outcome != "failed" and each.id not in names
        ]
        error = {"error": "JobError", "blob": None}
        failed = [
            each.model_copy(update=error)
            for each in records
            if each.outcome == "failed"
        ]
        begun = [each for each in stored if each.images == 2]
        for each in begun:
            await storage.blobs.create(
                str(each.blob), b"", "image/png", {"images": "2"}
            )
        waiting = [
            each.model_copy(update={"id": f"{each.id}-waiting"})
            for each in chance.sample(stored, chance.randint(1, 9))
        ]
        ended = {"outcome": "cancelled", "images": 1, "blob": None}
        cancelled = [each.model_copy(update=ended) for each in begun + waiting]
        replayed = chance.sample(failed, len(failed) // 2)
        to_draw += [(each.id, each.campaign) for each in replayed]
        await operator.add(
            [each.model_copy(update={"outcome": "replayed"}) for each in replayed]
        )
        log = RecordLog(storage.blobs, f"{process.instance}-{process.device}")
        await log.add(again, again=True)
        # Of the process before, whose images this one finds stored, twice.
        await log.add(unrecorded * 2, again=True)
        is_lost = process.is_killed and process is not bad
        unrecorded = stored[-UNRECORDED:] if is_lost else []
        for each in unrecorded:
            told = {"images": str(each.images)}
            await storage.blobs.create(str(each.blob), b"", "image/png", told)
        recorded = stored[: len(stored) - len(unrecorded)]
        await log.add(recorded + failed + cancelled)
        for campaign in CAMPAIGNS:
            ids = [each.id for each in records + cancelled if each.campaign == campaign]
            await sent_jobs.note(storage, campaign, len(ids), ids=ids)
            of_campaign = sum(each.campaign == campaign for each in stored)
            series = f'imagefleet_campaign_images_total{{campaign="{campaign}"}}'
            process.counts[series] = of_campaign
        process.stored_share = len(stored) / len(records)
        process.waste(
            failed=len(failed) / process.images_per_second,
            duplicate=len(again) / process.images_per_second,
            start_up=process.start_up_seconds,
        )
        found.update(stored=len(stored), doubled=len(again), cancelled=len(cancelled))
        found.update(failed=len(failed), replayed=len(replayed))
        if process is bad:
            replaced = stored[-len(stored) // 20 :]
            found["replaced"] = len(replaced)
            update = {"outcome": "replaced", "source": "journal"}
            await RecordLog(storage.files, "redo").add(
                [each.model_copy(update=update) for each in replaced]
            )
    await RecordLog(storage.blobs, "last").add(unrecorded, again=True)
    return found

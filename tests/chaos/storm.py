"""A storm: real workers that are killed and frozen at random, over a storage with faults.

    python tests/chaos/storm.py --storage both --jobs 2000 --kills 100 --faults 1000
    python tests/chaos/storm.py --chains --jobs 300 --kills 60
    python tests/chaos/storm.py --clashes
    python tests/chaos/storm.py --bundles

It fills a queue with `imagefleet load`, killed and resumed; runs workers with a stand-in engine;
kills (SIGKILL), freezes beyond the lease (SIGSTOP, SIGCONT) and stops (SIGTERM) them at random
moments; replays failed jobs, cancels a second campaign and scales a fleet on a fake SaladCloud, all
killed as well. Then the faults end, the rest is done, and it prints the tally: a table, and one
JSON object on the last line. Exit code 1 if a job was lost, an image is visible twice or wrong, a
good job failed, or the scaler counted less than the fleet cost. With --chains, each job has three
stages for workers of two models, and only SIGKILLs count as kills. With --clashes, a tenth of the
jobs share their ids with others: each has to have one outcome, and all commands have to say so.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import forks
import storm_clashes
import storm_worker
from browsing import visible
from imagefleet.records import ledger
from imagefleet.storage.open import Storage, open_storage
from imagefleet.storage.settings import StorageSettings
from proxy import Fault, FaultProxy
from scaler import KilledScaler
from storm_jobs import (
    MODELS,
    STOPPED,
    StormJob,
    all_jobs,
    chains,
    drawings,
    stopped_jobs,
)
from storm_tally import Tally, compare_outcomes, count_up

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

WORKERS = 4
CAPACITY = 4

#: Two fleets share the queue, with leases of their own.
LEASES_SECONDS = (4, 6)

#: What happens to workers, and to requests on their way to Azurite.
BLOWS = {"kill": 6, "freeze": 2, "term": 2}
FAULTS: dict[Fault, int] = {
    "drop": 3,
    "lose reply": 3,
    "delay": 2,
    "truncate": 2,
    "slow reply": 1,
    "hang": 1,
    500: 2,
    503: 2,
    429: 2,
}

#: A request to Azurite, or on local storage a call of a worker, fails with this probability.
FAULT_SHARE = 0.15

#: Between two looks whether the queue is empty.
LOOK_SECONDS = 0.2

#: Between two looks at a command that is killed at a random moment.
COMMAND_LOOK_SECONDS = 0.05

#: The load takes so long, undisturbed: it has to be killed in the middle.
FILL_SECONDS = 2.0

#: The longest without progress, by the filler or after the storm: leases have to expire, suspects
#: are generated one by one, and who fills a storage that fails backs off. How long the whole takes
#: is the machine's.
STUCK_SECONDS = 600.0


#: Single images and batches, jobs of several stages, jobs of which some have one id, or bundles.
StormKind = Literal["jobs", "chains", "clashes", "bundles"]


@dataclass
class Storm:
    """One storm on one storage."""

    #: The storage itself, for the tally.
    settings: StorageSettings
    #: The same for the workers, on Azurite behind the proxy.
    disturbed: StorageSettings
    tally: Tally
    folder: Path
    random: random.Random
    kills: int
    faults: int
    tick_seconds: float
    #: Of the workers' calls; 0 where the proxy makes the faults.
    fault_share: float
    kind: StormKind
    #: Of all commands, which it starts without their imports.
    server: forks.Forks
    log: Path = field(init=False)
    events: Path = field(init=False)
    expected_exits: set[forks.Fork] = field(default_factory=set)
    workers: list[forks.Fork] = field(default_factory=list)
    frozen: set[forks.Fork] = field(default_factory=set)
    models: dict[forks.Fork, str] = field(default_factory=dict)
    rivals: list[StormJob] = field(default_factory=list)
    #: Messages of rivals, and copies.
    _unsent: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.kind == "clashes":
            self.rivals = storm_clashes.rivals(self.tally.jobs, self.random)
            jobs = [*self.rivals, *storm_clashes.copies(self.all_jobs(), self.random)]
            self.random.shuffle(jobs)
            self._unsent = storm_clashes.messages(jobs, self.random)
        self.events = self.folder / "events"
        self.events.touch()
        self.log = self.folder / "workers.log"

    async def run(self, storage: Storage) -> None:
        began_at = time.monotonic()
        early = await self.send_rivals(storage, len(self._unsent) // 4)
        await self._fill(storage)
        sent = len(self.jobs()) + len(self.stopped_jobs()) + early
        self.tally.sent_twice = (await storage.queue.depth()).messages - sent
        self._start_missing_workers()
        scaler = KilledScaler(self.folder, self.random, self._command)
        async with scaler.running():
            calls = [
                asyncio.create_task(self._now_and_then(*call))
                for call in (
                    (2.0, "replay", "--all", "--yes"),
                    (6.0, "cancel", STOPPED, "--yes"),
                )
            ]
            late = len(self._unsent) // 3
            try:
                while not await self._is_enough(storage) or len(self._unsent) > late:
                    share = 1 - min(1, self._blows() / self.kills)
                    await self.send_rivals(
                        storage, len(self._unsent) - late - int(2 * late * share)
                    )
                    await asyncio.sleep(
                        self.random.uniform(0.05, 2.0 / len(self.workers))
                    )
                    if self._blows() < self.kills:
                        self._blow()
                    self._start_missing_workers()
            finally:
                for call in calls:
                    call.cancel()
                await asyncio.gather(*calls, return_exceptions=True)
        self.tally.scaler_errors = scaler.errors
        self.tally.seconds = round(time.monotonic() - began_at, 1)

    async def send_rivals(self, storage: Storage, count: int | None = None) -> int:
        """Sends some of the messages that clash with others, or are copies; all by default."""
        sent = self._unsent[:count]
        self._unsent = self._unsent[len(self._unsent[:count]) :]
        await storage.queue.send(sent)
        return len(sent)

    def jobs(self) -> list[StormJob]:
        """The jobs that are loaded from a file."""
        makers = {
            "jobs": all_jobs,
            "chains": chains,
            "clashes": storm_clashes.named_jobs,
            "bundles": all_jobs,
        }
        return [*makers[self.kind](self.tally.jobs)]

    def all_jobs(self) -> list[StormJob]:
        return [*self.jobs(), *self.rivals]

    def stopped_jobs(self) -> list[StormJob]:
        """Of the campaign that is cancelled."""
        count = self.tally.jobs
        return [
            *(chains(count, STOPPED) if self.kind == "chains" else stopped_jobs(count))
        ]

    async def calm(self, storage: Storage) -> None:
        """Without faults, until nothing is left in the queue."""
        async with asyncio.timeout(STUCK_SECONDS) as limit:
            left = None
            while (messages := (await storage.queue.depth()).messages) > 0:
                if messages != left:
                    left = messages
                    limit.reschedule(asyncio.get_running_loop().time() + STUCK_SECONDS)
                self._start_missing_workers()
                await asyncio.sleep(LOOK_SECONDS)
        for process in self.workers:
            self.expected_exits.add(process)
            process.terminate()
        for process in self.workers:
            await asyncio.to_thread(process.wait, 60)
        # A killed replay may hold failed jobs, which are not seen until its leases end.
        poison = storage.poison
        while len([1 async for _ in visible(poison)]) < (await poison.depth()).messages:
            await asyncio.sleep(LOOK_SECONDS)

    async def console(self, *arguments: str | Path) -> str:
        """Runs the console to its end; returns what it prints."""
        ended = await asyncio.to_thread(
            self.server.run,
            *map(str, arguments),
            cwd=self.folder,
            variables=forks.environment(self.disturbed),
        )
        if ended.returncode not in {0, 4}:
            raise RuntimeError(f"imagefleet {arguments} failed: {ended.stderr}")
        return ended.stdout

    def kill_all(self) -> None:
        for process in self.workers:
            process.kill()
            process.wait()

    async def _is_enough(self, storage: Storage) -> bool:
        """Whether all blows fell, and all faults came or none will: idle workers call nothing."""
        self._count_faults()
        if self._blows() < self.kills or self.tally.faults >= self.faults:
            return self._blows() >= self.kills
        return (await storage.queue.depth()).messages == 0

    def _blows(self) -> int:
        if self.kind == "chains":
            return self.tally.kills
        return self.tally.kills + self.tally.freezes + self.tally.terms

    def _count_faults(self) -> None:
        if self.fault_share:
            self.tally.faults = self.events.read_text().count("fault\n")

    def _blow(self) -> None:
        victims = [each for each in self.workers if each.poll() is None]
        victims = [each for each in victims if each not in self.frozen]
        if not victims:
            return
        victim = self.random.choice(victims)
        (blow,) = self.random.choices(list(BLOWS), list(BLOWS.values()))
        if blow == "kill":
            self.expected_exits.add(victim)
            victim.kill()
            self.tally.kills += 1
        elif blow == "term":
            self.expected_exits.add(victim)
            victim.terminate()
            self.tally.terms += 1
        else:
            victim.send_signal(signal.SIGSTOP)
            self.frozen.add(victim)
            frozen_seconds = self.random.uniform(0.5, 1.5) * max(LEASES_SECONDS)
            asyncio.get_running_loop().call_later(frozen_seconds, self._wake, victim)
            self.tally.freezes += 1

    def _wake(self, process: forks.Fork) -> None:
        self.frozen.discard(process)
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)

    def _start_missing_workers(self) -> None:
        for process in [each for each in self.workers if each.poll() is not None]:
            self.workers.remove(process)
            if process not in self.expected_exits:
                self.tally.workers_ended_by_themselves += 1
        while len(self.workers) < WORKERS:
            self._start_worker()

    def _start_worker(self) -> None:
        # As many of each model, whichever was killed.
        served = Counter(dict.fromkeys(MODELS, 0))
        served.update(self.models[each] for each in self.workers)
        model = min(MODELS, key=served.__getitem__)
        lease = LEASES_SECONDS[self.random.randrange(len(LEASES_SECONDS))]
        arguments = [
            self.events,
            self.tick_seconds,
            self.fault_share,
            self.random.random(),
            model,
        ]
        flags = ["--model", "none", "--lease-seconds", lease, "--grace-seconds", 2]
        worker = self._start(*arguments, *flags, program="storm_worker.main()")
        self.models[worker] = model
        self.workers.append(worker)

    async def _fill(self, storage: Storage) -> None:
        """`imagefleet load`, killed twice before it may end.

        Jobs that clash with others are a foreign producer's.
        """
        jobs = self.folder / "jobs.jsonl"
        both = self.stopped_jobs()
        if self.kind == "clashes":
            await storage.queue.send(storm_clashes.messages(self.jobs(), self.random))
        else:
            both += self.jobs()
        self.random.shuffle(both)
        jobs.write_text("".join(f"{json.dumps(job)}\n" for job in both))
        rate = self.tally.jobs / FILL_SECONDS
        command = ["load", jobs, "--rate", str(rate), "--json"]
        if self.kind == "bundles":
            command += ["--bundle", "8"]

        async def noted() -> int:
            """Bytes of the ledgers."""
            ledgers = (await ledger.listed(storage)).values()
            return sum(blob.size_bytes for blobs in ledgers for blob in blobs)

        for sending_seconds in (
            self.random.uniform(0.1, 0.8),
            self.random.uniform(0.1, 0.8),
        ):
            before = await noted()

            async def has_begun(before: int = before) -> bool:
                return await noted() > before

            await self._command(sending_seconds, *command, has_begun=has_begun)
        if await self._command(STUCK_SECONDS, *command, progress=noted):
            raise RuntimeError(
                f"imagefleet load failed: {self.log.read_text()[-2000:]}"
            )

    async def _now_and_then(self, longest_seconds: float, *arguments: str) -> None:
        while True:
            await asyncio.sleep(self.random.uniform(3, 8))
            await self._command(self.random.uniform(0.7, longest_seconds), *arguments)

    async def _command(
        self,
        kill_after_seconds: float,
        *arguments: str | Path,
        has_begun: Callable[[], Awaitable[bool]] | None = None,
        progress: Callable[[], Awaitable[object]] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> int:
        """Runs the console; kills it some time after it has begun. Returns its exit code.

        The time begins anew whenever *progress* changes.
        """
        process = self._start(*arguments, variables=environment)
        try:
            while has_begun and process.poll() is None and not await has_begun():
                await asyncio.sleep(COMMAND_LOOK_SECONDS)
            async with asyncio.timeout(kill_after_seconds) as limit:
                reached = await progress() if progress else None
                while process.poll() is None:
                    await asyncio.sleep(COMMAND_LOOK_SECONDS)
                    if progress and (now := await progress()) != reached:
                        reached = now
                        limit.reschedule(
                            asyncio.get_running_loop().time() + kill_after_seconds
                        )
        except (TimeoutError, asyncio.CancelledError) as error:
            process.kill()
            process.wait()
            self.tally.other_kills += 1
            if isinstance(error, asyncio.CancelledError):
                raise
        return process.wait()

    def _start(
        self,
        *arguments: Any,
        program: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> forks.Fork:
        return self.server.start(
            *map(str, arguments),
            cwd=self.folder,
            variables=forks.environment(self.disturbed) | (variables or {}),
            output=self.log,
            program=program,
        )


@contextlib.asynccontextmanager
async def disturbances(
    settings: StorageSettings, share: float, chance: random.Random, tally: Tally
) -> AsyncIterator[tuple[StorageSettings, FaultProxy | None]]:
    """The settings for the workers: on Azurite behind the proxy, which counts its faults."""
    if settings.storage.startswith("local:"):
        yield settings, None
        return
    names = list(FAULTS)
    weights = list(FAULTS.values())

    def next_fault() -> Fault:
        if chance.random() >= share:
            return "pass"
        tally.faults += 1
        return chance.choices(names, weights)[0]

    proxy = FaultProxy(next_fault)
    async with proxy.running(settings.storage):
        yield settings.model_copy(update={"storage": proxy.address}), proxy


@contextlib.contextmanager
def commands(folder: Path, prelude: str = "pass") -> Iterator[forks.Forks]:
    """What starts the commands and workers of storms; it prints into *folder*."""
    path = [ROOT, HERE, HERE.with_name("support")]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    prelude = f"import storm_worker; {forks.AZURE}; {prelude}"
    with forks.running(Path(sys.executable), folder, variables, prelude) as server:
        yield server


async def weather(
    settings: StorageSettings,
    server: forks.Forks,
    *,
    jobs: int,
    kills: int,
    faults: int,
    seconds: float,
    seed: int,
    kind: StormKind = "jobs",
) -> Tally:
    """One storm of about *seconds*, and the calm after it; returns the tally."""
    where = "local" if settings.storage.startswith("local:") else "azurite"
    tally = Tally(where, jobs)
    with tempfile.TemporaryDirectory(prefix="imagefleet-storm-") as folder:
        async with (
            open_storage(settings) as storage,
            disturbances(settings, FAULT_SHARE, random.Random(seed), tally) as (
                disturbed,
                proxy,
            ),
        ):
            await storage.create()
            storm = Storm(
                settings,
                disturbed,
                tally,
                Path(folder),
                random.Random(seed),
                kills=kills,
                faults=faults,
                tick_seconds=0.0,
                fault_share=0.0 if proxy else FAULT_SHARE,
                kind=kind,
                server=server,
            )
            images = sum(map(len, drawings(storm.all_jobs()).values()))
            storm.tick_seconds = seconds * WORKERS * CAPACITY / images
            try:
                await storm.run(storage)
                if proxy:
                    proxy.next_fault = lambda: "pass"
                    proxy.over.set()
                storm_worker.over(storm.events).touch()
                storm.tick_seconds = 0.0
                await storm.calm(storage)
                if kind == "clashes":
                    await storm.send_rivals(storage)
                    await storm.calm(storage)
                    tally.untruths, tally.names_taken = await storm_clashes.untruths(
                        settings, storage, storm.all_jobs(), storm.console, storm.calm
                    )
                else:
                    # What failed five times in the storm, and was not replayed in it.
                    await storm.console("replay", "--all", "--yes")
                    await storm.calm(storage)
                    await compare_outcomes(tally, storage, storm.jobs())
            finally:
                storm.kill_all()
            await count_up(
                tally, storage, storm.stopped_jobs(), storm.events.read_text()
            )
            if not tally.is_clean:
                sys.stderr.write(storm.log.read_text()[-20_000:])
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--storage", choices=["local", "azurite", "both"], default="both"
    )
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument(
        "--kills", type=int, default=100, help="of workers, freezes included"
    )
    parser.add_argument("--faults", type=int, help="default: 1000, with --chains 200")
    parser.add_argument(
        "--seconds", type=float, default=150, help="of work for undisturbed workers"
    )
    parser.add_argument(
        "--chains",
        dest="kind",
        action="store_const",
        const="chains",
        default="jobs",
        help="jobs of three stages",
    )
    parser.add_argument(
        "--clashes",
        dest="kind",
        action="store_const",
        const="clashes",
        help="a tenth of the jobs share ids",
    )
    parser.add_argument(
        "--bundles",
        dest="kind",
        action="store_const",
        const="bundles",
        help="jobs in bundles of 8",
    )
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    if arguments.faults is None:
        arguments.faults = 200 if arguments.kind == "chains" else 1000
    kinds = ["local", "azurite"] if arguments.storage == "both" else [arguments.storage]
    given = {
        name: getattr(arguments, name)
        for name in ("jobs", "kills", "faults", "seconds", "seed", "kind")
    }
    tallies = [run_on(kind, given) for kind in kinds]
    rows = [asdict(tally) for tally in tallies]
    for name in rows[0]:
        shown = (
            len(row[name]) if isinstance(row[name], list) else row[name] for row in rows
        )
        print(f"{name.replace('_', ' '):30}", *(f"{each!s:>10}" for each in shown))
    for wrong in (
        each for tally in tallies for each in (*tally.untruths, *tally.scaler_errors)
    ):
        print(wrong)
    print(json.dumps({"seed": arguments.seed, "storms": rows}))
    sys.exit(not all(tally.is_clean for tally in tallies))


def run_on(kind: str, given: dict[str, float]) -> Tally:
    import azurite

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="imagefleet-storm-")
        )
        server = stack.enter_context(commands(Path(folder)))
        if kind == "local":
            settings = StorageSettings(storage=f"local:{folder}/storage")
        else:
            settings = StorageSettings(storage=stack.enter_context(azurite.running()))
        return asyncio.run(weather(settings, server, **given))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()

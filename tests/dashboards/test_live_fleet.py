"""Two fleets that push to a real Prometheus, and every query of the dashboards and rules.

One scenario, run once: three workers and an exporter push for half a minute, and so do one worker
and the exporter of another fleet; a node fails its check; one worker is killed, the others are
stopped. A second Prometheus gets the first fleet alone.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

import azurite
import forks
import polling
import sent_jobs
from fleet.monitor import prometheus
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from imagefleet.validation import JSONDict

pytestmark = pytest.mark.slow

COMMAND = Path(sys.executable).with_name("imagefleet")

#: Pushes and measurements every second, and an engine that leaves the processor to others.
PRELUDE = """
from imagefleet.telemetry import push
from worker import metrics
from worker.engine import checkpoint
from worker.engine.slots.engine import SlotEngine
push.PUSH_SECONDS = metrics.DEPTH_SECONDS = 1.0
tick = SlotEngine.tick
def slower(engine):
    time.sleep(push.PUSH_SECONDS * 0.4)
    return tick(engine)
SlotEngine.tick = slower
"""
PAGES = Path(__file__).parents[2] / "dashboards" / "grafana"

CAMPAIGN = "live"
LORA = "magic"
JOBS = 2_000

#: Named after the folders of their storages.
FLEET = "storage/jobs"
OTHER_FLEET = "other/jobs"
PUSHING_SECONDS = 25

#: Five minutes by default; shorter here, so that a dead worker's series go stale sooner.
LOOK_BACK = "10s"

#: Grafana's variables: at least four pushes of a second each, and the time range.
VARIABLES = {
    "$__rate_interval": "10s",
    "$__range": f"{PUSHING_SECONDS}s",
    "$worker": "worker-1",
}

#: What `$fleet` is if all are chosen, as in the pages.
ALL = ".*"

#: By how much two servers' values may differ, by a push at most.
SAMPLED = {"rel": 0.01, "abs": 1e-6}

#: Records are written at other moments on each server.
RECORDED = {"rel": 0.1, "abs": 0.05}

#: Of two rates that cancel out, the difference has the errors of both.
OF_RATES = {"rel": 0.1, "abs": 0.25}

#: Nothing to see on a fleet that works.
EMPTY = {
    "imagefleet:workers_starting",
    "nodes: Waiting workers: A",
    "cost: Kept of the images drawn: A",  # nothing is judged here
    "nodes: Speed before full speed, median: A",  # nothing is compiled here
}

Tool = Callable[[str], str]  # the fixture of conftest.py
Values = dict[frozenset[tuple[str, str]], float]
Answers = dict[str, Values]


@dataclass(frozen=True, slots=True)
class Seen:
    """What the scenario recorded."""

    everything: Answers
    chosen: Answers
    other: Answers
    alone: Answers
    rules: dict[str, Values]
    rules_alone: dict[str, Values]
    fleets: set[str]
    without_fleet: set[str]
    metrics: set[str]
    before_the_kill: set[str]
    after_the_kill: set[str]
    victim: str


def queries() -> dict[str, str]:
    """Every query of every panel by its page, panel and letter, and those of the marks."""
    found = {}
    for path in sorted(PAGES.glob("*.json")):
        page = json.loads(path.read_text())
        for panel in page["panels"]:
            for target in panel.get("targets", ()):
                found[f"{path.stem}: {panel['title']}: {target['refId']}"] = target[
                    "expr"
                ]
    found["roll-outs"] = page["annotations"]["list"][1]["expr"]
    return found


def rules(kind: str) -> dict[str, str]:
    """The expressions of the rules that `record`, or of those that `alert`."""
    found = {}
    for name in ("rules.yaml", "alerts.yaml"):
        groups = yaml.safe_load(rules_text(PAGES.parent, name))["groups"]
        every = [rule for group in groups for rule in group["rules"]]
        found |= {rule[kind]: rule["expr"] for rule in every if kind in rule}
    return found


def rules_text(dashboards: Path, name: str) -> str:
    """A file of rules whose last hour ends two seconds ago, not ten minutes."""
    text = (dashboards / "prometheus" / name).read_text()
    return text.replace("[1h] offset 10m", "[1h] offset 2s")


@pytest.fixture(scope="module")
def seen(tool: Tool, dashboards: Path, tmp_path_factory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("live")
    with contextlib.ExitStack() as processes:
        write_rules(dashboards, folder)
        server, alone = (
            start_prometheus(processes, tool, folder, name) for name in ("all", "one")
        )
        push_url = start_vmagent(processes, tool, server, alone, folder)
        yield watch(processes, server, alone, push_url, folder)


def is_close(values: Values, to: Values, name: str) -> bool:
    tolerance = SAMPLED
    if name == "fleet: Jobs/s, in and out: A":
        tolerance = OF_RATES
    elif "imagefleet:" in queries().get(name, name):
        tolerance = RECORDED
    return values == {
        labels: pytest.approx(value, **tolerance) for labels, value in to.items()
    }


@pytest.mark.parametrize("name", queries())
def test_the_panel_has_data_unless_nothing_is_wrong(seen: Seen, name: str):
    assert bool(seen.everything[name]) is (name not in EMPTY), queries()[name]


@pytest.mark.parametrize("name", queries())
def test_a_panel_of_one_fleet_shows_what_that_fleet_alone_would(seen: Seen, name: str):
    assert is_close(seen.chosen[name], seen.alone[name], name), queries()[name]


@pytest.mark.parametrize("name", queries())
def test_all_fleets_are_shown_apart_or_added_up_knowingly(seen: Seen, name: str):
    """Each fleet's values, or, by other labels, at least the smaller one and at most their sum."""
    everything = seen.everything[name]
    chosen = seen.chosen[name]
    other = seen.other[name]

    assert everything.keys() == chosen.keys() | other.keys()
    for labels, value in everything.items():
        parts = [each[labels] for each in (chosen, other) if labels in each]
        if "fleet" in dict(labels):
            assert len(parts) == 1, queries()[name]
        slack = 1e-6 + 0.01 * abs(value)
        assert min(parts) - slack <= value <= sum(parts) + slack, queries()[name]


@pytest.mark.parametrize("name", sorted(rules("record").keys() - EMPTY))
def test_a_rule_gives_each_fleet_what_it_alone_would(seen: Seen, name: str):
    by_fleet = {dict(labels)["fleet"] for labels in seen.rules[name]}
    of_one = {
        labels: value
        for labels, value in seen.rules[name].items()
        if dict(labels)["fleet"] == FLEET
    }

    assert by_fleet == {FLEET, OTHER_FLEET}
    assert is_close(of_one, seen.rules_alone[name], name)


def test_every_series_has_its_fleet(seen: Seen):
    assert seen.without_fleet == set()


def test_the_pages_offer_both_fleets(seen: Seen):
    assert seen.fleets == {FLEET, OTHER_FLEET}


def test_the_columns_of_a_table_meet_in_one_row_for_each_worker(seen: Seen):
    columns = [
        found
        for name, found in seen.everything.items()
        if name.startswith("nodes: Workers: ")
    ]
    busy = {f"worker-{number}" for number in range(3)} | {"other-0"}

    assert len(columns) == 6
    rows = [
        {labels for labels in each if dict(labels)["worker"] in busy}
        for each in columns
    ]
    assert len(rows[0]) == 4
    assert all(each == rows[0] for each in rows)


def test_the_nodes_page_says_why_a_node_failed(seen: Seen):
    (row,) = seen.other["nodes: Faults by node in the time range: A"]
    assert (dict(row)["worker"], dict(row)["fault"]) == ("broken", "start_up_time")
    failed = "nodes: Failed node checks in the time range: A"
    assert [*seen.other[failed].values(), *seen.chosen[failed].values()] == [1, 0]


def test_every_metric_that_is_pushed_is_in_the_readme(seen: Seen, dashboards: Path):
    pushed = {re.sub(r"_(sum|count|bucket)$", "", name) for name in seen.metrics}
    # `imagefleet webhooks` is scraped; here are no GPUs, no jobs in stages and no compiler.
    names = (
        r"^\| `(imagefleet_(?![^`{]*(?:webhook|gpu_[ur]|free_gpu|chain|warm_up))[^`{]+)"
    )
    text = (dashboards / "README.md").read_text()
    assert pushed == set(re.findall(names, text, re.MULTILINE))


def test_a_killed_workers_series_go_stale_and_the_others_stay(seen: Seen):
    assert len(seen.before_the_kill) == 3
    assert seen.after_the_kill == seen.before_the_kill - {seen.victim}


def write_rules(dashboards: Path, folder: Path) -> None:
    """The rules, evaluated every second."""
    for name in ("rules.yaml", "alerts.yaml"):
        text = rules_text(dashboards, name)
        (folder / name).write_text(text.replace("interval: 30s", "interval: 1s"))
    config = (
        "global: {evaluation_interval: 1s}\nrule_files: [rules.yaml, alerts.yaml]\n"
    )
    (folder / "prometheus.yaml").write_text(config)


def start_prometheus(
    processes: contextlib.ExitStack, tool: Tool, folder: Path, name: str
) -> str:
    """Starts a Prometheus; returns its URL."""
    address = f"127.0.0.1:{azurite.free_ports(1)[0]}"
    command = [
        tool("prometheus"),
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / name}",
        f"--web.listen-address={address}",
        f"--query.lookback-delta={LOOK_BACK}",
        "--web.enable-remote-write-receiver",
        "--log.level=error",
    ]
    processes.enter_context(started(command, folder / f"prometheus-{name}.log"))
    return f"http://{address}"


def start_vmagent(
    processes: contextlib.ExitStack, tool: Tool, server: str, alone: str, folder: Path
) -> str:
    """Starts a vmagent that forwards to *server*, and one fleet to *alone*; the URL to push to."""
    address = f"127.0.0.1:{azurite.free_ports(1)[0]}"
    command = [tool("vmagent")]
    for url, fleets in ((server, ".*"), (alone, FLEET)):
        keep = folder / f"keep-{len(command)}.yaml"
        keep.write_text(
            f"- {{action: keep, source_labels: [fleet], regex: '{fleets}'}}\n"
        )
        command += [
            f"-remoteWrite.url={url}/api/v1/write",
            f"-remoteWrite.urlRelabelConfig={keep}",
        ]
    command += [
        f"-remoteWrite.tmpDataPath={folder / 'vmagent'}",
        f"-httpListenAddr={address}",
        # With several, newer samples overtake older ones, which Prometheus then refuses.
        "-remoteWrite.queues=1",
        "-loggerLevel=ERROR",
    ]
    processes.enter_context(started(command, folder / "vmagent.log"))
    return f"http://{address}/api/v1/import/prometheus"


def watch(
    processes: contextlib.ExitStack,
    server: str,
    alone: str,
    push_url: str,
    folder: Path,
) -> Seen:
    model = make_model(folder)
    storage = f"local:{folder / 'storage'}"
    other = f"local:{folder / 'other'}"
    asyncio.run(fill(storage, JOBS))
    asyncio.run(fill(other, JOBS // 4))
    server_of_forks = forks.running(
        Path(sys.executable), folder, environment(), PRELUDE
    )
    commands = processes.enter_context(server_of_forks)

    def start(name: str, *arguments: Any) -> forks.Fork:
        given = (*map(str, arguments), "--push-url", push_url)
        log = folder / f"{name}.log"
        process = commands.start(
            *given, cwd=folder, variables=environment(), output=log
        )
        processes.callback(process.kill)
        return process

    def start_worker(name: str, gpu: str, address: str, *arguments: Any) -> forks.Fork:
        flags = ["--model", model, "--lora-directory", folder / "loras", "--slots", "4"]
        flags += ["--gpu", gpu, "--name", name, "--storage", address]
        return start(name, "worker", *flags, *arguments)

    def start_exporter(name: str, address: str) -> forks.Fork:
        flags = ["--sample-seconds", "1", "--port", "0"]
        flags += ["--dollars-per-hour", "9"]
        return start(name, "exporter", *flags, "--storage", address)

    workers = [
        start_worker(f"worker-{number}", gpu, storage)
        for number, gpu in enumerate(["RTX 3060 Ti", "RTX 3060 Ti", "RTX 4090"])
    ]
    others = [
        start_worker("other-0", "RTX 3060 Ti", other),
        start_exporter("exporter-2", other),
    ]
    exporter = start_exporter("exporter", storage)
    polling.until_in_thread(lambda: len(busy_workers(server, ALL)) == 4)
    pushed = now() + timedelta(seconds=PUSHING_SECONDS)
    polling.until_in_thread(lambda: newest(server) > pushed)

    # Last, so that its only push is within the panels' time range.
    broken = start_worker("broken", "RTX 4090", other, "--start-up-seconds", "0.1")
    assert polling.until_in_thread(broken.poll) != 0, logs(folder)
    polling.until_in_thread(lambda: has_faults(server))
    moment = polling.until_in_thread(lambda: settled(server, alone))
    recorded = rules("record")
    alerting = rules("alert")
    answers = asyncio.run(ask_all(server, queries(), ALL, moment))
    chosen = asyncio.run(ask_all(server, queries(), FLEET, moment))
    of_other = asyncio.run(ask_all(server, queries(), OTHER_FLEET, moment))
    of_alone = asyncio.run(ask_all(alone, queries(), ALL, moment))
    of_rules = asyncio.run(ask_all(server, recorded | alerting, ALL, moment))
    rules_alone = asyncio.run(ask_all(alone, recorded, ALL, moment))
    fleets = asyncio.run(offered_fleets(server))
    without_fleet = names_of_metrics(server, ', fleet=""')
    metrics = names_of_metrics(server)
    for process in others:
        process.kill()
    before = busy_workers(server)
    workers[0].kill()
    victim = "worker-0"
    # Its series are stale at the latest when the look-back is over.
    polling.until_in_thread(lambda: victim not in busy_workers(server))
    after = busy_workers(server)
    for process in (*workers[1:], exporter):
        process.send_signal(signal.SIGTERM)
    for process in (*workers[1:], exporter):
        assert process.wait() == 0, logs(folder)
    return Seen(
        answers,
        chosen,
        of_other,
        of_alone,
        of_rules,
        rules_alone,
        fleets,
        without_fleet,
        metrics,
        before,
        after,
        victim,
    )


def make_model(folder: Path) -> Path:
    import tiny_model

    model = tiny_model.build_tiny_checkpoint(folder / "tiny")
    tiny_model.build_tiny_lora(folder / "loras" / f"{LORA}.safetensors", model)
    return model


async def fill(storage: str, jobs: int) -> None:
    """Sends more jobs than can be done: plain, with a LoRA, duplicates and bad ones."""
    job: JSONDict = {"prompt": "a house", "steps": 4, "campaign": CAMPAIGN}
    messages = []
    for number in range(jobs // 10):
        messages += [{**job, "id": f"j{number}-{each}"} for each in range(4)]
        lora = f"a house <lora:{LORA}:0.5>"
        messages += [
            {**job, "id": f"l{number}-{each}", "prompt": lora} for each in range(3)
        ]
        messages.append({**job, "id": f"j{max(0, number - 10)}-0"})
        messages.append(
            {**job, "id": f"m{number}", "prompt": "a house <lora:nowhere:1>"}
        )
        messages.append({"prompt": "a house", "stepz": 4})
    async with open_storage(StorageSettings(storage=storage)) as opened:
        await opened.create()
        await opened.queue.send(json.dumps(message) for message in messages)
        await sent_jobs.begin(opened, "begun", 40)


async def ask_all(
    server: str, asked: dict[str, str], fleet: str, moment: datetime
) -> Answers:
    """The values at *moment* with Grafana's variables filled in."""
    answers = {}
    async with prometheus.connected(server) as client:
        for name, query in asked.items():
            begin = moment.timestamp() - PUSHING_SECONDS
            of_now = {"$fleet": fleet, "${__from:date:seconds}": f"{begin:.0f}"}
            for variable, value in {**VARIABLES, **of_now}.items():
                query = query.replace(variable, value)  # noqa: PLW2901
            found = await client.at(query, moment)
            answers[name] = {
                frozenset(each.labels.items()): each.last for each in found
            }
    return answers


async def offered_fleets(server: str) -> set[str]:
    """What the choice of fleets on the pages offers."""
    page = json.loads((PAGES / "fleet.json").read_text())
    (choice,) = [each for each in page["templating"]["list"] if each["name"] == "fleet"]
    selector = re.fullmatch(r"label_values\((.+), fleet\)", choice["query"])
    assert selector is not None
    async with prometheus.connected(server) as client:
        found = await client.at(f"count by (fleet) ({selector[1]})", now())
    return {each.labels["fleet"] for each in found}


def busy_workers(server: str, fleet: str = FLEET) -> set[str]:
    """The names of the workers that have made images and are not stale."""
    info = f'imagefleet_worker_info{{fleet=~"{fleet}"}}'
    question = f"{info} and on (job, instance) imagefleet_images_total > 0"

    async def ask() -> set[str]:
        async with prometheus.connected(server) as client:
            found = await client.at(question, now())
        return {series.labels["worker"] for series in found}

    return asyncio.run(ask())


def has_faults(server: str) -> bool:
    """True once the push of a node that is broken has arrived."""

    async def ask() -> bool:
        async with prometheus.connected(server) as client:
            question = "last_over_time(imagefleet_node_faults_total[10m]) > 0"
            return bool(await client.at(question, now()))

    return asyncio.run(ask())


def newest(server: str) -> datetime:
    """The newest sample of the process whose pushes arrive last."""
    busy = "on (fleet, job, instance) imagefleet_images_total > 0"
    workers = f"timestamp(imagefleet_worker_info) and {busy}"
    exporters = "timestamp(imagefleet_exporter_last_look_timestamp_seconds)"

    async def ask() -> float:
        async with prometheus.connected(server) as client:
            (found,) = await client.at(f"min(({workers}) or {exporters})", now())
        return found.last

    return datetime.fromtimestamp(asyncio.run(ask()), UTC)


def settled(server: str, alone: str) -> datetime | None:
    """A moment up to which both servers have all pushes, if each busy worker made a few of late.

    On a busy machine one may be late by seconds: it has no rate then, and others have.
    """
    moment = now()
    polling.until_in_thread(
        lambda: all(newest(each) > moment for each in (server, alone))
    )
    pushes = (
        f"count_over_time(imagefleet_images_total[{VARIABLES['$__rate_interval']}])"
    )
    steady = f"{pushes} > 3 and imagefleet_images_total > 0"

    async def ask() -> float:
        async with prometheus.connected(server) as client:
            question = f"count(count by (fleet, job, instance) ({steady}))"
            found = await client.at(question, moment)
        return found[0].last if found else 0

    return moment if asyncio.run(ask()) == 4 else None


def names_of_metrics(server: str, matcher: str = "") -> set[str]:
    """All metrics that were pushed, or those with other labels that match."""

    async def ask() -> set[str]:
        async with prometheus.connected(server) as client:
            found = await client.at(
                f'count by (__name__) ({{__name__=~"imagefleet_.+"{matcher}}})', now()
            )
        return {series.labels["__name__"] for series in found}

    return asyncio.run(ask())


def logs(folder: Path) -> str:
    return "\n".join(
        f"{path.name}: {path.read_text()[-1000:]}"
        for path in sorted(folder.glob("*.log"))
    )


@contextlib.contextmanager
def started(command: list[Any], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def environment() -> dict[str, str]:
    """Without the settings of the person who runs the tests; conftest removes them later."""
    kept = {
        name: value for name, value in os.environ.items() if "IMAGEFLEET" not in name
    }
    return {**kept, "OMP_NUM_THREADS": "1"}


def now() -> datetime:
    return datetime.now(UTC)

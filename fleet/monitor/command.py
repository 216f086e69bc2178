"""`imagefleet status`: the state of the queues, the campaigns and the fleet, or of one job."""

from collections import Counter

from rich.console import Group
from rich.table import Table
from rich.text import Text

from cli import console, options, target
from cli.options import option
from fleet.campaigns import job
from fleet.campaigns.table import Campaigns
from fleet.monitor import prometheus, rates
from fleet.monitor import watch as watching
from fleet.settings import MonitorSettings
from imagefleet import concurrency
from imagefleet.aio import Fleet
from imagefleet.storage.protocol import QueueDepth
from imagefleet.telemetry.logs import duration
from imagefleet.validation import JSONDict, JSONObject


@options.flat
async def command(
    settings: MonitorSettings,
    named: target.OnlyJobs = None,
    count: int = option("Campaigns shown.", 20, min=1, metavar="COUNT"),
    watch: watching.Watch = False,
    as_json: options.AsJson = False,
) -> None:
    """Shows what the fleet is doing: queues, campaigns, speed, one job.

    The queues with their waiting, leased and failed jobs, and the campaigns with their jobs by
    outcome, the latest first; with --prometheus also the fleet's images/s and images per dollar. Of
    one job, CAMPAIGN/ID: where it is, since when, its attempts, and its images or why it failed.

    imagefleet status --follow

    imagefleet status spring --json

    imagefleet status spring/0001

    imagefleet status --prometheus http://localhost:9090
    """
    only, job_id = target.read(named)
    if only is not None and job_id is not None:
        async with console.connected(settings) as client:
            await job.show(client.storage, only, job_id, as_json=as_json)
        return
    async with prometheus.connected(
        settings.prometheus, settings.queried_fleet
    ) as server:
        await rates.ask(server, rates.warn_of_unknown_fleet)
        async with console.connected(settings) as client:
            await target.check_campaign(client.storage, only)
            campaigns = Campaigns(client.storage, only)
            await watching.show(
                lambda: read_status(client, server, campaigns),
                lambda found: status_screen(found, campaigns, count),
                is_live=watch,
                as_json=as_json,
            )


async def read_status(
    client: Fleet, server: prometheus.Prometheus | None, campaigns: Campaigns
) -> JSONDict:
    """The depth of the queues, the *campaigns* and, with a *server*, the fleet's rates, as JSON.

    `queue` is the sum of `queues`, which are in the order in which workers take jobs; the `jobs` of
    `failed` are counted by their records: some may have several messages.
    """
    depth = await client.depth()
    storage = client.storage
    await campaigns.refresh()
    waiting = await _without_worker(client, depth.queue)
    return {
        "storage": storage.url,
        "queue": _queue(storage.queue.name, depth.queue),
        "failed": {
            **_queue(storage.poison.name, depth.failed),
            "jobs": campaigns.failed,
        },
        "fleet": await rates.fleet_rates(server) if server else None,
        "queues": [_queue(name, each) for name, each in depth.queue.by_queue.items()],
        "without_worker": [
            {"model": name, "messages": count} for name, count in waiting.items()
        ],
        "campaigns": campaigns.records(),
        "unfit_records": campaigns.unfit_records,
    }


async def _without_worker(client: Fleet, depth: QueueDepth) -> dict[str, int]:
    """Models with jobs but no worker, by what workers note every five minutes."""
    waiting = Counter[str]()
    for queue in depth.by_queue.values():
        if queue.model is not None and queue.messages:
            waiting[queue.model] += queue.messages
    models = client.storage.models
    asked = (client.run(models.is_served(model)) for model in waiting)
    served = zip(waiting, await concurrency.gather(*asked), strict=True)
    return {model: waiting[model] for model, is_served in served if not is_served}


def _queue(name: str, depth: QueueDepth) -> JSONDict:
    """A queue's depth; None for what the storage does not report, and for no model."""
    return {
        "name": name,
        "messages": depth.messages,
        "visible": None if depth.leased is None else depth.messages - depth.leased,
        "leased": depth.leased,
        "oldest_age_seconds": depth.oldest_age_seconds,
        "model": depth.model,
    }


def status_screen(found: JSONObject, campaigns: Campaigns, count: int) -> Group:
    """The tables of a status that `read_status` returned, with the first *count* campaigns."""
    headings = ("messages", "visible", "leased", "oldest")
    table = console.table(["queue"], headings)
    shown_queues = [
        each for each in found["queues"] if each["model"] is None or each["messages"]
    ]
    for queue in (*(shown_queues or [found["queue"]]), found["failed"]):
        counts = (queue[name] for name in headings[:3])
        shown = ["?" if number is None else f"{number:,}" for number in counts]
        if (jobs := queue.get("jobs")) is not None:
            shown = [f"{jobs:,}", "-", "-"]
        age = queue["oldest_age_seconds"]
        table.add_row(queue["name"], *shown, "-" if age is None else duration(age))
    parts: list[Text | Table] = [console.untrusted(found["storage"], "bold"), table]
    for waiting in found["without_worker"]:
        jobs = console.counted(waiting["messages"], "job")
        parts += _notes(
            f"{jobs} of the model {waiting['model']}, which no worker serves: start one with that"
            " --model"
        )
    if (fleet := found["fleet"]) is not None:
        rows = {
            "workers": fleet["workers"],
            "images/s": console.number(fleet["images_per_second"], 2),
            "images per dollar, GPU only": console.number(
                fleet["images_per_dollar_gpu_only"]
            ),
            "images per dollar, all in": console.number(fleet["images_per_dollar"]),
            "$/h": console.number(fleet["dollars_per_hour"], 2),
            "GPU idle": console.percent(fleet["gpu_idle_fraction"]),
        }
        if fleet["kept_share"] is not None:
            rows["kept of the images drawn"] = console.percent(fleet["kept_share"])
        parts.append(console.totals(rows))
    if campaigns.rows:
        parts += [Text(), campaigns.table(count)]
    return Group(*parts, *_notes(*campaigns.notes(count, found["queue"]["messages"])))


def _notes(*sentences: str) -> list[Text]:
    return [console.untrusted(sentence, "yellow") for sentence in sentences]

"""The commands of `imagefleet` by name, each imported only when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import typer


class Listed(NamedTuple):
    """Where a command or group of commands is, as `module:attribute`, and its line in the help."""

    target: str
    summary: str


COMMANDS: Mapping[str, Listed] = {
    "demo": Listed(
        "fleet.demo.command:command", "Generates images on this machine: no account, no GPU."
    ),
    "worker": Listed(
        "fleet.worker.command:command",
        "Generates images from the queue's jobs: one worker per GPU.",
    ),
    "load": Listed("fleet.load:command", "Fills the job queue from a template or a file of jobs."),
    "sweep": Listed(
        "fleet.sweep.command:command", "Draws captions with all combinations of settings."
    ),
    "job": Listed("fleet.campaigns.job:command", "Shows what became of one job."),
    "cancel": Listed("fleet.campaigns.cancel:command", "Cancels the queued jobs of a campaign."),
    "status": Listed(
        "fleet.monitor.command:status_command",
        "Shows what the fleet is doing: queues, campaigns, speed.",
    ),
    "exporter": Listed(
        "fleet.monitor.command:exporter_command",
        "Exports queue depths, and the time and cost to empty them.",
    ),
    "broker": Listed(
        "fleet.broker.command:command", "Issues short-lived SAS tokens to workers on SaladCloud."
    ),
    "webhooks": Listed(
        "fleet.webhooks.command:command", "Sends webhooks when campaigns and jobs end."
    ),
    "plan": Listed(
        "fleet.plan.command:command", "Plans a batch: hours, dollars and images per dollar."
    ),
    "results": Listed(
        "fleet.results.command:command",
        "Shows a campaign's images, and its failed or cancelled jobs.",
    ),
    "export": Listed(
        "fleet.export.command:command",
        "Writes a campaign's images as a verified data set, in shards.",
    ),
    "report": Listed(
        "fleet.report.command:command",
        "Writes a campaign's report: throughput, cost, failures.",
    ),
    "score": Listed(
        "evaluation.score.command:command",
        "Scores a campaign's images: FID, KID, CLIP score, CMMD.",
    ),
    "gallery": Listed(
        "fleet.gallery.command:command",
        "Shows a campaign's images in the browser, as they arrive.",
    ),
    "verify": Listed(
        "fleet.verify.command:command",
        "Names workers that draw wrong, by second drawings of jobs.",
    ),
    "gate": Listed(
        "evaluation.gate.command:command",
        "Compares images of the same jobs that were drawn in two ways.",
    ),
    "redo": Listed("fleet.redo.command:command", "Has images drawn again, and replaces them."),
    "scale": Listed(
        "fleet.scale.command:command",
        "Scales a fleet on SaladCloud by its queue, within a budget.",
    ),
    "prompt": Listed(
        "fleet.prompt:command", "Shows a prompt's tokens, weights, LoRAs and embeddings."
    ),
    "failed": Listed(
        "fleet.failed.command:command",
        "Counts the failed jobs by error and lists them, or shows one.",
    ),
    "replay": Listed(
        "fleet.failed.command:replay_command", "Puts failed jobs back into the job queue."
    ),
    "discard": Listed("fleet.failed.command:discard_command", "Deletes failed jobs for good."),
    "keys": Listed("fleet.keys.command:app", "Creates, checks and revokes SAS tokens."),
    "deploy": Listed("fleet.salad.command:app", "Deploys workers to SaladCloud."),
    "files": Listed(
        "fleet.files.command:app", "Adds, lists, removes and makes models, LoRAs and other files."
    ),
    "bench": Listed("evaluation.bench.command:command", "Measures this machine's speed."),
}


class LazyCommands(Mapping[str, Any]):
    """`COMMANDS`, and then those of *own*, as the click commands that typer makes of them.

    *dress* may change a typer application before its commands are made.
    """

    def __init__(self, own: Mapping[str, Any], dress: Callable[[typer.Typer], None]) -> None:
        self._found = dict(own)
        self._dress = dress
        self._names = [*COMMANDS, *own]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Any:
        if name not in self._found:
            self._found[name] = self._import(name, COMMANDS[name])
        return self._found[name]

    def _import(self, name: str, listed: Listed) -> Any:
        module, _, attribute = listed.target.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        app = typer.Typer(rich_markup_mode=None, add_completion=False)
        app.callback()(lambda: None)  # makes it a group, however few commands it has
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name, short_help=listed.summary)
        else:
            app.command(name)(found)
        self._dress(app)
        return typer.main.get_group(app).commands[name]

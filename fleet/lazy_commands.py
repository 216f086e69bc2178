"""The commands of `imagefleet` by name, each imported only when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import typer

#: The commands and groups of commands, with their lines in the help.
COMMANDS: Mapping[str, str] = {
    "demo": "Generates images on this machine: no account, no GPU.",
    "worker": "Generates images from the queue's jobs: one worker per GPU.",
    "load": "Fills the job queue from a template or a file of jobs.",
    "sweep": "Draws captions with all combinations of settings.",
    "job": "Shows what became of one job.",
    "cancel": "Cancels the queued jobs of a campaign.",
    "status": "Shows what the fleet is doing: queues, campaigns, speed.",
    "exporter": "Exports queue depths, and the time and cost to empty them.",
    "broker": "Issues short-lived SAS tokens to workers on SaladCloud.",
    "webhooks": "Sends webhooks when campaigns and jobs end.",
    "plan": "Plans a batch: hours, dollars and images per dollar.",
    "results": "Shows a campaign's images, and its failed or cancelled jobs.",
    "export": "Writes a campaign's images as a verified data set, in shards.",
    "report": "Writes a campaign's report: throughput, cost, failures.",
    "score": "Scores a campaign's images: FID, KID, CLIP score, CMMD.",
    "gallery": "Shows a campaign's images in the browser, as they arrive.",
    "verify": "Names workers that draw wrong, by second drawings of jobs.",
    "gate": "Compares images of the same jobs that were drawn in two ways.",
    "redo": "Has images drawn again, and replaces them.",
    "scale": "Scales a fleet on SaladCloud by its queue, within a budget.",
    "prompt": "Shows a prompt's tokens, weights, LoRAs and embeddings.",
    "failed": "Counts the failed jobs by error and lists them, or shows one.",
    "replay": "Puts failed jobs back into the job queue.",
    "discard": "Deletes failed jobs for good.",
    "keys": "Creates, checks and revokes SAS tokens.",
    "deploy": "Deploys workers to SaladCloud.",
    "files": "Adds, lists, removes and makes models, LoRAs and other files.",
    "bench": "Measures this machine's speed.",
}

#: Where those are that are not the `command` of `fleet.NAME.command`, as `module:attribute`.
_ELSEWHERE = {
    "load": "fleet.load:command",
    "job": "fleet.campaigns.job:command",
    "cancel": "fleet.campaigns.cancel:command",
    "status": "fleet.monitor.command:status_command",
    "exporter": "fleet.monitor.command:exporter_command",
    "score": "evaluation.score.command:command",
    "gate": "evaluation.gate.command:command",
    "prompt": "fleet.prompt:command",
    "replay": "fleet.failed.command:replay_command",
    "discard": "fleet.failed.command:discard_command",
    "keys": "fleet.keys.command:app",
    "deploy": "fleet.salad.command:app",
    "files": "fleet.files.command:app",
    "bench": "evaluation.bench.command:command",
}


def find(name: str) -> Any:
    """The function or the typer application of a command; imports it."""
    module, _, attribute = _ELSEWHERE.get(name, f"fleet.{name}.command:command").partition(":")
    return getattr(importlib.import_module(module), attribute)


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
            self._found[name] = self._import(name)
        return self._found[name]

    def _import(self, name: str) -> Any:
        summary, found = COMMANDS[name], find(name)
        app = typer.Typer(rich_markup_mode=None, add_completion=False)
        app.callback()(lambda: None)  # makes it a group, however few commands it has
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name, short_help=summary)
        else:
            app.command(name)(found)
        self._dress(app)
        return typer.main.get_group(app).commands[name]

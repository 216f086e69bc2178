"""What all commands have in common: --json, --dry-run, --yes, and tables with whole names."""

import asyncio
import io
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

import forks
import made_records
from cli import console
from fleet import main
from fleet.campaigns.table import Campaigns
from fleet.monitor import command as monitor
from fleet.salad import command as salad
from fleet.salad import gpus, groups
from imagefleet import errors
from imagefleet.job.message import read_job
from imagefleet.records.log import RecordLog
from imagefleet.storage.open import open_storage
from imagefleet.storage.settings import StorageSettings
from in_process import Imagefleet

#: Commands without --json, and why.
WITHOUT_JSON = {
    "worker": "it prints nothing but its log, which is JSON with --log-format json",
    "exporter": "likewise; its figures are metrics",
    "broker": "likewise; its answers are JSON",
    "serve": "likewise",
    "webhooks": "likewise; what it sends is JSON",
    "gallery": "likewise; what it shows is a page",
    "health": "a probe: its exit code is the answer",
}

#: Commands that change what is billed, cannot be undone, or trust what others have written. The
#: rest costs nothing, or a few storage operations: `load` fills a queue, but starts no worker.
ASKING = {
    "cancel",
    "discard",
    "replay",
    "files remove",
    "redo",
    "scale",
    "verify",
    *(f"deploy {name}" for name in ("apply", "drain")),
}

#: The arguments of a call that succeeds, for commands that need no other service.
CALLS = {
    "load": ("jobs.jsonl",),
    "sweep": ("captions.txt", "--campaign", "curve"),
    "status": (),
    "failed": (),
    "replay": ("default", "--error", "nothing"),
    "discard": ("--all", "--dry-run"),
    "cancel": ("--all", "--dry-run"),
    "plan": ("--jobs", "10"),
    "redo": ("--worker", "nobody"),
    "results": ("--download", "images"),
    "export": ("default", "shards", "--dry-run"),
    "verify": (),
    "prompt": ("a cat",),
    "files list": ("kernels",),
    "files add": ("kernels", "unet.kernels", "--dry-run"),
    "deploy apply": ("--dry-run",),
}

#: As long as Azure and SaladCloud allow.
GROUP = f"sd15-batch-{'x' * 30}-0123abcd-12"
QUEUE = "jobs-" + "q" * 51


def commands() -> dict[str, Any]:
    """Every command that the help shows, by its words."""

    def below(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        if not hasattr(command, "commands"):
            yield " ".join(words), command
            return
        for name, each in command.commands.items():
            if not each.hidden:
                yield from below(each, (*words, name))

    return dict(below(typer.main.get_command(main.app), ()))


ALL = commands()


def option(command: Any, flag: str) -> Any:
    return next((each for each in command.params if flag in each.opts), None)


@pytest.mark.parametrize("name", [name for name in ALL if name not in WITHOUT_JSON])
def test_every_command_with_figures_has_json(name: str):
    found = option(ALL[name], "--json")

    assert found is not None, "add options.AsJson, or a reason to WITHOUT_JSON"
    assert found.is_flag
    assert "JSON" in found.help


def test_commands_without_json_exist_and_have_none():
    assert all(option(ALL[name], "--json") is None for name in WITHOUT_JSON)


def test_every_command_that_spends_or_deletes_asks_or_takes_yes():
    assert {name for name in ALL if option(ALL[name], "--yes")} == ASKING


def fail_job(folder: Path, reason: str, **fields: str) -> None:
    """Adds a failed job to the default storage of *folder*."""

    async def add() -> None:
        address = f"local:{folder / 'imagefleet-data'}"
        async with open_storage(StorageSettings(storage=address)) as storage:
            await storage.create()
            await storage.queue.send([json.dumps({"prompt": "a cat", **fields})])
            [message] = await storage.queue.receive(1, 60)
            job = read_job(message.body, message.id)
            error = errors.MissingFileError(reason)
            failed = await made_records.dead_letter(
                storage, message, job, error, "worker-1"
            )
            await RecordLog(storage.blobs, "worker-1").add([failed])

    asyncio.run(add())


@pytest.fixture
def filled(tmp_path, kernels: bytes) -> Path:
    """A storage in the test's folder with a failed job, and files of jobs and of kernels."""
    (tmp_path / "unet.kernels").write_bytes(kernels)
    (tmp_path / "jobs.jsonl").write_text('{"prompt": "a cat", "id": "one"}\n')
    (tmp_path / "captions.txt").write_text("a cat\n")
    fail_job(tmp_path, "no [bold]", id="cat")
    return tmp_path


@pytest.mark.parametrize("name", CALLS)
def test_json_is_one_document_and_nothing_else(
    salad, filled: Path, in_process: Imagefleet, name: str
):
    plain = in_process(*name.split(), *CALLS[name])
    ended = in_process(*name.split(), *CALLS[name], "--json")

    assert ended.returncode == plain.returncode == console.EXIT_DONE, ended.stderr
    assert isinstance(json.loads(ended.stdout), dict)


def test_a_watch_with_json_is_a_document_per_line(
    filled: Path, start: Callable[..., forks.Fork]
):
    process = start("status", "--follow", "--json")
    lines = [process.stdout.readline() for _ in range(2)]
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate()

    assert [json.loads(line)["failed"]["messages"] for line in lines] == [1, 1]
    assert (rest, process.returncode) == ("", console.EXIT_DONE)


def printed(width: int | None, *parts: Any) -> str:
    """What a terminal of so many columns shows, or None for a pipe."""
    out = io.StringIO()
    to = Console(
        file=out, width=width or 80, force_terminal=width is not None, color_system=None
    )
    console.print_tables(*parts, to=to)
    return out.getvalue()


def group_screen() -> Any:
    group = groups.Group(
        name=GROUP,
        status="running",
        image="image",
        gpu_ids=["id"],
        replicas=375,
        allocating=12,
        creating=3,
        running=360,
        stopping=0,
    )
    quota = groups.Quota(replicas=2000, used=750)
    return salad._screen(salad._record([group], gpus.built_in(), quota))


def queue_screen() -> Any:
    queue = {
        "name": QUEUE,
        "messages": 1_000_000,
        "visible": 990_000,
        "leased": 10_000,
        "oldest_age_seconds": 86_400.0,
        "model": None,
    }
    rest: dict[str, Any] = {"queues": [], "without_worker": [], "fleet": None}
    return monitor.status_screen(
        {"storage": "local:x", "queue": queue, "failed": queue, **rest},
        Campaigns(None),
        20,
    )


@pytest.mark.parametrize("width", [60, 80, 200, None])
@pytest.mark.parametrize(
    ("screen", "whole"),
    [
        (group_screen, [GROUP, "375", "360"]),
        (queue_screen, [QUEUE, "1,000,000", "990,000", "10,000"]),
    ],
)
def test_names_and_figures_are_whole_at_any_width(
    width: int | None, screen: Callable[[], Any], whole: list[str]
):
    row = next(
        line for line in printed(width, screen()).splitlines() if whole[0] in line
    )

    assert row.split()[0] == whole[0], "a selected word is the name"
    assert [each for each in whole if each not in row.split()] == []

"""README and docs/: no dead link, no command or flag that does not exist, snippets that compile."""

import asyncio
import csv
import functools
import io
import json
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import write_settings

from benchmarks.stand_in import StandInEngine
from cli import console, options
from fleet import main
from imagefleet.job.message import Job, read_job
from imagefleet.storage.open import open_storage
from worker.pipeline import Pipeline
from worker.settings import WorkerSettings

ROOT = Path(__file__).parents[2]

PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "deploy/README.md")
    ),
    *(
        ROOT / "deploy" / name / "README.md"
        for name in ("kubernetes", "salad", "skypilot", "slurm")
    ),
    ROOT / "dashboards" / "README.md",
    ROOT / "demo_model" / "README.md",
    ROOT / "benchmarks" / "engine-notes.md",
    *sorted((ROOT / "docs").glob("*.md")),
]

#: Flags of other programs, where a page shows them by themselves.
_FOREIGN_FLAGS = {
    "--build-arg",
    "--target",
    "--strict",
    "--registry-server",
    "--env",
    "--num-jobs",
    "--secret-file",
}

_LINES = re.MULTILINE | re.DOTALL

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", _LINES)
_INLINE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FLAG = re.compile(r"--[a-z][a-z0-9-]*")
_ENDS_COMMAND = re.compile(r"\s(?:&&|\|\|?|;|>)\s|\)\s*$|\s#\s")

by_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: str(page.relative_to(ROOT))
)


def text_of(page: Path) -> str:
    return page.read_text()


def prose_of(page: Path) -> str:
    return _FENCE.sub("", text_of(page))


def fences(page: Path, *languages: str) -> Iterator[str]:
    for language, content in _FENCE.findall(text_of(page)):
        if language in languages:
            yield content


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each `imagefleet ...` that a page shows, without the program's own name."""
    shown = [
        line
        for block in fences(page, "", "sh", "console")
        for line in logical_lines(block)
    ]
    shown += [" ".join(inline.split()) for inline in _INLINE.findall(prose_of(page))]
    for line in shown:
        for match in re.finditer(r"(?<![\w/.-])imagefleet (?=[a-z-])", line):
            if (
                line[: match.start()]
                .rstrip()
                .endswith(("-t", "--namespace", "pip install", "FROM", "import"))
            ):
                continue
            yield shlex.split(_ENDS_COMMAND.split(line[match.end() :] + " ")[0])


def logical_lines(block: str) -> list[str]:
    return block.replace("\\\n", " ").splitlines()


@functools.cache
def built() -> Any:
    """All commands, which typer would build anew for each call."""
    return typer.main.get_command(main.app)


def find_command(words: list[str]) -> tuple[Any, list[str]]:
    """The typer command that words name, and the words that are left for it."""
    command: Any = built()
    rest = list(words)
    while rest and hasattr(command, "commands") and rest[0] in command.commands:
        command = command.commands[rest.pop(0)]
    return command, rest


def all_flags() -> set[str]:
    def of(command: Any) -> set[str]:
        own = {
            flag
            for option in command.params
            for flag in (*option.opts, *option.secondary_opts)
        }
        return own.union(
            *(of(each) for each in getattr(command, "commands", {}).values())
        )

    return of(built())


def test_every_field_of_a_job_has_a_row():
    text = (ROOT / "docs" / "jobs.md").read_text()
    named = {
        name
        for row in re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)
        for name in _INLINE.findall(row)
    }

    assert Job.model_fields.keys() <= named


def test_the_site_builds_without_a_dead_link(tmp_path):
    arguments = ["build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", *arguments],
        cwd=ROOT,
        env={"PATH": "", "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "site" / "index.html").is_file()
    fetched = re.findall(
        r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"',
        "".join(page.read_text() for page in tmp_path.rglob("*.html")),
    )
    assert fetched == [], "the site has to work without a network"


def test_the_readme_is_short():
    assert len(text_of(ROOT / "README.md").splitlines()) <= 150


def test_the_page_of_settings_is_current():
    page = text_of(ROOT / "docs" / "settings.md")

    assert write_settings.table() in page, "write it anew: make docs"


def test_every_exit_code_is_in_the_runbook_with_what_to_do():
    codes = {value for name, value in vars(console).items() if name.startswith("EXIT_")}
    page = text_of(ROOT / "docs" / "troubleshooting.md")
    table = page.partition("## Exit codes")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| (\d+) \|[^|]+\|([^|]*)\|$", table, re.MULTILINE))

    assert {int(code) for code in rows} == codes
    assert [code for code, what_to_do in rows.items() if not what_to_do.strip()] == [
        "0"
    ]


@by_page
def test_every_relative_link_leads_to_a_file(page: Path):
    links = [
        link.split("#")[0]
        for link in _LINK.findall(prose_of(page))
        if "://" not in link
    ]

    missing = [link for link in links if not (page.parent / link).exists()]

    assert missing == []


@by_page
def test_every_command_and_flag_exists(page: Path):
    wrong = []
    for words in commands(page):
        command, rest = find_command(words)
        if command.name == "health":  # it parses its own arguments, without typer
            continue
        flags = {
            flag
            for option in command.params
            for flag in (*option.opts, *option.secondary_opts)
        }
        unknown = [
            word
            for word in rest
            if _FLAG.fullmatch(word.split("=")[0]) and word not in flags
        ]
        is_group = hasattr(command, "commands")
        if unknown or (
            is_group and rest and not rest[0].isupper() and rest[0][0] != "-"
        ):
            wrong.append(" ".join(words))

    assert wrong == []


@by_page
def test_every_flag_in_the_text_is_known(page: Path):
    known = all_flags() | _FOREIGN_FLAGS
    lone = {
        inline.split()[0].split("=")[0]
        for inline in _INLINE.findall(prose_of(page))
        if _FLAG.match(inline)
    }

    assert lone - known == set()


@by_page
def test_every_variable_is_a_setting(page: Path):
    known = {
        options.variable(name)
        for model in options.PROJECT_SETTINGS
        for name in model.model_fields
    }
    named = set(re.findall(r"IMAGEFLEET_[A-Z0-9_]*[A-Z0-9]", text_of(page)))

    assert named - known == set()


@by_page
def test_every_python_snippet_compiles(page: Path):
    for snippet in fences(page, "python"):
        compile(snippet, str(page), "exec")


@by_page
def test_every_source_file_that_a_page_names_exists(page: Path):
    named = [
        name
        for name in _INLINE.findall(prose_of(page))
        if re.fullmatch(r"(imagefleet|worker|benchmarks|tests)/[\w/]+\.\w+", name)
    ]

    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_the_jobs_that_the_pages_show_are_valid():
    page = ROOT / "docs" / "jobs.md"
    blocks = [
        *fences(page, "json"),
        *re.findall(r"^\{\"id\".*\}$", text_of(page), re.MULTILINE),
    ]
    assert blocks
    for block in blocks:
        assert json.loads(block)
        read_job(block, "0001")
    for page in (ROOT / "README.md", ROOT / "docs" / "tutorial.md"):
        (table,) = re.findall(
            r"^cat > prompts.csv <<'EOF'\n(.*?)^EOF$", text_of(page), _LINES
        )
        rows = list(csv.DictReader(io.StringIO(table)))
        assert len({Job.model_validate(row).id for row in rows}) == len(rows) > 1


@pytest.fixture
def worker_at(tmp_path) -> Iterator[Path]:
    """A folder whose imagefleet-data a worker with the stand-in engine works on."""
    settings = WorkerSettings(
        storage=f"local:{tmp_path / 'imagefleet-data'}",
        model="stand-in",
        cache=tmp_path / "cache",
    )
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def work() -> None:
        async with open_storage(settings) as storage:
            await storage.create()
            await Pipeline(storage, StandInEngine, settings).run(stop, asyncio.Event())

    thread = threading.Thread(target=loop.run_until_complete, args=(work(),))
    thread.start()
    yield tmp_path
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


@pytest.mark.parametrize("page", ["README.md", "docs/client.md"])
def test_the_snippets_of_the_client_run(page: str, worker_at: Path, monkeypatch):
    monkeypatch.chdir(worker_at)
    monkeypatch.setattr("imagefleet.cancelled.LOAD_SECONDS", 0)  # no load is running
    names: dict[str, object] = {}
    for snippet in fences(ROOT / page, "python"):
        exec(compile(snippet, page, "exec"), names)

    assert list(worker_at.glob("*.png"))

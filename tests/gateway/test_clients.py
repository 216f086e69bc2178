"""Clients that others wrote, as they are installed, and the table of them in docs/serve.md.

`make test-slow` installs them beside the tests; without them, the tests are skipped.
"""

import asyncio
import json
import os
import re
from pathlib import Path

import pytest

from imagefleet.storage.settings import StorageSettings
from polling import until

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent / "clients"
PAGE = Path(__file__).parents[2] / "docs" / "serve.md"

PYTHON = HERE / ".venv" / "bin" / "python"
NODE_MODULES = HERE / "node_modules"

#: The names by which clients ask for a model where nobody says otherwise.
OPENAIS = ("dall-e-2", "dall-e-3", "gpt-image-1", "gpt-image-1.5")

#: What calls are refused for, by the end of their names.
REFUSED = {
    "a model that nobody has": "does not exist",
    "stream": "stream: is not supported",
    "canny": "Module not available",
    # It sends the images by a name that the extension does not know, which answers so as well.
    "controlnet_detect": "No image selected",
    "a ControlNet that nobody has": "another",
}


@pytest.fixture
def storage_settings(local_settings: StorageSettings) -> StorageSettings:
    """One kind of storage: no client sees it."""
    return local_settings


def pins(name: str) -> dict[str, str]:
    """The releases of clients by their names, of PyPI or of npm."""
    text = (HERE / name).read_text()
    if name == "package.json":
        return dict(json.loads(text)["dependencies"])
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE))


#: The program that calls a client, and what installs it.
PROGRAMS = {"calls.py": "requirements.txt", "calls.mjs": "package.json"}

CLIENTS = (
    [
        ("calls.py", name)
        for name in pins("requirements.txt")
        if name != "llm"  # which runs llm-openai-images
    ]
    + [("calls.mjs", name) for name in ("@ai-sdk/openai", "@langchain/openai")]
    + [("calls.mjs", "@tanstack/ai-openai"), ("calls.mjs", "openai")]
)


def command(program: str) -> list[str]:
    """What runs a program; skips the test where its clients are not installed."""
    is_there = PYTHON.exists() if program == "calls.py" else NODE_MODULES.exists()
    if not is_there and "REQUIRE_CLIENTS" not in os.environ:
        pytest.skip("the clients are not installed: `make test-slow` does that")
    runner = str(PYTHON) if program == "calls.py" else "node"
    return [runner, str(HERE / program)]


def kind(outcome: str) -> str:
    return "refused" if ":" in outcome else outcome


def row(program: str, name: str, found: dict[str, str]) -> str:
    """The client's row in the table: its calls by what became of them."""
    release = pins(PROGRAMS[program])[name]
    place = "npm" if program == "calls.mjs" else "PyPI"
    cells = [
        "; ".join(call for call, outcome in found.items() if kind(outcome) == wanted)
        for wanted in ("drawn", "answered", "refused")
    ]
    return f"| `{name}` {release}, {place} | {' | '.join(cells)} |"


@pytest.mark.parametrize(("program", "name"), CLIENTS)
async def test_a_client_draws_unchanged_or_is_told_why_not(
    serve, tmp_path, program: str, name: str
):
    started = command(program)
    served = await serve(model_alias=dict.fromkeys(OPENAIS, "stand-in"))
    await until(served.storage.models.served_now)

    process = await asyncio.create_subprocess_exec(
        *started,
        name,
        served.url,
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "HOME": str(tmp_path), "PYTHONPATH": ""},
    )
    out, _ = await process.communicate()

    found = json.loads(out.splitlines()[-1])
    for call, outcome in found.items():
        reason = REFUSED.get(call.rpartition(", ")[2])
        assert outcome in {"drawn", "answered"} if reason is None else reason in outcome
    page = PAGE.read_text()
    assert row(program, name, found) in page


async def test_the_table_has_no_row_of_another_client():
    page = PAGE.read_text()
    rows = re.findall(r"^\| `([\w@/.-]+)` \S+, (?:PyPI|npm) \|", page, re.MULTILINE)
    assert sorted(rows) == sorted(name for _, name in CLIENTS)
    assert len(rows) >= 10

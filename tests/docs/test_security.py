"""SECURITY.md: what its tables claim names a test that exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

LINES = [
    line
    for line in (ROOT / "SECURITY.md").read_text().splitlines()
    if line.startswith("|") and not re.match(r"\| (can or cannot|hazard|---)", line)
]


def names_in(path: Path) -> set[str]:
    """Its tests, as pytest names them."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {
            prefix + each.name
            for each in inner
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            and each.name.startswith("test_")
        }
    return found


def test_every_line_names_a_test_that_exists():
    assert len(LINES) > 25
    for line in LINES:
        _, claim, proof, _ = line.split("|")
        named = re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", proof)
        assert named or (
            claim.startswith(" **can**") and proof == " nothing prevents it "
        ), line
        for path, name in named:
            assert (ROOT / path).is_file(), path
            assert name in names_in(ROOT / path), f"{path} has no {name}"


def test_what_cannot_be_prevented_is_said_of_everyone():
    sections = (ROOT / "SECURITY.md").read_text().split("\n## ")
    tables = [section for section in sections if "\n| can or cannot |" in section]
    assert len(tables) == 5
    for table in tables:
        assert "\n| **can** " in table, table.partition("\n")[0]
        assert "\n| cannot " in table, table.partition("\n")[0]

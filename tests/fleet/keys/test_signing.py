"""`imagefleet keys mint signing`, and keys in the wrong place."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cli import console
from imagefleet.signing import SigningKey

Imagefleet = Callable[
    ..., "subprocess.CompletedProcess[str]"
]  # the fixture of conftest.py


def secret_of(path: Path) -> str:
    return path.read_text().splitlines()[1]


def test_a_key_pair_is_a_private_file_and_lines_to_export(
    in_process: Imagefleet, tmp_path: Path
) -> None:
    result = in_process("keys", "mint", "signing")
    path = tmp_path / "signing-key.pem"
    public = SigningKey.read(path).public
    assert result.stdout.splitlines() == [
        f"export IMAGEFLEET_SIGNING_KEY={path}",
        f"export IMAGEFLEET_TRUSTED_KEY={public}",
    ]
    assert path.stat().st_mode & 0o777 == 0o600
    assert secret_of(path) not in result.stdout + result.stderr

    as_json = in_process("keys", "mint", "signing", "--file", "other.pem", "--json")
    assert json.loads(as_json.stdout) == {
        "file": str(tmp_path / "other.pem"),
        "public_key": SigningKey.read(tmp_path / "other.pem").public,
    }


def test_an_existing_file_is_not_overwritten(
    in_process: Imagefleet, tmp_path: Path
) -> None:
    in_process("keys", "mint", "signing")
    path = tmp_path / "signing-key.pem"
    before = path.read_bytes()
    again = in_process("keys", "mint", "signing")
    assert again.returncode == console.EXIT_OPERATOR_MUST_ACT
    assert f"its public key is {SigningKey.read(path).public}" in again.stderr
    assert path.read_bytes() == before
    assert secret_of(path) not in again.stderr

    (tmp_path / "notes.txt").write_text("hello")
    result = in_process("keys", "mint", "signing", "--file", "notes.txt")
    assert (
        "notes.txt exists and is not overwritten; it is not a signing key"
        in result.stderr
    )
    result = in_process("keys", "mint", "signing", "--file", "no/such/folder.pem")
    assert "cannot write no/such/folder.pem: No such file" in result.stderr


@pytest.mark.parametrize("form", ["the file's text", "one line of it"])
def test_a_private_key_in_place_of_another_value_is_not_printed(
    in_process: Imagefleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    in_process("keys", "mint", "signing")
    path = tmp_path / "signing-key.pem"
    secret = secret_of(path)
    value = path.read_text() if form == "the file's text" else secret
    (tmp_path / "jobs.jsonl").write_text('{"prompt": "a cat"}\n')
    calls = {
        "IMAGEFLEET_TRUSTED_KEY": (("worker", "--model", "x"), ("failed",)),
        "IMAGEFLEET_SIGNING_KEY": (("load", "jobs.jsonl"), ("replay", "--all")),
    }
    for variable, commands in calls.items():
        monkeypatch.setenv(variable, value)
        for command in commands:
            result = in_process(*command)
            assert result.returncode == console.EXIT_OPERATOR_MUST_ACT
            assert variable in result.stderr
            assert secret[20:] not in result.stdout + result.stderr
        monkeypatch.delenv(variable)

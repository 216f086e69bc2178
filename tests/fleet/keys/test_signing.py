"""`imagefleet keys mint signing`, and keys in the wrong place."""

import json
from pathlib import Path

import pytest

from cli import console
from imagefleet.signing import SigningKey
from in_process import Imagefleet


def secret_of(path: Path) -> str:
    return path.read_text().splitlines()[1]


def test_a_key_pair_is_a_private_file_and_lines_to_export(
    in_process: Imagefleet, tmp_path
):
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


@pytest.mark.parametrize("form", ["the file's text", "one line of it"])
def test_a_private_key_in_place_of_another_value_is_not_printed(
    in_process: Imagefleet, tmp_path, monkeypatch, form: str
):
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

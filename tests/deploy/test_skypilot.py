"""The SkyPilot file: its schema, its secrets, and what its script runs."""

import base64
import itertools
import os
import shlex
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from imagefleet.validation import JSONDict
from worker.settings import MachineSettings

#: Stands in for docker: its arguments and environment, then an exit code.
DOCKER = """#!/bin/sh
printf '%s\\n' "$@" > "$RECORD/arguments"
env > "$RECORD/environment"
exit 3
"""


@pytest.fixture
def task(repository: Path) -> JSONDict:
    text = (repository / "deploy" / "skypilot" / "worker.yaml").read_text()
    loaded: JSONDict = yaml.safe_load(text)
    return loaded


@pytest.fixture
def secrets(in_process, monkeypatch) -> dict[str, str]:
    """What `imagefleet keys mint worker` prints, read as a file of variables."""
    key = base64.b64encode(bytes(64)).decode()
    account = f"DefaultEndpointsProtocol=https;AccountName=ours;AccountKey={key}"
    with monkeypatch.context() as patch:
        patch.setenv("IMAGEFLEET_STORAGE", account)
        printed = in_process("keys", "mint", "worker")
    assert printed.returncode == 0, printed.stderr
    lines = (
        line.removeprefix("export ").split("=", 1)
        for line in printed.stdout.splitlines()
    )
    return {name: shlex.split(value)[0] for name, value in lines}


def test_the_file_fits_skypilots_schema(repository: Path, task: JSONDict):
    schema = yaml.safe_load(
        (repository / "tests" / "deploy" / "schemas" / "skypilot.yaml").read_text()
    )
    jsonschema.validate(task, schema)
    with pytest.raises(jsonschema.ValidationError, match="use_spots"):
        jsonschema.validate(task | {"resources": {"use_spots": True}}, schema)


def test_each_worker_has_a_spot_node_of_its_own_and_failures_are_limited(
    task: JSONDict,
):
    resources = task["resources"]
    assert task.get("num_nodes", 1) == 1
    assert resources["use_spot"] is True
    assert set(resources["accelerators"].values()) == {1}
    # recover_on_exit_codes would start nodes without a limit.
    assert set(resources["job_recovery"]) == {"max_restarts_on_errors"}


def test_the_secrets_are_those_of_imagefleet_keys_and_have_no_value_in_the_file(
    task: JSONDict, secrets: dict[str, str]
):
    assert task["secrets"] == dict.fromkeys(secrets)
    assert not task["envs"].keys() & secrets.keys()


def test_the_script_runs_a_worker_without_a_token_in_its_arguments(
    task: JSONDict,
    secrets: dict[str, str],
    tmp_path,
    parse_command,
):
    docker = tmp_path / "docker"
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    given = task["envs"] | secrets | {"SKYPILOT_MANAGED_JOB_ID": "7"}
    ran = subprocess.run(
        ["bash", "-c", task["run"]],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "RECORD": str(tmp_path)}
        | given,
        check=False,
    )
    assert ran.returncode == 3, "the exit code decides whether SkyPilot starts it again"
    arguments = (tmp_path / "arguments").read_text().splitlines()
    image = arguments.index(task["envs"]["IMAGE"])
    options = arguments[1:image]
    command = arguments[image + 1 :]
    assert not [
        value for value in secrets.values() if "sig=" in value and value in arguments
    ]
    environment = dict(
        line.split("=", 1)
        for line in (tmp_path / "environment").read_text().splitlines()
    )
    names = {name for flag, name in itertools.pairwise(options) if flag == "--env"}
    passed = {name: environment[name] for name in names}
    assert passed == {
        **{
            name: value
            for name, value in given.items()
            if name.startswith("IMAGEFLEET_")
        },
        "IMAGEFLEET_NAME": "sky-7",
    }
    parsed = parse_command(command, {"IMAGEFLEET_MODEL": "/models/checkpoint"} | passed)
    assert isinstance(parsed, MachineSettings)
    assert parsed.gpus == "all"
    assert parsed.until_empty
    assert parsed.storage == "https://ours.blob.core.windows.net"

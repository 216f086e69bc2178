"""`imagefleet broker`: its settings, and the process from its start to its end."""

import contextlib
import os
import subprocess
import sys
import urllib.request

import pytest

import polling
from imagefleet.storage.settings import StorageSettings
from imagefleet.telemetry import logs
from in_process import Imagefleet, assert_refused

KEY = "DefaultEndpointsProtocol=https;AccountName=acme;AccountKey=a2V5a2V5"


@pytest.fixture
def quiet(monkeypatch) -> None:
    """No log of a service in the test's own process."""
    monkeypatch.setattr(logs, "configure", lambda *_: None)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--storage", KEY), "--organization is required"),
        (
            ("--storage", KEY, "--organization", "acme", "--salad-fleets", "a,"),
            "names of fleets",
        ),
        (
            ("--storage", KEY, "--organization", "acme", "--policy", "A policy"),
            "--policy",
        ),
        (
            (
                "--organization",
                "acme",
                "--storage",
                "https://acme.blob.core.windows.net",
            ),
            "key",
        ),
        (("--organization", "acme"), "connection string"),
    ],
)
def test_a_wrong_setting_is_one_line(
    arguments: tuple[str, ...], reason: str, in_process: Imagefleet
):
    result = in_process("broker", *arguments)
    assert_refused(result, reason)
    assert "a2V5a2V5" not in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.usefixtures("quiet")
def test_without_pyjwt_it_says_what_to_install(in_process: Imagefleet, monkeypatch):
    monkeypatch.setitem(sys.modules, "jwt", None)
    result = in_process("broker", "--organization", "acme", "--storage", KEY)
    assert_refused(result, "pip install '.[broker]'")


def start(settings: StorageSettings, port: int) -> subprocess.Popen[str]:
    given = {
        "IMAGEFLEET_STORAGE": settings.storage,
        "IMAGEFLEET_QUEUE": settings.queue,
        "IMAGEFLEET_CONTAINER": settings.container,
        "IMAGEFLEET_FILES_CONTAINER": settings.files_container,
        "IMAGEFLEET_ORGANIZATION": "acme",
        "IMAGEFLEET_PORT": str(port),
    }
    command = [sys.executable, "-m", "fleet.entry", "broker"]
    return subprocess.Popen(
        command, env={**os.environ, **given}, stderr=subprocess.PIPE, text=True
    )


def test_it_serves_until_it_is_told_to_stop(
    azurite_settings: StorageSettings, unused_port: int, created: None
):
    with start(azurite_settings, unused_port) as broker:

        def answers() -> bool:
            assert broker.poll() is None, broker.communicate()[1]
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(
                    f"http://127.0.0.1:{unused_port}/live"
                ) as answer,
            ):
                return bool(answer.status == 200)
            return False

        polling.until_in_thread(answers)
        broker.terminate()
        _, log = broker.communicate()
    assert broker.returncode == 0, log
    assert "imagefleet keys revoke broker ends them" in log
    assert "AccountKey" not in log


def test_a_missing_queue_ends_the_start_with_what_to_do(
    azurite_settings: StorageSettings, unused_port: int
):
    with start(azurite_settings, unused_port) as broker:
        _, log = broker.communicate()
    assert broker.returncode == 2
    assert azurite_settings.queue in log
    assert "Traceback" not in log

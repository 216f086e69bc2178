import re
import subprocess
from collections.abc import Callable
from importlib import metadata
from typing import get_args

import pytest

from imagefleet import errors
from imagefleet.pricing import prices
from imagefleet.storage.open import Storage
from imagefleet.telemetry import metrics
from messages import message
from worker.metrics import IDLE_REASONS, Stage
from worker.replica import Replica

RUNS_ON = Replica("RTX 4090 24GB", 0.16, prices.FREE_STORAGE)


@pytest.fixture
async def text(storage: Storage, run_pipeline) -> str:
    """What a worker shows after one job."""
    pipeline = await run_pipeline(
        sent=[message()], runs_on=RUNS_ON, group="g", priority="low"
    )
    return metrics.render(pipeline.metrics.registry).decode()


async def test_every_counter_starts_at_zero(text: str):
    # A counter that appears with its first event has no increase: dashboards would not see it.
    for series in (
        *(
            f'imagefleet_jobs_total{{outcome="{each}"}}'
            for each in ("failed", "duplicate", "lost")
        ),
        *(
            f'imagefleet_failed_jobs_total{{error="{each.__name__}"}}'
            for each in (errors.JobError, errors.NameTakenError, errors.TransientError)
        ),
        *(
            f'imagefleet_stage_seconds_count{{stage="{each}"}}'
            for each in get_args(Stage)
        ),
        *(
            f'imagefleet_gpu_idle_seconds_total{{reason="{each}"}}'
            for each in IDLE_REASONS
        ),
        'imagefleet_lease_renewals_total{result="lost"}',
        "imagefleet_engine_graphs_total",
        "imagefleet_unet_rows_total",
        "imagefleet_unet_rows_saved_total",
        'imagefleet_model_switches_total{model="stand-in"}',
        'imagefleet_model_jobs_total{model="stand-in",outcome="failed"}',
        "imagefleet_model_switch_seconds_total",
    ):
        assert f"{series} " in text, series


async def test_the_last_push_of_a_worker_that_has_emptied_its_queue_says_so(
    storage: Storage, run_pipeline
):
    sent = [message(id=f"j{number}") for number in range(3)]
    pipeline = await run_pipeline(sent=sent)
    text = metrics.render(pipeline.metrics.registry).decode()
    name = storage.queue.name
    depths = re.findall(
        rf'imagefleet_queue_messages{{queue="{name}",state="\w+"}} (\S+)', text
    )
    assert set(map(float, depths)) == {0.0}
    assert "imagefleet_draining 1.0" in text


async def test_only_one_series_names_the_machine(text: str):
    named = [line for line in text.splitlines() if "test-worker" in line]

    (line,) = named
    assert line.startswith("imagefleet_worker_info{")
    assert dict(re.findall(r'(\w+)="([^"]*)"', line)) == {
        "worker": "test-worker",
        "version": metadata.version("imagefleet"),
        "gpu": "RTX 4090 24GB",
        "group": "g",
        "priority": "low",
    }


async def test_few_labels_make_few_series(text: str):
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    labels = {label for line in samples for label in re.findall(r'[{,](\w+)="', line)}

    assert len(samples) < 300
    assert labels <= {
        "stage",
        "le",
        "outcome",
        "reason",
        "state",
        "result",
        "cache",
        "kind",
        "error",
        "fault",
        "model",
        "campaign",
        "origin",
        "phase",
        "queue",
        "worker",
        "version",
        "gpu",
        "group",
        "priority",
    }


def test_no_series_has_the_time_of_its_creation(text: str):
    assert "imagefleet_stage_seconds_bucket{" in text
    assert "_created" not in text


def test_promtool_accepts_the_names(text: str, tool: Callable[[str], str]):
    result = subprocess.run(
        [tool("promtool"), "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (result.returncode, result.stderr) == (0, "")

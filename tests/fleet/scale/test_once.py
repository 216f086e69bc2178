"""One decision, which somebody waits for."""

from cli import console
from fleet.salad import client
from imagefleet.telemetry import logs
from in_process import Imagefleet


def test_one_decision_without_a_network_is_one_sentence_after_a_few_tries(
    salad,
    salad_module,
    in_process: Imagefleet,
    tmp_path,
    monkeypatch,
):
    monkeypatch.setattr(
        logs, "configure", lambda _: None
    )  # it would affect later tests
    (tmp_path / "jobs.jsonl").write_text('{"prompt": "a cat"}\n')
    in_process("load", "jobs.jsonl")
    salad.faults = [salad_module.Fault(503, "") for _ in range(50)]

    ended = in_process(
        "scale",
        "--dollars-per-hour",
        "0.3",
        "--max-dollars",
        "5",
        "--once",
        "--dry-run",
    )

    assert ended.returncode == console.EXIT_UNEXPECTED
    assert ended.stderr.endswith("error: SaladCloud's API fails (HTTP 503)\n")
    assert len(salad.requests) == client.RETRIES.tries


def test_a_decision_names_its_own_queues_and_what_is_spent_once(
    salad,
    in_process: Imagefleet,
    tmp_path,
    monkeypatch,
    caplog,
):
    """Another queue of the container has jobs of a model, for which this one has no queue."""
    monkeypatch.setattr(logs, "configure", lambda _: None)
    caplog.set_level("INFO")
    in_process("deploy", "apply", "--yes", "--replicas", "1")
    (tmp_path / "jobs.jsonl").write_text('{"prompt": "a cat"}\n')
    (tmp_path / "large.jsonl").write_text('{"prompt": "a dog", "model": "large"}\n')
    in_process("load", "jobs.jsonl")
    in_process("load", "large.jsonl", "--queue", "other")

    ended = in_process(
        "scale", "--dollars-per-hour", "3", "--max-dollars", "0.01", "--once", "--yes"
    )

    assert ended.returncode == 0, ended.stderr
    said = "\n".join(caplog.messages) + ended.stderr
    assert "large" not in said
    assert "the budget allows no more; $0.00 of $0.01 spent" in said
    assert said.count("spent") == 1

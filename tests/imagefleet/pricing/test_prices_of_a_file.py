from datetime import date
from pathlib import Path

import pytest

from imagefleet import errors
from imagefleet.pricing import prices


def write(folder: Path, text: str) -> Path:
    path = folder / "prices.yaml"
    path.write_text(text)
    return path


def test_without_a_file_the_built_in_prices_apply():
    assert prices.read_table(None) is prices.BUILT_IN


def test_a_file_overrides_only_its_own_entries(tmp_path):
    path = write(
        tmp_path,
        "source: the portal on 2026-11-20\n"
        "as_of: 2026-11-20\n"
        "gpus:\n"
        "  3060 ti: {batch: 0.035}\n"
        "  RTX 6090 32GB: {batch: 0.5, high: 0.9}\n"
        "storage: {blob_writes_per_10000: 0.065}\n",
    )
    table = prices.read_table(path)

    assert prices.gpu_dollars_per_hour("RTX 3060 Ti", "batch", table) == 0.035
    assert table.gpus["RTX 3060 Ti 8GB"].source == "the portal on 2026-11-20"
    assert prices.gpu_dollars_per_hour("6090", "high", table) == 0.9
    assert prices.gpu_dollars_per_hour("4090", "batch", table) == 0.16
    assert table.gpus["RTX 3060 Ti 8GB"].as_of == date(2026, 11, 20)
    assert table.gpus["RTX 4090 24GB"] == prices.BUILT_IN.gpus["RTX 4090 24GB"]
    assert table.storage.blob_write == pytest.approx(6.5e-6)
    assert table.storage.queue_operation == prices.BUILT_IN.storage.queue_operation
    assert table.storage.source == "the portal on 2026-11-20"


def test_a_class_in_the_file_keeps_no_built_in_price(tmp_path):
    table = prices.read_table(
        write(tmp_path, "source: x\ngpus: {RTX 4090: {batch: 0.2}}\n")
    )

    with pytest.raises(errors.SetupError, match="RTX 4090 24GB at high priority"):
        prices.gpu_dollars_per_hour("4090", "high", table)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("gpus: {}\n", "source: is required"),
        ("source: x\ngpus: {RTX 3060: {batch: 1}}\n", "several GPU classes"),
        ("source: x\ngpus: {RTX 4090: {bulk: 0.1}}\n", "gpus.RTX 4090.bulk"),
        ("source: x\ngpus: {RTX 4090: {batch: -1}}\n", "greater than or equal to 0"),
        ("source: x\ngpus: {RTX 4090: {batch: .nan}}\n", "finite"),
        (
            "source: x\nstorage: {writes: 1}\n",
            "unknown price of storage in .*prices.yaml 'writes'",
        ),
        ("[1\n", "not valid YAML"),
        ("", "source: is required"),
        ("x\n", "should be an object of names and values"),
    ],
)
def test_an_invalid_file_is_refused_with_the_entry(tmp_path, text: str, complaint: str):
    with pytest.raises(errors.SetupError, match=complaint):
        prices.read_table(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(errors.SetupError, match=r"prices\.yaml: No such file"):
        prices.read_table(tmp_path / "prices.yaml")

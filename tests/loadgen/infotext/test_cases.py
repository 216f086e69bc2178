"""Every file of the cases is the job of its `expected.jsonl`, by the rules of their README."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from imagefleet import errors
from loadgen.infotext import source
from loadgen.infotext.reading import Reading

CASES = Path(__file__).parent / "cases"

LINES = (CASES / "expected.jsonl").read_text().splitlines()
EXPECTED = {row["file"]: row for row in map(json.loads, LINES)}

#: A1111's defaults of what the cases leave out or state.
DEFAULTS = {
    "negative_prompt": "",
    "scheduler": "Automatic",
    "hr_scheduler": "Automatic",
}
SETTINGS = {"randn_source": "GPU"}

KARRAS = ("DPM++ 2M", "DPM++ SDE", "DPM++ 2S a", "DPM2", "DPM2 a", "Restart")
EXPONENTIAL = ("DPM++ 2M SDE", "DPM++ 2M SDE Heun", "DPM++ 3M SDE")

_LORA = re.compile(r"\s*<lora:([^>]*)>\s*")
_TITLE = re.compile(r"(?P<name>.*?)(?: \[(?P<digits>[0-9a-f]+)\])?")


def loras(prompt: str) -> list[tuple[str, float, float]]:
    found = (each.split(":") for each in _LORA.findall(prompt))
    return sorted(
        (name, float(te), float((unet or [te])[0])) for name, te, *unet in found
    )


def own_schedule(sampler: str) -> str:
    return (
        "Karras"
        if sampler in KARRAS
        else "Exponential"
        if sampler in EXPONENTIAL
        else "Uniform"
    )


def same_title(found: Any, expected: Any) -> bool:
    """By name, by hash or by both, as far as both have them."""
    one, other = (_TITLE.fullmatch(str(each)).groupdict() for each in (found, expected))  # type: ignore[union-attr]
    names = {value for value in (*one.values(), *other.values()) if value}
    return len(names) < sum(bool(value) for value in (*one.values(), *other.values()))


def same(name: str, found: Any, expected: Any, job: Mapping[str, Any]) -> bool:
    if name in {"prompt", "hr_prompt"}:
        words = [
            " ".join(_LORA.sub(" ", each or "").split()) for each in (found, expected)
        ]
        exact = words[0] == words[1] and (found or "").count("\n") == (
            expected or ""
        ).count("\n")
        return exact and loras(found or "") == loras(expected or "")
    if name.endswith("scheduler"):
        sampler = job["hr_sampler_name" if name.startswith("hr_") else "sampler_name"]
        both = [
            own_schedule(sampler) if it == "Automatic" else it
            for it in (found, expected)
        ]
        return both[0] == both[1]
    if name in {
        "sd_model_checkpoint",
        "sd_vae",
        "hr_checkpoint_name",
        "refiner_checkpoint",
    }:
        return same_title(found, expected)
    if isinstance(expected, bool):
        return found is expected
    return bool(found == expected)


def differences(
    found: Mapping[str, Any],
    expected: Mapping[str, Any],
    also: Mapping[str, list[Any]],
    defaults: Mapping[str, Any],
) -> list[str]:
    different = []
    for name in sorted(found.keys() | expected.keys()):
        if name == "override_settings":
            continue
        have = found.get(name, defaults.get(name))
        accepted = [expected.get(name, defaults.get(name)), *also.get(name, [])]
        if not any(same(name, have, each, expected) for each in accepted):
            different.append(f"{name}: {have!r}, not {accepted[0]!r}")
    return different


@pytest.mark.parametrize("name", EXPECTED)
def test_a_picture_of_another_program_is_the_job_that_it_must_become(name: str):
    row = EXPECTED[name]
    if row["job"] is None:
        with pytest.raises(errors.JobError) as refused:
            source.read_file(CASES / name)
        said = str(refused.value)
        assert all(word.lower() in said.lower() for word in row["must_name"]), said
        return
    reading = source.read_file(CASES / name)
    assert differences(reading.job, row["job"], row["also"], DEFAULTS) == []
    settings = [each.get("override_settings", {}) for each in (reading.job, row["job"])]
    assert differences(*settings, {}, SETTINGS) == []
    assert reading.needs == row["needs"]
    said = " ".join(reading.cannot)
    assert bool(said) == bool(row["cannot"]), said
    assert all(word.lower() in said.lower() for word in row["must_name"]), said
    assert named(reading) == wanted(row["models"])


def named(reading: Reading) -> set[tuple[str, str | None, str | None]]:
    return {tuple(each) for each in reading.models}  # type: ignore[misc]


def wanted(models: Mapping[str, Any]) -> set[tuple[str, str | None, str | None]]:
    kinds = {
        "checkpoint": "model",
        "hires_checkpoint": "model",
        "refiner": "model",
        "vae": "vae",
    }
    lists = {"loras": "lora", "embeddings": "embedding", "controlnets": "controlnet"}
    found = {
        (kinds[key], one["name"], one["hash"])
        for key, one in models.items()
        if key in kinds
    }
    for key, kind in lists.items():
        found |= {(kind, one["name"], one["hash"]) for one in models.get(key, [])}
    return found


def test_all_cases_are_here():
    assert EXPECTED.keys() == {each.name for each in CASES.iterdir()} - {
        "README.md",
        "expected.jsonl",
    }

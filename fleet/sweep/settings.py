"""The settings that a sweep combines, and those of all its jobs: `--set FIELD=VALUES`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from imagefleet import errors
from imagefleet.job.change import Change
from imagefleet.records.sweep import Group
from loadgen import caption_sweep, sweep

#: The fields with several values, how one is read, and their values by default.
_COMBINED: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "cfg_scale": (float, "7"),
    "sampler_name": (str, "Euler a"),
    "steps": (int, "20"),
    "lora_strength": (float, "1"),
}

#: What a job has from its caption and its group, or what would give it more than one image.
_OF_THE_SWEEP = {
    **dict.fromkeys(("id", "prompt", "metadata", "enable_prompt_comments"), "the caption says it"),
    "seed": "it follows from the caption and --seed",
    "campaign": "use --campaign",
    "model": "use --models",
    "verify": "use --verify-share",
    "batch_size": "each caption is one image of a group",
    "n_iter": "each caption is one image of a group",
}


def read(
    texts: Iterable[str], models: Sequence[str | None]
) -> tuple[tuple[Group, ...], dict[str, Any]]:
    """The groups of all combinations, and what jobs share; raises SetupError for invalid texts."""
    given = _given(texts)
    size, lora = given.pop(sweep.SIZE, None), given.pop("lora", None)
    if "lora_strength" in given and not lora:
        raise errors.SetupError("--set lora_strength goes with --set lora=NAME")
    combined = {
        name: _listed(name, given.pop(name, default), kind)
        for name, (kind, default) in _COMBINED.items()
    }
    groups = caption_sweep.groups(
        combined["cfg_scale"],
        combined["sampler_name"],
        combined["steps"],
        models,
        lora,
        combined["lora_strength"] if lora else [None],
    )
    shared = Change.read(f"{name}={text}" for name, text in given.items()).values
    try:
        return groups, shared | (sweep.as_job_fields({sweep.SIZE: size}) if size else {})
    except ValueError as error:
        raise errors.SetupError(f"--set {error}") from None


def _given(texts: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        name, separator, values = text.partition("=")
        if not separator:
            raise errors.SetupError(f"--set {text[:80]}: should be FIELD=VALUES, say steps=20,50")
        if name in _OF_THE_SWEEP:
            raise errors.SetupError(f"--set {name}: {_OF_THE_SWEEP[name]}")
        if name in found:
            raise errors.SetupError(f"--set {name} is there twice: give its values with commas")
        found[name] = values
    return found


def _listed(name: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    """The values of a list with commas."""
    try:
        return [kind(value.strip()) for value in text.split(",")]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise errors.SetupError(f"--set {name}={text[:60]}: should be {what} with commas") from None

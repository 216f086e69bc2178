"""Whatever a text holds, it is a job or refused with a sentence."""

import json
import random
from pathlib import Path

from PIL import Image

from imagefleet import errors
from imagefleet.job import message
from loadgen.infotext import comfyui, invokeai, source

CASES = Path(__file__).parent / "cases"
READERS = {
    "parameters": source.read_parameters,
    "prompt": comfyui.read,
    "invokeai_metadata": invokeai.read,
    "sd-metadata": invokeai.read,
}

TURNS = 8_000

#: What stands where something else is expected.
SIGNS = (
    *'"{}[]:,\\\n x0',
    "null",
    "-1",
    "1e999",
    "[]",
    "{}",
    '"a"',
    "true",
    "Version: v1.5.0, ",
)


def texts() -> list[tuple[str, str]]:
    found = [("parameters", each.read_text()) for each in CASES.glob("*.txt")]
    for path in CASES.glob("*.png"):
        with Image.open(path) as image:
            found += [(key, image.info[key]) for key in READERS if key in image.info]
    return sorted(found)


def damaged(chance: random.Random, text: str) -> str:
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(text) + 1)
        end = at + chance.choice([0, 0, 1, 3, 20])
        text = text[:at] + chance.choice(["", *SIGNS]) + text[end:]
    return text


def of_another_type(chance: random.Random, text: str) -> str:
    """A JSON object with one of its values, at any depth, of another type."""
    found = json.loads(text)
    place = found
    key = chance.choice(list(found))
    while isinstance(place[key], dict | list) and place[key] and chance.random() < 0.8:
        place = place[key]
        key = chance.choice([*place] if isinstance(place, dict) else range(len(place)))
    place[key] = chance.choice(
        [None, -1, 10**400, 0.5, "a", [], ["6", 0], {}, {"a": 1}, True]
    )
    return json.dumps(found)


def test_a_damaged_text_is_a_job_or_refused_with_a_sentence():
    chance = random.Random(7)
    known = texts()
    jobs = refused = 0
    for _ in range(TURNS):
        key, text = chance.choice(known)
        is_whole = (
            key != "parameters"
            and text.endswith("}")
            and not text.endswith('"KSampler"}')
        )
        change = of_another_type if is_whole and chance.random() < 0.6 else damaged
        changed = change(chance, text)
        try:
            message.read_job(message.message_text(READERS[key](changed).job), "m1")
        except errors.JobError:
            refused += 1
        else:
            jobs += 1
    assert jobs > TURNS / 20
    assert refused > TURNS / 20

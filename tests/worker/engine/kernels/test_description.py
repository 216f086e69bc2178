"""Descriptions: the same for the same call on every node, another for what compiles to another."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from packages import PlainPackages
from worker.engine.kernels.description import Description, imitate
from worker.engine.slots.step import tick


def content_of(engine: Any, mode: str = "per_slot", slots: int | None = None) -> bytes:
    lane, step = engine._open_lane(engine._runner.native)
    engine._unet.use_block(lane.block, slots or lane.slots)
    return Description.of(
        (tick, (engine._unet, mode, step.state, step.controls))
    ).content


@pytest.fixture
def engine(make_slot_engine) -> Any:
    return make_slot_engine(slots=2, packages=PlainPackages())


def test_fakes_are_laid_out_as_the_tensors_are_and_shared_where_these_are(engine):
    _, step = engine._open_lane(engine._runner.native)
    described = Description.of((tick, (engine._unet, "per_slot", step.state, ())))
    (function, arguments), fakes = imitate(described.content)
    assert function is tick
    assert len(fakes) == len(described.tensors)
    for fake, tensor in zip(fakes, described.tensors, strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )
    unet = arguments[0]
    assert (
        unet.down[0].resnets[0].conv1.layer.weight
        is fakes[
            next(
                at
                for at, tensor in enumerate(described.tensors)
                if tensor is engine._unet.down[0].resnets[0].conv1.layer.weight
            )
        ]
    )


def test_one_graph_has_one_description_whatever_else_there_is(make_slot_engine):
    """The number of blocks follows from free memory, and from what was drawn before."""
    first = make_slot_engine(slots=2, packages=PlainPackages())
    expected = content_of(first)
    assert content_of(first, "shared") != expected
    other = make_slot_engine(slots=2, blocks=4, packages=PlainPackages())
    other._unet.use_block(3, 4)
    assert content_of(other) == expected
    assert content_of(make_slot_engine(slots=1, packages=PlainPackages())) != expected
    half = make_slot_engine("bfloat16", slots=2, packages=PlainPackages())
    assert content_of(half) != expected


def test_sets_and_equal_words_are_written_alike_in_every_process():
    program = (
        "import hashlib, sys, torch\n"
        "from worker.engine.kernels.description import Description\n"
        "from operator import add\n"
        "words = {'bias', 'slots', 'weight', 'folded'}\n"
        "twice = ''.join(['wei', 'ght']), 'weight', sys.intern('weight')\n"
        "call = add, (words, twice, torch.ones(2, 3).half())\n"
        "print(hashlib.sha256(Description.of(call).content).hexdigest())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
        for seed in "12"
    }
    assert len(found) == 1


def test_a_tensor_that_does_not_begin_at_a_word_is_another():
    whole = torch.zeros(9)
    calls = [(torch.neg, (each,)) for each in (whole[:4], whole[4:8], whole[1:5])]
    first, aligned, other = (Description.of(each).content for each in calls)
    assert first == aligned
    assert first != other
    _, (fake,) = imitate(other)
    assert fake.storage_offset() == 1

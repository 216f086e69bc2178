"""What is compiled beside the drawing: kinds whose images in sight outlast what it costs."""

import math
import random
from collections.abc import Iterable

import pytest

from worker.engine.slots.compile_policy import GraphKey, Outlook
from worker.engine.slots.queue import BatchKey, Costs

USUAL, OTHER, RARE = (
    GraphKey(BatchKey(512 + 64 * at, 512, 154, None, None)) for at in range(3)
)

GRAPHS = 2

COSTS = Costs(graph_seconds=30.0, saved_share=0.35)


class Clock:
    seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def outlook(
    left: float | None, kinds: Iterable[GraphKey] = (), clock: Clock | None = None
) -> Outlook:
    made = Outlook(lambda: left, clock or Clock())
    for kind in kinds:
        made.add(kind, 1.0)
    return made


def pays(of: Outlook, kind: GraphKey) -> bool:
    return of.pays(kind, GRAPHS, COSTS)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("share", [0.005, 0.01])
def test_a_kind_that_is_always_rare_never_compiles_however_long_the_queue(
    seed: int, share: float
):
    chosen = random.Random(seed)
    of = outlook(math.inf)
    for _ in range(5000):
        of.add(RARE if chosen.random() < share else USUAL, chosen.uniform(0.5, 2.0))
        assert not pays(of, RARE)


@pytest.mark.parametrize("seed", range(20))
def test_half_of_a_deep_queue_compiles_within_the_first_jobs(seed: int):
    of = outlook(3000.0, random.Random(seed).choices([USUAL, OTHER], k=32))
    assert pays(of, OTHER)


@pytest.mark.parametrize("left", [0.0, 60.0, 90.0, 110.0])
def test_a_queue_that_ends_before_it_pays_is_drawn_uncompiled(left: float):
    assert not pays(outlook(left, [USUAL] * 100), USUAL)
    assert not pays(outlook(math.inf, [USUAL] * 100), RARE), "none has come"


def test_of_a_queue_of_unknown_depth_as_much_is_expected_as_has_come():
    clock = Clock()
    of = outlook(None, [USUAL, OTHER] * 50, clock)
    assert not pays(of, USUAL), "it has just begun"
    clock.seconds += 600
    assert pays(of, USUAL)
    of.begin()
    assert not pays(of, USUAL), "there was nothing to draw"


def test_small_images_are_less_work():
    of = outlook(600.0)
    for _ in range(50):
        of.add(USUAL, 30.0)
        of.add(OTHER, 1.0)
    assert pays(of, USUAL)
    assert not pays(of, OTHER), "half of the images, a thirtieth of the work"


def test_what_comes_no_more_is_forgotten():
    of = outlook(math.inf, [*[OTHER] * 100, *[USUAL] * 600])
    assert of.share(OTHER) == 0
    assert of.share(USUAL) == pytest.approx(1, abs=0.1)
    assert not pays(of, OTHER)


@pytest.mark.parametrize(
    ("had_lasted", "pays_at_once"), [(60.0, False), (3600.0, True)]
)
def test_what_was_lost_is_compiled_again_if_it_lasts_long_enough_between_losses(
    had_lasted: float, pays_at_once: bool
):
    clock = Clock()
    of = outlook(math.inf, [USUAL] * 50, clock)
    clock.seconds += had_lasted
    of.start_over()
    assert pays(of, USUAL) == pays_at_once
    clock.seconds += 600
    assert pays(of, USUAL)


def test_what_could_not_be_kept_is_tried_again_after_a_while_and_others_are_not_put_off():
    clock = Clock()
    of = outlook(math.inf, [USUAL, OTHER] * 50, clock)
    clock.seconds += 3600
    of.start_over(OTHER)
    assert (pays(of, USUAL), pays(of, OTHER)) == (True, False)
    clock.seconds += 3600
    assert pays(of, OTHER)


def test_what_the_first_graph_changes_depends_on_all_sizes_not_on_the_first_few_images():
    of = outlook(math.inf, [USUAL] * 45)
    assert not of.often_changes_convolutions(16), "none does"
    for _ in range(2):
        of.add(USUAL._replace(convolutions=True), 1.0)
    assert of.often_changes_convolutions(16)
    assert not of.often_changes_convolutions(8)


@pytest.mark.parametrize(
    ("few", "many", "are_few"),
    [(0, 0, False), (1, 0, False), (1, 1, True), (5, 1000, True), (30, 200, False)],
)
def test_images_are_few_until_they_are_known_to_be_more(
    few: int, many: int, are_few: bool
):
    of = outlook(math.inf, [*[RARE] * few, *[USUAL] * min(many, 400)])
    assert of.are_few([RARE.batch_key], USUAL.batch_key) == are_few


def test_that_few_images_change_convolutions_is_believed_until_many_are_known_to():
    changed = USUAL._replace(convolutions=True)
    assert not outlook(math.inf).changes_few, "nothing is counted"
    assert outlook(math.inf, [USUAL]).changes_few
    assert outlook(math.inf, [changed] * 2).changes_few
    assert not outlook(math.inf, [changed] * 8).changes_few
    assert outlook(math.inf, [USUAL, USUAL, changed] * 5).changes_few
    assert not outlook(math.inf, [USUAL, USUAL, changed] * 60).changes_few

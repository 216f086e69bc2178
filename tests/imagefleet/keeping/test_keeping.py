"""What a rule keeps: by scores alone, whoever draws what, and when."""

import itertools
import random

import pytest
from pydantic import ValidationError

from imagefleet.job.message import Job
from imagefleet.keeping.duplicates import Hashed, near_duplicates
from imagefleet.keeping.rule import Keep


def rule(text: str) -> Keep:
    return Keep.model_validate(text)


def test_a_rule_is_the_same_as_text_and_as_fields():
    fields = {"minimum": {"clip": 25.0}, "best": 2, "by": "aesthetic", "distinct": 3}
    assert rule("clip=25, best=2,by=aesthetic,distinct=3") == Keep.model_validate(
        fields
    )
    assert rule("clip=25,by=aesthetic").scores == ["clip", "aesthetic"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "names no score"),
        ("best=2", "names no score"),
        ("clip", "NAME=VALUE"),
        ("clip=many", "valid number"),
        ("clip=nan", "finite number"),
        ("clip=25,best=0", "greater than or equal to 1"),
        ("../clip=25", "no name of a score"),
        ("clip=25,early.../clip=9", "no name of a score"),
        ("clip=25,distinct=64", "less than or equal to 7"),
    ],
)
def test_a_rule_that_says_nothing_is_refused_with_a_reason(text: str, why: str):
    with pytest.raises(ValidationError, match=why):
        rule(text)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"batch_size": 65, "keep": "clip=25"}, "64 at most are judged"),
        ({"then": [{"steps": 5}], "keep": "clip=25"}, "are not judged"),
        ({"verify": True, "keep": "clip=25"}, "are not judged"),
        ({"batch_size": 2, "keep": "clip=25,distinct=3"}, "give best=1"),
    ],
)
def test_a_job_that_its_rule_cannot_judge_is_refused(fields: dict, why: str):
    with pytest.raises(ValidationError, match=why):
        Job.model_validate({"prompt": "a house", **fields})


def test_what_is_kept_is_no_part_of_what_is_drawn():
    job = Job.model_validate({"prompt": "a house", "id": "j"})
    judged = job.model_copy(update={"keep": rule("clip=25")})
    assert judged.digest == job.digest
    assert '"keep":{"minimum":{"clip":25.0}}' in judged.to_message()


def test_of_those_that_pass_the_best_are_kept_and_the_first_of_equals():
    scores = [{"clip": score} for score in (30, 10, 40, 40, 40, 20)]
    assert rule("clip=15,best=2").choose(scores) == [
        "2 of its job have a better clip",
        "clip 10 is below 15",
        None,
        None,
        "2 of its job have a better clip",
        "2 of its job have a better clip",
    ]


def test_a_score_that_is_missing_is_below_every_minimum():
    assert rule("clip=0").choose([{"aesthetic": 9}]) == ["clip -inf is below 0"]


def test_an_estimate_below_its_minimum_drops_what_is_drawn_to_its_end_too():
    early = rule("clip=25,early.clip=9,best=1")
    images = [{"early.clip": 8}, {"early.clip": 8, "clip": 30}, {"clip": 26}]
    below = "early.clip 8 is below 9"
    assert early.choose(images) == [below, below, None]
    assert early.wrongly_dropped([images, images[2:]]) == 1 / 2
    assert early.wrongly_dropped([images[:1]]) == 0


def test_near_duplicates_do_not_depend_on_the_order_of_drawing():
    images = [
        Hashed(-3.0, "a", 0b0000, 1),
        Hashed(-2.0, "b", 0b0001, 1),  # near a
        Hashed(-1.0, "c", 0b0011, 1),  # near b, which is dropped itself
        Hashed(-1.0, "d", 15 << 60, 1),
        Hashed(-1.0, "e", 15 << 60, 1),  # as good as d, whose id comes first
    ]
    expected = {"b": "a", "c": "b", "e": "d"}
    for order in itertools.permutations(images):
        found = near_duplicates(order)
        assert {each.id: other for each, other in found.items()} == expected


@pytest.mark.parametrize("distinct", [0, 3, 7])
def test_every_pair_of_near_hashes_is_found_wherever_they_differ(distinct: int):
    chance = random.Random(distinct)
    for number in range(300):
        bits = chance.getrandbits(64)
        places = chance.sample(range(64), distinct + number % 2)
        other = bits
        for place in places:
            other ^= 1 << place
        found = near_duplicates(
            [Hashed(0.0, "a", bits, distinct), Hashed(0.0, "b", other, distinct)]
        )
        assert [*found.values()] == ([] if number % 2 else ["a"]), (bits, places)

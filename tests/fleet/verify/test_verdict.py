import random
from datetime import UTC, datetime

from fleet.verify.pairs import NO_RECORD, Pair, Result, judge, undecided

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)


def pair(first: str, second: str, *, differ: bool = False, image: str = "x") -> Pair:
    result: Result = "different" if differ else "alike"
    return Pair(image, f"-checks/{image}", (first, second), NOON, result)


def wrong(pairs: list[Pair]) -> list[str]:
    return [each.worker for each in judge(pairs) if each.draws_wrong]


def test_two_witnesses_name_a_worker_and_one_does_not():
    once = [pair("x", "a", differ=True), pair("x", "a", differ=True)]
    assert wrong(once) == []
    assert undecided(once, judge(once)) == once
    twice = [*once, pair("b", "x", differ=True)]
    assert wrong(twice) == ["x"]
    assert undecided(twice, judge(twice)) == []


def test_a_good_worker_that_meets_several_bad_ones_is_not_named():
    pairs = [pair("good", f"other-{number}") for number in range(20)]
    pairs += [pair("good", f"bad-{number}", differ=True) for number in range(5)]
    assert wrong(pairs) == []
    pairs += [
        pair(f"bad-{number}", f"other-{number}", differ=True) for number in range(5)
    ]
    assert sorted(wrong(pairs)) == [f"bad-{number}" for number in range(5)]


def test_a_pair_drawn_twice_by_one_worker_counts_for_nothing():
    assert judge([Pair("x", "y", ("a", "a"), NOON, "same_worker")]) == []


def test_what_no_worker_stored_speaks_against_no_worker():
    pairs = [pair(NO_RECORD, name, differ=True) for name in "abc"]
    assert wrong(pairs) == []
    assert undecided(pairs, judge(pairs)) == []


def test_few_bad_workers_among_many_are_found_and_no_other():
    """200 workers, of which three draw wrong always and two every other time; 2,000 pairs."""
    generator = random.Random(1)
    shares = {"w0": 1.0, "w1": 1.0, "w2": 1.0, "w3": 0.5, "w4": 0.5}
    pairs = []
    for _ in range(2000):
        both = generator.sample([f"w{number}" for number in range(200)], 2)
        differ = any(generator.random() < shares.get(each, 0.0) for each in both)
        pairs.append(pair(*both, differ=differ))
    assert sorted(wrong(pairs)) == ["w0", "w1", "w2", "w3", "w4"]

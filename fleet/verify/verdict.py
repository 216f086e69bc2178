"""The workers that draw wrong, found from pairs of drawings of which at least one is wrong."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet.verify.pairs import NO_RECORD, Pair

#: A worker is named once pairs with so many other workers speak against it: one differing pair
#: does not tell which of its two is wrong.
ENOUGH_WITNESSES = 2

#: Added to the pairs of each worker, so that one differing pair of one is not a share of 100 %.
_PRIOR_PAIRS = 4


@dataclass(frozen=True, slots=True)
class Record:
    """One worker's pairs; *witnesses*: the other workers whose pairs speak against it."""

    worker: str
    compared: int
    different: int
    witnesses: int

    @property
    def draws_wrong(self) -> bool:
        return self.worker != NO_RECORD and self.witnesses >= ENOUGH_WITNESSES


def judge(pairs: Sequence[Pair]) -> list[Record]:
    """The record of each worker, those that draw wrong first.

    A differing pair speaks against the worker of which a larger share of pairs differs; against
    neither if they are equal.
    """
    compared = Counter[str]()
    different = Counter[str]()
    for pair in pairs:
        if pair.result in {"alike", "different"}:
            compared.update(pair.workers)
        if pair.result == "different":
            different.update(pair.workers)
    shares = {each: different[each] / (compared[each] + _PRIOR_PAIRS) for each in compared}
    witnesses: dict[str, set[str]] = defaultdict(set)
    for pair in pairs:
        if pair.result == "different" and (suspect := _suspect(pair, shares)) is not None:
            witnesses[suspect].update(set(pair.workers) - {suspect})
    records = [
        Record(each, compared[each], different[each], len(witnesses[each])) for each in compared
    ]
    return sorted(records, key=lambda each: (-each.witnesses, -each.different, each.worker))


def undecided(pairs: Sequence[Pair], records: Sequence[Record]) -> list[Pair]:
    """The differing pairs of which it is not known who drew wrong."""
    wrong = {each.worker for each in records if each.draws_wrong} | {NO_RECORD}
    return [pair for pair in pairs if pair.result == "different" and wrong.isdisjoint(pair.workers)]


def _suspect(pair: Pair, shares: Mapping[str, float]) -> str | None:
    first, second = pair.workers
    if NO_RECORD in pair.workers:
        return NO_RECORD
    if shares[first] == shares[second]:
        return None
    return max(pair.workers, key=lambda each: shares[each])

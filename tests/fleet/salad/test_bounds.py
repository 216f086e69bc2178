"""`imagefleet deploy apply` never has more replicas run, or a higher price, than was confirmed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import forks
import polling
from fleet.salad import file as salad_file
from fleet.salad import gpus, groups
from in_process import Imagefleet, assert_refused
from salad_fake import Fault, Group, SaladFake, fleet_file

PRICES = {
    "RTX 3060 Ti (8 GB)": {"batch": "0.03", "high": "0.08"},
    "RTX 3070 (8 GB)": {"batch": "0.04", "high": "0.1"},
}
GPUS = {"[RTX 3060 Ti]": 0, "[RTX 3070]": 1, "[RTX 3060 Ti, RTX 3070]": 1}

COUNTS = st.one_of(st.integers(0, 6), st.integers(0, 500), st.just(500))


@dataclass(frozen=True)
class Revision:
    """What decides a group's revision; *slots* restarts workers without another price."""

    gpu: str
    priority: str
    slots: int

    @property
    def dollars(self) -> float:
        return float(list(PRICES.values())[GPUS[self.gpu]][self.priority])

    def text(self, url: str, replicas: int) -> str:
        text = fleet_file(
            url,
            "IMAGEFLEET_SAS: {env: SAS}",
            f"IMAGEFLEET_SLOTS: {self.slots}",
            replicas=replicas,
        )
        return text.replace("[RTX 3060 Ti]", f"{self.gpu}\npriority: {self.priority}")


@dataclass(frozen=True)
class Before:
    """A group before the change, and how many of its instances are still stopping."""

    revision: Revision
    replicas: int
    running: int
    stopping: int
    is_stopped: bool

    @property
    def most(self) -> int:
        """Replicas that are confirmed already, and what has not stopped yet."""
        return (0 if self.is_stopped else self.replicas) + self.stopping


@dataclass(frozen=True)
class Case:
    """*ends* are the requests after which a run fails, and whether the last one took effect."""

    before: list[Before]
    after: Revision
    replicas: int
    others: int
    quota: int
    most_stops: int
    ends: list[tuple[int, bool]]


REVISIONS = st.builds(
    Revision,
    st.sampled_from(list(GPUS)),
    st.sampled_from(["batch", "high"]),
    st.integers(1, 2),
)


@st.composite
def groups_before(draw: st.DrawFn, revisions: list[Revision]) -> Before:
    replicas = draw(COUNTS)
    is_stopped = draw(st.booleans())
    return Before(
        draw(st.sampled_from(revisions)),
        replicas,
        0 if is_stopped else draw(st.integers(0, replicas)),
        draw(st.one_of(st.just(0), st.integers(0, 100))),
        is_stopped,
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    revisions = draw(st.lists(REVISIONS, min_size=1, max_size=3))
    before = draw(st.lists(groups_before(revisions), max_size=4))
    replicas = draw(st.integers(1, 1600))
    others = draw(st.integers(0, 300))
    requested = sum(each.replicas for each in before)
    needed = others + replicas
    quota = draw(
        st.sampled_from(
            [needed - 1, needed, needed + requested // 2, needed + requested]
        )
    )
    return Case(
        before,
        draw(st.sampled_from(revisions)),
        replicas,
        others,
        max(quota, others + requested) if draw(st.booleans()) else quota,
        draw(st.sampled_from([7, 50, 10_000])),
        draw(st.lists(st.tuples(st.integers(3, 25), st.booleans()), max_size=3)),
    )


def body_of(revision: Revision, salad: SaladFake, path: Path) -> Any:
    path.write_text(revision.text(salad.url, 1))
    file = salad_file.read_file(path)
    [body] = groups.plain(groups.render(file, gpus.find(file.gpus, gpus.built_in()), 1))
    return body


def set_up(salad: SaladFake, case: Case, path: Path) -> None:
    """Puts the cloud into the state before, and the fleet file into the one after."""
    salad.groups.clear()
    salad.faults.clear()
    numbers: dict[Revision, int] = {}
    for each in case.before:
        body = body_of(each.revision, salad, path)
        numbers[each.revision] = number = numbers.get(each.revision, 0) + 1
        name = f"{body['name'].removesuffix('-1')}-{number}"
        body |= {"name": name, "replicas": each.replicas}
        salad.groups[name] = Group(
            body, each.is_stopped, running=each.running, stopping=each.stopping
        )
    if case.others:
        name = "other-00000000-1"
        salad.groups[name] = Group(
            {**body_of(case.after, salad, path), "name": name}, is_stopped=True
        )
        salad.groups[name].body["replicas"] = case.others
    path.write_text(case.after.text(salad.url, case.replicas))
    salad.quota = case.quota
    salad.most_stops = case.most_stops
    salad.class_prices = PRICES
    salad.requests.clear()
    salad.billed.clear()


def ours(salad: SaladFake) -> dict[str, Group]:
    return {
        name: each for name, each in salad.groups.items() if name.startswith("sd15")
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_apply_runs_more_than_before_or_as_confirmed(
    salad: SaladFake, in_process: Imagefleet, tmp_path
):
    path = tmp_path / "fleet.yaml"

    # A quota that was lowered, below what runs and below what was asked for.
    plain, next_one = (Revision("[RTX 3060 Ti]", "batch", slots) for slots in (1, 2))
    running = [Before(plain, 10, 10, 0, is_stopped=False)]
    waiting = [Before(plain, 500, 2, 0, is_stopped=False)]

    @settings(max_examples=150)
    @example(Case(running, next_one, 4, 0, 4, 10_000, []))
    @example(Case(waiting, next_one, 2, 0, 2, 10_000, []))
    @given(cases())
    def check(case: Case) -> None:
        set_up(salad, case, path)
        most = max(case.replicas, sum(each.most for each in case.before))
        before = sum(each.most * each.revision.dollars for each in case.before)
        most_dollars = max(before, case.replicas * case.after.dollars)
        arguments = ["deploy", "apply", "--yes"]
        alike = [each for each in case.before if each.revision == case.after]
        starts = case.replicas > sum(
            each.replicas for each in alike if not each.is_stopped
        )

        for skips, lands in case.ends:
            salad.faults = [Fault(403, skips=skips, lands=lands)]
            in_process(*arguments)
        salad.faults = []
        ended = in_process(*arguments)

        assert all(replicas <= most for replicas, _ in salad.billed), salad.billed
        assert all(dollars <= most_dollars + 1e-6 for _, dollars in salad.billed), (
            salad.billed
        )
        if starts and case.others + case.replicas > case.quota:
            assert_refused(ended, "do not fit")
            assert {method for method, _ in salad.requests} == {"GET"}
            return
        assert ended.returncode == 0, ended.stderr
        assert sum(each.replicas for each in ours(salad).values()) == case.replicas
        assert len({name.rpartition("-")[0] for name in ours(salad)}) == 1
        assert not any(
            each.is_stopped and each.replicas for each in ours(salad).values()
        )
        asked = len(salad.requests)
        assert "is up to date" in in_process("deploy", "apply").stderr
        assert {method for method, _ in salad.requests[asked:]} == {"GET"}

    check()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["PATCH", "POST"])
def test_an_apply_that_is_killed_half_way_is_finished_by_the_next(
    salad: SaladFake,
    in_process: Imagefleet,
    start: Callable[..., forks.Fork],
    tmp_path,
    method: str,
):
    path = tmp_path / "fleet.yaml"
    alike = Revision("[RTX 3060 Ti]", "batch", 1)
    before = [Before(alike, 400, 400, 0, is_stopped=False) for _ in range(2)]
    case = Case(before, Revision("[RTX 3070]", "high", 1), 600, 0, 800, 10_000, [])
    set_up(salad, case, path)
    process = start("deploy", "apply", "--yes")
    polling.until_in_thread(lambda: salad.count(method))
    process.kill()
    process.wait()

    ended = in_process("deploy", "apply", "--yes")

    assert ended.returncode == 0, ended.stderr
    assert [each.replicas for each in ours(salad).values()] == [300, 300]
    assert max(replicas for replicas, _ in salad.billed) == 800
    assert max(dollars for _, dollars in salad.billed) <= 600 * 0.1 + 1e-6

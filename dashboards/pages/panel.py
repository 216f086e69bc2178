"""What a dashboard is made of."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

PanelForm = Literal["stat", "lines", "stack", "table"]


@dataclass(frozen=True, slots=True)
class Panel:
    """A number (`stat`), curves (`lines`, `stack`) or rows of the newest values (`table`).

    *queries* maps the legend of each query, a text with {{label}}, to its PromQL; of a table, the
    name of the query's column. A bare string is a single query, with a number for each fleet.
    From *bad_above* on, or below *bad_below*, the value is red: a number, an area of a plot, or the
    cells of a table's first column. *units*: of a table's columns that have another than *unit*.
    """

    title: str
    answers: str
    queries: dict[str, str] | str
    kind: PanelForm = "lines"
    unit: str = "short"
    decimals: int | None = None
    bad_above: float | None = None
    bad_below: float | None = None
    units: Mapping[str, str] = field(default_factory=dict)


Figure = partial(Panel, kind="stat")
Count = partial(Figure, decimals=0)
Dollars = partial(Figure, unit="currencyUSD", decimals=2)
Stack = partial(Panel, kind="stack")
Table = partial(Panel, kind="table")


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard: its numbers first, in a row, and at the end the panels of one worker."""

    name: str
    question: str
    panels: tuple[Panel, ...]
    worker_panels: tuple[Panel, ...] = ()

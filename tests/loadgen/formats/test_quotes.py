"""Quotes that were not meant: what an unclosed or a stray one may cost, and what it may not."""

import csv
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.formats.lines import Entry
from loadgen.formats.tables import CsvRows

OPEN = '{number},"a fish number {number}\n'
ROW = "{number},a fish number {number}\n"


def entries(text: str, start: int = 0) -> list[Entry]:
    return list(CsvRows().entries(io.BytesIO(text.encode()), start))


def prompts(text: str) -> list[str]:
    return [json.loads(entry.text)["prompt"] for entry in entries(text) if entry.text]


@pytest.mark.parametrize("rows", [50, 20_000])
def test_a_quote_that_never_closes_costs_its_own_line_alone(rows: int) -> None:
    text = "id,prompt\n" + "".join(
        (OPEN if number == 12 else ROW).format(number=number)
        for number in range(1, rows + 1)
    )

    found = entries(text)

    (bad,) = [entry for entry in found if entry.problem]
    assert len(found) == rows == CsvRows().count(io.BytesIO(text.encode()))
    assert (bad.place, bad.line, bad.source) == ("row 13", 13, '12,"a fish number 12\n')
    assert "is a quote missing" in bad.problem
    assert [entry.place for entry in entries(text, 12)] == [
        entry.place for entry in found[12:]
    ]


def test_after_a_row_with_a_stray_quote_the_next_line_is_the_next_row() -> None:
    text = 'id,prompt\n1,"a" fish\n2,"a\nfish"\n3,"a\n4,a "fish"\n5,"a" b\n'
    found = entries(text)

    assert [(entry.line, bool(entry.problem)) for entry in found] == [
        *((2, True), (3, False), (5, True), (6, False), (7, True))
    ]
    assert prompts(text) == ["a\nfish", 'a "fish"']


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (
            't1\t"hello there\ts\nt2\ta fish\ts\nt3\tworld"\ts\nt4\tcat\ts\n',
            ['"hello there', "a fish", 'world"', "cat"],
        ),
        ('1\t"say ""hi"""\n2\t5" nails\n3\t"a" b\n', ['say "hi"', '5" nails', '"a" b']),
        ('1\t"a\tx\n2\t"b"\t"c"\n', ['"a', "b"]),
    ],
)
def test_a_quote_between_tabs_is_a_letter_unless_it_closes_in_its_cell(
    rows: str, expected: list[str]
) -> None:
    assert prompts("id\tprompt\tcampaign\n" + rows) == expected


def test_a_cell_between_tabs_that_may_go_on_in_the_next_line_is_refused() -> None:
    found = entries('id\tprompt\n1\t"a\nb"\n3\tc\n')

    assert [entry.line for entry in found if entry.problem] == [2]
    assert "save cells of several lines as .csv" in found[0].problem


def test_a_quote_that_closes_many_rows_later_is_named() -> None:
    rows = "".join(ROW.format(number=number) for number in range(2, 9))
    (swallowed,) = entries(f'id,prompt\n1,"a\n{rows}9,b"\n')
    (letter,) = entries('id,prompt\n1,"a\n\nb, c, d\n\n- e\n\nf"\n')

    assert "7 lines that look like rows" in swallowed.notice
    assert (letter.problem, letter.notice) == ("", "")


@given(
    st.lists(st.text(st.sampled_from('a" ,;\t\n'), min_size=1, max_size=9), min_size=1),
    st.sampled_from(["excel", "excel-tab"]),
)
def test_what_a_program_has_quoted_is_read_as_it_was(
    cells: list[str], dialect: str
) -> None:
    if dialect == "excel-tab":  # a tab or a line's end ends a cell, in quotes, too
        cells = [" ".join(cell.split("\t")).replace("\n", " ") for cell in cells]
    written = io.StringIO()
    rows = csv.writer(written, dialect, lineterminator="\n")
    rows.writerow(["id", "prompt"])
    rows.writerows(enumerate(cells))

    assert prompts(written.getvalue()) == cells


@given(st.text(st.sampled_from('a",\n'), max_size=60), st.sampled_from("\t,"))
def test_no_line_is_lost_whatever_its_quotes(text: str, delimiter: str) -> None:
    found = entries(f"id{delimiter}prompt\n{text}")

    source = "".join(entry.source for entry in found)
    assert source == text

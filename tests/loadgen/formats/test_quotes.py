"""Quotes that were not meant: what an unclosed or a stray one may cost, and what it may not."""

import csv
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.formats.lines import Entry, FormatError
from loadgen.formats.tables import CsvRows


def entries(text: str) -> list[Entry]:
    return list(CsvRows().entries(io.BytesIO(text.encode())))


def rows(first: int, last: int) -> str:
    return "".join(f"{number},a fish {number}\n" for number in range(first, last))


@pytest.mark.parametrize("last", [50, 20_000])
@pytest.mark.parametrize("wrong", ['12,"a fish\n', '12,"a" fish\n'])
def test_a_quote_that_is_missing_is_named_by_its_row(wrong: str, last: int):
    text = f"id,prompt\n{rows(1, 12)}{wrong}{rows(13, last)}"

    with pytest.raises(FormatError, match=r"^row 13, .* line 13: .* quote missing"):
        CsvRows().count(io.BytesIO(text.encode()))


def test_a_quote_that_closes_many_rows_later_is_named():
    (swallowed,) = entries(f'id,prompt\n1,"a\n{rows(2, 9)}9,b"\n')
    (letter,) = entries('id,prompt\n1,"a\n\nb, c, d\n\n- e\n\nf"\n')

    assert "7 lines that look like rows" in swallowed.notice
    assert (letter.problem, letter.notice) == ("", "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            't1\t"hello there\ts\nt2\ta fish\ts\nt3\tworld"\ts\n',
            ['"hello there', "a fish", 'world"'],
        ),
        ('1\t"say ""hi"""\n2\t5" nails\n3\t"a" b\n', ['say "hi"', '5" nails', '"a" b']),
    ],
)
def test_a_quote_between_tabs_is_a_letter_unless_it_closes_in_its_cell(
    text: str, expected: list[str]
):
    found = entries("id\tprompt\tcampaign\n" + text)
    assert [json.loads(entry.text)["prompt"] for entry in found] == expected

    with pytest.raises(FormatError, match=r"save cells of several lines as \.csv"):
        entries('id\tprompt\n1\t"a\nb"\n3\tc\n')


@given(
    st.lists(st.text(st.sampled_from('a" ,;\t\n'), min_size=1, max_size=9), min_size=1),
    st.sampled_from(["excel", "excel-tab"]),
)
def test_what_a_program_has_quoted_is_read_as_it_was(cells: list[str], dialect: str):
    if dialect == "excel-tab":  # a tab or a line's end ends a cell, in quotes, too
        cells = [" ".join(cell.split("\t")).replace("\n", " ") for cell in cells]
    written = io.StringIO()
    writer = csv.writer(written, dialect, lineterminator="\n")
    writer.writerow(["id", "prompt"])
    writer.writerows(enumerate(cells))

    found = entries(written.getvalue())
    assert [json.loads(entry.text)["prompt"] for entry in found] == cells

"""Quotes that were not meant: what an unclosed or a stray one may cost, and what it may not."""

import csv
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.formats.lines import Entry, FormatError
from loadgen.formats.tables import CsvRows


def entries(text: str, start: int = 0) -> list[Entry]:
    return list(CsvRows().entries(io.BytesIO(text.encode()), start))


def rows(first: int, last: int) -> str:
    return "".join(f"{number},a fish {number}\n" for number in range(first, last))


@pytest.mark.parametrize("last", [50, 20_000])
@pytest.mark.parametrize("wrong", ['12,"a fish\n', '12,"a" fish\n'])
def test_a_quote_that_is_missing_is_named_by_its_row(wrong: str, last: int) -> None:
    text = f"id,prompt\n{rows(1, 12)}{wrong}{rows(13, last)}"

    with pytest.raises(FormatError, match=r"^row 13, .* line 13: .* quote missing"):
        CsvRows().count(io.BytesIO(text.encode()))


def test_a_quote_that_closes_many_rows_later_is_named() -> None:
    (swallowed,) = entries(f'id,prompt\n1,"a\n{rows(2, 9)}9,b"\n')
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
    written = io.StringIO()
    writer = csv.writer(written, dialect, lineterminator="\n")
    writer.writerow(["id", "prompt"])
    writer.writerows(enumerate(cells))

    found = entries(written.getvalue())
    assert [json.loads(entry.text)["prompt"] for entry in found] == cells

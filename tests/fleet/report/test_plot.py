from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from fleet.report import plot
from fleet.report.plot import Bar, Line

DAY = 86_400


def drawing(html: str) -> ET.Element:
    """The first drawing in it, which is well-formed XML."""
    return ET.fromstring(html[: html.index("</svg>") + len("</svg>")])


def texts(svg: ET.Element) -> list[str]:
    return [text.text or "" for text in svg.iter("text")]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.03124, "0.0312"), (4.954, "4.95"), (4954.4, "4,954"), (30, "30"), (0.5, "0.5")],
)
def test_a_number_has_three_significant_digits(value: float, text: str) -> None:
    assert plot.number_text(value) == text


@pytest.mark.parametrize("highest", [0, 0.003, 1, 3, 32, 99.9, 101, 4954, 212_153])
def test_an_axis_ends_at_or_shortly_above_the_highest_value(highest: float) -> None:
    marks = plot._marks(highest)

    assert marks[0] == 0
    assert 2 <= len(marks) <= 6
    assert marks[-1] >= highest * 0.9999
    assert marks[-2] < max(highest, 0.001)


@pytest.mark.parametrize("seconds", [3, 60, 3600, DAY, 30 * DAY, 700 * DAY])
def test_a_time_axis_has_a_few_labels_whatever_its_length(seconds: int) -> None:
    line = Line("x", [(1_800_000_000, 1.0), (1_800_000_000 + seconds, 2.0)])

    svg = drawing(plot.time_plot([line], "x"))

    labels = [text for text in texts(svg) if re.search(r":|[A-Z]", text)]
    assert 1 <= len(labels) <= 8


def test_lines_stay_in_the_frame_and_have_their_values_as_titles() -> None:
    lines = [Line("a", [(0, 1.0), (10, 7.5)]), Line("b <", [(5, 3.0)])]

    html = plot.time_plot(lines, "images & more", filled=True)

    svg = drawing(html)
    assert svg.get("aria-label") == "images & more"
    for circle in svg.iter("circle"):
        assert 0 <= float(circle.get("cx") or -1) <= plot.WIDTH
        assert 0 <= float(circle.get("cy") or -1) <= plot.HEIGHT
    titles = [title.text for title in svg.iter("title")]
    assert titles[1] == "a: 7.5, 01 Jan 00:00:10 UTC"
    assert "b &lt;" in html


def test_the_length_of_a_bar_is_proportional_to_its_value() -> None:
    svg = drawing(plot.bars([Bar("a", 2, "two"), Bar("b", 1, "one"), Bar("c", 0, "0")], "x"))

    lengths = [float(bar.get("width") or 0) for bar in svg.iter("rect")]
    assert lengths[0] == pytest.approx(2 * lengths[1])
    assert lengths[2] == 0
    assert texts(svg) == ["a", "two", "b", "one", "c", "0"]


def test_a_histogram_has_a_bar_for_each_bin() -> None:
    svg = drawing(plot.histogram([(0, 1, 3), (1, 2, 0), (2, 3, 6)], "speeds", "/s"))

    heights = [float(bar.get("height") or 0) for bar in svg.iter("rect")]
    assert heights[2] == pytest.approx(2 * heights[0])
    assert heights[1] == 0


def test_no_data_gives_no_plot() -> None:
    assert plot.time_plot([], "x") == ""
    assert plot.bars([], "x") == ""
    assert plot.histogram([], "x", "s") == ""

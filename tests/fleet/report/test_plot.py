import re
from xml.etree import ElementTree as ET

import pytest

from fleet.report import plot
from fleet.report.plot import Bar

DAY = 86_400


def drawing(html: str) -> ET.Element:
    """The markup as XML, which must be well-formed."""
    return ET.fromstring(f"<div>{html}</div>")


def texts(markup: ET.Element, part: str) -> list[str]:
    """The labels in the element of this class."""
    return [
        each.text or "" for each in markup.iterfind(f".//div[@class='{part}']/span")
    ]


@pytest.mark.parametrize("highest", [0, 0.003, 1, 3, 32, 99.9, 101, 4954, 212_153])
def test_an_axis_ends_at_or_shortly_above_the_highest_value(highest: float) -> None:
    marks = plot._marks(highest)

    assert marks[0] == 0
    assert 2 <= len(marks) <= 6
    assert marks[-1] >= highest * 0.9999
    assert marks[-2] < max(highest, 0.001)


@pytest.mark.parametrize("seconds", [3, 60, 3600, DAY, 30 * DAY, 700 * DAY])
def test_a_time_axis_has_a_few_labels_whatever_its_length(seconds: int) -> None:
    points = [(1_800_000_000, 1.0), (1_800_000_000 + seconds, 2.0)]

    labels = texts(drawing(plot.time_plot({"x": points}, "x")), "ticks")

    assert 1 <= len(labels) <= 7
    assert all(re.search(r":|[A-Z]", label) for label in labels)


def test_lines_stay_in_the_frame_and_have_their_values_as_titles() -> None:
    lines = {"a": [(0, 1.0), (10, 7.5)], "b <": [(5, 3.0)]}

    html = plot.time_plot(lines, "images & more")

    plotted = drawing(html)
    (frame,) = plotted.iterfind("./div[@class='plot']")
    assert frame.get("aria-label") == "images & more: from 1 to 7.5"
    for path in plotted.iterfind(".//path"):
        if "point" in path.get("class", ""):
            x, y = re.findall(r"[\d.]+", path.get("d", ""))[:2]
            assert 0 <= float(x) <= plot.WIDTH
            assert 0 <= float(y) <= plot.HEIGHT
    titles = [title.text for title in plotted.iter("title")]
    assert titles[1] == "a: 7.5, 01 Jan 00:00:10 UTC"
    assert "b &lt;" in html


def test_no_text_shrinks_with_the_drawing() -> None:
    html = plot.time_plot({"a": [(0, 1.0), (3600, 7.5)]}, "x")

    assert not list(drawing(html).iter("text")), "text in a stretched drawing"
    assert texts(drawing(html), "values")
    assert texts(drawing(html), "ticks")


def test_labels_at_the_edges_do_not_leave_the_page() -> None:
    markup = drawing(plot.time_plot({"a": [(0, 1.0), (3600, 7.5)]}, "x"))

    sides = [
        each.get("class") for each in markup.iterfind(".//div[@class='ticks']/span")
    ]
    assert sides[0] == "first"
    assert sides[-1] == "last"


def test_the_length_of_a_bar_is_proportional_to_its_value() -> None:
    markup = drawing(
        plot.bars([Bar("a", 2, "two"), Bar("b", 1, "one"), Bar("c", 0, "0")], "x")
    )

    widths = [
        each.get("style")
        for each in markup.iter("span")
        if "bar" in each.get("class", "").split()
    ]
    assert widths == [
        "width:max(1px, 100.0%)",
        "width:max(1px, 50.0%)",
        "width:max(0px, 0.0%)",
    ]
    words = [
        each.text
        for each in markup.iter("span")
        if each.get("class") in {"name", "label"}
    ]
    assert words == ["a", "two", "b", "one", "c", "0"]


def test_no_data_gives_no_plot() -> None:
    assert plot.time_plot({}, "x") == ""
    assert plot.bars([], "x") == ""

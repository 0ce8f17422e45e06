"""Pictures are what they were, valid, harmless, and say everything in words, too.

`GOLDEN=write pytest tests/client/pictures` writes the golden files anew; look at them then.
"""

import math
import os
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from stratagem.client.pictures.curve import Line, curve
from stratagem.client.pictures.drawing.colours import DARK, LIGHT
from stratagem.client.pictures.drawing.lanes import Bar, merged
from stratagem.client.pictures.drawing.scales import Axis, duration, short
from stratagem.client.pictures.time_line import Span, time_line
from tests.client.pictures.samples import HOSTILE, make

pytestmark = pytest.mark.core

GOLDEN = Path(__file__).parent / "golden"
SVG = "{http://www.w3.org/2000/svg}"
SAMPLES, HOSTILE_SAMPLES = make(), make(HOSTILE)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_picture_is_what_it_was(name: str) -> None:
    path, drawn = GOLDEN / f"{name}.svg", SAMPLES[name](560).svg_file + "\n"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(drawn)
    assert drawn == path.read_text()


@pytest.mark.parametrize("width", [340, 720])
@pytest.mark.parametrize("name", SAMPLES)
def test_a_picture_is_valid_and_says_what_it_shows(name: str, width: int) -> None:
    picture = SAMPLES[name](width)
    root = ElementTree.fromstring(picture.svg)
    assert root.get("role") == "img"
    assert [child.tag for child in root][:2] == [f"{SVG}title", f"{SVG}desc"]
    assert root[0].text == "Sample"
    assert root[1].text
    assert len(picture.table.rows) >= 2
    assert all(len(row) == len(picture.table.headings) for row in picture.table.rows)
    for each in root.iter():
        assert "style" not in each.attrib
        assert not [attribute for attribute in each.attrib if attribute.startswith("on")]
        x, y = (float(each.get(at, 0)) for at in ("x", "y"))
        if each.tag == f"{SVG}rect":
            assert -6 <= x <= width  # signs of a legend stand around 0
            assert x + float(each.get("width", 0)) <= width + 1, each.attrib
        if each.tag == f"{SVG}text":
            assert -6 <= x <= width + 1, each.text
            assert y <= picture.height
    assert not re.search(r"\b(nan|inf)\b", picture.svg.replace("not finite", ""))


@pytest.mark.parametrize("name", SAMPLES)
def test_text_of_others_is_never_markup(name: str) -> None:
    picture = HOSTILE_SAMPLES[name](720)
    for text in (picture.svg_file, picture.table.to_html()):
        assert "<script" not in text
        assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", text)
        ElementTree.fromstring(text)
    # Nothing is drawn that would not be drawn without it.
    tags = [each.tag for each in ElementTree.fromstring(SAMPLES[name](720).svg).iter()]
    found = [each.tag for each in ElementTree.fromstring(picture.svg).iter()]
    assert sorted(set(found)) == sorted(set(tags))


def test_every_colour_is_known_in_light_and_dark_and_by_class() -> None:
    assert LIGHT.keys() == DARK.keys()
    for name, draw in SAMPLES.items():
        picture = draw(720)
        for fill in re.findall(r'(?:fill|stroke)="([^"]+)"', picture.svg):
            assert fill == "none" or fill in LIGHT.values(), f"{name}: {fill}"
        for used in re.findall(r"sg-[fs]-(\w+)", picture.svg):
            assert f".sg-f-{used}{{" in picture.svg_file


# ---- curves ----


def test_a_spike_of_one_step_in_thirty_thousand_is_drawn() -> None:
    values = [1.0] * 30_000
    values[12_345] = 9.0
    picture = curve([Line("loss", range(1, 30_001), values)], title="Loss")
    assert len(picture.svg) < 100_000
    tops = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", picture.svg)]
    assert min(tops) < 45 < max(tops)
    greatest = {row[picture.table.headings.index("greatest")] for row in picture.table.rows}
    assert greatest == {"1", "9"}


def test_a_line_breaks_where_a_value_is_not_finite() -> None:
    picture = curve([Line("loss", [1, 2, 3, 4], [1.0, math.inf, 2.0, 1.5])], title="Loss")
    lines = [each for each in ElementTree.fromstring(picture.svg).iter(f"{SVG}path")]
    starts = [each.get("d", "").count("M") for each in lines if each.get("stroke-width") == "1.8"]
    assert starts == [1, 1]
    assert "not finite at 2" in picture.svg
    assert ("loss", "2", "not finite") in [row[:3] for row in picture.table.rows]


def test_curves_of_nothing_of_one_value_and_of_zeros_can_be_drawn() -> None:
    empty = curve([Line("loss", [], [])], title="Loss")
    assert empty.description == "no value so far"
    for values in ([0.0], [0.0, 0.0], [5.0], [-3.0, -2.0], [1e-9, 1e12], [math.nan, math.nan]):
        for log in (False, True):
            line = Line("loss", range(1, len(values) + 1), values)
            ElementTree.fromstring(curve([line], title="Loss", log=log).svg)


# ---- lanes ----


def test_a_time_line_of_very_many_things_has_no_more_marks_than_pixels() -> None:
    spans = [
        Span(f"worker-{n % 4}", n * 0.01, n * 0.01 + 0.005, "segment", f"number {n}")
        for n in range(100_000)
    ]
    picture = time_line(spans, title="Time line")
    assert picture.svg.count("<rect") <= 4 * 720
    assert picture.table.rows[0][:3] == ("worker-0", "segment", "25000")


def test_bars_that_can_be_told_apart_stay_apart() -> None:
    x = Axis(0, 100, 0, 1000)
    wide = [Bar(0, 10.0 * n, 10.0 * n + 10, "s1", f"{n}") for n in range(5)]
    assert merged(wide, x) == wide
    narrow = [Bar(0, 0.05 * n, 0.05 * n + 0.02, "s1", f"{n}") for n in range(5)]
    other_lane = [Bar(1, 0.0, 0.02, "s1", "alone"), Bar(0, 0.0, 0.02, "s2", "another colour")]
    found = merged([*narrow, *other_lane], x)
    assert sorted(bar.count for bar in found) == [1, 1, 5]


def test_numbers_and_times_are_written_shortly() -> None:
    assert [short(v) for v in (0, 0.05, 12_000, 3e-5, 1234.5, 0.12345, 1e9, math.nan)] == [
        *("0", "0.05", "12,000", "3e-5", "1,234", "0.1235", "1e9", "not finite"),
    ]
    assert [duration(v) for v in (0.25, 12, 61, 3723, math.inf)] == [
        *("0.25 s", "12 s", "1:01", "1:02:03", "unknown"),
    ]

"""Pictures are what they were, valid, harmless, and say everything in words, too.

`GOLDEN=write pytest tests/client/pictures` writes the golden files anew; look at them then.
"""

import math
import os
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from stratagem.client.pictures.axes import Axis, duration, short
from stratagem.client.pictures.curves import Line, curve
from stratagem.client.pictures.lanes import Bar, Span, Stay, members, merge_bars, time_line
from stratagem.client.pictures.population import BOLD, Trial, parallel_axes
from stratagem.client.pictures.svg import DARK, LIGHT, Picture, width_of
from tests.client.pictures.samples import make
from tests.odd_texts import HARMFUL, ODD_TEXTS

pytestmark = pytest.mark.core

GOLDEN = Path(__file__).parent / "golden"
SVG = "{http://www.w3.org/2000/svg}"
SAMPLES = make()
ODD_SAMPLES = {name: make(text) for name, text in ODD_TEXTS.items()}


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
    """Nor is anything drawn that would not be drawn without it."""
    tags = {each.tag for each in ElementTree.fromstring(SAMPLES[name](720).svg).iter()}
    for odd, samples in ODD_SAMPLES.items():
        picture = samples[name](720)
        for text in (picture.svg_file, picture.table.to_html()):
            assert not HARMFUL.search(text), odd
            ElementTree.fromstring(text)
        assert {each.tag for each in ElementTree.fromstring(picture.svg).iter()} == tags, odd


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


def heights(picture: Picture, sign: str) -> list[float]:
    """The heights of all points of the lines of this width."""
    paths = ElementTree.fromstring(picture.svg).iter(f"{SVG}path")
    data = "".join(each.get("d", "") for each in paths if each.get("stroke-width") == sign)
    return [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", data)]


def test_the_first_steps_do_not_fix_the_scale_and_are_marked_at_the_edge() -> None:
    values = [90.0, 60.0, 30.0] + [2.0 - n / 500 for n in range(500)]
    picture = curve([Line("loss", range(1, 504), values)], title="Loss", height=260)
    drawn = heights(picture, "1.8")
    assert max(drawn) - min(drawn) > 150, "the other steps fill the frame"
    assert min(drawn) >= 24, "nothing is drawn above it"
    assert "loss 90 at 1</title>" in picture.svg
    assert "above the frame up to 90 at step 1" in picture.description
    assert picture.table.rows[0][-1] == "90"
    logarithmic = curve([Line("loss", range(1, 504), values)], title="Loss", log=True)
    assert "above the frame" not in logarithmic.description


def test_values_that_are_not_far_from_the_others_are_all_in_the_frame() -> None:
    for values in ([2.3 * 0.97**n for n in range(200)], [1.0] * 99 + [9.0], [5.0, 0.1, 0.1]):
        picture = curve([Line("loss", range(1, len(values) + 1), values)], title="Loss")
        assert "the frame" not in picture.description


def test_dots_of_a_long_run_stand_apart() -> None:
    steps = range(10, 20_001, 10)
    few = Line("test.loss", [10, 20, 30], [3.0, 2.0, 1.0], dots=True)
    many = Line("test.loss", steps, [1 / step for step in steps], dots=True)
    for line in (few, many):
        picture = curve([line], title="Loss", width=720)
        dots = [
            float(each.get("cx", 0))
            for each in ElementTree.fromstring(picture.svg).iter(f"{SVG}circle")
        ][1:]  # the first one is in the legend
        assert 3 <= len(dots) < 100
        assert all(after - before > 2 for before, after in pairwise(dots))


def test_axes_have_several_numbers_and_the_last_one_stays() -> None:
    line = Line("test.accuracy", [20, 40, 60, 80, 100], [0.81, 0.85, 0.88, 0.9, 0.91])
    for width, height in ((340, 150), (720, 190)):
        picture = curve([line], title="Accuracy", width=width, height=height)
        texts = [each.text for each in ElementTree.fromstring(picture.svg).iter(f"{SVG}text")]
        assert sum(str(text).startswith("0.") for text in texts) >= 2
        assert {"100", "step"} <= set(texts)


# ---- members ----


def test_a_worker_that_is_a_member_of_several_parties_has_a_lane_for_each() -> None:
    stays = [Stay("worker-0", f"member{n}", 0.0, 10.0) for n in range(3)]
    stays += [Stay("worker-0", "member3", 10.0, 20.0), Stay("worker-10", "", 0.0, None)]
    stays += [Stay("worker-2", "", 5.0, None)]
    root = ElementTree.fromstring(members(stays, title="Members", now=20.0).svg)
    bars = [each for each in root.iter(f"{SVG}rect") if each.get("height") == "14"]
    places = [tuple(float(each.get(at, 0)) for at in ("x", "y", "width")) for each in bars]
    assert len(places) == 6
    for x, y, width in places:
        others = [each for each in places if each[1] == y and each != (x, y, width)]
        assert all(x + width <= other[0] or other[0] + other[2] <= x for other in others)
    assert len({y for _, y, _ in places}) == 5, "the fourth follows the first in its lane"
    names = [each.text for each in root.iter(f"{SVG}text") if each.get("text-anchor") == "end"]
    assert names == ["worker-0", "worker-2", "worker-10"]


def test_a_thousand_workers_have_a_lane_each_in_a_picture_that_can_be_looked_at() -> None:
    stays = [Stay(f"worker-{n}", "", 0.0, None) for n in range(1000)]
    picture = members(stays, title="Members", now=20.0)
    assert picture.height < 2100
    assert picture.svg.count("still a member</title>") == 1000


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
        for n in range(8000)
    ]
    picture = time_line(spans, title="Time line")
    assert picture.svg.count("<rect") <= 4 * 720
    assert picture.table.rows[0][:3] == ("worker-0", "segment", "2000")


def test_many_thin_bars_between_gaps_are_few_elements_and_wide_ones_stay() -> None:
    """A browser reads and draws each element; 19,000 took it a second."""
    spans = [
        Span(f"worker-{n % 20}", 2.5 * n, 2.5 * n + 0.1, kind, f"{kind} {n}")
        for n in range(4000)
        for kind in ("segment", "commit", "evaluation")
    ]
    picture = time_line([*spans, Span("worker-0", 0.0, 900.0, "lost")], title="Time line")
    assert picture.svg.count("<") < 400
    assert len(picture.svg) < 300_000
    assert picture.svg.count("thin ones, first: ") == 60
    assert "lost, 15:00" in picture.svg
    few = time_line(spans[:60], title="Time line")
    assert few.svg.count("<rect") == 60 + 3, "few are drawn alone, besides the legend"


def test_bars_on_each_other_and_more_lanes_than_rows_are_few_elements() -> None:
    """Of 40,000 clients at the same time there were 40,000 lanes of two pixels each."""
    many = [Span("clients", 0.05 * n, 900.0 + 0.05 * n, "work", f"{n}") for n in range(4000)]
    assert time_line(many, title="Time line").svg.count("<") < 3000
    lanes_of_one = [Span(f"client-{n}", 0.0, 900.0, "work") for n in range(4000)]
    picture = time_line(lanes_of_one, title="Time line")
    assert picture.height < 2100
    assert picture.svg.count("<rect") <= 1001


def test_bars_that_can_be_told_apart_stay_apart() -> None:
    x = Axis(0, 100, 0, 1000)
    wide = [Bar(0, 10.0 * n, 10.0 * n + 10, "s1", f"{n}") for n in range(5)]
    assert merge_bars(wide, x) == wide
    narrow = [Bar(0, 0.05 * n, 0.05 * n + 0.02, "s1", f"{n}") for n in range(5)]
    other_lane = [Bar(1, 0.0, 0.02, "s1", "alone"), Bar(0, 0.0, 0.02, "s2", "another colour")]
    found = merge_bars([*narrow, *other_lane], x)
    assert sorted(bar.count for bar in found) == [1, 1, 5]


def test_numbers_and_times_are_written_shortly() -> None:
    assert [short(v) for v in (0, 0.05, 12_000, 3e-5, 1234.5, 0.12345, 1e9, math.nan)] == [
        *("0", "0.05", "12,000", "3e-5", "1,234", "0.1235", "1e9", "not finite"),
    ]
    assert [duration(v) for v in (0.25, 12, 61, 3723, math.inf)] == [
        *("0.25 s", "12 s", "1:01", "1:02:03", "unknown"),
    ]


# ---- parallel axes ----


@pytest.mark.parametrize("width", [330, 720])
def test_the_names_of_axes_never_overlap(width: int) -> None:
    names = ["optimizer.lr", "optimizer.momentum", "optimizer.weight_decay", "test.accuracy"]
    trials = [Trial("member 0", dict.fromkeys(names, 0.5))]
    drawn = ElementTree.fromstring(parallel_axes(names, trials, title="x", width=width).svg)
    by_line: dict[str, list[tuple[float, float]]] = {}
    for text in drawn.iter(f"{SVG}text"):
        if text.get("font-weight") == "600":
            x, half = float(text.attrib["x"]), width_of(text.text, BOLD) / 2
            by_line.setdefault(text.attrib["y"], []).append((x - half, x + half))
    assert sum(map(len, by_line.values())) == len(names)
    for spans in by_line.values():
        assert spans[0][0] >= 0
        assert spans[-1][1] <= width
        assert all(before[1] < after[0] for before, after in pairwise(spans))

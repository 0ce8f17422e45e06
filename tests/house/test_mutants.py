"""The list of changes that tests must see, and what finds new ones."""

import pytest

from tests.mutants.areas import AREAS, area_of
from tests.mutants.proposals import Change, proposals
from tests.mutants.runs import LIST, listed
from tests.repository import ROOT

pytestmark = pytest.mark.core

TEXT = """
def f(a: int = 1) -> int:
    if a < 2 and not g(a):
        raise ValueError(3 + 4)
    h(a)
    return min(a, len(b) - 1)
"""


def test_each_change_of_the_list_can_still_be_made() -> None:
    rows = listed(LIST.read_text())
    assert len({row.change for row in rows}) == len(rows) >= 150
    for row in rows:
        text = (ROOT / row.change.file).read_text()
        changed = row.change.applied(text)
        assert changed is not None, f"{row.change.file} has no line {row.change.line.strip()!r}"
        assert changed != text
        assert row.seen_by in {"test", "sweep", "soak"}
        assert row.seen_by == "test" or not AREAS[area_of(row.change.file)].is_strict


def test_proposals_change_what_functions_do() -> None:
    found = {each.becomes.strip() for each in proposals("f.py", TEXT)}
    assert found == {
        "if (a < 2 or not g(a)):",
        "if (a <= 2) and not g(a):",
        "if a < 3 and not g(a):",
        "if a < 2 and (g(a)):",
        "pass",
        "return max(a, len(b) - 1)",
        "return min(a, (len(b) + 1))",
        "return min(a, len(b) - 2)",
    }


def test_a_change_is_made_in_the_line_that_is_meant() -> None:
    text = "a\nb\na\n"
    assert Change("f", "a", "c", 1).applied(text) == "a\nb\nc\n"
    assert Change("f", "a", "c", 2).applied(text) is None

"""The table of nestings: what is taken beyond a single worker is shown by an example."""

from docs.nesting import INNER, OUTER, nesting_table, why_not
from tests.repository import ROOT


def test_what_the_synchronous_strategies_hold_is_shown_by_an_example_that_is_there() -> None:
    rows = [line.split(" | ")[1:] for line in nesting_table().splitlines() if line[:3] == "| `"]
    for inner, cells in zip(INNER, rows, strict=True):
        for outer, cell in zip(OUTER, cells, strict=True):
            assert ("no (" in cell) == bool(why_not(outer, inner)), (outer, inner)
            is_plain = inner == "Local" or outer in ("Federated", "PopulationBased")
            assert "[yes](" in cell or "no (" in cell or is_plain, (outer, inner)
    linked = [each.split(")")[0] for each in nesting_table().split("[yes](")[1:]]
    assert linked
    assert all((ROOT / "docs/reference/strategies" / each).exists() for each in linked)

"""What tests with real processes prove, and where they run: `python -m tests.promises [--write]`.

Each test of these folders has the marker `promise`, a sentence that says what it alone proves. Owns
the table of them, which is printed, or written into its page.
"""

import io
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.repository import ROOT

FOLDERS = ("tests/cluster", "tests/crash", "tests/hostile", "tests/identity")
MOST = 60
"""So many of their tests are in `make test`: one cluster of real processes for each promise."""
PAGE = ROOT / "tests" / "README.md"
TIERS = ("test", "sweep", "soak")
ELSEWHERE = ("docker", "interop", "browser", "launch")
_TABLE = re.compile(r"(<!-- promises -->\n).*?(<!-- end of promises -->)", re.DOTALL)

Found = Mapping[str, Mapping[str, Counter[str]]]
"""Of each promise and each tier: how many tests of which files."""


class Collected:
    """A plugin that keeps the tests that pytest has found."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Counter[str]]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            promise = item.get_closest_marker("promise")
            if promise is not None and not any(map(item.get_closest_marker, ELSEWHERE)):
                row = sentence(promise.args[0])
                tiers = self.found.setdefault(row, {each: Counter() for each in TIERS})
                tiers[tier_of(item)][item.path.name] += 1


def sentence(promise: str) -> str:
    """How a promise stands in the table."""
    return promise[:1].upper() + promise[1:].rstrip(".")


def tier_of(item: pytest.Item) -> str:
    """The command that runs a test."""
    return next((each for each in TIERS[:0:-1] if item.get_closest_marker(each)), TIERS[0])


def collected() -> Found:
    """What pytest collects in the folders, in this process."""
    plugin, said = Collected(), io.StringIO()
    with redirect_stdout(said):
        status = pytest.main(["--collect-only", "-q", *FOLDERS], plugins=[plugin])
    if status != pytest.ExitCode.OK:
        raise RuntimeError(said.getvalue())
    return plugin.found


def table_of(found: Found) -> str:
    """The table, as it stands in the page."""
    rows = [
        f"| {promise} | {_counts(tiers)} | {_files(tiers.values())} |"
        for promise, tiers in sorted(found.items())
    ]
    sums = {each: sum((tiers[each] for tiers in found.values()), Counter()) for each in TIERS}
    head = f"| promise | {'/'.join(TIERS)} | files |\n|---|---|---|"
    return "\n".join([head, *rows, f"| all | {_counts(sums)} | |"])


def _counts(tiers: Mapping[str, Counter[str]]) -> str:
    return "/".join(str(tiers[each].total()) for each in TIERS)


def _files(tiers: Iterable[Counter[str]]) -> str:
    names = sorted({name.removesuffix(".py") for files in tiers for name in files})
    return ", ".join(f"`{name}`" for name in names)


def page_with(table: str, page: Path = PAGE) -> str:
    """The page with this table in it."""
    text, num = _TABLE.subn(lambda each: f"{each[1]}{table}\n{each[2]}", page.read_text())
    assert num == 1, page
    return text


if __name__ == "__main__":
    made = table_of(collected())
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page_with(made))
    else:
        print(made)

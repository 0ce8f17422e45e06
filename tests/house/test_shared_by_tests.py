"""What several tests need stands once, in a module beside them, and in none of tests.

Who imports a module of tests runs its module-level code, and breaks when a test is renamed or
split. Each second factory of jobs had other defaults for the same sections.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from itertools import combinations, product

import pytest

from tests.every_pair import every_pair, every_value
from tests.repository import ROOT

pytestmark = pytest.mark.core

TESTS = ROOT / "tests"
FOLDERS = ("tests", "benchmarks", "docs", "examples")
OF_TESTS = re.compile(r"tests\.(?:\w+\.)*(?:test_\w+|conftest)(?:\.|$)")
IN_PROGRAMS = re.compile(r"^\s*(?:from|import)\s+(tests\.[\w.]+)", re.MULTILINE)
NAMED = re.compile(r"(?<!def )\b(?:test_\w+|conftest)\b")
"""In no file that imports none."""
IMPORTED = "tests.core.test_runs"


def test_there_is_one_factory_of_jobs_and_one_package_of_what_users_would_write() -> None:
    found = [path for path in TESTS.rglob("*.py") if re.search(r"\bdef job\(", path.read_text())]
    assert found == [TESTS / "jobs.py"]
    packages = [path.relative_to(TESTS) for path in TESTS.rglob("userland*")]
    assert [str(path) for path in packages if path.suffix != ".pyc"] == ["userland"]


def imports_of_tests(module: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """The line and the module of each import of a module of tests.

    The programs in literals, which run in processes of their own, are looked through as well.
    """
    for node in module:
        match node:
            case ast.Import(names=names):
                targets = [alias.name for alias in names]
            case ast.ImportFrom(module=str(source), names=names):
                targets = [f"{source}.{alias.name}" for alias in names]
            case ast.Constant(value=str(text)) if "tests." in text:
                targets = IN_PROGRAMS.findall(text)
            case _:
                continue
        found = {target for target in targets if OF_TESTS.match(target)}
        yield from ((getattr(node, "lineno", 0), target) for target in sorted(found))


def test_no_module_of_tests_is_imported() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {target}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if NAMED.search(path.read_text())
        for line, target in imports_of_tests(ast.walk(ast.parse(path.read_text())))
    ]
    assert not found, "move what is shared into a module beside them: " + "; ".join(found)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (f"import {IMPORTED}", IMPORTED),
        (f"from {IMPORTED} import LOCAL", f"{IMPORTED}.LOCAL"),
        ("from tests.core import test_runs as runs", IMPORTED),
        (f"def f() -> None:\n    from {IMPORTED} import x", f"{IMPORTED}.x"),
        ("import " + "tests.conftest", "tests.conftest"),
        (f"PROGRAM = 'import sys\\nfrom {IMPORTED} import LOCAL'", IMPORTED),
        ("from tests.core.jobs import LOCAL", ""),
        ("from stratagem.common import test_runs", ""),
        ("'the file tests/core/test_runs.py'", ""),
    ],
)
def test_every_way_to_import_one_is_seen(line: str, found: str) -> None:
    assert not found or NAMED.search(line)
    targets = [target for _, target in imports_of_tests(ast.walk(ast.parse(line)))]
    assert targets == ([found] if found else [])


@pytest.mark.parametrize("sizes", [(2, 2), (4, 3, 2, 2), (3, 1, 5), (4, 2, 2), (1, 1)], ids=str)
def test_any_two_values_of_two_factors_meet_in_few_rows(sizes: tuple[int, ...]) -> None:
    factors = [[f"{name}{i}" for i in range(n)] for name, n in zip("abcd", sizes, strict=False)]
    rows = every_pair(*factors)
    for i, j in combinations(range(len(sizes)), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(factors[i], factors[j]))
    two_largest = sorted(sizes)[-2:]
    assert len(rows) <= two_largest[0] * two_largest[1] + 2
    assert rows == every_pair(*factors)
    assert every_value("abc", [1, 2]) == [("a", 1), ("b", 2), ("c", 1)]

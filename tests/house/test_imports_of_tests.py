"""Nobody imports a module of tests: what several of them need stands in a module beside them.

Who imports one runs its module-level code, and breaks when a test is renamed or split.
"""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.house.source import tree
from tests.repository import ROOT

pytestmark = pytest.mark.core

FOLDERS = ("tests", "benchmarks", "docs", "examples")
OF_TESTS = re.compile(r"tests\.(?:\w+\.)*(?:test_\w+|conftest)(?:\.|$)")
IN_PROGRAMS = re.compile(r"^\s*(?:from|import)\s+(tests\.[\w.]+)", re.MULTILINE)


def imports_of_tests(module: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and the module of each import of a module of tests.

    The programs in literals, which run in processes of their own, are looked through as well.
    """
    for node in ast.walk(module):
        match node:
            case ast.Import(names=names):
                targets = [alias.name for alias in names]
            case ast.ImportFrom(module=str(source), names=names):
                targets = [f"{source}.{alias.name}" for alias in names]
            case ast.Constant(value=str(text)):
                targets = IN_PROGRAMS.findall(text)
            case _:
                continue
        found = {target for target in targets if OF_TESTS.match(target)}
        yield from ((node.lineno, target) for target in sorted(found))


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_module_of_tests_is_imported(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {target}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, target in imports_of_tests(tree(path))
    ]
    assert not found, "move what is shared into a module beside them: " + "; ".join(found)


IMPORTED = "tests.core.test_runs"


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
    targets = [target for _, target in imports_of_tests(ast.parse(line))]
    assert targets == ([found] if found else [])

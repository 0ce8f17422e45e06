"""What all tests share is there once: the job, and what users would write.

Each second factory of jobs had other defaults for the same sections, and each second set of models
had the same models again.
"""

import ast

import pytest

from tests.house.source import tree
from tests.repository import ROOT

pytestmark = pytest.mark.core

TESTS = ROOT / "tests"


def test_one_factory_makes_the_jobs_of_tests() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted(TESTS.rglob("*.py"))
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef) and node.name == "job"
    ]
    (place,) = found
    assert place.startswith("tests/jobs.py:")


def test_one_package_has_what_users_would_write() -> None:
    found = [path.relative_to(TESTS) for path in TESTS.rglob("userland*") if path.suffix != ".pyc"]
    assert list(map(str, found)) == ["userland"]

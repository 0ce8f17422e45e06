"""Each test with real processes says what it alone proves, and few of them are in `make test`."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.house.source import tree
from tests.promises import FOLDERS, MOST, PAGE, sentence
from tests.repository import ROOT

ROW = re.compile(r"^\| (?P<promise>[^|]+) \| (?P<num>\d*)[^|]*\|", re.MULTILINE)


def promises_in(text: str) -> list[str]:
    """The sentences of the markers `promise` in a piece of source."""
    return [
        ast.literal_eval(each.args[0])
        for each in ast.walk(ast.parse(text))
        if isinstance(each, ast.Call) and ast.unparse(each.func) == "pytest.mark.promise"
    ]


def promises() -> Iterator[tuple[str, list[str]]]:
    """Each test of the folders that starts real processes, and what it says that it proves."""
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("test_*.py")):
        body = tree(path).body
        marked = [each for each in body if isinstance(each, ast.Assign)]
        of_all = "".join(
            ast.unparse(e) for e in marked if "pytestmark" in ast.unparse(e.targets[0])
        )
        for node in body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                own = "\n".join(map(ast.unparse, node.decorator_list))
                said = promises_in(own) or promises_in(of_all)
                if said or "pytest.mark.cluster" in own + of_all:
                    yield f"{path.relative_to(ROOT)}::{node.name}", said


@pytest.mark.core
def test_each_test_with_real_processes_says_what_it_alone_proves() -> None:
    said = dict(promises())
    assert [name for name, texts in said.items() if len(texts) != 1] == []
    rows = {row["promise"]: int(row["num"] or 0) for row in ROW.finditer(PAGE.read_text())}
    most = rows.pop("all")
    del rows["promise"]
    assert rows.keys() == {sentence(text) for texts in said.values() for text in texts}
    assert most == sum(rows.values()) <= MOST


@pytest.mark.sweep
def test_the_table_of_promises_is_current() -> None:
    command = [sys.executable, "-m", "tests.promises"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout in PAGE.read_text(), "run `python -m tests.promises --write`"

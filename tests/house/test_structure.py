"""Rules of the house that a machine can check."""

import ast
import re
from pathlib import Path

import pytest

from stratagem.common.process.failpoints import FAILPOINTS
from tests.generate_stubs import generate
from tests.house.source import product_files, tree
from tests.repository import ROOT

pytestmark = pytest.mark.core

SOURCES = {
    part: ROOT / part / "stratagem"
    for part in ("common", "coordinator", "worker", "tools", "client")
}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
ALLOWED = {
    "common": {"common", "v1"},
    "coordinator": {"coordinator", "common", "v1"},
    "worker": {"worker", "common", "v1"},
    "tools": {"tools", "worker", "common", "v1"},
    "client": {"client", "common", "v1"},
}
PURE = ("coordinator/stratagem/coordinator/core", "coordinator/stratagem/coordinator/strategies")


def modules(part: str) -> list[Path]:
    return [path for path in SOURCES[part].rglob("*.py") if "/v1/" not in str(path)]


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("part", SOURCES)
def test_imports_point_down(part: str) -> None:
    for path in modules(part):
        for name in imported(path):
            if name.startswith("stratagem."):
                assert name.split(".")[1] in ALLOWED[part], f"{path} imports {name}"


def test_nobody_draws_from_the_generator_that_user_code_draws_from() -> None:
    for path in product_files():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "random":
                allowed = {"Random", "seed", "getstate", "setstate"}
                assert node.attr in allowed, f"{path}: {ast.unparse(node)}"


@pytest.mark.parametrize("folder", PURE)
def test_pure_core_knows_no_io(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        roots = {name.partition(".")[0] for name in imported(path)}
        forbidden = roots & {"grpc", "asyncio", "torch", "time", "os", "threading", "socket"}
        assert not forbidden, f"{path} imports {forbidden}"


def test_no_pickle_anywhere() -> None:
    for path in product_files():
        roots = {name.partition(".")[0] for name in imported(path)}
        assert not roots & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, path
        text = path.read_text()
        assert "torch.load" not in text, path
        assert "allow_pickle=True" not in text, path


def test_namespace_has_no_file_of_its_own() -> None:
    for root in SOURCES.values():
        assert [path.name for path in root.iterdir() if path.is_file()] == []
        for package in root.iterdir():
            if package.name != "__pycache__":
                assert (package / "py.typed").exists(), package


def test_files_and_functions_stay_small() -> None:
    for path in product_files():
        text = path.read_text()
        assert len(text.splitlines()) <= MAX_FILE_LINES, path
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                assert lines <= MAX_FUNCTION_LINES, f"{path}: {node.name} has {lines} lines"


def test_every_module_says_what_it_owns() -> None:
    for path in product_files():
        text = path.read_text()
        if text.strip():
            assert ast.get_docstring(tree(path)), path


def test_failpoints_are_placed_exactly_once() -> None:
    placed = [
        name
        for path in product_files()
        for name in re.findall(r'failpoint\(\s*"([^"]+)"', path.read_text())
    ]
    assert sorted(placed) == sorted(FAILPOINTS)


def test_committed_stubs_are_what_the_protos_say(tmp_path: Path) -> None:
    generate(tmp_path)
    for fresh in sorted((tmp_path / "stratagem" / "v1").iterdir()):
        committed = ROOT / "common" / "stratagem" / "v1" / fresh.name
        assert committed.read_text() == fresh.read_text(), f"{fresh.name}: run `make proto`"

"""The size of the product, and its vague names, which may fall and not rise: lower a bound when
you are below it.

A capability that needs more lines raises `LINES` in its own commit, which says what users get.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.source import circles, imported, nodes, product, product_files
from tests.repository import ROOT

pytestmark = pytest.mark.core

MODULES = 434
FOLDERS = 70
LINES = 122_750
ONE_IMPORTER = 82
"""Modules that exactly one other module imports: most of these belong into that one."""
SHORT_LINES = 60
SHORT = {
    # programs, and what runs before anything heavy may be imported
    *("common.health", "coordinator.__main__", "worker.__main__", "common.process.parent_guard"),
    *("common.process.file_descriptors", "common.process.process_exit", "common.rpc.health_probe"),
    # what imports an optional or a heavy package, or keeps one from being imported
    *("client.dashboard.start", "client.sdk.torch_states", "common.observe.otlp"),
    *("worker.numerics.deferred_compiler",),
    # below what would otherwise be a circle of modules
    *("coordinator.strategies.synchronous.strategy", "common.privacy.adaptive_clipping"),
    "coordinator.strategies.synchronous.local",
    # one idea that many use
    *("common.base.retry", "common.base.units", "common.numerics.rules"),
    "common.numerics.verification",
}
VAGUE_WORDS = frozenset({"own", "each", "found", "told", "kept", "shown", "taken", "known", "left"})
VAGUE_NAMES = {"common": 0, "coordinator": 45, "worker": 37, "tools": 81, "client": 0}
"""Variables and parameters of each part that consist of such words: a noun says what is in them."""


def test_the_product_has_no_more_modules_folders_and_lines_than_before() -> None:
    modules = [each for each in product().values() if not each.is_package]
    lines = sum(len(each.path.read_text().splitlines()) for each in product().values())
    assert len(modules) <= MODULES
    assert len({each.folder for each in product().values()}) <= FOLDERS
    assert lines <= LINES


def test_a_module_is_short_only_for_a_reason() -> None:
    short = {
        name
        for name, each in product().items()
        if not each.is_package and ".migrations." not in name
        if len(each.path.read_text().splitlines()) < SHORT_LINES
    }
    assert short == SHORT


def test_few_modules_serve_one_other() -> None:
    into = Counter(name for each in product().values() for name in imported(each))
    alone = [name for name, count in into.items() if count == 1 and not product()[name].is_package]
    assert len(alone) <= ONE_IMPORTER, sorted(alone)


def test_no_modules_import_each_other_in_a_circle() -> None:
    arrows = {name: imported(each) - {name} for name, each in product().items()}
    assert not circles(arrows)


def vague_names(path: Path) -> Iterator[str]:
    """Yield the variables and parameters of a file that consist of vague words; the fields of a
    class, which others use, may be called so."""
    statements = [s for node in nodes(path) if isinstance(node, ast.ClassDef) for s in node.body]
    fields = {id(s.target) for s in statements if isinstance(s, ast.AnnAssign)}
    for node in nodes(path):
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.MatchAs(name=str(name))
            ):
                is_vague = VAGUE_WORDS.issuperset(name.strip("_").split("_"))
                if is_vague and id(node) not in fields:
                    yield name


def test_variables_are_named_after_what_is_in_them() -> None:
    names: dict[str, list[str]] = {part: [] for part in VAGUE_NAMES}
    for path in product_files():
        names[path.relative_to(ROOT).parts[0]] += vague_names(path)
    for part, bound in VAGUE_NAMES.items():
        assert len(names[part]) <= bound, f"{part}: {sorted(set(names[part]))}"

"""Which way the product's modules may import each other, and how its folders are filled."""

from collections import Counter

import pytest

from tests.house.source import circles, folder_arrows, foreign, imported, product, reachable
from tests.house.symbols import public_classes, public_symbols, used_symbols
from tests.repository import ROOT

pytestmark = pytest.mark.core

MAX_MODULES = 20
"""In one folder, beside its `__init__.py`."""
BELOW = {"tools": "worker"}
"""What a part may import besides itself, what is common and what is generated."""
PURE = ("coordinator.core", "coordinator.strategies")
IMPURE = frozenset({"asyncio", "grpc", "importlib", "torch"})
"""What nothing that they reach may import."""
OUTSIDE = IMPURE | {"time", "os", "threading", "socket"}
"""What they may not import themselves."""
CLASS_NAMES = {"DataParallel": 2, "ModelParallel": 2}
"""Names of several classes, and of how many at most: these stand in the text of jobs, under
`strategy` and under `execution.parallelism`."""


def test_imports_point_down() -> None:
    for module in product().values():
        part = module.path.relative_to(ROOT).parts[0]
        into = {name.partition(".")[0] for name in imported(module)}
        assert into <= {part, "common", BELOW.get(part)}, module.path


def test_the_folders_of_a_package_form_no_circle() -> None:
    arrows = folder_arrows()
    for part in {folder.partition(".")[0] for folder in arrows}:
        inside = {
            folder: frozenset(each for each in into if each.partition(".")[0] == part)
            for folder, into in arrows.items()
            if folder.partition(".")[0] == part
        }
        found = circles(inside)
        told = {each: sorted(arrows[each] & found) for each in sorted(found)}
        assert not told, f"folders that import each other in a circle: {told}"


def test_a_circle_is_found_and_what_only_leads_to_it_is_not() -> None:
    arrows = {"a": "b", "b": "c", "c": "b", "d": "", "e": "db"}
    assert circles({node: frozenset(into) for node, into in arrows.items()}) == {"b", "c"}
    between = {"a": "b", "b": "ac", "c": "d", "d": "e", "e": "d"}
    assert circles({node: frozenset(into) for node, into in between.items()}) == set("abde")


def test_no_folder_holds_more_modules_than_can_be_looked_over_and_roots_only_programs() -> None:
    modules = [each for each in product().values() if not each.is_package]
    counts = Counter(each.folder for each in modules)
    full = {folder: count for folder, count in counts.items() if count > MAX_MODULES}
    assert not full, f"more than {MAX_MODULES} modules: {full}"
    loose = [
        each.name
        for each in modules
        if "." not in each.folder and '__name__ == "__main__"' not in each.path.read_text()
    ]
    assert not loose, f"put these into a folder: {loose}"


def test_the_core_needs_nothing_that_waits_or_looks_outside() -> None:
    core = [name for name in product() if name.startswith(PURE)]
    found = {name: foreign(product()[name]) & IMPURE for name in reachable(core)}
    found |= {name: foreign(product()[name]) & OUTSIDE for name in core}
    assert not any(found.values()), {name: those for name, those in found.items() if those}


def test_no_public_name_is_there_for_tests_alone() -> None:
    unused = sorted(f"{module}.{name}" for module, name in public_symbols() - used_symbols())
    assert not unused, f"nobody but tests uses these: move them there, or delete them: {unused}"


def test_a_class_has_its_name_alone() -> None:
    counts = Counter(name for _, name in public_classes())
    assert {name: count for name, count in counts.items() if count > 1} == CLASS_NAMES

"""Which way the product's modules may import each other, and how its folders are filled.

What breaks these rules today stands in allowed.py, which may only shrink.
"""

from collections import Counter

import pytest

from tests.house import allowed
from tests.house.source import circles, folder_arrows, foreign, product, reachable
from tests.house.symbols import public_classes, public_symbols, used_symbols

pytestmark = pytest.mark.core

MAX_MODULES = 16
"""In one folder, beside its `__init__.py`."""

PURE = ("coordinator.core", "coordinator.strategies")
IMPURE = frozenset({"asyncio", "grpc", "importlib", "torch"})


def test_the_folders_of_a_package_form_no_circle() -> None:
    arrows = folder_arrows()
    found: set[str] = set()
    for part in {folder.partition(".")[0] for folder in arrows}:
        inside = {
            folder: frozenset(each for each in into if each.partition(".")[0] == part)
            for folder, into in arrows.items()
            if folder.partition(".")[0] == part
        }
        found |= circles(inside)
    told = {
        each: sorted(arrows[each] & found) for each in sorted(found - allowed.FOLDERS_IN_CIRCLES)
    }
    assert not told, f"folders that import each other in a circle: {told}"
    no_longer = sorted(allowed.FOLDERS_IN_CIRCLES - found)
    assert not no_longer, f"in no circle any more, so take them out of allowed.py: {no_longer}"


def test_a_circle_is_found_and_what_only_leads_to_it_is_not() -> None:
    arrows = {"a": "b", "b": "c", "c": "b", "d": "", "e": "db"}
    assert circles({node: frozenset(into) for node, into in arrows.items()}) == {"b", "c"}
    between = {"a": "b", "b": "ac", "c": "d", "d": "e", "e": "d"}
    assert circles({node: frozenset(into) for node, into in between.items()}) == set("abde")


def test_no_folder_holds_more_modules_than_can_be_looked_over() -> None:
    counts = Counter(each.folder for each in product().values() if not each.is_package)
    full = {folder: count for folder, count in counts.items() if count > MAX_MODULES}
    fuller = {f: n for f, n in full.items() if n > allowed.MODULES_IN_FOLDERS.get(f, MAX_MODULES)}
    assert not fuller, f"more than {MAX_MODULES} modules, or than allowed.py says: {fuller}"
    no_longer = sorted(allowed.MODULES_IN_FOLDERS.keys() - full.keys())
    assert not no_longer, f"not too full any more, so take them out of allowed.py: {no_longer}"


def test_no_module_lies_loose_at_the_root_of_a_package() -> None:
    loose = {
        each.name
        for each in product().values()
        if each.folder.count(".") == 0 and not each.is_package and each.path.name != "__main__.py"
    }
    new = sorted(loose - allowed.LOOSE_MODULES)
    assert not new, f"put these into a folder: {new}"
    no_longer = sorted(allowed.LOOSE_MODULES - loose)
    assert not no_longer, f"not loose any more, so take them out of allowed.py: {no_longer}"


def test_the_core_needs_nothing_that_waits_or_looks_outside() -> None:
    core = (name for name in product() if name.startswith(PURE))
    found = {
        (name, package) for name in reachable(core) for package in foreign(product()[name]) & IMPURE
    }
    new, no_longer = sorted(found - allowed.IMPURE_IMPORTS), sorted(allowed.IMPURE_IMPORTS - found)
    assert not new, f"the core reaches modules with these imports: {new}"
    assert not no_longer, f"take these out of allowed.py: {no_longer}"


def test_no_public_name_is_there_for_tests_alone() -> None:
    unused = {f"{module}.{name}" for module, name in public_symbols() - used_symbols()}
    new, no_longer = sorted(unused - allowed.UNUSED_NAMES), sorted(allowed.UNUSED_NAMES - unused)
    assert not new, f"nobody but tests uses these: move them there, or delete them: {new}"
    assert not no_longer, f"take these out of allowed.py: {no_longer}"


def test_a_class_has_its_name_alone() -> None:
    counts = Counter(name for _, name in public_classes())
    double = {name: count for name, count in counts.items() if count > 1}
    more = {n: count for n, count in double.items() if count > allowed.CLASS_NAMES.get(n, 1)}
    assert not more, f"several modules define a class of this name: {more}"
    no_longer = sorted(allowed.CLASS_NAMES.keys() - double.keys())
    assert not no_longer, f"unique now, so take them out of allowed.py: {no_longer}"

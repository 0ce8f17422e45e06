"""The size of the product, which may fall and not rise: lower a bound when you are below it.

A capability that needs more lines raises `LINES` in its own commit, which says what users get.
"""

from collections import Counter

import pytest

from tests.house.source import circles, imported, product

pytestmark = pytest.mark.core

MODULES = 433
FOLDERS = 70
LINES = 121_250
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
IN_CIRCLES = {
    *("coordinator.core.state", "coordinator.core.strategy_contract"),
}
"""One circle, closed by an import for types alone: the contract of strategies."""


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


def test_no_further_modules_import_each_other_in_a_circle() -> None:
    arrows = {name: imported(each) - {name} for name, each in product().items()}
    assert circles(arrows) == IN_CIRCLES

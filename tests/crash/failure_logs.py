"""The logs of the processes beside every failure of a test that has started them."""

from collections.abc import Callable, Generator

import pytest

LOGS = pytest.StashKey[Callable[[], list[tuple[str, str]]]]()
"""Asked for the ends of the logs when the test fails."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    logs = item.stash.get(LOGS, None)
    if report.failed and logs is not None:
        report.sections += [(f"log of {name}", text) for name, text in logs()]
    return report

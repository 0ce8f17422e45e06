"""The logs of the processes beside every failure, as in the crash tests."""

from tests.crash.conftest import pytest_runtest_makereport

__all__ = ["pytest_runtest_makereport"]

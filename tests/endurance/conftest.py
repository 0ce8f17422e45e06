"""The logs of the processes beside every failure, as in the crash tests."""

from tests.crash.failure_logs import pytest_runtest_makereport

__all__ = ["pytest_runtest_makereport"]

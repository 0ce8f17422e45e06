"""For all tests: what none may leave to the next or take from the machine, and one PostgreSQL."""

import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings
from xdist.remote import Producer  # type: ignore[import-untyped]
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]
from xdist.workermanage import NodeManager  # type: ignore[import-untyped]

from tests.cpu_seconds import CpuSeconds
from tests.left_behind import LeftBehind
from tests.patience import AT_ONCE_S
from tests.postgres import Postgres

# A busy machine is not a slow function.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeated", parent=settings.get_profile("patient"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "patient"))

# A server in a test's own process logs what it is made to raise: to draw that takes 75 ms.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ]
)

# A shell without job control starts what it puts in the background deaf to Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-seconds", type=Path, metavar="FILE", help="write those of each test")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuSeconds(config.getoption("--cpu-seconds")), "cpu_seconds")
    # The process that hands tests to others; one that runs them has its folders until it ends.
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(LeftBehind(), "left_behind")
        # One that is killed because a busy machine lets it end slowly leaves a folder behind.
        NodeManager.EXIT_TIMEOUT = AT_ONCE_S


SHARE = ("tests/cluster", "tests/crash", "tests/coordinator/store", "tests/house")


class WithItsCluster(LoadFileScheduling):  # type: ignore[misc]
    """Gives the tests of a file to one process, and those of a folder that share servers, or
    what they have parsed."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        folder = file.rpartition("/")[0]
        return folder if folder in SHARE else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """By `--dist loadfile`."""
    return WithItsCluster(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """One thread: bits depend on how many there are, and the last test may have changed it."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test keeps what it has opened until its traceback goes: nobody else is to blame."""
    report = yield
    if report.failed:
        for kind in ("Unraisable", "UnhandledThread"):
            line = f"ignore::pytest.Pytest{kind}ExceptionWarning"
            item.config.addinivalue_line("filterwarnings", line)
    return report


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A server for those who ask for it; a test that stops it starts it again."""
    with Postgres() as server:
        yield server

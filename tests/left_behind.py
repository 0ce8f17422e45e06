"""Nothing stays behind: after the tests no process, no shared memory and no temporary file is left.

All that tests start and write gets a temporary folder of this session's own by `TMPDIR`, which is
also the mark by which its processes are known.
"""

import contextlib
import getpass
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import psutil
import pytest

from stratagem.common.process.process import remove_temporary
from tests.patience import AT_ONCE_S

SHARED_MEMORY = Path("/dev/shm")
TRACKERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""End with the process that has started them, which may be this one."""


class LeftBehind:
    """Fails the whole of the tests; for the process that hands them to others, and runs none."""

    def __init__(self, patience_s: float = AT_ONCE_S) -> None:
        self._patience_s = patience_s
        before = tempfile.gettempdir()
        # What pytest keeps of failed tests is looked at afterwards.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", before)
        self._folder = Path(tempfile.mkdtemp(prefix="tests-", dir=before))
        # What torch has compiled is there for the next tests, as it is without these.
        cache = Path(before, f"torchinductor_{getpass.getuser()}")
        cache.mkdir(exist_ok=True)
        (self._folder / cache.name).symlink_to(cache)
        self._before = set(_names(self._folder))
        self._shared = set(_names(SHARED_MEMORY))
        os.environ["TMPDIR"] = tempfile.tempdir = str(self._folder)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None]:
        yield
        found = [*self._processes(), *self._files(), *self._shared_memory()]
        shutil.rmtree(self._folder, ignore_errors=True)
        if found:
            print("\nleft behind by the tests:", *found, sep="\n  ")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _processes(self) -> Iterator[str]:
        """Those that do not end by themselves at once, as many do whose parent has ended."""
        alive = psutil.wait_procs([*self._marked()], timeout=self._patience_s)[1]
        for process in alive:
            with contextlib.suppress(psutil.Error):
                yield f"process {process.pid}: {' '.join(process.cmdline())[:200]}"
                process.kill()

    def _marked(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid == os.getpid() or any(
                    each in " ".join(process.cmdline()) for each in TRACKERS
                ):
                    continue
                if process.environ().get("TMPDIR") == str(self._folder):
                    yield process

    def _files(self) -> Iterator[str]:
        remove_temporary(self._folder)  # of workers that a test killed last: the next would do it
        for name in _names(self._folder):
            if name not in self._before:
                yield f"in the temporary folder: {name}"

    def _shared_memory(self) -> Iterator[str]:
        """That nobody uses: others work on this machine as well."""
        new = [SHARED_MEMORY / each for each in _names(SHARED_MEMORY) if each not in self._shared]
        used = _used_shared_memory() if new else set()
        for path in new:
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino not in used:
                    yield f"shared memory: {path}"


def _names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def _used_shared_memory() -> set[int]:
    """The inodes that processes have mapped or open; a semaphore has another name there."""
    found: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            lines = (process / "maps").read_text(errors="replace").splitlines()
            found.update(int(line.split()[4]) for line in lines if f"{SHARED_MEMORY}/" in line)
        with contextlib.suppress(OSError):
            for file in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(file).startswith(str(SHARED_MEMORY)):
                        found.add(file.stat().st_ino)
    return found

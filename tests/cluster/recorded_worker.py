"""A worker process whose every byte to the coordinator is written down; see test_personal.

Both ways go through relays of this process: the coordinator reaches the worker by one, and the
worker reaches the coordinator by the other.
"""

import os
import socket
import sys
import threading
from pathlib import Path

from stratagem.worker.process import host as worker_security
from stratagem.worker.process import main as worker
from stratagem.worker.process.settings import WorkerSettings, advertised


class Relay:
    """Forwards each connection to `target`; what goes one way is appended to a file."""

    def __init__(self, target: str, file: Path, *, records_answers: bool) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._file = file.open("ab", buffering=0)
        self._records_answers = records_answers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            for source, sink, is_answer in ((near, far, False), (far, near, True)):
                is_recorded = is_answer == self._records_answers
                arguments = (source, sink, is_recorded)
                threading.Thread(target=self._forward, args=arguments, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, is_recorded: bool) -> None:
        try:
            while data := source.recv(1 << 20):
                if is_recorded:
                    self._file.write(data)
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for each in (source, sink):
                each.close()


def record(folder: Path, argv: list[str]) -> list[str]:
    """Put the relays between; the arguments with the coordinator's address replaced."""
    name = argv[argv.index("--name") + 1]
    at = argv.index("--coordinator") + 1
    coordinator = sys.stdin.readline().strip() if argv[at] == "-" else argv[at]
    calls = Relay(coordinator, folder / f"{name}-calls", records_answers=False)

    def advertise_relay(settings: WorkerSettings, bound_port: int) -> str:
        address = advertised(settings, bound_port)
        return Relay(address, folder / f"{name}-answers", records_answers=True).address

    setattr(worker_security, advertised.__name__, advertise_relay)
    return [*argv[:at], calls.address, *argv[at + 1 :]]


if __name__ == "__main__":
    sys.exit(worker.main(record(Path(os.environ["TEST_WIRE"]), sys.argv[1:])))

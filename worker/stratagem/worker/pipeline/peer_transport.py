"""Messages of stages from worker to worker: a link carries each as one run of bytes.

The link is PeerService (`mesh/grpc_backend.py`) or memory of one host (`mesh/shm_messages.py`).
What arrives early is kept by the mailbox, what is stale or comes twice is refused there.
"""

from collections.abc import Iterable

from stratagem.worker.mesh.link import MessageLink, PendingTransfer
from stratagem.worker.pipeline.stage_message import Address, Message, pack, unpack


class PeerTransport:
    """A rank whose peers are the members of a link, rank by rank."""

    def __init__(self, link: MessageLink) -> None:
        self._link = link
        self._sends: list[PendingTransfer] = []

    def begin(self, step: int, awaited: Iterable[Address]) -> None:
        self._link.open_step(step, [(message.source, message.tag) for message in awaited])

    def send(self, address: Address, message: Message) -> None:
        frame = pack(address, message)
        self._sends.append(self._link.send(address.target, address.tag, frame, address.step))

    def recv(self, address: Address, timeout_s: float) -> Message:
        frame = self._link.take(address.source, address.step, address.tag, timeout_s)
        return unpack(address, frame)

    def end(self, timeout_s: float) -> None:
        for work in self._sends:
            work.wait(timeout_s)
        self._sends.clear()

    def cut(self) -> None:
        self._link.cut()

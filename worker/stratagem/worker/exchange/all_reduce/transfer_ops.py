"""The operations of every exchange: a tensor that goes to or comes from a peer, and a sum of
two."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stratagem.worker.mesh.link import Link, PendingTransfer


@dataclass(frozen=True, slots=True)
class Transfer:
    peer: int
    tag: int
    """Within the step."""
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Addition:
    """One sum, out = left + right; a copy when there is no right."""

    out: Tensor
    left: Tensor
    right: Tensor | None

    def run(self) -> None:
        if self.right is None:
            self.out.copy_(self.left)
        else:
            torch.add(self.left, self.right, out=self.out)


def start_transfers(
    link: Link, first_tag: int, sends: Sequence[Transfer], receives: Sequence[Transfer]
) -> tuple[list[PendingTransfer], list[PendingTransfer]]:
    """Starts transfers, peer by peer; returns (receives, sends). Of two members the lower one sends
    first, so that a link which goes by order alone finds a receive for every send."""
    received, sent = list[PendingTransfer](), list[PendingTransfer]()
    for peer in range(link.size):
        out = [t for t in sends if t.peer == peer]
        back = [t for t in receives if t.peer == peer]
        for is_send in (True, False) if link.rank < peer else (False, True):
            if is_send:
                sent += [link.send(peer, first_tag + t.tag, t.tensor) for t in out]
            else:
                received += [link.recv(peer, first_tag + t.tag, t.tensor) for t in back]
    return received, sent

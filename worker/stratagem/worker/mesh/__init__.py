"""Engines that carry tensors between the members of a party.

Each engine implements `Link`: send, receive, cut; the one for shared memory, which sends nothing,
implements `SharedGroup`: memory, barrier, cut. What the tensors mean, in which order they are added
and which processes belong to the party is decided above.
"""

from stratagem.worker.mesh.link import ExchangeError, Forming, Link, PendingTransfer, Rendezvous
from stratagem.worker.mesh.shm import SharedGroup
from stratagem.worker.mesh.torch_links import form_gloo

__all__ = [
    "ExchangeError",
    "Forming",
    "Link",
    "PendingTransfer",
    "Rendezvous",
    "SharedGroup",
    "form_gloo",
]

"""Engines that carry tensors between the members of a party.

The callers decide the meaning of the tensors, the order of additions, and the members of the party.
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

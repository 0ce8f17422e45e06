"""Engines that carry tensors between the members of a party.

The callers decide what the tensors mean, in which order they are added, and which processes belong
to the party.
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

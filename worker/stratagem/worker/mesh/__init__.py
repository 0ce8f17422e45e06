"""Engines (shm, nccl, gloo, grpc) that carry tensors between the members of a party.

The callers decide the meaning of the tensors, the order of additions, and the members of the party.
"""

from stratagem.worker.mesh.link import Forming, Link, Rendezvous
from stratagem.worker.mesh.shm import SharedGroup
from stratagem.worker.mesh.torch_links import form_gloo

__all__ = ["Forming", "Link", "Rendezvous", "SharedGroup", "form_gloo"]

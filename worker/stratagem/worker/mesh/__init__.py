"""Engines that carry tensors between the members of a party.

Each engine implements `Link`: send, receive, cut. What the tensors mean, in which order they are
added and who belongs to the party is decided above.
"""

from stratagem.worker.mesh.forming import Forming
from stratagem.worker.mesh.gloo import form_gloo
from stratagem.worker.mesh.link import ExchangeError, Link, Rendezvous, Work

__all__ = ["ExchangeError", "Forming", "Link", "Rendezvous", "Work", "form_gloo"]

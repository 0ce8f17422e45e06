"""The exchange of replicas that are joined fragment by fragment: a reducer for each fragment.

Of all fragments one at most is under way on a member. Reducers go over one link, each with tags of
its own, as a member may have begun the next fragment while another one still ends this one.
"""

from collections.abc import Sequence

from torch import Tensor

from stratagem.worker.exchange.buckets.transfer_thread import MAX_TAG
from stratagem.worker.exchange.reducer import GradientReducer
from stratagem.worker.mesh.link import Link, PendingTransfer


class FragmentLink:
    """A fragment's share of a link, which is closed with the first of its shares."""

    def __init__(self, link: Link, fragment: int, num_fragments: int) -> None:
        self._link, self._fragment, self._num_fragments = link, fragment, num_fragments
        self.rank, self.size, self.name, self.in_order = (
            link.rank,
            link.size,
            link.name,
            link.in_order,
        )

    def send(self, peer: int, tag: int, tensor: Tensor) -> PendingTransfer:
        """Sends under the fragment's own tag."""
        return self._link.send(peer, self._tag(tag), tensor)

    def recv(self, peer: int, tag: int, tensor: Tensor) -> PendingTransfer:
        """Receives under the fragment's own tag."""
        return self._link.recv(peer, self._tag(tag), tensor)

    def _tag(self, tag: int) -> int:
        return tag % (MAX_TAG // self._num_fragments) * self._num_fragments + self._fragment

    def cut(self) -> None:
        """Makes every wait of all fragments fail."""
        self._link.cut()

    def close(self) -> None:
        """Frees the link when the last fragment is closed, so that nothing writes any more."""
        if self._fragment == self._num_fragments - 1:
            self._link.close()


class FragmentExchange:
    """The reducers of all fragments, in order."""

    def __init__(self, reducers: Sequence[GradientReducer]) -> None:
        self.reducers = tuple(reducers)

    @property
    def name(self) -> str:
        """The engine, for people."""
        return self.reducers[0].name

    @property
    def shares_memory(self) -> bool:
        """True if it goes through memory that members of a host share."""
        return self.reducers[0].shares_memory

    def cut(self) -> None:
        """Makes what is under way raise; from any thread."""
        for reducer in self.reducers:
            reducer.cut()

    def close(self) -> None:
        """Frees everything."""
        for reducer in self.reducers:
            reducer.close()

"""Make the exchange of a member whose sums stay with the owners of slices, over any engine."""

from collections.abc import Sequence

from torch import Tensor

from stratagem.worker.exchange.all_reduce import DirectMethod
from stratagem.worker.exchange.blocks import LinkParameters
from stratagem.worker.exchange.buckets import GradientBuckets, LentBuckets
from stratagem.worker.exchange.layout import ShardOwners
from stratagem.worker.exchange.reducer import GradientReducer
from stratagem.worker.exchange.shm_all_reduce import SharedTransport
from stratagem.worker.exchange.slice_owners import HeldBlocks, SliceOwners, keep_sums
from stratagem.worker.exchange.slices import LinkSlices, SliceExchange, num_gather_tags
from stratagem.worker.exchange.transfer_thread import MAX_TAG, MeshTransport
from stratagem.worker.exchange.transports import LoneParameters, SoloTransport
from stratagem.worker.mesh.link import Link, PendingTransfer
from stratagem.worker.mesh.shm import SharedGroup
from stratagem.worker.mesh.staging import SideStream

# ---- Sliced reducer ----


def sliced_exchange(
    buckets: GradientBuckets,
    link: Link | SharedGroup | None,
    num_shards: int,
    owners: SliceOwners,
    *,
    is_mirrored: bool = False,
    held: HeldBlocks | None = None,
    deadline_s: float = 30.0,
) -> GradientReducer:
    """Make the reducer of a member whose sums stay with the owners of slices; it takes over the
    link (None for a lone member).

    is_mirrored: a member also updates the slice of the one before it. held: the parts of the
    parameters, if each member keeps only its own. deadline_s: the limit of every wait for a peer.
    """
    if link is None:
        party, solo = ShardOwners(0, 1, num_shards), SoloTransport()
        slices = SliceExchange(buckets, owners, 0, solo)
        lone = None if held is None else LoneParameters(held, buckets.device)
        return GradientReducer(buckets, party, solo, slices=slices, parameters=lone)
    party = ShardOwners(link.rank, link.size, num_shards)
    sums = None
    if buckets.gives_back:
        layout, device = buckets.layout, buckets.device
        sums = keep_sums(layout, owners, party.rank, device, is_mirrored=is_mirrored)
    if isinstance(link, SharedGroup):
        shared = SharedTransport(
            link, buckets, party, deadline_s=deadline_s, owners=owners, held=held, kept=sums
        )
        slices = SliceExchange(
            buckets, owners, party.rank, shared, is_mirrored=is_mirrored, kept=sums
        )
        return GradientReducer(buckets, party, shared, slices=slices, parameters=shared.parameters)
    buckets.hold()
    parameters = None
    if held is not None:
        whole, link = link, FragmentLink(link, 0, 2)
        block_link = FragmentLink(whole, 1, 2)
        parameters = LinkParameters(block_link, held, buckets.device, deadline_s=deadline_s)
    lent = None if sums is None else LentBuckets(buckets, sums)
    method = DirectMethod(link, buckets.layout, party, owners, lent)
    transport = MeshTransport(
        link,
        method,
        SideStream(buckets.device),
        deadline_s=deadline_s,
        num_further_tags=num_gather_tags(buckets, owners),
    )
    over = LinkSlices(transport, link, buckets, owners, is_mirrored=is_mirrored, kept=sums)
    slices = SliceExchange(buckets, owners, party.rank, over, is_mirrored=is_mirrored, kept=sums)
    return GradientReducer(buckets, party, transport, slices=slices, parameters=parameters)


# ---- Fragments of replicas ----
#
# Replicas are joined fragment by fragment, with a reducer for each fragment. A member exchanges at
# most one fragment at a time. All reducers use one link, with different tags, because a member may
# have begun the next fragment while another member still ends this one.


class FragmentLink:
    """One fragment's share of a link; closing the last share closes the link."""

    def __init__(self, link: Link, fragment: int, num_fragments: int) -> None:
        self._link, self._fragment, self._num_fragments = link, fragment, num_fragments
        self.rank, self.size, self.name, self.in_order = (
            link.rank,
            link.size,
            link.name,
            link.in_order,
        )

    def send(self, peer: int, tag: int, tensor: Tensor) -> PendingTransfer:
        """Start a send; the tag differs from other fragments' tags."""
        return self._link.send(peer, self._tag(tag), tensor)

    def recv(self, peer: int, tag: int, tensor: Tensor) -> PendingTransfer:
        """Start a receive; the tag differs from other fragments' tags."""
        return self._link.recv(peer, self._tag(tag), tensor)

    def _tag(self, tag: int) -> int:
        return tag % (MAX_TAG // self._num_fragments) * self._num_fragments + self._fragment

    def cut(self) -> None:
        """Make every wait of all fragments fail."""
        self._link.cut()

    def close(self) -> None:
        """Free the link when the last fragment is closed, so that nothing writes any more."""
        if self._fragment == self._num_fragments - 1:
            self._link.close()


class FragmentExchange:
    """The reducers of all fragments, in order, as one exchange."""

    def __init__(self, reducers: Sequence[GradientReducer]) -> None:
        self.reducers = tuple(reducers)

    @property
    def name(self) -> str:
        """Name of the engine, for display."""
        return self.reducers[0].name

    @property
    def shares_memory(self) -> bool:
        """True if it uses memory shared by the members of a host."""
        return self.reducers[0].shares_memory

    def cut(self) -> None:
        """Make all transfers raise. May be called from any thread."""
        for reducer in self.reducers:
            reducer.cut()

    def close(self) -> None:
        """Free the links and memory of all fragments."""
        for reducer in self.reducers:
            reducer.close()

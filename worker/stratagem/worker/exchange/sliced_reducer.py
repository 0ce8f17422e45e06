"""Makes the exchange of a member whose sums stay with the owners of slices, over any engine."""

from stratagem.worker.exchange.all_reduce.block_rounds import LinkParameters
from stratagem.worker.exchange.all_reduce.direct_all_reduce import DirectMethod
from stratagem.worker.exchange.all_reduce.shm_all_reduce import SharedTransport
from stratagem.worker.exchange.all_reduce.slice_gather import LinkSlices, num_gather_tags
from stratagem.worker.exchange.buckets.gradient_buckets import GradientBuckets
from stratagem.worker.exchange.buckets.held_blocks import HeldBlocks
from stratagem.worker.exchange.buckets.kept_sums import keep_sums
from stratagem.worker.exchange.buckets.lent_buckets import LentBuckets
from stratagem.worker.exchange.buckets.parameter_transport import LoneParameters
from stratagem.worker.exchange.buckets.reduction_transport import SoloTransport
from stratagem.worker.exchange.buckets.shard_owners import ShardOwners
from stratagem.worker.exchange.buckets.slice_owners import SliceOwners
from stratagem.worker.exchange.buckets.transfer_thread import MeshTransport
from stratagem.worker.exchange.fragments import FragmentLink
from stratagem.worker.exchange.reducer import GradientReducer
from stratagem.worker.exchange.slice_exchange import SliceExchange
from stratagem.worker.mesh.device_staging import SideStream
from stratagem.worker.mesh.link import Link
from stratagem.worker.mesh.shm_buffers import SharedGroup


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
    """Makes the exchange of a member whose sums stay with the owners of slices. Takes the link
    over; None: the only member. is_mirrored: a member updates the slice of the one before it, too.
    held: of the parameters, where each member keeps its parts only. deadline_s bounds every single
    wait for a peer."""
    if link is None:
        party, solo = ShardOwners(0, 1, num_shards), SoloTransport()
        slices = SliceExchange(buckets, owners, 0, solo)
        lone = None if held is None else LoneParameters(held, buckets.device)
        return GradientReducer(buckets, party, solo, slices=slices, parameters=lone)
    party = ShardOwners(link.rank, link.size, num_shards)
    kept = None
    if buckets.gives_back:
        layout, device = buckets.layout, buckets.device
        kept = keep_sums(layout, owners, party.rank, device, is_mirrored=is_mirrored)
    if isinstance(link, SharedGroup):
        shared = SharedTransport(
            link, buckets, party, deadline_s=deadline_s, owners=owners, held=held, kept=kept
        )
        slices = SliceExchange(
            buckets, owners, party.rank, shared, is_mirrored=is_mirrored, kept=kept
        )
        return GradientReducer(buckets, party, shared, slices=slices, parameters=shared.parameters)
    buckets.hold()
    parameters = None
    if held is not None:
        whole, link = link, FragmentLink(link, 0, 2)
        rest = FragmentLink(whole, 1, 2)
        parameters = LinkParameters(rest, held, buckets.device, deadline_s=deadline_s)
    lent = None if kept is None else LentBuckets(buckets, kept)
    method = DirectMethod(link, buckets.layout, party, owners, lent)
    transport = MeshTransport(
        link,
        method,
        SideStream(buckets.device),
        deadline_s=deadline_s,
        num_further_tags=num_gather_tags(buckets, owners),
    )
    over = LinkSlices(transport, link, buckets, owners, is_mirrored=is_mirrored, kept=kept)
    slices = SliceExchange(buckets, owners, party.rank, over, is_mirrored=is_mirrored, kept=kept)
    return GradientReducer(buckets, party, transport, slices=slices, parameters=parameters)

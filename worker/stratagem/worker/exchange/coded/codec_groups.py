"""The portions in which a shard is coded: bucket by bucket as backward fills them, or all at once.

A codec that codes each tensor by itself can begin while backward is still busy with the others, so
a portion is the tensors of one bucket. Where tensors share a payload, and on a device, which coding
would keep waiting in the middle of backward, one portion is all of them. Either way the bits are
the same. Knows neither shards nor members.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stratagem.common.compression import Codec
from stratagem.worker.exchange.buckets.bucket_layout import BucketLayout
from stratagem.worker.exchange.coded.gradient_coder import Coder, HostCoder


@dataclass(frozen=True, slots=True)
class Portion:
    """The tensors that are coded together as soon as all of their buckets are full."""

    index: int
    buckets: range
    """The last portion has the extras too, in its last bucket, which is not coded."""
    places: range
    """Of its tensors among the parameters."""
    num_bytes: int
    """Of its payload."""
    state_names: tuple[str, ...]
    coder: Coder
    has_extras: bool


def plan_portions(
    layout: BucketLayout, codec: Codec, coder: Coder, device: torch.device
) -> list[Portion]:
    """Returns the portions in order of their buckets, which are all buckets of the layout. coder:
    of the codec, for all tensors, where gradients are on `device`."""
    buckets = range(len(layout.buckets))
    held = [_places(layout, bucket) for bucket in buckets[:-1]]
    is_here = device.type == "cpu" and isinstance(coder, HostCoder)
    parts = [codec.part(places) for places in held] if is_here else []
    if len(parts) < 2 or any(part is None for part in parts):
        names = tuple(codec.initial_state())
        places = range(len(layout.slots))
        return [Portion(0, buckets, places, codec.payload_bytes, names, coder, True)]
    portions = []
    for index, (places, part) in enumerate(zip(held, parts, strict=True)):
        assert part is not None
        is_last = index == len(parts) - 1
        own = buckets[index:] if is_last else buckets[index : index + 1]
        names = tuple(part.initial_state())
        size, coder = part.payload_bytes, HostCoder(part)
        portions.append(Portion(index, own, places, size, names, coder, is_last))
    return portions


def _places(layout: BucketLayout, bucket: int) -> range:
    """Returns the parameters that a bucket holds: neighbours, as buckets take parameters in
    order."""
    held: Sequence[int] = [slot.index for slot in layout.slots if slot.bucket == bucket]
    return range(min(held), max(held) + 1)

"""Computes the memory that a worker needs for outer gradients that are exchanged in few bits.

A replica's share of a fragment is coded when the fragment is cut, and its message kept until the
sums have arrived. Of all fragments one at most is under way. Of codecs on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stratagem.common.compression import TensorLayout
from stratagem.common.job import CompressionSpec
from stratagem.common.strategy.local_steps import fragments_of
from stratagem.tools.planning.codec_memory import codec_memory


@dataclass(frozen=True, slots=True)
class OuterMessages:
    """messages: bytes of those of all own replicas. moment: beside them, while one is coded."""

    messages: int
    moment: int


def outer_messages(
    spec: CompressionSpec, layout: Sequence[TensorLayout], num_fragments: int, num_replicas: int
) -> OuterMessages:
    """Measure the codec of the fragment that needs most, for so many replicas of one worker."""
    places = fragments_of([tensor.numel for tensor in layout], num_fragments)
    codecs = [codec_memory(spec, layout[part.start : part.stop]) for part in places]
    return OuterMessages(
        num_replicas * max(codec.payload for codec in codecs),
        max(codec.scratch for codec in codecs),
    )

"""What is sent of a state: all of it, or what the caller does not have of a snapshot before."""

from collections.abc import Sequence
from dataclasses import dataclass

from stratagem.common.tensors.manifest import Manifest
from stratagem.common.tensors.same_bytes import cut, same_bytes
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.session.session_states import Frozen


@dataclass(frozen=True, slots=True)
class SentState:
    """The manifest of a state, and the bytes of it that are sent: all but those of `same`."""

    manifest: Manifest
    buffers: Sequence[memoryview]
    same: Sequence[pb.SameBytes] = ()

    @property
    def num_bytes(self) -> int:
        return self.manifest.total_bytes - sum(each.size for each in self.same)


def without_same(state: Frozen, base: Frozen) -> SentState:
    """Leave out what the base has, too; takes its time, so in a thread."""
    same = same_bytes(state.manifest, state.buffers, base.manifest, base.buffers)
    sent = [
        pb.SameBytes(offset=each.offset, base_offset=each.base_offset, size=each.size)
        for each in same
    ]
    return SentState(state.manifest, list(cut(state.manifest, state.buffers, same)), sent)

"""States of several leaves, and who writes and reads them, for the tests of where they are."""

import random
from functools import cache

from stratagem.common.base.ids import Digest
from stratagem.common.tensors.leaves import SMALL_BYTES, leaves_of, pieces_of
from stratagem.common.tensors.manifest import Manifest, Purpose, build_manifest
from stratagem.coordinator.store.blobs import BlobStore
from tests.coordinator.store.places import digest_of, read

SIZES = (SMALL_BYTES + 5, 3, SMALL_BYTES, 0, 7)
State = tuple[Manifest, bytes]


@cache
def state(seed: int, changed: int = 0) -> State:
    """Two large tensors and three small ones; `changed` alone makes the second large one."""
    named = [(f"t{number}", "uint8", (size,)) for number, size in enumerate(SIZES)]
    manifest = build_manifest(named, Purpose.STATE, metadata={"step": str(changed)})
    parts = [random.Random(f"{seed} {number}").randbytes(size) for number, size in enumerate(SIZES)]
    parts[2] = random.Random(f"{seed} 2 {changed}").randbytes(SIZES[2])
    return manifest, b"".join(parts)


def leaves(of: State) -> dict[Digest, bytes]:
    manifest, data = of
    view = memoryview(data)
    buffers = [view[each.offset : each.offset + each.size_bytes] for each in manifest.stored()]
    contents = [b"".join(pieces_of(leaf, manifest, buffers)) for leaf in leaves_of(manifest)]
    return {digest_of(content): content for content in contents}


def holds(store: BlobStore, digest: Digest, of: State) -> bool:
    """Whether the state can be read there."""
    return read(store, digest).endswith(of[1])

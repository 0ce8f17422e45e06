"""States of several leaves, for the tests of where they are."""

import random

from stratagem.common.tensors.manifest import Manifest, Purpose, build_manifest
from stratagem.common.tensors.state_leaves import SMALL_BYTES

SIZES = (SMALL_BYTES + 5, 3, 2 * SMALL_BYTES, 0, 7)


def state(seed: int, changed: int = 0) -> tuple[Manifest, bytes]:
    """Two large tensors and three small ones; `changed` alone makes the second large one."""
    named = [(f"t{number}", "uint8", (size,)) for number, size in enumerate(SIZES)]
    manifest = build_manifest(named, Purpose.STATE, metadata={"step": str(changed)})
    parts = [random.Random(f"{seed} {number}").randbytes(size) for number, size in enumerate(SIZES)]
    parts[2] = random.Random(f"{seed} 2 {changed}").randbytes(SIZES[2])
    return manifest, b"".join(parts)

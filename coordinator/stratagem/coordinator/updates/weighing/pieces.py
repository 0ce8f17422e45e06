"""Windows of a state whose elements are not all treated alike, cut into pieces that are."""

from collections.abc import Callable, Sequence
from itertools import groupby

from stratagem.common.tensors.manifest import Manifest, TensorSpec, dtype_named

Run = tuple[int, int, bool]
"""First byte, the byte after the last, and whether what is there is special."""


def runs_of(manifest: Manifest, is_special: Callable[[TensorSpec], bool]) -> list[Run]:
    """Return the data as ranges of bytes of neighbours that are all special, or all not."""
    found = []
    for kind, group in groupby(manifest.stored(), is_special):
        specs = list(group)
        end = specs[-1].offset + specs[-1].size_bytes
        found.append((specs[0].offset, end, kind))
    return found


def pieces(
    runs: Sequence[Run], dtype: str, offset: int, num_elements: int
) -> list[tuple[slice, bool]]:
    """Return the pieces of a window, and which are special. offset: of its first byte."""
    item_bytes = dtype_named(dtype).item_bytes
    end, found = offset + num_elements * item_bytes, []
    for start, stop, kind in runs:
        first, last = max(start, offset), min(stop, end)
        if first < last:
            piece = slice((first - offset) // item_bytes, (last - offset) // item_bytes)
            found.append((piece, kind))
    return found

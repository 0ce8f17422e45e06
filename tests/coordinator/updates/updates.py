"""Small manifests and their bytes, for the tests of spool and fold."""

import zlib
from collections.abc import Sequence
from pathlib import Path

import google_crc32c
import numpy as np

from stratagem.common.base.ids import Party, RunId
from stratagem.common.tensors.dtypes import dtype_named
from stratagem.common.tensors.manifest import Manifest, Purpose, build_manifest
from stratagem.coordinator.updates.numpy_floats import narrow, storage
from stratagem.coordinator.updates.spool import Spool
from stratagem.coordinator.updates.spool_keys import SpoolKey, SpoolRun
from stratagem.coordinator.updates.spool_upload import SpoolEntry

RUN, ROOT = RunId("digits-1"), Party("")
OF_RUN = SpoolRun(RUN)

Layout = Sequence[tuple[str, str, tuple[int, ...]]]

# Odd sizes put elements across every boundary; the bool shifts all that follows off alignment.
MIXED: Layout = (
    ("model/w32", "float32", (7, 3)),
    ("model/flag", "bool", (3,)),
    ("model/w64", "float64", (5,)),
    ("model/empty", "float32", (0, 4)),
    ("model/h16", "float16", (9,)),
    ("model/b16", "bfloat16", (11,)),
    ("model/count", "int64", ()),
    ("model/e4", "float8_e4m3fn", (13,)),
    ("model/e5", "float8_e5m2", (6,)),
    ("model/scalar", "float32", ()),
)


def manifest_of(layout: Layout, **options: object) -> Manifest:
    return build_manifest(layout, Purpose.UPDATE, **options)  # type: ignore[arg-type]


def arrays(manifest: Manifest, seed: int) -> dict[str, np.ndarray]:
    """Raw elements by name: floats around zero, integers small."""
    found = {}
    for spec in manifest.stored():
        rng = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
        num = spec.size_bytes // dtype_named(spec.dtype).item_bytes
        raw = np.empty(num, storage(spec.dtype))
        if dtype_named(spec.dtype).is_floating:
            narrow(spec.dtype, rng.standard_normal(num), raw)
        else:
            raw[:] = rng.integers(0, 2, num)
        found[spec.name] = raw
    return found


def data_of(manifest: Manifest, seed: int) -> bytes:
    return b"".join(raw.tobytes() for raw in arrays(manifest, seed).values())


def update_digest(data: bytes) -> str:
    """What an accepted update of these data is called."""
    return f"crc32c:{google_crc32c.value(data):08x}"


def key(client: int, round_num: int = 1, run: SpoolRun = OF_RUN) -> SpoolKey:
    return SpoolKey(run, ROOT, round_num, client)


def accept(
    spool: Spool,
    client: int,
    manifest: Manifest,
    data: bytes,
    num_samples: int = 1,
    run: SpoolRun = OF_RUN,
) -> SpoolEntry:
    writer = spool.open(key(client, run=run), manifest)
    writer.write(data)
    return writer.commit(manifest, num_samples)


def flip_bit(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)

"""Small manifests and their bytes, for the tests of spool and fold."""

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import google_crc32c
import numpy as np

from stratagem.common.base.ids import Party, RunId
from stratagem.common.tensors.manifest import Manifest, Purpose, build_manifest, dtype_named
from stratagem.coordinator.updates.floats import narrow, storage, widen
from stratagem.coordinator.updates.spool import Spool, SpoolKey, SpoolRun
from stratagem.coordinator.updates.upload import SpoolEntry

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


FEDERATED: Mapping[str, object] = {
    "type": "Federated",
    "num_clients": 3,
    "rounds": 3,
    "aggregation": {"method": "FedAvg"},
    "client_selection": {"method": "All"},
}
"""The document of a strategy."""


def manifest_of(layout: Layout, **options: object) -> Manifest:
    return build_manifest(layout, Purpose.UPDATE, **options)  # type: ignore[arg-type]


def arrays(manifest: Manifest, seed: int) -> dict[str, np.ndarray]:
    """Raw elements by name: floats around zero, integers small."""
    found = {}
    for spec in manifest.stored():
        rng = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
        num = spec.size_bytes // dtype_named(spec.dtype).item_bytes
        if dtype_named(spec.dtype).is_floating:
            found[spec.name] = rounded(spec.dtype, rng.standard_normal(num))
        else:
            found[spec.name] = rng.integers(0, 2, num).astype(storage(spec.dtype))
    return found


def elements(manifest: Manifest, data: bytes) -> dict[str, np.ndarray]:
    """The raw elements of the data by name."""
    return {
        spec.name: np.frombuffer(data[spec.offset :][: spec.size_bytes], storage(spec.dtype))
        for spec in manifest.stored()
    }


def wide(dtype: str, raw: np.ndarray) -> np.ndarray:
    values = np.empty(raw.shape)
    widen(dtype, raw, values)
    return values


def rounded(dtype: str, values: np.ndarray) -> np.ndarray:
    raw = np.empty(values.shape, storage(dtype))
    with np.errstate(all="ignore"):
        narrow(dtype, values, raw)
    return raw


def plain_mean(
    manifest: Manifest, clients: Sequence[Mapping[str, np.ndarray]], weights: Sequence[float]
) -> bytes:
    """What a fold of whole updates gives, in plain numpy: whole tensors, one after the other."""
    out = []
    for spec in manifest.stored():
        raws = [client[spec.name] for client in clients]
        if len(raws) == 1 or not dtype_named(spec.dtype).is_floating:
            out.append(raws[int(np.argmax(weights))])
            continue
        pairs = zip(raws, weights, strict=True)
        total, *others = [weight * wide(spec.dtype, raw) for raw, weight in pairs]
        for term in others:
            total = total + term
        out.append(rounded(spec.dtype, total / sum(weights)))
    return b"".join(raw.tobytes() for raw in out)


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

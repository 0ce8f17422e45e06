"""Upload the data and the code of a job as blobs, which the job names by their digests.

Inline data are arrays or tensors of the caller. This module defines how splits and rows become
named tensors (`train.x`, `train.y`, `train.x.<key>`). It imports torch only if the caller passes
tensors.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stratagem.client.sdk.cell_modules import cells
from stratagem.client.sdk.connection import Connection
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Digest
from stratagem.common.code.bundle import manifest_of
from stratagem.common.job import CodeSpec, JobSpec
from stratagem.common.rpc.tensor_transfer import push
from stratagem.common.tensors.files import blob_digest
from stratagem.common.tensors.manifest import (
    Manifest,
    Purpose,
    build_manifest,
    dtype_named,
    to_proto,
)
from stratagem.common.tensors.stream import Source
from stratagem.v1 import coordinator_pb2 as pb

if TYPE_CHECKING:
    import numpy as np
    import torch

    Rows = np.ndarray[Any, Any] | torch.Tensor
    InlineData = Mapping[str, tuple[Rows | Mapping[str, Rows], Rows | Mapping[str, Rows] | None]]
else:
    InlineData = Mapping
"""Data by split: (x, y), each an array or tensor of rows, or a mapping of these; y may be None."""


@dataclass(frozen=True, slots=True)
class PackedData:
    """Inline data ready to upload; the buffers are the caller's own memory where possible."""

    manifest: Manifest
    buffers: list[memoryview]

    @property
    def digest(self) -> str:
        return self.manifest.digest


def pack(data: InlineData) -> PackedData:
    """Pack the splits of inline data as one blob. Raises InvalidInputError for wrong data."""
    named = {
        name: value if _is_torch(value) else _plain(name, value) for name, value in _named(data)
    }
    if not named:
        raise InvalidInputError.at("data", "has no split; give {'train': (x, y)}")
    if any(_is_torch(value) for value in named.values()):
        from stratagem.client.sdk.torch_states import pack_tensors

        manifest, buffers = pack_tensors(named)
    else:
        manifest, buffers = _pack_arrays(named)
    return PackedData(replace(manifest, digest=blob_digest(manifest, buffers)), buffers)


async def upload(connection: Connection, packed: PackedData) -> None:
    """Upload the blob to the coordinator, unless the coordinator has it already."""
    await send(connection, packed.manifest, packed.buffers)


async def send(
    connection: Connection, manifest: Manifest, content: Source | Sequence[memoryview]
) -> None:
    """Upload a blob, named by the digest in its manifest, unless the coordinator has it already."""
    await connection.greet()
    header = pb.UploadDataHeader(digest=manifest.digest, manifest=to_proto(manifest))
    await push(
        connection.stub.UploadData,
        pb.UploadDataRequest(header=header),
        manifest,
        content,
        retry=connection.stream_retry,
    )


async def resolve_code(connection: Connection, job: JobSpec) -> JobSpec:
    """Upload the job's code, or the notebook cells that it names; return the job with the code's
    digest in place of its folder."""
    code = cells.code_of(job)
    if code is None or code.digest is not None:
        return job
    from stratagem.client.sdk.code_folder import bundle_of

    archive = await asyncio.to_thread(bundle_of, code)
    manifest = manifest_of(archive)
    await send(connection, manifest, [memoryview(archive)])
    sent = CodeSpec(digest=Digest(manifest.digest), signature=code.signature)
    return job.with_changes(code=sent)


def _named(data: InlineData) -> Iterator[tuple[str, Any]]:
    for split, pair in data.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InvalidInputError.at(f"data.{split}", "is not a pair (x, y)")
        named = [*_side(f"{split}.x", pair[0]), *_side(f"{split}.y", pair[1])]
        counts = {name: len(value) for name, value in named}
        if len(set(counts.values())) > 1:
            said = ", ".join(f"{name} has {count}" for name, count in counts.items())
            raise InvalidInputError.at(f"data.{split}", f"numbers of rows differ: {said}")
        yield from named


def _side(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if value is None:
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _side(f"{name}.{key}", item)
        return
    import numpy as np

    if not (isinstance(value, np.ndarray) or _is_torch(value)):
        kind = type(value).__name__
        raise InvalidInputError.at(f"data.{name}", f"a {kind} is not an array or tensor")
    if value.ndim == 0:
        raise InvalidInputError.at(f"data.{name}", "is a scalar; the first dimension counts rows")
    yield name, value


def _is_torch(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "torch"


def _pack_arrays(named: "Mapping[str, np.ndarray[Any, Any]]") -> tuple[Manifest, list[memoryview]]:
    """Return the manifest and the bytes of arrays, sorted as in torch_codec by the size of their
    elements, so that equal data have equal digests."""
    import numpy as np

    ordered = sorted(named.items(), key=lambda item: -item[1].itemsize)
    triples = ((name, array.dtype.name, array.shape) for name, array in ordered)
    manifest = build_manifest(triples, Purpose.DATA)
    return manifest, [array.reshape(-1).view(np.uint8).data for _, array in ordered]


def _plain(name: str, array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Convert an array to little-endian byte order and C order."""
    import numpy as np

    dtype_named(array.dtype.name, f"data.{name}")
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))

"""Takes in a client's coded update and puts what it says into the spool, as any other update.

What came over the wire is small and is held in memory; the spool has the whole update, decoded, so
the fold treats all alike. A coded update that cannot be right is rejected alone, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import BinaryIO

import numpy as np

from stratagem.common.compression import FloatArray
from stratagem.common.compression.update import PAYLOAD, update_codec, update_key
from stratagem.common.job import JobSpec
from stratagem.common.tensors.chunks import Sink, into
from stratagem.common.tensors.manifest import Manifest, Purpose, TensorSpec
from stratagem.common.tensors.safefile import read_header
from stratagem.coordinator.core.effects import TrainClient
from stratagem.coordinator.effects.env import Env
from stratagem.coordinator.spool import SpoolKey
from stratagem.coordinator.update_checks import UpdateRejectedError, check_layout
from stratagem.coordinator.upload import SpoolEntry


@dataclass(slots=True)
class CodedUpload:
    """One update on its way: what was announced, and room for exactly that."""

    expected: Manifest
    manifest: Manifest | None = None
    data: bytearray | None = None

    def accept(self, manifest: Manifest) -> Sink:
        """Raises UpdateRejectedError for an update that is larger than the model."""
        room = self.expected.total_bytes
        if manifest.total_bytes > room:
            raise UpdateRejectedError(f"{manifest.total_bytes} bytes for a model of {room}")
        self.manifest, self.data = manifest, bytearray(manifest.total_bytes)
        return into(memoryview(self.data))


def spool_decoded(
    env: Env, effect: TrainClient, job: JobSpec, upload: CodedUpload, num_samples: int
) -> SpoolEntry:
    """Decode, check and accept the update. Blocks."""
    assert upload.manifest is not None
    assert upload.data is not None
    expected = upload.expected
    data = memoryview(upload.data)
    given = {each.name: data[each.offset :][: each.size_bytes] for each in upload.manifest.tensors}
    if upload.manifest.codec == "":
        check_layout(upload.manifest, expected)
        decoded: Mapping[str, FloatArray] = {}
    else:
        decoded = _decode(effect, job, upload.manifest, expected, given)
    manifest = replace(expected, purpose=Purpose.UPDATE, metadata={}, digest="")
    key = SpoolKey(effect.run_id, effect.party, effect.round_num, effect.client)
    writer = env.spool.open(key, manifest, source=f"decoded {effect.member.incarnation}")
    try:
        _, data_start = read_header(env.blobs.path(effect.base.digest))
        with env.blobs.open(effect.base.digest) as base:
            for piece in _pieces(expected, decoded, given, base, data_start):
                writer.write_at(piece[0], piece[1])
        return writer.commit(expected, num_samples)
    finally:
        writer.close()


def _decode(
    effect: TrainClient,
    job: JobSpec,
    manifest: Manifest,
    expected: Manifest,
    given: Mapping[str, memoryview],
) -> dict[str, FloatArray]:
    """How far each coded parameter has moved."""
    by_name = {each.name: each for each in manifest.tensors}
    coded = [each for each in expected.stored() if each.name not in by_name]
    _check_announced(by_name, coded, expected)
    codec, names = update_codec(job, coded)
    try:
        payload = np.frombuffer(given[PAYLOAD], np.uint8)
        moves = codec.decode(payload, update_key(job, effect.round_num, effect.client))
    except ValueError as error:
        raise UpdateRejectedError(str(error)) from error
    return dict(zip(names, moves, strict=True))


def _check_announced(
    found: Mapping[str, TensorSpec], coded: list[TensorSpec], expected: Manifest
) -> None:
    """What is not coded must be as in the model, and what is coded must be float32."""
    wanted = {each.name: each for each in expected.stored()}
    for name, have in found.items():
        want = wanted.get(name)
        if name == PAYLOAD and have.dtype == "uint8":
            continue
        if want is None or (have.dtype, have.shape) != (want.dtype, want.shape):
            raise UpdateRejectedError(f"{name!r} is no tensor of the model, or another one")
    wide = [each.name for each in coded if each.dtype != "float32"]
    if PAYLOAD not in found or wide:
        raise UpdateRejectedError(f"no payload, or one that cannot hold {wide or 'anything'}")


def _pieces(
    expected: Manifest,
    decoded: Mapping[str, FloatArray],
    given: Mapping[str, memoryview],
    base: BinaryIO,
    data_start: int,
) -> Iterator[tuple[int, memoryview | bytes]]:
    """(offset, bytes) of the whole update, tensor by tensor."""
    for spec in expected.stored():
        if spec.name not in decoded:
            yield spec.offset, given[spec.name]
            continue
        base.seek(data_start + spec.offset)
        before = np.frombuffer(base.read(spec.size_bytes), "<f4")
        with np.errstate(over="ignore"):  # what is infinite is rejected by the spool
            yield spec.offset, (before + decoded[spec.name]).tobytes()

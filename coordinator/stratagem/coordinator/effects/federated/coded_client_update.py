"""Takes in a client's coded update and writes it decoded into the spool, as any other update.

The coded update is small and is held in memory; the spool has the whole update, decoded
tensor by tensor where the codec codes each by itself, so the fold treats all alike. A coded update
that cannot be right is rejected alone, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import BinaryIO

import numpy as np

from stratagem.common.base.ids import Digest
from stratagem.common.compression import ByteArray, Codec, FloatArray
from stratagem.common.compression.codec import split
from stratagem.common.compression.coded_update import PAYLOAD, update_codec, update_key
from stratagem.common.job import JobSpec
from stratagem.common.numerics.numerics_rules import CURRENT
from stratagem.common.tensors.chunks import Sink, into
from stratagem.common.tensors.manifest import Manifest, Purpose, TensorSpec
from stratagem.common.tensors.safetensors_file import header_of
from stratagem.coordinator.core.rejection_causes import Cause
from stratagem.coordinator.store.blobs import BlobStore
from stratagem.coordinator.updates.spool import Spool, SpoolKey
from stratagem.coordinator.updates.spool_upload import SpoolEntry
from stratagem.coordinator.updates.update_checks import UpdateRejectedError, check_layout


@dataclass(slots=True)
class CodedUpload:
    """One update that is being received: its manifest, and memory for exactly that."""

    job: JobSpec
    key: SpoolKey
    base: Digest
    """The global state that the client has trained from."""
    expected: Manifest
    """Manifest of that state."""
    numerics: int = CURRENT
    manifest: Manifest | None = None
    data: bytearray | None = None

    def accept(self, manifest: Manifest) -> Sink:
        """Allocate memory for the update. Raises UpdateRejectedError for one that is larger than
        the model.
        """
        room = self.expected.total_bytes
        if manifest.total_bytes > room:
            raise UpdateRejectedError(
                Cause.SIZE, f"{manifest.total_bytes} bytes for a model of {room}"
            )
        self.manifest, self.data = manifest, bytearray(manifest.total_bytes)
        return into(memoryview(self.data))

    def enter(self, spool: Spool, blobs: BlobStore, source: str, num_samples: int) -> SpoolEntry:
        """Decode, check and accept the update, which is here as a whole. Blocks."""
        assert self.manifest is not None
        assert self.data is not None
        expected, data = self.expected, memoryview(self.data)
        given = {
            each.name: data[each.offset :][: each.size_bytes] for each in self.manifest.tensors
        }
        if self.manifest.codec:
            moves = self._moves(given)
        else:
            moves = {}
            check_layout(self.manifest, expected)
        manifest = replace(expected, purpose=Purpose.UPDATE, metadata={}, digest="")
        writer = spool.open(self.key, manifest, source=f"decoded {source}")
        try:
            with blobs.open(self.base) as base:
                _, data_start = header_of(base, self.base)
                for offset, piece in _pieces(expected, moves, given, base, data_start):
                    writer.write_at(offset, piece)
            return writer.commit(expected, num_samples)
        except UpdateRejectedError:
            if writer.is_open:
                writer.discard()
            raise
        finally:
            writer.close()

    def _moves(self, given: Mapping[str, memoryview]) -> dict[str, Callable[[], FloatArray]]:
        """Return per coded parameter a function that decodes how far it has moved."""
        assert self.manifest is not None
        by_name = {each.name: each for each in self.manifest.tensors}
        coded = [each for each in self.expected.stored() if each.name not in by_name]
        _check_announced(by_name, coded, self.expected)
        codec, names = update_codec(self.job, coded, self.numerics)
        payload = np.frombuffer(given[PAYLOAD], np.uint8)
        key = update_key(self.job, self.key.round_num, self.key.client)
        parts = [codec.part(range(place, place + 1)) for place in range(len(names))]
        alone = [part for part in parts if part is not None]
        if len(alone) < len(parts):  # they share a payload
            together = _decoded(codec, payload, key)
            return {n: partial(_itself, x) for n, x in zip(names, together, strict=True)}
        try:
            pieces = split(payload, [part.payload_bytes for part in alone])
        except ValueError as error:
            raise UpdateRejectedError(Cause.CODEC, str(error)) from error
        return {
            name: partial(_decoded_alone, part, piece, key)
            for name, part, piece in zip(names, alone, pieces, strict=True)
        }


def _itself(move: FloatArray) -> FloatArray:
    return move


def _decoded_alone(part: Codec, payload: ByteArray, key: int) -> FloatArray:
    (move,) = _decoded(part, payload, key)
    return move


def _decoded(codec: Codec, payload: ByteArray, key: int) -> list[FloatArray]:
    try:
        with np.errstate(all="ignore"):  # what is not finite is rejected by the spool
            return codec.decode(payload, key)
    except ValueError as error:
        raise UpdateRejectedError(Cause.CODEC, str(error)) from error


def _check_announced(
    found: Mapping[str, TensorSpec], coded: list[TensorSpec], expected: Manifest
) -> None:
    """Check that tensors that are not coded are as in the model, and that coded ones are
    float32.
    """
    wanted = {each.name: each for each in expected.stored()}
    for name, have in found.items():
        want = wanted.get(name)
        if name == PAYLOAD and have.dtype == "uint8":
            continue
        if want is None or (have.dtype, have.shape) != (want.dtype, want.shape):
            raise UpdateRejectedError(
                Cause.LAYOUT, f"{name!r} is no tensor of the model, or another one"
            )
    wide = [each.name for each in coded if each.dtype != "float32"]
    if PAYLOAD not in found or wide:
        raise UpdateRejectedError(
            Cause.CODEC, f"no payload, or one that cannot hold {wide or 'anything'}"
        )


def _pieces(
    expected: Manifest,
    moves: Mapping[str, Callable[[], FloatArray]],
    given: Mapping[str, memoryview],
    base: BinaryIO,
    data_start: int,
) -> Iterator[tuple[int, memoryview | bytes]]:
    """Yield (offset, bytes) of the whole update, tensor by tensor."""
    for spec in expected.stored():
        if spec.name not in moves:
            yield spec.offset, given[spec.name]
            continue
        base.seek(data_start + spec.offset)
        before = np.frombuffer(base.read(spec.size_bytes), "<f4")
        with np.errstate(all="ignore"):
            yield spec.offset, (before + moves[spec.name]()).tobytes()

"""The update that a worker on this machine offers with the result of a client's round."""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from google.protobuf.message import DecodeError

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.tensors.local_files import UnreadableFileError, offered, readable_copy
from stratagem.common.tensors.manifest import Limits, Manifest, Purpose, from_proto
from stratagem.coordinator.runtime.worker_links import WorkerLink
from stratagem.v1 import tensor_pb2, worker_pb2


class OfferedUpdate(NamedTuple):
    """A checked manifest, and the bytes that it describes, read as they are asked for."""

    manifest: Manifest
    pieces: Iterator[memoryview]


def offered_update(
    link: WorkerLink, result: worker_pb2.ClientRoundResult, limits: Limits, codecs: Collection[str]
) -> OfferedUpdate | None:
    """Return the update that is offered; None where there is none, or it cannot be read here.

    Raises InvalidInputError and LimitError for a manifest that breaks a rule or a limit.
    """
    file = offered(result) if link.place else None  # beyond this machine nothing was asked for
    if file is None:
        return None
    try:
        told = tensor_pb2.Manifest.FromString(result.manifest)
    except DecodeError as error:
        raise InvalidInputError.at("manifest", f"is none: {error}") from error
    manifest = from_proto(told, limits, Purpose.UPDATE, codecs)
    try:
        pieces = readable_copy(file, manifest.total_bytes)
    except UnreadableFileError:
        link.leave()
        return None
    return None if pieces is None else OfferedUpdate(manifest, pieces)

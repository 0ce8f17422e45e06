"""Canonical safetensors files: one form for the same tensors, so that a digest can name them.

A file is 8 bytes of header length, a JSON header, and the bytes of the stream as they are. The
header lists the tensors in the order of the manifest; its "__metadata__" is sorted and records tied
tensors as "alias:<name>"; spaces pad it to 8 bytes. The digest of a blob is the SHA-256 of the
file. The module must not import torch; it also reads foreign safetensors files, and trusts none.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol

from stratagem.common.base.errors import IntegrityError, InvalidInputError, LimitError
from stratagem.common.base.ids import Digest
from stratagem.common.tensors.manifest import (
    ALIAS_PREFIX,
    DEFAULT_LIMITS,
    RESERVED_NAME,
    Limits,
    Manifest,
    Purpose,
    TensorSpec,
    check,
    dtype_in_safetensors,
    dtype_named,
)
from stratagem.common.tensors.stream import CHUNK_BYTES

MAX_HEADER_BYTES: Final = 32 * 2**20
_PREFIX_BYTES: Final = 8

FileSource = Callable[[int], Iterator[bytes]]
"""A function that yields a file's stream data from an offset on, in contiguous pieces."""


class Seekable(Protocol):
    """The methods of an open binary file that this module needs."""

    def read(self, size: int, /) -> bytes: ...
    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int: ...


def header_bytes(manifest: Manifest) -> bytes:
    """Return the start of the file for a manifest: the 8-byte length and the header."""
    metadata = dict(manifest.metadata)
    entries: dict[str, Any] = {}
    for tensor in manifest.tensors:
        if tensor.alias_of is not None:
            metadata[ALIAS_PREFIX + tensor.name] = tensor.alias_of
            continue
        entries[tensor.name] = {
            "dtype": dtype_named(tensor.dtype).safetensors,
            "shape": list(tensor.shape),
            "data_offsets": [tensor.offset, tensor.offset + tensor.size_bytes],
        }
    document = {RESERVED_NAME: dict(sorted(metadata.items()))} if metadata else {}
    text = json.dumps(document | entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_PREFIX_BYTES, "little") + text


def blob_digest(manifest: Manifest, pieces: Iterable[bytes | memoryview]) -> Digest:
    """Return the digest of the blob (safetensors file) of a manifest, whose data are `pieces`."""
    digest = hashlib.sha256(header_bytes(manifest))
    for piece in pieces:
        digest.update(piece)
    return Digest(digest.hexdigest())


def file_digest(path: Path) -> Digest:
    """Return the digest of the blob that a file holds."""
    with path.open("rb") as file:
        return Digest(hashlib.file_digest(file, "sha256").hexdigest())


def from_file(path: Path, data_start: int, total_bytes: int) -> FileSource:
    """Return a source of the data in a file. Raises IntegrityError if the file is too short."""

    def pieces(offset: int) -> Iterator[bytes]:
        with path.open("rb", buffering=0) as file:
            yield from _pieces(file.fileno(), path.name, data_start + offset, total_bytes - offset)

    return pieces


def _pieces(descriptor: int, name: str, start: int, num_bytes: int) -> Iterator[bytes]:
    while num_bytes:
        piece = os.pread(descriptor, min(CHUNK_BYTES, num_bytes), start)
        if not piece:
            raise IntegrityError(f"{name}: ends {num_bytes} bytes too early")
        start += len(piece)
        num_bytes -= len(piece)
        yield piece


def read_header(path: Path, limits: Limits = DEFAULT_LIMITS) -> tuple[Manifest, int]:
    """Return the checked manifest of a file (its purpose is STATE), and the offset of its data.

    Raises InvalidInputError if it is not a safetensors file, LimitError, and IntegrityError if the
    file's length is not the one that its header implies.
    """
    with path.open("rb") as file:
        return header_of(file, path.name, limits)


def header_of(file: Seekable, name: str, limits: Limits = DEFAULT_LIMITS) -> tuple[Manifest, int]:
    """Return the checked manifest of an open file and the offset of its data, as `read_header`
    does; `name` is for errors."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    manifest, data_start = parse_header(file, name, limits)
    if size != data_start + manifest.total_bytes:
        raise IntegrityError(
            f"{name}: {size} bytes long, its header says {data_start + manifest.total_bytes}"
        )
    return manifest, data_start


def header_size(start: bytes) -> int:
    """Return the offset at which the data begin in a file that begins with these bytes."""
    return _PREFIX_BYTES + int.from_bytes(start[:_PREFIX_BYTES], "little")


def parse_header(
    file: Seekable, name: str, limits: Limits = DEFAULT_LIMITS
) -> tuple[Manifest, int]:
    """Read the manifest as `header_of` does, from a file that may contain only its start."""
    length = int.from_bytes(file.read(_PREFIX_BYTES), "little")
    if length > MAX_HEADER_BYTES:
        raise LimitError(f"{name}: header of {length} bytes, the limit is {MAX_HEADER_BYTES}")
    text = file.read(length)
    if length == 0 or len(text) < length:
        raise InvalidInputError.at(name, "is no safetensors file: too short")
    try:
        document = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError.at(name, f"is no safetensors file: {error}") from error
    if not isinstance(document, dict):
        raise InvalidInputError.at(name, "is no safetensors file: the header is no object")
    manifest = _manifest(document, name)
    check(manifest, limits)
    return manifest, _PREFIX_BYTES + length


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a name stands twice")
    return document


def _manifest(document: dict[str, Any], name: str) -> Manifest:
    metadata = document.pop(RESERVED_NAME, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise InvalidInputError.at(name, f"{RESERVED_NAME} does not map text to text")
    stored = [_spec(key, entry, name) for key, entry in document.items()]
    # Foreign files may list their tensors in any order; sorting is stable, so our order stays.
    stored.sort(key=lambda tensor: (tensor.offset, tensor.size_bytes))
    by_name = {tensor.name: tensor for tensor in stored}
    aliases = []
    for key in sorted(key for key in metadata if key.startswith(ALIAS_PREFIX)):
        source = by_name.get(metadata.pop(key))
        if source is None:
            raise InvalidInputError.at(name, f"{key} names no tensor of this file")
        aliases.append(
            TensorSpec(
                key.removeprefix(ALIAS_PREFIX),
                source.dtype,
                source.shape,
                source.offset,
                source.size_bytes,
                source.name,
            )
        )
    return Manifest(
        tensors=(*stored, *aliases),
        total_bytes=sum(tensor.size_bytes for tensor in stored),
        purpose=Purpose.STATE,
        metadata=metadata,
    )


def _spec(key: str, entry: Any, name: str) -> TensorSpec:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if (
            all(type(dim) is int and 0 <= dim < 2**63 for dim in shape) and 0 <= begin <= end
        ):
            info = dtype_in_safetensors(dtype, f"{name}: {key}")
            size = math.prod(shape) * info.item_bytes
            if end - begin != size:
                raise InvalidInputError.at(
                    name, f"{key!r} takes {end - begin} bytes, {dtype} {shape} has {size}"
                )
            return TensorSpec(key, info.name, tuple(shape), begin, size)
        case _:
            raise InvalidInputError.at(name, f"entry of {key!r} is malformed")

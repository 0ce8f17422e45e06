"""Reads a stored state window by window, and names the tensors that are averaged, not trained."""

import json
from collections.abc import Collection
from contextlib import ExitStack
from typing import Final

import numpy as np

from stratagem.common.base.ids import Digest
from stratagem.common.tensors.files import header_of
from stratagem.common.tensors.manifest import Manifest
from stratagem.coordinator.store.blobs.blob_store import BlobStore
from stratagem.coordinator.store.blobs.verified_file import BlobFile
from stratagem.coordinator.updates.numpy_floats import Raw, Wide, storage, widen

AVERAGED_KEY: Final = "averaged"
"""Metadata key of a state: the JSON list of floating tensors that no optimizer may touch."""


def averaged_names(manifest: Manifest) -> Collection[str]:
    """Return the tensors of a state that are averaged under every server optimizer."""
    return frozenset(json.loads(manifest.metadata.get(AVERAGED_KEY, "[]")))


def open_state(
    files: ExitStack, store: BlobStore, digest: Digest
) -> "tuple[Manifest, StateReader]":
    """Return the manifest and the reader of a stored state; `files` closes it."""
    file = files.enter_context(store.open(digest))
    manifest, data_start = header_of(file, digest)
    return manifest, StateReader(file, data_start)


class StateReader:
    """A reader of windows of a blob; every byte is checked."""

    def __init__(self, file: BlobFile, data_start: int) -> None:
        self._file = file
        self._data_start = data_start

    def read(self, dtype: str, offset: int, num: int) -> Wide:
        """Return num elements from a byte offset on, in float64."""
        values = np.empty(num)
        widen(dtype, self.read_raw(dtype, offset, num), values)
        return values

    def read_raw(self, dtype: str, offset: int, num: int) -> Raw:
        """Return num elements from a byte offset on, as they are stored."""
        raw = np.empty(num, storage(dtype))
        self._file.read_into(raw.view(np.uint8).data, self._data_start + offset)
        return raw

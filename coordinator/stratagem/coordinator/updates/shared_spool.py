"""Accepted updates in an object store, so that another coordinator can fold the round.

    spool/<run>/<party>/<round>/<client>/<term>-<token>-<samples>-<crc32c>.safetensors

One object is one acceptance: its name says what the fold needs to know beside the file, so it takes
one write, which is whole or is not there. Nothing is overwritten (object_store.py says why): which
of a client's updates counts is what the journal says. Knows nothing of the local files.
"""

import io
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from stratagem.common.base.errors import IntegrityError, LimitError
from stratagem.common.base.ids import Digest
from stratagem.common.tensors.files import MAX_HEADER_BYTES, header_size, parse_header
from stratagem.common.tensors.manifest import Manifest, Purpose
from stratagem.coordinator.store.blobs.object_store import (
    Objects,
    StoredObject,
    beginning,
    deletable,
    mark,
    unique_name,
)
from stratagem.coordinator.store.blobs.shared_blobs import own_pieces
from stratagem.coordinator.updates.spool_upload import SpoolEntry, update_digest

_FOLDER: Final = "spool"
_NAME: Final = re.compile(r"\d{10}-[0-9a-f]{16}-(\d{1,18})-([0-9a-f]{8})\.safetensors")


@dataclass(frozen=True, slots=True)
class SharedUpdate:
    """An accepted update that is stored in the object store."""

    client: int
    stored: StoredObject
    num_samples: int
    digest: Digest


class SharedSpool:
    """The updates below one prefix, for the coordinator of a term. `folder` is <run>/<party>/..."""

    def __init__(self, objects: Objects, term: int) -> None:
        self._objects, self._term = objects, term

    def put(self, folder: str, entry: SpoolEntry) -> None:
        """Write the update of a client, whose folder it is; when this returns, it is accepted."""
        facts = f"{entry.num_samples}-{entry.crc32c:08x}"
        name = f"{_FOLDER}/{folder}/{unique_name(self._term)}-{facts}.safetensors"
        num_bytes = entry.data_start + entry.data_bytes
        with entry.path.open("rb") as file:
            self._objects.put(name, own_pieces(file.fileno(), num_bytes), num_bytes)

    def find(self, round_folder: str) -> dict[int, list[SharedUpdate]]:
        """Return the updates of a round by client; of each client, those of the newest term
        last."""
        clients: dict[int, list[SharedUpdate]] = {}
        for entry in self._objects.list(f"{_FOLDER}/{round_folder}"):
            *_, client, name = entry.name.split("/")
            facts = _NAME.fullmatch(name)
            if facts and client.isdigit():
                digest = update_digest(int(facts[2], 16))
                update = SharedUpdate(int(client), entry, int(facts[1]), digest)
                clients.setdefault(int(client), []).append(update)
        return clients

    def read(self, update: SharedUpdate) -> tuple[Manifest, Iterator[bytes | memoryview]]:
        """Return the manifest of the update, and its data, which are not verified.

        Raises NotFoundError, and IntegrityError where it does not begin with a header.
        """
        pieces = self._objects.read(update.stored)
        head = b""
        for piece in pieces:
            head += bytes(piece)
            if not len(head) < header_size(head) <= MAX_HEADER_BYTES:
                break
        file = io.BytesIO(head)
        try:
            manifest, data_start = parse_header(file, Path(update.stored.name).name)
        except (ValueError, LimitError) as error:
            raise IntegrityError(f"{update.stored.name} is damaged: {error}") from error

        def data() -> Iterator[bytes | memoryview]:
            yield head[data_start:]
            yield from pieces

        return replace(manifest, purpose=Purpose.UPDATE), data()

    def delete(self, folder: str, is_meant: Callable[[str], bool] = lambda _name: True) -> None:
        """Delete what was written below a folder, by this coordinator and earlier ones; is_meant is
        asked about each name, <run>/<party>/..."""
        listed = self._objects.list(f"{_FOLDER}/{folder}")
        meant = [stored for stored in listed if is_meant(stored.name.partition("/")[2])]
        self._delete(meant, mark(self._term))

    def clean(self, kept: Collection[str]) -> None:
        """Delete what earlier coordinators have written below other folders of runs than these."""
        listed = self._objects.list(_FOLDER)
        others = [stored for stored in listed if stored.name.split("/")[1] not in kept]
        self._delete(others, beginning(self._term))

    def _delete(self, listed: list[StoredObject], before: str) -> None:
        self._objects.delete(stored.name for stored in deletable(listed, before))

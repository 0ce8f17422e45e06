"""A backup as a folder: the journal of one moment, and each blob that its facts need.

    backup.json     term and digests
    journal.sqlite  the journal, whatever its database is
    blobs/          as below a coordinator's data folder

A later backup into the same folder copies what is new. The journal and the list take their places
when all blobs are there, and only then what they need no more is removed: so a backup that is
interrupted leaves the one before it whole.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import grpc

from stratagem.client.sdk.connection.retrying_calls import Connection
from stratagem.common.base.errors import IntegrityError
from stratagem.common.base.files import whole_file
from stratagem.common.base.ids import Digest, check_digest
from stratagem.common.rpc.tensor_transfer import pull
from stratagem.common.tensors.files import header_bytes
from stratagem.common.tensors.leaves import StateHasher
from stratagem.common.tensors.manifest import Manifest, Purpose
from stratagem.common.tensors.stream import Sink
from stratagem.v1 import coordinator_pb2 as pb


@dataclass(frozen=True, slots=True)
class BackupDone:
    """A backup that is whole."""

    path: Path
    term: int
    journal_bytes: int
    num_blobs: int
    num_copied: int
    """Blobs that were not in the folder before."""


async def back_up(connection: Connection, folder: Path) -> BackupDone:
    """Copy what a coordinator has of the present moment into a folder, which is made if absent."""
    _make(folder)
    await connection.greet()
    with whole_file(folder / "journal.sqlite", mode=0o600) as journal:
        term, digests = 0, list[Digest]()

        def begin() -> grpc.aio.UnaryStreamCall[pb.BackUpRequest, pb.BackUpResponse]:
            journal.seek(0)
            journal.truncate()
            digests.clear()
            return connection.stub.BackUp(pb.BackUpRequest())

        journal_bytes = 0
        async for response in connection.follow(begin):
            term, journal_bytes = response.term or term, response.journal_bytes or journal_bytes
            digests += map(check_digest, response.digests)
            journal.write(response.journal)
        if journal.tell() != journal_bytes:
            raise IntegrityError(f"{journal.tell()} of {journal_bytes} bytes of the journal came")
        paths = {digest: blob_path(folder, digest) for digest in digests}
        missing = [digest for digest, path in paths.items() if not path.exists()]
        for digest in missing:
            await _copy(connection, digest, paths[digest])
    with whole_file(folder / "backup.json", mode=0o600) as file:
        file.write(json.dumps({"term": term, "digests": digests}, indent=0).encode())
    _prune(folder, paths.keys())
    return BackupDone(folder, term, journal_bytes, len(digests), len(missing))


def blob_path(folder: Path, digest: Digest) -> Path:
    """Return where a backup has a blob."""
    return folder / "blobs" / digest[:2] / f"{digest}.safetensors"


def _make(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _prune(folder: Path, digests: Collection[Digest]) -> None:
    """Remove the blobs that only an earlier backup needed."""
    for path in (folder / "blobs").glob("*/*.safetensors"):
        if path.stem not in digests:
            path.unlink()


async def _copy(connection: Connection, digest: Digest, path: Path) -> None:
    _make(path.parent)
    hashers: list[StateHasher] = []
    with whole_file(path, mode=0o600) as file:

        def accept(manifest: Manifest) -> Sink:
            hashers.append(StateHasher(manifest))
            file.write(header_bytes(manifest))

            def sink(_offset: int, data: bytes) -> None:
                hashers[-1].update(data)
                file.write(data)

            return sink

        await pull(
            lambda offset: connection.stub.DownloadBlob(
                pb.DownloadBlobRequest(digest=digest, offset=offset)
            ),
            accept,
            purpose=Purpose.STATE,
            retry=connection.stream_retry,
        )
        if hashers[-1].digest() != digest:
            raise IntegrityError(f"blob {digest}: the content does not match its digest")

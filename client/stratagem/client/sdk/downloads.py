"""Download committed states and backups as files and folders, each of which appears completely and
verified, or not at all."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import grpc

from stratagem.client.sdk.connection import Connection
from stratagem.client.sdk.model_files import AVERAGE, PlainModel, whole_folder
from stratagem.client.sdk.torch_process import ask
from stratagem.common.base.errors import IntegrityError, InvalidInputError
from stratagem.common.base.files import whole_file
from stratagem.common.base.ids import Digest, RunId, check_digest
from stratagem.common.job import JobSpec
from stratagem.common.process.process import temporary_folder
from stratagem.common.rpc.tensor_transfer import Accept, pull
from stratagem.common.tensors.files import header_bytes
from stratagem.common.tensors.leaves import StateHasher
from stratagem.common.tensors.manifest import Manifest, Purpose
from stratagem.common.tensors.stream import Sink
from stratagem.v1 import coordinator_pb2 as pb

# ---- States ----


async def to_file(
    connection: Connection, run_id: RunId, which: str, path: Path, *, plain: bool = False
) -> Path:
    """Download a state to a safetensors file, replacing an existing file.

    plain: write only the model, under all names of its state_dict(); see model_files.py. This is
    always so for the model of averaged parameters, because that is not a state.
    """
    with whole_file(path) as file:

        def put(_number: int, place: int, data: bytes | memoryview) -> None:
            file.seek(place)
            file.write(data)

        def begin(manifest: Manifest, header: bytes) -> Sink:
            if plain or which == AVERAGE:
                return PlainModel(manifest, put, which).write
            return _appending(file, header)

        await _verified(partial(pull_state, connection, run_id, which), begin, f"{run_id} {which}")
    return path


async def to_folder(
    connection: Connection, run_id: RunId, which: str, path: Path, shard_bytes: int
) -> Path:
    """Download the model to a new folder of files with an index, in the plain form of `to_file`."""
    with whole_folder(path) as files:

        def begin(manifest: Manifest, _header: bytes) -> Sink:
            model = PlainModel(
                manifest, files.write, which, shard_bytes=shard_bytes, begin=files.begin
            )
            return model.write

        await _verified(partial(pull_state, connection, run_id, which), begin, f"{run_id} {which}")
    return path


async def _verified(
    pull_into: Callable[[Accept], Awaitable[Manifest]],
    begin: Callable[[Manifest, bytes], Sink],
    name: str,
    digest: str | None = None,
) -> None:
    """Download a state to the sink that `begin` returns for its manifest and file header. Raises
    IntegrityError unless the content has the given digest, by default the manifest's."""
    hashers: list[StateHasher] = []

    def accept(manifest: Manifest) -> Sink:
        hashers.append(StateHasher(manifest))
        write = begin(manifest, header_bytes(manifest))

        def sink(offset: int, data: bytes) -> None:
            hashers[-1].update(data)
            write(offset, data)

        return sink

    manifest = await pull_into(accept)
    if hashers[-1].digest() != (digest or manifest.digest):
        raise IntegrityError(f"{name}: the content does not match its digest")


def _appending(file: BinaryIO, header: bytes) -> Sink:
    file.write(header)

    def append(_offset: int, data: bytes) -> None:
        file.write(data)

    return append


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """The result of exporting a model for another program."""

    path: Path
    difference: float
    """The largest difference between the outputs of the exported model and the original; 0 for
    formats that hold no code."""
    inputs: tuple[str, ...] = ()
    """The exported model's inputs, such as "x float32[rows, 64]"; only the first size may vary."""


async def export_model(
    connection: Connection,
    run_id: RunId,
    which: str,
    job: JobSpec,
    path: Path,
    import_path: Sequence[Path],
    **asked: str,
) -> ExportedModel:
    """Export a model for another program, in a separate process with torch and the user's code."""
    target = _free(path, is_file=asked["to"] != "hf")
    with temporary_folder("export") as scratch:
        state = scratch.path / "model.safetensors"
        await to_file(connection, run_id, which, state, plain=True)
        named: dict[str, Any] = {"state": str(state), "path": target, **asked}
        answer = await asyncio.to_thread(
            lambda: ask("export", job, import_path=import_path, device="cpu", **named)
        )
    return ExportedModel(path, float(answer["difference"]), tuple(answer["inputs"]))


def _free(path: Path, *, is_file: bool) -> str:
    """Return an absolute path for a new file or folder. Raises InvalidInputError if something
    exists there, or it cannot be created."""
    if path.exists():
        raise InvalidInputError.at("path", f"{path} exists already; nothing was written")
    if is_file and not path.absolute().parent.is_dir():
        text = f"{path}: there is no folder {str(path.absolute().parent)!r}; nothing was written"
        raise InvalidInputError.at("path", text)
    return str(path.absolute())


async def profile_to_file(connection: Connection, run_id: RunId, path: Path) -> Path:
    """Download a run's trace to a file, replacing an existing one; after a cut it begins again."""
    request = pb.DownloadProfileRequest(run_id=run_id)
    with whole_file(path) as file:

        def begin() -> grpc.aio.UnaryStreamCall[
            pb.DownloadProfileRequest, pb.DownloadProfileResponse
        ]:
            file.seek(0)
            file.truncate()
            return connection.stub.DownloadProfile(request)

        async for response in connection.follow(begin):
            file.write(response.data)
    return path


async def pull_state(connection: Connection, run_id: RunId, which: str, accept: Accept) -> Manifest:
    """Download a state to the sink that `accept` returns; resume after an interruption."""

    def request(offset: int) -> pb.DownloadStateRequest:
        return pb.DownloadStateRequest(run_id=run_id, which=which, offset=offset)

    await connection.greet()
    return await pull(
        lambda offset: connection.stub.DownloadState(request(offset)),
        accept,
        purpose=Purpose.STATE,
        retry=connection.stream_retry,
    )


# ---- Backups ----
#
# A backup is a folder with the journal of one moment, and each blob that its facts need:
#
#     backup.json     term and digests
#     journal.sqlite  the journal, whatever its database is
#     blobs/          as below a coordinator's data folder
#
# A later backup into the same folder copies only new data. The journal and the list are replaced
# when all blobs are there, and only then unneeded blobs are removed: an interrupted backup leaves
# the one before it whole.


@dataclass(frozen=True, slots=True)
class BackupDone:
    """The result of a complete backup."""

    path: Path
    term: int
    journal_bytes: int
    num_blobs: int
    num_copied: int
    """The number of blobs (stored states) that were copied because the folder lacked them."""


async def back_up(connection: Connection, folder: Path) -> BackupDone:
    """Copy the journal and the states, as they are now, into a folder; create it if missing."""
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
    """Return the path of a blob (a stored state) in a backup."""
    return folder / "blobs" / digest[:2] / f"{digest}.safetensors"


def _make(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _prune(folder: Path, digests: Collection[Digest]) -> None:
    """Delete the blobs of a backup whose digests are not among these."""
    for path in (folder / "blobs").glob("*/*.safetensors"):
        if path.stem not in digests:
            path.unlink()


async def _copy(connection: Connection, digest: Digest, path: Path) -> None:
    def pull_blob(accept: Accept) -> Awaitable[Manifest]:
        return pull(
            lambda offset: connection.stub.DownloadBlob(
                pb.DownloadBlobRequest(digest=digest, offset=offset)
            ),
            accept,
            purpose=Purpose.STATE,
            retry=connection.stream_retry,
        )

    _make(path.parent)
    with whole_file(path, mode=0o600) as file:
        await _verified(
            pull_blob, lambda _, header: _appending(file, header), f"blob {digest}", digest
        )

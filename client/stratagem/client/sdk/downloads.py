"""Committed states as files. A file appears whole and verified, or not at all."""

import hashlib
from pathlib import Path

import grpc

from stratagem.client.sdk.plain_model import AVERAGE, PlainModel
from stratagem.client.sdk.retrying_calls import Connection
from stratagem.common.base.errors import IntegrityError
from stratagem.common.base.ids import RunId
from stratagem.common.files.atomic_file import whole_file
from stratagem.common.rpc.tensor_transfer import Accept, pull
from stratagem.common.tensors.chunks import Sink
from stratagem.common.tensors.manifest import Manifest, Purpose
from stratagem.common.tensors.safetensors_file import header_bytes
from stratagem.v1 import coordinator_pb2 as pb


async def to_file(
    connection: Connection, run_id: RunId, which: str, path: Path, *, plain: bool = False
) -> Path:
    """Write the state as a safetensors file, replacing what was there.

    plain: only the model, under the names of its state_dict(), tied ones too; see plain_model.py.
    The model of averaged parameters is always written so: it is no state.
    """
    digest = hashlib.sha256()
    with whole_file(path) as file:

        def accept(manifest: Manifest) -> Sink:
            header = header_bytes(manifest)
            digest.update(header)
            is_model = plain or which == AVERAGE
            model = PlainModel(manifest, file, which) if is_model else None
            if model is None:
                file.write(header)

            def sink(offset: int, data: bytes) -> None:
                digest.update(data)
                if model is None:
                    file.write(data)
                else:
                    model.write(offset, data)

            return sink

        manifest = await pull_state(connection, run_id, which, accept)
        if digest.hexdigest() != manifest.digest:
            raise IntegrityError(f"{run_id} {which}: the content does not match its digest")
    return path


async def profile_to_file(connection: Connection, run_id: RunId, path: Path) -> Path:
    """Write a run's trace, replacing what was there. A stream that breaks is begun again."""
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
    """Stream a state; continues where it was cut while the coordinator restarts."""
    which = "final" if which == AVERAGE else which

    def request(offset: int) -> pb.DownloadStateRequest:
        return pb.DownloadStateRequest(run_id=run_id, which=which, offset=offset)

    await connection.greet()
    return await pull(
        lambda offset: connection.stub.DownloadState(request(offset)),
        accept,
        purpose=Purpose.STATE,
        retry=connection.stream_retry,
    )

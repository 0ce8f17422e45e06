"""Has a worker read a state in leaves from an object store by itself, by signed requests.

The worker gets the list of the state, asks for leaves, and says when it has them all. Their bytes
do not come here.
"""

import asyncio
from typing import Any, Final

import grpc.aio

from stratagem.common.base.errors import InvalidInputError, UnavailableError
from stratagem.common.base.ids import Digest
from stratagem.common.rpc.channel import write_message
from stratagem.common.rpc.status_codes import from_rpc_error
from stratagem.common.rpc.streams import StallTimeout
from stratagem.common.tensors.leaves import read_list
from stratagem.coordinator.effects.execution.leaf_signing import LeafSigning
from stratagem.coordinator.store.leaves.leaf_blobs import LeafBlobs
from stratagem.v1 import types_pb2, worker_pb2

_PART_BYTES: Final = 2**20


async def fetch(
    stub: Any,
    fence: types_pb2.Fence,
    run_id: str,
    digest: Digest,
    leaves: LeafBlobs,
    stall_s: float,
) -> None:
    """Return when the worker has the state. Raises an error of our tree where it has not: then it
    must come another way."""
    held = await asyncio.to_thread(leaves.open, digest)  # no leaf is collected meanwhile
    content = await asyncio.to_thread(leaves.list_of, digest)
    digests = read_list(content, digest, leaves.limits).digests
    header = worker_pb2.FetchStateHeader(
        fence=fence, run_id=run_id, digest=digest, list_bytes=len(content)
    )
    call = stub.FetchState()
    try:
        async with StallTimeout(stall_s) as peer:
            await call.wait_for_connection()
            await write_message(call, worker_pb2.FetchStateRequest(header=header))
            await _send_list(call, content)
            assert leaves.signs is not None
            signing = LeafSigning(call, worker_pb2.FetchStateRequest, leaves.signs.signed_gets)
            while True:
                with peer.waiting():
                    message = await call.read()
                if message is grpc.aio.EOF:
                    code = await call.code()
                    raise UnavailableError(f"{code.name}: {await call.details()}")
                if message.committed:
                    return
                numbers = [leaf.number for leaf in message.asked.leaves]
                if any(number >= len(digests) for number in numbers):
                    raise InvalidInputError.at("asked.leaves", f"the state has {len(digests)}")
                await signing.answer(numbers, [digests[number] for number in numbers])
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    except TimeoutError as error:
        raise UnavailableError(str(error)) from error
    finally:
        call.cancel()
        held.close()


async def _send_list(call: Any, content: bytes) -> None:
    for start in range(0, len(content), _PART_BYTES):
        part = content[start : start + _PART_BYTES]
        await write_message(call, worker_pb2.FetchStateRequest(list=part))

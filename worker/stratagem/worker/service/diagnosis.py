"""Diagnose a worker for `stratagem doctor`: its environment, and the workers that it can reach.

The measurement is made when the coordinator asks. Another worker counts as reached when anything
answers at its address, even a refusal, since only the coordinator may call it.
"""

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import grpc
import structlog
import torch
import torch.distributed as dist

from stratagem.common.base.errors import StratagemError
from stratagem.common.observe.findings import environment_of
from stratagem.common.rpc.channel import Proof, open_channel
from stratagem.common.tensors.leaves import StateFolder, folder_mismatch
from stratagem.v1 import types_pb2
from stratagem.v1 import worker_pb2 as pb
from stratagem.v1.worker_pb2_grpc import WorkerServiceStub
from stratagem.worker.session.context import Host

PROBE_TIMEOUT_S: Final = 3.0
log = structlog.get_logger(__name__)

_ANSWERS: Final = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)


async def diagnosis(
    host: Host, probes: Iterable[types_pb2.PeerProbe]
) -> tuple[types_pb2.Environment, list[types_pb2.PeerProbe]]:
    """Return this worker's environment, and the result of each probe."""
    proof, folder = host.hub.proof, None if host.states is None else host.states.folder
    return await asyncio.gather(
        asyncio.to_thread(surroundings, host.blobs.data_dir, proof, folder),
        asyncio.gather(*(probe(proof, peer.worker_id, peer.address) for peer in probes)),
    )


def surroundings(
    data_dir: Path | None, proof: Proof, folder: StateFolder | None = None
) -> types_pb2.Environment:
    """Return the environment: torch's backends, CUDA devices, and the folder of states as seen
    here. Blocking."""
    environment = environment_of(data_dir, ("torch", "safetensors"), proof.tls)
    available = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    if dist.is_available():
        environment.backends.extend(name for name, is_there in available.items() if is_there())
    if torch.cuda.is_available():
        names = (torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        environment.cuda_devices.extend(names)
    if folder is not None:
        environment.state_folder, environment.store_id = str(folder.root), folder.store_id()
        environment.state_folder_problem = folder.problem()
    return environment


def say_mismatch(folder: StateFolder | None, store_id: str) -> None:
    """Log a warning if this worker does not see the coordinator's folder of states; otherwise only
    slow commits and the coordinator's log would show it. Blocking."""
    if folder is None:
        reason = folder_mismatch("", "", store_id)
    else:
        folder_id = folder.store_id()
        reason = folder_mismatch(str(folder.root), folder_id, store_id, folder.problem())
    if reason:
        log.warning("states are relayed", reason=reason)


async def probe(proof: Proof, worker_id: str, address: str) -> types_pb2.PeerProbe:
    """Probe a worker at an address; return the round-trip time, or the problem."""
    answer = types_pb2.PeerProbe(worker_id=worker_id, address=address)
    began_s = time.perf_counter()
    try:
        async with open_channel(
            address, proof, to_worker=worker_id, own_connection=True
        ) as channel:
            described = await WorkerServiceStub(channel).Describe(
                pb.DescribeRequest(), timeout=PROBE_TIMEOUT_S
            )
        if described.worker_id != worker_id:
            answer.problem = f"worker {described.worker_id} answers there"
    except grpc.aio.AioRpcError as error:
        if error.code() not in _ANSWERS:
            answer.problem = f"{error.code().name}: {error.details()}"
    except StratagemError as error:
        answer.problem = str(error)
    answer.round_trip_s = time.perf_counter() - began_s
    return answer

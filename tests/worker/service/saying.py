"""What a coordinator says to a worker: plans, blobs, and the reading of answers."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from torch import Tensor

from stratagem.common.job import JobSpec
from stratagem.common.numerics.rules import CURRENT
from stratagem.common.numerics.shards import assign_shards
from stratagem.common.rpc.tensor_transfer import pull, push
from stratagem.common.tensors.files import blob_digest
from stratagem.common.tensors.manifest import Manifest, Purpose, to_proto
from stratagem.common.tensors.torch_codec import allocate, manifest_of
from stratagem.v1 import types_pb2
from stratagem.v1 import worker_pb2 as pb
from tests.jobs import job
from tests.patience import PATIENCE_S
from tests.worker.service.rig import Worker


def evaluated_job(model: str | dict[str, Any] = "dropout_mlp", **changes: Any) -> JobSpec:
    evaluation = {"split": "test", "metrics": ["accuracy"], "batch_size": 4}
    return job(model, **{"evaluation": evaluation, **changes})


def fence(membership: int = 1, term: int = 1) -> types_pb2.Fence:
    return types_pb2.Fence(term=term, membership=membership)


def session(run_id: str, party: str = "") -> types_pb2.SessionRef:
    return types_pb2.SessionRef(run_id=run_id, party=party)


def build_request(run_id: str, spec: JobSpec) -> pb.ExecuteRequest:
    return pb.ExecuteRequest(
        fence=fence(),
        session=session(run_id, "build"),
        segment=0,
        job_json=spec.canonical_json(),
        numerics=CURRENT,
        build=pb.BuildPlan(),
    )


@dataclass(frozen=True)
class Blob:
    manifest: Manifest
    buffers: list[memoryview]
    digest: str


def blob_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], purpose: Purpose) -> Blob:
    manifest, buffers = manifest_of(tensors, purpose, metadata=metadata)
    return Blob(manifest, buffers, blob_digest(manifest, buffers))


@dataclass(frozen=True)
class Plan:
    """A segment of a run with R shards, as its coordinator plans it."""

    run_id: str
    spec: JobSpec
    base: Blob
    num_shards: int = 2
    segment: int = 1
    base_step: int = 0
    to_step: int = 10
    exchange: pb.ExchangeMethod.ValueType = pb.EXCHANGE_METHOD_ALL_REDUCE
    numerics: int = CURRENT

    def request(self, workers: list[Worker], rank: int, membership: int = 1) -> pb.ExecuteRequest:
        shards = assign_shards(self.num_shards, len(workers))
        members = [
            pb.Member(
                worker_id=worker.name,
                incarnation=worker.incarnation,
                address=worker.address,
                first_shard=owned.start,
                num_shards=len(owned),
            )
            for worker, owned in zip(workers, shards, strict=True)
        ]
        return pb.ExecuteRequest(
            fence=fence(membership),
            session=session(self.run_id),
            segment=self.segment,
            job_json=self.spec.canonical_json(),
            numerics=self.numerics,
            train=pb.TrainPlan(
                view=pb.View(members=members, rank=rank),
                base=pb.StateRef(
                    segment=self.segment - 1, step=self.base_step, digest=self.base.digest
                ),
                to_step=self.to_step,
                num_shards=self.num_shards,
                exchange=self.exchange,
                evaluate_splits=["test"],
            ),
        )


@dataclass
class Attended:
    """What one Execute stream has said."""

    accepted: pb.Accepted = field(default_factory=pb.Accepted)
    needed: list[str] = field(default_factory=list)
    progress: list[pb.Progress] = field(default_factory=list)
    lines: list[pb.LogLine] = field(default_factory=list)
    result: pb.ExecuteResult = field(default_factory=pb.ExecuteResult)


async def attend(worker: Worker, request: pb.ExecuteRequest, *blobs: Blob) -> Attended:
    """Follow a plan to its result, bringing the blobs that it asks for."""
    said = Attended()
    by_digest = {blob.digest: blob for blob in blobs}
    async with asyncio.timeout(PATIENCE_S):
        async for response in worker.stub.Execute(request):
            match response.WhichOneof("message"):
                case "accepted":
                    said.accepted = response.accepted
                case "need_blob":
                    said.needed.append(response.need_blob.digest)
                    blob = by_digest[response.need_blob.digest]
                    await bring(worker, request.session.run_id, blob)
                case "progress":
                    said.progress.append(response.progress)
                case "log":
                    said.lines.append(response.log)
                case "result":
                    said.result = response.result
    return said


async def bring(worker: Worker, run_id: str, blob: Blob) -> None:
    header = pb.SetStateRequest(
        header=pb.SetStateHeader(
            fence=fence(0), run_id=run_id, digest=blob.digest, manifest=to_proto(blob.manifest)
        )
    )
    await push(worker.stub.SetState, header, blob.manifest, blob.buffers)


async def fetch(
    worker: Worker, run_id: str, segment: int, party: str = "", membership: int = 1
) -> tuple[dict[str, Tensor], Manifest]:
    """The snapshot of a segment."""
    ways_out: list[Any] = []

    def accept(manifest: Manifest) -> Any:
        sink, finish = allocate(manifest)
        ways_out.append(finish)
        return sink

    request = pb.GetStateRequest(
        fence=fence(membership), session=session(run_id, party), snapshot=segment
    )

    def call(offset: int) -> Any:
        request.offset = offset
        return worker.stub.GetState(request)

    manifest = await pull(call, accept)
    return ways_out[0](), manifest


async def base_of(worker: Worker, run_id: str, spec: JobSpec) -> Blob:
    """Segment 0 of a run, built by a worker."""
    said = await attend(worker, build_request(run_id, spec))
    assert said.result.WhichOneof("outcome") == "build", said.result
    tensors, manifest = await fetch(worker, run_id, 0, "build")
    return blob_of(tensors, manifest.metadata, Purpose.STATE)


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await _to_the_end(call)
    return refused.value


async def _to_the_end(call: Any) -> None:
    if not hasattr(call, "read"):
        await call
        return
    while await call.read() is not grpc.aio.EOF:  # one that was read from cannot be iterated
        pass

"""A valid conversation for every call, which the attacks then damage."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stratagem.common.job import JobSpec
from stratagem.common.tensors.files import blob_digest
from stratagem.common.tensors.manifest import Purpose, build_manifest, to_proto
from stratagem.v1 import coordinator_pb2 as cpb
from stratagem.v1 import peer_pb2 as ppb
from stratagem.v1 import types_pb2
from stratagem.v1 import worker_pb2 as wpb
from tests.common.tensors.chunk_messages import iter_chunks

Messages = Sequence[Any]


@dataclass(frozen=True)
class Target:
    """What there is to attack."""

    kept_run: str
    """A run that has ended, with its states."""
    worker_run: str
    """A run that has a session on the worker, which nobody but the test has asked for."""
    job: JobSpec
    term: int = 1

    @property
    def fence(self) -> types_pb2.Fence:
        return types_pb2.Fence(term=self.term, membership=1)

    @property
    def session(self) -> types_pb2.SessionRef:
        return types_pb2.SessionRef(run_id=self.worker_run, party="build")


def upload_of(
    size: int, seed: int = 0, purpose: Purpose = Purpose.DATA
) -> tuple[str, Any, list[Any]]:
    """(digest, manifest, chunks) of one tensor."""
    values = np.random.default_rng(seed).random(size).astype(np.float32)
    manifest = build_manifest([("train.x", "float32", (size,))], purpose)
    content = [values.data.cast("B")]
    return blob_digest(manifest, content), to_proto(manifest), list(iter_chunks(content))


def samples(target: Target, seed: int = 0) -> Mapping[str, Messages]:
    """The requests of a valid call, by name of the call; what is uploaded depends on the seed."""
    run, fence, ref = target.kept_run, target.fence, target.session
    return {
        "SubmitRun": [
            cpb.SubmitRunRequest(run_id="nobody", job_json=_dataless(target.job), note="why")
        ],
        "GetRun": [cpb.GetRunRequest(run_id=run)],
        "ListRuns": [cpb.ListRunsRequest()],
        "WatchRun": [cpb.WatchRunRequest(run_id=run, from_index=1)],
        "WatchRuns": [cpb.WatchRunsRequest()],
        "GetHistory": [cpb.GetHistoryRequest(run_id=run, series=["train.*"], max_rows=100)],
        "CancelRun": [cpb.CancelRunRequest(run_id=run)],
        "ResumeRun": [cpb.ResumeRunRequest(run_id="nobody")],
        "DeleteRun": [cpb.DeleteRunRequest(run_id="nobody")],
        "RecordVerification": [
            cpb.RecordVerificationRequest(
                run_id="nobody", result=cpb.VerificationResult(conclusion="EQUAL", num_equal=3)
            ),
            cpb.RecordVerificationRequest(run_id="nobody"),
        ],
        "PinRun": [cpb.PinRunRequest(run_id="nobody", pinned=True)],
        "ReleaseWorker": [cpb.ReleaseWorkerRequest(worker_id="nobody")],
        "BackUp": [cpb.BackUpRequest()],
        "DownloadBlob": [cpb.DownloadBlobRequest(digest="ab" * 32)],
        "DownloadState": [cpb.DownloadStateRequest(run_id=run, which="final")],
        "DownloadProfile": [cpb.DownloadProfileRequest(run_id=run)],
        "UploadData": _upload_data(*upload_of(7000, seed)),
        "TailLogs": [cpb.TailLogsRequest(run_id=run, follow=True)],
        "ListWorkers": [cpb.ListWorkersRequest()],
        "Diagnose": [cpb.DiagnoseRequest()],
        "RegisterWorker": [
            cpb.RegisterWorkerRequest(
                worker_id="stranger",
                incarnation="one",
                address="127.0.0.1:1",
                capability=types_pb2.Capability(device="cpu", num_threads=1, tags=["a"]),
            )
        ],
        "Heartbeat": [cpb.HeartbeatRequest(worker_id="stranger", incarnation="one")],
        "HeartbeatStream": [
            cpb.HeartbeatStreamRequest(worker_id="stranger", incarnation="one", for_run="r-1"),
            cpb.HeartbeatStreamRequest(draining=True),
        ],
        "Leave": [cpb.LeaveRequest(worker_id="stranger", incarnation="one", reason="done")],
        "Rendezvous": [
            cpb.RendezvousRequest(
                fence=fence, session=ref, endpoint=b"e", applied_step=3, address="127.0.0.1:1"
            )
        ],
        "Relay": [
            cpb.RelayRequest(worker_id="stranger", incarnation="one"),
            cpb.RelayRequest(data=b"bytes"),
        ],
        "Suspect": [cpb.SuspectRequest(fence=fence, session=ref, reason="gone")],
        "Execute": [execute(target, build=wpb.BuildPlan())],
        "GetState": [wpb.GetStateRequest(fence=fence, session=ref, snapshot=0)],
        "WriteLeaves": [
            wpb.WriteLeavesRequest(
                header=wpb.WriteLeavesHeader(
                    fence=fence, session=ref, upload=f"{1:010}-{'a' * 16}", num_ranks=1
                )
            ),
            wpb.WriteLeavesRequest(signed=_signed()),
        ],
        "FetchState": [
            wpb.FetchStateRequest(
                header=wpb.FetchStateHeader(
                    fence=fence, run_id="nobody", digest="a" * 64, list_bytes=5
                )
            ),
            wpb.FetchStateRequest(list=b"bytes"),
            wpb.FetchStateRequest(signed=_signed()),
        ],
        "SetState": _set_state(target, *upload_of(7000, seed, Purpose.STATE)),
        "GetGradients": [wpb.GetGradientsRequest(fence=fence, session=ref)],
        "ApplyGradients": _apply_gradients(target),
        "Abort": [wpb.AbortRequest(fence=fence, session=ref, reason="enough")],
        "CloseSession": [wpb.CloseSessionRequest(fence=fence, run_id="nobody")],
        "SecureRound": [
            wpb.SecureRoundRequest(
                fence=fence,
                run_id="nobody",
                client=1,
                round_num=1,
                post_keys=wpb.PostKeys(job_json=target.job.canonical_json()),
            )
        ],
        "Describe": [wpb.DescribeRequest()],
        "Send": _send(target),
    }


def _signed() -> wpb.SignedRequests:
    request = wpb.SignedRequest(number=0, url="https://127.0.0.1:1/leaf?X-Amz-Signature=0")
    return wpb.SignedRequests(requests=[request])


def execute(target: Target, **plan: Any) -> wpb.ExecuteRequest:
    """A plan of the target's job in the target's session."""
    return wpb.ExecuteRequest(
        fence=target.fence,
        session=target.session,
        job_json=target.job.canonical_json(),
        **plan,
    )


def _dataless(job: JobSpec) -> str:
    """A job that no coordinator starts, whatever its run is called: its data were not uploaded."""
    document = json.loads(job.canonical_json())
    return json.dumps({**document, "data": {"inline": "0" * 64}})


def _upload_data(digest: str, manifest: Any, chunks: list[Any]) -> list[Any]:
    header = cpb.UploadDataHeader(digest=digest, manifest=manifest)
    return [
        cpb.UploadDataRequest(header=header),
        *(cpb.UploadDataRequest(chunk=each) for each in chunks),
    ]


def _set_state(target: Target, digest: str, manifest: Any, chunks: list[Any]) -> list[Any]:
    header = wpb.SetStateHeader(
        fence=target.fence, run_id=target.worker_run, digest=digest, manifest=manifest
    )
    return [
        wpb.SetStateRequest(header=header),
        *(wpb.SetStateRequest(chunk=each) for each in chunks),
    ]


def _apply_gradients(target: Target) -> list[Any]:
    _, manifest, chunks = upload_of(70, purpose=Purpose.GRADIENTS)
    header = wpb.ApplyGradientsHeader(
        fence=target.fence, session=target.session, step=1, manifest=manifest
    )
    return [
        wpb.ApplyGradientsRequest(header=header),
        *(wpb.ApplyGradientsRequest(chunk=each) for each in chunks),
        wpb.ApplyGradientsRequest(commit=True),
    ]


def _send(target: Target) -> list[Any]:
    _, manifest, chunks = upload_of(70, purpose=Purpose.MESH)
    route: dict[str, Any] = {"fence": target.fence, "run_id": target.worker_run, "source": 1}
    hello = ppb.PeerHeader(manifest=to_proto(build_manifest([], Purpose.MESH)), **route)
    header = ppb.PeerHeader(step=1, tag=1, manifest=manifest, **route)
    return [
        ppb.SendRequest(header=hello),
        ppb.SendRequest(header=header),
        *(ppb.SendRequest(chunk=each) for each in chunks),
    ]

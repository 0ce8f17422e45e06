"""Attacks that were thought of, one by one: what is said, and what must be answered."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import google_crc32c
import grpc

from stratagem.common.rpc.channel import MAX_MESSAGE_BYTES
from stratagem.v1 import coordinator_pb2 as cpb
from stratagem.v1 import tensor_pb2, types_pb2
from stratagem.v1 import worker_pb2 as wpb
from tests.hostile.samples import Messages, Target, execute, samples

Code = grpc.StatusCode

WITH_MANIFEST: Final = ("UploadData", "SetState", "ApplyGradients", "Send")
UNSEEN: Final = 5
"""Seed of uploads that nobody completes."""
TRAVERSALS: Final = ("../../etc", "/etc/passwd", "a/../../b", "..", ".", "a//b", "a/", "\0", "")
BAD_DIGESTS: Final = ("", "../../x", "0" * 63, "F" * 64, f"../{'0' * 61}")
BAD_ADDRESSES: Final = (
    "unix:/tmp/socket:1",
    "dns://127.0.0.1:53/host:1",
    "localhost",
    "localhost:0",
    "localhost:99999",
    "localhost:²",
    "[::1:5",
    "a b:1",
    "",
)


@dataclass(frozen=True)
class Attack:
    """What is said in one call, and the codes that are right."""

    name: str
    method: str
    messages: Messages
    codes: frozenset[grpc.StatusCode]
    reason: str = ""
    """Stands in the reason that is given."""

    @property
    def frames(self) -> list[bytes]:
        return [
            each if isinstance(each, bytes) else each.SerializeToString() for each in self.messages
        ]


def attacks(target: Target) -> list[Attack]:
    """All of them."""
    return [
        *_strange_names(target),
        *_strange_orders(target),
        *_lying_manifests(target),
        *_lying_chunks(target),
        *_too_large(target),
        *_stale(target),
        *_strange_plans(target),
    ]


def _one(
    name: str, method: str, messages: Any, *codes: grpc.StatusCode, reason: str = ""
) -> Attack:
    many = messages if isinstance(messages, list) else [messages]
    return Attack(name, method, many, frozenset(codes), reason)


def _changed(message: Any, change: Callable[..., object]) -> Any:
    message = copy.deepcopy(message)
    change(message)
    return message


def _strange_names(target: Target) -> Iterator[Attack]:
    valid = samples(target)
    ref = types_pb2.SessionRef
    for name in TRAVERSALS:
        label = f"run {name!r}"
        for call in ("GetRun", "WatchRun", "TailLogs", "DownloadState", "DownloadProfile"):
            request = _changed(valid[call][0], lambda r, name=name: setattr(r, "run_id", name))
            yield _one(label, call, request, Code.NOT_FOUND, reason="not known")
        for call in ("CancelRun", "ResumeRun", "DeleteRun"):
            request = _changed(valid[call][0], lambda r, name=name: setattr(r, "run_id", name))
            yield _one(label, call, request, Code.NOT_FOUND)
        submit = _changed(valid["SubmitRun"][0], lambda r, name=name: setattr(r, "run_id", name))
        yield _one(label, "SubmitRun", submit, Code.INVALID_ARGUMENT, reason="run_id")
        close = wpb.CloseSessionRequest(fence=target.fence, run_id=name)
        yield _one(label, "CloseSession", close, Code.INVALID_ARGUMENT, reason="run_id")
        for call in ("Execute", "GetState", "GetGradients", "Abort"):
            request = _changed(
                valid[call][0], lambda r, name=name: r.session.CopyFrom(ref(run_id=name))
            )
            yield _one(label, call, request, Code.INVALID_ARGUMENT, reason="run_id")
            if not name:
                continue
            strange = ref(run_id=target.worker_run, party=name)
            request = _changed(valid[call][0], lambda r, s=strange: r.session.CopyFrom(s))
            yield _one(f"party {name!r}", call, request, Code.INVALID_ARGUMENT, reason="party")
        state = _changed(
            valid["SetState"][0], lambda r, name=name: setattr(r.header, "run_id", name)
        )
        yield _one(label, "SetState", [state], Code.INVALID_ARGUMENT, reason="run_id")
        worker = _changed(
            valid["RegisterWorker"][0], lambda r, name=name: setattr(r, "worker_id", name)
        )
        yield _one(f"worker {name!r}", "RegisterWorker", worker, Code.INVALID_ARGUMENT)
    for name in BAD_DIGESTS:
        for call in ("UploadData", "SetState"):
            header = _changed(
                valid[call][0], lambda r, name=name: setattr(r.header, "digest", name)
            )
            yield _one(f"digest {name!r}", call, [header], Code.INVALID_ARGUMENT, reason="digest")
    for name in BAD_ADDRESSES:
        worker = _changed(
            valid["RegisterWorker"][0], lambda r, name=name: setattr(r, "address", name)
        )
        yield _one(
            f"address {name!r}", "RegisterWorker", worker, Code.INVALID_ARGUMENT, reason="address"
        )
    for which in ("²", "9" * 5000, "-1", "../1", "\0"):
        request = cpb.DownloadStateRequest(run_id=target.kept_run, which=which)
        yield _one(f"state {which[:9]!r}", "DownloadState", request, Code.NOT_FOUND)
    unknown = _changed(valid["SetState"][0], lambda r: setattr(r.header, "run_id", "nobody"))
    yield _one("unknown run", "SetState", [unknown], Code.NOT_FOUND, reason="nobody")
    for call in ("GetState", "GetGradients"):
        request = _changed(
            valid[call][0], lambda r: r.session.CopyFrom(ref(run_id="nobody", party="x"))
        )
        yield _one("unknown session", call, request, Code.NOT_FOUND, reason="nobody")
    beat = cpb.HeartbeatRequest(worker_id="nobody", incarnation="one")
    yield _one("unknown worker", "Heartbeat", beat, Code.NOT_FOUND, reason="not registered")
    first = cpb.HeartbeatStreamRequest(worker_id="nobody", incarnation="one")
    yield _one("unknown worker", "HeartbeatStream", first, Code.NOT_FOUND, reason="not registered")


def _strange_orders(target: Target) -> Iterator[Attack]:
    valid = samples(target, UNSEEN)
    for call in WITH_MANIFEST:
        header, *chunks = valid[call]
        bad = (Code.INVALID_ARGUMENT,)
        yield _one("chunk first", call, [chunks[-1]], *bad, reason="header")
        yield _one("nothing at all", call, [], *bad, reason="header")
        yield _one("empty message", call, [b""], *bad, reason="header")
        if call in ("UploadData", "SetState"):
            yield _one("header twice", call, [header, header], *bad, reason="chunk must be")
            yield _one("header alone", call, [header], Code.DATA_LOSS, reason="ended after 0")
            yield _one("empty after", call, [header, b""], *bad, reason="nothing stands where")


def _lying_manifests(target: Target) -> Iterator[Attack]:
    """Of the kinds that tests/common/tensors/test_hostile_manifests.py has in full."""

    def tensor(**changes: Any) -> Callable[[Any], None]:
        def change(manifest: Any) -> None:
            spec = manifest.tensors[0]
            for name, value in changes.items():
                if name == "shape":
                    spec.shape[:] = value
                else:
                    setattr(spec, name, value)

        return change

    def many(manifest: Any) -> None:
        del manifest.tensors[:]
        for index in range(100_000):
            manifest.tensors.add(name=f"{index}", dtype=tensor_pb2.D_TYPE_INT8, offset=index)

    def keys(manifest: Any) -> None:
        manifest.metadata.update({f"{index}": "" for index in range(5000)})

    lies: Sequence[tuple[str, Callable[[Any], object], grpc.StatusCode | None]] = (
        ("negative dimension", tensor(shape=[-7]), Code.INVALID_ARGUMENT),
        ("dtype 99", tensor(dtype=99), Code.INVALID_ARGUMENT),
        ("size is a lie", tensor(size_bytes=2**62), Code.INVALID_ARGUMENT),
        ("40 GB in 50 bytes", tensor(shape=[10 * 2**30], size_bytes=40 * 2**30), None),
        ("overflow", tensor(shape=[2**62, 2**62]), Code.RESOURCE_EXHAUSTED),
        ("9 dimensions", tensor(shape=[1] * 9), Code.RESOURCE_EXHAUSTED),
        ("name", tensor(name="a\nb"), Code.INVALID_ARGUMENT),
        ("long name", tensor(name="x" * 300), Code.RESOURCE_EXHAUSTED),
        ("offset", tensor(offset=2**63), Code.INVALID_ARGUMENT),
        ("purpose", lambda m: setattr(m, "purpose", 99), Code.INVALID_ARGUMENT),
        ("codec", lambda m: setattr(m, "codec", 99), Code.INVALID_ARGUMENT),
        ("weight", lambda m: setattr(m, "weight", float("nan")), Code.INVALID_ARGUMENT),
        ("100 k tensors", many, Code.RESOURCE_EXHAUSTED),
        ("5000 keys", keys, Code.RESOURCE_EXHAUSTED),
    )
    for call in ("UploadData", "SetState"):
        header = samples(target, UNSEEN)[call][0]
        for name, lie, code in lies:
            message = _changed(header, lambda r, lie=lie: lie(r.header.manifest))
            codes = (Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED) if code is None else (code,)
            yield _one(name, call, [message], *codes)


def _lying_chunks(target: Target) -> Iterator[Attack]:
    def chunk(offset: int, data: bytes, *, is_right: bool = True) -> tensor_pb2.Chunk:
        crc = google_crc32c.value(data) if is_right else 1
        return tensor_pb2.Chunk(offset=offset, data=data, crc32c=crc)

    lies = (
        ("gap", chunk(100, b"1234")),
        ("end of the world", chunk(2**64 - 1, b"1234")),
        ("beyond the end", chunk(2**40, b"1234")),
        ("empty", chunk(0, b"")),
        ("checksum", chunk(0, b"1234", is_right=False)),
        ("more than announced", chunk(0, b"1" * 40_000)),
    )
    kinds = {"UploadData": cpb.UploadDataRequest, "SetState": wpb.SetStateRequest}
    for call, kind in kinds.items():
        header = samples(target, UNSEEN)[call][0]
        for name, lie in lies:
            yield _one(name, call, [header, kind(chunk=lie)], Code.DATA_LOSS)
        large = kind(chunk=chunk(0, b"1" * 3 * 2**20))
        yield _one("3 MiB chunk", call, [header, large], Code.RESOURCE_EXHAUSTED, Code.DATA_LOSS)
        overlap = [kind(chunk=chunk(0, b"1" * 8000)), kind(chunk=chunk(4000, b"1" * 8000))]
        yield _one("overlap", call, [header, *overlap], Code.DATA_LOSS)


def _too_large(target: Target) -> Iterator[Attack]:
    valid = samples(target)
    for call in ("SubmitRun", "SetState", "Send"):  # all calls are told 1 GiB in slow.py
        first = valid[call][0]
        padding = b"\xfa\x7f" + _varint(MAX_MESSAGE_BYTES) + b"x" * MAX_MESSAGE_BYTES
        message = first.SerializeToString() + padding
        yield _one("5 MiB message", call, [message], Code.RESOURCE_EXHAUSTED)
    submit = valid["SubmitRun"][0]
    large = _changed(submit, lambda r: setattr(r, "job_json", " " * (2**20 + 1)))
    yield _one("job bytes", "SubmitRun", large, Code.RESOURCE_EXHAUSTED, reason="job_json")
    note = _changed(submit, lambda r: setattr(r, "note", "x" * 3000))
    yield _one("note", "SubmitRun", note, Code.RESOURCE_EXHAUSTED, reason="note")
    escape = _changed(submit, lambda r: setattr(r, "note", "\x1b[2J"))
    yield _one("note that clears", "SubmitRun", escape, Code.INVALID_ARGUMENT, reason="note")
    worker = valid["RegisterWorker"][0]
    tags = _changed(worker, lambda r: r.capability.tags.extend(["t"] * 300))
    yield _one("300 tags", "RegisterWorker", tags, Code.RESOURCE_EXHAUSTED, reason="tags")
    device = _changed(worker, lambda r: setattr(r.capability, "device_name", "x" * 300))
    yield _one("device name", "RegisterWorker", device, Code.RESOURCE_EXHAUSTED, reason="device")
    endpoint = _changed(valid["Rendezvous"][0], lambda r: setattr(r, "endpoint", b"e" * 70_000))
    yield _one("endpoint", "Rendezvous", endpoint, Code.RESOURCE_EXHAUSTED, reason="endpoint")
    for offset in (10**9, 2**64 - 1):
        down = cpb.DownloadStateRequest(run_id=target.kept_run, which="final", offset=offset)
        yield _one("offset", "DownloadState", down, Code.OUT_OF_RANGE, reason="beyond the end")
        state = _changed(valid["GetState"][0], lambda r, o=offset: setattr(r, "offset", o))
        yield _one("offset", "GetState", state, Code.OUT_OF_RANGE, reason="beyond the end")
    watch = cpb.WatchRunRequest(run_id=target.kept_run, from_index=2**64 - 1)
    yield _one("index", "WatchRun", watch, Code.OUT_OF_RANGE, reason="from_index")


def _stale(target: Target) -> Iterator[Attack]:
    valid = samples(target)
    for call in ("Execute", "GetState", "GetGradients", "Abort", "CloseSession"):
        old = _changed(valid[call][0], lambda r: setattr(r.fence, "term", 0))
        yield _one("old term", call, old, Code.FAILED_PRECONDITION, reason="term 0")
        new = _changed(valid[call][0], lambda r: setattr(r.fence, "term", 2**64 - 1))
        yield _one("term of nobody", call, new, Code.UNAVAILABLE, reason="fence.term")
        if call != "CloseSession":
            old = _changed(valid[call][0], lambda r: setattr(r.fence, "membership", 0))
            yield _one("old membership", call, old, Code.FAILED_PRECONDITION, reason="membership")
    for call in ("SetState", "ApplyGradients"):
        old = _changed(valid[call][0], lambda r: setattr(r.header.fence, "term", 0))
        yield _one("old term", call, [old], Code.FAILED_PRECONDITION, reason="term 0")
    for membership in (0, 2, 2**64 - 1):
        for run in (target.kept_run, target.worker_run):
            meet = _changed(valid["Rendezvous"][0], lambda r, to=(run, membership): _aim(r, *to))
            yield _one("membership", "Rendezvous", meet, Code.FAILED_PRECONDITION)
            suspect = _changed(valid["Suspect"][0], lambda r, to=(run, membership): _aim(r, *to))
            yield _one("membership", "Suspect", suspect, Code.OK)
    yield _one("not here", "Send", valid["Send"][:1], Code.UNAVAILABLE, reason="not here")


def _aim(request: Any, run_id: str, membership: int) -> None:
    request.session.run_id, request.fence.membership = run_id, membership


def _strange_plans(target: Target) -> Iterator[Attack]:
    refused = (Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED)
    view = wpb.View(members=[wpb.Member(worker_id="w", address="127.0.0.1:1", num_shards=1)])
    huge = 2**32 - 1
    plans: dict[str, dict[str, Any]] = {
        "no plan": {},
        "no members": {"train": wpb.TrainPlan(num_shards=1, to_step=1)},
        "rank": {"train": wpb.TrainPlan(view=wpb.View(members=view.members, rank=9))},
        "4 G shards": {"train": wpb.TrainPlan(view=view, num_shards=huge, to_step=1)},
        "exchange": {"train": wpb.TrainPlan(view=view, num_shards=1, exchange=cast(Any, 77))},
        "steps": {"train": wpb.TrainPlan(view=view, num_shards=1, to_step=2**64 - 1)},
        "client": {"client_round": wpb.ClientRoundPlan(client=5, num_clients=2)},
        "4 G clients": {"client_round": wpb.ClientRoundPlan(num_clients=huge, local_epochs=1)},
        "epochs": {"client_round": wpb.ClientRoundPlan(num_clients=1, local_epochs=huge)},
        "share": {"evaluate": wpb.EvaluatePlan(rank=3, size=2, splits=["test"])},
        "4 G shares": {"evaluate": wpb.EvaluatePlan(size=huge, splits=["test"])},
    }
    for name, plan in plans.items():
        yield _one(name, "Execute", execute(target, segment=7, **plan), *refused)
    large = _changed(execute(target, build=wpb.BuildPlan()), lambda r: setattr(r, "segment", 2**63))
    yield _one("segment", "Execute", large, *refused, reason="segment")
    for name, text in (
        ("no job", ""),
        ("deep job", "[" * 100_000),
        ("bottomless job", '{"a":' * 5000 + "1" + "}" * 5000),
        ("large number", json.dumps({"name": "x", "seed": 10**400})),
        ("larger number", '{"seed": ' + "9" * 5000 + "}"),
        ("key twice", '{"name": "a", "name": "b"}'),
    ):
        job = _changed(
            execute(target, build=wpb.BuildPlan()), lambda r, t=text: setattr(r, "job_json", t)
        )
        yield _one(name, "Execute", job, Code.INVALID_ARGUMENT)
        submit = cpb.SubmitRunRequest(run_id="nobody", job_json=text)
        yield _one(name, "SubmitRun", submit, Code.INVALID_ARGUMENT)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))

"""One state for all members of a party: its newest, or the base where no member holds any.

A member that is behind copies the state of one that is not. Runs in the torch thread; calls go
through the event loop.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Final

import torch
from torch import Tensor

from stratagem.common.base.errors import StratagemError
from stratagem.common.history import Recorder
from stratagem.common.history.packing import pack, unpack
from stratagem.common.process.failpoints import failpoint
from stratagem.common.rpc.channel import open_channel
from stratagem.common.rpc.tensor_transfer import pull
from stratagem.common.strategy import partitions_state
from stratagem.common.tensors.chunks import Sink
from stratagem.common.tensors.manifest import Manifest, Purpose
from stratagem.common.tensors.torch_codec import allocate
from stratagem.v1 import worker_pb2 as pb
from stratagem.v1.worker_pb2_grpc import WorkerServiceStub
from stratagem.worker.engine import Tally, Trainer
from stratagem.worker.engine.trainers.optimizer_pieces import StateShare
from stratagem.worker.exchange import ExchangeError
from stratagem.worker.party.join_rendezvous import Members, fence_of, session_of
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.plan_control import MemberView
from stratagem.worker.session.session_states import freeze

_TALLY: Final = "tally"
_STREAMS: Final = "streams"
_RECORDED: Final = "recorded"
_ROWS: Final = "history/rows"
"""The tensor with the rows that were recorded of the segment; no part of any saved state."""


def agree_on_state(
    work: ExecutionContext, plan: pb.TrainPlan, view: MemberView, members: Members
) -> Trainer:
    """Bring this member to the newest state of the party, or to the base if no member holds one;
    return its trainer."""
    trainer = _newest_or_base(work, plan, view, members)
    if plan.base.streams:  # it may have got streams that others have read so far
        trainer.add_stream_marks(_marks(plan.base.streams))
    return trainer


def _marks(text: str) -> dict[int, str]:
    return {int(number): mark for number, mark in json.loads(text).items()}


def _newest_or_base(
    work: ExecutionContext, plan: pb.TrainPlan, view: MemberView, members: Members
) -> Trainer:
    steps = [member.applied_step for member in members if member.HasField("applied_step")]
    newest = max(steps, default=-1)
    trainer = _held(work)
    has_residuals = work.job.compression is not None and work.job.compression.keeps_state
    share = share_of(work, view)
    if has_residuals or share is not None:
        # What a member that is gone held alone is lost: all hold the same step, or none counts.
        if len(steps) < view.size or min(steps) < newest or newest < plan.base.step:
            trainer = None
    elif newest < plan.base.step:
        trainer = None
    elif trainer is None or trainer.step < newest:
        donors = [
            member.address
            for member in members
            if member.HasField("applied_step") and member.applied_step == newest
        ]
        return _copy_from(work, view, donors[view.rank % len(donors)])
    elif len(steps) < view.size or min(steps) < newest:
        _offer(work, view, trainer)
    return _load_base(work, plan.base, share) if trainer is None else trainer


def share_of(work: ExecutionContext, view: MemberView) -> StateShare | None:
    """Return which slice of the optimizer's state this member keeps under the view; None where each
    keeps all of it."""
    return StateShare(view.rank, view.size) if partitions_state(work.job.strategy) else None


def _held(work: ExecutionContext) -> Trainer | None:
    trainer = work.holding.trainer
    assert trainer is None or isinstance(trainer, Trainer)  # as the job's strategy says
    return trainer


def _load_base(work: ExecutionContext, base: pb.StateRef, share: StateShare | None) -> Trainer:
    if base.digest:
        trainer = _load(work, *work.base_state(base), share)
    else:
        work.holding.drop()
        trainer = work.holding.trainer = work.new_member(share, fresh=True)
    work.holding.begin_sums(work.segment)
    return trainer


def _load(
    work: ExecutionContext,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    share: StateShare | None = None,
) -> Trainer:
    """Make a state the one that the session holds. A trainer that fails to load is not kept."""
    failpoint("worker.state.received")
    trainer = _held(work)
    if trainer is None or trainer.job != work.job or trainer.share != share:
        # A member of a population that has copied another one has other settings.
        trainer = work.new_member(share, fresh=False)
    work.holding.trainer = None
    trainer.load_state(tensors, metadata)
    work.holding.trainer = trainer
    return trainer


def _copy_from(work: ExecutionContext, view: MemberView, address: str) -> Trainer:
    try:
        tensors, metadata = work.control.wait(_pull_live(work, view, address), view.membership)
    except StratagemError as error:  # the donor is gone, or no longer offers
        raise ExchangeError(f"no state from {address}: {error}") from error
    sums, marks = metadata.pop(_TALLY, ""), metadata.pop(_STREAMS, "{}")
    recorded = metadata.pop(_RECORDED, "")
    trainer = _load(work, tensors, metadata)
    trainer.add_stream_marks(_marks(marks))
    tally = Tally(**json.loads(sums)) if sums else Tally()
    work.holding.begin_sums(work.segment)
    if tally.segment == work.segment:
        work.holding.tally = tally
        if recorded:
            work.holding.recorder = _recorder(recorded, tensors[_ROWS])
    return trainer


def _recorder(recorded: str, rows: Tensor) -> Recorder:
    """Go on with the recording of the member that the state is from, all of the segment's rows."""
    stride, from_step = json.loads(recorded)
    return Recorder.going_on(stride, from_step, unpack(rows.numpy().tobytes()))


async def _pull_live(
    work: ExecutionContext, view: MemberView, address: str
) -> tuple[Mapping[str, Tensor], dict[str, str]]:
    """Fetch the state that another member has frozen for us."""
    ways_out: list[Callable[[], dict[str, Tensor]]] = []

    def accept(manifest: Manifest) -> Sink:
        sink, finish = allocate(manifest)
        ways_out.append(finish)
        return sink

    async with open_channel(address, work.host.hub.proof, to_worker="") as channel:
        stub = WorkerServiceStub(channel)
        # A session has the same name on every member.
        request = pb.GetStateRequest(fence=fence_of(view), session=session_of(work), live=True)
        manifest = await pull(
            lambda offset: stub.GetState(_from(request, offset)),
            accept,
            purpose=Purpose.STATE,
        )
    return ways_out[0](), dict(manifest.metadata)


def _from(request: pb.GetStateRequest, offset: int) -> pb.GetStateRequest:
    request.offset = offset
    return request


def _offer(work: ExecutionContext, view: MemberView, trainer: Trainer) -> None:
    """Freeze what we hold for members that are behind; dropped after the next step."""
    tensors, metadata = trainer.copy_state()
    beside = {_TALLY: json.dumps(asdict(work.holding.tally))}
    if marks := trainer.stream_marks():
        beside[_STREAMS] = json.dumps(marks)
    if (recorder := work.holding.recorder) is not None:
        beside[_RECORDED] = json.dumps([recorder.stride, recorder.from_step])
        rows = torch.frombuffer(bytearray(pack(recorder.rows())), dtype=torch.uint8)
        tensors = {**tensors, _ROWS: rows}
    work.holding.is_offering = True
    work.post(work.states.set_live, view.membership, freeze(tensors, {**metadata, **beside}))

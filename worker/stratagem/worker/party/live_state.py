"""The live state of members of a party: given to those that are behind, and taken over from others.

Runs in the torch thread; calls go through the event loop.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Final

import torch
from torch import Tensor

from stratagem.common.base.errors import StratagemError
from stratagem.common.history import Recorder
from stratagem.common.history.recording import pack, unpack
from stratagem.common.process.failpoints import failpoint
from stratagem.common.rpc.channel import open_channel
from stratagem.common.rpc.tensor_transfer import pull
from stratagem.common.tensors.manifest import Manifest, Purpose
from stratagem.common.tensors.stream import Sink
from stratagem.common.tensors.torch_codec import allocate
from stratagem.v1 import worker_pb2 as pb
from stratagem.v1.worker_pb2_grpc import WorkerServiceStub
from stratagem.worker.engine import Tally, Trainer
from stratagem.worker.engine.trainers.optimizer_pieces import StateShare
from stratagem.worker.exchange import ExchangeError
from stratagem.worker.party.join_rendezvous import fence_of, session_of
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.plan_control import MemberView
from stratagem.worker.session.session_states import freeze

_TALLY: Final = "tally"
_STREAMS: Final = "streams"
_RECORDED: Final = "recorded"
_ROWS: Final = "history/rows"
"""The tensor with the rows that were recorded of the segment; no part of any saved state."""


@dataclass(frozen=True, slots=True)
class SegmentSums:
    """What a state was sent with: the sums of the segment so far, and what goes with them."""

    tally: str
    marks: str
    recorded: str
    rows: Tensor | None

    def take(self, work: ExecutionContext, trainer: Trainer) -> None:
        """Go on with them."""
        trainer.add_stream_marks(marks_of(self.marks))
        tally = Tally(**json.loads(self.tally)) if self.tally else Tally()
        work.holding.begin_sums(work.segment)
        if tally.segment == work.segment:
            work.holding.tally = tally
            if self.recorded and self.rows is not None:
                work.holding.recorder = _recorder(self.recorded, self.rows)


def marks_of(text: str) -> dict[int, str]:
    """Return the marks of streams of rows that a text says."""
    return {int(number): mark for number, mark in json.loads(text).items()}


def take_sums(metadata: dict[str, str], tensors: Mapping[str, Tensor]) -> SegmentSums:
    """Take what `beside` has put into the metadata of a state out of them."""
    marks = metadata.pop(_STREAMS, "{}")
    return SegmentSums(
        metadata.pop(_TALLY, ""), marks, metadata.pop(_RECORDED, ""), tensors.get(_ROWS)
    )


def _recorder(recorded: str, rows: Tensor) -> Recorder:
    """Go on with the recording of the member that the state is from, all of the segment's rows."""
    stride, from_step = json.loads(recorded)
    return Recorder.going_on(stride, from_step, unpack(rows.numpy().tobytes()))


def held(work: ExecutionContext) -> Trainer | None:
    """Return the trainer of the session, which is that of a model that all members share."""
    trainer = work.holding.trainer
    assert trainer is None or isinstance(trainer, Trainer)  # as the job's strategy says
    return trainer


def load_base(work: ExecutionContext, base: pb.StateRef, share: StateShare | None) -> Trainer:
    """Make the base the state that the session holds."""
    if base.digest:
        trainer = load(work, *work.base_state(base), share)
    else:
        work.holding.drop()
        trainer = work.holding.trainer = work.new_member(share, fresh=True)
    work.holding.begin_sums(work.segment)
    return trainer


def load(
    work: ExecutionContext,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    share: StateShare | None = None,
) -> Trainer:
    """Make a state the one that the session holds. A trainer that fails to load is not kept."""
    failpoint("worker.state.received")
    trainer = held(work)
    if trainer is None or trainer.job != work.job or trainer.share != share:
        # A member of a population that has copied another one has other settings.
        trainer = work.new_member(share, fresh=False)
    work.holding.trainer = None
    trainer.load_state(tensors, metadata)
    work.holding.trainer = trainer
    return trainer


def copy_from(work: ExecutionContext, view: MemberView, address: str) -> Trainer:
    """Take over the live state of another member, and the sums of the segment so far."""
    tensors, metadata = pull_live(work, view, address)
    sums = take_sums(metadata, tensors)
    trainer = load(work, tensors, metadata)
    sums.take(work, trainer)
    return trainer


def pull_live(
    work: ExecutionContext, view: MemberView, address: str
) -> tuple[Mapping[str, Tensor], dict[str, str]]:
    """Fetch what another member has frozen for this membership. Raises ExchangeError."""
    try:
        return work.control.wait(_pull(work, view, address), view.membership)
    except StratagemError as error:  # the donor is gone, or no longer offers
        raise ExchangeError(f"no state from {address}: {error}") from error


async def _pull(
    work: ExecutionContext, view: MemberView, address: str
) -> tuple[Mapping[str, Tensor], dict[str, str]]:
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


def offer_whole(work: ExecutionContext, view: MemberView, trainer: Trainer) -> None:
    """Offer all that this member holds to members that are behind."""
    tensors, metadata = trainer.copy_state()
    further, texts = beside(work, trainer)
    offer(work, view, {**tensors, **further}, {**metadata, **texts})


def beside(work: ExecutionContext, trainer: Trainer) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return (tensors, metadata) that go with a state to a member that goes on with the segment."""
    sums = replace(work.holding.tally)
    for report in work.holding.late:
        sums.add(report)
        if trainer.callbacks.sees_steps:
            sums.latest = report.numbers
    texts = {_TALLY: json.dumps(asdict(sums))}
    if marks := trainer.stream_marks():
        texts[_STREAMS] = json.dumps(marks)
    recorder = work.holding.recorder
    if recorder is None:
        return {}, texts
    texts[_RECORDED] = json.dumps([recorder.stride, recorder.from_step])
    return {_ROWS: torch.frombuffer(bytearray(pack(recorder.rows())), dtype=torch.uint8)}, texts


def offer(
    work: ExecutionContext,
    view: MemberView,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Freeze what others may fetch under this membership; dropped after the next step."""
    work.holding.is_offering = True
    work.post(work.states.set_live, view.membership, freeze(tensors, metadata))

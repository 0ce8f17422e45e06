"""Bring all members of a party to one state: the newest of any member, or the base if no member has
any.

A member that is behind copies the live state of one that is not, or puts it together from slices
that several members hold. Runs in the torch thread; calls go through the event loop.
"""

import json
from collections.abc import Callable, Mapping, Sequence
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
from stratagem.common.strategy import fewest_mirrored, partitions_parameters, partitions_state
from stratagem.common.tensors.manifest import Manifest, Purpose
from stratagem.common.tensors.same_bytes import (
    ParameterSlice,
    SliceName,
    parameter_slice,
    slice_name,
)
from stratagem.common.tensors.stream import Sink
from stratagem.common.tensors.torch_codec import allocate
from stratagem.v1 import worker_pb2 as pb
from stratagem.v1.coordinator_pb2 import HeldSlices
from stratagem.v1.worker_pb2_grpc import WorkerServiceStub
from stratagem.worker.engine import Tally, Trainer, state_format
from stratagem.worker.engine.slices import StateShare
from stratagem.worker.exchange import ExchangeError
from stratagem.worker.party.rendezvous import Members, fence_of, session_of
from stratagem.worker.party.survival import Survival, survival_of
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.control import MemberView
from stratagem.worker.session.states import KeptSlices, State, freeze

# ---- Live state ----

_TALLY: Final = "tally"
_STREAMS: Final = "streams"
_RECORDED: Final = "recorded"
_ROWS: Final = "history/rows"
"""Name of the tensor with the recorded rows of the segment; it is not part of saved states."""


@dataclass(frozen=True, slots=True)
class SegmentSums:
    """The sums of the segment so far, and further data sent along with a live state."""

    tally: str
    marks: str
    recorded: str
    rows: Tensor | None

    def take(self, work: ExecutionContext, trainer: Trainer) -> None:
        """Load these sums into the session, which then continues the sender's segment."""
        trainer.add_stream_marks(marks_of(self.marks))
        tally = Tally(**json.loads(self.tally)) if self.tally else Tally()
        work.holding.begin_sums(work.segment)
        if tally.segment == work.segment:
            work.holding.tally = tally
            if self.recorded and self.rows is not None:
                work.holding.recorder = _recorder(self.recorded, self.rows)


def marks_of(text: str) -> dict[int, str]:
    """Decode the read positions (marks) of streams."""
    return {int(number): mark for number, mark in json.loads(text).items()}


def take_sums(metadata: dict[str, str], tensors: Mapping[str, Tensor]) -> SegmentSums:
    """Remove the data added by `beside` from a state's metadata and tensors; return them."""
    marks = metadata.pop(_STREAMS, "{}")
    return SegmentSums(
        metadata.pop(_TALLY, ""), marks, metadata.pop(_RECORDED, ""), tensors.get(_ROWS)
    )


def _recorder(recorded: str, rows: Tensor) -> Recorder:
    """Continue the sender's recording, which has all step-history rows of the segment so far."""
    stride, from_step = json.loads(recorded)
    return Recorder.going_on(stride, from_step, unpack(rows.numpy().tobytes()))


def held(work: ExecutionContext) -> Trainer | None:
    """Return the session's trainer, which must be one whose model is alike on all members."""
    trainer = work.holding.trainer
    assert trainer is None or isinstance(trainer, Trainer)  # as the job's strategy says
    return trainer


def load_base(work: ExecutionContext, base: pb.StateRef, share: StateShare | None) -> Trainer:
    """Load the base (the committed state from which the plan begins) into the session."""
    if base.digest:
        trainer = load(work, *work.base_state(base), share)
    else:
        work.holding.drop()
        trainer = work.holding.trainer = work.new_trainer(share, fresh=True)
    work.holding.begin_sums(work.segment)
    return trainer


def load(
    work: ExecutionContext,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    share: StateShare | None = None,
) -> Trainer:
    """Load a state into the session. If loading fails, the trainer is dropped."""
    failpoint("worker.state.received")
    trainer = held(work)
    if trainer is None or trainer.job != work.job or trainer.share != share:
        # A member of a population that has copied another one has other settings.
        trainer = work.new_trainer(share, fresh=False)
    work.holding.trainer = None
    trainer.load_state(tensors, metadata)
    work.holding.trainer = trainer
    return trainer


def copy_from(work: ExecutionContext, view: MemberView, address: str) -> Trainer:
    """Copy the live state of another member, and the sums of the segment so far."""
    tensors, metadata = pull_live(work, view, address)
    sums = take_sums(metadata, tensors)
    trainer = load(work, tensors, metadata)
    sums.take(work, trainer)
    return trainer


def pull_live(
    work: ExecutionContext, view: MemberView, address: str
) -> tuple[Mapping[str, Tensor], dict[str, str]]:
    """Fetch the state that another member offers for this membership. Raises ExchangeError."""
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
    """Offer this member's whole state to members that are behind."""
    tensors, metadata = trainer.copy_state()
    further, texts = beside(work, trainer)
    offer(work, view, {**tensors, **further}, {**metadata, **texts})


def beside(work: ExecutionContext, trainer: Trainer) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return (tensors, metadata) to be sent along with a state, for continuing the segment."""
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
    """Freeze a state, which other members may fetch under this membership until the next step."""
    work.holding.is_offering = True
    work.post(work.states.set_live, view.membership, freeze(tensors, metadata))


# ---- Sliced state with mirrors ----
#
# A member keeps a slice of the state and a copy of its neighbour's. When a member is lost, the
# member after it still has its slice. The remaining members agree on the newest step that any of
# them has applied: then all of them have its sums, and whoever has not applied it does so now. Each
# gives its slice to all, and one of them gives what all have; so all members, new ones too, begin
# from the same whole state, of which each keeps its new slices. A member keeps copies of its former
# slices until the next step, which shows that all have reached that point.

_AVERAGE_IS_DUE: Final = "average is due"


def held_slices(work: ExecutionContext) -> HeldSlices | None:
    """Return the description of this member's slices for a rendezvous; None without a mirror."""
    trainer = work.holding.trainer
    if not isinstance(trainer, Trainer) or trainer.pieces is None or trainer.share is None:
        return None
    pieces, summary = trainer.pieces, trainer.pieces.summary
    if not pieces.is_mirrored:
        return None
    copies = work.holding.kept_slices
    return HeldSlices(
        rank=trainer.share.rank,
        size=trainer.share.size,
        membership=work.holding.divided_at,
        step_in_doubt=None if pieces.in_doubt is None else pieces.in_doubt.step,
        is_torn=bool(pieces.torn),
        grad_norm=0.0 if summary is None else summary.norm.item(),
        is_finite=summary is not None and summary.is_finite,
        is_late=bool(work.holding.late),
        before=None if copies is None or copies.step != trainer.step else copies.said(),
    )


def agree_on_slices(
    work: ExecutionContext,
    plan: pb.TrainPlan,
    view: MemberView,
    members: Members,
    share: StateShare,
) -> Trainer:
    """Bring this member to the party's newest divided state, or to the base if there is none."""
    survival = survival_of(members, plan.base.step)
    if survival is None:
        work.holding.kept_slices = None
        work.holding.late.clear()
        trainer = load_base(work, plan.base, share)
    elif _are_as_before(members, survival, share):
        trainer = _held(work)
        assert trainer.pieces is not None
        trainer.pieces.in_doubt = None
        return trainer
    else:
        trainer = _gathered(work, view, members, survival, share)
    work.holding.divided_at = view.membership
    return trainer


def _held(work: ExecutionContext) -> Trainer:
    trainer = work.holding.trainer
    assert isinstance(trainer, Trainer)  # it has said so
    return trainer


def _are_as_before(members: Members, survival: Survival, share: StateShare) -> bool:
    """Return whether all members still hold complete slices of the same step as before."""
    return (
        share.is_mirrored
        and len(survival.holders) == len(members)
        and survival.sources == tuple(range(len(members)))
        and all(member.applied_step == survival.step for member in members)
        and not any(member.slices.is_torn for member in members)
    )


def _gathered(
    work: ExecutionContext,
    view: MemberView,
    members: Members,
    survival: Survival,
    share: StateShare,
) -> Trainer:
    """Send the slices that others need from here, receive the rest, and load this member's part."""
    me, given = view.rank, dict[int, State]()
    copies = _copies(work, survival, members, me)
    if copies is not None and me in survival.givers:
        given[me] = _gift(work, survival, copies, members, me)
        offer(work, view, *given[me])
    failpoint("worker.mirror.offered")
    for rank in survival.givers:
        if rank != me:
            given[rank] = pull_live(work, view, members[rank].address)
    whole, texts = _joined([given[rank] for rank in survival.givers], given[survival.donor])
    average_is_due = bool(texts.pop(_AVERAGE_IS_DUE, ""))
    sums = take_sums(texts, whole)
    marks = {} if copies is None else _held(work).stream_marks()
    work.holding.kept_slices = copies
    work.holding.trainer = None  # it is in what was given
    trainer = load(work, whole, texts, share)
    if average_is_due:
        trainer.take_average()
    if copies is None:
        work.holding.late.clear()  # the sums of the donor hold that step already
        sums.take(work, trainer)
    else:
        trainer.add_stream_marks(marks)
    return trainer


def _copies(
    work: ExecutionContext, survival: Survival, members: Members, me: int
) -> KeptSlices | None:
    """Return copies of this member's slices of the surviving division; None if it has none."""
    if me in survival.keepers:
        return work.holding.kept_slices
    if me not in survival.holders:
        return None
    _come_to(work, survival)
    trainer, held = _held(work), members[me].slices
    numbers = {False: held.rank, True: (held.rank - 1) % held.size}
    return KeptSlices(
        membership=survival.membership,
        size=held.size,
        step=survival.step,
        slices={number: _slice(trainer, of_mirror=mirror) for mirror, number in numbers.items()},
        grad_norm=survival.grad_norm,
        is_finite=survival.is_finite,
    )


def _come_to(work: ExecutionContext, survival: Survival) -> None:
    """Apply the step that others have applied, if this member has not yet applied it."""
    trainer = _held(work)
    if trainer.step < survival.step:
        report = trainer.finish_step_in_doubt(survival.grad_norm, is_finite=survival.is_finite)
        work.holding.late.append(report)


def _slice(trainer: Trainer, *, of_mirror: bool) -> State:
    """Return a copy of this member's slice or, with of_mirror, of the mirrored slice."""
    assert trainer.pieces is not None
    tensors, numbers = trainer.pieces.slices(trainer.model, of_mirror=of_mirror)
    return state_format.copied(tensors), state_format.state_metadata(trainer.step, numbers)


def _gift(
    work: ExecutionContext, survival: Survival, copies: KeptSlices, members: Members, me: int
) -> State:
    """Return copies of the slices that this member sends; the donor adds the undivided state."""
    tensors, metadata = copies.given(survival.slices_of(me))
    if me != survival.donor:
        return tensors, metadata
    trainer = _held(work)
    further, texts = beside(work, trainer)
    shared, numbers = trainer.state()
    is_due = {_AVERAGE_IS_DUE: "1"} if members[me].slices.is_torn else {}
    whole = {**state_format.copied(shared), **further, **tensors}
    return whole, {**metadata, **numbers, **texts, **is_due}


def _joined(given: Sequence[State], by_donor: State) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the whole state, joined from slices and from the donor's undivided rest."""
    undivided = {name: tensor for name, tensor in by_donor[0].items() if not _is_slice(name)}
    whole = state_format.copied(undivided)  # what is offered must not change
    slices: dict[SliceName, Tensor] = {}
    for tensors, _ in given:
        for name, tensor in tensors.items():
            if (place := slice_name(name)) is not None:
                slices[place] = tensor
            elif (where := parameter_slice(name)) is not None:
                _put_parameter(whole, where, tensor)
    shapes = {name: tensor.shape for name, tensor in whole.items()}
    for place in sorted(slices):
        _put(whole, shapes, place, slices[place])
    metadata = {name: text for _, texts in given for name, text in texts.items()}
    return whole, {**metadata, **by_donor[1]}


def _is_slice(name: str) -> bool:
    return slice_name(name) is not None or parameter_slice(name) is not None


def _put_parameter(whole: dict[str, Tensor], where: ParameterSlice, part: Tensor) -> None:
    """Copy a slice of a parameter to its position in the whole parameter, made if it is missing."""
    if where.whole not in whole:
        whole[where.whole] = torch.empty(where.shape, dtype=part.dtype)
    _copy_in(whole[where.whole], where.first, part)


def _copy_in(target: Tensor, first: int, part: Tensor) -> None:
    target.view(-1)[first : first + part.numel()].copy_(part.reshape(-1))


def _put(
    whole: dict[str, Tensor], shapes: Mapping[str, torch.Size], place: SliceName, part: Tensor
) -> None:
    if state_format.is_one_number(place.whole):
        whole[place.whole] = part
        return
    if place.whole not in whole:
        parameter = place.whole.removeprefix(state_format.OPTIMIZER).rpartition("/")[0]
        whole[place.whole] = torch.empty(
            shapes[f"{state_format.MODEL}{parameter}"], dtype=part.dtype
        )
    _copy_in(whole[place.whole], place.first, part)


# ---- Agreement on one state ----


def agree_on_state(
    work: ExecutionContext, plan: pb.TrainPlan, view: MemberView, members: Members
) -> Trainer:
    """Bring this member to the party's newest state, or to the base if no member holds one; return
    its trainer."""
    trainer = _newest_or_base(work, plan, view, members)
    if plan.base.streams:  # it may have got streams that others have read so far
        trainer.add_stream_marks(marks_of(plan.base.streams))
    return trainer


def _newest_or_base(
    work: ExecutionContext, plan: pb.TrainPlan, view: MemberView, members: Members
) -> Trainer:
    steps = [member.applied_step for member in members if member.HasField("applied_step")]
    newest = max(steps, default=-1)
    share = share_of(work, view)
    if share is not None and fewest_mirrored(work.job.strategy) is not None:
        return agree_on_slices(work, plan, view, members, share)
    trainer = held(work)
    has_residuals = work.job.compression is not None and work.job.compression.keeps_state
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
        return copy_from(work, view, donors[view.rank % len(donors)])
    elif len(steps) < view.size or min(steps) < newest:
        offer_whole(work, view, trainer)
    return load_base(work, plan.base, share) if trainer is None else trainer


def share_of(work: ExecutionContext, view: MemberView) -> StateShare | None:
    """Return the slice of the optimizer's state that this member keeps under the membership view;
    None for all of it."""
    strategy = work.job.strategy
    if not partitions_state(strategy):
        return None
    fewest = fewest_mirrored(strategy)
    is_mirrored = fewest is not None and view.size >= fewest
    return StateShare(view.rank, view.size, is_mirrored, partitions_parameters(strategy))

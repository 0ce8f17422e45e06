"""One state for the members of a party that keep slices of it, and copies of their neighbours'.

When a member is gone, its slice is with the member that came after it. Those that are left agree on
the newest step that any of them has applied: then all of them have its sums, and whoever has not
applied it does so now. Each gives its slice to all, and one of them what all have; so all members,
new ones too, begin from the same whole state, of which each keeps its new slices. It keeps
copies of what it had before until the next step, which shows that all are that far. Runs in the
torch thread; calls go through the event loop.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from stratagem.common.process.failpoints import failpoint
from stratagem.common.tensors.same_bytes import (
    ParameterSlice,
    SliceName,
    parameter_slice,
    slice_name,
)
from stratagem.v1 import worker_pb2 as pb
from stratagem.v1.coordinator_pb2 import HeldSlices
from stratagem.worker.engine import Trainer
from stratagem.worker.engine.step import state_format
from stratagem.worker.engine.trainers.optimizer_pieces import StateShare
from stratagem.worker.party.join_rendezvous import Members
from stratagem.worker.party.live_state import (
    beside,
    load,
    load_base,
    offer,
    pull_live,
    take_sums,
)
from stratagem.worker.party.state_survival import Survival, survival_of
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.kept_slices import KeptSlices, State
from stratagem.worker.session.plan_control import MemberView

_AVERAGE_IS_DUE: Final = "average is due"


def held_slices(work: ExecutionContext) -> HeldSlices | None:
    """Return what this member says of its slices at a rendezvous; None where it has no mirror."""
    trainer = work.holding.trainer
    if not isinstance(trainer, Trainer) or trainer.pieces is None or trainer.share is None:
        return None
    pieces, summary = trainer.pieces, trainer.pieces.summary
    if not pieces.is_mirrored:
        return None
    kept = work.holding.kept_slices
    return HeldSlices(
        rank=trainer.share.rank,
        size=trainer.share.size,
        membership=work.holding.divided_at,
        step_in_doubt=None if pieces.in_doubt is None else pieces.in_doubt.step,
        is_torn=bool(pieces.torn),
        grad_norm=0.0 if summary is None else summary.norm.item(),
        is_finite=summary is not None and summary.is_finite,
        is_late=bool(work.holding.late),
        before=None if kept is None or kept.step != trainer.step else kept.said(),
    )


def agree_on_slices(
    work: ExecutionContext,
    plan: pb.TrainPlan,
    view: MemberView,
    members: Members,
    share: StateShare,
) -> Trainer:
    """Bring this member to the newest state of the party, or to the base if nobody holds one."""
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
    """Return True where all members have what they had, at the same step and whole."""
    return (
        share.is_mirrored
        and len(survival.holders) == len(members)
        and survival.sources == tuple(range(len(members)))
        and all(each.applied_step == survival.step for each in members)
        and not any(each.slices.is_torn for each in members)
    )


def _gathered(
    work: ExecutionContext,
    view: MemberView,
    members: Members,
    survival: Survival,
    share: StateShare,
) -> Trainer:
    """Give what this member is asked for, take what all give, and keep the own share of it."""
    me, given = view.rank, dict[int, State]()
    kept = _kept(work, survival, members, me)
    if kept is not None and me in survival.givers:
        given[me] = _gift(work, survival, kept, members, me)
        offer(work, view, *given[me])
    failpoint("worker.mirror.offered")
    for rank in survival.givers:
        if rank != me:
            given[rank] = pull_live(work, view, members[rank].address)
    whole, texts = _joined([given[rank] for rank in survival.givers], given[survival.donor])
    average_is_due = bool(texts.pop(_AVERAGE_IS_DUE, ""))
    sums = take_sums(texts, whole)
    marks = {} if kept is None else _held(work).stream_marks()
    work.holding.kept_slices = kept
    work.holding.trainer = None  # it is in what was given
    trainer = load(work, whole, texts, share)
    if average_is_due:
        trainer.take_average()
    if kept is None:
        work.holding.late.clear()  # the sums of the donor hold that step already
        sums.take(work, trainer)
    else:
        trainer.add_stream_marks(marks)
    return trainer


def _kept(
    work: ExecutionContext, survival: Survival, members: Members, me: int
) -> KeptSlices | None:
    """Return copies of what this member has of the division; None where that is nothing."""
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
        slices={number: _slice(trainer, of_mirror=each) for each, number in numbers.items()},
        grad_norm=survival.grad_norm,
        is_finite=survival.is_finite,
    )


def _come_to(work: ExecutionContext, survival: Survival) -> None:
    """Apply the step that others have applied, if this member has not."""
    trainer = _held(work)
    if trainer.step < survival.step:
        report = trainer.finish_step_in_doubt(survival.grad_norm, is_finite=survival.is_finite)
        work.holding.late.append(report)


def _slice(trainer: Trainer, *, of_mirror: bool) -> State:
    """Return a copy of the slice that this member holds, or mirrors."""
    assert trainer.pieces is not None
    tensors, numbers = trainer.pieces.slices(trainer.model, of_mirror=of_mirror)
    return state_format.copied(tensors), state_format.state_metadata(trainer.step, numbers)


def _gift(
    work: ExecutionContext, survival: Survival, kept: KeptSlices, members: Members, me: int
) -> State:
    """Return what this member gives to the others: copies, which do not change."""
    tensors, metadata = kept.given(survival.slices_of(me))
    if me != survival.donor:
        return tensors, metadata
    trainer = _held(work)
    further, texts = beside(work, trainer)
    shared, numbers = trainer.state()
    is_due = {_AVERAGE_IS_DUE: "1"} if members[me].slices.is_torn else {}
    whole = {**state_format.copied(shared), **further, **tensors}
    return whole, {**metadata, **numbers, **texts, **is_due}


def _joined(given: Sequence[State], by_donor: State) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the whole state, of which each gives slices and the donor the rest."""
    rest = {name: tensor for name, tensor in by_donor[0].items() if not _is_slice(name)}
    whole = state_format.copied(rest)  # what is offered must not change
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
    """Put a slice of a parameter in its place; the donor has given no such parameter where they are
    divided."""
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

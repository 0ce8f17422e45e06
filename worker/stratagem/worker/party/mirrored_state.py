"""One state for the members of a party that keep slices of it, and copies of their neighbours'.

When a member is gone, its slice is with the member that came after it. Those that are left agree on
the newest step that any of them has applied: then all of them have its sums, and whoever has not
applied it does so now. Each gives its slice to all, and one of them what all have; so all members,
new ones too, begin from the same whole state, of which each keeps its new slices. Runs in the torch
thread; calls go through the event loop.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from stratagem.common.base.errors import SoleCopyLostError
from stratagem.common.process.failpoints import failpoint
from stratagem.common.tensors.state_slices import (
    ParameterSlice,
    SliceName,
    parameter_slice,
    slice_name,
)
from stratagem.v1 import worker_pb2 as pb
from stratagem.v1.coordinator_pb2 import HeldSlices, RendezvousMember
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
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.plan_control import MemberView

_AVERAGE_IS_DUE: Final = "average is due"


@dataclass(frozen=True, slots=True)
class Survival:
    """What the members of a party have of the state that was divided last."""

    step: int
    holders: frozenset[int]
    """Who holds something of it after that step, or can."""
    sources: tuple[int, ...]
    """Who gives each slice."""
    donor: int
    """Who gives what all of them have."""

    def slices_of(self, rank: int) -> list[int]:
        """Return the slices that this member gives."""
        return [number for number, source in enumerate(self.sources) if source == rank]

    @property
    def givers(self) -> list[int]:
        return sorted({self.donor, *self.sources})


def survival_of(members: Sequence[RendezvousMember], base_step: int) -> Survival | None:
    """Return what there is to go on with; None where nobody holds anything newer than the base.

    Raises SoleCopyLostError where a slice is gone with all that held it.
    """
    said = {rank: each for rank, each in enumerate(members) if each.HasField("slices")}
    divided_at = max((each.slices.membership for each in said.values()), default=0)
    latest = {r: each for r, each in said.items() if each.slices.membership == divided_at}
    step = max((each.applied_step for each in latest.values()), default=-1)
    if step < base_step:
        return None
    holders = {rank: each for rank, each in latest.items() if _can_be_at(each, step)}
    size = next(iter(latest.values())).slices.size
    place_of = {each.slices.rank: rank for rank, each in holders.items()}
    sources = []
    for number in range(size):
        source = place_of.get(number, place_of.get((number + 1) % size))
        if source is None:
            text = f"no worker that is left holds slice {number} of {size} as it was divided last"
            raise SoleCopyLostError(text)
        sources.append(source)
    donor = next(rank for rank, each in holders.items() if each.applied_step == step)
    return Survival(step, frozenset(holders), tuple(sources), donor)


def _can_be_at(member: RendezvousMember, step: int) -> bool:
    in_doubt = member.slices.HasField("step_in_doubt") and member.slices.step_in_doubt
    return step in (member.applied_step, in_doubt)


def held_slices(work: ExecutionContext) -> HeldSlices | None:
    """Return what this member says of its slices at a rendezvous; None where it has no mirror."""
    trainer = work.holding.trainer
    if not isinstance(trainer, Trainer) or trainer.pieces is None or trainer.share is None:
        return None
    pieces, summary = trainer.pieces, trainer.pieces.summary
    if not pieces.is_mirrored:
        return None
    return HeldSlices(
        rank=trainer.share.rank,
        size=trainer.share.size,
        membership=work.holding.divided_at,
        step_in_doubt=None if pieces.in_doubt is None else pieces.in_doubt.step,
        is_torn=bool(pieces.torn),
        grad_norm=0.0 if summary is None else summary.norm.item(),
        is_finite=summary is not None and summary.is_finite,
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
    me, given = view.rank, dict[int, tuple[Mapping[str, Tensor], dict[str, str]]]()
    if me in survival.holders:
        donor = members[survival.donor].slices
        _come_to(work, survival.step, donor)
        tensors, metadata = _slices(_held(work), survival, members, me)
        if me == survival.donor:
            further, texts = beside(work, _held(work))
            shared, numbers = _held(work).state()
            shared = state_format.copied(shared)  # what is offered must not change
            is_due = {_AVERAGE_IS_DUE: "1"} if donor.is_torn else {}
            tensors = {**shared, **further, **tensors}
            metadata = {**metadata, **numbers, **texts, **is_due}
        if me in survival.givers:
            offer(work, view, tensors, metadata)
            given[me] = (tensors, metadata)
    failpoint("worker.mirror.offered")
    for rank in survival.givers:
        if rank != me:
            given[rank] = pull_live(work, view, members[rank].address)
    whole, texts = _joined([given[rank] for rank in survival.givers], given[survival.donor])
    average_is_due = bool(texts.pop(_AVERAGE_IS_DUE, ""))
    sums = take_sums(texts, whole)
    work.holding.trainer = None  # it is in what was given
    trainer = load(work, whole, texts, share)
    if average_is_due:
        trainer.take_average()
    if me not in survival.holders:
        work.holding.late.clear()  # the sums of the donor hold that step already
        sums.take(work, trainer)
    return trainer


def _come_to(work: ExecutionContext, step: int, donor: HeldSlices) -> None:
    """Apply the step that others have applied, if this member has not."""
    trainer = _held(work)
    if trainer.step < step:
        report = trainer.finish_step_in_doubt(donor.grad_norm, is_finite=donor.is_finite)
        work.holding.late.append(report)


def _slices(
    trainer: Trainer, survival: Survival, members: Members, me: int
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return copies of the slices that this member gives."""
    assert trainer.pieces is not None
    tensors, metadata = dict[str, Tensor](), dict[str, str]()
    for number in survival.slices_of(me):
        of_mirror = number != members[me].slices.rank
        found, numbers = trainer.pieces.slices(trainer.model, of_mirror=of_mirror)
        tensors |= state_format.copied(found)
        metadata |= numbers
    return tensors, state_format.state_metadata(trainer.step, metadata)


def _joined(
    given: Sequence[tuple[Mapping[str, Tensor], dict[str, str]]],
    by_donor: tuple[Mapping[str, Tensor], dict[str, str]],
) -> tuple[dict[str, Tensor], dict[str, str]]:
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

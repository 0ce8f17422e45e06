"""Decide which members of a party give which slices of a divided state after members were lost.

Pure: decided from what all members say at a rendezvous, by each of them alike.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from stratagem.common.base.errors import SoleCopyLostError
from stratagem.v1.coordinator_pb2 import HeldSlices, KeptSlices, RendezvousMember


@dataclass(frozen=True, slots=True)
class Survival:
    """A complete set of slices that the remaining members still hold, and who sends each one."""

    membership: int
    """The membership at which the state was divided."""
    step: int
    holders: frozenset[int]
    """The members that hold a slice after this step, or can finish the step late."""
    keepers: frozenset[int]
    """The members that have kept copies of their slices, but hold those of a newer division."""
    sources: tuple[int, ...]
    """The member that gives each slice."""
    donor: int
    """The member that gives the state that is not divided."""
    grad_norm: float
    is_finite: bool
    """True if the gradient of the step was finite; the donor reports this, and the norm."""

    def slices_of(self, rank: int) -> list[int]:
        """Return the slices that this member gives to the others."""
        return [number for number, source in enumerate(self.sources) if source == rank]

    @property
    def givers(self) -> list[int]:
        return sorted({self.donor, *self.sources})


def survival_of(members: Sequence[RendezvousMember], base_step: int) -> Survival | None:
    """Return the complete set of slices from which to continue; None if nobody holds anything newer
    than the base.

    A division is an assignment of the slices to the members of one membership. The result belongs
    to the newest division of which all slices are left, at the newest step for which they are.
    Members may hold slices of different divisions: if the membership changes while the state is
    being divided again, some members already hold their new slices, and keep the earlier ones for
    the others. A member that lost its connections may be one step ahead of the others. Raises
    SoleCopyLostError if a slice was lost with all members that held it.
    """
    said = [member.slices for member in members if member.HasField("slices")]
    divisions = {slices.membership for slices in said}
    divisions |= {slices.before.membership for slices in said if slices.HasField("before")}
    late = {rank for rank, member in enumerate(members) if member.slices.is_late}
    lost: SoleCopyLostError | None = None
    for membership in sorted(divisions, reverse=True):
        held = {rank: member for rank, member in enumerate(members) if _holds(member, membership)}
        copies = {
            rank: member.slices.before
            for rank, member in enumerate(members)
            if member.HasField("slices") and _keeps(member.slices, membership)
        }
        steps = {member.applied_step for member in held.values()}
        steps |= {copy.step for copy in copies.values()}
        for step in sorted((applied for applied in steps if applied >= base_step), reverse=True):
            try:
                return _survival(membership, step, held, copies, late)
            except SoleCopyLostError as error:
                if step > base_step:
                    lost = lost or error
    if lost is not None:
        raise lost
    return None


def _holds(member: RendezvousMember, membership: int) -> bool:
    return member.HasField("slices") and member.slices.membership == membership


def _keeps(slices: HeldSlices, membership: int) -> bool:
    return slices.HasField("before") and slices.before.membership == membership


def _survival(
    membership: int,
    step: int,
    held: Mapping[int, RendezvousMember],
    copies: Mapping[int, KeptSlices],
    late: Container[int],
) -> Survival:
    """Return the complete set of slices that is left of one division of the state, after one step.
    late: the members that can still finish this step. Raises SoleCopyLostError if a slice or the
    undivided state is lost."""
    holders = {rank: member for rank, member in held.items() if _can_be_at(member, step)}
    keepers = {rank: copy for rank, copy in copies.items() if copy.step == step}
    sizes = [peer.slices.size for peer in held.values()] + [copy.size for copy in copies.values()]
    place_of = {number: rank for rank, copy in keepers.items() for number in copy.numbers}
    # Whose own it is gives it, rather than the member with its mirror, or with a copy.
    place_of |= {(member.slices.rank - 1) % sizes[0]: rank for rank, member in holders.items()}
    place_of |= {member.slices.rank: rank for rank, member in holders.items()}
    for number in range(sizes[0]):
        if number not in place_of:
            text = f"no worker that is left holds slice {number} of {sizes[0]}"
            raise SoleCopyLostError(f"{text} as it was divided last")
    donors: dict[int, HeldSlices | KeptSlices] = {
        rank: member.slices for rank, member in holders.items() if member.applied_step == step
    }
    donors |= keepers  # they hold what is not divided as of the same step
    if not donors:
        raise SoleCopyLostError("no worker that is left holds what all of them had")
    # What a member that has finished the step late has recorded of the segment lacks it.
    donor = min(donors, key=lambda rank: rank in late)
    by_donor = donors[donor]
    return Survival(
        membership=membership,
        step=step,
        holders=frozenset(holders),
        keepers=frozenset(keepers),
        sources=tuple(place_of[number] for number in range(sizes[0])),
        donor=donor,
        grad_norm=by_donor.grad_norm,
        is_finite=by_donor.is_finite,
    )


def _can_be_at(member: RendezvousMember, step: int) -> bool:
    in_doubt = member.slices.HasField("step_in_doubt") and member.slices.step_in_doubt
    return step in (member.applied_step, in_doubt)

"""One state for all members of a party: its newest, or the base where no member holds any.

A member that is behind copies the state of one that is not; with slices of a state, see
`mirrored_state`. Runs in the torch thread; calls go through the event loop.
"""

from stratagem.common.strategy import fewest_mirrored, partitions_parameters, partitions_state
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.engine import Trainer
from stratagem.worker.engine.trainers.optimizer_pieces import StateShare
from stratagem.worker.party.join_rendezvous import Members
from stratagem.worker.party.live_state import copy_from, held, load_base, marks_of, offer_whole
from stratagem.worker.party.mirrored_state import agree_on_slices
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.plan_control import MemberView


def agree_on_state(
    work: ExecutionContext, plan: pb.TrainPlan, view: MemberView, members: Members
) -> Trainer:
    """Bring this member to the newest state of the party, or to the base if no member holds one;
    return its trainer."""
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
    """Return which slice of the optimizer's state this member keeps under the view; None where each
    keeps all of it."""
    strategy = work.job.strategy
    if not partitions_state(strategy):
        return None
    fewest = fewest_mirrored(strategy)
    is_mirrored = fewest is not None and view.size >= fewest
    return StateShare(view.rank, view.size, is_mirrored, partitions_parameters(strategy))

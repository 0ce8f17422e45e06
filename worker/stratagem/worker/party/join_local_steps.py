"""Joining a party whose replicas take local steps: every member loads the replicas that it owns.

What a member holds of them is the only copy, so members cannot copy from each other: either all
hold their replicas at the same step, or all of them load the base. Runs in the torch thread.
"""

from stratagem.common.process.failpoints import failpoint
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.engine import LocalStepsTrainer, build_local_steps_trainer
from stratagem.worker.party.join_rendezvous import Members
from stratagem.worker.session.context import ExecutionContext
from stratagem.worker.session.plan_control import MemberView


def hold_replicas(
    work: ExecutionContext, plan: pb.TrainPlan, view: MemberView, members: Members
) -> LocalStepsTrainer:
    """Return the trainer of this member's replicas, at the step of all the others'."""
    steps = {m.applied_step if m.HasField("applied_step") else None for m in members}
    is_common = len(steps) == 1 and None not in steps
    held = work.holding.trainer
    if is_common and isinstance(held, LocalStepsTrainer):
        return held
    return _load_outer_base(work, plan, view.me.shards)


def _load_outer_base(
    work: ExecutionContext, plan: pb.TrainPlan, replicas: range
) -> LocalStepsTrainer:
    work.holding.drop()
    tensors, metadata = work.base_state(plan.base)
    if plan.kept:
        own, numbers = work.host.kept.load(work.key.run_id, plan.base.segment, plan.kept)
        tensors, metadata = {**tensors, **own}, {**metadata, **numbers}
    failpoint("worker.replicas.loaded")
    trainer = build_local_steps_trainer(
        work.job,
        work.entrypoints,
        replicas,
        device=work.host.device,
        sources=work.sources(),
        numerics=work.numerics,
    )
    work.warn(trainer.notes)
    trainer.load_state(tensors, metadata)
    work.holding.trainer = trainer
    work.holding.begin_sums(work.segment)
    return trainer

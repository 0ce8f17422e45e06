"""Late updates: clients that a round was closed without train on, and their updates enter a later
round.

Only where the job says so (`options.late_updates`). What such a client has changed on its own base
is made to the present state and counts n · d^staleness, staleness being the rounds between the one
it trained for and the one it enters (as in FedAsync, https://arxiv.org/abs/1903.03934, and FedBuff,
https://arxiv.org/abs/2106.06639). Pure functions of the run value; federated.py asks them.
"""

from collections.abc import Iterator
from dataclasses import replace

from stratagem.common.base.ids import Digest, RunId
from stratagem.common.job import JobSpec
from stratagem.common.strategy import Federated
from stratagem.coordinator.core.effects import TrainClient
from stratagem.coordinator.core.facts import (
    Accepted,
    Assignment,
    ClientsAssigned,
    Fact,
    UpdateReceived,
    UpdateRejected,
)
from stratagem.coordinator.core.metric_course import num_lr_reductions
from stratagem.coordinator.core.state import WorkerRecord
from stratagem.coordinator.strategies.federated.federated_run import (
    FederatedRun,
    Late,
    due_clients,
    spec_of,
)
from stratagem.coordinator.strategies.privacy import row_ledger


def max_staleness(job: JobSpec) -> int:
    """Return for how many rounds updates of a closed round may still be needed; 0: late ones are
    refused."""
    strategy = job.strategy
    if not isinstance(strategy, Federated) or strategy.options.late_updates == "refuse":
        return 0
    return strategy.options.max_staleness


def weight(job: JobSpec, accepted: Accepted) -> float:
    """Return the weight of an update in the mean of its round: rows, discounted by staleness."""
    policy = spec_of(job).options.late_updates
    discount = 1.0 if policy == "refuse" else policy.discount
    return float(accepted.num_samples * discount**accepted.staleness)


def after_close(job: JobSpec, before: FederatedRun, value: FederatedRun) -> FederatedRun:
    """Mark the clients that still train as a round closes as late, and drop the late updates it
    took."""
    if not max_staleness(job):
        return value
    late = {client: training for client, training in before.late.items() if training.update is None}
    for client in due_clients(before):
        late[client] = of_open_round(before, client)
    return replace(value, late=late)


def of_open_round(value: FederatedRun, client: int) -> Late:
    """Return what a client of the open round trains from, and where."""
    assert value.committed is not None
    num_reductions = num_lr_reductions(value.metrics)
    return Late(value.round_num, value.committed, *value.assigned[client], num_reductions)


def after_commit(job: JobSpec, value: FederatedRun) -> FederatedRun:
    """Give up the late clients that would be too stale in the next round, or all after the last."""
    is_over = value.round_num > spec_of(job).rounds
    limit = -1 if is_over else max_staleness(job)
    late = {
        c: training
        for c, training in value.late.items()
        if value.round_num - training.round_num <= limit
    }
    return replace(value, late=late)


def after_selection(value: FederatedRun) -> FederatedRun:
    """Drop late clients that are selected again: they train for the new round."""
    chosen = set(value.selected)
    return replace(value, late={c: late for c, late in value.late.items() if c not in chosen})


def is_late(value: FederatedRun, fact: Fact) -> bool:
    """Return True for a fact about clients that an earlier round was closed without."""
    match fact:
        case UpdateReceived() | UpdateRejected():
            late = value.late.get(fact.client)
            return late is not None and late.round_num == fact.round_num
        case ClientsAssigned():
            return all(
                (late := value.late.get(a.client)) is not None and late.round_num == fact.round_num
                for a in fact.assignments
            )
        case _:
            return False


def with_late(value: FederatedRun, fact: Fact) -> FederatedRun:
    """Fold a fact about late clients: an update that waits for the next closing, or a client that
    is given up."""
    late = dict(value.late)
    match fact:
        case UpdateReceived():
            late[fact.client] = replace(late[fact.client], update=fact)
        case UpdateRejected():
            del late[fact.client]
        case _:
            assert isinstance(fact, ClientsAssigned), "is_late was asked"
            for assignment in fact.assignments:
                del late[assignment.client]
            value = replace(value, membership=fact.membership)
    return replace(value, late=late)


def give_up(value: FederatedRun, workers: list[WorkerRecord]) -> ClientsAssigned | None:
    """Give up late clients whose worker is lost; they are not trained again. None while there are
    none."""
    if not value.late:
        return None
    here = {worker.member for worker in workers}
    lost = {c: training for c, training in _training(value) if training.member not in here}
    if not lost:
        return None
    round_num = min(training.round_num for training in lost.values())
    return ClientsAssigned(
        party=value.party,
        round_num=round_num,
        membership=value.membership + 1,
        assignments=tuple(
            Assignment(client=client, member=None)
            for client, training in sorted(lost.items())
            if training.round_num == round_num
        ),
    )


def accepted(value: FederatedRun) -> list[Accepted]:
    """Return the late updates that the open round takes if it closes now."""
    return [
        Accepted(
            client=client,
            digest=late.update.digest,
            num_samples=late.update.num_samples,
            staleness=value.round_num - late.round_num,
            base=late.base.digest,
        )
        for client, late in sorted(value.late.items())
        if late.update is not None
    ]


def received(value: FederatedRun) -> list[UpdateReceived]:
    """Return the facts of the late updates that have arrived, in order of client."""
    return [late.update for _, late in sorted(value.late.items()) if late.update is not None]


def effects(run_id: RunId, job: JobSpec, value: FederatedRun) -> Iterator[TrainClient]:
    """Yield the training of the late clients, unchanged from when their round was open."""
    for client, late in _training(value):
        yield training(run_id, job, value, client, late)


def training(
    run_id: RunId, job: JobSpec, value: FederatedRun, client: int, own: Late
) -> TrainClient:
    """Return the training of one client; own: its round, base and worker, late or not."""
    strategy, states = spec_of(job), value.client_states
    return TrainClient(
        run_id=run_id,
        party=value.party,
        membership=own.membership,
        round_num=own.round_num,
        client=client,
        num_clients=strategy.num_clients,
        local_epochs=strategy.options.local_epochs,
        member=own.member,
        base=own.base,
        num_lr_reductions=own.num_lr_reductions,
        clip_norm=value.ledger.round.clip_norm if value.ledger and value.ledger.round else 0.0,
        rows=None if value.rows is None else row_ledger.asked(value.rows, client),
        state=None if states is None else states.newest.get(client),
        attempt=value.secure.attempt,
        routed=value.secure.routed,
        num_members=len(value.secure.members),
    )


def blobs(value: FederatedRun) -> frozenset[Digest]:
    """Return the states that late clients train from, or that accepted late updates were trained
    from."""
    kept = {late.base.digest for late in value.late.values()}
    return frozenset(kept | {update.base for update in value.accepted if update.base})


def _training(value: FederatedRun) -> Iterator[tuple[int, Late]]:
    for client, late in value.late.items():
        if late.update is None:
            yield client, late

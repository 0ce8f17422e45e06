"""The effects that a run needs performed, as values, and the grant of compute slots to them.

An effect contains neither an attempt nor a time, so equal needs are equal values. The coordinator
runs one task per effect in `pending(state)`, and stops the task when its effect leaves the set.
Every effect is idempotent: after a crash it is performed again.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar, assert_never

from stratagem.common.base.ids import NO_DIGEST, Digest, Party, RunId, WorkerId
from stratagem.coordinator.core.facts import Accepted, Member, RoundAccounted

# ---- Effects ----


class ExchangeMethod(StrEnum):
    """The method with which the members of a party exchange tensors in a step."""

    ALL_REDUCE = "AllReduce"
    PARAMETER_SERVER = "ParameterServer"
    GOSSIP = "Gossip"


@dataclass(frozen=True, slots=True)
class Base:
    """A committed state to begin from, named by segment, step and digest."""

    segment: int
    step: int
    digest: Digest
    streams: str = ""
    """The position in each stream of rows, as JSON keyed by stream; "" without streams."""
    average: Digest = NO_DIGEST
    """The blob with the averaged parameters at that state, if a federation keeps an average."""


@dataclass(frozen=True, slots=True)
class KeptState:
    """A private state that a federated client keeps at its worker, and the round that made it."""

    round_num: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class Build:
    """Build the model on one worker and commit its state as segment 0."""

    run_id: RunId
    party: Party
    membership: int
    member: Member
    params: Mapping[str, Any] | None = field(default=None, compare=False)
    """Hyperparameters of a population's member, to find out which of them are structural."""


@dataclass(frozen=True, slots=True)
class RunSegment:
    """Train a party up to a given step of its training, by all members together."""

    run_id: RunId
    party: Party
    membership: int
    segment: int
    to_step: int
    base: Base = field(compare=False)
    """The state to begin from if no member holds one. It is not compared: a commit in mid-segment
    changes it, but must not restart the segment, as all members hold a state then."""
    lineage: int
    """A number that grows when the party begins from a given state; workers drop older states."""
    members: tuple[Member, ...]
    num_shards: int
    exchange: ExchangeMethod
    parts: tuple[tuple[Member, ...], ...]
    """The members that hold each part of the state afterwards; all parts are the whole state."""
    ranks: tuple[int, ...]
    """The rank, within a replica, that owns each partition of the model; empty if every member has
    the whole model."""
    evaluate: tuple[str, ...]
    num_skipped: int = field(default=0, compare=False)
    """The number of steps skipped in earlier segments."""
    num_lr_reductions: int = 0
    """The number of times that a plateau has lowered the learning rates before the segment."""
    num_steps: int = field(default=0, compare=False)
    """Steps of the party's whole training, which decide the steps per row of its history."""
    rounds_before: int = field(default=0, compare=False)
    """The number of earlier rounds if the party is a client of a federation: each has one segment
    and equally many steps. The client's history counts the steps of all rounds."""
    num_rounds: int = field(default=1, compare=False)
    kept: tuple[Digest, ...] = field(default=(), compare=False)
    """The digests of the members' files, by rank, that hold what a partial base state lacks."""
    keeps: bool = False
    """True if each member keeps the parts that it alone has in a local file after the segment."""
    is_mirrored: bool = field(default=False, compare=False)
    """True if members mirror each other's parts; a part is lost if both its holders are gone."""


@dataclass(frozen=True, slots=True)
class CommitSegment:
    """Pull a finished segment's snapshot from the workers, part by part, into one stored blob."""

    run_id: RunId
    party: Party
    segment: int
    step: int
    membership: int
    parts: tuple[tuple[Member, ...], ...]
    """The members that have each part of the state; any one of a part's members will do."""
    metrics: tuple[tuple[str, float], ...] = ()
    mirrors: tuple[tuple[Member, ...], ...] = ()
    """The members that mirror each part of the state besides their own; empty without mirrors."""
    streams: str = ""
    """The position in each stream of rows at the end of the segment; see Base."""
    is_partial: bool = False
    """True if the parts that only one member has stay on the workers; see SegmentCommitted."""


@dataclass(frozen=True, slots=True)
class UploadCommit:
    """Pull the parts of a commit that only workers have, and store the whole commit as one blob."""

    run_id: RunId
    party: Party
    segment: int
    membership: int
    base: Base
    holders: tuple[Member, ...]
    kept: tuple[Digest, ...]
    """The digests of the files to pull, one for each holder."""


@dataclass(frozen=True, slots=True)
class RowsAsked:
    """What a worker needs to account for the privacy of a client's protected rows."""

    num_rounds: int
    """The number of rounds opened with the client before this one."""
    fingerprint: str
    """Fingerprint of the secret behind the client's noise; empty if none is known."""


@dataclass(frozen=True, slots=True)
class TrainClient:
    """Train one client's part of a round on its worker, and pull the update into the spool."""

    run_id: RunId
    party: Party
    membership: int
    round_num: int
    client: int
    num_clients: int
    local_epochs: int
    member: Member
    base: Base
    num_lr_reductions: int = 0
    """How often a plateau has lowered the learning rates before the round; see RunSegment."""
    clip_norm: float = 0.0
    """The norm to which the client's change is clipped; 0: the update is the state itself."""
    rows: RowsAsked | None = None
    """The client's earlier rounds, if rows are protected."""
    state: KeptState | None = None
    """The client's private state from an earlier round; None: it starts without one."""
    attempt: int = 0
    """The attempt of a secure round."""
    routed: tuple[int, ...] = field(default=(), compare=False)
    """The clients among which the update is masked, fixed per attempt; empty: no masks."""
    num_members: int = 0
    """The number of clients that have posted keys."""
    share: tuple[int, int] | None = None
    """The index of a region's client among the clients of all regions, and their count, which
    decide its rows and their order; None: `client` and `num_clients` decide."""


@dataclass(frozen=True, slots=True)
class SecureParty:
    """One attempt of a secure-aggregation round: its clients, and what they have exchanged."""

    attempt: int
    workers: tuple[tuple[int, WorkerId], ...]
    """The worker of each client, in order of client."""
    members: tuple[int, ...] = ()
    """The clients that have posted keys."""
    ring_seed: str = ""
    directory: Digest = NO_DIGEST
    shares: Digest = NO_DIGEST
    routed: tuple[int, ...] = ()
    """The clients that have shared their secrets."""


@dataclass(frozen=True, slots=True)
class PostKeys:
    """Have the clients of a secure round post their public keys."""

    run_id: RunId
    party: Party
    round_num: int
    clients: SecureParty
    may_leave_out: bool
    """True if the round goes on without absent clients once enough are present; False: it waits."""


@dataclass(frozen=True, slots=True)
class RouteShares:
    """Have the clients of a secure round encrypt shares of their secrets for their neighbours."""

    run_id: RunId
    party: Party
    round_num: int
    clients: SecureParty
    may_leave_out: bool
    """True if the round goes on without absent clients once enough are present; see PostKeys."""


@dataclass(frozen=True, slots=True)
class AccountRound:
    """Compute the privacy cost of a round, and sample its clients in secret."""

    run_id: RunId
    party: Party
    round_num: int
    candidates: tuple[int, ...]
    """The clients to sample from."""
    num_spent: int
    """Rounds opened so far, including those undone by a return to an earlier commit."""
    clip_norm: float
    noise_multiplier: float | None
    """The calibrated multiplier; None: it is not calibrated yet."""
    fingerprint: str
    """Fingerprint of the secret of the earlier rounds; empty before the first."""


@dataclass(frozen=True, slots=True)
class CollectUpdate:
    """Copy the committed state of a client that is a party into the round's spool."""

    run_id: RunId
    party: Party
    round_num: int
    client: int
    digest: Digest
    num_samples: int
    num_steps: int
    loss: float
    base: Base
    metrics: tuple[tuple[str, float], ...] = ()
    """Metrics of the client's steps, by name."""
    traffic: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class SumRegion:
    """Sum the accepted updates of a region, a client that is a federation, as its update."""

    run_id: RunId
    party: Party
    round_num: int
    client: int
    inside: Party
    """The party of the region, under whose name its clients' updates are spooled."""
    round_inside: int
    base: Base
    """The state from which the region's clients have begun."""
    accepted: tuple[Accepted, ...]
    num_steps: int
    loss: float
    metrics: tuple[tuple[str, float], ...] = ()
    """Metrics of the clients' steps, by name."""


@dataclass(frozen=True, slots=True)
class JudgeUpdates:
    """Compare the accepted updates of a round, and weight each by a robust rule or by its loss."""

    run_id: RunId
    party: Party
    round_num: int
    base: Base
    accepted: tuple[Accepted, ...]
    losses: tuple[float, ...] = ()
    """The loss of each client before it trained; empty if updates are not weighted by loss."""


@dataclass(frozen=True, slots=True)
class AggregateRound:
    """Aggregate the accepted updates of a round, in client order, into the next global state."""

    run_id: RunId
    party: Party
    round_num: int
    base: Base
    accepted: tuple[Accepted, ...]
    server_state: tuple[Digest, ...] = ()
    metrics: tuple[tuple[str, float], ...] = field(default=(), compare=False)
    """Metrics of the round's training, by name; aggregation does not use them."""
    weights: tuple[float, ...] = ()
    """The weight of each accepted update, if they have been judged."""
    privacy: RoundAccounted | None = None
    """The round's account, which decides the noise to add; None: without noise."""
    num_steps: tuple[int, ...] = ()
    """Steps that each client has applied; empty if changes are not divided by steps."""
    regions: tuple[tuple[int, ...], ...] = ()
    """Indexes of the accepted updates that are summed together, per region; empty: all at once."""
    secure: SecureParty | None = None
    """The clients that help to unmask the sum; None: the sum is not masked."""
    is_control_anew: bool = False
    """True if SCAFFOLD's common control variate is set to zero, as all clients' variates are."""
    integers_of: int | None = None
    """Index of the update whose integer tensors are taken, if regions send sums; else None."""


@dataclass(frozen=True, slots=True)
class EvaluateState:
    """Evaluate a stored state with some members of a party, each on the batches of its shards."""

    run_id: RunId
    party: Party
    membership: int
    base: Base
    splits: tuple[str, ...]
    members: tuple[Member, ...]
    num_shards: int = 1
    client: int | None = None
    """The client on whose rows one member evaluates, if each client evaluates on its own rows."""
    client_state: KeptState | None = None
    """The private state of that client; None if clients have none."""
    lineage: int = 0
    """The number of times that the party was restored to an earlier commit: states of the same
    segments are evaluated again."""

    @property
    def member(self) -> Member | None:
        """Return the one member that runs the evaluation, or None if several members share it."""
        return self.members[0] if len(self.members) == 1 else None


@dataclass(frozen=True, slots=True)
class MergeMetrics:
    """Add up the states of the clients' metrics, and have a worker compute the values."""

    run_id: RunId
    party: Party
    segment: int
    member: Member
    states: tuple[tuple[int, Digest], ...]
    """The blob with the metric states of each client, in order of client."""
    metrics: tuple[str, ...]
    """"<split>.<metric>" of each metric to compute; states of other metrics are ignored."""


@dataclass(frozen=True, slots=True)
class Release:
    """Have the workers drop the sessions of an ended run."""

    run_id: RunId
    members: frozenset[Member]


Effect = (
    Build
    | RunSegment
    | CommitSegment
    | UploadCommit
    | TrainClient
    | PostKeys
    | RouteShares
    | AccountRound
    | CollectUpdate
    | SumRegion
    | JudgeUpdates
    | AggregateRound
    | EvaluateState
    | MergeMetrics
    | Release
)


def slots(effect: Effect) -> frozenset[Member]:
    """Return the workers whose compute slots the effect needs, all at the same time."""
    match effect:
        case RunSegment() | EvaluateState():
            return frozenset(effect.members)
        case Build() | TrainClient() | MergeMetrics():
            return frozenset({effect.member})
        case CommitSegment() | UploadCommit():
            return frozenset()
        case AccountRound() | CollectUpdate() | SumRegion() | JudgeUpdates():
            return frozenset()
        case AggregateRound() | PostKeys() | RouteShares() | Release():
            return frozenset()
        case _:
            assert_never(effect)


# ---- Gang scheduling ----
#
# A segment gets the compute slots of all its workers at once, or waits.
#
# Requests are served in the order of arrival. A request that must wait reserves what it needs, so
# later requests cannot starve it. No request holds a slot while it waits for another one, so runs
# cannot deadlock.

Key = TypeVar("Key", bound=Hashable)
Slot = TypeVar("Slot", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Request(Generic[Key, Slot]):
    key: Key
    slots: frozenset[Slot]


def grant(
    waiting: Sequence[Request[Key, Slot]], taken: Iterable[Slot]
) -> tuple[Request[Key, Slot], ...]:
    """Return the requests that can start now: neither running nor earlier ones need their slots."""
    blocked = set(taken)
    granted = []
    for request in waiting:
        if not request.slots & blocked:
            granted.append(request)
        blocked |= request.slots
    return tuple(granted)

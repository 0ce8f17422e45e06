"""Keep the ledgers of a federated run: privacy budget, client states, and the setup of secure
rounds.

The functions are pure folds over the facts.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from stratagem.common.base.ids import NO_DIGEST, Digest, Party, RunId, WorkerId
from stratagem.common.base.text import beyond_text, counted
from stratagem.common.job import JobSpec
from stratagem.common.privacy.sharing import MIN_CLIENTS, neighbours, never_opened, shares_needed
from stratagem.common.strategy.secure import SecureAggregation
from stratagem.coordinator.core.effects import (
    AccountRound,
    KeptState,
    PostKeys,
    RouteShares,
    RowsAsked,
    SecureParty,
)
from stratagem.coordinator.core.facts import (
    ClientBinding,
    ClientsSelected,
    ClientStateLost,
    Excused,
    Fact,
    KeysPosted,
    RoundAccounted,
    RowsSpent,
    RunFailed,
    SegmentCommitted,
    SharesRouted,
    StoppedEarly,
    UpdateReceived,
    UpdateRejected,
)
from stratagem.coordinator.core.facts.fact_values import Cause

# ---- Privacy budget ----
#
# Each round is accounted before it is opened: an effect draws its clients in secret and computes
# what all rounds will have cost with it. A round that would exceed the target is never opened. A
# round that was opened has been paid for in any case, even without clients or when the run has
# since returned to a commit before it.

EPSILON = "privacy.epsilon"
"""Metric: the privacy budget that a run has spent, up to and including the round of its commit."""


@dataclass(frozen=True, slots=True)
class PrivacyLedger:
    """The privacy budget that a run has spent, and the account of the open or the next round."""

    clip_norm: float
    """The clipping norm of the next round to be accounted."""
    noise_multiplier: float | None
    """The noise multiplier; None until the first round calibrates it."""
    num_spent: int = 0
    epsilon: float = 0.0
    """The epsilon of all rounds that were opened."""
    fingerprint: str = ""
    round: RoundAccounted | None = None
    """The account of the round that is open or about to be opened; None if there is none."""

    def fold(self, fact: Fact) -> "PrivacyLedger":
        """Return the ledger with a fact folded in: a round's account, opening, or commit."""
        match fact:
            case RoundAccounted(noise_multiplier=noise, fingerprint=fingerprint):
                return replace(self, round=fact, noise_multiplier=noise, fingerprint=fingerprint)
            case ClientsSelected():
                assert self.round is not None
                return replace(self, num_spent=self.num_spent + 1, epsilon=self.round.epsilon)
            case SegmentCommitted(clip_norm=norm):
                return replace(self, round=None, clip_norm=self.clip_norm if norm is None else norm)
            case _:
                return self

    @property
    def metrics(self) -> dict[str, float]:
        """Return the round's metrics; means over clients are left out, as few would be revealed."""
        assert self.round is not None
        return {EPSILON: self.epsilon, "privacy.clip_norm": self.round.clip_norm}

    def returned(self) -> "PrivacyLedger":
        """Return the ledger after a return to an earlier commit; a spent budget stays spent."""
        return replace(self, round=None)

    def due(
        self, run_id: RunId, party: Party, round_num: int, candidates: tuple[int, ...]
    ) -> AccountRound:
        """Return the effect that computes the privacy cost of the next round."""
        of_round = run_id, party, round_num, candidates
        noise = self.noise_multiplier, self.fingerprint
        return AccountRound(*of_round, self.num_spent, self.clip_norm, *noise)


def privacy_ledger(job: JobSpec) -> PrivacyLedger | None:
    """Return the ledger of a run that has spent nothing; None if no clients are protected."""
    if job.privacy is None or job.privacy.unit != "client":
        return None
    return PrivacyLedger(job.privacy.clip.norm, job.privacy.noise_multiplier)


def beyond_budget(
    job: JobSpec, ledger: PrivacyLedger, segment: int
) -> StoppedEarly | RunFailed | None:
    """Return the fact that ends a run whose next round would exceed its target, or None.

    segment: the newest committed round.
    """
    assert job.privacy is not None
    target, accounted = job.privacy.target, ledger.round
    if accounted is None or target.epsilon is None or accounted.epsilon <= target.epsilon:
        return None
    budget = f"{ledger.epsilon:.3g} of {target.epsilon:g} spent"
    cost = beyond_text(accounted.epsilon, target.epsilon)
    text = f"privacy budget: {budget}, round {accounted.round_num} would cost {cost}"
    if not ledger.num_spent:
        return RunFailed(reason=f"{text}; more noise, or clients drawn more rarely, cost less")
    return StoppedEarly(
        reason=f"stopped early after {counted(segment, 'round')}: {text}", step=segment
    )


# ---- Privacy of rows ----
#
# A client's worker, which knows its rows, computes what its rounds cost and refuses a round beyond
# the target. The coordinator counts how often each client was asked, which has been paid for
# whatever became of it, and decides who can take part in the next round.


@dataclass(frozen=True, slots=True)
class RowLedger:
    """The privacy budget that the rows of each client of a run have spent."""

    num_asked: Mapping[int, int] = field(default_factory=dict)
    """The number of rounds opened with each client, including rounds undone later."""
    spent: Mapping[int, RowsSpent] = field(default_factory=dict)
    """The account that came with each client's newest update: the budget that its rows have
    spent."""
    refused: frozenset[int] = frozenset()
    """The clients that have refused a round beyond their budget."""

    def fold(self, fact: Fact) -> "RowLedger":
        """Return the ledger with a fact folded in: a round's opening, or a client's answer."""
        match fact:
            case ClientsSelected():
                more = {client: self.num_asked.get(client, 0) + 1 for client in fact.clients}
                return replace(self, num_asked={**self.num_asked, **more})
            case UpdateReceived(client=client, spent=RowsSpent() as spent):
                return replace(self, spent={**self.spent, client: spent})
            case UpdateRejected(client=client, cause=Cause.BUDGET):
                return replace(self, refused=self.refused | {client})
            case _:
                return self

    def due(self, client: int) -> RowsAsked:
        """Return the client's earlier rounds, by which its worker accounts for the open round."""
        spent, num_rounds = self.spent.get(client), self.num_asked.get(client, 1) - 1
        return RowsAsked(num_rounds, "" if spent is None else spent.fingerprint)

    @property
    def most_spent(self) -> float:
        """Return the highest epsilon that a client has spent."""
        return max((spent.epsilon for spent in self.spent.values()), default=0.0)

    @property
    def metrics(self) -> dict[str, float]:
        """Return the metrics of a round; a mean loss is left out, as it might reveal rows."""
        return {EPSILON: self.most_spent}


def row_ledger(job: JobSpec) -> RowLedger | None:
    """Return the ledger of a run that has spent nothing; None if no rows are protected."""
    return RowLedger() if job.privacy is not None and job.privacy.unit == "row" else None


def with_budget(
    job: JobSpec, ledger: RowLedger, clients: Sequence[ClientBinding]
) -> tuple[list[ClientBinding], tuple[Excused, ...]]:
    """Return the clients that can take part in one more round, as far as is known beforehand, and
    the others as excused."""
    able = [binding for binding in clients if _has_budget(job, ledger, binding.client)]
    others = tuple(b.client for b in clients if not _has_budget(job, ledger, b.client))
    return able, (Excused(reason="privacy budget spent", clients=others),) if others else ()


def _has_budget(job: JobSpec, ledger: RowLedger, client: int) -> bool:
    assert job.privacy is not None
    target, spent = job.privacy.target.epsilon, ledger.spent.get(client)
    if client in ledger.refused:
        return False
    return target is None or spent is None or spent.next_epsilon <= target


def budget_spent(job: JobSpec, ledger: RowLedger, segment: int) -> StoppedEarly:
    """Return the fact that ends a run because no client has budget left for one more round;
    segment: the newest committed round."""
    assert job.privacy is not None
    target = job.privacy.target.epsilon or 0.0
    text = f"up to {ledger.most_spent:.3g} of {target:g} spent by a client"
    reason = f"stopped early after {counted(segment, 'round')}: privacy budget: {text}, and one "
    return StoppedEarly(reason=f"{reason}more round would cost each of them more", step=segment)


# ---- Client states ----
#
# The ledger records which state each client has kept of which round. A client's newest state is
# that of its newest journaled update. A round that is repeated therefore begins from the state of
# the round before it, whatever the client has written meanwhile.


@dataclass(frozen=True, slots=True)
class ClientStates:
    """The newest private state of each client, kept at its worker, or as a blob in the store."""

    are_blobs: bool = False
    are_summed: bool = False
    """True if the states must add up to a common one, which needs those of all clients."""
    newest: Mapping[int, KeptState] = field(default_factory=dict)
    """The newest state of each client; a client without a state starts with its initial one."""
    is_incomplete: bool = False
    """True if a client has lost its newest state, or all have restarted from an earlier commit
    without their states: the states do not add up to the common one any more."""

    @property
    def blobs(self) -> frozenset[Digest]:
        """Return the digests of the client states that the store must keep."""
        return frozenset(state.digest for state in self.newest.values() if self.are_blobs)

    @property
    def blobs_by_client(self) -> tuple[Digest, ...]:
        """Return those digests in the order of the clients."""
        return tuple(self.newest[client].digest for client in sorted(self.newest) if self.are_blobs)

    @property
    def are_due_anew(self) -> bool:
        """Return True if all clients start over with the next commit."""
        return self.are_summed and self.is_incomplete

    def fold(self, fact: Fact) -> "ClientStates":
        """Return the record with a client's update, the loss of its state, or a commit applied."""
        match fact:
            case UpdateReceived():
                state = KeptState(fact.round_num, fact.client_state)
                return replace(self, newest={**self.newest, fact.client: state})
            case ClientStateLost():
                return replace(self, is_incomplete=True)
            case SegmentCommitted() if self.are_due_anew:
                return replace(self, newest={}, is_incomplete=False)
            case _:
                return self

    def returned(self) -> "ClientStates":
        """Return the record after the run returned to an earlier commit: all clients start over."""
        return replace(self, newest={}, is_incomplete=True)


# ---- Setup of secure rounds ----
#
# The clients of a round exchange the following before they train, so that only their sum is seen:
#
#     POST KEYS      each client posts public keys             KeysPosted
#     ROUTE SHARES   each seals shares of its secrets          SharesRouted
#     (training)     masked updates come in                    UpdateReceived
#     (closing)      whose updates are in the sum is fixed     RoundClosed
#     (aggregation)  those clients open the masks of the sum
#
# A client that is lost on the way is left out, and its masks are removed from the sum with shares
# that the others hold. Where too few are left for that, and keys were lost, the round begins
# again with new ones. The functions are independent of the rest of a round.

MAX_ATTEMPTS: Final = 5
"""The most attempts of a round; each new one follows the end of another worker process."""
_CURED: Final = (Cause.KEYS_LOST, Cause.ABSENT)
"""Causes that new keys remedy."""


@dataclass(frozen=True, slots=True)
class SecureSetup:
    """The keys and shares exchanged so far in the present attempt of a secure round."""

    attempt: int = 0
    members: tuple[int, ...] = ()
    """The clients that have posted keys; empty until then."""
    ring_seed: str = ""
    directory: Digest = NO_DIGEST
    routed: tuple[int, ...] = ()
    """The clients that have shared their secrets; empty until then."""
    shares: Digest = NO_DIGEST

    def fold(self, fact: KeysPosted | SharesRouted) -> "SecureSetup":
        """Return the record of the attempt with newly posted keys or exchanged shares folded in."""
        if isinstance(fact, KeysPosted):
            return SecureSetup(self.attempt, fact.clients, fact.ring_seed, fact.directory)
        return replace(self, routed=fact.clients, shares=fact.shares)

    def party(self, workers: Mapping[int, WorkerId]) -> SecureParty:
        """Return this attempt as effects need it, with the given worker of each client."""
        exchanged = self.members, self.ring_seed, self.directory, self.shares, self.routed
        return SecureParty(self.attempt, tuple(sorted(workers.items())), *exchanged)

    def refuses(self, fact: KeysPosted | SharesRouted) -> str:
        """Return the reason why a fact of the open round is stale; "" if it is expected."""
        done = self.members if isinstance(fact, KeysPosted) else self.routed
        is_next = not done and (isinstance(fact, KeysPosted) or bool(self.members))
        if fact.attempt == self.attempt and is_next:
            return ""
        return f"attempt {fact.attempt} of round {fact.round_num} does not wait for it"

    def due(
        self,
        run_id: RunId,
        party: Party,
        round_num: int,
        workers: Mapping[int, WorkerId],
        *,
        may_leave_out: bool,
    ) -> PostKeys | RouteShares | None:
        """Return the effect that exchanges keys or shares next; None once clients can train.
        workers: the workers of clients that are still in the round."""
        of_round = run_id, party, round_num
        if not self.members:
            return PostKeys(*of_round, self.party(workers), may_leave_out)
        if not self.routed:
            workers = {client: workers[client] for client in self.members if client in workers}
            return RouteShares(*of_round, self.party(workers), may_leave_out)
        return None

    @property
    def blobs(self) -> frozenset[Digest]:
        return frozenset({self.directory, self.shares} - {NO_DIGEST})

    def fewest_survivors(self, spec: SecureAggregation) -> int:
        """Return the least number of updates with which the round can be unmasked."""
        return shares_needed(spec.threshold, len(self.members))

    def lack(self, spec: SecureAggregation, possible: Collection[int]) -> str:
        """Return the reason why no sum over these clients can be unmasked; "" if it can be, as far
        as is known."""
        group = self.members or possible
        if len(group) < MIN_CLIENTS:
            return f"{len(group)} exchange keys, and fewer than {MIN_CLIENTS} hide nobody"
        if not self.members:
            return ""
        still = set(possible) & set(self.routed or self.members)
        needed = self.fewest_survivors(spec)
        if len(still) < needed:
            return f"{len(still)} can be in the sum, and {needed} are needed to unmask it"
        around = neighbours(self.members, spec.degree, bytes.fromhex(self.ring_seed))
        if lost := never_opened(around, self.routed or self.members, still, spec.threshold):
            return f"too few are left that hold shares of client {lost[0]}"
        return ""


def rejections(fact: KeysPosted | SharesRouted) -> dict[int, UpdateRejected]:
    """Return, keyed by client, the rejections of the clients that the exchange has left out."""
    return {
        left_out.client: UpdateRejected(
            party=fact.party,
            round_num=fact.round_num,
            client=left_out.client,
            reason=left_out.reason,
            cause=left_out.cause,
            attempt=fact.attempt,
        )
        for left_out in fact.left_out
    }


def cures(cause: Cause) -> bool:
    """Return True if a new attempt with new keys may remedy a cause of rejection."""
    return cause in _CURED


def cured(rejected: Mapping[int, UpdateRejected]) -> dict[int, UpdateRejected]:
    """Return the rejections whose causes a new attempt with new keys cannot remedy."""
    return {client: fact for client, fact in rejected.items() if not cures(fact.cause)}


def may_be_cured(rejected: Mapping[int, UpdateRejected]) -> bool:
    """Return True if a new attempt with new keys may bring back one of these rejected clients, so
    that another run of the job might not have rejected it."""
    return any(cures(fact.cause) for fact in rejected.values())

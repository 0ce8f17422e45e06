"""What a federated round exchanges before its clients train, so that only their sum is seen.

    POST KEYS      each client posts public keys             KeysPosted
    ROUTE SHARES   each seals shares of its secrets          SharesRouted
    (training)     masked updates come in                    UpdateReceived
    (closing)      whose updates are in the sum is fixed     RoundClosed
    (aggregation)  those clients open the masks of the sum

A client that is lost on the way is left out, and its masks are taken from the sum with shares that
the others hold. Where too few are left for that, and keys were lost, the round begins again with
new ones. Pure functions; they know nothing of the rest of a round.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from stratagem.common.base.ids import NO_DIGEST, Digest, Party, RunId, WorkerId
from stratagem.common.secure.sharing import MIN_CLIENTS, neighbours, never_opened, shares_needed
from stratagem.common.strategy.secure import SecureAggregation
from stratagem.coordinator.core.effects import PostKeys, RouteShares, SecureParty
from stratagem.coordinator.core.facts import KeysPosted, SharesRouted, UpdateRejected
from stratagem.coordinator.core.facts.rejection_causes import Cause

MAX_ATTEMPTS: Final = 5
"""Attempts of a round: each needs a worker process to have ended since the one before."""
_CURED: Final = (Cause.KEYS_LOST, Cause.ABSENT)
"""Causes that new keys do away with."""


@dataclass(frozen=True, slots=True)
class SecureSetup:
    """How far the open round is, in its present attempt."""

    attempt: int = 0
    members: tuple[int, ...] = ()
    """The clients that have posted keys; empty before."""
    ring_seed: str = ""
    directory: Digest = NO_DIGEST
    routed: tuple[int, ...] = ()
    """The clients that have shared their secrets; empty before."""
    shares: Digest = NO_DIGEST

    def with_fact(self, fact: KeysPosted | SharesRouted) -> "SecureSetup":
        """Fold one fact of the attempt."""
        if isinstance(fact, KeysPosted):
            return SecureSetup(self.attempt, fact.clients, fact.ring_seed, fact.directory)
        known = self.attempt, self.members, self.ring_seed, self.directory
        return SecureSetup(*known, fact.clients, fact.shares)

    def party(self, workers: Mapping[int, WorkerId]) -> SecureParty:
        """Return the attempt as effects have it. workers: of each client."""
        return SecureParty(
            self.attempt,
            tuple(sorted(workers.items())),
            self.members,
            self.ring_seed,
            self.directory,
            self.shares,
            self.routed,
        )

    def refuses(self, fact: KeysPosted | SharesRouted) -> str:
        """Return why a fact of the open round is stale; "" when it is welcome."""
        done = self.members if isinstance(fact, KeysPosted) else self.routed
        is_next = not done and (isinstance(fact, KeysPosted) or bool(self.members))
        if fact.attempt == self.attempt and is_next:
            return ""
        return f"attempt {fact.attempt} of round {fact.round_num} does not wait for it"

    @property
    def blobs(self) -> frozenset[Digest]:
        return frozenset({self.directory, self.shares} - {NO_DIGEST})


def rejections(fact: KeysPosted | SharesRouted) -> dict[int, UpdateRejected]:
    """Return the rejections of the clients that are left out, by client."""
    return {
        each.client: UpdateRejected(
            party=fact.party,
            round_num=fact.round_num,
            client=each.client,
            reason=each.reason,
            cause=each.cause,
            attempt=fact.attempt,
        )
        for each in fact.left_out
    }


def exchange(
    run_id: RunId,
    party: Party,
    round_num: int,
    setup: SecureSetup,
    workers: Mapping[int, WorkerId],
    *,
    may_leave_out: bool,
) -> PostKeys | RouteShares | None:
    """Return what is to be exchanged next; None once clients can train. workers: of the clients
    that are still in the round."""
    of_round = run_id, party, round_num
    if not setup.members:
        return PostKeys(*of_round, setup.party(workers), may_leave_out)
    if not setup.routed:
        own = {client: workers[client] for client in setup.members if client in workers}
        return RouteShares(*of_round, setup.party(own), may_leave_out)
    return None


def lack(spec: SecureAggregation, setup: SecureSetup, possible: Collection[int]) -> str:
    """Return why no sum of these clients can be unmasked; "" where it can, as far as is known."""
    group = setup.members or possible
    if len(group) < MIN_CLIENTS:
        return f"{len(group)} exchange keys, and fewer than {MIN_CLIENTS} hide nobody"
    if not setup.members:
        return ""
    still = set(possible) & set(setup.routed or setup.members)
    needed = shares_needed(spec.threshold, len(setup.members))
    if len(still) < needed:
        return f"{len(still)} can be in the sum, and {needed} are needed to unmask it"
    seed = bytes.fromhex(setup.ring_seed)
    around = neighbours(setup.members, spec.degree, seed)
    if lost := never_opened(around, setup.routed or setup.members, still, spec.threshold):
        return f"too few are left that hold shares of client {lost[0]}"
    return ""


def fewest_survivors(spec: SecureAggregation, setup: SecureSetup) -> int:
    """Return the updates without which the round is not unmasked."""
    return shares_needed(spec.threshold, len(setup.members))


def cures(cause: Cause) -> bool:
    """Return whether new keys may do away with a cause."""
    return cause in _CURED


def cured(rejected: Mapping[int, UpdateRejected]) -> dict[int, UpdateRejected]:
    """Return the rejections that new keys do not do away with."""
    return {client: fact for client, fact in rejected.items() if not cures(fact.cause)}


def is_by_policy(rejected: Mapping[int, UpdateRejected]) -> bool:
    """Return whether another run of the job might have had a client that this round is without."""
    return any(cures(fact.cause) for fact in rejected.values())

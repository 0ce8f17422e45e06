"""This module defines the facts of federated rounds: the roster, the selection and assignment of
clients, and the outcome of a round.
"""

from collections.abc import Mapping

from stratagem.common.base.ids import Digest, Party, WorkerId
from stratagem.coordinator.core.facts.fact_values import (
    Cause,
    ErrorRecord,
    Member,
    Metrics,
    Number,
    Value,
)

# ---- Rounds ----


class ClientEvaluated(Value):
    """A client has evaluated a state on its own rows, or cannot; see
    strategies.evaluation.metric_sums."""

    party: Party
    segment: int
    client: int
    sums: Metrics
    reason: str = ""
    """Why there are no sums."""
    has_left: bool = False
    """True when it has left the federation before it could evaluate, which is no failure."""
    own: Mapping[str, Number] = {}
    """Metrics of the user's own, of the client's rows alone."""
    summed: tuple[str, ...] = ()
    """Those of them, "<split>.<metric>", whose states are sums and may be merged."""
    states: Digest = Digest("")
    """The blob with these states; "" where there are none."""


class MetricsMerged(Value):
    """A worker has computed metrics of the user's own from the states of all clients, or could not;
    see effects.federated.merge_metrics."""

    party: Party
    segment: int
    clients: tuple[int, ...]
    """Whose states, in the order in which they were added."""
    worker_id: WorkerId
    """Empty: no worker was asked, as the states do not go together."""
    metrics: Mapping[str, Number] = {}
    reason: str = ""
    """Why there are none."""
    unmerged: Mapping[str, str] = {}
    """Why some of them are not there, by metric."""


class ClientBinding(Value):
    """The worker that a client lives on (worker-local data) or prefers (any other data)."""

    client: int
    worker_id: WorkerId
    tags: tuple[str, ...]


class RosterFormed(Value):
    party: Party
    clients: tuple[ClientBinding, ...]


class Excused(Value):
    """Clients that are not asked to take part in a round, for one reason."""

    reason: str
    clients: tuple[int, ...]


class ClientsSelected(Value):
    """A round opens with these clients; one that is open continues with others besides."""

    party: Party
    round_num: int
    clients: tuple[int, ...]
    deadline_s: float | None
    """Leader-clock time at which the round closes; None: when all have answered."""
    num_needed: int | None = None
    """The round closes with the first updates of this number; None: there is no such number."""
    excused: tuple[Excused, ...] = ()
    """The clients that could not be asked; not those that have left, or were not drawn."""


class Assignment(Value):
    client: int
    member: Member | None
    """None: the client waits for a worker."""


class ClientsAssigned(Value):
    """Workers are assigned to clients of the open round; replaces earlier assignments of these
    clients."""

    party: Party
    round_num: int
    membership: int
    assignments: tuple[Assignment, ...]


class RowsSpent(Value):
    """What the rows of one client have spent of their privacy with an update."""

    epsilon: float
    """With all rounds that it was asked for, this one included."""
    next_epsilon: float
    """With one more round."""
    fingerprint: str
    """Fingerprint of the secret that its noise comes from; empty for noise that is none."""
    accountant: str
    """Name and version of what has computed epsilon."""


class UpdateReceived(Value):
    party: Party
    round_num: int
    client: int
    digest: Digest
    num_samples: int
    loss: float
    """NaN: the client's site does not tell it."""
    seconds: float
    traffic: Mapping[str, int] = {}
    """With a codec: "sent_bytes" of this update, and "uncompressed_bytes"."""
    metrics: Mapping[str, Number] = {}
    """"train.max_grad_norm" of the client's steps; "train.skipped_steps" where they may be."""
    num_steps: int = 0
    """Steps of the client; 0 in journals of versions that took the newest update for all."""
    loss_before: float | None = None
    """Mean loss of the state that it began from, over its training rows; None: not asked for."""
    num_applied_steps: int | None = None
    """Steps that have changed the model; None: not asked for."""
    spent: RowsSpent | None = None
    """Where rows are protected."""
    client_state: Digest = Digest("")
    """Of what the client keeps to itself from this round on, at its worker; "" where it keeps
    nothing."""
    attempt: int = 0
    """Of a secure round: the attempt that it is masked for."""


class ClientStateLost(Value):
    """What a client has kept from an earlier round is not at its worker any more, so it begins
    anew; its next update says what it keeps then."""

    party: Party
    round_num: int
    client: int
    reason: str


class UpdateRejected(Value):
    party: Party
    round_num: int
    client: int
    reason: str
    cause: Cause = Cause.UNKNOWN
    error: ErrorRecord | None = None
    opens_in_s: float = 0.0
    """Of a site that is closed: seconds until it opens; 0: not known."""
    attempt: int = 0
    """As in UpdateReceived."""


class RoundWaits(Value):
    """The open round has too few updates, or the next one too few clients; clients that have failed
    are asked again."""

    party: Party
    round_num: int
    reason: str
    num_needed: int | None = None
    """Number of updates with which the round closes; None: when all have answered."""
    asked_again: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()
    """Of these, those whose site has refused: it is asked again, also by the same process."""
    until_s: float | None = None
    """Leader-clock time at which the run fails if nothing has changed; None: it waits on."""


class Accepted(Value):
    client: int
    digest: Digest
    num_samples: int
    staleness: int = 0
    """How many rounds before this one the client trained for."""
    base: Digest = Digest("")
    """The state that a stale update was trained from; empty for one of this round."""


class RoundClosed(Value):
    """A round is closed with these updates, in client order."""

    party: Party
    round_num: int
    accepted: tuple[Accepted, ...]
    reason: str
    by_policy: bool
    """True when a deadline or quorum left a client out: the result is replayable, not
    reproducible from the job alone."""
    metrics: Mapping[str, Number] = {}
    """Metrics of all accepted updates, by name; see strategies.federated.round_metrics."""


class UpdatesJudged(Value):
    """The updates of a closed round have been compared: by a robust rule (updates.robust.verdict),
    or by loss and length (updates.weighing.fair_shares)."""

    party: Party
    round_num: int
    weights: tuple[float, ...]
    """What each accepted update counts, in client order: 0 where it is left out; of a norm bound,
    and by loss, the share that is left of its change."""
    scores: tuple[float, ...]
    """What that follows from, in the same order."""
    reason: str = ""


# ---- Membership ----


class ClientsJoined(Value):
    """Clients have joined an open roster, or are back under the numbers they have had before."""

    party: Party
    clients: tuple[ClientBinding, ...]


class ClientLeft(Value):
    """A client of an open roster is neither asked nor waited for until it joins again."""

    party: Party
    client: int
    reason: str


class ClientBenched(Value):
    """A client has failed in too many rounds in a row, and is not asked for some rounds."""

    party: Party
    client: int
    until_round: int
    """The first round in which it may take part again."""
    reason: str


# ---- Differential privacy ----


class RoundAccounted(Value):
    """The clients of a round are drawn, and what it will have cost is computed; it is not open."""

    party: Party
    round_num: int
    drawn: tuple[int, ...]
    """The clients, in order; perhaps none."""
    sampling_rate: float
    """The probability with which each client was drawn, as the accountant counts on it."""
    num_expected: float
    """The number of clients that the noised sum is divided by, whoever takes part."""
    clip_norm: float
    noise_multiplier: float
    """z, of which epsilon follows."""
    sum_noise: float
    """Standard deviation of the noise on the sum of the changes."""
    answer_noise: float
    """Standard deviation of the noise on the number of clients within the norm; 0: not asked."""
    epsilon: float
    """What all rounds will have spent with this one."""
    delta: float
    accountant: str
    """Name and version of what has computed epsilon."""
    fingerprint: str
    """Fingerprint of the secret that the noise comes from."""


# ---- Secure aggregation ----
#
# RoundClosed fixes whose updates are in the sum before any share is requested.


class LeftOut(Value):
    """A client that a round goes on without, before it has trained."""

    client: int
    reason: str
    cause: Cause


class KeysPosted(Value):
    """Clients have posted public keys for an attempt of a round."""

    party: Party
    round_num: int
    attempt: int
    clients: tuple[int, ...]
    left_out: tuple[LeftOut, ...] = ()
    directory: Digest
    """Of the blob with the keys."""
    ring_seed: str
    """Random, hexadecimal: the order of the ring on which clients have neighbours."""


class SharesRouted(Value):
    """Clients have sealed shares of their secrets for their neighbours."""

    party: Party
    round_num: int
    attempt: int
    clients: tuple[int, ...]
    left_out: tuple[LeftOut, ...] = ()
    shares: Digest
    """Of the blob with the sealed shares."""


class RoundRestarted(Value):
    """An attempt cannot be unmasked, and none of its shares is opened; the round begins again with
    other keys."""

    party: Party
    round_num: int
    attempt: int
    """The new one."""
    reason: str

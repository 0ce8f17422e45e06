"""The facts of federated rounds: the roster, the selection and assignment of clients, and the
outcome of a round.
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
    """A client has evaluated a state on its rows, or is unable to; see `strategies.schedule`."""

    party: Party
    segment: int
    client: int
    sums: Metrics
    reason: str = ""
    """The reason why there are no sums."""
    has_left: bool = False
    """True if the client left the federation before it could evaluate, which is not a failure."""
    own: Mapping[str, Number] = {}
    """The user's metrics on the client's rows alone."""
    summed: tuple[str, ...] = ()
    """The user's metrics, "<split>.<metric>", whose states are sums and may be merged."""
    states: Digest = Digest("")
    """The blob with the states of those metrics; "" if there are none."""


class MetricsMerged(Value):
    """A worker has computed the user's metrics from the states of all clients, or could not; see
    `effects.party_updates`."""

    party: Party
    segment: int
    clients: tuple[int, ...]
    """The clients whose states were added, in that order."""
    worker_id: WorkerId
    """The worker that computed the values; empty: none was asked, as the states cannot be added."""
    metrics: Mapping[str, Number] = {}
    reason: str = ""
    """The reason why there are no metrics."""
    unmerged: Mapping[str, str] = {}
    """The reason why a metric is missing, keyed by metric."""


class ClientBinding(Value):
    """The worker that a client lives on (worker-local data) or prefers (any other data)."""

    client: int
    worker_id: WorkerId
    tags: tuple[str, ...]


class RosterFormed(Value):
    party: Party
    clients: tuple[ClientBinding, ...]


class Excused(Value):
    """The clients that are not asked to take part in a round, and their common reason."""

    reason: str
    clients: tuple[int, ...]


class ClientsSelected(Value):
    """A round opens with these clients, or an open round goes on with this larger set."""

    party: Party
    round_num: int
    clients: tuple[int, ...]
    deadline_s: float | None
    """The leader-clock time at which the round closes; None: it closes when all have answered."""
    num_needed: int | None = None
    """The number of updates with which the round closes; None: one from every client."""
    excused: tuple[Excused, ...] = ()
    """The clients that could not be asked, without those that have left or were not selected."""


class Assignment(Value):
    client: int
    member: Member | None
    """The worker that trains the client from now on; None: the client waits for a worker."""


class ClientsAssigned(Value):
    """Workers are assigned to clients of the open round, in place of their earlier workers."""

    party: Party
    round_num: int
    membership: int
    assignments: tuple[Assignment, ...]


class RowsSpent(Value):
    """The privacy budget that one client's rows have spent, up to and including an update."""

    epsilon: float
    """The epsilon of all rounds that the client was asked for, including this one."""
    next_epsilon: float
    """The epsilon after one more round."""
    fingerprint: str
    """Fingerprint of the secret behind the client's noise; empty for seeded noise."""
    accountant: str
    """Name and version of the accountant that has computed epsilon."""


class UpdateReceived(Value):
    party: Party
    round_num: int
    client: int
    digest: Digest
    num_samples: int
    loss: float
    """The mean loss; NaN: the client's site withholds it."""
    seconds: float
    traffic: Mapping[str, int] = {}
    """Bytes of this update, by kind: "sent_bytes" and, with a codec, "uncompressed_bytes"."""
    metrics: Mapping[str, Number] = {}
    """The "train.max_grad_norm" of the client's steps; if steps may be skipped,
    "train.skipped_steps"."""
    num_steps: int = 0
    """The number of steps of the client; 0 in journals of early versions."""
    loss_before: float | None = None
    """Mean loss of the initial state over the client's training rows; None: not asked for."""
    num_applied_steps: int | None = None
    """Steps that have changed the model; None: not asked for."""
    spent: RowsSpent | None = None
    """The privacy budget spent, if rows are protected."""
    client_state: Digest = Digest("")
    """The client's private state after this round, kept at its worker; "" if it has none."""
    attempt: int = 0
    """The attempt of the secure round for which the update is masked."""


class ClientStateLost(Value):
    """A client's worker no longer has the client's state from an earlier round, so the client
    starts over without it; its next update names its new state."""

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
    """Seconds until a closed site opens; 0: not known."""
    attempt: int = 0
    """The attempt of the secure round for which the update was due; see UpdateReceived."""


class RoundWaits(Value):
    """The open round has too few updates, or the next one too few clients; clients that have failed
    are asked again."""

    party: Party
    round_num: int
    reason: str
    num_needed: int | None = None
    """The number of updates with which the round closes; None: one from every client."""
    asked_again: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()
    """The clients in `asked_again` whose site refused; the same process may be asked again."""
    until_s: float | None = None
    """The leader-clock time at which the run fails unless something changes; None: never."""


class Accepted(Value):
    client: int
    digest: Digest
    num_samples: int
    staleness: int = 0
    """The number of rounds between the client's round and this one."""
    base: Digest = Digest("")
    """The state that a stale update was trained from; empty for an update of this round."""


class RoundClosed(Value):
    """A round is closed with these updates, in client order."""

    party: Party
    round_num: int
    accepted: tuple[Accepted, ...]
    reason: str
    by_policy: bool
    """True if a deadline or quorum left a client out: the result is replayable, not reproducible
    from the job alone."""
    metrics: Mapping[str, Number] = {}
    """Metrics of all accepted updates, by name; see `strategies.federated.evaluation`."""


class UpdatesJudged(Value):
    """The updates of a closed round have been compared, by a robust rule (`updates.robust`) or by
    loss and length (`updates.weighing`)."""

    party: Party
    round_num: int
    weights: tuple[float, ...]
    """The weight of each accepted update, in client order. 0 excludes an update; under a norm
    bound, and by loss, the weight is the factor by which its change is scaled."""
    scores: tuple[float, ...]
    """The scores from which the weights follow, in the same order."""
    reason: str = ""


# ---- Membership ----


class ClientsJoined(Value):
    """Clients have joined an open roster, or are back under their earlier numbers."""

    party: Party
    clients: tuple[ClientBinding, ...]


class ClientLeft(Value):
    """A client has left an open roster; it is neither asked nor waited for until it joins again."""

    party: Party
    client: int
    reason: str


class ClientBenched(Value):
    """A client has failed in too many rounds in a row, and is not asked for some rounds."""

    party: Party
    client: int
    until_round: int
    """The first round in which the client may take part again."""
    reason: str


# ---- Differential privacy ----


class RoundAccounted(Value):
    """A round's clients are sampled and its privacy cost is computed; it is not open yet."""

    party: Party
    round_num: int
    drawn: tuple[int, ...]
    """The sampled clients, in order; perhaps none."""
    sampling_rate: float
    """The probability with which each client was sampled, as the accountant assumes."""
    num_expected: float
    """The number by which the noised sum is divided, whatever number of clients takes part."""
    clip_norm: float
    noise_multiplier: float
    """The noise multiplier z, which decides epsilon."""
    sum_noise: float
    """Standard deviation of the noise on the sum of the changes."""
    answer_noise: float
    """Standard deviation of the noise on the count of clients within the norm; 0: no count."""
    epsilon: float
    """The budget spent by all rounds up to this one."""
    delta: float
    accountant: str
    """Name and version of the accountant that has computed epsilon."""
    fingerprint: str
    """Fingerprint of the secret that the noise comes from."""


# ---- Secure aggregation ----
#
# RoundClosed fixes whose updates are in the sum before any share is requested.


class LeftOut(Value):
    """A client without which a round goes on, left out before it trained."""

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
    """The blob with the keys."""
    ring_seed: str
    """A random hexadecimal number that decides the ring on which clients have neighbours."""


class SharesRouted(Value):
    """Clients have sealed shares of their secrets for their neighbours."""

    party: Party
    round_num: int
    attempt: int
    clients: tuple[int, ...]
    left_out: tuple[LeftOut, ...] = ()
    shares: Digest
    """The blob with the sealed shares."""


class RoundRestarted(Value):
    """A secure round begins again with new keys, because its attempt cannot be unmasked; no share
    of that attempt is opened."""

    party: Party
    round_num: int
    attempt: int
    """The new attempt."""
    reason: str

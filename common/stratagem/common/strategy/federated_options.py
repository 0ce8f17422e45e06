"""What a federated round does beyond its shared form: the `options` of the strategy.

A new option is one line of `FederatedOptions`; a section is a class in a module of its own.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias

from pydantic import BeforeValidator, Field, PlainValidator

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.schema.document import DocumentValue
from stratagem.common.schema.field_types import (
    MAX_UNSIGNED,
    NonEmptyItems,
    NonEmptyText,
    NotNegative,
    Positive,
    SharedCount,
)
from stratagem.common.schema.rules import rule
from stratagem.common.strategy.choices import Discount, ServerOptimizer
from stratagem.common.strategy.ditto import Ditto
from stratagem.common.strategy.membership_options import Roster, Strikes
from stratagem.common.strategy.regions import Regions
from stratagem.common.strategy.robust import RobustRule, fewest_updates
from stratagem.common.strategy.secure_options import SecureAggregation

if TYPE_CHECKING:
    from stratagem.common.strategy.kinds import StrategyField  # which is made with these options

DEFAULT_SERVER_LEARNING_RATE: Final = 0.01
DEFAULT_MAX_STALENESS: Final = 4
REFUSE: Final = "refuse"


def _check_quorum(value: object) -> int | float | None:
    """A whole number is a count of clients, another number a share of them."""
    if value is None or (type(value) is int and 1 <= value <= MAX_UNSIGNED):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInputError(f"{value!r} is not a number")
    if type(value) is float and 0 < value <= 1:
        return value
    raise InvalidInputError(f"{value!r} is not allowed; must be a count >= 1 or a share in (0, 1]")


def _read_late_updates(value: object) -> Discount | Literal["refuse"]:
    if isinstance(value, Discount):
        return value
    if value == REFUSE:
        return REFUSE
    if not isinstance(value, Mapping) or value.keys() != {"discount"}:
        raise InvalidInputError(
            f"must be {REFUSE!r} or {{discount: d}} with d in (0, 1]; is {value!r}"
        )
    return Discount(value["discount"])


_LateUpdates: TypeAlias = Annotated[
    Discount | Literal["refuse"], BeforeValidator(_read_late_updates)
]


class FederatedOptions(DocumentValue, is_extras=True):
    """Options of what a round does beyond its shared form.

    quorum: how many of the selected clients make a round: a share (float) or a count (int);
    None = all that do not fail, however long it takes, at least one. round_deadline_s: when to
    settle for the quorum. on_client_error: "reject" leaves a client that fails out of the round,
    "fail" ends the run with it. on_missing_quorum: "fail" ends a run whose round has too few
    updates; "wait" waits for more, and asks failed clients again once their worker is a new one.
    server_learning_rate: of FedYogi. server_optimizer: makes the next model of the mean; None: the
    mean is it. over_select: how many clients more than needed are drawn; the round closes with the
    first that suffice. late_updates: "refuse", or how an update counts whose round has closed.
    max_staleness: how many rounds late an update may be, where they are not refused. inner: how a
    client trains when it is several workers, a silo; one worker unless given. robust: what takes
    the place of the weighted mean, so that a minority of false updates leads the model nowhere.
    roster: who takes part; num_clients from the start unless given. strikes: when a client that
    keeps failing is left alone for some rounds; never unless given. q: how much more a
    client counts the higher its loss, q-FedAvg; by rows unless given. normalize:
    "fednova" divides the change of a client by how far its steps can go; undivided unless given.
    control: "scaffold" corrects each step of a client by how its gradient differs from that of all;
    uncorrected unless given.
    personal: patterns of the names of tensors that each client trains for itself, and that are
    never sent. ditto: each client also trains a whole model of its own, near the global one.
    regions: clients, or sites, that are added up together before all are, by region; all at once
    unless given.
    secure_aggregation: the coordinator learns the sum of the updates and none of them; it sees them
    all unless given.
    """

    local_epochs: SharedCount = 1
    quorum: Annotated[float | int | None, PlainValidator(_check_quorum)] = None
    round_deadline_s: Positive | None = None
    server_learning_rate: Positive = DEFAULT_SERVER_LEARNING_RATE
    server_optimizer: Annotated[ServerOptimizer, Field(discriminator="name")] | None = None
    over_select: Annotated[int, Field(ge=0, le=MAX_UNSIGNED)] = 0
    late_updates: _LateUpdates = REFUSE
    max_staleness: SharedCount = DEFAULT_MAX_STALENESS
    inner: "StrategyField | None" = None
    on_client_error: Literal["reject", "fail"] = "reject"
    on_missing_quorum: Literal["fail", "wait"] = "fail"
    robust: Annotated[RobustRule, Field(discriminator="name")] | None = None
    roster: Roster | None = None
    strikes: Strikes | None = None
    q: NotNegative | None = None
    normalize: Literal["fednova"] | None = None
    control: Literal["scaffold"] | None = None
    personal: NonEmptyItems[NonEmptyText] | None = None
    ditto: Ditto | None = None
    regions: Regions = None
    secure_aggregation: SecureAggregation | None = None

    @rule
    def _deadline(self) -> Iterator[Violation]:
        if self.round_deadline_s is not None and self.quorum is None:
            text = "missing; round_deadline_s says when to settle for it, for example quorum: 0.5"
            yield Violation("quorum", text)

    @rule
    def _late_updates(self) -> Iterator[Violation]:
        if self.late_updates == REFUSE:
            if self.max_staleness != DEFAULT_MAX_STALENESS:
                text = 'late_updates is "refuse", so no update is stale; give it a discount'
                yield Violation("max_staleness", text)
        elif self.robust is not None:
            text = "robust compares updates that began from one state, and late ones did not"
            yield Violation("late_updates", text)
        elif self.round_deadline_s is None and not self.over_select:
            text = "no client is ever late without round_deadline_s or over_select; set one"
            yield Violation("late_updates", text)

    @rule
    def _strikes(self) -> Iterator[Violation]:
        if self.strikes is not None and self.on_client_error == "fail":
            text = 'no client fails twice: on_client_error is "fail"; use "reject"'
            yield Violation("strikes", text)

    @rule
    def _client_state(self) -> Iterator[Violation]:
        for name in ("personal", "ditto", "control"):
            if getattr(self, name) is not None and self.inner is not None:
                text = "a silo trains on several workers, and what a client keeps lies on one"
                yield Violation(name, f"{text}; leave inner out")
        if self.personal is not None and self.ditto is not None:
            text = "keeps a whole model at each client already; leave personal or it out"
            yield Violation("ditto", text)

    @rule
    def _open_roster(self) -> Iterator[Violation]:
        roster = self.open_roster
        if roster is None:
            return
        if self.inner is not None:
            text = "a silo is several workers, and who joins an open roster is one; leave one out"
            yield Violation("roster.open", text)
        if type(self.quorum) is int and self.quorum > roster.min_clients:
            text = f"{self.quorum} is more than roster.min_clients, {roster.min_clients}"
            yield Violation("quorum", f"{text}: a round could not close")
        fewest = fewest_updates(self.robust)
        if fewest > roster.min_clients:
            text = f"{roster.min_clients} is less than the {fewest} updates that robust needs"
            yield Violation("roster.min_clients", text)

    @property
    def has_client_state(self) -> bool:
        """Whether clients keep something of their own from one round to the next."""
        return self.has_own_models or self.control is not None

    @property
    def has_own_models(self) -> bool:
        """Whether what a client keeps is part of the model that it evaluates, or the whole."""
        return self.personal is not None or self.ditto is not None

    @property
    def open_roster(self) -> Roster | None:
        """The roster, where clients join and leave while the run goes on."""
        return self.roster if self.roster is not None and self.roster.open else None

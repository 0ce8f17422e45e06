"""This module defines the `options` of the Federated strategy: the behaviour of a round beyond its
shared form.

A new option is one line of `FederatedOptions`, and a section is a class.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, TypeAlias, assert_never

from pydantic import BeforeValidator, Field, PlainValidator

from stratagem.common.base import ids
from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.schema.document import (
    MAX_UNSIGNED,
    DocumentValue,
    NonEmptyItems,
    NonEmptyText,
    NotNegative,
    Positive,
    SharedCount,
)
from stratagem.common.schema.json import JSON
from stratagem.common.schema.rules import rule
from stratagem.common.strategy.choices import (
    Discount,
    FedAvg,
    FederatedAggregation,
    FedProx,
    ServerOptimizer,
)
from stratagem.common.strategy.regions import Regions
from stratagem.common.strategy.secure import SecureAggregation

if TYPE_CHECKING:
    from stratagem.common.strategy.strategies import StrategyField

# ---- Membership ----
#
# An open roster determines who takes part in a federation, and strikes determine what becomes of
# clients that keep failing.

DEFAULT_WAIT_S: Final = 86_400.0
"""A day: a site that is closed over night is back by then."""


class Roster(DocumentValue, is_extras=True):
    """Who is a client, and how long the federation waits for clients.

    open: clients join, leave and come back while the run goes on, num_clients at most; otherwise
    there are exactly num_clients from the start. min_clients: how many must be able to take part
    for a round to open. wait_s: for how many seconds a round waits for so many, after which the run
    fails, and for a client that is lost in it, after which the round goes on without it.
    """

    open: bool = False
    min_clients: SharedCount = 1
    wait_s: Positive = DEFAULT_WAIT_S

    @rule
    def _of_an_open_one(self) -> Iterator[Violation]:
        if self.open:
            return
        text = "belongs to an open roster (open: true); any other has exactly num_clients"
        if self.min_clients != 1:
            yield Violation("min_clients", text)
        if self.wait_s != DEFAULT_WAIT_S:
            yield Violation("wait_s", text)


class Strikes(DocumentValue, is_extras=True):
    """When a client that keeps failing is left alone for some rounds.

    limit: rounds in a row in which it is rejected by its own fault. bench_rounds: rounds that it
    then does not take part in.
    """

    limit: SharedCount
    bench_rounds: SharedCount = 5


# ---- Ditto ----
#
# The section `options.ditto` trains a model of each client's own beside the global one.

KEY: Final = "lambda"
"""As documents have it; Python has the word already."""


class Ditto(DocumentValue, is_extras=True):
    """Each client also trains a model of its own, whose distance to the global one costs
    (lambda / 2)·‖v − w‖² (Li et al., 2021, https://arxiv.org/abs/2012.04221)."""

    lambda_: Positive

    @classmethod
    def _read(cls, value: object, read: Callable[[object], Self]) -> Self:
        if isinstance(value, Mapping):
            if value.keys() != {KEY}:
                text = f"must be {{{KEY}: a number > 0}}; is {dict(value)!r}"
                raise InvalidInputError(text)
            value = {f"{KEY}_": value[KEY]}
        try:
            return super()._read(value, read)
        except InvalidInputError as error:
            told = [replace(each, field=each.field.removesuffix("_")) for each in error.violations]
            raise InvalidInputError(violations=told) from None

    @classmethod
    def _write(cls, made: Any, write: Callable[[Any], dict[str, JSON]]) -> dict[str, JSON]:
        return {
            name.removesuffix("_"): plain for name, plain in super()._write(made, write).items()
        }


# ---- Weights ----
#
# The options `q`, `normalize` and `control` make updates of a round count otherwise than by rows.
# The checks here concern the strategy alone; those of the clients' optimizer are in
# job/training_rules.py.


def check_weighing(
    options: "FederatedOptions", aggregation: FederatedAggregation
) -> Iterator[Violation]:
    """Yield what the strategy says besides that does not go together with how updates weigh."""
    if options.q is not None:
        yield from _against_q(options, aggregation)
    if options.normalize is not None:
        yield from _against_normalize(options)
    if options.control is not None:
        yield from _against_control(options, aggregation)


def _against_q(
    options: "FederatedOptions", aggregation: FederatedAggregation
) -> Iterator[Violation]:
    if not isinstance(aggregation, FedAvg):
        text = f"is of FedAvg only; the aggregation is {type(aggregation).__name__}"
        yield Violation("options.q", text)
    if options.server_optimizer is not None:
        text = "is not possible with q, which says itself how far a round goes; leave one out"
        yield Violation("options.server_optimizer", text)
    if options.robust is not None:
        text = (
            "is not possible with q, by which a client has the more say the worse it claims to be"
        )
        yield Violation("options.robust", text)
    if options.late_updates != "refuse":
        text = "is not possible with q: the loss of a late client is that of another state"
        yield Violation("options.late_updates", text)
    if options.inner is not None:
        text = "is not possible with q: a silo does not measure its loss before it trains"
        yield Violation("options.inner", text)


def _against_normalize(options: "FederatedOptions") -> Iterator[Violation]:
    if options.q is not None:
        text = "is not possible with q, which takes a change for a gradient as it is; leave one out"
        yield Violation("options.normalize", text)
    if options.robust is not None:
        text = "is not possible with normalize, by which who claims few steps counts more"
        yield Violation("options.robust", text)
    if options.late_updates != "refuse":
        text = "is not possible with normalize: how far clients go is a mean over those of a round"
        yield Violation("options.late_updates", text)
    if options.inner is not None:
        text = "is not possible with normalize: how far a silo goes its own strategy decides"
        yield Violation("options.inner", text)


def _against_control(
    options: "FederatedOptions", aggregation: FederatedAggregation
) -> Iterator[Violation]:
    together = "is not possible with control: scaffold"
    if isinstance(aggregation, FedProx) and aggregation.mu:
        text = f"{together}, which takes the term of FedProx for a gradient of the rows; use FedAvg"
        yield Violation("aggregation.mu", text)
    for name, why in {
        "q": "in which each client counts as one",
        "normalize": "in which each change counts as it is",
        "robust": "whose common state is a sum over clients, which one false one leads anywhere",
        "personal": "which is not defined for tensors that are not shared",
        "ditto": "which is not defined beside a second model",
    }.items():
        if getattr(options, name) is not None:
            yield Violation(f"options.{name}", f"{together}, {why}; leave one out")
    if options.late_updates != "refuse":
        text = f"{together}: a late update was corrected by the common state of another round"
        yield Violation("options.late_updates", text)
    if options.open_roster is not None:
        text = f"{together}, which divides by the number of all clients; give a fixed roster"
        yield Violation("options.roster.open", text)


# ---- Robust rules ----
#
# The section `options.robust` selects a rule that a minority of false updates cannot control.
# Every update counts as one, whatever number of rows its client claims. This section also says
# how many updates each rule needs.

MAX_ROBUST_UPDATES: Final = 1024
"""Every update is compared with every other one, or all are sorted element by element."""

_FEWEST_FOR_A_MIDDLE: Final = 3
_ByzantineCount: TypeAlias = Annotated[int, Field(ge=0, le=MAX_ROBUST_UPDATES)]


class Median(DocumentValue, tag="name", name="median", is_extras=True):
    """The median of each element (https://arxiv.org/abs/1803.01498)."""


class TrimmedMean(DocumentValue, tag="name", name="trimmed_mean", is_extras=True):
    """The mean of each element without this share of values at each end
    (https://arxiv.org/abs/1803.01498)."""

    trim: Annotated[float, Field(gt=0, lt=0.5)]

    def num_trimmed(self, num_updates: int) -> int:
        """Return how many values are left out at each end: the share of the updates, rounded
        down."""
        return int(Decimal(repr(self.trim)) * num_updates)


class Krum(DocumentValue, tag="name", name="krum", is_extras=True):
    """The one update that is nearest to its neighbours (Blanchard et al., 2017,
    https://arxiv.org/abs/1703.02757). byzantine: how many updates may be false."""

    byzantine: _ByzantineCount


class MultiKrum(DocumentValue, tag="name", name="multi_krum", is_extras=True):
    """The mean of the `keep` updates that are nearest to their neighbours; None: of all but as many
    as may be false."""

    byzantine: _ByzantineCount
    keep: Annotated[int, Field(ge=1, le=MAX_ROBUST_UPDATES)] | None = None


class Bulyan(DocumentValue, tag="name", name="bulyan", is_extras=True):
    """Updates chosen by Krum, and of each element the mean of the values around their median
    (https://arxiv.org/abs/1802.07927)."""

    byzantine: _ByzantineCount


class GeometricMedian(DocumentValue, tag="name", name="geometric_median", is_extras=True):
    """The point with the least sum of distances to the updates, by a fixed number of Weiszfeld
    iterations from their mean (https://arxiv.org/abs/1912.13445)."""

    iterations: Annotated[int, Field(ge=1, le=1000)] = 8


class NormBound(DocumentValue, tag="name", name="norm_bound", is_extras=True):
    """The mean of updates of which none is further than `norm` from the global model: longer ones
    are shortened to it (https://arxiv.org/abs/1911.07963)."""

    norm: Positive


RobustRule: TypeAlias = (
    Median | TrimmedMean | Krum | MultiKrum | Bulyan | GeometricMedian | NormBound
)


def too_few(rule: RobustRule | None, num_clients: int, quorum: float | None) -> Iterator[Violation]:
    """Yield what is wrong with a rule for rounds of so many clients, closed with the quorum."""
    fewest = fewest_updates(rule)
    if rule is None or fewest == 1:
        return
    needs = f"needs the updates of at least {fewest}"
    if num_clients < fewest:
        yield Violation("options.robust", f"{needs} clients, and a round has {num_clients}")
    elif num_clients > MAX_ROBUST_UPDATES and ids.are_checked():
        text = f"combines at most {MAX_ROBUST_UPDATES} updates, and a round has {num_clients}"
        yield Violation("options.robust", text)
    elif type(quorum) is int and quorum < fewest:
        yield Violation("options.quorum", f"{quorum} is too few: options.robust {needs} clients")


def is_judged(rule: RobustRule | None) -> bool:
    """Return True for a rule that compares whole updates before it combines them."""
    return isinstance(rule, Krum | MultiKrum | Bulyan | GeometricMedian | NormBound)


def fewest_updates(rule: RobustRule | None) -> int:
    """Return the number of updates without which the rule keeps none of its promises."""
    match rule:
        case None | NormBound():
            return 1
        case Median() | GeometricMedian():
            return _FEWEST_FOR_A_MIDDLE
        case TrimmedMean():
            fewest = _FEWEST_FOR_A_MIDDLE
            while not rule.num_trimmed(fewest):
                fewest += 1
            return fewest
        case Krum():
            return 2 * rule.byzantine + 3
        case MultiKrum():
            return max(2 * rule.byzantine + 3, (rule.keep or 0) + rule.byzantine)
        case Bulyan():
            return 4 * rule.byzantine + 3
        case _:
            assert_never(rule)


# ---- Options ----

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

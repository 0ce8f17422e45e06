"""The training strategies themselves, made of the choices in `choices`.

Every class is frozen and checks its own ranges when it is made, so a strategy that exists is
valid. Owns no JSON and does not know how any strategy is carried out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeAlias, assert_never

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.schema.field_rules import (
    AT_LEAST_1,
    FRACTION,
    NOT_EMPTY,
    NOT_NEGATIVE,
    POSITIVE,
    FieldRule,
    check_fields,
    count_up_to,
    must,
)
from stratagem.common.schema.frozen import frozen
from stratagem.common.schema.json_text import JSON, check_json
from stratagem.common.strategy.choices import (
    AllReduce,
    ClientSelection,
    CommunicationProtocol,
    Decentralized,
    Discount,
    ExploitStrategy,
    ExploreStrategy,
    FederatedAggregation,
    FedYogi,
    GradientAggregation,
    Partition,
    Pipeline,
    Random,
    ServerOptimizer,
)
from stratagem.common.strategy.schedule_names import AUTO, SCHEDULE_NAMES

_IS_QUORUM: Final = FieldRule(
    lambda value: value is None or (AT_LEAST_1 if type(value) is int else FRACTION).holds(value),
    "must be a count >= 1 or a share in (0, 1]",
)
_COUNT_IF_SET: Final = FieldRule(lambda v: v is None or AT_LEAST_1.holds(v), AT_LEAST_1.text)
_IS_SCHEDULE: Final = FieldRule(
    lambda value: value in SCHEDULE_NAMES, f"must be one of {', '.join(SCHEDULE_NAMES)}"
)
CLIENT_ERROR_POLICIES: Final = ("reject", "fail")
QUORUM_POLICIES: Final = ("fail", "wait")
_IS_CLIENT_ERROR_POLICY: Final = FieldRule(
    lambda value: value in CLIENT_ERROR_POLICIES, "must be reject or fail"
)
_IS_QUORUM_POLICY: Final = FieldRule(lambda value: value in QUORUM_POLICIES, "must be fail or wait")
_POSITIVE_IF_SET: Final = FieldRule(lambda v: v is None or POSITIVE.holds(v), POSITIVE.text)

MAX_REPLICAS: Final = 16_384
MAX_CLIENTS: Final = 1_000_000
MAX_POPULATION: Final = 10_000

DEFAULT_SERVER_LEARNING_RATE: Final = 0.01
DEFAULT_MAX_STALENESS: Final = 4
DIRECT_ALL_REDUCE: Final = "direct"
_IS_ALL_REDUCE: Final = FieldRule(
    lambda value: value in (DIRECT_ALL_REDUCE, "ring", "native"), "must be direct, ring or native"
)


@dataclass(frozen=True, slots=True)
class Local:
    """One worker trains on all data."""


@dataclass(frozen=True, slots=True)
class DataParallelOptions:
    """Options of how the replicas work together beyond the shared form.

    min_replicas: continue with as few workers as this while the others are away. all_reduce: of
    AllReduce; "direct" adds in a fixed order, "ring" and "native" (the backend's own) in one that
    depends on the workers. inner: what each replica is; ModelParallel makes it a pipeline over
    several workers. consensus_every: of Decentralized; after how many steps the nodes' distance to
    their mean is measured; None: only at the end of a segment.
    """

    min_replicas: int = field(default=1, metadata=must(AT_LEAST_1))
    all_reduce: str = field(default=DIRECT_ALL_REDUCE, metadata=must(_IS_ALL_REDUCE))
    inner: Strategy | None = None
    consensus_every: int | None = field(default=None, metadata=must(_COUNT_IF_SET))

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class DataParallel:
    """The model is replicated, each batch is split, gradients are combined every step."""

    num_replicas: int = field(metadata=must(count_up_to(MAX_REPLICAS)))
    aggregation: GradientAggregation
    options: DataParallelOptions = DataParallelOptions()

    def __post_init__(self) -> None:
        check_fields(self)
        if self.options.min_replicas > self.num_replicas:
            raise InvalidInputError.at(
                "options.min_replicas",
                f"{self.options.min_replicas} is more than num_replicas, {self.num_replicas}",
            )
        has_all_reduce = isinstance(self.aggregation, AllReduce)
        if not has_all_reduce and self.options.all_reduce != DIRECT_ALL_REDUCE:
            kind = type(self.aggregation).__name__
            raise InvalidInputError.at("options.all_reduce", f"{kind} has none; AllReduce has")
        is_gossip = isinstance(self.aggregation, Decentralized)
        if not is_gossip and self.options.consensus_every is not None:
            kind = type(self.aggregation).__name__
            text = f"{kind} keeps all replicas equal; Decentralized does not"
            raise InvalidInputError.at("options.consensus_every", text)


@dataclass(frozen=True, slots=True)
class ModelParallelOptions:
    """schedule: in which order the stages work on micro-batches; of Pipeline only."""

    schedule: str = field(default=AUTO, metadata=must(_IS_SCHEDULE))

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class ModelParallel:
    """The nodes of the model are spread over workers."""

    partitions: tuple[Partition, ...] = field(metadata=must(NOT_EMPTY))
    communication: CommunicationProtocol
    options: ModelParallelOptions = ModelParallelOptions()

    def __post_init__(self) -> None:
        check_fields(self)
        is_default = self.options == ModelParallelOptions()
        if not isinstance(self.communication, Pipeline) and not is_default:
            text = f"belongs to Pipeline only, not to {type(self.communication).__name__}"
            raise InvalidInputError.at("options.schedule", text)


@dataclass(frozen=True, slots=True)
class FederatedOptions:
    """Options of what a round does beyond its shared form.

    quorum: how many of the selected clients make a round: a share (float) or a count (int);
    None = all that do not fail, however long it takes, at least one. round_deadline_s: when to
    settle for the quorum. on_client_error: "reject" leaves a client that fails out of the round,
    "fail" ends the run with it. on_missing_quorum: "fail" ends a run whose round has too few
    updates; "wait" waits for more, and asks failed clients again once their worker is a new one.
    server_learning_rate: of FedYogi. server_optimizer: makes the next model of the mean; None: the
    mean is it. over_select: how many clients more than needed are drawn; the round closes with the
    first that suffice. late_updates: None refuses an update whose round has closed. max_staleness:
    how many rounds late an update may be, where they are not refused. inner: how a client trains
    when it is several workers, a silo; one worker unless given.
    """

    local_epochs: int = field(default=1, metadata=must(AT_LEAST_1))
    quorum: float | int | None = field(default=None, metadata=must(_IS_QUORUM))
    round_deadline_s: float | None = field(default=None, metadata=must(_POSITIVE_IF_SET))
    server_learning_rate: float = field(
        default=DEFAULT_SERVER_LEARNING_RATE, metadata=must(POSITIVE)
    )
    server_optimizer: ServerOptimizer | None = None
    over_select: int = field(default=0, metadata=must(NOT_NEGATIVE))
    late_updates: Discount | None = None
    max_staleness: int = field(default=DEFAULT_MAX_STALENESS, metadata=must(AT_LEAST_1))
    inner: Strategy | None = None
    on_client_error: str = field(default="reject", metadata=must(_IS_CLIENT_ERROR_POLICY))
    on_missing_quorum: str = field(default="fail", metadata=must(_IS_QUORUM_POLICY))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.round_deadline_s is not None and self.quorum is None:
            raise InvalidInputError.at(
                "quorum", "missing; round_deadline_s says when to settle for it"
            )
        if self.late_updates is None and self.max_staleness != DEFAULT_MAX_STALENESS:
            text = 'late_updates is "refuse", so no update is stale; give it a discount'
            raise InvalidInputError.at("max_staleness", text)
        if self.late_updates and self.round_deadline_s is None and not self.over_select:
            text = "no client is ever late without round_deadline_s or over_select; set one"
            raise InvalidInputError.at("late_updates", text)


@dataclass(frozen=True, slots=True)
class Federated:
    """Clients train on data of their own; only models travel, and are combined every round."""

    num_clients: int = field(metadata=must(count_up_to(MAX_CLIENTS)))
    rounds: int = field(metadata=must(AT_LEAST_1))
    aggregation: FederatedAggregation
    client_selection: ClientSelection
    options: FederatedOptions = FederatedOptions()

    def __post_init__(self) -> None:
        check_fields(self)
        options, violations = self.options, []
        if type(options.quorum) is int and options.quorum > self.num_clients:
            text = f"{options.quorum} is more than num_clients, {self.num_clients}"
            violations.append(Violation("options.quorum", text))
        has_server_optimizer = isinstance(self.aggregation, FedYogi)
        if not has_server_optimizer and (
            options.server_learning_rate != DEFAULT_SERVER_LEARNING_RATE
        ):
            text = f"{type(self.aggregation).__name__} has no server optimizer; FedYogi has"
            violations.append(Violation("options.server_learning_rate", text))
        if has_server_optimizer and options.server_optimizer is not None:
            text = "FedYogi is a server optimizer already; use FedAvg or FedProx"
            violations.append(Violation("options.server_optimizer", text))
        if options.over_select and not isinstance(self.client_selection, Random):
            name = type(self.client_selection).__name__
            text = f"{name} leaves no clients to draw more from; Random does"
            violations.append(Violation("options.over_select", text))
        if options.late_updates and not isinstance(self.client_selection, Random):
            name = type(self.client_selection).__name__
            text = f"{name} selects the same clients in every round, so no late one is left over"
            violations.append(Violation("options.late_updates", f"{text}; Random does not"))
        if violations:
            raise InvalidInputError(violations=violations)


@dataclass(frozen=True, slots=True)
class PopulationOptions:
    """Options of how the population trains beyond its shared form.

    inner: how each member trains; Local unless given. asynchronous: a member evolves as soon as it
    has trained, against the newest scores of the others, without waiting for them.
    """

    inner: Strategy | None = None
    asynchronous: bool = False


@dataclass(frozen=True, slots=True)
class PopulationBased:
    """A population trains side by side; the worse copy the better and explore from there."""

    population_size: int = field(metadata=must(count_up_to(MAX_POPULATION)))
    generations: int = field(metadata=must(AT_LEAST_1))
    exploit: ExploitStrategy
    explore: ExploreStrategy
    options: PopulationOptions = PopulationOptions()

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Custom:
    """A strategy registered by name; its config is handed over untouched."""

    coordinator: str = field(metadata=must(NOT_EMPTY))
    config: JSON

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "config", frozen(check_json(self.config, "config")))


Strategy: TypeAlias = Local | DataParallel | ModelParallel | Federated | PopulationBased | Custom


def describe(strategy: Strategy) -> str:
    """The short name that people see, such as "DataParallel/AllReduce"."""
    match strategy:
        case Local():
            return "Local"
        case DataParallel() | Federated():
            choice = type(strategy.aggregation).__name__
        case ModelParallel():
            choice = type(strategy.communication).__name__
        case PopulationBased():
            choice = type(strategy.exploit).__name__
        case Custom():
            choice = strategy.coordinator
        case _:
            assert_never(strategy)
    return f"{type(strategy).__name__}/{choice}"


def is_distributed(strategy: Strategy) -> bool:
    """Return whether more than one worker may take part."""
    return not isinstance(strategy, Local)


def all_reduce_of(strategy: Strategy) -> str:
    """Return how gradients are added, in the strategy or the ones inside it."""
    options = getattr(strategy, "options", None)
    own: str = getattr(options, "all_reduce", DIRECT_ALL_REDUCE)
    inner: Strategy | None = getattr(options, "inner", None)
    return all_reduce_of(inner) if own == DIRECT_ALL_REDUCE and inner is not None else own

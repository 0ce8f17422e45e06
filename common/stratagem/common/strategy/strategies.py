"""This module defines the training strategies, made of the choices in choices.py, and their JSON
form.

Every class is frozen and checks its own ranges when it is made, so every existing strategy is
valid. The declared fields are the JSON form shared with the Rust programs; fields that exist only
in this project are under `options`.
"""

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Any, Final, Literal, TypeAlias, assert_never

from pydantic import Field
from pydantic.dataclasses import rebuild_dataclass

from stratagem.common.base.errors import Violation
from stratagem.common.schema.document import (
    MAX_UNSIGNED,
    DocumentValue,
    FrozenJSON,
    NonEmptyItems,
    NonEmptyText,
    NoOptions,
    NotNegative,
    Positive,
    Section,
    SharedCount,
    UpTo,
    ZeroToBelowOne,
)
from stratagem.common.schema.json import JSON, dump_json, load_json
from stratagem.common.schema.rules import rule
from stratagem.common.schema.table import found_in
from stratagem.common.strategy.choices import (
    AUTO,
    ClientSelection,
    CommunicationProtocol,
    DataStore,
    Decentralized,
    ExploitStrategy,
    ExploreStrategy,
    FederatedAggregation,
    GradientAggregation,
    ParameterServer,
    Partition,
    Random,
    ScheduleName,
    ServerOptimizer,
    num_drawn,
)
from stratagem.common.strategy.federated import (
    DEFAULT_MAX_STALENESS,
    DEFAULT_SERVER_LEARNING_RATE,
    REFUSE,
    Ditto,
    LateUpdates,
    Quorum,
    RobustRule,
    Roster,
    Strikes,
)
from stratagem.common.strategy.local_steps import (
    DEFAULT_MIX,
    DEFAULT_OUTER,
    DEFAULT_UPLOAD_EVERY,
    OuterField,
    OuterOptimizer,
)
from stratagem.common.strategy.regions import Regions, are_named, members_of
from stratagem.common.strategy.rules import (
    DATA_PARALLEL,
    FEDERATED,
    FEDERATED_OPTIONS,
    MODEL_PARALLEL,
)
from stratagem.common.strategy.secure import SecureAggregation

# ---- Strategies ----

MAX_REPLICAS: Final = 16_384
MAX_CLIENTS: Final = 1_000_000
MAX_POPULATION: Final = 10_000

DIRECT_ALL_REDUCE: Final = "direct"
WHOLE_STATE: Final = "none"
FULL_SLICES: Final = "full"
FEWEST_MIRRORED: Final = 3
"""The smallest number of workers for which two slices are less than the whole state."""


class Local(DocumentValue, tag="type"):
    """One worker trains on all data."""

    options: NoOptions = field(default=NoOptions(), repr=False)


class DataParallelOptions(DocumentValue, is_extras=True):
    """Options of how the replicas work together, in addition to the form shared with the Rust
    programs.

    min_replicas: the smallest number of workers with which the run continues while others are away.
    all_reduce: the method of AllReduce; "direct" adds in a fixed order, "ring" and "native" (the
    backend's own) in an order that depends on the workers. inner: the strategy of each replica;
    with ModelParallel a replica is a pipeline over several workers. consensus_every: under
    Decentralized, the interval in steps at which the nodes' distance from their mean is measured;
    by default only at the end of a segment.

    local_steps: the number of steps that each replica takes alone before the replicas are joined;
    by default gradients are combined in every step. outer: the optimizer that joins them.
    outer_bits: the bits per number when a replica's change is exchanged; by default it is sent
    unchanged. fragments: the number of parts of the parameters, which are joined one after the
    other. overlap_steps: the number of steps between cutting and applying a fragment. mix: the
    share of its own parameters that a replica then keeps; by default half with an overlap,
    otherwise nothing. upload_every: with local_steps, the number of commits between uploads of the
    state that only one worker has, by default 10.

    partition_state: the state of which each worker keeps only a slice: "optimizer", the optimizer's
    state; "full", the parameters too. mirror: the number of other workers whose slices each worker
    also keeps; by default one, if at least three workers take part.
    """

    min_replicas: SharedCount = 1
    all_reduce: Literal["direct", "ring", "native"] = DIRECT_ALL_REDUCE
    inner: "StrategyField | None" = None
    consensus_every: SharedCount | None = None
    local_steps: SharedCount | None = None
    outer: OuterField | None = None
    outer_bits: Literal[8, 4] | None = None
    fragments: SharedCount = 1
    overlap_steps: Annotated[int, Field(ge=0, le=MAX_UNSIGNED)] = 0
    mix: ZeroToBelowOne | None = None
    upload_every: SharedCount | None = None
    partition_state: Literal["none", "optimizer", "full"] = WHOLE_STATE
    mirror: Literal[0, 1] | None = None

    @property
    def mixed_share(self) -> float:
        """Return the share of its own parameters that a replica keeps at a join."""
        if self.mix is not None:
            return self.mix
        return DEFAULT_MIX if self.overlap_steps else 0.0

    @property
    def are_replicas_alike(self) -> bool:
        """Return whether all replicas hold equal states wherever a segment may end."""
        return self.fragments == 1 and not self.overlap_steps and not self.mixed_share

    @property
    def outer_optimizer(self) -> OuterOptimizer:
        """Return the optimizer that joins replicas, the default if the job names none."""
        return DEFAULT_OUTER if self.outer is None else self.outer


class DataParallel(DocumentValue, tag="type"):
    """The model is replicated, each batch is split, gradients are combined every step."""

    num_replicas: Annotated[SharedCount, UpTo(MAX_REPLICAS), Field(examples=[2])]
    aggregation: Annotated[GradientAggregation, Field(discriminator="method")]
    options: DataParallelOptions = field(default_factory=DataParallelOptions)

    @rule
    def _together(self) -> Iterator[Violation]:
        return found_in(DATA_PARALLEL, self)

    @rule
    def _inner(self) -> Iterator[Violation]:
        options, inner = self.options, self.options.inner
        if partitions_state(self) and not isinstance(inner, Local | DataParallel | None):
            text = f"{describe(inner)} keeps a part of the state on each worker already"
            yield Violation("options.partition_state", text)
        if options.local_steps is not None and not isinstance(inner, Local | None):
            text = f"{describe(inner)} cannot take local steps; a single worker, Local, can"
            yield Violation("options.inner", text)


class ModelParallelOptions(DocumentValue, is_extras=True):
    """Options of ModelParallel. schedule: the order in which the stages work on micro-batches; only
    with the transport Pipeline."""

    schedule: ScheduleName = AUTO


class ModelParallel(DocumentValue, tag="type"):
    """The nodes of the model are spread over workers."""

    partitions: NonEmptyItems[Partition]
    communication: Annotated[
        CommunicationProtocol,
        Field(discriminator="protocol", examples=[{"protocol": "Pipeline", "micro_batch_size": 8}]),
    ]
    options: ModelParallelOptions = ModelParallelOptions()

    @rule
    def _together(self) -> Iterator[Violation]:
        return found_in(MODEL_PARALLEL, self)


class FederatedOptions(DocumentValue, is_extras=True):
    """Options of a round, in addition to the form shared with the Rust programs.

    quorum: the number (int) or fraction (float) of selected clients whose updates are enough for a
    round; by default all clients that do not fail, at least one, however long that takes.
    round_deadline_s: the time after which the quorum is enough. on_client_error: "reject" excludes
    a failed client from the round, "fail" ends the run. on_missing_quorum: "fail" ends a run whose
    round has too few updates; "wait" waits for more, and asks failed clients again once they have a
    new worker. over_select: the number of clients drawn in addition to those needed; the round
    closes with the first updates that suffice.

    server_learning_rate: that of FedYogi. server_optimizer: computes the next model from the mean;
    by default the mean is the next model. late_updates: "refuse", or the weight of an update whose
    round has closed. max_staleness: the largest number of rounds by which such an update may be
    late. inner: the strategy of a client that is several workers (a silo); by default a client is
    one worker. robust: a rule in place of the weighted mean that tolerates a minority of false
    updates.

    roster: whether clients may join and leave; by default num_clients from the start. strikes: the
    exclusion of clients that fail repeatedly; by default none. q: the exponent with which a higher
    loss raises a client's weight (q-FedAvg); by default clients are weighted by rows. normalize:
    "fednova" divides a client's change by the effective length of its steps. control: "scaffold"
    corrects each step of a client by the difference between its gradient and that of all clients.

    personal: patterns of the names of tensors that each client trains for itself and never sends.
    ditto: each client also trains a whole personal model near the global one. regions: groups of
    clients or sites whose updates are summed first. secure_aggregation: the coordinator learns only
    the sum of the updates.
    """

    local_epochs: SharedCount = 1
    quorum: Quorum = None
    round_deadline_s: Positive | None = None
    server_learning_rate: Positive = DEFAULT_SERVER_LEARNING_RATE
    server_optimizer: Annotated[ServerOptimizer, Field(discriminator="name")] | None = None
    over_select: Annotated[int, Field(ge=0, le=MAX_UNSIGNED)] = 0
    late_updates: LateUpdates = REFUSE
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
    def _together(self) -> Iterator[Violation]:
        return found_in(FEDERATED_OPTIONS, self)

    @property
    def has_client_state(self) -> bool:
        """Return whether clients keep their own state from one round to the next."""
        return self.has_own_models or self.control is not None

    @property
    def has_own_models(self) -> bool:
        """Return whether clients keep personal models, or parts of models, with which they are
        evaluated."""
        return self.personal is not None or self.ditto is not None

    @property
    def open_roster(self) -> Roster | None:
        """Return the roster's options if clients may join and leave in the run, else None."""
        return self.roster if self.roster is not None and self.roster.open else None


class Federated(DocumentValue, tag="type"):
    """Clients train on data of their own; only models travel, and are combined every round."""

    num_clients: Annotated[SharedCount, UpTo(MAX_CLIENTS), Field(examples=[4])]
    rounds: Annotated[SharedCount, Field(examples=[5])]
    aggregation: Annotated[FederatedAggregation, Field(discriminator="method")]
    client_selection: Annotated[ClientSelection, Field(discriminator="method")]
    options: FederatedOptions = field(default_factory=FederatedOptions)

    @rule
    def _together(self) -> Iterator[Violation]:
        return found_in(FEDERATED, self)

    @property
    def num_selected(self) -> int:
        """Return the number of clients selected per round; an upper bound if their tags decide."""
        if isinstance(self.client_selection, Random):
            return num_drawn(self.client_selection.fraction, self.num_clients)
        return self.num_clients


class PopulationOptions(DocumentValue, is_extras=True):
    """Options of how the population trains, in addition to the form shared with the Rust programs.

    inner: the strategy of each member; by default Local. asynchronous: a member evolves as soon as
    it has trained, by comparison with the newest scores of the others, without waiting for them.
    """

    inner: "StrategyField | None" = None
    asynchronous: bool = False


class PopulationBased(DocumentValue, tag="type"):
    """A population trains side by side; the worse copy the better and explore from their states."""

    population_size: Annotated[SharedCount, UpTo(MAX_POPULATION), Field(examples=[4])]
    generations: Annotated[SharedCount, Field(examples=[5])]
    exploit: Annotated[ExploitStrategy, Field(discriminator="method")]
    explore: Annotated[ExploreStrategy, Field(discriminator="method")]
    options: PopulationOptions = field(default_factory=PopulationOptions)


class Custom(DocumentValue, tag="type"):
    """A strategy registered by name, which gets its config unchanged."""

    coordinator: NonEmptyText
    config: FrozenJSON
    options: NoOptions = field(default=NoOptions(), repr=False)


Strategy: TypeAlias = Local | DataParallel | ModelParallel | Federated | PopulationBased | Custom
StrategyField: TypeAlias = Annotated[Strategy, Field(discriminator="type")]
for _holder in (DataParallelOptions, FederatedOptions, PopulationOptions):
    rebuild_dataclass(_holder)  # type: ignore[arg-type]  # they name what stands after them


def describe(strategy: Strategy) -> str:
    """Return a strategy's short name for people, such as "DataParallel/AllReduce"."""
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
    """Return whether the strategy may use more than one worker."""
    return not isinstance(strategy, Local)


def levels(strategy: Strategy, path: str = "strategy") -> Iterator[tuple[str, Strategy]]:
    """Yield (path, strategy) for the strategy and all strategies nested in it, outermost first."""
    yield path, strategy
    inner: Strategy | None = getattr(strategy.options, "inner", None)
    if inner is not None:
        yield from levels(inner, f"{path}.options.inner")


def all_reduce_of(strategy: Strategy) -> str:
    """Return the all-reduce method with which the strategy, or one nested in it, sums gradients."""
    ways = (getattr(item.options, "all_reduce", DIRECT_ALL_REDUCE) for _, item in levels(strategy))
    return next((way for way in ways if way != DIRECT_ALL_REDUCE), DIRECT_ALL_REDUCE)


def num_shards_of(strategy: Strategy) -> int:
    """Return the number of logical shards that the innermost strategy cuts each batch into."""
    replicas = (level for _, level in levels(strategy) if isinstance(level, DataParallel))
    return next((level.num_replicas for level in replicas), 1)


def local_steps_of(strategy: Strategy) -> int | None:
    """Return the number of steps that a replica takes alone before the replicas are joined; None if
    gradients are combined in every step."""
    return strategy.options.local_steps if isinstance(strategy, DataParallel) else None


def partitions_state(strategy: Strategy) -> bool:
    """Return whether each worker keeps only a slice of the optimizer's state."""
    return isinstance(strategy, DataParallel) and strategy.options.partition_state != WHOLE_STATE


def partitions_parameters(strategy: Strategy) -> bool:
    """Return whether each worker keeps only a slice of the parameters, too."""
    return isinstance(strategy, DataParallel) and strategy.options.partition_state == FULL_SLICES


def fewest_mirrored(strategy: Strategy) -> int | None:
    """Return the smallest number of workers for which each also keeps its neighbour's slice, so
    that every slice exists twice; None: never."""
    if not isinstance(strategy, DataParallel) or not partitions_state(strategy):
        return None
    return {None: FEWEST_MIRRORED, 0: None, 1: 2}[strategy.options.mirror]


def upload_every_of(strategy: Strategy) -> int:
    """Return the number of commits per upload of state that only one worker holds; 1: each."""
    if not isinstance(strategy, DataParallel) or strategy.options.local_steps is None:
        return 1
    return strategy.options.upload_every or DEFAULT_UPLOAD_EVERY


def num_fragments_of(strategy: Strategy) -> int:
    """Return the number of fragments in which replicas are joined; 1 unless configured."""
    return strategy.options.fragments if isinstance(strategy, DataParallel) else 1


def are_models_apart(strategy: Strategy) -> bool:
    """Return whether a party's workers hold different models between two steps, as with gossip or
    local steps."""
    is_gossip = isinstance(strategy, DataParallel) and isinstance(
        strategy.aggregation, Decentralized
    )
    return is_gossip or local_steps_of(strategy) is not None


def needs_peers(strategy: Strategy) -> bool:
    """Return whether workers exchange tensors with each other under the strategy, at any level."""
    for _, level in levels(strategy):
        match level:
            case ModelParallel() if not isinstance(level.communication, DataStore):
                return True
            case DataParallel() if not isinstance(level.aggregation, ParameterServer):
                if level.num_replicas > 1:
                    return True
    return False


def is_cut(strategy: Strategy) -> bool:
    """Return whether the strategy, at any level, splits the model into stages on workers."""
    return any(isinstance(level, ModelParallel) for _, level in levels(strategy))


# ---- Regions ----
#
# In a federation of federations the clients of the outer one are regions, and those of each region
# are the clients of the strategy in `options.inner`, which is Federated as well. A region tells the
# sums of its clients, so the model is that of `options.regions` over the same tree.


def region_names(outer: Federated) -> tuple[str, ...]:
    """Return the names of a federation's regions, sorted; numbers if the job names none."""
    regions = outer.options.regions
    return tuple(sorted(regions)) if regions else tuple(map(str, range(outer.num_clients)))


def clients_by_region(outer: Federated, inner: Federated) -> tuple[tuple[int, ...], ...]:
    """Return the ascending client numbers of each region; clients are numbered from 0 over all
    regions. Named sites are numbered in order of name. Unless the job assigns clients, all regions
    have equally many."""
    regions, size = outer.options.regions, inner.num_clients
    if regions is None:
        return tuple(tuple(range(at * size, (at + 1) * size)) for at in range(outer.num_clients))
    numbers: dict[Any, int] = {name: at for at, name in enumerate(sorted(members_of(regions)))}
    if not are_named(regions):
        numbers = {number: number for number in numbers}
    return tuple(tuple(sorted(map(numbers.__getitem__, regions[name]))) for name in sorted(regions))


# ---- JSON form ----
#
# Variants are objects with their name under a tag key ("type", "method", "protocol"), except a
# RemoteTarget, which is an object with one key; the classes define the rest.


class _Document(Section):
    """A document whose one field is a strategy, so that error paths begin with the field's name."""

    strategy: StrategyField


def parse_strategy(source: object) -> Strategy:
    """Parse a strategy from JSON text or an already parsed object."""
    value = load_json(source, "strategy") if isinstance(source, str) else source
    return _Document.parse({"strategy": value}).strategy


def dump_strategy(strategy: Strategy) -> dict[str, JSON]:
    """Return the strategy as JSON, type first; without extras it is the form shared with Rust."""
    written = _Document(strategy=strategy).document()["strategy"]
    assert isinstance(written, dict)
    return written


def dumps_strategy(strategy: Strategy) -> str:
    """Return the compact JSON text of a strategy."""
    return dump_json(dump_strategy(strategy))


# ---- Demand for workers ----


def workers_used(strategy: Strategy) -> int:
    """Return the largest number of workers that a strategy can use at once; it may begin with
    fewer. A Custom strategy counts as 1, as its number is not known beforehand."""
    match strategy:
        case Local() | Custom():
            return 1
        case ModelParallel():
            return len(strategy.partitions)
        case DataParallel():
            return strategy.num_replicas * _inside(strategy.options.inner)
        case PopulationBased():
            return strategy.population_size * _inside(strategy.options.inner)
        case Federated():
            selection, num_clients = strategy.client_selection, strategy.num_clients
            if isinstance(selection, Random):
                num_clients = num_drawn(selection.fraction, num_clients)
            return num_clients * _inside(strategy.options.inner)
        case _:
            assert_never(strategy)


def _inside(inner: Strategy | None) -> int:
    return 1 if inner is None else workers_used(inner)

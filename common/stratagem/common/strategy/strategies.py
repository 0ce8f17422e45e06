"""This module defines the training strategies, made of the choices in choices.py, and their JSON
form.

Every class is frozen and checks its own ranges when it is made, so every existing strategy is
valid. The declared fields are the JSON form that is shared with the Rust programs; fields that
only this project has are under `options`.
"""

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Final, Literal, TypeAlias, assert_never

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
    Section,
    SharedCount,
    UpTo,
    ZeroToBelowOne,
)
from stratagem.common.schema.json import JSON, dump_json, load_json
from stratagem.common.schema.rules import differing, rule
from stratagem.common.strategy.choices import (
    AUTO,
    AllReduce,
    ClientSelection,
    CommunicationProtocol,
    DataStore,
    Decentralized,
    ExploitStrategy,
    ExploreStrategy,
    FederatedAggregation,
    FedYogi,
    GradientAggregation,
    ParameterServer,
    Partition,
    Pipeline,
    Random,
    ScheduleName,
    num_drawn,
)
from stratagem.common.strategy.federated import (
    DEFAULT_SERVER_LEARNING_RATE,
    REFUSE,
    FederatedOptions,
    check_weighing,
    too_few,
)
from stratagem.common.strategy.local_steps import (
    DEFAULT_MIX,
    DEFAULT_OUTER,
    DEFAULT_UPLOAD_EVERY,
    OuterField,
    OuterOptimizer,
)
from stratagem.common.strategy.nested_regions import check_nested
from stratagem.common.strategy.regions import check_regions
from stratagem.common.strategy.secure import against_secure_aggregation, wrong_numbers

# ---- Strategies ----

MAX_REPLICAS: Final = 16_384
MAX_CLIENTS: Final = 1_000_000
MAX_POPULATION: Final = 10_000

DIRECT_ALL_REDUCE: Final = "direct"
WHOLE_STATE: Final = "none"
FULL_SLICES: Final = "full"
FEWEST_MIRRORED: Final = 3
"""Workers of which each holds less with its neighbour's slice than with all of them."""


class Local(DocumentValue, tag="type"):
    """One worker trains on all data."""

    options: NoOptions = field(default=NoOptions(), repr=False)


class DataParallelOptions(DocumentValue, is_extras=True):
    """Options of how the replicas work together beyond the shared form.

    min_replicas: continue with as few workers as this while the others are away. all_reduce: of
    AllReduce; "direct" adds in a fixed order, "ring" and "native" (the backend's own) in one that
    depends on the workers. inner: what each replica is; ModelParallel makes it a pipeline over
    several workers. consensus_every: of Decentralized; after how many steps the nodes' distance to
    their mean is measured; None: only at the end of a segment. local_steps: how many steps each
    replica takes for itself before they are joined; None: gradients are joined in every step.
    outer: the optimizer that joins them. outer_bits: of each number of what a replica has moved,
    as it is exchanged; None: as it is. fragments: parts of the parameters, which are joined one
    after the other. overlap_steps: how many steps after it was cut a fragment is applied. mix: the
    share of its own parameters that a replica keeps then; None: half with an overlap, else nothing.
    upload_every: with local_steps, every how many commits what only one worker has is uploaded;
    None: every 10. partition_state: what each worker keeps a slice of, instead of all; "optimizer":
    the optimizer's state; "full": the parameters, too. mirror: of how many others a worker keeps
    the slices, too; None: of one, where three workers or more take part.
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
        """Return the share of its own parameters that a replica keeps where it is joined."""
        if self.mix is not None:
            return self.mix
        return DEFAULT_MIX if self.overlap_steps else 0.0

    @property
    def are_replicas_alike(self) -> bool:
        """Return whether all replicas are the same wherever a segment may end."""
        return self.fragments == 1 and not self.overlap_steps and not self.mixed_share

    @property
    def outer_optimizer(self) -> OuterOptimizer:
        """Return the optimizer that joins the replicas, named or not."""
        return DEFAULT_OUTER if self.outer is None else self.outer


class DataParallel(DocumentValue, tag="type"):
    """The model is replicated, each batch is split, gradients are combined every step."""

    num_replicas: Annotated[SharedCount, UpTo(MAX_REPLICAS), Field(examples=[2])]
    aggregation: Annotated[GradientAggregation, Field(discriminator="method")]
    options: DataParallelOptions = field(default_factory=DataParallelOptions)

    @rule
    def _number(self) -> Iterator[Violation]:
        if self.options.min_replicas > self.num_replicas:
            text = f"{self.options.min_replicas} is more than num_replicas, {self.num_replicas}"
            yield Violation("options.min_replicas", text)

    @rule
    def _aggregation(self) -> Iterator[Violation]:
        kind = type(self.aggregation).__name__
        if kind != "AllReduce" and self.options.all_reduce != DIRECT_ALL_REDUCE:
            yield Violation("options.all_reduce", f"{kind} has none; AllReduce has")
        if kind != "Decentralized" and self.options.consensus_every is not None:
            text = f"{kind} keeps all replicas equal; Decentralized does not"
            yield Violation("options.consensus_every", text)

    @rule
    def _slices(self) -> Iterator[Violation]:
        if self.options.partition_state == WHOLE_STATE:
            if self.options.mirror is not None:
                text = "each worker has the whole state already; belongs to partition_state"
                yield Violation("options.mirror", f"{text}: optimizer or full")
        elif reason := self._why_not_partitioned():
            yield Violation("options.partition_state", reason)

    def _why_not_partitioned(self) -> str:
        """Return why workers cannot keep slices of one state; "" where they can."""
        options = self.options
        if not isinstance(self.aggregation, AllReduce):
            kind = type(self.aggregation).__name__
            return f"{kind} brings every sum to every worker; AllReduce leaves slices with them"
        if options.all_reduce != DIRECT_ALL_REDUCE:
            return f"{options.all_reduce} all-reduce leaves no sums with workers; direct does"
        if options.local_steps is not None:
            return "replicas with local_steps have an optimizer each, of their own parameters"
        if not isinstance(options.inner, Local | DataParallel | None):
            return f"{describe(options.inner)} keeps a part of the state on each worker already"
        return ""

    @rule
    def _only_with_local_steps(self) -> Iterator[Violation]:
        if self.options.local_steps is None:
            names = ("outer", "outer_bits", "fragments", "overlap_steps", "mix", "upload_every")
            for name in differing(self.options, DataParallelOptions(), names):
                text = "has a meaning only together with local_steps"
                yield Violation(f"options.{name}", text)

    @rule
    def _local_steps(self) -> Iterator[Violation]:
        options = self.options
        if options.local_steps is None:
            return
        if options.inner is not None and not isinstance(options.inner, Local):
            text = f"{describe(options.inner)} cannot take local steps; a single worker, Local, can"
            yield Violation("options.inner", text)
        if isinstance(self.aggregation, Decentralized):
            text = "Decentralized joins nodes after every step; AllReduce and ParameterServer wait"
            yield Violation("options.local_steps", text)
        elif isinstance(self.aggregation, AllReduce) and options.all_reduce != DIRECT_ALL_REDUCE:
            text = f"{options.all_reduce} does not go together with local_steps; direct does"
            yield Violation("options.all_reduce", text)

    @rule
    def _fragments(self) -> Iterator[Violation]:
        options = self.options
        if options.local_steps is None:
            return
        period, rest = divmod(options.local_steps, options.fragments)
        if rest or not period:
            text = f"{options.fragments} does not divide local_steps, {options.local_steps}"
            yield Violation("options.fragments", text)
        elif options.overlap_steps > period:
            text = (
                f"{options.overlap_steps} is more than the {period} steps from one fragment to the "
                "next, local_steps / fragments"
            )
            yield Violation("options.overlap_steps", text)
        elif isinstance(self.aggregation, ParameterServer):
            names = ("fragments", "overlap_steps")
            for name in differing(options, DataParallelOptions(), names):
                text = "ParameterServer sums all parameters in one step; AllReduce has fragments"
                yield Violation(f"options.{name}", text)


class ModelParallelOptions(DocumentValue, is_extras=True):
    """schedule: in which order the stages work on micro-batches; of Pipeline only."""

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
    def _schedule(self) -> Iterator[Violation]:
        is_default = self.options.schedule == AUTO
        if not isinstance(self.communication, Pipeline) and not is_default:
            text = f"belongs to Pipeline only, not to {type(self.communication).__name__}"
            yield Violation("options.schedule", text)


class Federated(DocumentValue, tag="type"):
    """Clients train on data of their own; only models travel, and are combined every round."""

    num_clients: Annotated[SharedCount, UpTo(MAX_CLIENTS), Field(examples=[4])]
    rounds: Annotated[SharedCount, Field(examples=[5])]
    aggregation: Annotated[FederatedAggregation, Field(discriminator="method")]
    client_selection: Annotated[ClientSelection, Field(discriminator="method")]
    options: FederatedOptions = field(default_factory=FederatedOptions)

    @rule
    def _quorum(self) -> Iterator[Violation]:
        if type(self.options.quorum) is int and self.options.quorum > self.num_clients:
            text = f"{self.options.quorum} is more than num_clients, {self.num_clients}"
            yield Violation("options.quorum", text)

    @rule
    def _roster(self) -> Iterator[Violation]:
        roster = self.options.open_roster
        if roster is not None and roster.min_clients > self.num_clients:
            text = f"{roster.min_clients} is more than num_clients, {self.num_clients}"
            yield Violation("options.roster.min_clients", text)

    @rule
    def _server_optimizer(self) -> Iterator[Violation]:
        options, has_one = self.options, isinstance(self.aggregation, FedYogi)
        if not has_one and options.server_learning_rate != DEFAULT_SERVER_LEARNING_RATE:
            text = f"{type(self.aggregation).__name__} has no server optimizer; FedYogi has"
            yield Violation("options.server_learning_rate", text)
        if has_one and options.server_optimizer is not None:
            text = "FedYogi is a server optimizer already; use FedAvg or FedProx"
            yield Violation("options.server_optimizer", text)

    @rule
    def _drawn(self) -> Iterator[Violation]:
        options, name = self.options, type(self.client_selection).__name__
        if options.over_select and name != "Random":
            text = f"{name} leaves no clients to draw more from; Random does"
            yield Violation("options.over_select", text)
        if options.late_updates != REFUSE and name != "Random":
            text = f"{name} selects the same clients in every round, so no late one is left over"
            yield Violation("options.late_updates", f"{text}; Random does not")

    @rule
    def _robust(self) -> Iterator[Violation]:
        yield from too_few(self.options.robust, self._num_selected(), self.options.quorum)

    @rule
    def _weighing(self) -> Iterator[Violation]:
        yield from check_weighing(self.options, self.aggregation)

    @rule
    def _regions(self) -> Iterator[Violation]:
        if isinstance(self.options.inner, Federated):
            yield from check_nested(self, self.options.inner)
        else:
            yield from check_regions(self.options, self.num_clients)

    @rule
    def _secure_aggregation(self) -> Iterator[Violation]:
        spec = self.options.secure_aggregation
        if spec is not None:
            yield from against_secure_aggregation(self.options)
            yield from wrong_numbers(spec, self.num_clients, self._num_selected())

    def _num_selected(self) -> int:
        """Return the clients of a round; at most, where their tags decide."""
        if isinstance(self.client_selection, Random):
            return num_drawn(self.client_selection.fraction, self.num_clients)
        return self.num_clients


class PopulationOptions(DocumentValue, is_extras=True):
    """Options of how the population trains beyond its shared form.

    inner: how each member trains; Local unless given. asynchronous: a member evolves as soon as it
    has trained, against the newest scores of the others, without waiting for them.
    """

    inner: "StrategyField | None" = None
    asynchronous: bool = False


class PopulationBased(DocumentValue, tag="type"):
    """A population trains side by side; the worse copy the better and explore from there."""

    population_size: Annotated[SharedCount, UpTo(MAX_POPULATION), Field(examples=[4])]
    generations: Annotated[SharedCount, Field(examples=[5])]
    exploit: Annotated[ExploitStrategy, Field(discriminator="method")]
    explore: Annotated[ExploreStrategy, Field(discriminator="method")]
    options: PopulationOptions = field(default_factory=PopulationOptions)


class Custom(DocumentValue, tag="type"):
    """A strategy registered by name; its config is handed over untouched."""

    coordinator: NonEmptyText
    config: FrozenJSON
    options: NoOptions = field(default=NoOptions(), repr=False)


Strategy: TypeAlias = Local | DataParallel | ModelParallel | Federated | PopulationBased | Custom
StrategyField: TypeAlias = Annotated[Strategy, Field(discriminator="type")]
for _holder in (DataParallelOptions, FederatedOptions, PopulationOptions):
    # They name what stands after them, or in another module.
    rebuild_dataclass(_holder, _types_namespace={"StrategyField": StrategyField})  # type: ignore[arg-type]


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


def local_steps_of(strategy: Strategy) -> int | None:
    """Return how many steps each replica takes for itself before they are joined; None where the
    strategy has no such steps."""
    return strategy.options.local_steps if isinstance(strategy, DataParallel) else None


def partitions_state(strategy: Strategy) -> bool:
    """Return whether each worker keeps a slice of the optimizer's state instead of all of it."""
    return isinstance(strategy, DataParallel) and strategy.options.partition_state != WHOLE_STATE


def partitions_parameters(strategy: Strategy) -> bool:
    """Return whether each worker keeps a slice of the parameters, too, instead of all of them."""
    return isinstance(strategy, DataParallel) and strategy.options.partition_state == FULL_SLICES


def fewest_mirrored(strategy: Strategy) -> int | None:
    """Return from how many workers on each keeps the slice of its neighbour, too, so that a slice
    is there twice; None: never."""
    if not isinstance(strategy, DataParallel) or not partitions_state(strategy):
        return None
    return {None: FEWEST_MIRRORED, 0: None, 1: 2}[strategy.options.mirror]


def upload_every_of(strategy: Strategy) -> int:
    """Return every how many commits what only one worker has is uploaded, too; 1: with each."""
    if not isinstance(strategy, DataParallel) or strategy.options.local_steps is None:
        return 1
    return strategy.options.upload_every or DEFAULT_UPLOAD_EVERY


def num_fragments_of(strategy: Strategy) -> int:
    """Return in how many parts replicas are joined; one where nothing else is said."""
    return strategy.options.fragments if isinstance(strategy, DataParallel) else 1


def are_models_apart(strategy: Strategy) -> bool:
    """Return whether what a worker trains differs from what the others of its party train between
    two steps: nodes that gossip, and replicas that take local steps."""
    is_gossip = isinstance(strategy, DataParallel) and isinstance(
        strategy.aggregation, Decentralized
    )
    return is_gossip or local_steps_of(strategy) is not None


def needs_peers(strategy: Strategy) -> bool:
    """Return whether workers exchange tensors with each other, at any level, and not with the
    coordinator or an object store alone."""
    match strategy:
        case ModelParallel(communication=communication):
            own = not isinstance(communication, DataStore)
        case DataParallel(num_replicas=num_replicas, aggregation=aggregation):
            own = num_replicas > 1 and not isinstance(aggregation, ParameterServer)
        case _:
            own = False
    inner: Strategy | None = getattr(getattr(strategy, "options", None), "inner", None)
    return own or (inner is not None and needs_peers(inner))


def is_cut(strategy: Strategy) -> bool:
    """Return whether the strategy has, at any level, stages computed by different workers."""
    inner: Strategy | None = getattr(getattr(strategy, "options", None), "inner", None)
    return isinstance(strategy, ModelParallel) or (inner is not None and is_cut(inner))


# ---- JSON form ----
#
# Variants are objects with their name under a tag key ("type", "method", "protocol"), except a
# RemoteTarget, which is an object with one key; the classes define the rest.


class _Document(Section):
    """What holds a strategy, so that errors name it."""

    strategy: StrategyField


def parse_strategy(source: object) -> Strategy:
    """A strategy from its JSON text or from the parsed object."""
    value = load_json(source, "strategy") if isinstance(source, str) else source
    return _Document.parse({"strategy": value}).strategy


def dump_strategy(strategy: Strategy) -> dict[str, JSON]:
    """The JSON object, tag first, then the fields in order; without extras the shared form."""
    written = _Document(strategy=strategy).document()["strategy"]
    assert isinstance(written, dict)
    return written


def dumps_strategy(strategy: Strategy) -> str:
    """The compact JSON text of a strategy."""
    return dump_json(dump_strategy(strategy))


# ---- Demand for workers ----


def workers_used(strategy: Strategy) -> int:
    """Return the most workers that a strategy can use at once.

    It may well begin with fewer. A Custom strategy says nothing of it beforehand, and counts as 1.
    """
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

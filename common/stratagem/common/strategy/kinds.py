"""The training strategies themselves, made of the choices in `choices`.

Every class is frozen and checks its own ranges when it is made, so a strategy that exists is
valid. The fields as declared are the JSON form that is shared with the Rust programs; what is ours
alone stands under `options`. Does not know how any strategy is carried out.
"""

from dataclasses import field
from typing import Annotated, Final, Literal, TypeAlias, assert_never

from pydantic import Field
from pydantic.dataclasses import rebuild_dataclass

from stratagem.common.base.errors import InvalidInputError, Violation
from stratagem.common.schema.document import DocumentValue, NoOptions, refuse
from stratagem.common.schema.field_types import (
    MAX_UNSIGNED,
    FrozenJSON,
    NonEmptyItems,
    NonEmptyText,
    SharedCount,
    UpTo,
    ZeroToBelowOne,
)
from stratagem.common.strategy.choices import (
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
    num_drawn,
)
from stratagem.common.strategy.federated_options import (
    DEFAULT_SERVER_LEARNING_RATE,
    REFUSE,
    FederatedOptions,
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
from stratagem.common.strategy.robust import too_few
from stratagem.common.strategy.schedule_names import AUTO, ScheduleName
from stratagem.common.strategy.secure_options import against_secure_aggregation
from stratagem.common.strategy.weighing import check_weighing

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

    num_replicas: Annotated[SharedCount, UpTo(MAX_REPLICAS)]
    aggregation: Annotated[GradientAggregation, Field(discriminator="method")]
    options: DataParallelOptions = field(default_factory=DataParallelOptions)

    def __post_init__(self) -> None:
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
        self._check_local_steps(is_gossip=is_gossip)
        if self.options.partition_state != WHOLE_STATE and (reason := self._why_not_partitioned()):
            raise InvalidInputError.at("options.partition_state", reason)
        if self.options.mirror is not None and self.options.partition_state == WHOLE_STATE:
            text = "each worker has the whole state already; belongs to partition_state"
            raise InvalidInputError.at("options.mirror", f"{text}: optimizer or full")

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

    def _check_local_steps(self, *, is_gossip: bool) -> None:
        """What goes together with local steps, and what only with them."""
        options = self.options
        if options.local_steps is None:
            for name in (
                *("outer", "outer_bits", "fragments", "overlap_steps", "mix"),
                "upload_every",
            ):
                if getattr(options, name) != getattr(DataParallelOptions(), name):
                    text = "has a meaning only together with local_steps"
                    raise InvalidInputError.at(f"options.{name}", text)
            return
        if is_gossip:
            text = "Decentralized joins nodes after every step; AllReduce and ParameterServer wait"
            raise InvalidInputError.at("options.local_steps", text)
        if options.all_reduce != DIRECT_ALL_REDUCE:
            text = f"{options.all_reduce} does not go together with local_steps; direct does"
            raise InvalidInputError.at("options.all_reduce", text)
        if options.inner is not None and not isinstance(options.inner, Local):
            text = f"{describe(options.inner)} cannot take local steps; a single worker, Local, can"
            raise InvalidInputError.at("options.inner", text)
        self._check_fragments(options.local_steps)

    def _check_fragments(self, local_steps: int) -> None:
        """What goes together with the parts of a round."""
        options = self.options
        period, rest = divmod(local_steps, options.fragments)
        if rest or not period:
            text = f"{options.fragments} does not divide local_steps, {local_steps}"
            raise InvalidInputError.at("options.fragments", text)
        if options.overlap_steps > period:
            text = (
                f"{options.overlap_steps} is more than the {period} steps from one fragment to the "
                "next, local_steps / fragments"
            )
            raise InvalidInputError.at("options.overlap_steps", text)
        for name in ("fragments", "overlap_steps"):
            is_set = getattr(options, name) != getattr(DataParallelOptions(), name)
            if is_set and isinstance(self.aggregation, ParameterServer):
                text = "ParameterServer sums all parameters in one step; AllReduce has fragments"
                raise InvalidInputError.at(f"options.{name}", text)


class ModelParallelOptions(DocumentValue, is_extras=True):
    """schedule: in which order the stages work on micro-batches; of Pipeline only."""

    schedule: ScheduleName = AUTO


class ModelParallel(DocumentValue, tag="type"):
    """The nodes of the model are spread over workers."""

    partitions: NonEmptyItems[Partition]
    communication: Annotated[CommunicationProtocol, Field(discriminator="protocol")]
    options: ModelParallelOptions = ModelParallelOptions()

    def __post_init__(self) -> None:
        is_default = self.options == ModelParallelOptions()
        if not isinstance(self.communication, Pipeline) and not is_default:
            text = f"belongs to Pipeline only, not to {type(self.communication).__name__}"
            raise InvalidInputError.at("options.schedule", text)


class Federated(DocumentValue, tag="type"):
    """Clients train on data of their own; only models travel, and are combined every round."""

    num_clients: Annotated[SharedCount, UpTo(MAX_CLIENTS)]
    rounds: SharedCount
    aggregation: Annotated[FederatedAggregation, Field(discriminator="method")]
    client_selection: Annotated[ClientSelection, Field(discriminator="method")]
    options: FederatedOptions = field(default_factory=FederatedOptions)

    def __post_init__(self) -> None:
        options, violations = self.options, []
        if type(options.quorum) is int and options.quorum > self.num_clients:
            text = f"{options.quorum} is more than num_clients, {self.num_clients}"
            violations.append(Violation("options.quorum", text))
        roster = options.open_roster
        if roster is not None and roster.min_clients > self.num_clients:
            text = f"{roster.min_clients} is more than num_clients, {self.num_clients}"
            violations.append(Violation("options.roster.min_clients", text))
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
        if options.late_updates != REFUSE and not isinstance(self.client_selection, Random):
            name = type(self.client_selection).__name__
            text = f"{name} selects the same clients in every round, so no late one is left over"
            violations.append(Violation("options.late_updates", f"{text}; Random does not"))
        violations += too_few(options.robust, self._num_selected(), options.quorum)
        violations += check_weighing(options, self.aggregation)
        if isinstance(options.inner, Federated):
            violations += check_nested(self, options.inner)
        else:
            violations += check_regions(options, self.num_clients)
        secure = options.secure_aggregation, options, self.num_clients, self._num_selected()
        violations += against_secure_aggregation(*secure)
        refuse(violations)

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

    population_size: Annotated[SharedCount, UpTo(MAX_POPULATION)]
    generations: SharedCount
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
